//! A data set: prompts with their clips and pictures, decoded when they are needed.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use roll_core::{Error, Result, ResultExt, Sample, SampleVideo, Tensor, Video, VideoUnit};
use roll_media::{ReadOptions, Sizing, is_picture, read_image_by, read_video};

use super::buckets::{self, Bucket};
use super::config::{DataConfig, OnBadSample, Windows};
use super::metadata::{Metadata, MetadataRow, Window};

/// The value of [`ReadOptions::every`] that leaves out no frame.
const EVERY_FRAME: usize = 1;

/// The rows of a metadata file. Reading a sample decodes its clip; the least recently used clips are evicted beyond
/// `data.cache_bytes`.
#[derive(Debug)]
pub struct Dataset {
    metadata: Metadata,
    config: DataConfig,
    unit: VideoUnit,
    /// The bucket of each row; `None` without buckets. A row that cannot be read has no bucket.
    buckets: Option<Vec<Option<Bucket>>>,
    cache: Mutex<Cache>,
}

impl Dataset {
    /// Opens the data that `config` names, for a model whose video sizes are multiples of `unit`.
    pub fn open(config: &DataConfig, unit: VideoUnit) -> Result<Self> {
        Self::new(Metadata::open(config)?, config, unit)
    }

    /// Creates a data set from opened metadata. With buckets or windows all clips are probed now. Other faults of files
    /// appear when the files are read.
    pub fn new(mut metadata: Metadata, config: &DataConfig, unit: VideoUnit) -> Result<Self> {
        config.check_unit(unit)?;
        let (has_buckets, has_windows) = (buckets::are_wanted(config), config.windows != Windows::Head);
        let mut buckets = None;
        if has_buckets || has_windows {
            let shapes_of_clips = buckets::assign(&metadata, config, unit)?;
            // From here on, the metadata has one row per window.
            let shapes_of_windows = metadata.divide(config.windows, shapes_of_clips, unit)?;
            let bucket_by_window = shapes_of_windows.into_iter().map(|shape| shape.map(|shape| shape.bucket));
            buckets = has_buckets.then(|| bucket_by_window.collect());
        }
        let cache = Mutex::new(Cache { limit: config.cache_bytes, ..Cache::default() });
        Ok(Self { metadata, config: config.clone(), unit, buckets, cache })
    }

    /// Number of rows; each window of a clip is a row.
    pub fn len(&self) -> usize {
        self.metadata.rows.len()
    }

    /// Always false: metadata without rows is an error.
    pub fn is_empty(&self) -> bool {
        self.metadata.rows.is_empty()
    }

    /// The metadata, with a row for each window.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The configuration.
    pub fn config(&self) -> &DataConfig {
        &self.config
    }

    /// The bucket of row `index`; `None` without buckets or for a row that cannot be read.
    pub fn bucket(&self, index: usize) -> Option<Bucket> {
        self.buckets.as_ref()?.get(index).copied().flatten()
    }

    /// The maximum number of frames of a clip: `data.num_frames`, reduced to a number that the model takes.
    pub fn longest(&self) -> usize {
        self.unit.frames_within(self.config.num_frames)
    }

    /// Returns a note if `data.windows` is set and no clip has more than one sample.
    pub fn unused_windows(&self) -> Option<String> {
        let is_set = self.config.windows != Windows::Head;
        (is_set && self.metadata.rows.iter().all(|row| row.window.is_none()))
            .then(|| "`data.windows` has no effect: no clip of `data.metadata` has room for a second window".into())
    }

    /// Whether the data set uses buckets.
    pub fn has_buckets(&self) -> bool {
        self.buckets.is_some()
    }

    /// Reads the sample of row `index`: decodes, resizes and crops its clip, and brings its pictures to the size of the
    /// clip. A bad row is an error that names line and file, whatever `on_bad_sample` says.
    pub fn sample(&self, index: usize) -> Result<Sample> {
        let Some(row) = self.metadata.rows.get(index) else {
            return Err(Error::Misuse(format!("sample {index} of a data set of {}", self.len())));
        };
        self.read(index, row).while_doing(|| format!("reading {}", self.metadata.location(row)))
    }

    /// Reads the sample of row `index` as [`Dataset::sample`] does. With `on_bad_sample: skip`, a bad row is an inner
    /// `Err` with its location in the metadata and the reason.
    pub fn sample_or_skip(&self, index: usize) -> Result<Result<Sample, (String, String)>> {
        let error = match self.sample(index) {
            Ok(sample) => return Ok(Ok(sample)),
            Err(error) if self.config.on_bad_sample == OnBadSample::Error => return Err(error),
            Err(error) => error,
        };
        let location = self.metadata.rows.get(index).map(|row| self.metadata.location(row)).unwrap_or_default();
        let reason = match &error {
            Error::Context { source, .. } => source.chain(),
            other => other.to_string(),
        };
        Ok(Err((location, reason)))
    }

