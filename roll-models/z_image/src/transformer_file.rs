//! The weight file of a transformer, under the names of the checkpoint: files of diffusers as they are, and ComfyUI's
//! single files, whose fused projections are divided when they are read.

use std::collections::BTreeMap;

use burn_tensor::{DType, Device};
use roll_backends::weights::{HostWeight, MatrixStorage, SegmentMemory, Storage};
use roll_backends::{EightBits, ScaledRows, Weight};
use roll_core::{Error, Result, ResultExt, StateDict, Tensor};
use roll_network::weights::{Checkpoint, is_auxiliary};

use crate::dit::DitConfig;
use crate::keys::{self, PROJECTIONS, Part};

/// A matrix of a block, by which a file's formats are recognised.
const SAMPLE: &str = "layers.0.feed_forward.w1.weight";
/// Prefixes of the weights of blocks, whose matrices eight bits apply to.
const BLOCKS: [&str; 3] = ["layers.", "noise_refiner.", "context_refiner."];

/// The weights of a transformer. No tensor has been read.
#[derive(Clone, Debug)]
pub struct TransformerFile {
    file: Checkpoint,
    /// The key of the tensor in `file` that contains a weight, and the number of the third of its rows, by the weight's
    /// name.
    weights: BTreeMap<String, (String, Option<usize>)>,
}

/// Whether eight bits apply to a weight: whether it is a matrix of a block.
pub fn is_block_matrix(name: &str, shape: &[usize]) -> bool {
    shape.len() == 2 && is_block(name)
}

/// Whether a weight is one of a block.
pub fn is_block(name: &str) -> bool {
    BLOCKS.iter().any(|prefix| name.starts_with(prefix))
}

impl TransformerFile {
    /// Assigns the tensors of `file` to weights.
    ///
    /// # Errors
    /// Fails if a weight stands in the file under two names, and on packed codes of a quantisation that is not
    /// supported.
    pub fn new(file: Checkpoint) -> Result<Self> {
        let mut weights = BTreeMap::new();
        for key in file.keys().filter(|key| !is_auxiliary(key)) {
            file.refuse_packed(key)?;
            for Part { name, third } in keys::parts(key) {
                if weights.insert(name, (key.to_string(), third)).is_some() {
                    return Err(keys::under_two_names(key))
                        .while_doing(|| format!("reading {}", file.path().display()));
                }
            }
        }
        Ok(Self { file, weights })
    }

    /// The file.
    pub fn file(&self) -> &Checkpoint {
        &self.file
    }

    /// The file under the names of the checkpoint, which can be streamed. Fails if it has fused projections.
    pub fn as_checkpoint(&self) -> Result<Checkpoint> {
        if self.weights.values().any(|(_, third)| third.is_some()) {
            let problem = "q, k and v of this single file are one tensor, which is divided when it is loaded: expected \
                           the diffusers directory for `model.weight_store: streamed` and `model.base_lora`";
            return Err(Error::bad_file(self.file.path(), problem));
        }
        let name = |key: &str| self.weights.iter().find(|(_, (found, _))| found == key).map(|(name, _)| name.clone());
        Ok(self.file.clone().rename(name)?)
    }

    /// Shapes of the weights by name.
    pub fn shapes(&self) -> BTreeMap<String, Vec<usize>> {
        let shape = |(name, (key, third)): (&String, &(String, Option<usize>))| {
            let mut shape = self.file.info(key)?.shape.clone();
            // The remainder of a division, which no network has, is refused when the tensor is read.
            if let (Some(_), Some(rows)) = (third, shape.first_mut()) {
                *rows /= PROJECTIONS.len();
            }
            Some((name.clone(), shape))
        };
        self.weights.iter().filter_map(shape).collect()
    }

