//! Selects, resizes and collects the frames of a video as they are decoded.

use std::ops::ControlFlow;
use std::path::Path;

use roll_core::{Error, Result, Tensor, Video};

use crate::picture::Picture;
use crate::read_options::{ReadOptions, Sizing};
use crate::resize::{crop_and_resize, target_size};

/// Frame rate of images, which have no rate of their own: the rate of Wan's training data.
pub(crate) const STILL_FPS: f64 = 16.0;
/// Maximum size of one decoded video in memory, as f32.
pub(crate) const MAX_VIDEO_BYTES: usize = 8 << 30;

/// Maximum number of frames that are kept of an animated picture, whose reader announces their number. The size of the
/// file is no bound, because a frame may take only a few bytes.
const MAX_ANNOUNCED_FRAMES: usize = 10_000;

/// The frames that `options` select, in four stages. First, the source frames are resampled to `fps`: each makes no,
/// one or several *output frames*. Then every `every`-th output frame is selected, the first `skip` of these are left
/// out, and at most `max_frames` are kept.
pub(crate) struct Frames {
    options: ReadOptions,
    /// Frame rate of the file; set by the reader.
    pub source_fps: f64,
    /// Whether a frame was rejected, in which case another decoder would not help.
    pub is_rejected: bool,
    /// Maximum size of the kept frames in memory, in bytes.
    pub max_bytes: usize,
    /// Number of output frames of the whole file, if the reader knows it.
    announced: Option<usize>,
    /// Number of output frames so far.
    frames_seen: usize,
    /// Number of selected frames that `skip` has left out so far.
    skipped: usize,
    /// Number of frames that are kept.
    frame_count: usize,
    /// `[height, width]` of the kept frames.
    size: Option<[usize; 2]>,
    /// Planes of the kept frames, `[frames, 3, height, width]`.
    values: Vec<f32>,
}

impl Frames {
    pub fn new(options: &ReadOptions) -> Self {
        Self {
            options: *options,
            source_fps: STILL_FPS,
            is_rejected: false,
            max_bytes: MAX_VIDEO_BYTES,
            announced: None,
            frames_seen: 0,
            skipped: 0,
            frame_count: 0,
            size: None,
            values: Vec::new(),
        }
    }

    /// Announces the number of source frames to come, and the seconds that they are shown, if known.
    pub fn announce(&mut self, frames: usize, seconds: Option<f64>) {
        self.announced = match self.options.fps {
            None => Some(frames),
            Some(fps) => seconds.map(|seconds| times_before(seconds, fps)),
        };
    }

    /// Number of output frames so far.
    pub fn seen(&self) -> usize {
        self.frames_seen
    }

    /// Whether the requested number of frames is kept.
    pub fn is_full(&self) -> bool {
        self.options.max_frames.is_some_and(|max| self.frame_count >= max)
    }

    /// Adds the next source frame, which is shown during `[from, to]` seconds. It makes one output frame for each
    /// sampling time of the requested rate in this interval.
    pub fn push_at(&mut self, picture: Picture, [from, to]: [f64; 2]) -> Result<ControlFlow<()>, String> {
        let output_frames = match self.options.fps {
            None => 1,
            Some(fps) => times_before(to, fps).saturating_sub(times_before(from, fps)),
        };
        self.push(picture, output_frames)
    }

