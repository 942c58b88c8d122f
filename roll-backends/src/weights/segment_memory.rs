//! Device memory that is reserved for the weights of a segment before another thread uploads them.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Mutex;

use burn_tensor::{DType, Device, Element, Int, Tensor as Burn, TensorData};
use bytemuck::Pod;
use roll_core::Result;

#[cfg(feature = "libtorch")]
use crate::async_copies::{Cuda, Destination, copy_streams_of, disable, upload, upload_to};
#[cfg(feature = "libtorch")]
use crate::backend::{LibTorch, libtorch::TchTensor};
#[cfg(feature = "libtorch")]
use crate::device::libtorch_gpu;
use crate::sync::lock;

/// Memory on a GPU of libtorch for the weights of a segment. The computing thread reserves it, and another thread
/// fills it while kernels run. Without a reservation, the memory would be allocated while the kernels of the current
/// segment are queued, and the copies would wait for all of these kernels (rule 3 of `async_copies`).
///
/// The default has no reserved memory, and each weight is uploaded to memory of its own. Devices other than GPUs of
/// libtorch always have the default.
#[derive(Default)]
pub struct SegmentMemory {
    /// Bytes of all weights uploaded so far, in the reserved memory or in memory of their own.
    used_bytes: usize,
    #[cfg(feature = "libtorch")]
    reserved: Option<Reserved>,
}

#[cfg(feature = "libtorch")]
struct Reserved {
    /// Number of the GPU.
    gpu: usize,
    /// The memory, as a tensor of bytes.
    bytes: tch::Tensor,
    destination: Destination<Cuda, tch::Tensor>,
}

/// The size in bytes of each segment at its last fetch, by prefix. Memory of this size is reserved for the next fetch.
#[derive(Default)]
pub struct SegmentSizes(Mutex<HashMap<String, usize>>);

impl SegmentSizes {
    /// Reserves memory for the segment `prefix`. Call this on the thread that queues kernels.
    pub fn reserve(&self, prefix: &str, device: &Device) -> SegmentMemory {
        let bytes = lock(&self.0).get(prefix).copied().unwrap_or(0);
        SegmentMemory::new(bytes, device)
    }

    /// Ends the fetch of the segment `prefix`: remembers its size, and makes kernels queued from now on wait until its
    /// weights are in `memory`.
    pub fn arrived(&self, prefix: &str, memory: SegmentMemory) -> Result<()> {
        lock(&self.0).insert(prefix.to_string(), memory.used_bytes);
        #[cfg(feature = "libtorch")]
        if let Some(reserved) = memory.reserved {
            reserved.destination.arrive()?;
        }
        Ok(())
    }
}

impl SegmentMemory {
    /// Copies values to a device in their own dtype, into this memory if it has room. On the way to a GPU of libtorch,
    /// all threads copy large values.
    pub(crate) fn upload<E: Element + Pod, const D: usize>(
        &mut self,
        values: Cow<'_, [E]>,
        shape: [usize; D],
        device: &Device,
    ) -> Burn<D> {
        let dtype = E::dtype();
        #[cfg(feature = "libtorch")]
        if !device.is_autodiff()
            && let Some(kind) = libtorch_kind(dtype)
            && let Some(tensor) = self.upload_to_gpu(&values, kind, device)
        {
            return Burn::<1>::from_primitive::<LibTorch>(TchTensor::new(tensor)).reshape(shape);
        }
        Burn::from_data(TensorData::new(values.into_owned(), shape), (device, dtype))
    }

    /// Copies the codes of an eight-bit matrix to a device, into this memory if it has room.
    pub(crate) fn upload_codes(&mut self, codes: Vec<u8>, shape: [usize; 2], device: &Device) -> Burn<2, Int> {
        #[cfg(feature = "libtorch")]
        if let Some(tensor) = self.upload_to_gpu(&codes, tch::Kind::Uint8, device) {
            return Burn::<1, Int>::from_primitive::<LibTorch>(TchTensor::new(tensor)).reshape(shape);
        }
        Burn::from_data(TensorData::new(codes, shape), (device, DType::U8))
    }
}

#[cfg(not(feature = "libtorch"))]
impl SegmentMemory {
    fn new(_: usize, _: &Device) -> Self {
        Self::default()
    }
}

