//! Weights that are read from their files segment by segment.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn::tensor::{DType, Device};
use roll_backends::background::{Purpose, begin};
use roll_backends::weights::{Ahead, FromHost, HostWeight, Matrices, Storage};
use roll_backends::{Resident, Weight, WeightStore, Weights};
use roll_core::{Result, ResultExt, Tensor};

use super::Checkpoint;
use crate::precision::storable;

/// A store that uploads a segment when it is asked for it and keeps nothing: at any time the device holds the
/// segments that are in use. bf16 weights stay bf16 and are widened at use; everything else becomes f32.
///
/// For networks that would not fit: the UMT5-XXL encoder has 11 GB in bf16, an A14B expert 28 GB. Pages of a mapped
/// file are given back when their segment is read, so that only the system's cache holds them, as long as it has room.
pub struct Streamed {
    source: Arc<Source>,
    ahead: Option<Ahead<Weights>>,
}

struct Source {
    checkpoint: Checkpoint,
    device: Device,
    storage: Option<Storage>,
}

impl Streamed {
    /// Reads from `checkpoint`, whose keys are those the network asks for.
    pub fn new(checkpoint: Checkpoint, device: &Device) -> Self {
        let source = Source { checkpoint, device: device.clone(), storage: None };
        Self { source: Arc::new(source), ahead: None }
    }

    /// Brings the weights as `storage` says instead of as they are.
    pub fn stored_as(mut self, storage: impl Into<Storage>) -> Self {
        let Source { checkpoint, device, .. } = self.source.as_ref();
        let (checkpoint, device) = (checkpoint.clone(), device.clone());
        self.source = Arc::new(Source { checkpoint, device, storage: Some(storage.into()) });
        self
    }

    /// Reads one segment ahead on a thread beside the computation: the memory of one segment more, for no waiting where
    /// a network runs again and again through the same segments.
    pub fn reading_ahead(mut self) -> Self {
        self.ahead = Some(Ahead::default());
        self
    }

    /// As [`Streamed::reading_ahead`] for a network that goes through the segments in this order, now and then: also in
    /// the first pass, and after the last segment nothing waits for the next pass.
    pub fn reading_ahead_through(mut self, order: Vec<String>) -> Self {
        self.ahead = Some(Ahead::through(order));
        self
    }
}

impl WeightStore for Streamed {
    fn segment(&self, prefix: &str) -> Result<Weights> {
        let Some(ahead) = &self.ahead else { return self.source.read(prefix) };
        ahead.segment(prefix, true, |prefix| {
            let (source, name) = (self.source.clone(), prefix.to_string());
            Ok(begin(&self.source.device, Purpose::Weights, move || source.read(&name)))
        })
    }

    fn device(&self) -> &Device {
        &self.source.device
    }

    fn shape(&self, key: &str) -> Option<Vec<usize>> {
        self.source.checkpoint.info(key).map(|info| info.shape.clone())
    }
}

impl Source {
    fn read(&self, prefix: &str) -> Result<Weights> {
        let mut weights = HashMap::new();
        for key in self.checkpoint.keys().filter(|key| key.starts_with(prefix)) {
            let weight = match self.storage {
                Some(storage) => uploaded(&self.checkpoint, key, storage, &self.device)?,
                None => {
                    let tensor = self.checkpoint.tensor(key)?;
                    Weight::new(&tensor, storable(stored_dtype(&tensor), &self.device), &self.device)
                }
            };
            weights.insert(key.to_string(), weight);
            self.checkpoint.release(key);
        }
        Ok(Arc::new(weights))
    }
}

/// Puts all weights of `checkpoint` on `device`. Each is given back as it was copied, so that of a mapped file one
/// weight at a time takes memory beside its copy.
pub fn resident(checkpoint: &Checkpoint, storage: Storage, device: &Device) -> Result<Resident> {
    let mut weights = HashMap::with_capacity(checkpoint.len());
    for key in checkpoint.keys() {
        weights.insert(key.to_string(), uploaded(checkpoint, key, storage, device)?);
        checkpoint.release(key);
    }
    Ok(Resident::from_weights(weights, device))
}

