//! The safetensors container: an eight-byte length, a JSON header, and the bytes of the tensors.
//!
//! The `safetensors` crate is not used because its errors name neither tensors nor numbers. This reader accepts the
//! same files: byte ranges must cover the data exactly, without holes or overlap.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;
use roll_core::{DType, StateDict, Tensor};
use roll_external::files;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};

use crate::error::WeightsError;
use crate::tensor_info::TensorInfo;

/// Longest header in bytes: the format's own limit. A header is parsed into memory, so its length must be bounded.
pub(crate) const MAX_HEADER: u64 = 100_000_000;
/// Bytes of the header's length, which begin the file.
const LENGTH_BYTES: usize = size_of::<u64>();

/// An open safetensors file, memory-mapped.
///
/// The file must not be truncated while it is mapped. Replace weight files by renaming a new file over the old one, as
/// [`crate::save_safetensors`] does.
pub(crate) struct SafetensorsFile {
    map: Arc<Mmap>,
    #[cfg_attr(not(unix), allow(dead_code))]
    file: File,
}

/// The entry of a tensor in the header.
#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    /// Begin and end of the tensor's bytes, counted from the end of the header.
    data_offsets: [u64; 2],
}

/// The header as a list in the order of the file, in which a duplicate name can be found. A map would hide it.
#[derive(Default)]
struct Header {
    tensors: Vec<(String, Entry)>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Header;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut header = Header::default();
                while let Some(name) = map.next_key::<String>()? {
                    match name.as_str() {
                        "__metadata__" => header.metadata = map.next_value()?,
                        _ => header.tensors.push((name, map.next_value()?)),
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(InOrder)
    }
}

impl SafetensorsFile {
    /// Maps the file and parses its header.
    pub fn open(path: &Path) -> Result<(Self, ParsedHeader), WeightsError> {
        let file = files::open(path).map_err(WeightsError::io("read", path))?;
        let length = file.metadata().map_err(WeightsError::io("read", path))?.len();
        if length < LENGTH_BYTES as u64 {
            return Err(truncated(path, length));
        }
        // SAFETY: the map is read-only; the type documents the caveat about other processes.
        let map = unsafe { Mmap::map(&file) }.map_err(WeightsError::io("map", path))?;
        let header = parse(path, &map)?;
        Ok((Self { map: Arc::new(map), file }, header))
    }

    /// The bytes of a range, which share the map.
    pub fn slice(&self, range: Range<usize>) -> MapSlice {
        MapSlice { map: self.map.clone(), range }
    }

    /// Fills `buffer` with the bytes from `start` on. They are read from the file and not through the map, whose pages
    /// would count as this process's memory.
    pub fn read(&self, start: usize, buffer: &mut [u8]) -> std::io::Result<()> {
        #[cfg(unix)]
        return std::os::unix::fs::FileExt::read_exact_at(&self.file, buffer, start as u64);
        #[cfg(not(unix))]
        {
            buffer.copy_from_slice(&self.map[start..start + buffer.len()]);
            Ok(())
        }
    }

    /// Releases the memory of a range: the system drops the mapped pages and reads them again at their next use.
    #[cfg_attr(not(unix), allow(unused_variables))]
    pub fn release(&self, range: &Range<usize>) {
        #[cfg(unix)]
        if !range.is_empty() {
            // SAFETY: the map is read-only and backed by the file, so dropped pages are read again with the same
            // contents; the type documents that the file must not change. A refusal costs memory, nothing else.
            let _ = unsafe {
                self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len())
            };
        }
    }
}

/// The contents of a header.
pub(crate) struct ParsedHeader {
    /// The tensors by name.
    pub tensors: BTreeMap<String, TensorInfo>,
    /// The `__metadata__`.
    pub metadata: BTreeMap<String, String>,
}

/// The error of a file of `length` bytes, which is too short for the length of a header.
fn truncated(path: &Path, length: u64) -> WeightsError {
    WeightsError::invalid(path, format!("truncated: expected {LENGTH_BYTES} bytes, found {length}"))
}

/// Parses the header of a file. `bytes` is the whole file.
fn parse(path: &Path, bytes: &[u8]) -> Result<ParsedHeader, WeightsError> {
    let length = bytes.len() as u64;
    let prefix = bytes.first_chunk::<LENGTH_BYTES>().ok_or_else(|| truncated(path, length))?;
    let header_length = u64::from_le_bytes(*prefix);
    let longest = MAX_HEADER.min(length - LENGTH_BYTES as u64);
    if header_length > longest {
        let problem = format!(
            "not a safetensors file, or one that was cut off: the header claims to have {header_length} bytes, \
             expected at most {longest}"
        );
        return Err(WeightsError::invalid(path, problem));
    }
    let data_start = LENGTH_BYTES + header_length as usize; // cannot overflow, because the header is within the file
    let invalid = |problem: String| WeightsError::invalid(path, problem);
    let text = std::str::from_utf8(&bytes[LENGTH_BYTES..data_start])
        .map_err(|e| invalid(format!("the header is not UTF-8: {e}")))?;
    let header: Header =
        serde_json::from_str(text).map_err(|e| invalid(format!("the header is not a safetensors header: {e}")))?;
    let tensors = locate(path, header.tensors, data_start, length)?;
    Ok(ParsedHeader { tensors, metadata: header.metadata })
}

