//! The files of a Hugging Face model directory.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::{DType as Stored, Device};
use memmap2::Mmap;
use roll_backends::{Weight, Weights};
use roll_core::{DType, Error, Result, Tensor};
use roll_external::files;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, Metadata};
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Reads a JSON file.
pub fn json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let bytes = files::read(path, files::MAX_TEXT).map_err(Error::file("read", path))?;
    serde_json::from_slice(&bytes).map_err(|e| Error::bad_file(path, e.to_string()))
}

/// The tensors of one or several memory-mapped safetensors files.
pub struct Tensors {
    files: Vec<Shard>,
    /// The file of each tensor, by name.
    index: HashMap<String, usize>,
    directory: PathBuf,
}

struct Shard {
    path: PathBuf,
    map: Mmap,
    /// Offset of the tensors' bytes in the file.
    start: usize,
    metadata: Metadata,
}

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: HashMap<String, String>,
}

impl Tensors {
    /// Opens `model.safetensors` of a directory, or the shards that `model.safetensors.index.json` lists.
    pub fn in_directory(directory: &Path) -> Result<Self> {
        let (single, index) = (directory.join("model.safetensors"), directory.join("model.safetensors.index.json"));
        if single.exists() || !index.exists() {
            if !single.exists() {
                let problem = "it holds no model.safetensors (nor an index of shards); a pytorch_model.bin is made one by \
                               transformers: AutoModel.from_pretrained(DIR).save_pretrained(OUT)";
                return Err(Error::bad_file(directory, problem));
            }
            return Self::open(&[single]);
        }
        let mut names: Vec<String> = json::<ShardIndex>(&index)?.weight_map.into_values().collect();
        names.sort();
        names.dedup();
        // Names in an index must be files in the same directory.
        if let Some(odd) = names.iter().find(|n| Path::new(n).components().count() != 1) {
            return Err(Error::bad_file(&index, format!("expected names of files in this directory, found `{odd}`")));
        }
        Self::open(&names.iter().map(|name| directory.join(name)).collect::<Vec<_>>())
    }

    /// Opens the files `paths`.
    pub fn open(paths: &[PathBuf]) -> Result<Self> {
        let (mut files, mut index) = (Vec::new(), HashMap::new());
        for path in paths {
            let file = files::open(path).map_err(Error::file("read", path))?;
            // SAFETY: the map is read-only, and weight files are replaced by renaming, never overwritten.
            let map = unsafe { Mmap::map(&file) }.map_err(Error::file("map", path))?;
            let (length, metadata) = SafeTensors::read_metadata(&map)
                .map_err(|e| Error::bad_file(path, format!("no safetensors file: {e}")))?;
            for (name, _) in metadata.tensors() {
                index.insert(name, files.len());
            }
            files.push(Shard { path: path.clone(), map, start: 8 + length, metadata });
        }
        let directory = paths.first().and_then(|p| p.parent()).unwrap_or(Path::new(".")).into();
        Ok(Self { files, index, directory })
    }

    /// The files.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|f| f.path.as_path())
    }

    /// The names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.index.keys().map(String::as_str)
    }

    /// The shape of a tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        let file = &self.files[*self.index.get(name)?];
        Some(&file.metadata.info(name)?.shape)
    }

    /// Reads a floating-point tensor of this shape. Fails, naming the file and the tensor, if it is missing or
    /// different.
    pub fn tensor(&self, name: &str, expected: &[usize]) -> Result<Tensor> {
        let file = self.index.get(name).map(|i| &self.files[*i]);
        let Some((file, info)) = file.and_then(|f| Some((f, f.metadata.info(name)?))) else {
            return Err(Error::bad_file(&self.directory, format!("its weights hold no tensor `{name}`")));
        };
        if info.shape != expected {
            let problem = format!("expected `{name}` of {expected:?}, as config.json says, found {:?}", info.shape);
            return Err(Error::bad_file(&file.path, problem));
        }
        let dtype = match info.dtype {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::Bf16,
            other => return Err(Error::bad_file(&file.path, format!("`{name}` is of {other:?}; floats are read"))),
        };
        let (from, to) = info.data_offsets;
        // The crate has checked that these offsets are within the file.
        let bytes = file.map[file.start + from..file.start + to].to_vec();
        Tensor::from_bytes(dtype, expected, Arc::new(bytes))
    }

    /// Uploads tensors, given by name and shape, as f32 to `device`.
    pub fn weights(&self, wanted: &[(String, Vec<usize>)], device: &Device) -> Result<Weights> {
        let one = |(name, shape): &(String, Vec<usize>)| {
            Ok((name.clone(), Weight::new(&self.tensor(name, shape)?, Stored::F32, device)))
        };
        Ok(Arc::new(wanted.iter().map(one).collect::<Result<_>>()?))
    }
}
