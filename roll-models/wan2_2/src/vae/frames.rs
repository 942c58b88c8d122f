//! Copies windows of host volumes to the device ([`ChunkReader`]) and back ([`ChunkAccumulator`]). A GPU waits for each
//! copy, so one copy transfers several chunks. Whole frames are copied to the host while the GPU computes the next
//! chunks, and all threads add them to the volume.

use std::borrow::Cow;
use std::ops::Range;

use burn_tensor::{DType, Device, Tensor as Burn, TensorData};
use rayon::prelude::*;
use roll_backends::device::is_gpu;
use roll_backends::host::values_to_device;
use roll_backends::{NdTensor, Offloaded, to_host};
use roll_core::{Error, Result};

use super::volume::{Volume, Window};

/// Bytes per copy. While a GPU works on the chunks of one copy, the host prepares the next.
const COPY_BYTES: usize = 1 << 26;
/// Values that one task of a thread adds.
const VALUES_PER_TASK: usize = 1 << 16;

/// Number of chunks of `frames` frames per copy.
pub(super) fn chunks_per_copy(volume: &Volume, frames: usize, device: &Device) -> usize {
    if is_gpu(device) { chunks_per_gpu_copy(volume, frames) } else { 1 }
}

/// Number of chunks of `frames` frames that [`COPY_BYTES`] hold, at least 1.
fn chunks_per_gpu_copy(volume: &Volume, frames: usize) -> usize {
    let values_per_frame = volume.len() / volume.frames.max(1);
    let chunk_bytes = size_of::<f32>() * values_per_frame * frames;
    (COPY_BYTES / chunk_bytes.max(1)).max(1)
}

/// The frames of chunk `number`. The first chunk has one frame, every other chunk has `frames`.
pub(super) fn chunk_frames(number: usize, frames: usize) -> Range<usize> {
    if number == 0 { 0..1 } else { 1 + (number - 1) * frames..1 + number * frames }
}

/// A volume that is read chunk by chunk.
pub(super) struct ChunkReader<'a> {
    volume: &'a Volume,
    values: &'a [f32],
    device: &'a Device,
    /// Frames per chunk, except in the first chunk.
    frames_per_chunk: usize,
    /// Number of chunks per copy. With 1, only the requested window is copied.
    chunks_per_copy: usize,
    /// The frames that were copied last: their range, and their values in the volume's order of axes.
    copied: Option<(Range<usize>, Burn<4>)>,
}

impl<'a> ChunkReader<'a> {
    pub fn new(
        volume: &'a Volume,
        values: &'a [f32],
        frames_per_chunk: usize,
        chunks_per_copy: usize,
        device: &'a Device,
    ) -> Self {
        Self { volume, values, device, frames_per_chunk, chunks_per_copy, copied: None }
    }

    /// Reads a window of chunk `number` as `[C, T, H, W]`, multiplied by the blend weight of each pixel.
    pub fn read(&mut self, number: usize, window: &Window, blend: Option<&[f32]>) -> Burn<4> {
        if self.chunks_per_copy == 1 {
            let values = self.volume.read(self.values, window, blend);
            return values_to_device(values.into(), self.volume.window_shape(window), self.device);
        }
        let (first_frame, copied) = self.copied_with(number);
        let start_in_copy = window.frames.start - first_frame;
        let [channels, frames, rows, columns] = self.volume.window_shape(window);
        let (top, left) = (window.rows.start, window.columns.start);
        let x = if self.volume.frames_first {
            copied.narrow(0, start_in_copy, frames).swap_dims(0, 1)
        } else {
            copied.narrow(1, start_in_copy, frames)
        };
        let x = x.narrow(2, top, rows).narrow(3, left, columns);
        debug_assert_eq!(x.dims()[0], channels);
        match blend {
            None => x,
            Some(blend) => {
                let data = TensorData::new(blend.to_vec(), [1, 1, rows, columns]);
                x * Burn::<4>::from_data(data, (self.device, DType::F32))
            }
        }
    }

