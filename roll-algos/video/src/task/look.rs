//! A closer look at the data that a run would train on, for `roll check`: rows that can be read, sizes, references of
//! the reward, one score.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use roll_core::{Error, Grad, Reference, Result, RewardScorer, Sample, Score, Target, Tensor, Video, VideoUnit};
use roll_media::probe;
use roll_train::findings::Listing;
use roll_train::progress::{counted, epochs};

use super::rows::{counted_rows, row_noun};
use crate::rows::{Batches, Bucket, Dataset, OnBadSample};
use crate::scoring::reference_video;

/// Maximum number of rows of a data set that are looked at.
const MAX_ROWS: usize = 2000;
/// Frames per second of the grey video that is scored for a row without a clip, unless `data.fps` is set.
const GREY_FPS: f64 = 16.0;
/// Maximum number of faults that are named.
const MAX_FAULTS: usize = 3;
/// Maximum number of sizes that are named.
const MAX_SIZES: usize = 4;

/// Lists rows and epochs. Returns height and width of the largest shape that is trained on.
pub(super) fn rows(data: &Batches, steps: Option<u64>, unit: VideoUnit, found: &mut Listing) -> Option<[usize; 2]> {
    let largest = list_rows(data.dataset(), unit, found);
    if let Some(steps) = steps {
        let each = counted(data.global_batch() as u64, row_noun(data.dataset().metadata()));
        found.good(format!("{} of {each} each: {} epochs", counted(steps, "step"), epochs(data.epoch(steps))));
    }
    largest
}

/// Lists counts, sizes and lengths of a data set. Returns its largest size.
fn list_rows(dataset: &Dataset, unit: VideoUnit, found: &mut Listing) -> Option<[usize; 2]> {
    let config = dataset.config();
    let rows: Vec<_> = dataset.metadata().rows.iter().filter(|row| row.is_first_window()).collect();
    let looked_at = rows.len().min(MAX_ROWS);
    let (mut sizes, mut too_short, mut unreadable) = (BTreeMap::<[usize; 2], usize>::new(), 0, Vec::new());
    for &row in &rows[..looked_at] {
        if let Some(reason) = &row.no_prompt {
            unreadable.push(format!("{}: {reason}", dataset.metadata().location(row)));
            continue;
        }
        let shape = match &row.video {
            Some(video) => probe(video, config.decoder).map(|probed| (probed.size, probed.frames)),
            None => {
                Bucket::without_clip(config, row.image.as_deref(), unit).map(|video| (video.size, dataset.longest()))
            }
        };
        match shape.and_then(|shape| files_are_there(row.files()).map(|()| shape)) {
            Ok((size, frames)) => {
                *sizes.entry(size).or_default() += 1;
                too_short += usize::from(frames < dataset.longest());
            }
            Err(error) => unreadable.push(format!("{}: {}", dataset.metadata().location(row), error.chain())),
        }
    }
    let limit_note =
        if looked_at < rows.len() { format!(" (the first {looked_at} were looked at)") } else { String::new() };
    let all = counted_rows(dataset.metadata());
    let of_clips = if rows.len() < dataset.len() { " of the clips" } else { "" };
    found.good(format!("{all}, {}{of_clips} can be read{limit_note}", looked_at - unreadable.len()));
    list_sizes(&sizes, found);
    if too_short > 0 {
        found.note(format!(
            "{too_short} have fewer than the {} of `data.num_frames`",
            counted(dataset.longest() as u64, "frame")
        ));
    }
    if !unreadable.is_empty() {
        let faults = first_faults(&unreadable);
        match config.on_bad_sample == OnBadSample::Error || unreadable.len() == looked_at {
            true => found.problem(faults),
            false => found.note(format!("left out (`data.on_bad_sample: skip`):\n{faults}")),
        }
    }
    largest(dataset, unit, &sizes, found)
}

/// Lists the most frequent sizes, `[height, width]`.
fn list_sizes(sizes: &BTreeMap<[usize; 2], usize>, found: &mut Listing) {
    if sizes.is_empty() {
        return;
    }
    let mut by_count: Vec<_> = sizes.iter().collect();
    by_count.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    let more = by_count.len().saturating_sub(MAX_SIZES);
    let shown =
        by_count.iter().take(MAX_SIZES).map(|([height, width], count)| format!("{count} of {width}x{height} pixels"));
    let rest = if more > 0 { format!(" and {more} more sizes") } else { String::new() };
    found.good(format!("{}{rest}", shown.collect::<Vec<_>>().join(", ")));
}

/// The largest shape that is trained on, for clips of the sizes `sizes`. Lists the buckets.
fn largest(
    dataset: &Dataset,
    unit: VideoUnit,
    sizes: &BTreeMap<[usize; 2], usize>,
    found: &mut Listing,
) -> Option<[usize; 2]> {
    let config = dataset.config();
    if dataset.has_buckets() {
        let mut shapes = BTreeMap::<_, usize>::new();
        (0..dataset.len()).filter_map(|i| dataset.bucket(i)).for_each(|b| *shapes.entry(b).or_default() += 1);
        for (bucket, count) in &shapes {
            let [height, width] = bucket.size;
            found.good(format!("bucket of {width}x{height}, {} frames: {count}", bucket.frames));
        }
        return shapes.keys().map(|bucket| bucket.size).max_by_key(|[height, width]| height * width);
    }
    let fixed = config.height.zip(config.width).map(|(height, width)| [height, width]);
    fixed.or_else(|| {
        let trained_size =
            |size: &[usize; 2]| roll_media::target_size(*size, config.max_pixels, [unit.height, unit.width]).ok();
        sizes.keys().filter_map(trained_size).max_by_key(|[height, width]| height * width)
    })
}

