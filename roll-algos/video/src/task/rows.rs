//! Rows of the data that parts of a run cannot use, or that have no effect.

use std::collections::BTreeMap;
use std::path::Path;

use roll_core::{ClipUse, ConditionInput, DiffusionModel, Error, Reference, Result, ResultExt, VideoUnit};
use roll_media::Probed;
use roll_train::config::RunConfig;
use roll_train::progress::counted;

use super::config::ClipConfig;
use crate::rows::{DataConfig, Metadata, MetadataRow};

/// At most this many clips are probed for their size and frame rate.
const MAX_PROBED: usize = 1000;
/// At most this many frame rates are named.
const MAX_RATES: usize = 4;
/// A clip counts as enlarged above this factor. Smaller factors may come from the rounding of sizes to units.
const ENLARGED_ABOVE: f64 = 1.1;
/// A clip has another frame rate than the model if the rates differ by more than this fraction.
const RATE_TOLERANCE: f64 = 0.1;

/// Rows that a run trains on or evaluates.
pub(super) struct Rows<'a> {
    /// The key that names the rows.
    pub(super) key: &'static str,
    pub(super) metadata: &'a Metadata,
    /// Maximum number of rows that are used.
    pub(super) count: usize,
    /// The rewards that read the reference of the rows' videos.
    pub(super) reference_readers: Vec<&'a str>,
}

impl Rows<'_> {
    fn rows(&self) -> impl Iterator<Item = &MetadataRow> {
        self.metadata.rows.iter().take(self.count)
    }

    /// The first row that lacks a clip that the algorithm or the reward `reader` needs, and the reason.
    pub(super) fn without_clip(
        &self,
        config: &RunConfig,
        clip_use: &ClipUse,
        reader: Option<&str>,
    ) -> Option<(&MetadataRow, String)> {
        // The reasons for a row without and with a picture.
        let reasons = [false, true].map(|has_image| reason_for_clip(config, clip_use, has_image, reader));
        let mut rows_without_clip = self.rows().filter(|row| row.video.is_none());
        rows_without_clip.find_map(|row| Some((row, reasons[usize::from(row.image.is_some())].clone()?)))
    }

    /// Fails if a row lacks a clip that the algorithm or a reward needs.
    pub(super) fn check_clips(&self, config: &RunConfig, clip_use: &ClipUse) -> Result<()> {
        let name = &config.algo.name;
        for reader in [None].into_iter().chain(self.reference_readers.iter().copied().map(Some)) {
            if let Some((row, reason)) = self.without_clip(config, clip_use, reader) {
                let picture_suffices = reason_for_clip(config, clip_use, true, reader).is_none();
                let or_picture = if picture_suffices { ", or a picture in the column `image`" } else { "" };
                let problem = format!(
                    "{} has no clip, and `{name}` needs one: {reason}; name a clip in the column `video`{or_picture}",
                    self.metadata.location(row)
                );
                return Err(Error::config(self.key, problem));
            }
        }
        Ok(())
    }

    /// Fails if a row has a picture as its clip although several frames are generated.
    pub(super) fn check_length(
        &self,
        config: &RunConfig,
        clips: &ClipConfig,
        clip_use: &ClipUse,
        unit: VideoUnit,
    ) -> Result<()> {
        let name = &config.algo.name;
        let (frames, generates_videos) = (unit.frames_within(clips.data.num_frames), clip_use.why_needed.is_none());
        if frames > 1
            && (generates_videos || !config.reward.is_empty())
            && let Some(row) = self.metadata.picture_as_clip(self.count)
        {
            let problem = format!(
                "{}: its `video` is a picture, a clip of one frame, and `{name}` would generate one frame: name the \
                 picture in the column `image` to generate {frames} frames, or set `data.num_frames` to 1",
                self.metadata.location(row)
            );
            return Err(Error::config(self.key, problem));
        }
        Ok(())
    }

    /// Fails if the model needs a picture and a row has neither a picture nor a clip. `input` is an input with a
    /// picture.
    pub(super) fn check_pictures(&self, model: &mut dyn DiffusionModel, input: &ConditionInput) -> Result<()> {
        match self.rows().find(|row| row.video.is_none() && row.image.is_none()) {
            None => Ok(()),
            Some(row) => model
                .check_input(&ConditionInput { image: None, ..input.clone() })
                .while_doing(|| format!("`{}`: {} has no picture", self.key, self.metadata.location(row))),
        }
    }

    /// A note on the weights of rows that are not trained on.
    pub(super) fn unused_weights(&self) -> Option<String> {
        let weighted = self.rows().filter(|row| row.weight.is_some()).count() as u64;
        let rows = counted(weighted, "row");
        (weighted > 0).then(|| format!("`weight` of {rows} of `{}` has no effect: rows are evaluated alike", self.key))
    }

    /// A note on pictures that neither model nor reward uses, for a model that takes none.
    pub(super) fn unused_images(&self, config: &RunConfig, clips: &ClipConfig, clip_use: &ClipUse) -> Option<String> {
        let is_compared = clip_use.reference == Reference::Image && !self.reference_readers.is_empty();
        // Without a clip and a configured size, the picture determines the size of the video.
        let sets_size = |row: &MetadataRow| row.video.is_none() && clips.data.height.is_none();
        let unused = self.rows().filter(|row| row.image.is_some() && !sets_size(row)).count();
        (unused > 0 && !is_compared).then(|| {
            let (rows, key, model) = (counted(unused as u64, "row"), self.key, &config.model.name);
            format!("`image` of {rows} of `{key}` has no effect: this `{model}` makes videos of the prompt alone")
        })
    }
}

