//! Offloading from libtorch's GPUs on the kernels' own stream: the fallback if copy streams cannot be used.

use roll_core::Result;
use tch::{Device, TchError, Tensor};

use super::DeviceTensor;
use crate::BackendError;

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
    pub(super) fn new(tensor: &impl DeviceTensor) -> Result<Option<Self>> {
        match tensor.to_tch() {
            Some((values, shape)) if values.device().is_cuda() => Ok(Some(Self::of(&values, shape)?)),
            _ => Ok(None),
        }
    }

    fn of(values: &Tensor, shape: Vec<usize>) -> Result<Self> {
        let pieces = values.split(PIECE, 0).iter().map(|piece| copy(piece, Device::Cpu)).collect::<Result<_>>()?;
        Ok(Self { pieces, shape, device: values.device() })
    }

    /// Starts the copy back to the GPU.
    pub(super) fn upload<T: DeviceTensor>(&self) -> Result<T> {
        let pieces = self.pieces.iter().map(|piece| copy(piece, self.device)).collect::<Result<Vec<_>>>()?;
        // A single piece is not copied again.
        let values = match pieces.as_slice() {
            [whole] => whole.shallow_clone(),
            pieces => Tensor::f_cat(pieces, 0).map_err(failed)?,
        };
        Ok(T::from_tch(values, &self.shape))
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
    use burn::tensor::{DType, Int, Tensor as Burn};

    use super::*;
    use crate::NdTensor;

    #[test]
    fn a_small_tensor_round_trips() {
        let values = Tensor::from_slice(&[1.5_f32, -2.0, 0.0, 3.25, 4.0, 5.0]).to_kind(tch::Kind::BFloat16);
        let back: NdTensor = Pinned::of(&values, vec![2, 3]).unwrap().upload().unwrap();
        assert_eq!((back.shape(), back.flat().dtype()), (&[2, 3][..], DType::BF16));
        assert_eq!(crate::host::to_host_nd(&back).unwrap().to_f32_vec(), [1.5, -2.0, 0.0, 3.25, 4.0, 5.0]);
    }

    #[test]
    fn codes_round_trip() {
        let codes: Vec<u8> = (0..=255).collect();
        let pinned = Pinned::of(&Tensor::from_slice(&codes), vec![64, 4]).unwrap();
        let back: Burn<2, Int> = pinned.upload().unwrap();
        assert_eq!((back.dims(), back.dtype()), ([64, 4], DType::U8));
        let (values, shape) = back.to_tch().unwrap();
        assert_eq!((Vec::<u8>::try_from(values).unwrap(), shape), (codes, vec![64, 4]));
    }

    #[test]
    fn a_tensor_of_several_pieces_round_trips() {
        let values = Tensor::arange(PIECE + 5, (tch::Kind::Float, Device::Cpu));
        let pinned = Pinned::of(&values, vec![PIECE as usize + 5]).unwrap();
        let lengths: Vec<i64> = pinned.pieces.iter().map(|piece| piece.size()[0]).collect();
        assert_eq!(lengths, [PIECE, 5]);
        let back = crate::host::to_host_nd(&pinned.upload::<NdTensor>().unwrap()).unwrap().to_f32_vec();
        assert!(back.iter().enumerate().all(|(i, v)| *v == i as f32));
    }
}