    /// Returns the frames of the copy that transfers chunk `number`: the index of the first frame, and the values of
    /// all frames in the volume's order of axes.
    fn copied_with(&mut self, number: usize) -> (usize, Burn<4>) {
        let first_chunk = number / self.chunks_per_copy * self.chunks_per_copy;
        let last_chunk = first_chunk + self.chunks_per_copy - 1;
        let start = chunk_frames(first_chunk, self.frames_per_chunk).start;
        let frames = start..chunk_frames(last_chunk, self.frames_per_chunk).end.min(self.volume.frames);
        if let Some((range, values)) = &self.copied
            && *range == frames
        {
            return (start, values.clone());
        }
        // The old frames are freed before the new ones are copied.
        self.copied = None;
        let [h, w] = self.volume.size;
        let (channels, count) = (self.volume.channels, frames.len());
        let (values, shape) = if self.volume.frames_first {
            let values_per_frame = channels * h * w;
            let values = &self.values[frames.start * values_per_frame..frames.end * values_per_frame];
            (Cow::Borrowed(values), [count, channels, h, w])
        } else {
            let window = Window { frames: frames.clone(), rows: 0..h, columns: 0..w };
            (Cow::Owned(self.volume.read(self.values, &window, None)), [channels, count, h, w])
        };
        let values = values_to_device(values, shape, self.device);
        self.copied = Some((frames, values.clone()));
        (start, values)
    }
}

/// A volume in host memory to which results are added, chunk by chunk.
pub(super) struct ChunkAccumulator<'a> {
    volume: &'a Volume,
    /// The sums so far.
    values: Vec<f32>,
    chunks_per_copy: usize,
    /// Results that are not copied to the host yet.
    pending: Vec<(Window, Burn<4>)>,
    /// Whole consecutive frames on their way to the host: the index of the first frame, and the values of all frames.
    in_flight: Option<(usize, Offloaded)>,
}

impl<'a> ChunkAccumulator<'a> {
    /// Starts with zeros. Results stay on the device until there are `chunks_per_copy` of them.
    pub fn new(volume: &'a Volume, chunks_per_copy: usize) -> Self {
        Self { volume, values: vec![0f32; volume.len()], chunks_per_copy, pending: Vec::new(), in_flight: None }
    }

    /// Adds `[C, T, H, W]` to a window, multiplied by the blend weight of each pixel. Fails unless `x` has the shape of
    /// the window.
    pub fn add(&mut self, window: Window, x: Burn<4>, blend: Option<&[f32]>) -> Result<()> {
        if x.dims() != self.volume.window_shape(&window) {
            let expected = format!("{:?}", self.volume.window_shape(&window));
            return Err(Error::shape("a chunk of the VAE's result", expected, &x.dims()));
        }
        // A chunk was computed meanwhile: the copy has finished, and its memory on the device is free from here.
        if let Some((_, copy)) = &mut self.in_flight {
            copy.release()?;
        }
        if self.chunks_per_copy == 1 || blend.is_some() {
            self.volume.add(&mut self.values, &window, to_host(x)?.f32s()?, blend);
            return Ok(());
        }
        self.pending.push((window, x));
        if self.pending.len() == self.chunks_per_copy { self.flush() } else { Ok(()) }
    }

    /// Returns the sums, in the volume's order of axes.
    pub fn finish(mut self) -> Result<Vec<f32>> {
        self.flush()?;
        self.add_in_flight()?;
        Ok(self.values)
    }

    /// Adds the frames that are on their way to the host.
    fn add_in_flight(&mut self) -> Result<()> {
        let Some((start, mut copy)) = self.in_flight.take() else { return Ok(()) };
        let frames = copy.values()?;
        let values_per_frame = self.volume.len() / self.volume.frames;
        let target = &mut self.values[start * values_per_frame..][..frames.len()];
        let tasks = target.par_chunks_mut(VALUES_PER_TASK).zip(frames.par_chunks(VALUES_PER_TASK));
        tasks.for_each(|(target, values)| target.iter_mut().zip(values).for_each(|(t, v)| *t += v));
        Ok(())
    }