/// A store that keeps the weights of `checkpoint` in host memory, as `storage` says and as `device` stores them. Those
/// in eight bits are refused.
pub fn from_host(checkpoint: &Checkpoint, storage: Storage, device: &Device) -> Result<FromHost> {
    let weights = checkpoint.keys().map(|key| {
        let weight = uploaded(checkpoint, key, storage, device)?;
        checkpoint.release(key);
        Ok::<_, roll_core::Error>((key.to_string(), weight))
    });
    FromHost::new(weights, device)
}

/// The weights of `checkpoint` in host memory, as `storage` says.
pub fn in_host_memory(checkpoint: &Checkpoint, storage: Storage) -> Result<BTreeMap<String, HostWeight>> {
    let mut weights = BTreeMap::new();
    for key in checkpoint.keys() {
        let kept = match held(checkpoint, key, storage)? {
            HostWeight::Dense(tensor) => {
                let dtype = match storage.of(key, tensor.dtype()) {
                    DType::BF16 => roll_core::DType::Bf16,
                    _ => roll_core::DType::F32,
                };
                // A tensor that stays as it is would go on pointing into the file.
                HostWeight::Dense(match tensor.dtype() == dtype {
                    true => Tensor::from_bytes(dtype, tensor.shape(), Arc::new(tensor.as_bytes().to_vec()))?,
                    false => tensor.to_float(dtype)?,
                })
            }
            scaled => scaled,
        };
        checkpoint.release(key);
        weights.insert(key.to_string(), kept);
    }
    Ok(weights)
}

/// The weight `key` on `device`.
fn uploaded(checkpoint: &Checkpoint, key: &str, storage: Storage, device: &Device) -> Result<Weight> {
    Ok(held(checkpoint, key, storage)?.upload(storage, key, device))
}

/// The weight `key` as it is, or in eight bits.
fn held(checkpoint: &Checkpoint, key: &str, storage: Storage) -> Result<HostWeight> {
    let scaled = match storage.matrices {
        Matrices::Dense => None,
        Matrices::AsInFile | Matrices::Eight(_) => checkpoint.scaled(key)?,
    };
    let weight = HostWeight::new(storage, key, scaled, || Ok(checkpoint.tensor(key)?));
    weight.while_doing(|| format!("`{key}` of {}", checkpoint.path().display()))
}

/// The dtype a frozen weight is kept in on the device: its own when it is bf16, f32 otherwise.
pub fn stored_dtype(tensor: &roll_core::Tensor) -> DType {
    match tensor.dtype() {
        roll_core::DType::Bf16 => DType::BF16,
        _ => DType::F32,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeMap;

    use roll_core::StateDict;

    use super::*;
    use crate::weights::save_safetensors;

    #[test]
    fn reading_ahead_gives_the_weights_that_were_asked_for_in_any_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        let state: StateDict =
            (0..4).map(|i| (format!("blocks.{i}.w"), Tensor::new(vec![i as f32; 3000], [3000]).unwrap())).collect();
        save_safetensors(&path, &state, &BTreeMap::new()).unwrap();
        let device = roll_backends::device("flex").unwrap();
        let store = Streamed::new(Checkpoint::open(&path).unwrap(), &device).reading_ahead();
        for i in [0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3, 3, 2, 1, 0, 2, 0, 1, 3, 0, 1, 2] {
            let prefix = format!("blocks.{i}.");
            let weights = store.segment(&prefix).unwrap();
            assert_eq!(weights.len(), 1);
            let values = weights[&format!("blocks.{i}.w")].f32::<1>().unwrap().into_data();
            assert_eq!(values.try_into_vec::<f32>().unwrap(), vec![i as f32; 3000]);
        }
        assert!(store.segment("none").unwrap().is_empty());
    }
}