    /// Adds the next source frame, which makes `output_frames`.
    pub fn push(&mut self, picture: Picture, output_frames: usize) -> Result<ControlFlow<()>, String> {
        if !self.is_full() {
            let selected_before = self.selected_of(self.frames_seen);
            self.frames_seen = self.frames_seen.saturating_add(output_frames);
            let selected = self.selected_of(self.frames_seen) - selected_before;
            if selected > 0 {
                self.take(picture, selected).inspect_err(|_| self.is_rejected = true)?;
            }
        }
        Ok(if self.is_full() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }

    /// Number of frames that `every` selects among the first `output_frames`.
    fn selected_of(&self, output_frames: usize) -> usize {
        output_frames.div_ceil(self.options.every.max(1))
    }

    /// Adds a source frame of which `every` selected `selected` output frames.
    fn take(&mut self, picture: Picture, selected: usize) -> Result<(), String> {
        let skipped = selected.min(self.options.skip - self.skipped);
        self.skipped += skipped;
        let copies = selected - skipped;
        if copies == 0 {
            return Ok(());
        }
        let picture = fit(picture, self.options.sizing)?;
        self.check_size(&picture)?;
        self.check_announced()?;
        for _ in 0..copies {
            if self.is_full() {
                break;
            }
            self.check_memory(&picture)?;
            picture.append_planes(&mut self.values);
            self.frame_count += 1;
        }
        Ok(())
    }

    /// Fails unless a frame has the size of the first one.
    fn check_size(&mut self, picture: &Picture) -> Result<(), String> {
        let size = [picture.height, picture.width];
        if *self.size.get_or_insert(size) == size {
            return Ok(());
        }
        Err(format!(
            "frame {} has another size ({} x {}) than the first",
            self.frames_seen - 1,
            picture.width,
            picture.height
        ))
    }

    /// Fails if too many frames are announced. The check comes before the first frame is kept.
    fn check_announced(&self) -> Result<(), String> {
        let announced = self.announced_to_keep();
        if announced <= MAX_ANNOUNCED_FRAMES {
            return Ok(());
        }
        Err(format!(
            "{announced} frames are too many for an animated picture (at most {MAX_ANNOUNCED_FRAMES}); convert it to a \
             video, or ask for fewer"
        ))
    }

    /// Fails if the memory for one video cannot hold a further frame. Before the first frame, it must hold all
    /// announced ones.
    fn check_memory(&self, picture: &Picture) -> Result<(), String> {
        let to_come = if self.frame_count == 0 { self.announced_to_keep().max(1) } else { 1 };
        let values_needed = self.values.len() + to_come.saturating_mul(picture.rgb.len());
        if values_needed.saturating_mul(size_of::<f32>()) <= self.max_bytes {
            return Ok(());
        }
        Err(format!(
            "more than {} frames of {} x {} pixels do not fit the memory for one video of this kind and size \
             ({} bytes); ask for fewer or smaller ones",
            self.max_bytes / size_of::<f32>() / picture.rgb.len().max(1),
            picture.width,
            picture.height,
            self.max_bytes
        ))
    }

    /// Number of announced frames that `options` select; 0 if none are announced.
    fn announced_to_keep(&self) -> usize {
        let selected = self.selected_of(self.announced.unwrap_or(0));
        selected.saturating_sub(self.options.skip).min(self.options.max_frames.unwrap_or(usize::MAX))
    }

    /// Returns the kept frames as a video. Fails if there is no frame.
    pub fn finish(self, path: &Path) -> Result<Video> {
        let Some([height, width]) = self.size.filter(|_| self.frame_count > 0) else {
            return Err(Error::bad_file(path, "no frame could be read"));
        };
        let frames = Tensor::new(self.values, [self.frame_count, 3, height, width])?;
        Video::new(frames, self.options.fps.unwrap_or(self.source_fps) / self.options.every.max(1) as f64)
    }
}

/// The number of times 0, 1 / fps, 2 / fps, ... before `seconds`, i.e. the number of frames of a video of that
/// duration.
pub(crate) fn times_before(seconds: f64, fps: f64) -> usize {
    /// Rounding of `seconds * fps` by less than this makes no further frame.
    const ROUNDING: f64 = 1e-9;
    (seconds * fps - ROUNDING).ceil().max(0.0) as usize
}

/// Crops and resizes an image as `sizing` says.
pub(crate) fn fit(picture: Picture, sizing: Sizing) -> Result<Picture, String> {
    Ok(match sizing {
        Sizing::Native => picture,
        Sizing::MaxPixels { pixels, unit } => {
            let target = target_size([picture.height, picture.width], pixels, unit)?;
            crop_and_resize(picture, target)
        }
        Sizing::Exact(size) => crop_and_resize(picture, size),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picked(options: ReadOptions, shown: &[[f64; 2]]) -> Vec<u8> {
        let mut frames = Frames::new(&options);
        for (i, time) in (0..).zip(shown) {
            let _ = frames.push_at(Picture { width: 1, height: 1, rgb: vec![i; 3] }, *time).unwrap();
        }
        frames.values.iter().step_by(3).map(|v| ((v + 1.0) * 127.5).round() as u8).collect()
    }

    #[test]
    fn frames_are_sampled_at_the_requested_rate() {
        let picked = |source: f64, fps: f64, n: usize| {
            let shown: Vec<_> = (0..n).map(|i| [i as f64 / source, (i + 1) as f64 / source]).collect();
            picked(ReadOptions { fps: Some(fps), ..Default::default() }, &shown)
        };
        assert_eq!(picked(30.0, 10.0, 9), [0, 3, 6]);
        assert_eq!(picked(24.0, 16.0, 6), [0, 1, 3, 4]);
        assert_eq!(picked(8.0, 16.0, 3), [0, 0, 1, 1, 2, 2]);
        assert_eq!(picked(16.0, 16.0, 3), [0, 1, 2]);
    }

    #[test]
    fn every_counts_the_frames_of_the_requested_rate() {
        let shown: Vec<_> = (0..6).map(|i| [f64::from(i) / 8.0, f64::from(i + 1) / 8.0]).collect();
        let picked = |fps: f64, every: usize, skip: usize, max_frames: Option<usize>| {
            picked(ReadOptions { fps: Some(fps), every, skip, max_frames, ..Default::default() }, &shown)
        };
        // At 16 a second: 0 0 1 1 2 2 3 3 4 4 5 5.
        assert_eq!(picked(16.0, 2, 0, None), [0, 1, 2, 3, 4, 5]);
        assert_eq!(picked(16.0, 3, 0, None), [0, 1, 3, 4]);
        assert_eq!(picked(16.0, 3, 1, Some(2)), [1, 3]);
        // At 32 a second each frame comes four times.
        assert_eq!(picked(32.0, 3, 0, None), [0, 0, 1, 2, 3, 3, 4, 5]);
        // At 4 a second: 0 2 4.
        assert_eq!(picked(4.0, 2, 0, None), [0, 4]);
    }

    #[test]
    fn frames_beyond_the_memory_for_a_video_are_refused() {
        let picture = || Picture { width: 1, height: 2, rgb: vec![0; 6] };
        let mut frames = Frames::new(&ReadOptions::default());
        frames.max_bytes = 2 * 24;
        assert!(frames.push(picture(), 2).is_ok());
        let problem = frames.push(picture(), 1).unwrap_err();
        assert!(problem.contains("more than 2 frames of 1 x 2 pixels"), "{problem}");
        // An announced number is refused before any frame is kept, if so many are asked for.
        let announced = |options: ReadOptions| {
            let mut frames = Frames { announced: Some(10_000), ..Frames::new(&options) };
            frames.max_bytes = 10 * 24;
            (frames.push(picture(), 1).is_ok(), frames.frame_count)
        };
        assert_eq!(announced(ReadOptions::default()), (false, 0));
        assert_eq!(announced(ReadOptions { skip: 9_990, ..Default::default() }), (true, 0));
        assert_eq!(announced(ReadOptions { max_frames: Some(10), ..Default::default() }), (true, 1));
        assert_eq!(announced(ReadOptions { every: 1_000, ..Default::default() }), (true, 1));
        let mut frames = Frames { announced: Some(10_001), ..Frames::new(&ReadOptions::default()) };
        assert!(frames.push(picture(), 1).unwrap_err().contains("10001 frames are too many"));
        // Few frames are requested.
        let few = ReadOptions { max_frames: Some(9), ..Default::default() };
        assert!(Frames { announced: Some(100_000), ..Frames::new(&few) }.push(picture(), 1).is_ok());
    }

    #[test]
    fn variable_rate_frames_are_sampled_by_time() {
        // Half a second at 10 frames per second, then one frame that is shown for half a second.
        let shown = [[0.0, 0.1], [0.1, 0.2], [0.2, 0.3], [0.3, 0.4], [0.4, 0.5], [0.5, 1.0]];
        let at = |fps| picked(ReadOptions { fps: Some(fps), ..Default::default() }, &shown);
        assert_eq!(at(4.0), [0, 2, 5, 5]);
        assert_eq!(at(10.0), [0, 1, 2, 3, 4, 5, 5, 5, 5, 5]);
        assert_eq!(picked(ReadOptions { every: 2, ..Default::default() }, &shown), [0, 2, 4]);
        assert_eq!(picked(ReadOptions { every: 2, max_frames: Some(2), ..Default::default() }, &shown), [0, 2]);
        let window = ReadOptions { skip: 6, max_frames: Some(3), fps: Some(10.0), ..Default::default() };
        assert_eq!(picked(window, &shown), [5, 5, 5]);
        assert_eq!(picked(ReadOptions { skip: 1, every: 2, ..Default::default() }, &shown), [2, 4]);
    }
}
