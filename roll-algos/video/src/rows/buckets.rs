//! Buckets: a few shapes that all clips are resized and cut to, so that several clips fit in one micro-batch.

use std::path::Path;

use rayon::prelude::*;
use roll_core::{Error, Result, ResultExt, VideoUnit};
use roll_media::{Probed, probe, target_size};

use super::config::{DataConfig, OnBadSample};
use super::metadata::{Metadata, MetadataRow};

/// A shape of clips.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bucket {
    /// Frames, one more than a multiple of the model's unit.
    pub frames: usize,
    /// Height and width, multiples of the model's unit.
    pub size: [usize; 2],
}

/// Default proportions of a generated video, `[height, width]`: 832 x 480 pixels, as Wan generates.
const DEFAULT_SIZE: [usize; 2] = [480, 832];

/// Added to a side in pixels before its fraction is cut off, because rounding may make a side slightly smaller than the
/// clip's, e.g. if the ratio is 16/9.
const ROUNDING: f64 = 1e-6;

impl Bucket {
    /// The shape of the video to generate for a prompt without a clip. Its size is that of `config`. If `config` has
    /// none, it follows from the size of the prompt's `picture`, as for a clip of that size. Without a picture, it has
    /// about `max_pixels` pixels in the proportions of 832 x 480.
    pub fn without_clip(config: &DataConfig, picture: Option<&Path>, unit: VideoUnit) -> Result<Self> {
        let size = match picture {
            Some(picture) if config.height.is_none() => probe(picture, config.decoder)?.size,
            _ => DEFAULT_SIZE,
        };
        fitted_bucket(size, config.num_frames, config, unit).map_err(|problem| match picture {
            Some(picture) => Error::bad_file(picture, problem),
            None => Error::config("data.max_pixels", problem),
        })
    }
}

/// The shape of the samples of a row, and the length of its clip.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowShape {
    pub bucket: Bucket,
    /// Number of frames of the clip at the rate `data.fps`.
    pub clip_frames: usize,
}

/// Whether the configuration uses buckets.
pub(crate) fn are_wanted(config: &DataConfig) -> bool {
    !config.bucket_ratios.is_empty() || !config.bucket_frames.is_empty()
}

/// The [`RowShape`] of each row. A row that cannot be read is `None` if such rows are skipped, and otherwise an error.
pub(crate) fn assign(metadata: &Metadata, config: &DataConfig, unit: VideoUnit) -> Result<Vec<Option<RowShape>>> {
    let row_shape = |row: &MetadataRow| -> Result<Option<RowShape>> {
        let found = match &row.video {
            Some(video) => probe(video, config.decoder)
                .and_then(|probed| shape_of_clip(&probed, config, unit).map_err(|e| Error::bad_file(video, e))),
            None => Bucket::without_clip(config, row.image.as_deref(), unit)
                .map(|bucket| RowShape { clip_frames: bucket.frames, bucket }),
        };
        match found {
            Ok(found) => Ok(Some(found)),
            Err(_) if config.on_bad_sample == OnBadSample::Skip => Ok(None), // reading the row gives the reason
            Err(error) => Err(error).while_doing(|| format!("reading {}", metadata.location(row))),
        }
    };
    metadata.rows.par_iter().map(row_shape).collect()
}

/// The bucket and the length of a clip. The bucket has the nearest of the configured ratios, and the largest of the
/// configured lengths that the clip has. Fails if the clip is smaller than the model's unit.
pub(crate) fn shape_of_clip(clip: &Probed, config: &DataConfig, unit: VideoUnit) -> Result<RowShape, String> {
    let clip_frames = config.fps.map_or(clip.frames, |fps| clip.frames_at(fps));
    Ok(RowShape { bucket: fitted_bucket(clip.size, clip_frames, config, unit)?, clip_frames })
}

/// The bucket of a video of this size, `[height, width]`, and number of frames.
fn fitted_bucket(
    video_size: [usize; 2],
    frames: usize,
    config: &DataConfig,
    unit: VideoUnit,
) -> Result<Bucket, String> {
    let video_ratio = video_size[1] as f64 / video_size[0] as f64;
    let distance = |ratio: &f64| (ratio / video_ratio).ln().abs();
    let nearest = config.bucket_ratios.iter().copied().min_by(|a, b| distance(a).total_cmp(&distance(b)));
    let size = match (nearest, config.height, config.width) {
        (Some(ratio), ..) => ratio_size(ratio, video_size, config.max_pixels, unit),
        (None, Some(height), Some(width)) => [height, width],
        _ => target_size(video_size, config.max_pixels, [unit.height, unit.width])?,
    };
    let most_frames = unit.frames_within(frames.min(config.num_frames));
    let longest = config.bucket_frames.iter().copied().filter(|n| *n <= most_frames).max();
    Ok(Bucket { frames: longest.unwrap_or(most_frames), size })
}

