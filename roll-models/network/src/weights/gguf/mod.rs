//! Reads GGUF files: metadata and (often quantised) tensors of a language model in one file.
//!
//! No crate is used because every length that a file claims must be checked against the file, and an error must name
//! the key or the tensor.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use roll_backends::blocks::{self, BlockMatrix, BlockType};
use roll_core::Tensor;
use roll_external::files;

use super::WeightsError;

/// Greatest number of dimensions of a tensor: ggml has four, files of video models for stable-diffusion.cpp five.
const MAX_RANK: u32 = 5;
/// Alignment of the data in bytes, if the file has no `general.alignment`.
const ALIGNMENT: u64 = 32;
/// Least number of bytes of a tensor's entry in the header: length of its name, rank, one dimension (tensors of models
/// have at least one), type, offset.
const MIN_TENSOR_BYTES: usize = 8 + 4 + 8 + 4 + 8;
/// Least number of bytes of an entry of the metadata: length of its key, type, value.
const MIN_VALUE_BYTES: usize = 8 + 4 + 1;
// Type codes of metadata values; `Reader::scalar` has the codes of integers and booleans.
const F32: u32 = 6;
const STRING: u32 = 8;
const ARRAY: u32 = 9;
const F64: u32 = 12;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// An integer, or a boolean as 0 or 1.
    Integer(i64),
    /// A floating-point number.
    Float(f64),
    /// Text.
    Text(String),
    /// A list of integers.
    Integers(Vec<i64>),
    /// A list of floating-point numbers.
    Floats(Vec<f64>),
    /// A list of texts.
    Texts(Vec<String>),
}

/// A tensor's entry in the header.
struct TensorHeader {
    /// Code of the type of elements or blocks; see [`BlockType::of`].
    type_code: u32,
    /// Shape with the outermost dimension first; the file stores the reverse.
    shape: Vec<usize>,
    /// Position of the first byte, from the beginning of the data.
    offset: u64,
}

/// Type, shape and position of a tensor.
#[derive(Clone, Debug, PartialEq)]
struct TensorLocation {
    type_code: u32,
    shape: Vec<usize>,
    /// Position in the file.
    bytes: Range<usize>,
}

/// An open GGUF file, memory-mapped.
pub struct GgufFile {
    path: PathBuf,
    map: Mmap,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, TensorLocation>,
}

impl GgufFile {
    /// Opens a file of version 2 or 3. The whole header is checked here; no tensor is read.
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        let file = files::open_binary(path).map_err(WeightsError::io("read", path))?;
        // SAFETY: the map is read-only; like every mapped weight file, the file must not be truncated while it is
        // mapped.
        let map = unsafe { Mmap::map(&file) }.map_err(WeightsError::io("map", path))?;
        let mut reader = Reader { bytes: &map, position: 0 };
        let (metadata, tensors) = reader
            .header()
            .map_err(|problem| WeightsError::invalid(path, format!("not a GGUF file that can be read: {problem}")))?;
        Ok(Self { path: path.into(), metadata, tensors, map })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A value of the metadata.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// An integer of the metadata.
    pub fn integer(&self, key: &str) -> Option<i64> {
        match self.value(key)? {
            Value::Integer(value) => Some(*value),
            _ => None,
        }
    }

    /// An integer or floating-point number of the metadata.
    pub fn number(&self, key: &str) -> Option<f64> {
        match self.value(key)? {
            Value::Integer(value) => Some(*value as f64),
            Value::Float(value) => Some(*value),
            _ => None,
        }
    }