    /// Makes the sample of a row from its decoded files, which may be cached.
    fn read(&self, index: usize, row: &MetadataRow) -> Result<Sample> {
        if let Some(reason) = &row.no_prompt {
            let file = row.video.as_ref().unwrap_or(&self.metadata.path);
            return Err(Error::bad_file(file, format!("has no prompt: {reason}")));
        }
        let cached = lock(&self.cache).get(index);
        let clip = match cached {
            Some(clip) => clip,
            None => {
                let clip = Arc::new(self.decode(row, self.bucket(index))?);
                lock(&self.cache).insert(index, clip.clone());
                clip
            }
        };
        Ok(Sample {
            image: clip.image.clone(),
            end_image: clip.end_image.clone(),
            path: row.video.clone(),
            weight: row.weight.unwrap_or(1.0),
            mask: clip.mask.clone(),
            columns: row.columns.clone(),
            ..Sample::new(index as u64, self.metadata.location(row), &row.prompt, clip.video.clone())
        })
    }

    /// Decodes the clip, the pictures and the mask of a row.
    fn decode(&self, row: &MetadataRow, bucket: Option<Bucket>) -> Result<Clip> {
        let (config, unit) = (&self.config, self.unit);
        let video = match &row.video {
            Some(path) => {
                SampleVideo::Clip(Arc::new(self.decode_clip(path, row.window, bucket, self.sizing(bucket))?))
            }
            None => {
                let bucket = bucket.map_or_else(|| Bucket::without_clip(config, row.image.as_deref(), unit), Ok)?;
                SampleVideo::Shape([bucket.frames, bucket.size[0], bucket.size[1]])
            }
        };
        let [_, height, width] = video.dims();
        let picture = |path: Option<&Path>| -> Result<Option<Tensor>> {
            path.map(|p| read_image_by(p, Sizing::Exact([height, width]), config.decoder)).transpose()
        };
        let mask = row.mask.as_deref().map(|path| self.decode_mask(path, row.window, video.clip())).transpose()?;
        Ok(Clip { image: picture(row.image.as_deref())?, end_image: picture(row.end_image.as_deref())?, video, mask })
    }

    /// Reads the mask of a clip, cropped and resized as the clip: `[T, H, W]`, or `[1, H, W]` from a picture. White is
    /// 1, black is 0.
    fn decode_mask(&self, path: &Path, window: Option<Window>, clip: Option<&Arc<Video>>) -> Result<Tensor> {
        let bad = |problem: String| Error::bad_file(path, problem);
        let clip = clip.ok_or_else(|| bad("is the mask of a row without a clip (`video`)".into()))?;
        let ([frames, height, width], config) = (clip.dims(), &self.config);
        let is_picture = is_picture(path);
        let options = ReadOptions {
            skip: if is_picture { 0 } else { window.map_or(0, |window| window.first) },
            max_frames: Some(frames),
            fps: config.fps,
            sizing: Sizing::Exact([height, width]),
            decoder: config.decoder,
            every: EVERY_FRAME,
        };
        let mask = read_video(path, &options)?;
        let found = mask.dims()[0];
        if !is_picture && found != frames {
            return Err(bad(format!("expected a picture or the {frames} frames of the clip, found {found} frames")));
        }
        let (pixels, rgb) = (height * width, mask.frames().f32s()?);
        // Frames are `[3, H, W]` in [-1, 1], masks are in [0, 1].
        let grey = |i: usize| {
            let red = i / pixels * 3 * pixels + i % pixels;
            let (green, blue) = (red + pixels, red + 2 * pixels);
            ((rgb[red] + rgb[green] + rgb[blue]) / 3.0 + 1.0) / 2.0
        };
        Tensor::new((0..found * pixels).map(grey).collect(), [found, height, width])
    }

    /// Reads the clip of row `index` as [`Dataset::sample`] does, but in the clip's own size.
    pub fn clip_of_own_size(&self, index: usize) -> Result<Video> {
        let row = self.metadata.rows.get(index);
        let Some((row, path)) = row.and_then(|row| Some((row, row.video.as_ref()?))) else {
            return Err(Error::Misuse(format!("the clip of row {index}, which has none")));
        };
        let clip = self.decode_clip(path, row.window, self.bucket(index), Sizing::Native);
        clip.while_doing(|| format!("reading {}", self.metadata.location(row)))
    }

