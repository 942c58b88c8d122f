//! The files of a Hugging Face model directory.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::{DType as Stored, Device};
use roll_backends::{Weight, Weights};
use roll_core::{DType, Error, Result, Tensor};
use roll_external::files;
use roll_weights::Checkpoint;
use serde::de::DeserializeOwned;

/// Reads a JSON file.
pub fn json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let bytes = files::read(path, files::MAX_TEXT).map_err(Error::file("read", path))?;
    serde_json::from_slice(&bytes).map_err(|e| Error::bad_file(path, e.to_string()))
}

/// The tensors of one or several weight files.
pub struct Tensors(Checkpoint);

impl Tensors {
    /// Opens `model.safetensors` of a directory, or the shards that `model.safetensors.index.json` lists.
    pub fn in_directory(directory: &Path) -> Result<Self> {
        let files = ["model.safetensors", "model.safetensors.index.json"].map(|name| directory.join(name));
        let Some(file) = files.iter().find(|file| file.exists()) else {
            let problem = "it holds no model.safetensors (nor an index of shards); a pytorch_model.bin is made one by \
                           transformers: AutoModel.from_pretrained(DIR).save_pretrained(OUT)";
            return Err(Error::bad_file(directory, problem));
        };
        Self::open(file)
    }

    /// Opens a weight file, or the shards that an index lists.
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Self(Checkpoint::open(path)?))
    }

    /// The files.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.0.paths()
    }

    /// The names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys()
    }

    /// The shape of a tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        Some(&self.0.info(name)?.shape)
    }

    /// Reads a floating-point tensor of this shape. Fails, naming the file and the tensor, if it is missing or
    /// different.
    pub fn tensor(&self, name: &str, expected: &[usize]) -> Result<Tensor> {
        let fault = |problem: String| Err(Error::bad_file(self.0.path(), problem));
        let Some(info) = self.0.info(name) else {
            return fault(format!("its weights hold no tensor `{name}`"));
        };
        if info.shape != expected {
            return fault(format!("expected `{name}` of {expected:?}, as config.json says, found {:?}", info.shape));
        }
        if !matches!(info.dtype, Some(DType::F32 | DType::F16 | DType::Bf16)) {
            return fault(format!("`{name}` is of {}; floats are read", info.stored));
        }
        Ok(self.0.tensor(name)?)
    }

    /// Uploads tensors, given by name and shape, as f32 to `device`.
    pub fn weights(&self, wanted: &[(String, Vec<usize>)], device: &Device) -> Result<Weights> {
        let one = |(name, shape): &(String, Vec<usize>)| {
            Ok((name.clone(), Weight::new(&self.tensor(name, shape)?, Stored::F32, device)))
        };
        Ok(Arc::new(wanted.iter().map(one).collect::<Result<_>>()?))
    }
}
