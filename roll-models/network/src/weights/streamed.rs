//! Stores of a network's weights from a checkpoint file: streamed one segment at a time ([`Streamed`]), resident on the
//! device ([`resident`]), or in host memory, to be copied by segments ([`from_host`]) or as a whole
//! ([`in_host_memory`]).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn_tensor::{DType, Device};
use roll_backends::background::{Purpose, begin};
use roll_backends::weights::{HostStore, HostWeight, MatrixStorage, Prefetcher, SegmentMemory, SegmentSizes, Storage};
use roll_backends::{Resident, Weight, WeightStore, Weights};
use roll_core::{Result, ResultExt, Tensor};

use super::Checkpoint;
use crate::precision::DeviceTraits;

/// A weight store that uploads each segment on request and keeps nothing: the device holds only the segments in use.
/// bf16 weights stay bf16 and are converted to f32 at use; all other weights become f32.
///
/// The store is for networks that do not fit on the device: the UMT5-XXL encoder has 11 GB in bf16, an A14B expert 28
/// GB. The mapped pages of a segment are released once it is read, so only the system's page cache holds the file, as
/// long as the system has room.
pub struct Streamed {
    source: Arc<StreamSource>,
    /// Reads the next segment during the computation; `None` reads each segment when it is requested.
    prefetcher: Option<Prefetcher<(Weights, SegmentMemory)>>,
    /// Sizes of the segments that were read before, for reserving device memory.
    sizes: SegmentSizes,
}

/// The files and settings with which a background thread reads a segment.
#[derive(Clone)]
struct StreamSource {
    checkpoint: Checkpoint,
    device: Device,
    /// `None` keeps the file's dtype.
    storage: Option<Storage>,
}

impl Streamed {
    /// Creates a store over `checkpoint`, whose keys must be those that the network requests.
    pub fn new(checkpoint: Checkpoint, device: &Device) -> Self {
        let source = StreamSource { checkpoint, device: device.clone(), storage: None };
        Self { source: Arc::new(source), prefetcher: None, sizes: SegmentSizes::default() }
    }

    /// Stores the weights on the device as `storage` says instead of in the file's dtype.
    pub fn stored_as(mut self, storage: Storage) -> Self {
        Arc::make_mut(&mut self.source).storage = Some(storage);
        self
    }

    /// Prefetches the next segment on a thread during the computation, which avoids the wait and takes the memory of
    /// one more segment. The order of the segments is learned from the first pass, and the first segment of the next
    /// pass waits in memory: this is for networks that run again and again.
    pub fn with_prefetch(mut self) -> Self {
        self.prefetcher = Some(Prefetcher::default());
        self
    }

    /// Prefetches like [`Streamed::with_prefetch`], but in the given order: the first pass is prefetched, too, and no
    /// segment waits in memory for the next pass. This is for networks that run rarely.
    pub fn with_prefetch_order(mut self, order: Vec<String>) -> Self {
        self.prefetcher = Some(Prefetcher::in_order(order));
        self
    }
}

impl WeightStore for Streamed {
    fn segment(&self, prefix: &str) -> Result<Weights> {
        let Some(prefetcher) = &self.prefetcher else {
            return self.source.read(prefix, &mut SegmentMemory::default());
        };
        let device = &self.source.device;
        let should_prefetch_next = true;
        let (weights, memory) = prefetcher.segment(prefix, should_prefetch_next, |prefix| {
            let (source, name) = (self.source.clone(), prefix.to_string());
            let mut memory = self.sizes.reserve(prefix, device);
            Ok(begin(device, Purpose::Weights, move || Ok((source.read(&name, &mut memory)?, memory))))
        })?;
        self.sizes.arrived(prefix, memory)?;
        Ok(weights)
    }

    fn device(&self) -> &Device {
        &self.source.device
    }

    fn shape(&self, key: &str) -> Option<Vec<usize>> {
        self.source.checkpoint.info(key).map(|info| info.shape.clone())
    }
}

impl StreamSource {
    /// Uploads the weights whose keys begin with `prefix`, to `memory` where it has room.
    fn read(&self, prefix: &str, memory: &mut SegmentMemory) -> Result<Weights> {
        let mut weights = HashMap::new();
        for key in self.checkpoint.keys().filter(|key| key.starts_with(prefix)) {
            let weight = match self.storage {
                Some(storage) => uploaded(&self.checkpoint, key, storage, &self.device, memory)?,
                None => {
                    let tensor = self.checkpoint.tensor(key)?;
                    Weight::uploaded(
                        &tensor,
                        DeviceTraits::of(&self.device).storable(stored_dtype(&tensor)),
                        &self.device,
                        memory,
                    )
                }
            };
            weights.insert(key.to_string(), weight);
            self.checkpoint.release(key);
        }
        Ok(Arc::new(weights))
    }
}

