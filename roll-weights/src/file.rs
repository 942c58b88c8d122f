//! One weight file, of any format.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use roll_core::Tensor;
use roll_external::files;

use crate::error::WeightsError;
use crate::info::TensorInfo;
use crate::pth::PthFile;
use crate::safetensors::{MAX_HEADER, SafetensorsFile};

/// Extensions of safetensors files and of torch checkpoints.
const SAFETENSORS: &[&str] = &["safetensors"];
const TORCH: &[&str] = &["pth", "pt", "bin", "ckpt"];

/// An open weight file of either format: names, shapes and dtypes are known, tensors are read on demand.
pub struct WeightFile {
    path: PathBuf,
    contents: Contents,
}

enum Contents {
    Safetensors(SafetensorsFile),
    Torch(PthFile),
}

impl WeightFile {
    /// Opens a safetensors file (memory-mapped) or a torch checkpoint (`.pth`, `.pt`, `.bin`, `.ckpt`; parsed, never
    /// executed). The whole header is checked here; no tensor is read. Fails if the contents contradict the extension.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, WeightsError> {
        let path = path.as_ref();
        let about = std::fs::metadata(path).map_err(WeightsError::io("read", path))?;
        if about.is_dir() {
            return Err(WeightsError::Directory { path: path.into(), hint: String::new() });
        }
        let found = sniff(path)?;
        let extension = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
        let wrong = |expected: &str, found: &str| WeightsError::Format {
            path: path.into(),
            expected: expected.into(),
            found: found.into(),
        };
        let contents = if SAFETENSORS.contains(&extension.as_str()) {
            match found {
                Looks::Torch => return Err(wrong("a safetensors file, as its name says", "a torch checkpoint")),
                _ => Contents::Safetensors(SafetensorsFile::open(path)?),
            }
        } else if TORCH.contains(&extension.as_str()) {
            match found {
                Looks::Safetensors => {
                    return Err(wrong("a torch checkpoint, as its name says", "a safetensors file; rename it"));
                }
                _ => Contents::Torch(PthFile::open(path)?),
            }
        } else {
            return Err(wrong(
                "a weight file called *.safetensors, *.pth, *.pt, *.bin or *.ckpt",
                &match extension.is_empty() {
                    true => "a name without extension".into(),
                    false => format!("the extension `.{extension}`"),
                },
            ));
        };
        Ok(Self { path: path.into(), contents })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names of the tensors.
    pub fn keys(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        match &self.contents {
            Contents::Safetensors(file) => Box::new(file.tensors.keys().map(String::as_str)),
            Contents::Torch(file) => Box::new(file.tensors.keys().map(String::as_str)),
        }
    }

    /// Shape and dtype of a tensor.
    pub fn info(&self, key: &str) -> Option<&TensorInfo> {
        match &self.contents {
            Contents::Safetensors(file) => file.tensors.get(key).map(|(info, _)| info),
            Contents::Torch(file) => file.tensors.get(key),
        }
    }

    /// Reads a tensor. Aligned tensors of safetensors files share the map; other tensors are copied.
    pub fn tensor(&self, key: &str) -> Result<Tensor, WeightsError> {
        match &self.contents {
            Contents::Safetensors(file) => file.tensor(&self.path, key),
            Contents::Torch(file) => file.tensor(&self.path, key),
        }
    }

    /// Number of bytes of a tensor in a safetensors file, whatever its dtype. `None` for torch checkpoints, whose
    /// tensors can only be read whole.
    pub fn stored_bytes(&self, key: &str) -> Option<usize> {
        match &self.contents {
            Contents::Safetensors(file) => file.tensors.get(key).map(|(_, range)| range.len()),
            Contents::Torch(_) => None,
        }
    }

    /// Fills `buffer` with bytes of a tensor from byte `at` on, whatever the dtype, without reading the rest. Fails for
    /// torch checkpoints.
    pub fn read_part(&self, key: &str, at: usize, buffer: &mut [u8]) -> Result<(), WeightsError> {
        match &self.contents {
            Contents::Safetensors(file) => file.read_part(&self.path, key, at, buffer),
            Contents::Torch(_) => Err(WeightsError::MissingTensor { path: self.path.clone(), tensor: key.into() }),
        }
    }

    /// Releases the memory of a mapped tensor, which stays readable.
    pub fn release(&self, key: &str) {
        if let Contents::Safetensors(file) = &self.contents {
            file.release(key);
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
    pub fn metadata(&self) -> BTreeMap<String, String> {
        match &self.contents {
            Contents::Safetensors(file) => file.metadata.clone(),
            Contents::Torch(_) => BTreeMap::new(),
        }
    }
}

enum Looks {
    Safetensors,
    Torch,
    Unknown,
}

/// Recognises the format by the first bytes.
fn sniff(path: &Path) -> Result<Looks, WeightsError> {
    let mut head = Vec::new();
    files::open(path).and_then(|f| f.take(9).read_to_end(&mut head)).map_err(WeightsError::io("read", path))?;
    let length = head.first_chunk::<8>().map(|b| u64::from_le_bytes(*b));
    Ok(match (head.as_slice(), length) {
        ([.., b'{'], Some(n)) if head.len() == 9 && n <= MAX_HEADER => Looks::Safetensors,
        ([b'P', b'K', 3 | 5, 4 | 6, ..], _) => Looks::Torch,
        // The opcode PROTO, with an existing version of the pickle protocol.
        ([0x80, 1..=5, ..], _) => Looks::Torch,
        _ => Looks::Unknown,
    })
}

impl std::fmt::Debug for WeightFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WeightFile({}, {} tensors)", self.path.display(), self.keys().count())
    }
}
