//! Copies parameters and gradients between a GPU of libtorch and the flat layout in host memory.
//!
//! A LoRA has hundreds of tensors of less than a megabyte. Copied one by one, each would wait for the GPU and pass
//! through pageable memory. They are therefore concatenated on the GPU and copied in large pieces through pinned memory
//! ([`crate::side_copies`]), while the host processes the preceding piece.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::LibTorch;
use burn::backend::libtorch::TchTensor;
use burn::tensor::{Device, Tensor};
use rayon::prelude::*;
use roll_core::{Error, Result};
use tch::{Kind, TchError};

use crate::BackendError;
use crate::device::libtorch_gpu;
use crate::side_copies::{Cuda, Leaving, Lines, give_up, lines, upload};

/// Elements per piece (64 MiB).
const PIECE: usize = 1 << 24;
/// Elements that a host thread copies at a time.
const CHUNK: usize = 1 << 16;
/// Pieces in flight to the host while one is processed there.
const AHEAD: usize = 2;

/// The GPU of the parameters.
pub(super) struct Gpu {
    lines: Option<Arc<Lines<Cuda>>>,
    device: tch::Device,
    piece: usize,
}

/// A range of one tensor, and its position in the flat layout.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stretch {
    tensor: usize,
    start: usize,
    flat: Range<usize>,
}

/// A piece in flight to the host, or already there.
enum Piece {
    Leaving(Leaving<Cuda, tch::Tensor>),
    Here(Vec<f32>),
}

impl Gpu {
    /// The GPU of `device`; `None` unless it is a GPU of libtorch.
    pub(super) fn of(device: &Device) -> Option<Self> {
        let number = libtorch_gpu(device)?;
        Some(Self { lines: lines(number), device: tch::Device::Cuda(number), piece: PIECE })
    }

    /// Copies `tensors` (some may be `None`) to the host and calls `into` with each part of the flat layout `out` and
    /// the values for it. `lens` has the number of elements of each tensor.
    pub(super) fn download(
        &self,
        tensors: Vec<Option<Tensor<1>>>,
        lens: &[usize],
        out: &mut [f32],
        into: impl Fn(&mut [f32], &[f32]) + Sync,
    ) -> Result<()> {
        let there: Vec<bool> = tensors.iter().map(Option::is_some).collect();
        let tensors = tensors.into_iter().map(|t| t.map(of_libtorch).transpose()).collect::<Result<Vec<_>>>()?;
        let mut under_way = VecDeque::new();
        let mut arrive = |(flat, mut piece): (Vec<Range<usize>>, Piece)| {
            let mut values = match &mut piece {
                Piece::Leaving(leaving) => bytemuck::cast_slice::<u8, f32>(leaving.bytes()?),
                Piece::Here(values) => values.as_slice(),
            };
            for range in flat {
                let (head, tail) = values.split_at(range.len());
                values = tail;
                out[range].par_chunks_mut(CHUNK).zip(head.par_chunks(CHUNK)).for_each(|(out, head)| into(out, head));
            }
            Ok::<_, Error>(())
        };
        for stretches in pieces(lens, &there, self.piece) {
            let parts = stretches.iter().filter_map(|s| Some((tensors[s.tensor].as_ref()?, s)));
            let parts = parts.map(|(tensor, s)| tensor.f_narrow(0, s.start as i64, s.flat.len() as i64));
            let parts = parts.collect::<std::result::Result<Vec<_>, _>>().map_err(failed)?;
            let together = tch::Tensor::f_cat(&parts, 0).map_err(failed)?;
            under_way.push_back((merged(stretches), self.leave(together)?));
            if under_way.len() > AHEAD
                && let Some(first) = under_way.pop_front()
            {
                arrive(first)?;
            }
        }
        under_way.into_iter().try_for_each(arrive)
    }

    /// Starts the copy of `values`, which nothing else refers to, to the host.
    fn leave(&self, values: tch::Tensor) -> Result<Piece> {
        if let (Some(lines), tch::Device::Cuda(number)) = (&self.lines, self.device) {
            let (at, bytes) = (values.data_ptr().expose_provenance(), 4 * values.numel());
            // SAFETY: the values were just concatenated, in unshared memory of that size.
            match unsafe { lines.leave(values.shallow_clone(), at, bytes) } {
                Ok(leaving) => return Ok(Piece::Leaving(leaving)),
                Err(reason) => give_up(number, &reason),
            }
        }
        Ok(Piece::Here(Vec::<f32>::try_from(&values).map_err(failed)?))
    }