/// The first faults, one on each line, and the number of further faults.
fn first_faults(faults: &[String]) -> String {
    let more = faults.len().saturating_sub(MAX_FAULTS);
    let rest = if more > 0 { format!("\nand {more} more") } else { String::new() };
    faults[..faults.len() - more].join("\n") + &rest
}

/// Fails if one of the files is not there.
fn files_are_there<'a>(mut paths: impl Iterator<Item = &'a Path>) -> Result<()> {
    paths.try_for_each(|path| std::fs::metadata(path).map(drop).map_err(roll_core::Error::file("read", path)))
}

/// Scores the first clip, or a grey video for a row without one, and pulls the score's gradient if `grad` is on.
pub(super) fn score(
    reference: Reference,
    dataset: &Dataset,
    reward: &mut dyn RewardScorer,
    grad: Grad,
    found: &mut Listing,
) {
    // A reward that compares videos of one prompt scores none by itself.
    if reward.compares() {
        return;
    }
    let metadata = dataset.metadata();
    let rows = metadata.rows.iter().filter(|row| row.is_first_window() && row.no_prompt.is_none()).take(MAX_ROWS);
    let faults = rows.filter_map(|row| {
        reward.check_prompt(&row.prompt).err().map(|error| format!("{}: {}", metadata.location(row), error.chain()))
    });
    let faults: Vec<String> = faults.collect();
    if !faults.is_empty() {
        return found.problem(first_faults(&faults));
    }
    if let Some(reason) = reward.unscorable() {
        return found.note(format!("`{}` scores nothing here: {reason}", reward.name()));
    }
    let Some(sample) = (0..dataset.len().min(MAX_ROWS)).find_map(|i| dataset.sample(i).ok()) else { return };
    let what = if sample.video.clip().is_some() { "the first clip" } else { "a grey video" };
    let (name, start) = (reward.name().to_string(), Instant::now());
    match score_of(reference, dataset, &sample, reward, grad) {
        Ok(Some(Score::Value { value, .. })) if value.is_finite() => {
            let with_gradient = if grad.is_on() { " with its gradient" } else { "" };
            let seconds = start.elapsed().as_secs_f64();
            found.good(format!("`{name}` scores {what} {value:.4}, in {seconds:.2} s{with_gradient}"));
        }
        Ok(Some(Score::Value { value, .. })) => {
            found.note(format!("the score of {what} by `{name}` is {value}, which counts as nothing to score"));
        }
        Ok(Some(Score::Missing { reason })) => found.note(format!("`{name}` has nothing to score in {what}: {reason}")),
        Ok(None) => {}
        Err(error) => found.problem(error.chain()),
    }
}

/// The score of a sample; `None` if the sample has no reference that the reward can use.
fn score_of(
    reference: Reference,
    dataset: &Dataset,
    sample: &Sample,
    reward: &mut dyn RewardScorer,
    grad: Grad,
) -> Result<Option<Score>> {
    let mut target = match reference_video(sample, reference)?.map(|video| reward.prepare(&video)) {
        Some(Err(error)) if error.missing_reason().is_some() => return Ok(None),
        Some(prepared) => prepared?,
        None if reward.reads_reference() => return Ok(None),
        None => Target::default(),
    };
    target.columns = sample.columns.clone();
    let video = match sample.video.clip() {
        Some(clip) => clip.clone(),
        None => {
            let [frames, height, width] = sample.video.dims();
            Arc::new(Video::new(Tensor::zeros([frames, 3, height, width]), dataset.config().fps.unwrap_or(GREY_FPS))?)
        }
    };
    let (score, pullback) = reward.score(&video, &sample.prompt, &target, grad)?;
    if grad.is_on() && score.value().is_some_and(f64::is_finite) {
        let name = reward.name();
        let pullback = pullback.ok_or_else(|| Error::Misuse(format!("the reward `{name}` returned no gradient")))?;
        let gradient = pullback.pull(&Tensor::scalar(1.0))?;
        if let Some(value) = gradient.f32s()?.iter().find(|value| !value.is_finite()) {
            return Err(Error::NonFinite { what: format!("the gradient of `{name}`"), value: f64::from(*value) });
        }
    }
    Ok(Some(score))
}

/// Lists how many references of the first `samples` rows the reward can compare with. Returns false after a problem.
pub(super) fn references(
    reference: Reference,
    dataset: &Dataset,
    reward: &mut dyn RewardScorer,
    samples: usize,
    found: &mut Listing,
) -> bool {
    let looked_at = dataset.len().min(samples);
    let (mut without_reference, mut prepared, mut unusable) = (0, 0, Vec::new());
    for i in 0..looked_at {
        let sample = match dataset.sample(i) {
            Ok(sample) => sample,
            Err(error) => {
                unusable.push(error.chain());
                continue;
            }
        };
        let video = reference_video(&sample, reference);
        match video.and_then(|video| video.map(|video| reward.prepare(&video)).transpose()) {
            Ok(Some(_)) => prepared += 1,
            Ok(None) => without_reference += 1,
            Err(error) => match error.missing_reason() {
                Some(reason) => unusable.push(format!("{}: {reason}", sample.origin)),
                None => {
                    found.problem(error.chain());
                    return false;
                }
            },
        }
    }
    let reference_count = looked_at - without_reference;
    if reference_count == 0 {
        return true;
    }
    let name = reward.name().to_string();
    let references = counted(reference_count as u64, "reference");
    found.good(format!("`{name}` can compare with {prepared} of the first {references}"));
    if !unusable.is_empty() {
        let message = format!("it cannot compare with these:\n{}", first_faults(&unusable));
        match prepared == 0 || reward.on_missing() == roll_core::OnMissing::Error {
            true => {
                found.problem(message);
                return false;
            }
            false => found.note(message),
        }
    }
    true
}