    /// Sizes of the network. The division of a head between the axes is that of the `config.json` next to the file
    /// (`axes_dims`).
    pub fn config(&self) -> Result<DitConfig> {
        let axes = self.file.config_json().and_then(|mut config| config.remove("axes_dims"));
        let axes = axes.map(serde_json::from_value).transpose();
        let axes =
            axes.map_err(|e| Error::bad_file(self.file.path(), format!("`axes_dims` of its config.json: {e}")))?;
        DitConfig::from_shapes(&self.shapes(), axes).while_doing(|| format!("reading {}", self.file.path().display()))
    }

    /// The dtype of dense weights in the file: bf16 or f32.
    pub fn stored_dtype(&self) -> DType {
        match self.weights.get(SAMPLE).and_then(|(key, _)| self.file.info(key)?.dtype) {
            Some(roll_core::DType::Bf16) => DType::BF16,
            _ => DType::F32,
        }
    }

    /// The format of the matrices of blocks, if the file has them in eight bits.
    pub fn eight_bits(&self) -> Option<EightBits> {
        self.weights.get(SAMPLE).and_then(|(key, _)| self.file.eight_bits(key))
    }

    /// Reads a weight as floats.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let (key, third) = self.weights.get(name).ok_or_else(|| {
            Error::bad_file(self.file.path(), format!("the weight `{name}` of a Z-Image transformer is missing"))
        })?;
        let tensor = self.file.tensor(key)?;
        third.map_or_else(|| Ok(tensor.clone()), |i| keys::rows_of_part(&tensor, i, key))
    }

    /// Reads all weights as floats, sorted by name. Each is released before the next one is read.
    pub fn tensors(&self) -> impl Iterator<Item = Result<(String, Tensor)>> {
        self.weights.iter().map(|(name, (key, _))| {
            let tensor = self.tensor(name)?;
            self.file.release(key);
            Ok((name.clone(), tensor))
        })
    }

    /// Reads all weights.
    pub fn state(&self) -> Result<StateDict> {
        self.tensors().collect()
    }

    /// Uploads all weights to `device`, stored as `storage`.
    pub fn uploaded(&self, storage: Storage, device: &Device) -> impl Iterator<Item = Result<(String, Weight)>> {
        self.weights.iter().map(move |(name, (key, _))| {
            let weight = self.host_weight(name, storage)?;
            let weight = weight.upload(storage, name, device, &mut SegmentMemory::default());
            self.file.release(key);
            Ok((name.clone(), weight))
        })
    }

    /// Reads a weight in the format of `storage`.
    fn host_weight(&self, name: &str, storage: Storage) -> Result<HostWeight> {
        let in_file = match (storage.matrices, self.weights.get(name)) {
            (MatrixStorage::Dense, _) | (_, None) => None,
            (_, Some((key, None))) => self.file.scaled(key)?,
            (_, Some((key, Some(i)))) => self.file.scaled(key)?.map(|rows| third_of_codes(&rows, *i)).transpose()?,
        };
        if let (MatrixStorage::Eight(kind), None) = (storage.matrices, &in_file) {
            let tensor = self.tensor(name)?;
            return Ok(match is_block_matrix(name, tensor.shape()) {
                true => HostWeight::Scaled(ScaledRows::quantised(&tensor, kind)?),
                false => HostWeight::Dense(tensor),
            });
        }
        HostWeight::new(storage, name, in_file, || self.tensor(name))
            .while_doing(|| format!("`{name}` of {}", self.file.path().display()))
    }
}

/// The `i`-th third of the rows of a fused matrix in eight bits.
fn third_of_codes(rows: &ScaledRows, i: usize) -> Result<ScaledRows> {
    let [count, columns] = rows.shape();
    let part = count / PROJECTIONS.len();
    let codes = rows.codes()[i * part * columns..(i + 1) * part * columns].to_vec();
    let scales = rows.scales()[i * part..(i + 1) * part].to_vec();
    ScaledRows::new(rows.kind(), codes, scales, [part, columns])
}