    /// Copies the pending results to the host: whole frames in the background, other windows at once.
    fn flush(&mut self) -> Result<()> {
        self.add_in_flight()?;
        let pending = std::mem::take(&mut self.pending);
        let has_whole_frames = |window: &Window| [window.rows.len(), window.columns.len()] == self.volume.size;
        let all_have_whole_frames = pending.iter().all(|(window, _)| has_whole_frames(window));
        let ends = pending.iter().map(|(window, _)| window.frames.end);
        let next_starts = pending.iter().skip(1).map(|(window, _)| window.frames.start);
        let are_consecutive = ends.zip(next_starts).all(|(end, next_start)| end == next_start);
        // Only whole, consecutive frames are contiguous in the volume.
        if !(self.volume.frames_first && are_consecutive && all_have_whole_frames) {
            for (window, x) in pending {
                self.volume.add(&mut self.values, &window, to_host(x)?.f32s()?, None);
            }
            return Ok(());
        }
        // Consecutive frames are copied as one tensor.
        let Some(start) = pending.first().map(|(window, _)| window.frames.start) else { return Ok(()) };
        let frames: Vec<_> = pending.into_iter().map(|(_, x)| x.swap_dims(0, 1)).collect();
        let frames = NdTensor::from(Burn::cat(frames, 0).cast(DType::F32));
        self.in_flight = Some((start, Offloaded::new(frames)?));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOLUME: Volume = Volume { channels: 2, frames: 9, size: [3, 4], frames_first: true };

    fn window(number: usize, rows: Range<usize>) -> Window {
        Window { frames: chunk_frames(number, 4), rows, columns: 1..4 }
    }

    #[test]
    fn results_do_not_depend_on_the_number_of_chunks_per_copy() {
        let device = roll_backends::device("flex").unwrap();
        let blend: Vec<f32> = (0..6).map(|i| i as f32 / 8.0).collect();
        for frames_first in [true, false] {
            let volume = Volume { frames_first, ..VOLUME };
            let values: Vec<f32> = (0..volume.len()).map(|i| i as f32).collect();
            let found = [1, 2, 3].map(|chunks_per_copy| {
                let mut reader = ChunkReader::new(&volume, &values, 4, chunks_per_copy, &device);
                let mut accumulator = ChunkAccumulator::new(&volume, chunks_per_copy);
                for number in [0, 1, 2, 1, 0] {
                    let (all, part) = (Window { columns: 0..4, ..window(number, 0..3) }, window(number, 1..3));
                    let (x, y) = (reader.read(number, &all, None), reader.read(number, &part, Some(&blend)));
                    assert_eq!(y.dims(), volume.window_shape(&part));
                    accumulator.add(all, x, None).unwrap();
                    accumulator.add(part.clone(), y.clone(), Some(&blend)).unwrap();
                    accumulator.add(part, y, None).unwrap();
                }
                accumulator.finish().unwrap()
            });
            assert!(found.iter().all(|values| *values == found[0]));
        }
    }

    #[test]
    fn whole_frames_survive_the_copy_to_the_device_and_back() {
        let device = roll_backends::device("flex").unwrap();
        let values: Vec<f32> = (0..VOLUME.len()).map(|i| i as f32).collect();
        let mut reader = ChunkReader::new(&VOLUME, &values, 4, 3, &device);
        let mut accumulator = ChunkAccumulator::new(&VOLUME, 3);
        for number in 0..3 {
            let all = Window { columns: 0..4, ..window(number, 0..3) };
            let x = reader.read(number, &all, None);
            accumulator.add(all, x, None).unwrap();
        }
        assert_eq!(accumulator.finish().unwrap(), values);
    }

    #[test]
    fn whole_frames_are_copied_while_further_ones_are_computed() {
        let device = roll_backends::device("flex").unwrap();
        let volume = Volume { size: [250, 300], ..VOLUME };
        let values: Vec<f32> = (0..volume.len()).map(|i| i as f32).collect();
        let mut reader = ChunkReader::new(&volume, &values, 4, 3, &device);
        let mut accumulator = ChunkAccumulator::new(&volume, 2);
        let mut in_flight = Vec::new();
        for number in 0..3 {
            let all = Window { frames: chunk_frames(number, 4), rows: 0..250, columns: 0..300 };
            let x = reader.read(number, &all, None);
            accumulator.add(all, x, None).unwrap();
            in_flight.push(accumulator.in_flight.as_ref().map(|(start, _)| *start));
        }
        assert_eq!(in_flight, [None, Some(0), Some(0)]);
        assert_eq!(accumulator.finish().unwrap(), values);
    }

    #[test]
    fn rejects_results_of_another_shape() {
        let device = roll_backends::device("flex").unwrap();
        let mut accumulator = ChunkAccumulator::new(&VOLUME, 1);
        assert!(accumulator.add(window(0, 0..3), Burn::zeros([2, 1, 3, 4], (&device, DType::F32)), None).is_err());
    }

    #[test]
    fn a_copy_has_as_many_chunks_as_fit_and_at_least_one() {
        let volume = Volume { channels: 3, frames: 81, size: [480, 480], frames_first: true };
        assert_eq!(chunks_per_gpu_copy(&volume, 4), 6);
        assert_eq!(chunks_per_gpu_copy(&Volume { size: [8000, 8000], ..volume }, 4), 1);
    }
}
