//! One weight file, safetensors or a torch checkpoint.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pytorch_reader::PytorchReader;
use roll_core::Tensor;
use roll_external::files;

use crate::error::WeightsError;
use crate::pth;
use crate::safetensors::{MAX_HEADER, ParsedHeader, SafetensorsFile};
use crate::tensor_info::TensorInfo;

/// An open weight file of either format: names, shapes and dtypes are known, tensors are read on demand.
pub struct WeightFile {
    path: PathBuf,
    tensors: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
    contents: Contents,
}

/// The open file, by its format.
enum Contents {
    Safetensors(SafetensorsFile),
    Torch(PytorchReader),
}

impl WeightFile {
    /// Opens a safetensors file (memory-mapped) or a torch checkpoint (`.pth`, `.pt`, `.bin`, `.ckpt`; parsed, never
    /// executed). The whole header is checked here; no tensor is read. Fails if the contents contradict the extension.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, WeightsError> {
        let path = path.as_ref();
        let metadata = std::fs::metadata(path).map_err(WeightsError::io("read", path))?;
        if metadata.is_dir() {
            return Err(WeightsError::Directory { path: path.into(), hint: String::new() });
        }
        let extension = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
        let unexpected = |expected: &str, found: &str| {
            Err(WeightsError::Format { path: path.into(), expected: expected.into(), found: found.into() })
        };
        let known_names = "a weight file called *.safetensors, *.pth, *.pt, *.bin or *.ckpt";
        let a_gguf =
            "a GGUF file, which language models alone are read from (`model.model_path`): take the safetensors";
        // Compares extension and contents. Contents that are not recognised are left to the parser, whose error says
        // more.
        match (extension.as_str(), sniff(path)?) {
            ("gguf", _) | (_, Format::Gguf) => unexpected(known_names, a_gguf),
            ("safetensors", Format::Torch) => unexpected("a safetensors file, as its name says", "a torch checkpoint"),
            ("safetensors", _) => {
                let (file, ParsedHeader { tensors, metadata }) = SafetensorsFile::open(path)?;
                Ok(Self { path: path.into(), tensors, metadata, contents: Contents::Safetensors(file) })
            }
            ("pth" | "pt" | "bin" | "ckpt", Format::Safetensors) => {
                unexpected("a torch checkpoint, as its name says", "a safetensors file; rename it")
            }
            ("pth" | "pt" | "bin" | "ckpt", _) => {
                let (reader, tensors) = pth::open(path)?;
                Ok(Self { path: path.into(), tensors, metadata: BTreeMap::new(), contents: Contents::Torch(reader) })
            }
            ("", _) => unexpected(known_names, "a name without extension"),
            (other, _) => unexpected(known_names, &format!("the extension `.{other}`")),
        }
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names of the tensors.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Shape and dtype of a tensor.
    pub fn info(&self, key: &str) -> Option<&TensorInfo> {
        self.tensors.get(key)
    }

    /// Reads a tensor. Aligned tensors of safetensors files share the memory map; other tensors are copied. Tensors of
    /// f64 are rounded to f32.
    pub fn tensor(&self, key: &str) -> Result<Tensor, WeightsError> {
        let info = self.info(key).ok_or_else(|| WeightsError::missing(&self.path, key))?;
        if info.stored == "f64" {
            let bytes = match &self.contents {
                Contents::Safetensors(file) => file.slice(info.range.clone()).as_ref().to_vec(),
                Contents::Torch(reader) => pth::read(reader, &self.path, key)?,
            };
            let values = bytes.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes) as f32).collect();
            return Tensor::new::<f32>(values, info.shape.clone())
                .map_err(|e| WeightsError::tensor(&self.path, key, e));
        }
        let (dtype, shape) = (info.supported_dtype(&self.path, key)?, info.shape.clone());
        let tensor = match &self.contents {
            Contents::Safetensors(file) => Tensor::from_bytes(dtype, shape, Arc::new(file.slice(info.range.clone()))),
            Contents::Torch(reader) => Tensor::from_bytes(dtype, shape, Arc::new(pth::read(reader, &self.path, key)?)),
        };
        tensor.map_err(|e| WeightsError::tensor(&self.path, key, e))
    }

    /// Number of bytes of a tensor in a safetensors file, whatever its dtype. `None` for torch checkpoints, whose
    /// tensors can only be read whole.
    pub fn stored_bytes(&self, key: &str) -> Option<usize> {
        match &self.contents {
            Contents::Safetensors(_) => self.info(key).map(|info| info.range.len()),
            Contents::Torch(_) => None,
        }
    }

    /// Fills `buffer` with bytes of a tensor from byte `at` on, whatever the dtype, without reading the rest. Fails for
    /// torch checkpoints.
    pub fn read_part(&self, key: &str, at: usize, buffer: &mut [u8]) -> Result<(), WeightsError> {
        let has_range = |info: &&TensorInfo| at.checked_add(buffer.len()).is_some_and(|end| end <= info.range.len());
        match (&self.contents, self.info(key).filter(has_range)) {
            (Contents::Safetensors(file), Some(info)) => {
                file.read(info.range.start + at, buffer).map_err(WeightsError::io("read", &self.path))
            }
            _ => Err(WeightsError::missing(&self.path, key)),
        }
    }

    /// Releases the memory of a mapped tensor, which stays readable.
    pub fn release(&self, key: &str) {
        if let (Contents::Safetensors(file), Some(info)) = (&self.contents, self.info(key)) {
            file.release(&info.range);
        }
    }

    /// Name of the format.
    pub fn format(&self) -> &'static str {
        match &self.contents {
            Contents::Safetensors(_) => "safetensors",
            Contents::Torch(_) => "torch checkpoint",
        }
    }

    /// The `__metadata__` of a safetensors file; empty for torch checkpoints.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }
}

/// A format, as the first bytes of a file show it.
enum Format {
    Safetensors,
    Torch,
    Gguf,
    Unknown,
}

/// Recognises the format by the first bytes.
fn sniff(path: &Path) -> Result<Format, WeightsError> {
    /// The length of a safetensors header, and its opening brace.
    const HEAD_BYTES: u64 = 8 + 1;
    let mut head = Vec::new();
    let read = files::open_binary(path).and_then(|f| f.take(HEAD_BYTES).read_to_end(&mut head));
    read.map_err(WeightsError::io("read", path))?;
    let header_length = head.first_chunk::<8>().map(|b| u64::from_le_bytes(*b));
    Ok(match (head.as_slice(), header_length) {
        ([_, _, _, _, _, _, _, _, b'{'], Some(n)) if n <= MAX_HEADER => Format::Safetensors,
        // A ZIP archive, possibly an empty one.
        ([b'P', b'K', 3 | 5, 4 | 6, ..], _) => Format::Torch,
        ([b'G', b'G', b'U', b'F', ..], _) => Format::Gguf,
        // The opcode PROTO, with an existing version of the pickle protocol.
        ([0x80, 1..=5, ..], _) => Format::Torch,
        _ => Format::Unknown,
    })
}

impl std::fmt::Debug for WeightFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WeightFile({}, {} tensors)", self.path.display(), self.keys().count())
    }
}