    /// Creates tensors of `lens` elements from the flat layout and passes each to `give`, with its index, as soon as it
    /// is complete.
    pub(super) fn upload(&self, lens: &[usize], values: &[f32], mut give: impl FnMut(usize, Tensor<1>)) -> Result<()> {
        let empty = |tensor: usize| tch::Tensor::f_empty([lens[tensor] as i64], (Kind::Float, self.device));
        let mut begun: Option<tch::Tensor> = None;
        for stretches in pieces(lens, &vec![true; lens.len()], self.piece) {
            let (Some(first), Some(last)) = (stretches.first(), stretches.last()) else { continue };
            let piece = self.bring(&values[first.flat.start..last.flat.end])?;
            let mut at = 0;
            for Stretch { tensor, start, flat } in stretches {
                let len = flat.len() as i64;
                let whole = match begun.take() {
                    Some(begun) => begun,
                    None => empty(tensor).map_err(failed)?,
                };
                let mut to = whole.f_narrow(0, start as i64, len).map_err(failed)?;
                to.f_copy_(&piece.f_narrow(0, at, len).map_err(failed)?).map_err(failed)?;
                at += len;
                match start + flat.len() == lens[tensor] {
                    true => give(tensor, Tensor::from_primitive::<LibTorch>(TchTensor::new(whole))),
                    false => begun = Some(whole),
                }
            }
        }
        Ok(())
    }

    /// Copies values to the GPU.
    fn bring(&self, values: &[f32]) -> Result<tch::Tensor> {
        if let tch::Device::Cuda(number) = self.device
            && let Some(piece) = upload(values, Kind::Float, number)
        {
            return Ok(piece);
        }
        let here = tch::Tensor::f_from_slice(values).map_err(failed)?;
        Ok(here.f_to_device(self.device).map_err(failed)?)
    }
}

/// Divides the tensors that are `there` into pieces of `size` elements, in order; the last may be shorter.
fn pieces(lens: &[usize], there: &[bool], size: usize) -> Vec<Vec<Stretch>> {
    let mut pieces = vec![Vec::new()];
    let (mut room, mut at) = (size, 0);
    for (tensor, len) in lens.iter().enumerate() {
        let mut start = 0;
        while there[tensor] && start < *len {
            if room == 0 {
                pieces.push(Vec::new());
                room = size;
            }
            let count = room.min(len - start);
            if let Some(piece) = pieces.last_mut() {
                piece.push(Stretch { tensor, start, flat: at + start..at + start + count });
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
fn merged(stretches: Vec<Stretch>) -> Vec<Range<usize>> {
    let mut places: Vec<Range<usize>> = Vec::new();
    for Stretch { flat, .. } in stretches {
        match places.last_mut() {
            Some(last) if last.end == flat.start => last.end = flat.end,
            _ => places.push(flat),
        }
    }
    places
}

/// Returns the libtorch tensor as f32. Nothing writes to it meanwhile: a parameter has a second handle in its list, and
/// a gradient was taken out of its list.
fn of_libtorch(tensor: Tensor<1>) -> Result<tch::Tensor> {
    let tensor = if tensor.device().is_autodiff() { tensor.inner() } else { tensor };
    let primitive = tensor.try_into_primitive::<LibTorch>();
    let primitive = primitive.map_err(|_| Error::Misuse("a parameter is not on the GPU of its model".into()))?;
    Ok(primitive.tensor.f_to_kind(Kind::Float).map_err(failed)?)
}

fn failed(e: TchError) -> BackendError {
    BackendError::Offload { reason: e.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_cut_into_pieces_of_one_size_and_those_that_are_missing_left_out() {
        let stretch = |tensor, start, flat| Stretch { tensor, start, flat };
        let found = pieces(&[3, 2, 9, 0, 1], &[true, false, true, true, true], 4);
        let expected = [
            vec![stretch(0, 0, 0..3), stretch(2, 0, 5..6)],
            vec![stretch(2, 1, 6..10)],
            vec![stretch(2, 5, 10..14)],
            vec![stretch(4, 0, 14..15)],
        ];
        assert_eq!(found, expected);
        assert_eq!(merged(found[0].clone()), [0..3, 5..6]);
        assert_eq!(pieces(&[2], &[false], 4), Vec::<Vec<Stretch>>::new());
    }

    /// Uses libtorch's CPU instead of a GPU, and a GPU if there is one.
    #[test]
    fn values_and_gradients_cross_as_they_are_in_pieces_of_any_size() {
        let lens = [3, 1, 70_000, 5];
        let total: usize = lens.iter().sum();
        let values: Vec<f32> = (0..total).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut places = vec![Gpu { lines: None, device: tch::Device::Cpu, piece: 0 }];
        if tch::Cuda::is_available() {
            places.extend(Gpu::of(&crate::device("libtorch-cuda").unwrap()));
        }
        for mut gpu in places {
            for piece in [1000, 4096, 1 << 20] {
                gpu.piece = piece;
                let mut tensors = Vec::new();
                let mut give = |tensor: usize, value| {
                    assert_eq!(tensor, tensors.len());
                    tensors.push(value);
                };
                gpu.upload(&lens, &values, &mut give).unwrap();
                let all = |tensors: &[Tensor<1>]| tensors.iter().cloned().map(Some).collect::<Vec<_>>();
                let mut read = vec![0.0; total];
                gpu.download(all(&tensors), &lens, &mut read, |out, values| out.copy_from_slice(values)).unwrap();
                assert_eq!(read, values);
                let mut some = all(&tensors);
                some[1] = None;
                gpu.download(some, &lens, &mut read, |o, g| o.iter_mut().zip(g).for_each(|(o, g)| *o += g)).unwrap();
                let expected = |i: usize| if i == 3 { values[i] } else { 2.0 * values[i] };
                assert!((0..total).all(|i| read[i] == expected(i)));
            }
        }
    }
}
