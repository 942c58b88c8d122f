//! A weight store in host memory.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, mpsc};

use burn_tensor::{Device, Int, Tensor};
use roll_core::{Error, Result};

use super::{Prefetcher, Value, Weight, WeightStore, Weights};
use crate::offload::{DeviceTensor, Offloaded};
use crate::sync::lock;
use crate::{EightBits, ScaledMatrix};

/// A store whose weights are in host memory, in the device's storage format, and are copied to the device when needed.
/// The next segment is prefetched, so that the device holds two segments at any time. The scales of an eight-bit matrix
/// stay on the device; only its codes are copied.
///
/// The host memory of weights for libtorch's GPUs is pinned, and copies overlap with kernels. A network waits only if a
/// segment computes faster than it is copied (a block of 0.7 GB takes about 15 ms over PCI Express 5).
pub struct HostStore {
    device: Device,
    /// Weights that stay on the device.
    small: BTreeMap<String, Weight>,
    offloaded: BTreeMap<String, OffloadedWeight>,
    prefetcher: Prefetcher<Vec<(String, Arrival)>>,
}

/// Waits until a weight in flight is on the device, and returns it.
type Arrival = Box<dyn FnOnce() -> Result<Weight> + Send>;

/// A weight whose values (dense) or codes (eight-bit) are in host memory.
struct OffloadedWeight {
    shape: Vec<usize>,
    host_bytes: usize,
    /// Bytes that stay on the device: the scales of an eight-bit matrix.
    device_bytes: usize,
    values: OffloadedValues,
}

enum OffloadedValues {
    Dense(Mutex<Offloaded>),
    Scaled { kind: EightBits, codes: Mutex<Offloaded<Tensor<2, Int>>>, scales: Tensor<1> },
}

impl OffloadedWeight {
    /// Copies a weight to host memory and waits for the copy. Fails if it is block-quantised.
    fn new(key: &str, weight: Weight) -> Result<Self> {
        let (shape, size) = (weight.shape().to_vec(), weight.size());
        let (device_bytes, values) = match weight.value {
            Value::Dense(tensor) => (0, OffloadedValues::Dense(offloaded(tensor)?)),
            Value::Scaled(ScaledMatrix { kind, codes, scales, .. }) => {
                let scales_bytes = size_of::<f32>() * shape[0];
                (scales_bytes, OffloadedValues::Scaled { kind, codes: offloaded(codes)?, scales })
            }
            Value::Blocks { .. } => {
                return Err(Error::Unsupported(format!(
                    "`{key}` is block-quantised: `model.weight_store: host` copies dense weights and those in eight bits \
                     to the device; `model.weight_store: streamed` leaves all in their files"
                )));
            }
        };
        Ok(Self { shape, host_bytes: size - device_bytes, device_bytes, values })
    }

    /// Starts the copy to the device.
    fn begin_upload(&self) -> Result<Arrival> {
        Ok(match &self.values {
            OffloadedValues::Dense(tensor) => {
                let copy = lock(tensor).begin_upload()?;
                Box::new(move || Ok(Weight::from_tensor(copy.into_tensor()?)))
            }
            OffloadedValues::Scaled { kind, codes, scales } => {
                let (kind, copy, scales) = (*kind, lock(codes).begin_upload()?, scales.clone());
                Box::new(move || Ok(Weight::from_scaled(ScaledMatrix::from_parts(kind, copy.into_tensor()?, scales))))
            }
        })
    }
}

/// Moves a tensor to host memory and frees its device memory.
fn offloaded<T: DeviceTensor>(tensor: T) -> Result<Mutex<Offloaded<T>>> {
    let mut offloaded = Offloaded::new(tensor)?;
    offloaded.release()?;
    Ok(Mutex::new(offloaded))
}

impl HostStore {
    /// Weights of fewer bytes stay on the device: norms and biases are too small to be worth a copy each.
    pub const SMALL: usize = 1 << 20;

    /// Takes weights that are on `device`, one at a time, and copies each to host memory. Fails on block-quantised
    /// weights.
    pub fn new(weights: impl IntoIterator<Item = Result<(String, Weight)>>, device: &Device) -> Result<Self> {
        let (mut small, mut offloaded) = (BTreeMap::new(), BTreeMap::new());
        for weight in weights {
            let (key, weight) = weight?;
            if weight.size() < Self::SMALL {
                small.insert(key, weight);
            } else {
                let weight = OffloadedWeight::new(&key, weight)?;
                offloaded.insert(key, weight);
            }
        }
        Ok(Self { device: device.clone(), small, offloaded, prefetcher: Prefetcher::default() })
    }

