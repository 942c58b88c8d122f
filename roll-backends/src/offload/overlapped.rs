//! Offloading from CUDA tensors of libtorch, on separate copy streams ([`crate::async_copies`]).

use roll_core::{Error, Result};
use tch::{Device, Kind, TchError, Tensor};

use super::DeviceTensor;
use crate::BackendError;
use crate::async_copies::{Cuda, D2hCopy, H2dCopy, copy_streams_of, disable};

/// A tensor in pinned host memory, or in flight to it.
pub(super) struct Overlapped<T> {
    copy: D2hCopy<Cuda, T>,
    shape: Vec<usize>,
    kind: Kind,
    device: Device,
}

impl<T: DeviceTensor> Overlapped<T> {
    /// Starts the copy of a tensor to the host. `None` unless the tensor is on a GPU of libtorch that has copy streams.
    pub(super) fn new(tensor: &T) -> Option<Self> {
        let (values, shape) = tensor.to_tch()?;
        let (device, kind) = (values.device(), values.kind());
        let Device::Cuda(number) = device else { return None };
        let copy_streams = copy_streams_of(number)?;
        let source =
            if values.is_contiguous() { tensor.clone() } else { T::from_tch(values.f_contiguous().ok()?, &shape) };
        let (values, shape) = source.to_tch()?;
        let bytes = values.numel() * kind.elt_size_in_bytes();
        // SAFETY: `source` is a handle of Burn on contiguous memory of that size. No operation writes to memory that
        // has two handles.
        match unsafe { copy_streams.begin_d2h(source, values.data_ptr().expose_provenance(), bytes) } {
            Ok(copy) => Some(Self { copy, shape, kind, device }),
            Err(reason) => {
                disable(number, &reason);
                None
            }
        }
    }

    /// Makes kernels launched from now on wait for the copy, which has usually finished long before, and then releases
    /// the device memory. The host does not wait.
    pub(super) fn release(&mut self) -> Result<()> {
        Ok(self.copy.release()?)
    }

    /// Waits for the copy and returns its values, which are not copied again. Fails unless they are f32.
    pub(super) fn values(&mut self) -> Result<&[f32]> {
        if self.kind != Kind::Float {
            return Err(Error::Misuse(format!("expected f32 in host memory, found {:?}", self.kind)));
        }
        // The cast cannot fail: pinned memory begins at a page, and so is aligned for f32.
        Ok(bytemuck::cast_slice(self.copy.wait_for_bytes()?))
    }

    /// Starts the copy back to the GPU.
    pub(super) fn upload(&mut self) -> Result<H2dCopy<Cuda, T>> {
        let count: usize = self.shape.iter().product();
        let values = Tensor::f_empty([count as i64], (self.kind, self.device)).map_err(offload_error)?;
        let at = values.data_ptr().expose_provenance();
        // SAFETY: the memory was just allocated, has that number of elements, and is not shared before the copy
        // arrives.
        Ok(unsafe { self.copy.begin_h2d(T::from_tch(values, &self.shape), at)? })
    }
}

fn offload_error(e: TchError) -> BackendError {
    BackendError::Offload { reason: e.to_string() }
}

#[cfg(test)]
mod tests {
    use burn_tensor::{DType, Int, Tensor as Burn, TensorData};

    use super::*;
    use crate::NdTensor;
    use crate::host::to_host_nd;

    #[test]
    fn wrapped_tensors_keep_bits_dtype_and_shape() {
        let values = Tensor::from_slice(&[1.5_f32, -2.0, 0.0, 3.25, 4.0, 5.0]).to_kind(Kind::BFloat16);
        let back = NdTensor::from_tch(values, &[2, 3]);
        assert_eq!((back.shape(), back.flat().dtype()), (&[2, 3][..], DType::BF16));
        assert_eq!(to_host_nd(&back).unwrap().to_f32_vec(), [1.5, -2.0, 0.0, 3.25, 4.0, 5.0]);
        let codes: Vec<u8> = (0..=255).collect();
        let back = Burn::<2, Int>::from_tch(Tensor::from_slice(&codes), &[64, 4]);
        assert_eq!((back.dims(), back.dtype()), ([64, 4], DType::U8));
        let (values, shape) = back.to_tch().unwrap();
        assert_eq!((Vec::<u8>::try_from(values).unwrap(), shape), (codes, vec![64, 4]));
    }

    /// Runs on machines with a GPU: tensors are offloaded and return while kernels use, free and reuse their memory.
    #[test]
    fn offloaded_tensors_survive_concurrent_kernels_on_a_gpu() {
        if !tch::Cuda::is_available() {
            roll_testing::skip!("libtorch finds no GPU", needs = "gpu");
        }
        let device = crate::device("libtorch-cuda").unwrap();
        let (count, rounds) = (1 << 22, 24);
        for dtype in [DType::F32, DType::BF16] {
            let mut offloaded = Vec::new();
            for round in 0..rounds {
                let start: Vec<f32> = (0..count).map(|i| ((i + round) % 251) as f32).collect();
                let start = Burn::<1>::from_data(TensorData::new(start, [count]), (&device, DType::F32));
                // A product that takes longer than the copy: a copy that did not wait for it would be wrong.
                let square = start.clone().narrow(0, 0, 1 << 22).reshape([2048, 2048]);
                let late = square.clone().matmul(square).mean().reshape([1]) * 0.0;
                let tensor = NdTensor::from_flat((start + late).cast(dtype), [count]);
                let mut copy = Overlapped::new(&tensor).expect("the CUDA runtime of libtorch is found");
                copy.release().unwrap();
                drop(tensor);
                if dtype == DType::F32 {
                    let values = copy.values().unwrap();
                    assert!(values.iter().enumerate().all(|(i, v)| *v == ((i + round) % 251) as f32), "{round}");
                }
                offloaded.push(copy);
                // Reuses the memory that was just freed.
                drop(Burn::<1>::ones([count], (&device, dtype)) * -1.0);
            }
            for (round, mut copy) in offloaded.into_iter().enumerate().rev() {
                let used_before = Burn::<1>::ones([count], (&device, dtype)) * -2.0;
                drop(used_before);
                let in_flight = copy.upload().unwrap();
                drop(copy);
                let found = to_host_nd(&in_flight.into_tensor().unwrap()).unwrap().to_f32_vec();
                assert!(found.iter().enumerate().all(|(i, v)| *v == ((i + round) % 251) as f32), "{round}");
            }
        }
    }

    /// Runs on machines with a GPU.
    #[test]
    fn codes_round_trip_on_a_gpu() {
        if !tch::Cuda::is_available() {
            roll_testing::skip!("libtorch finds no GPU", needs = "gpu");
        }
        let device = crate::device("libtorch-cuda").unwrap();
        let codes: Vec<u8> = (0..1024 * 1030).map(|i| (i % 251) as u8).collect();
        let tensor = Burn::<2, Int>::from_data(TensorData::new(codes.clone(), [1024, 1030]), (&device, DType::U8));
        let mut copy = Overlapped::new(&tensor).expect("the CUDA runtime of libtorch is found");
        copy.release().unwrap();
        drop(tensor);
        for _ in 0..3 {
            let back = copy.upload().unwrap().into_tensor().unwrap();
            assert_eq!(back.to_host().unwrap().as_slice::<u8>().unwrap(), codes);
        }
    }
}
