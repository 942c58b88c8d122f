//! The data that a run would train on.

use std::collections::BTreeMap;
use std::path::Path;

use roll_algos::reward_fl::{Reference, reference_video};
use roll_core::{Result, RewardScorer, VideoUnit};
use roll_data::{Batches, Bucket, Dataset, OnBadSample, probe};
use roll_train::config::RunConfig;
use roll_train::progress::counted;
use roll_train::trainer::{counted_rows, epochs, row_noun};

use super::findings::Findings;

/// At most this many clips of a data set are probed.
const CLIPS: usize = 2000;
/// At most this many faults are named.
const NAMED: usize = 3;
/// At most this many sizes are named.
const SIZES: usize = 4;

/// Lists the rows. Returns height and width of the largest shape that is trained on.
pub fn look(data: &Batches, steps: Option<u64>, unit: VideoUnit, found: &mut Findings) -> Option<[usize; 2]> {
    let largest = set(data.dataset(), unit, found);
    if let Some(steps) = steps {
        let each = counted(data.global_batch() as u64, row_noun(data.dataset().metadata()));
        found.good(format!("{} of {each} each: {} epochs", counted(steps, "step"), epochs(data.epoch(steps))));
    }
    largest
}

/// Lists counts, sizes and lengths of a data set. Returns its largest size.
fn set(dataset: &Dataset, unit: VideoUnit, found: &mut Findings) -> Option<[usize; 2]> {
    let config = dataset.config();
    let rows: Vec<_> = dataset.metadata().rows.iter().filter(|row| row.is_first_window()).collect();
    let looked_at = rows.len().min(CLIPS);
    let (mut sizes, mut short, mut bad) = (BTreeMap::<[usize; 2], usize>::new(), 0, Vec::new());
    for &row in &rows[..looked_at] {
        if let Some(reason) = &row.no_prompt {
            bad.push(format!("{}: {reason}", dataset.metadata().location(row)));
            continue;
        }
        let others = [row.image.as_deref(), row.end_image.as_deref(), row.mask.as_deref()];
        let shape = match &row.video {
            Some(video) => probe(video, config.decoder).map(|probed| (probed.size, probed.frames)),
            None => {
                Bucket::without_clip(config, row.image.as_deref(), unit).map(|video| (video.size, dataset.longest()))
            }
        };
        match shape.and_then(|shape| files_are_there(&others).map(|()| shape)) {
            Ok((size, frames)) => {
                *sizes.entry(size).or_default() += 1;
                short += usize::from(frames < dataset.longest());
            }
            Err(error) => bad.push(format!("{}: {}", dataset.metadata().location(row), error.chain())),
        }
    }
    let limit = if looked_at < rows.len() { format!(" (the first {looked_at} were looked at)") } else { String::new() };
    let all = counted_rows(dataset.metadata());
    let of_clips = if rows.len() < dataset.len() { " of the clips" } else { "" };
    found.good(format!("{all}, {}{of_clips} can be read{limit}", looked_at - bad.len()));
    list_sizes(&sizes, found);
    if short > 0 {
        found.note(format!(
            "{short} have fewer than the {} of `data.num_frames`",
            counted(dataset.longest() as u64, "frame")
        ));
    }
    if !bad.is_empty() {
        let listed = listed(&bad);
        match config.on_bad_sample == OnBadSample::Error || bad.len() == looked_at {
            true => found.problem(listed),
            false => found.note(format!("left out (`data.on_bad_sample: skip`):\n{listed}")),
        }
    }
    largest(dataset, unit, &sizes, found)
}

/// Lists the most frequent sizes, `[height, width]`.
fn list_sizes(sizes: &BTreeMap<[usize; 2], usize>, found: &mut Findings) {
    if sizes.is_empty() {
        return;
    }
    let mut named: Vec<_> = sizes.iter().collect();
    named.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    let more = named.len().saturating_sub(SIZES);
    let shown = named.iter().take(SIZES).map(|([height, width], count)| format!("{count} of {width}x{height} pixels"));
    let more = if more > 0 { format!(" and {more} more sizes") } else { String::new() };
    found.good(format!("{}{more}", shown.collect::<Vec<_>>().join(", ")));
}

/// The largest shape that is trained on, of clips of these sizes; lists the buckets.
fn largest(
    dataset: &Dataset,
    unit: VideoUnit,
    sizes: &BTreeMap<[usize; 2], usize>,
    found: &mut Findings,
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
        let read = |size: &[usize; 2]| roll_data::target_size(*size, config.max_pixels, [unit.height, unit.width]).ok();
        sizes.keys().filter_map(read).max_by_key(|[height, width]| height * width)
    })
}

/// The first faults, one on each line, and the number of the others.
fn listed(faults: &[String]) -> String {
    let more = faults.len().saturating_sub(NAMED);
    let rest = if more > 0 { format!("\nand {more} more") } else { String::new() };
    faults[..faults.len() - more].join("\n") + &rest
}

fn files_are_there(paths: &[Option<&Path>]) -> Result<()> {
    for path in paths.iter().copied().flatten() {
        std::fs::metadata(path).map_err(roll_core::Error::file("read", path))?;
    }
    Ok(())
}

/// Counts the first references in which the reward finds something to compare with.
pub fn references(
    config: &RunConfig,
    dataset: &Dataset,
    reward: &mut dyn RewardScorer,
    samples: usize,
    found: &mut Findings,
) {
    let kind = config.algo.options.get("reference").cloned();
    let kind = kind.and_then(|kind| serde_json::from_value(kind).ok()).unwrap_or(Reference::Clip);
    let mut looked_at = dataset.len().min(samples);
    let (mut prepared, mut without) = (0, Vec::new());
    for i in 0..dataset.len().min(samples) {
        let sample = match dataset.sample(i) {
            Ok(sample) => sample,
            Err(error) => {
                without.push(error.chain());
                continue;
            }
        };
        let reference = reference_video(&sample, kind);
        match reference.and_then(|video| video.map(|video| reward.prepare(&video)).transpose()) {
            Ok(Some(_)) => prepared += 1,
            Ok(None) => looked_at -= 1,
            Err(error) => match error.missing_reason() {
                Some(reason) => without.push(format!("{}: {reason}", sample.origin)),
                None => return found.problem(error.chain()),
            },
        }
    }
    if looked_at == 0 {
        return; // rows without a reference
    }
    let name = reward.name().to_string();
    let limit = format!("of the first {}", counted(looked_at as u64, "reference"));
    found.good(format!("`{name}` can compare with {prepared} {limit}"));
    if !without.is_empty() {
        let message = format!("it cannot compare with these:\n{}", listed(&without));
        match prepared == 0 || reward.on_missing() == roll_core::OnMissing::Error {
            true => found.problem(message),
            false => found.note(message),
        }
    }
}
