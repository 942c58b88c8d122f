//! Uploads host values to a GPU of libtorch through a few pinned staging buffers.
//!
//! libtorch copies pageable memory on a single thread of the driver, at a few GB/s. Here all threads copy it to pinned
//! memory, from which the GPU fetches it.

use bytemuck::Pod;
use rayon::prelude::*;
use tch::{Device, Kind, Tensor};

use super::{Cuda, Destination, RuntimeError, copy_streams_of, disable};

/// Size of a staging buffer in bytes.
const PIECE: usize = 1 << 26;
/// Size in bytes below which the driver's copy is as fast.
const SMALL: usize = 1 << 20;
/// Number of staging buffers that are filled or copied at the same time.
const BUFFERS: usize = 3;
/// Bytes that a host thread copies at a time.
const CHUNK: usize = 1 << 18;

/// Copies values to a new tensor on GPU `number`, complete for kernels queued from now on. `None` if the values take
/// less than [`SMALL`] bytes or copy streams cannot be used; the caller must then copy them by itself.
pub(crate) fn upload<E: Pod>(values: &[E], kind: Kind, number: usize) -> Option<Tensor> {
    if size_of_val(values) < SMALL {
        return None;
    }
    let copy_streams = copy_streams_of(number)?;
    let tensor = Tensor::f_empty([values.len() as i64], (kind, Device::Cuda(number))).ok()?;
    let copy = || {
        let mut destination = Destination::new(&copy_streams)?;
        // SAFETY: the memory was just allocated, and is not shared before the copies have arrived.
        unsafe { upload_to(&mut destination, values, &tensor)? };
        destination.arrive()
    };
    copy().map_err(|error| disable(number, &error)).ok()?;
    Some(tensor)
}

/// Starts the copies of values to `tensor`, which has their size.
///
/// # Safety
/// The requirements of [`Destination::fill`].
pub(crate) unsafe fn upload_to<E: Pod>(
    destination: &mut Destination<Cuda, Tensor>,
    values: &[E],
    tensor: &Tensor,
) -> Result<(), RuntimeError> {
    debug_assert_eq!((size_of::<E>(), values.len()), (tensor.kind().elt_size_in_bytes(), tensor.numel()));
    let bytes = bytemuck::cast_slice::<E, u8>(values);
    if bytes.len() > PIECE {
        destination.copy_streams.reserve(PIECE, BUFFERS)?;
    }
    let mut at = tensor.data_ptr().expose_provenance();
    for piece in bytes.chunks(PIECE) {
        let fill = |to: &mut [u8]| {
            to.par_chunks_mut(CHUNK).zip(piece.par_chunks(CHUNK)).for_each(|(to, from)| to.copy_from_slice(from));
        };
        // SAFETY: as the caller promises.
        unsafe { destination.fill(piece.len(), fill, tensor.shallow_clone(), at)? };
        at += piece.len();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs on machines with a GPU.
    #[test]
    fn uploads_of_several_pieces_are_exact_on_a_gpu() {
        if !tch::Cuda::is_available() {
            roll_testing::skip!("libtorch finds no GPU", needs = "gpu");
        }
        for count in [SMALL / 4, PIECE / 4, 3 * PIECE / 4 + 7] {
            let values: Vec<f32> = (0..count).map(|i| i as f32).collect();
            let tensor = upload(&values, Kind::Float, 0).expect("the CUDA runtime of libtorch is found");
            assert_eq!(Vec::<f32>::try_from(&tensor).ok(), Some(values));
        }
    }
}