    /// A text of the metadata.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.value(key)? {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Names of the tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Shape of a tensor, outermost dimension first.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|location| location.shape.as_slice())
    }

    /// Name of the type of a tensor's elements or blocks, such as `F32` or `Q4_K`.
    pub fn type_name(&self, name: &str) -> Option<String> {
        self.tensors.get(name).map(|location| blocks::name_of(location.type_code))
    }

    /// Reads a tensor and dequantises it to f32.
    pub fn tensor(&self, name: &str) -> Result<Tensor, WeightsError> {
        let (location, kind) = self.locate(name)?;
        let values = kind.decode(&self.map[location.bytes.clone()]);
        Tensor::new(values, location.shape.clone()).map_err(|e| WeightsError::tensor(&self.path, name, e))
    }

    /// Copies a quantised matrix in the file's block format. Returns `None` if the tensor is not quantised or not a
    /// matrix.
    pub fn blocks(&self, name: &str) -> Result<Option<BlockMatrix>, WeightsError> {
        let (location, kind) = self.locate(name)?;
        let Ok(shape) = <[usize; 2]>::try_from(location.shape.as_slice()) else { return Ok(None) };
        if !kind.is_quantised() {
            return Ok(None);
        }
        let bytes = self.map[location.bytes.clone()].to_vec();
        BlockMatrix::new(kind, bytes, shape).map(Some).map_err(|e| WeightsError::tensor(&self.path, name, e))
    }

    /// Number of bytes that [`GgufFile::blocks`] would copy; nothing is read.
    pub fn block_bytes(&self, name: &str) -> Result<Option<usize>, WeightsError> {
        let (location, kind) = self.locate(name)?;
        Ok((kind.is_quantised() && location.shape.len() == 2).then_some(location.bytes.len()))
    }

    /// Returns position and type of a tensor. Fails if the tensor is missing or its type is not supported.
    fn locate(&self, name: &str) -> Result<(&TensorLocation, BlockType), WeightsError> {
        let location = self.tensors.get(name).ok_or_else(|| WeightsError::missing(&self.path, name))?;
        let unsupported = || {
            // ggml's type codes are all below 64.
            let known: Vec<String> =
                (0..64).filter(|code| BlockType::of(*code).is_some()).map(blocks::name_of).collect();
            let found = blocks::name_of(location.type_code);
            let problem = format!("the type {found} is not supported; known: {}", known.join(", "));
            WeightsError::tensor(&self.path, name, problem)
        };
        Ok((location, BlockType::of(location.type_code).ok_or_else(unsupported)?))
    }
}

/// Metadata and tensors by name.
type Header = (BTreeMap<String, Value>, BTreeMap<String, TensorLocation>);

/// A cursor over the header. Every length is compared with the remaining bytes.
struct Reader<'a> {
    /// The whole file.
    bytes: &'a [u8],
    /// Position of the next byte that is read.
    position: usize,
}