/// Uploads all weights of `checkpoint` to `device`. The mapped pages of each weight are released as soon as it is
/// copied, so at most one weight of the file takes host memory.
pub fn resident(checkpoint: &Checkpoint, storage: Storage, device: &Device) -> Result<Resident> {
    let mut weights = HashMap::with_capacity(checkpoint.len());
    for key in checkpoint.keys() {
        let weight = uploaded(checkpoint, key, storage, device, &mut SegmentMemory::default())?;
        weights.insert(key.to_string(), weight);
        checkpoint.release(key);
    }
    Ok(Resident::from_weights(weights, device))
}

/// Creates a store that keeps the weights of `checkpoint` in host memory in the dtypes of `storage`, as far as `device`
/// supports them.
pub fn from_host(checkpoint: &Checkpoint, storage: Storage, device: &Device) -> Result<HostStore> {
    let weights = checkpoint.keys().map(|key| {
        let weight = uploaded(checkpoint, key, storage, device, &mut SegmentMemory::default())?;
        checkpoint.release(key);
        Ok::<_, roll_core::Error>((key.to_string(), weight))
    });
    HostStore::new(weights, device)
}

/// Copies the weights of `checkpoint` to host memory in the dtypes of `storage`.
pub fn in_host_memory(checkpoint: &Checkpoint, storage: Storage) -> Result<BTreeMap<String, HostWeight>> {
    let mut weights = BTreeMap::new();
    for key in checkpoint.keys() {
        let weight = match host_weight(checkpoint, key, storage)? {
            HostWeight::Dense(tensor) => {
                let dtype = match storage.of(key, tensor.dtype()) {
                    DType::BF16 => roll_core::DType::Bf16,
                    _ => roll_core::DType::F32,
                };
                // A tensor that needs no conversion is copied: otherwise it would keep pointing into the file.
                HostWeight::Dense(if tensor.dtype() == dtype {
                    Tensor::from_bytes(dtype, tensor.shape(), Arc::new(tensor.as_bytes().to_vec()))?
                } else {
                    tensor.to_float(dtype)?
                })
            }
            eight_bits => eight_bits,
        };
        checkpoint.release(key);
        weights.insert(key.to_string(), weight);
    }
    Ok(weights)
}

/// Uploads the weight `key` to `device`, to `memory` where it has room.
fn uploaded(
    checkpoint: &Checkpoint,
    key: &str,
    storage: Storage,
    device: &Device,
    memory: &mut SegmentMemory,
) -> Result<Weight> {
    Ok(host_weight(checkpoint, key, storage)?.upload(storage, key, device, memory))
}

/// Reads the weight `key`: dense, or in eight bits if `storage` says so.
fn host_weight(checkpoint: &Checkpoint, key: &str, storage: Storage) -> Result<HostWeight> {
    let scaled = match storage.matrices {
        MatrixStorage::Dense => None,
        MatrixStorage::AsInFile | MatrixStorage::Eight(_) => checkpoint.scaled(key)?,
    };
    let weight = HostWeight::new(storage, key, scaled, || Ok(checkpoint.tensor(key)?));
    weight.while_doing(|| format!("`{key}` of {}", checkpoint.path().display()))
}

/// The dtype in which a frozen weight is kept on the device: bf16 if it is bf16, f32 otherwise.
pub fn stored_dtype(tensor: &roll_core::Tensor) -> DType {
    match tensor.dtype() {
        roll_core::DType::Bf16 => DType::BF16,
        _ => DType::F32,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use roll_core::StateDict;

    use super::*;
    use crate::weights::save_safetensors;

    #[test]
    fn prefetching_returns_the_requested_weights_in_any_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        let state: StateDict =
            (0..4).map(|i| (format!("blocks.{i}.w"), Tensor::new(vec![i as f32; 3000], [3000]).unwrap())).collect();
        save_safetensors(&path, &state, &BTreeMap::new()).unwrap();
        let device = roll_backends::device("flex").unwrap();
        let store = Streamed::new(Checkpoint::open(&path).unwrap(), &device).with_prefetch();
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