/// The reason why a row needs a clip, as the end of "... needs a clip: "; `None` if the row needs none. `reader` names
/// a reward that reads its reference, if one does.
fn reason_for_clip(config: &RunConfig, clip_use: &ClipUse, has_image: bool, reader: Option<&str>) -> Option<String> {
    let reference = match clip_use.reference {
        _ if clip_use.why_needed.is_some() => return clip_use.why_needed.clone(),
        Reference::Clip => "clip",
        Reference::FirstFrame => "first_frame",
        Reference::Image if has_image => return None,
        Reference::Image => "image",
    };
    let hint = if has_image { "; `image` compares with the picture of the row" } else { "" };
    let has_option = config.algo.options.contains_key("reference");
    let option = if has_option { format!(" (`algo.reference: {reference}`{hint})") } else { String::new() };
    reader.map(|reward| format!("the reward `{reward}` compares with it{option}"))
}

/// "2 clips", "5 prompts", "2 clips and 5 prompts", or "6 windows of 2 clips".
pub fn counted_rows(metadata: &Metadata) -> String {
    let with_clip = metadata.rows.iter().filter(|row| row.video.is_some());
    let (samples, clips) = (with_clip.clone().count(), with_clip.filter(|row| row.is_first_window()).count());
    let windows = if samples > clips { format!("{samples} windows of ") } else { String::new() };
    let clips = windows + &counted(clips as u64, "clip");
    match (samples, metadata.rows.len() - samples) {
        (_, 0) => clips,
        (0, prompts) => counted(prompts as u64, "prompt"),
        (_, prompts) => format!("{clips} and {}", counted(prompts as u64, "prompt")),
    }
}

/// The noun for rows: "clip", "prompt", or "row" for both; "window" if clips have several.
pub fn row_noun(metadata: &Metadata) -> &'static str {
    let is_clip = |row: &MetadataRow| row.video.is_some();
    if metadata.rows.iter().all(is_clip) && metadata.rows.iter().any(|row| row.window.is_some()) {
        return "window";
    }
    match (metadata.rows.iter().any(is_clip), metadata.rows.iter().all(is_clip)) {
        (_, true) => "clip",
        (false, _) => "prompt",
        _ => "row",
    }
}

/// Notes about clips that are enlarged, and about clips with another frame rate than the videos that the model was
/// trained on. `rate` is the frames per second of the latter videos; `None` if the rate does not matter.
pub fn clip_notes(metadata: &Metadata, config: &DataConfig, rate: Option<f64>) -> [Option<String>; 2] {
    // `data.fps` resamples the clips, and buckets do not enlarge them.
    let rate = if config.fps.is_none() { rate } else { None };
    let size = if config.bucket_ratios.is_empty() { config.height.zip(config.width) } else { None };
    if rate.is_none() && size.is_none() {
        return [None, None];
    }
    let clips = metadata.probe_clips(config.decoder, MAX_PROBED);
    [
        size.and_then(|(height, width)| enlarged(&clips, [height, width])),
        rate.and_then(|rate| other_frame_rates(&clips, rate)),
    ]
}

/// A note if clips are smaller than `data.height` x `data.width`, by more than the rounding of sizes to units.
fn enlarged(clips: &[(&Path, Probed)], [height, width]: [usize; 2]) -> Option<String> {
    let factor = |probed: &Probed| {
        let [own_height, own_width] = probed.size.map(|side| side.max(1) as f64);
        (height as f64 / own_height).max(width as f64 / own_width)
    };
    let factors: Vec<f64> =
        clips.iter().map(|(_, probed)| factor(probed)).filter(|factor| *factor > ENLARGED_ABOVE).collect();
    let largest = factors.iter().copied().fold(0.0, f64::max);
    (!factors.is_empty()).then(|| {
        format!(
            "{} of {} are enlarged to `data.height` x `data.width` ({height} x {width}), up to {largest:.1} times: a model \
             learns their blur; smaller values, or `data.max_pixels` instead of them, keep clips as sharp as they are",
            factors.len(),
            counted(clips.len() as u64, "clip"),
        )
    })
}

/// A note if clips have another frame rate than `rate`.
fn other_frame_rates(clips: &[(&Path, Probed)], rate: f64) -> Option<String> {
    // Pictures have no frame rate.
    let videos = clips.iter().filter(|(path, probed)| probed.frames > 1 && !path.is_dir());
    let rates: Vec<f64> = videos.map(|(_, probed)| probed.fps).collect();
    let mut other_rates = BTreeMap::<String, usize>::new();
    for fps in rates.iter().filter(|fps| (*fps / rate - 1.0).abs() > RATE_TOLERANCE) {
        *other_rates.entry(format!("{}", (fps * 100.0).round() / 100.0)).or_default() += 1;
    }
    let (count, more) = (other_rates.values().sum::<usize>(), other_rates.len().saturating_sub(MAX_RATES));
    let mut by_count: Vec<_> = other_rates.into_iter().collect();
    by_count.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let listed: Vec<String> = by_count.iter().take(MAX_RATES).map(|(fps, n)| format!("{fps} ({n})")).collect();
    let rest = if more > 0 { format!(" and {more} more rates") } else { String::new() };
    (count > 0).then(|| {
        format!(
            "{count} of {} have another frame rate than the videos that the model was trained on, which have {rate} frames \
             per second: {}{rest}; `data.fps: {rate}` resamples them",
            counted(rates.len() as u64, "clip"),
            listed.join(", ")
        )
    })
}

/// A note if no row has a clip that `data.fps` could apply to.
pub(super) fn unused_fps(metadata: Option<&Metadata>, config: &DataConfig) -> Option<String> {
    let (rows, fps) = (&metadata?.rows, config.fps?);
    let has_no_clip = rows.iter().all(|row| row.video.is_none());
    has_no_clip.then(|| format!("`data.fps: {fps}` has no effect: no row of `data.metadata` has a clip"))
}