/// Height and width in this ratio of width to height: about `max_pixels` pixels, but no larger than the clip, because
/// small clips are not enlarged.
fn ratio_size(ratio: f64, clip: [usize; 2], max_pixels: usize, unit: VideoUnit) -> [usize; 2] {
    let [own_height, own_width] = clip.map(|side| side as f64);
    let height = (max_pixels as f64 / ratio).sqrt().min(own_height).min(own_width / ratio);
    let [height, width] = unit.size_within([height, height * ratio].map(|side| (side + ROUNDING) as usize));
    [height.max(unit.height), width.max(unit.width)]
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: VideoUnit = VideoUnit { height: 16, width: 16, frames: 4, most_frames: None };

    #[test]
    fn bucket_has_nearest_ratio_and_longest_available_length() {
        let config = DataConfig {
            bucket_ratios: vec![16.0 / 9.0, 1.0, 9.0 / 16.0],
            bucket_frames: vec![17, 81, 49],
            max_pixels: 480 * 832,
            ..DataConfig::default()
        };
        let of =
            |size, frames| shape_of_clip(&Probed { size, frames, fps: 24.0 }, &config, UNIT).map(|found| found.bucket);
        let wide = Bucket { frames: 81, size: [464, 832] };
        assert_eq!(of([1080, 1920], 200), Ok(wide));
        assert_eq!(of([1080, 1800], 80), Ok(Bucket { frames: 49, ..wide }));
        assert_eq!(of([1920, 1080], 17), Ok(Bucket { frames: 17, size: [832, 464] }));
        // Shorter than all lengths: the clip keeps its own.
        assert_eq!(of([700, 710], 12), Ok(Bucket { frames: 9, size: [624, 624] }));
        let slow = DataConfig { fps: Some(12.0), ..config };
        let found = shape_of_clip(&Probed { size: [9, 16], frames: 99, fps: 24.0 }, &slow, UNIT).unwrap();
        assert_eq!((found.bucket.frames, found.clip_frames), (49, 50));
    }

    #[test]
    fn buckets_do_not_upscale_clips() {
        let config = DataConfig {
            bucket_ratios: vec![16.0 / 9.0, 1.0, 9.0 / 16.0],
            max_pixels: 480 * 832,
            ..DataConfig::default()
        };
        let of =
            |size| shape_of_clip(&Probed { size, frames: 17, fps: 24.0 }, &config, UNIT).map(|found| found.bucket.size);
        assert_eq!(of([500, 510]), Ok([496, 496]));
        assert_eq!(of([144, 256]), Ok([144, 256]));
        assert_eq!(of([256, 144]), Ok([256, 144]));
        // Cropping to the ratio reduces the number of pixels.
        assert_eq!(of([200, 256]), Ok([192, 192]));
        assert_eq!(of([1080, 1920]), Ok([464, 832]));
        // Below the smallest size there is no other choice.
        assert_eq!(of([8, 8]), Ok([16, 16]));
    }

    #[test]
    fn without_bucket_ratios_clips_keep_their_ratio() {
        let config = DataConfig { bucket_frames: vec![5], max_pixels: 32 * 48, ..DataConfig::default() };
        let of = |size| shape_of_clip(&Probed { size, frames: 9, fps: 8.0 }, &config, UNIT).map(|found| found.bucket);
        assert_eq!(of([40, 70]), Ok(Bucket { frames: 5, size: [16, 48] }));
        assert!(of([4, 4]).is_err());
        let unit = VideoUnit { height: 32, width: 32, frames: 8, most_frames: None };
        let probed = Probed { size: [72, 144], frames: 16, fps: 8.0 };
        let roomy = DataConfig { bucket_ratios: vec![2.0], num_frames: 81, ..DataConfig::default() };
        let found = shape_of_clip(&probed, &roomy, unit).map(|found| found.bucket);
        assert_eq!(found, Ok(Bucket { frames: 9, size: [64, 128] }));
    }
}
