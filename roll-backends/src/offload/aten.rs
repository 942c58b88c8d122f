//! Offloading from libtorch's GPUs on the kernels' own stream: the fallback if copy streams cannot be used.

use burn::backend::LibTorch;
use burn::backend::libtorch::TchTensor;
use burn::tensor::Tensor as Burn;
use roll_core::Result;
use tch::{Device, TchError, Tensor};

use crate::{BackendError, NdTensor};

/// Elements per piece. ATen allocates pinned memory in powers of two: whole tensors would take up to twice their size.
const PIECE: i64 = 1 << 23;

/// Values in pinned host memory, in pieces. Copies in both directions are queued on the kernels' stream, and the host
/// waits for neither. libtorch reuses the pinned memory only after the copies have finished.
pub(super) struct Pinned {
    pieces: Vec<Tensor>,
    shape: Vec<usize>,
    device: Device,
}

impl Pinned {
    /// Starts the copy of a tensor to the host. `None` unless the tensor is on a GPU of libtorch.
    pub(super) fn new(tensor: &NdTensor) -> Result<Option<Self>> {
        match tensor.flat().clone().try_into_primitive::<LibTorch>() {
            Ok(TchTensor { tensor: values, .. }) if values.device().is_cuda() => {
                Ok(Some(Self::of(&values, tensor.shape().to_vec())?))
            }
            _ => Ok(None),
        }
    }

    fn of(values: &Tensor, shape: Vec<usize>) -> Result<Self> {
        let pieces = values.split(PIECE, 0).iter().map(|piece| copy(piece, Device::Cpu)).collect::<Result<_>>()?;
        Ok(Self { pieces, shape, device: values.device() })
    }

    /// Starts the copy back to the GPU.
    pub(super) fn upload(&self) -> Result<NdTensor> {
        let pieces = self.pieces.iter().map(|piece| copy(piece, self.device)).collect::<Result<Vec<_>>>()?;
        // A single piece is not copied again.
        let values = match pieces.as_slice() {
            [whole] => whole.shallow_clone(),
            pieces => Tensor::f_cat(pieces, 0).map_err(failed)?,
        };
        let values = TchTensor::new(values);
        Ok(NdTensor::from_flat(Burn::from_primitive::<LibTorch>(values), self.shape.clone()))
    }
}

/// Non-blocking copy. From a GPU to the host, ATen allocates pinned memory for it.
fn copy(values: &Tensor, to: Device) -> Result<Tensor> {
    let (do_not_wait, always) = (true, true);
    Ok(values.f_to_device_(to, values.kind(), do_not_wait, always).map_err(failed)?)
}

pub(super) fn failed(e: TchError) -> BackendError {
    BackendError::Offload { reason: e.to_string() }
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;

    use super::*;

    #[test]
    fn a_small_tensor_round_trips() {
        let values = Tensor::from_slice(&[1.5_f32, -2.0, 0.0, 3.25, 4.0, 5.0]).to_kind(tch::Kind::BFloat16);
        let back = Pinned::of(&values, vec![2, 3]).unwrap().upload().unwrap();
        assert_eq!((back.shape(), back.flat().dtype()), (&[2, 3][..], DType::BF16));
        assert_eq!(crate::host::to_host_nd(&back).unwrap().to_f32_vec(), [1.5, -2.0, 0.0, 3.25, 4.0, 5.0]);
    }

    #[test]
    fn a_tensor_of_several_pieces_round_trips() {
        let values = Tensor::arange(PIECE + 5, (tch::Kind::Float, Device::Cpu));
        let pinned = Pinned::of(&values, vec![PIECE as usize + 5]).unwrap();
        let lengths: Vec<i64> = pinned.pieces.iter().map(|piece| piece.size()[0]).collect();
        assert_eq!(lengths, [PIECE, 5]);
        let back = crate::host::to_host_nd(&pinned.upload().unwrap()).unwrap().to_f32_vec();
        assert!(back.iter().enumerate().all(|(i, v)| *v == i as f32));
    }
}