impl Reader<'_> {
    /// Reads the header: version, numbers of tensors and values, metadata, entries of tensors. The data follow.
    fn header(&mut self) -> Result<Header, String> {
        if self.take(4)? != b"GGUF" {
            return Err("it does not begin with `GGUF`".into());
        }
        let version = self.u32()?;
        if !(2..=3).contains(&version) {
            return Err(format!("expected version 2 or 3, found {version}"));
        }
        let (tensor_count, value_count) = (self.count(MIN_TENSOR_BYTES)?, self.count(MIN_VALUE_BYTES)?);
        let mut metadata = BTreeMap::new();
        for _ in 0..value_count {
            let key = self.text()?;
            let value = self.value().map_err(|problem| format!("`{key}`: {problem}"))?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(format!("the key `{key}` appears twice"));
            }
        }
        let mut tensors = Vec::new();
        for _ in 0..tensor_count {
            let name = self.text()?;
            let tensor = self.tensor().map_err(|problem| format!("tensor `{name}`: {problem}"))?;
            tensors.push((name, tensor));
        }
        let alignment = match metadata.get("general.alignment") {
            None => ALIGNMENT,
            Some(Value::Integer(n)) if *n > 0 && *n % 8 == 0 => *n as u64,
            Some(other) => return Err(format!("`general.alignment`: expected a multiple of 8, found {other:?}")),
        };
        let data_start = (self.position as u64).next_multiple_of(alignment);
        let mut locations = BTreeMap::new();
        for (name, tensor) in tensors {
            let bytes =
                self.byte_range(data_start, &tensor).map_err(|problem| format!("tensor `{name}`: {problem}"))?;
            let TensorHeader { type_code, shape, .. } = tensor;
            if locations.insert(name.clone(), TensorLocation { type_code, shape, bytes }).is_some() {
                return Err(format!("the tensor `{name}` appears twice"));
            }
        }
        Ok((metadata, locations))
    }

    /// Returns the byte range of a tensor in the file, whose data begin at `data_start`. The range is empty if the type
    /// is unknown, because the size is then unknown, too; [`GgufFile::locate`] refuses such a tensor.
    fn byte_range(&self, data_start: u64, tensor: &TensorHeader) -> Result<Range<usize>, String> {
        let TensorHeader { type_code, shape, offset } = tensor;
        let elements = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
        let elements = elements.ok_or_else(|| format!("the shape {shape:?} overflows"))?;
        let Some(kind) = BlockType::of(*type_code) else { return Ok(0..0) };
        let row = shape.last().copied().unwrap_or(1);
        if row % kind.values() != 0 {
            return Err(format!("rows of {row} values cannot be stored in blocks of {}", kind.values()));
        }
        let length = (elements / kind.values()).checked_mul(kind.bytes());
        let begin = data_start.checked_add(*offset).and_then(|b| usize::try_from(b).ok());
        let range = begin.zip(length).and_then(|(begin, length)| Some(begin..begin.checked_add(length)?));
        range.filter(|r| r.end <= self.bytes.len()).ok_or_else(|| {
            format!(
                "its data, from offset {offset} on, reaches beyond the end of the file of {} bytes",
                self.bytes.len()
            )
        })
    }

    /// Reads a tensor's entry after its name: rank, dimensions, type, offset.
    fn tensor(&mut self) -> Result<TensorHeader, String> {
        let rank = self.u32()?;
        if rank > MAX_RANK {
            return Err(format!("expected at most {MAX_RANK} dimensions, found {rank}"));
        }
        let mut shape = Vec::new();
        for _ in 0..rank {
            let size = self.u64()?;
            shape.push(usize::try_from(size).map_err(|_| format!("the dimension {size} is too large"))?);
        }
        shape.reverse();
        Ok(TensorHeader { type_code: self.u32()?, shape, offset: self.u64()? })
    }

    /// Reads a value of the metadata: its type, then the value.
    fn value(&mut self) -> Result<Value, String> {
        match self.u32()? {
            STRING => Ok(Value::Text(self.text()?)),
            ARRAY => self.list(),
            kind => self.scalar(kind),
        }
    }

    /// Reads a list: the type of its items, their number, then the items.
    fn list(&mut self) -> Result<Value, String> {
        match self.u32()? {
            STRING => {
                // A text has at least the eight bytes of its length.
                let n = self.count(8)?;
                (0..n).map(|_| self.text()).collect::<Result<_, _>>().map(Value::Texts)
            }
            ARRAY => Err("lists of lists are not supported".into()),
            // An F32 has four bytes, an F64 more.
            kind @ (F32 | F64) => self
                .scalars(kind, 4, |value| match value {
                    Value::Float(value) => Some(value),
                    _ => None,
                })
                .map(Value::Floats),
            // The smallest integers have one byte.
            kind => self
                .scalars(kind, 1, |value| match value {
                    Value::Integer(value) => Some(value),
                    _ => None,
                })
                .map(Value::Integers),
        }
    }

    /// Reads a list of scalars of the type `kind`, which take at least `min_bytes` bytes each.
    fn scalars<T>(&mut self, kind: u32, min_bytes: usize, convert: fn(Value) -> Option<T>) -> Result<Vec<T>, String> {
        let n = self.count(min_bytes)?;
        (0..n)
            .map(|_| {
                convert(self.scalar(kind)?).ok_or_else(|| format!("lists of the value type {kind} are not supported"))
            })
            .collect()
    }

    /// Reads a number or boolean of the type `kind`, by GGUF's type codes.
    fn scalar(&mut self, kind: u32) -> Result<Value, String> {
        Ok(match kind {
            // Unsigned byte, boolean.
            0 | 7 => Value::Integer(i64::from(self.array::<1>()?[0])),
            1 => Value::Integer(i64::from(i8::from_le_bytes(self.array()?))),
            2 => Value::Integer(i64::from(u16::from_le_bytes(self.array()?))),
            3 => Value::Integer(i64::from(i16::from_le_bytes(self.array()?))),
            4 => Value::Integer(i64::from(self.u32()?)),
            5 => Value::Integer(i64::from(i32::from_le_bytes(self.array()?))),
            F32 => Value::Float(f64::from(f32::from_le_bytes(self.array()?))),
            // Unsigned, 64 bits.
            10 => {
                let value = self.u64()?;
                Value::Integer(i64::try_from(value).map_err(|_| format!("{value} is too large"))?)
            }
            11 => Value::Integer(i64::from_le_bytes(self.array()?)),
            F64 => Value::Float(f64::from_le_bytes(self.array()?)),
            other => return Err(format!("the value type {other} is unknown")),
        })
    }

    fn text(&mut self) -> Result<String, String> {
        let n = self.count(1)?;
        let bytes = self.take(n)?;
        String::from_utf8(bytes.to_vec()).map_err(|e| format!("a text is not UTF-8: {e}"))
    }

    /// Reads the number of items that follow and take at least `min_bytes` bytes each. Fails if the file is too short
    /// for so many items.
    fn count(&mut self, min_bytes: usize) -> Result<usize, String> {
        let n = self.u64()?;
        let rest = self.bytes.len() - self.position;
        match usize::try_from(n).ok().filter(|n| n.checked_mul(min_bytes).is_some_and(|needed| needed <= rest)) {
            Some(n) => Ok(n),
            None => Err(format!("it announces {n} items, but only {rest} bytes follow")),
        }
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn take(&mut self, n: usize) -> Result<&[u8], String> {
        let bytes = self.bytes.get(self.position..).and_then(|rest| rest.get(..n));
        let bytes = bytes.ok_or_else(|| format!("it ends after {} bytes, within the header", self.bytes.len()))?;
        self.position += n;
        Ok(bytes)
    }
}