    /// The size of the clips in `bucket`, or of all clips if there are no buckets.
    fn sizing(&self, bucket: Option<Bucket>) -> Sizing {
        let (config, unit) = (&self.config, self.unit);
        match (bucket, config.height, config.width) {
            (Some(bucket), ..) => Sizing::Exact(bucket.size),
            (None, Some(height), Some(width)) => Sizing::Exact([height, width]),
            _ => Sizing::MaxPixels { pixels: config.max_pixels, unit: [unit.height, unit.width] },
        }
    }

    /// Decodes the frames of a clip that its window, its bucket or the configuration selects.
    fn decode_clip(
        &self,
        path: &Path,
        window: Option<Window>,
        bucket: Option<Bucket>,
        sizing: Sizing,
    ) -> Result<Video> {
        let (config, unit) = (&self.config, self.unit);
        let expected = bucket.map(|bucket| bucket.frames).or(window.map(|window| window.frames));
        let max_frames = expected.unwrap_or(unit.frames_within(config.num_frames));
        let (skip, decoder) = (window.map_or(0, |window| window.first), config.decoder);
        let options =
            ReadOptions { skip, max_frames: Some(max_frames), fps: config.fps, sizing, decoder, every: EVERY_FRAME };
        let video = read_video(path, &options)?;
        let found = video.dims()[0];
        let video = truncate_frames(video, unit.frames_within(found))?;
        if let Some(expected) = expected
            && expected != found
        {
            let [found, expected] = [found, expected].map(|frames| skip + frames);
            let problem = format!("{found} frames can be read, its index tells of at least {expected}");
            return Err(Error::bad_file(path, problem));
        }
        Ok(video)
    }
}

/// Cuts a video to its first `frames_kept` frames.
fn truncate_frames(video: Video, frames_kept: usize) -> Result<Video> {
    let [frames, height, width] = video.dims();
    if frames_kept == frames {
        return Ok(video);
    }
    let values = video.frames().f32s()?[..frames_kept * 3 * height * width].to_vec();
    Video::new(Tensor::new(values, [frames_kept, 3, height, width])?, video.fps())
}

/// Locks a mutex. A poisoned lock is used all the same, because no panic can leave the cache in an inconsistent state
/// that matters.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The decoded files of a row.
#[derive(Debug)]
struct Clip {
    video: SampleVideo,
    image: Option<Tensor>,
    end_image: Option<Tensor>,
    mask: Option<Tensor>,
}

impl Clip {
    fn bytes(&self) -> usize {
        let pictures = [&self.image, &self.end_image, &self.mask].map(Option::as_ref);
        let tensors = pictures.into_iter().chain([self.video.clip().map(|clip| clip.frames())]);
        tensors.flatten().map(|t| t.as_bytes().len()).sum()
    }
}

/// A least-recently-used cache of clips.
#[derive(Debug, Default)]
struct Cache {
    /// Maximum number of bytes of all clips.
    limit: usize,
    /// Number of bytes of all clips.
    bytes: usize,
    /// Number of uses so far.
    clock: u64,
    /// The number of the last use and the clip of each row.
    clips: HashMap<usize, (u64, Arc<Clip>)>,
}

impl Cache {
    fn get(&mut self, index: usize) -> Option<Arc<Clip>> {
        self.clock += 1;
        let (used, clip) = self.clips.get_mut(&index)?;
        *used = self.clock;
        Some(clip.clone())
    }

    fn insert(&mut self, index: usize, clip: Arc<Clip>) {
        if clip.bytes() > self.limit || self.clips.contains_key(&index) {
            return;
        }
        self.clock += 1;
        self.bytes += clip.bytes();
        self.clips.insert(index, (self.clock, clip));
        while self.bytes > self.limit {
            let Some(oldest) = self.clips.iter().min_by_key(|(_, (used, _))| *used).map(|(i, _)| *i) else { break };
            if let Some((_, clip)) = self.clips.remove(&oldest) {
                self.bytes -= clip.bytes();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_evicts_least_recently_used_clips() {
        let clip = || {
            let frames = Tensor::zeros([1, 3, 4, 4]);
            let video = SampleVideo::Clip(Arc::new(Video::new(frames, 1.0).unwrap()));
            Arc::new(Clip { video, image: None, end_image: None, mask: None })
        };
        let mut cache = Cache { limit: 3 * 192, ..Cache::default() };
        for i in 0..3 {
            cache.insert(i, clip());
        }
        cache.get(0);
        cache.insert(3, clip());
        assert!(cache.get(0).is_some() && cache.get(1).is_none() && cache.get(3).is_some());
        assert_eq!(cache.bytes, 3 * 192);
        let mut none = Cache::default();
        none.insert(0, clip());
        assert!(none.get(0).is_none());
    }
}
