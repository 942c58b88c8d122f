//! libtorch's GPUs: host memory that the device reads and writes by itself.

use burn::backend::LibTorch;
use burn::backend::libtorch::TchTensor;
use burn::tensor::Tensor as Burn;
use roll_core::Result;
use tch::{Device, TchError, Tensor};

use crate::{BackendError, NdTensor};

/// Values in pinned host memory. Copies there and back are queued on the device's stream, in order with the kernels, and
/// the host waits for neither; libtorch gives the memory to others only when they are done.
pub(super) struct Pinned {
    values: Tensor,
    shape: Vec<usize>,
    device: Device,
}

impl Pinned {
    /// Sends a tensor to the host; `None` unless it lies on a GPU of libtorch's.
    pub(super) fn new(tensor: &NdTensor) -> Result<Option<Self>> {
        match tensor.flat().clone().try_into_primitive::<LibTorch>() {
            Ok(TchTensor { tensor: values, .. }) if values.device().is_cuda() => {
                Ok(Some(Self::of(&values, tensor.shape().to_vec())?))
            }
            _ => Ok(None),
        }
    }

    fn of(values: &Tensor, shape: Vec<usize>) -> Result<Self> {
        Ok(Self { values: copy(values, Device::Cpu)?, shape, device: values.device() })
    }

    /// Sends it back.
    pub(super) fn back(&self) -> Result<NdTensor> {
        let values = TchTensor::new(copy(&self.values, self.device)?);
        Ok(NdTensor::from_flat(Burn::from_primitive::<LibTorch>(values), self.shape.clone()))
    }
}

/// From a GPU to the host, ATen takes pinned memory for a copy that is not waited for.
fn copy(values: &Tensor, to: Device) -> Result<Tensor> {
    let (do_not_wait, always) = (true, true);
    let failed = |e: TchError| BackendError::Offload { reason: e.to_string() };
    Ok(values.f_to_device_(to, values.kind(), do_not_wait, always).map_err(failed)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use burn::tensor::DType;

    use super::*;

    #[test]
    fn a_tensor_comes_back_as_it_was() {
        let values = Tensor::from_slice(&[1.5_f32, -2.0, 0.0, 3.25, 4.0, 5.0]).to_kind(tch::Kind::BFloat16);
        let back = Pinned::of(&values, vec![2, 3]).unwrap().back().unwrap();
        assert_eq!((back.shape(), back.flat().dtype()), (&[2, 3][..], DType::BF16));
        assert_eq!(crate::host::to_host_nd(&back).unwrap().to_f32_vec(), [1.5, -2.0, 0.0, 3.25, 4.0, 5.0]);
    }
}
