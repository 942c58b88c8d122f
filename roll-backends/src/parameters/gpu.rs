//! Copies parameters and gradients between a GPU of libtorch and the flat layout in host memory.
//!
//! A LoRA has hundreds of tensors of less than a megabyte. Copied one by one, each would wait for the GPU and pass
//! through pageable memory. They are therefore concatenated on the GPU and copied in large pieces through pinned memory
//! ([`crate::async_copies`]), while the host processes the preceding piece.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use burn_tensor::{Device, Tensor};
use rayon::prelude::*;
use roll_core::{Error, Result};
use tch::{Kind, TchError};

use super::detached;
use crate::BackendError;
use crate::async_copies::{CopyStreams, Cuda, D2hCopy, copy_streams_of, disable, upload};
use crate::backend::LibTorch;
use crate::backend::libtorch::TchTensor;
use crate::device::libtorch_gpu;

/// Elements per piece (64 MiB).
const PIECE: usize = 1 << 24;
/// Elements that a host thread copies at a time.
const CHUNK: usize = 1 << 16;
/// Pieces in flight to the host while one is processed there.
const IN_FLIGHT: usize = 2;

/// The GPU of libtorch that holds the parameters.
pub(super) struct Gpu {
    /// `None` if they cannot be used; copies then go through pageable memory.
    copy_streams: Option<Arc<CopyStreams<Cuda>>>,
    device: tch::Device,
    /// Elements per piece.
    piece: usize,
}

/// A range of the elements of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TensorRange {
    /// Index of the tensor.
    tensor: usize,
    /// First element within the tensor.
    start: usize,
    /// The same elements in the flat layout.
    flat: Range<usize>,
}

/// A piece on its way to the host, or already in host memory.
enum PieceCopy {
    InFlight(D2hCopy<Cuda, tch::Tensor>),
    Done(Vec<f32>),
}

impl Gpu {
    /// The GPU of `device`; `None` unless it is a GPU of libtorch.
    pub(super) fn of(device: &Device) -> Option<Self> {
        let number = libtorch_gpu(device)?;
        Some(Self { copy_streams: copy_streams_of(number), device: tch::Device::Cuda(number), piece: PIECE })
    }

    /// Copies `tensors` to the host, and calls `combine` with slices of the flat layout `out` and the values for them.
    /// A tensor that is `None` leaves its part of `out` as it is. `lengths` has the number of elements of each tensor.
    pub(super) fn download(
        &self,
        tensors: Vec<Option<Tensor<1>>>,
        lengths: &[usize],
        out: &mut [f32],
        combine: impl Fn(&mut [f32], &[f32]) + Sync,
    ) -> Result<()> {
        let is_present: Vec<bool> = tensors.iter().map(Option::is_some).collect();
        let tensors = tensors.into_iter().map(|t| t.map(of_libtorch).transpose()).collect::<Result<Vec<_>>>()?;
        let mut in_flight = VecDeque::new();
        let mut finish = |(flat, mut piece): (Vec<Range<usize>>, PieceCopy)| {
            let mut values = match &mut piece {
                PieceCopy::InFlight(copy) => bytemuck::cast_slice::<u8, f32>(copy.wait_for_bytes()?),
                PieceCopy::Done(values) => values.as_slice(),
            };
            for range in flat {
                let (head, tail) = values.split_at(range.len());
                values = tail;
                out[range].par_chunks_mut(CHUNK).zip(head.par_chunks(CHUNK)).for_each(|(out, head)| combine(out, head));
            }
            Ok::<_, Error>(())
        };
        for ranges in pieces(lengths, &is_present, self.piece) {
            let mut parts = Vec::new();
            for TensorRange { tensor, start, flat } in &ranges {
                if let Some(values) = &tensors[*tensor] {
                    parts.push(values.f_narrow(0, *start as i64, flat.len() as i64).map_err(offload_error)?);
                }
            }
            let piece = tch::Tensor::f_cat(&parts, 0).map_err(offload_error)?;
            in_flight.push_back((merged(ranges), self.begin_download(piece)?));
            if in_flight.len() > IN_FLIGHT
                && let Some(first) = in_flight.pop_front()
            {
                finish(first)?;
            }
        }
        in_flight.into_iter().try_for_each(finish)
    }

    /// Starts the copy of `values`, which nothing else refers to, to the host.
    fn begin_download(&self, values: tch::Tensor) -> Result<PieceCopy> {
        if let (Some(copy_streams), tch::Device::Cuda(number)) = (&self.copy_streams, self.device) {
            let (at, bytes) = (values.data_ptr().expose_provenance(), size_of::<f32>() * values.numel());
            // SAFETY: the values were just concatenated, in unshared memory of that size.
            match unsafe { copy_streams.begin_d2h(values.shallow_clone(), at, bytes) } {
                Ok(copy) => return Ok(PieceCopy::InFlight(copy)),
                Err(reason) => disable(number, &reason),
            }
        }
        Ok(PieceCopy::Done(Vec::<f32>::try_from(&values).map_err(offload_error)?))
    }

