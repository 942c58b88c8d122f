//! Sums of a training step over its samples, and the metrics derived from them.

use std::collections::BTreeMap;

use roll_core::{Communicator, Result, Video, communicator};
use roll_step::ranks::Bits;
use serde::{Deserialize, Serialize};

use crate::report::{SCORE, detail_metric};

/// The outcome of a sample or of one of its videos.
pub(super) enum Outcome {
    Scored(Scored),
    /// Left out, with the reason.
    Skipped(String),
    /// The name of a value that is not finite, and the value.
    NonFinite(String, f64),
}

/// The values of a video with a score, or of a sample: the means over its scored videos. All but the details are
/// finite.
#[derive(Serialize, Deserialize)]
pub(super) struct Scored {
    /// The fraction of the sample's videos that have a score; 1 for a video. It is the weight of the sample in the
    /// update and in means over samples, so that every scored video of a step has the same weight.
    pub(super) fraction: f64,
    pub(super) loss: f64,
    pub(super) score: f64,
    /// The KL, if there is a reference.
    pub(super) kl: Option<f64>,
    /// The flow-matching loss on the clip, if it is used.
    pub(super) data_loss: Option<f64>,
    /// Details of the reward, which may be NaN. `Bits` keeps them exact when ranks exchange them.
    pub(super) details: BTreeMap<String, Bits>,
}

impl Scored {
    /// Means over the scored `videos` of one sample, which has `count` videos. The mean of a detail covers the videos
    /// that have it. `data_loss` stays `None`, because it belongs to the sample and the caller adds it afterwards.
    /// Returns `None` if no video has a score.
    pub(super) fn mean(mut videos: Vec<Self>, count: usize) -> Option<Self> {
        let fraction = videos.len() as f64 / count as f64;
        // A single video needs no mean: its values are the values of the sample, to the bit.
        if videos.len() < 2 {
            return videos.pop().map(|video| Self { fraction, ..video });
        }
        let n = videos.len() as f64;
        let mean = |value: fn(&Self) -> f64| videos.iter().map(value).sum::<f64>() / n;
        let details = detail_means(&videos);
        let details = details.into_iter().map(|(name, mean)| (name.to_string(), Bits(mean))).collect();
        // Either all videos of a sample have a KL, or none has.
        let kl = videos[0].kl.map(|_| mean(|v| v.kl.unwrap_or(0.0)));
        Some(Self { fraction, loss: mean(|v| v.loss), score: mean(|v| v.score), kl, data_loss: None, details })
    }
}

/// The mean of each detail over the samples (or videos) that have it, weighted by their fractions.
fn detail_means(samples: &[Scored]) -> BTreeMap<&str, f64> {
    let mut sums: BTreeMap<&str, [f64; 2]> = BTreeMap::new();
    for Scored { fraction, details, .. } in samples {
        for (name, Bits(value)) in details {
            let [sum, weight] = sums.entry(name).or_default();
            *sum += fraction * value;
            *weight += fraction;
        }
    }
    sums.into_iter().map(|(name, [sum, weight])| (name, sum / weight)).collect()
}

/// The scored samples and the clamped pixels of a training step.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Tally {
    pub(super) scored: Vec<Scored>,
    /// Number of values of all decoded videos.
    values: u64,
    /// Number of these values at the bounds of the decoder's clamp.
    clamped: u64,
}

impl Tally {
    /// Counts the values of a video, and the values at the bounds of the decoder's clamp, where the gradient is 0.
    pub(super) fn count_video(&mut self, video: &Video) {
        let values = video.frames().f32s().unwrap_or(&[]); // a video's frames are f32
        self.values += values.len() as u64;
        self.clamped += values.iter().filter(|v| v.abs() >= 1.0).count() as u64;
    }

    /// Joins the tallies of all ranks in the order of the ranks, which is the order of the samples. The metrics of
    /// the joined tally equal those of one rank with all samples.
    pub(super) fn joined(&self, ranks: &dyn Communicator) -> Result<Self> {
        let mut all = Self::default();
        for tally in communicator::join(ranks, self)? {
            all.scored.extend(tally.scored);
            all.values += tally.values;
            all.clamped += tally.clamped;
        }
        Ok(all)
    }

    /// The total weight of the scored samples: the sum of their fractions.
    pub(super) fn total_fraction(&self) -> f64 {
        self.scored.iter().map(|scored| scored.fraction).sum()
    }

    /// The metrics of the step: the number of samples with a score, means over these samples, and the fraction of
    /// clamped values.
    pub(super) fn metrics(&self) -> BTreeMap<String, f64> {
        let total_fraction = self.total_fraction();
        let mut metrics = BTreeMap::from([("actor/samples".to_string(), self.scored.len() as f64)]);
        if self.values > 0 {
            metrics.insert("actor/clamped_fraction".into(), self.clamped as f64 / self.values as f64);
        }
        for scored in &self.scored {
            let kl = scored.kl.map(|kl| ("actor/kl_loss", kl));
            for (name, value) in [("actor/loss", scored.loss), (SCORE, scored.score)].into_iter().chain(kl) {
                *metrics.entry(name.into()).or_default() += scored.fraction * value / total_fraction;
            }
        }
        // The mean over the samples that have a loss on their clip, weighted by their fractions.
        let (mut sum, mut weight) = (0.0, 0.0);
        for scored in &self.scored {
            if let Some(data_loss) = scored.data_loss {
                sum += scored.fraction * data_loss;
                weight += scored.fraction;
            }
        }
        if weight > 0.0 {
            metrics.insert("actor/data_loss".into(), sum / weight);
        }
        metrics.extend(detail_means(&self.scored).into_iter().map(|(name, mean)| (detail_metric(name), mean)));
        metrics
    }
}