/// Weights begin at multiples of this number of bytes, as memory of libtorch's allocator does.
#[cfg(feature = "libtorch")]
const ALIGNMENT: usize = 512;

#[cfg(feature = "libtorch")]
impl SegmentMemory {
    fn new(bytes: usize, device: &Device) -> Self {
        let reserve = || {
            if bytes == 0 {
                return None;
            }
            let gpu = libtorch_gpu(device)?;
            let copy_streams = copy_streams_of(gpu)?;
            let memory = tch::Tensor::f_empty([bytes as i64], (tch::Kind::Uint8, tch::Device::Cuda(gpu))).ok()?;
            let destination = Destination::new(&copy_streams).map_err(|failed| disable(gpu, &failed)).ok()?;
            Some(Reserved { gpu, bytes: memory, destination })
        };
        Self { used_bytes: 0, reserved: reserve() }
    }

    /// Uploads values to a GPU of libtorch, into this memory if they fit. `None` if the caller must upload them.
    fn upload_to_gpu<E: Pod>(&mut self, source: &[E], kind: tch::Kind, device: &Device) -> Option<tch::Tensor> {
        let number = libtorch_gpu(device)?;
        let (start, bytes) = (self.used_bytes, size_of_val(source));
        self.used_bytes += bytes.next_multiple_of(ALIGNMENT);
        match &mut self.reserved {
            Some(reserved) if reserved.gpu == number && start + bytes <= reserved.bytes.numel() => {
                let tensor = reserved.bytes.narrow(0, start as i64, bytes as i64).view_dtype(kind);
                // SAFETY: this part of the memory has no other user, and its tensor is used after `arrived`.
                unsafe { upload_to(&mut reserved.destination, source, &tensor) }
                    .map_err(|failed| disable(number, &failed))
                    .ok()?;
                Some(tensor)
            }
            _ => upload(source, kind, number),
        }
    }
}

#[cfg(feature = "libtorch")]
fn libtorch_kind(dtype: DType) -> Option<tch::Kind> {
    match dtype {
        DType::F32 => Some(tch::Kind::Float),
        DType::BF16 => Some(tch::Kind::BFloat16),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![cfg(feature = "libtorch")]
    use roll_core::Tensor;

    use super::*;
    use crate::{EightBits, ScaledMatrix, ScaledRows, Weight};

    /// Runs on machines with a GPU: weights are uploaded by another thread while kernels run.
    #[test]
    fn reserved_segments_are_exact_on_a_gpu() {
        if !tch::Cuda::is_available() {
            roll_testing::skip!("libtorch finds no GPU", needs = "gpu");
        }
        let device = crate::device("libtorch-cuda").unwrap();
        let (sizes, busy) = (SegmentSizes::default(), Burn::<2>::ones([4096, 4096], &device));
        for round in 0..4 {
            let mut memory = sizes.reserve("blocks.0.", &device);
            assert_eq!(memory.reserved.is_some(), round > 0);
            let product = (0..20).fold(busy.clone(), |x, _| x.matmul(busy.clone()) / 4096.0);
            let dense: Vec<f32> = (0..3_000_001).map(|i| (i * 7 + round) as f32).collect();
            let matrix = Tensor::new(dense[..2_000_000].to_vec(), [1000, 2000]).unwrap();
            let rows = ScaledRows::quantised(&matrix, EightBits::Int8).unwrap();
            let (values, codes) = (dense.clone(), rows.clone());
            let (weight, scaled, memory) = std::thread::scope(|scope| {
                let device = &device;
                let fill = move || {
                    let tensor = Tensor::new(values, [3_000_001]).unwrap();
                    let weight = Weight::uploaded(&tensor, DType::F32, device, &mut memory);
                    (weight, ScaledMatrix::uploaded(codes, device, &mut memory), memory)
                };
                scope.spawn(fill).join().unwrap()
            });
            sizes.arrived("blocks.0.", memory).unwrap();
            assert_eq!(weight.f32::<1>().unwrap().into_data().try_into_vec::<f32>().unwrap(), dense);
            let found: Burn<2, Int> = scaled.codes;
            assert_eq!(found.into_data().convert::<u8>().try_into_vec::<u8>().unwrap(), rows.codes());
            assert_eq!(product.max().into_scalar::<f32>(), 1.0);
        }
    }
}
