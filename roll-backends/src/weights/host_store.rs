//! A weight store in host memory.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, mpsc};

use burn::tensor::Device;
use roll_core::{Error, Result};

use super::{Prefetcher, Value, Weight, WeightStore, Weights};
use crate::offload::{InFlight, Offloaded};
use crate::sync::lock;

/// Weights of fewer bytes stay on the device: norms and biases are too small to be worth a copy each.
const SMALL: usize = 1 << 20;

/// A store whose weights are in host memory, in the device's storage format, and are copied to the device when needed.
/// The next segment is prefetched, so that the device holds two segments at any time.
///
/// The host memory of libtorch's GPUs is pinned, and copies overlap with kernels: a network waits only if a segment
/// computes faster than it is copied (a block of 0.7 GB takes about 15 ms over PCI Express 5).
pub struct HostStore {
    device: Device,
    /// Weights that stay on the device.
    small: BTreeMap<String, Weight>,
    offloaded: BTreeMap<String, OffloadedWeight>,
    prefetcher: Prefetcher<Vec<(String, InFlight)>>,
}

struct OffloadedWeight {
    shape: Vec<usize>,
    tensor: Mutex<Offloaded>,
}

impl HostStore {
    /// Takes weights that are on `device`, one at a time, and copies each to host memory. Fails on weights that are not
    /// dense.
    pub fn new(weights: impl IntoIterator<Item = Result<(String, Weight)>>, device: &Device) -> Result<Self> {
        let (mut small, mut offloaded) = (BTreeMap::new(), BTreeMap::new());
        for found in weights {
            let (key, weight) = found?;
            if weight.size() < SMALL {
                small.insert(key, weight);
                continue;
            }
            let Value::Dense(tensor) = weight.value else {
                return Err(Error::Unsupported(format!(
                    "`{key}` is in blocks or in eight bits: such weights cannot be kept in host memory; \
                     `model.weight_store: streamed` leaves them in their files"
                )));
            };
            let shape = tensor.shape().to_vec();
            let mut tensor = Offloaded::new(tensor)?;
            tensor.release()?;
            offloaded.insert(key, OffloadedWeight { shape, tensor: Mutex::new(tensor) });
        }
        Ok(Self { device: device.clone(), small, offloaded, prefetcher: Prefetcher::default() })
    }

    fn begin_uploads(&self, prefix: &str) -> Result<Vec<(String, InFlight)>> {
        let begin =
            |(key, weight): (&String, &OffloadedWeight)| Ok((key.clone(), lock(&weight.tensor).begin_upload()?));
        with_prefix(&self.offloaded, prefix).map(begin).collect()
    }
}

/// The entries whose key starts with `prefix`.
fn with_prefix<'a, T>(map: &'a BTreeMap<String, T>, prefix: &'a str) -> impl Iterator<Item = (&'a String, &'a T)> {
    map.range(prefix.to_string()..).take_while(move |(key, _)| key.starts_with(prefix))
}

impl WeightStore for HostStore {
    fn segment(&self, prefix: &str) -> Result<Weights> {
        let in_flight = self.prefetcher.segment(prefix, true, |prefix| {
            let (send, pending) = mpsc::channel();
            // Cannot fail: the receiver is alive.
            send.send(self.begin_uploads(prefix)).unwrap_or(());
            Ok(pending)
        })?;
        let small = with_prefix(&self.small, prefix).map(|(key, weight)| (key.clone(), weight.clone()));
        let mut weights: HashMap<_, _> = small.collect();
        for (key, copy) in in_flight {
            weights.insert(key, Weight::from_tensor(copy.into_tensor()?));
        }
        Ok(Arc::new(weights))
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn shape(&self, key: &str) -> Option<Vec<usize>> {
        let small = self.small.get(key).map(Weight::shape);
        small.or_else(|| Some(&self.offloaded.get(key)?.shape)).map(<[usize]>::to_vec)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use roll_core::Tensor;

    use super::*;

    #[test]
    fn weights_round_trip_in_any_order() {
        let device = crate::device("flex").unwrap();
        let value = |i: usize, large: bool| match large {
            true => vec![i as f32 + 0.5; SMALL / 2 + 3],
            false => vec![i as f32; 3],
        };
        for dtype in [DType::F32, DType::BF16] {
            let weights = (0..4).flat_map(|i| {
                let device = &device;
                [("w", true), ("norm", false)].map(move |(name, is_large)| {
                    let values = value(i, is_large);
                    let tensor = Tensor::new(values.clone(), [values.len()])?;
                    Ok::<_, Error>((format!("blocks.{i}.{name}"), Weight::new(&tensor, dtype, device)))
                })
            });
            let store = HostStore::new(weights, &device).unwrap();
            assert_eq!(store.shape("blocks.1.norm"), Some(vec![3]));
            for i in [0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3, 3, 2, 1, 0, 2, 0, 3, 1] {
                let prefix = format!("blocks.{i}.");
                let weights = store.segment(&prefix).unwrap();
                assert_eq!(weights.len(), 2);
                for (name, is_large) in [("w", true), ("norm", false)] {
                    let weight = &weights[&format!("{prefix}{name}")];
                    assert_eq!(weight.stored::<1>().unwrap().dtype(), dtype);
                    let found = weight.f32::<1>().unwrap().into_data().try_into_vec::<f32>().unwrap();
                    assert_eq!(found, value(i, is_large));
                }
            }
            assert!(store.segment("none").unwrap().is_empty());
        }
    }
}