    /// Bytes that are always on the device, and bytes in host memory. In addition, the device holds two segments.
    pub fn bytes(&self) -> [usize; 2] {
        let small: usize = self.small.values().map(Weight::size).sum();
        let scales: usize = self.offloaded.values().map(|weight| weight.device_bytes).sum();
        let on_host: usize = self.offloaded.values().map(|weight| weight.host_bytes).sum();
        [small + scales, on_host]
    }

    /// Starts the copies of all offloaded weights of a segment.
    fn begin_uploads(&self, prefix: &str) -> Result<Vec<(String, Arrival)>> {
        let begin = |(key, weight): (&String, &OffloadedWeight)| Ok((key.clone(), weight.begin_upload()?));
        with_prefix(&self.offloaded, prefix).map(begin).collect()
    }
}

/// The entries whose key starts with `prefix`.
fn with_prefix<'a, T>(map: &'a BTreeMap<String, T>, prefix: &'a str) -> impl Iterator<Item = (&'a String, &'a T)> {
    map.range(prefix.to_string()..).take_while(move |(key, _)| key.starts_with(prefix))
}

impl WeightStore for HostStore {
    fn segment(&self, prefix: &str) -> Result<Weights> {
        let should_prefetch_next = true;
        let in_flight = self.prefetcher.segment(prefix, should_prefetch_next, |prefix| {
            // The copies already run in the background, so the list of copies is sent at once.
            let (send, pending) = mpsc::channel();
            // Cannot fail: the receiver is alive.
            send.send(self.begin_uploads(prefix)).unwrap_or(());
            Ok(pending)
        })?;
        let small = with_prefix(&self.small, prefix).map(|(key, weight)| (key.clone(), weight.clone()));
        let mut weights: HashMap<_, _> = small.collect();
        for (key, arrival) in in_flight {
            weights.insert(key, arrival()?);
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
    use burn_tensor::DType;
    use roll_core::Tensor;

    use super::*;
    use crate::blocks::BlockType;
    use crate::{BlockMatrix, ScaledRows};

    #[test]
    fn weights_round_trip_in_any_order() {
        let device = crate::device("flex").unwrap();
        let value = |i: usize, large: bool| match large {
            true => vec![i as f32 + 0.5; HostStore::SMALL / 2 + 3],
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

    #[test]
    fn codes_wait_in_host_memory_and_scales_on_the_device() {
        const SHAPE: [usize; 2] = [1024, 1030];
        let device = crate::device("flex").unwrap();
        let rows = |i: usize| {
            let values = (0..SHAPE[0] * SHAPE[1]).map(|at| ((at + 7 * i) as f32).sin() * (1 + at / SHAPE[1]) as f32);
            let kind = [EightBits::Int8, EightBits::E4m3][i % 2];
            ScaledRows::quantised(&Tensor::new(values.collect::<Vec<_>>(), SHAPE).unwrap(), kind).unwrap()
        };
        let weight = |i| Weight::from_scaled(ScaledMatrix::new(rows(i), &device));
        let store = HostStore::new((0..3).map(|i| Ok((format!("blocks.{i}.w"), weight(i)))), &device).unwrap();
        assert_eq!(store.bytes(), [3 * 4 * SHAPE[0], 3 * SHAPE[0] * SHAPE[1]]);
        assert_eq!(store.shape("blocks.1.w"), Some(SHAPE.to_vec()));
        for i in [0, 1, 2, 2, 1, 0, 0, 1, 2, 0, 2] {
            let weights = store.segment(&format!("blocks.{i}.")).unwrap();
            let (found, expected) = (weights[&format!("blocks.{i}.w")].scaled().unwrap(), weight(i));
            assert_eq!(found.codes.clone().into_data(), expected.scaled().unwrap().codes.clone().into_data());
            assert_eq!(found.rows(0, SHAPE[0]).into_data(), expected.stored::<2>().unwrap().into_data());
        }
    }

    #[test]
    fn errors_name_block_quantised_weights() {
        let device = crate::device("flex").unwrap();
        let bytes = vec![0; 1024 * 1024 / 32 * BlockType::Q8_0.bytes()];
        let matrix = BlockMatrix::new(BlockType::Q8_0, bytes, [1024, 1024]).unwrap();
        let error = HostStore::new([Ok(("w".into(), Weight::from_blocks(matrix, &device)))], &device).err().unwrap();
        assert!(error.to_string().contains("`w`") && error.to_string().contains("streamed"), "{error}");
    }
}