    /// Creates tensors of `lengths` elements from the flat layout and passes each to `on_complete`, with its index, as
    /// soon as it is complete.
    pub(super) fn upload(
        &self,
        lengths: &[usize],
        values: &[f32],
        mut on_complete: impl FnMut(usize, Tensor<1>),
    ) -> Result<()> {
        let new_tensor = |index: usize| tch::Tensor::f_empty([lengths[index] as i64], (Kind::Float, self.device));
        let all_present = vec![true; lengths.len()];
        let mut unfinished: Option<tch::Tensor> = None;
        for ranges in pieces(lengths, &all_present, self.piece) {
            let (Some(first), Some(last)) = (ranges.first(), ranges.last()) else { continue };
            let piece = self.upload_piece(&values[first.flat.start..last.flat.end])?;
            let mut at = 0;
            for TensorRange { tensor, start, flat } in ranges {
                let len = flat.len() as i64;
                let whole = match unfinished.take() {
                    Some(unfinished) => unfinished,
                    None => new_tensor(tensor).map_err(offload_error)?,
                };
                let mut to = whole.f_narrow(0, start as i64, len).map_err(offload_error)?;
                to.f_copy_(&piece.f_narrow(0, at, len).map_err(offload_error)?).map_err(offload_error)?;
                at += len;
                if start + flat.len() == lengths[tensor] {
                    on_complete(tensor, Tensor::from_primitive::<LibTorch>(TchTensor::new(whole)));
                } else {
                    // The rest of the tensor is in the next piece.
                    unfinished = Some(whole);
                }
            }
        }
        Ok(())
    }

    fn upload_piece(&self, values: &[f32]) -> Result<tch::Tensor> {
        if let tch::Device::Cuda(number) = self.device
            && let Some(piece) = upload(values, Kind::Float, number)
        {
            return Ok(piece);
        }
        let here = tch::Tensor::f_from_slice(values).map_err(offload_error)?;
        Ok(here.f_to_device(self.device).map_err(offload_error)?)
    }
}

/// Divides the tensors that are present into pieces of `size` elements, in order; the last may be shorter.
fn pieces(lengths: &[usize], is_present: &[bool], size: usize) -> Vec<Vec<TensorRange>> {
    let mut pieces = vec![Vec::new()];
    let (mut room, mut at) = (size, 0);
    for (tensor, len) in lengths.iter().enumerate() {
        let mut start = 0;
        while is_present[tensor] && start < *len {
            if room == 0 {
                pieces.push(Vec::new());
                room = size;
            }
            let count = room.min(len - start);
            if let Some(piece) = pieces.last_mut() {
                piece.push(TensorRange { tensor, start, flat: at + start..at + start + count });
            }
            room -= count;
            start += count;
        }
        at += len;
    }
    pieces.retain(|piece| !piece.is_empty());
    pieces
}

/// Ranges of the flat layout, with adjacent ones merged.
fn merged(ranges: Vec<TensorRange>) -> Vec<Range<usize>> {
    let mut merged: Vec<Range<usize>> = Vec::new();
    for TensorRange { flat, .. } in ranges {
        match merged.last_mut() {
            Some(last) if last.end == flat.start => last.end = flat.end,
            _ => merged.push(flat),
        }
    }
    merged
}

/// Returns the libtorch tensor as f32. Nothing writes to its memory while it is copied: Burn writes to new memory if a
/// tensor has a second handle, as a parameter has in its list; a gradient was taken out of its list.
fn of_libtorch(tensor: Tensor<1>) -> Result<tch::Tensor> {
    let primitive = detached(tensor).try_into_primitive::<LibTorch>();
    let primitive = primitive.map_err(|_| Error::Misuse("a parameter is not on the GPU of its model".into()))?;
    Ok(primitive.tensor.f_to_kind(Kind::Float).map_err(offload_error)?)
}

fn offload_error(e: TchError) -> BackendError {
    BackendError::Offload { reason: e.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_have_one_size_and_skip_missing_tensors() {
        let range = |tensor, start, flat| TensorRange { tensor, start, flat };
        let found = pieces(&[3, 2, 9, 0, 1], &[true, false, true, true, true], 4);
        let expected = [
            vec![range(0, 0, 0..3), range(2, 0, 5..6)],
            vec![range(2, 1, 6..10)],
            vec![range(2, 5, 10..14)],
            vec![range(4, 0, 14..15)],
        ];
        assert_eq!(found, expected);
        assert_eq!(merged(found[0].clone()), [0..3, 5..6]);
        assert_eq!(pieces(&[2], &[false], 4), Vec::<Vec<TensorRange>>::new());
    }

    /// Uses libtorch's CPU instead of a GPU, and a GPU if there is one.
    #[test]
    fn downloads_and_uploads_are_exact_for_any_piece_size() {
        let lengths = [3, 1, 70_000, 5];
        let total: usize = lengths.iter().sum();
        let values: Vec<f32> = (0..total).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut gpus = vec![Gpu { copy_streams: None, device: tch::Device::Cpu, piece: 0 }];
        if tch::Cuda::is_available() {
            gpus.extend(Gpu::of(&crate::device("libtorch-cuda").unwrap()));
        }
        for mut gpu in gpus {
            for piece in [1000, 4096, 1 << 20] {
                gpu.piece = piece;
                let mut tensors = Vec::new();
                let mut keep = |tensor: usize, value| {
                    assert_eq!(tensor, tensors.len());
                    tensors.push(value);
                };
                gpu.upload(&lengths, &values, &mut keep).unwrap();
                let all = |tensors: &[Tensor<1>]| tensors.iter().cloned().map(Some).collect::<Vec<_>>();
                let mut read = vec![0.0; total];
                gpu.download(all(&tensors), &lengths, &mut read, |out, values| out.copy_from_slice(values)).unwrap();
                assert_eq!(read, values);
                let mut some = all(&tensors);
                some[1] = None;
                gpu.download(some, &lengths, &mut read, |o, g| o.iter_mut().zip(g).for_each(|(o, g)| *o += g)).unwrap();
                let expected = |i: usize| if i == 3 { values[i] } else { 2.0 * values[i] };
                assert!((0..total).all(|i| read[i] == expected(i)));
            }
        }
    }
}