/// Reads the tensors of a safetensors file in memory. Error messages call the file `name`.
pub fn parse_safetensors(name: &str, bytes: &[u8]) -> Result<StateDict, WeightsError> {
    let path = Path::new(name);
    let mut state = StateDict::new();
    for (tensor_name, info) in parse(path, bytes)?.tensors {
        let dtype = info.supported_dtype(path, &tensor_name)?;
        let tensor = Tensor::from_bytes(dtype, info.shape, Arc::new(bytes[info.range].to_vec()));
        let tensor = tensor.map_err(|e| WeightsError::tensor(path, &tensor_name, e))?;
        state.insert(tensor_name, tensor);
    }
    Ok(state)
}

/// Part of a mapped file, which keeps the map alive.
pub(crate) struct MapSlice {
    map: Arc<Mmap>,
    range: Range<usize>,
}

impl AsRef<[u8]> for MapSlice {
    fn as_ref(&self) -> &[u8] {
        &self.map[self.range.clone()]
    }
}

/// Checks the byte range of every tensor against its shape, the file and the other tensors, and returns the tensors
/// with their places in the file. `data_start` is the offset of the data in the file, `length` the length of the file.
fn locate(
    path: &Path,
    entries: Vec<(String, Entry)>,
    data_start: usize,
    length: u64,
) -> Result<BTreeMap<String, TensorInfo>, WeightsError> {
    let data_length = length - data_start as u64;
    let mut ranges: Vec<(u64, u64, String)> = Vec::with_capacity(entries.len());
    let mut tensors = BTreeMap::new();
    for (name, entry) in entries {
        let [begin, end] = entry.data_offsets;
        let tensor_error = |problem: String| Err(WeightsError::tensor(path, &name, problem));
        if begin > end {
            return tensor_error(format!("expected offsets in ascending order, found offsets {begin}..{end}"));
        }
        let elements = entry.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
        let bits = element_bits(&entry.dtype);
        // For an unknown dtype the assumed 8 bits only serve to find a shape that overflows.
        let bytes = elements.and_then(|n| n.checked_mul(bits.unwrap_or(8))).map(|b| b.div_ceil(8));
        let (Some(elements), Some(bytes)) = (elements, bytes) else {
            return tensor_error(format!("the shape {:?} overflows, expected a size below 2^64 bytes", entry.shape));
        };
        if bits.is_some() && end - begin != bytes {
            let expected = format!("{bytes} bytes for {elements} elements of {}", entry.dtype);
            return tensor_error(format!("expected {expected}, found offsets {begin}..{end}"));
        }
        if end > data_length {
            let expected = end.saturating_add(data_start as u64);
            return tensor_error(format!(
                "truncated: expected a file of {expected} bytes, found {length}: a download or a copy that was not \
                 finished; fetch the file again"
            ));
        }
        let dtype = dtype_named(&entry.dtype);
        // An axis fits into usize, because the product of all axes is within the file. Only an empty tensor may have a
        // longer axis next to one of 0.
        let shape = entry.shape.iter().map(|&d| usize::try_from(d).unwrap_or(usize::MAX)).collect();
        let range = data_start + begin as usize..data_start + end as usize;
        let info = TensorInfo { dtype, stored: entry.dtype.to_lowercase(), shape, range };
        if tensors.insert(name.clone(), info).is_some() {
            return tensor_error("the header has it twice".into());
        }
        ranges.push((begin, end, name));
    }
    check_coverage(path, ranges, data_length)?;
    Ok(tensors)
}

/// Fails unless the ranges of bytes (begin, end, name of the tensor) follow each other without holes or overlap, and
/// cover all data.
fn check_coverage(path: &Path, mut ranges: Vec<(u64, u64, String)>, data_length: u64) -> Result<(), WeightsError> {
    ranges.sort();
    let mut covered = 0;
    for (begin, end, tensor) in ranges {
        if begin != covered {
            let what = if begin < covered { "overlapping another tensor" } else { "after a hole" };
            let problem = format!(
                "expected its bytes to begin at {covered}, where the previous tensor ends, found offsets {begin}..{end}, \
                 {what}"
            );
            return Err(WeightsError::tensor(path, &tensor, problem));
        }
        covered = end;
    }
    if covered != data_length {
        let problem = format!("expected {covered} bytes of tensors after the header, found {data_length}");
        return Err(WeightsError::invalid(path, problem));
    }
    Ok(())
}

/// The dtype with this name in a header; `None` if it is not supported.
pub(crate) fn dtype_named(name: &str) -> Option<DType> {
    const ALL: [DType; 7] = [DType::F32, DType::Bf16, DType::F16, DType::I64, DType::I32, DType::U8, DType::Bool];
    ALL.into_iter().find(|dtype| dtype_name(*dtype) == name)
}

/// The name of a dtype in a header: `BF16`.
pub(crate) fn dtype_name(dtype: DType) -> String {
    dtype.to_string().to_uppercase()
}

/// Size of an element in bits. `None` for dtypes newer than this list, whose size cannot be checked.
fn element_bits(name: &str) -> Option<u64> {
    Some(match name {
        "F64" | "I64" | "U64" | "C64" => 64,
        "F32" | "I32" | "U32" => 32,
        "F16" | "BF16" | "I16" | "U16" => 16,
        "I8" | "U8" | "BOOL" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => 8,
        "F6_E2M3" | "F6_E3M2" => 6,
        "F4" => 4,
        _ => return None,
    })
}
