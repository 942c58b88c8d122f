//! A weight store in host memory.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use burn::tensor::Device;
use roll_core::{Error, Result};

use super::{Ahead, Value, Weight, WeightStore, Weights};
use crate::offload::{Offloaded, Returning};

/// Weights of fewer bytes stay on the device: norms and biases are too small to be worth a copy each.
const SMALL: usize = 1 << 20;

/// A store whose weights are in host memory, in the device's storage format, and are copied to the device when needed.
/// The next segment is prefetched, so that the device holds two segments at any time.
///
/// The host memory of libtorch's GPUs is pinned, and copies overlap with kernels: a network waits only if a segment
/// computes faster than it is copied (a block of 0.7 GB takes about 15 ms over PCI Express 5).
pub struct FromHost {
    device: Device,
    kept: BTreeMap<String, Kept>,
    ahead: Ahead<Vec<(String, Way)>>,
}

struct Kept {
    shape: Vec<usize>,
    place: Place,
}

enum Place {
    Device(Weight),
    Host(Mutex<Offloaded>),
}

/// A weight on the device, or in flight to it.
enum Way {
    Here(Weight),
    Coming(Returning),
}

impl FromHost {
    /// Takes weights that are on `device`, one at a time, and copies each to host memory. Fails on weights that are not
    /// dense.
    pub fn new(weights: impl IntoIterator<Item = Result<(String, Weight)>>, device: &Device) -> Result<Self> {
        let mut kept = BTreeMap::new();
        for found in weights {
            let (key, weight) = found?;
            let shape = weight.shape().to_vec();
            let place = match (weight.size() < SMALL, &weight.value) {
                (true, _) => Place::Device(weight),
                (false, Value::Dense(tensor)) => {
                    let mut offloaded = Offloaded::new(tensor.clone())?;
                    drop(weight);
                    offloaded.settle()?;
                    Place::Host(Mutex::new(offloaded))
                }
                (false, _) => {
                    return Err(Error::Unsupported(format!(
                        "`{key}` is in blocks or in eight bits: such weights do not wait in host memory; \
                         `model.weight_store: streamed` leaves them in their files"
                    )));
                }
            };
            kept.insert(key, Kept { shape, place });
        }
        Ok(Self { device: device.clone(), kept, ahead: Ahead::default() })
    }

    fn send(&self, prefix: &str) -> Result<Vec<(String, Way)>> {
        let segment = self.kept.range(prefix.to_string()..).take_while(|(key, _)| key.starts_with(prefix));
        let sent = segment.map(|(key, kept)| {
            let way = match &kept.place {
                Place::Device(weight) => Way::Here(weight.clone()),
                // A panic leaves the state complete; at most its buffer in the pool is lost.
                Place::Host(tensor) => Way::Coming(tensor.lock().unwrap_or_else(PoisonError::into_inner).send_back()?),
            };
            Ok((key.clone(), way))
        });
        sent.collect()
    }
}

impl WeightStore for FromHost {
    fn segment(&self, prefix: &str) -> Result<Weights> {
        let sent = self.ahead.segment(prefix, true, |prefix| {
            let (send, coming) = mpsc::channel();
            // Cannot fail: the receiver is alive.
            send.send(self.send(prefix)).unwrap_or(());
            Ok(coming)
        })?;
        let arrived = sent.into_iter().map(|(key, way)| {
            let weight = match way {
                Way::Here(weight) => weight,
                Way::Coming(returning) => Weight::from_tensor(returning.take()?),
            };
            Ok((key, weight))
        });
        Ok(Arc::new(arrived.collect::<Result<HashMap<_, _>>>()?))
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn shape(&self, key: &str) -> Option<Vec<usize>> {
        self.kept.get(key).map(|kept| kept.shape.clone())
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use roll_core::Tensor;

    use super::*;

    #[test]
    fn weights_come_as_they_were_in_any_order_and_again_and_again() {
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
            let store = FromHost::new(weights, &device).unwrap();
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
