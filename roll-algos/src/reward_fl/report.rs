//! Sums of a training step over its samples, and the metrics derived from them.

use std::collections::BTreeMap;

use roll_core::{Communicator, Result, Sample, StepReport, StrategyReport, Video, communicator};
use serde::{Deserialize, Serialize};

/// Name of the metric for the mean score.
pub(super) const SCORE: &str = "actor/score";

/// The outcome of a sample.
pub(super) enum Outcome {
    Scored(Scored),
    Skipped(String),
    NonFinite(String, f64),
}

/// The values of a sample that has a score.
pub(super) struct Scored {
    pub(super) loss: f64,
    pub(super) score: f64,
    pub(super) kl: f64,
    /// The flow-matching loss on the clip, if it is used.
    pub(super) data: Option<f64>,
    pub(super) details: BTreeMap<String, f64>,
}

impl Scored {
    /// Means over several videos of one sample. The mean of a detail covers the videos that have it. `None` without
    /// videos.
    pub(super) fn mean(mut videos: Vec<Self>) -> Option<Self> {
        if videos.len() < 2 {
            return videos.pop();
        }
        let n = videos.len() as f64;
        let mean = |value: fn(&Self) -> f64| videos.iter().map(value).sum::<f64>() / n;
        let mut details: BTreeMap<String, (f64, f64)> = BTreeMap::new();
        for (name, value) in videos.iter().flat_map(|video| &video.details) {
            let (sum, count) = details.entry(name.clone()).or_default();
            (*sum, *count) = (*sum + value, *count + 1.0);
        }
        let details = details.into_iter().map(|(name, (sum, count))| (name, sum / count)).collect();
        Some(Self { loss: mean(|v| v.loss), score: mean(|v| v.score), kl: mean(|v| v.kl), data: None, details })
    }
}

/// Sums over the samples of a step.
#[derive(Default)]
pub(super) struct Tally {
    scored: Vec<Scored>,
    skipped: Vec<(String, String)>,
    pixels: u64,
    clamped: u64,
    pub(super) videos: Vec<(String, Video)>,
    /// Norms of the gradients of reward and KL.
    pub(super) split: Option<(f64, f64)>,
    /// Name and value of a number that is not finite.
    pub(super) nonfinite: Option<(String, f64)>,
}

impl Tally {
    pub(super) fn add(&mut self, sample: &Sample, outcome: Outcome) {
        match outcome {
            Outcome::Scored(scored) => self.scored.push(scored),
            Outcome::NonFinite(what, value) => self.nonfinite = Some((what, value)),
            Outcome::Skipped(reason) => self.skipped.push((sample.origin.clone(), reason)),
        }
    }

    /// Counts the pixels at the bounds of the decoder's clamp, where the gradient is 0.
    pub(super) fn see(&mut self, video: &Video) {
        let values = video.frames().f32s().unwrap_or(&[]); // a video's frames are f32
        self.pixels += values.len() as u64;
        self.clamped += values.iter().filter(|v| v.abs() >= 1.0).count() as u64;
    }

    /// Joins the sums of all ranks in the order of the ranks, which is the order of the samples. Metrics are then equal
    /// to those of one rank with all samples. Videos stay on their rank.
    pub(super) fn joined(self, ranks: &dyn Communicator) -> Result<Self> {
        if ranks.world_size() == 1 {
            return Ok(self);
        }
        let own = Share {
            scored: self.scored.iter().map(SharedScore::from).collect(),
            skipped: self.skipped,
            pixels: self.pixels,
            clamped: self.clamped,
            nonfinite: self.nonfinite.map(|(what, value)| (what, value.to_bits())),
        };
        let mut all = Self { videos: self.videos, split: self.split, ..Self::default() };
        for share in communicator::join(ranks, &own)? {
            all.scored.extend(share.scored.into_iter().map(Scored::from));
            all.skipped.extend(share.skipped);
            all.pixels += share.pixels;
            all.clamped += share.clamped;
            all.nonfinite = all.nonfinite.or(share.nonfinite.map(|(what, bits)| (what, f64::from_bits(bits))));
        }
        Ok(all)
    }

    /// Number of samples with a score.
    pub(super) fn scored(&self) -> usize {
        self.scored.len()
    }

    /// Computes means over the samples with a score. The mean score is also reported as `alias`, if there is one.
    pub(super) fn report(
        self,
        update: Option<StrategyReport>,
        alias: Option<String>,
        seconds: BTreeMap<&'static str, f64>,
    ) -> StepReport {
        let n = self.scored.len() as f64;
        let mut metrics: BTreeMap<String, f64> = seconds.into_iter().map(|(k, v)| (k.to_string(), v)).collect();
        metrics.insert("actor/samples".into(), n);
        metrics.insert("actor/skipped".into(), self.skipped.len() as f64);
        if self.pixels > 0 {
            metrics.insert("actor/clamped_fraction".into(), self.clamped as f64 / self.pixels as f64);
        }
        for scored in &self.scored {
            let main = [("actor/loss", scored.loss), (SCORE, scored.score), ("actor/kl_loss", scored.kl)];
            for (name, value) in main {
                *metrics.entry(name.into()).or_default() += value / n;
            }
        }
        let data: Vec<f64> = self.scored.iter().filter_map(|scored| scored.data).collect();
        if !data.is_empty() {
            metrics.insert("actor/data_loss".into(), data.iter().sum::<f64>() / data.len() as f64);
        }
        if let (Some(alias), Some(score)) = (alias, metrics.get(SCORE).copied()) {
            metrics.insert(alias, score);
        }
        // A detail may be missing for some samples; its mean covers the samples that have it.
        let mut details: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for (name, value) in self.scored.iter().flat_map(|s| &s.details) {
            details.entry(name).or_default().push(*value);
        }
        for (name, values) in details {
            // Durations are metrics `time/...`, because they differ from run to run.
            let metric = match name.strip_prefix("time/") {
                Some(reward) => format!("time/score/{reward}"),
                None => format!("reward/{name}"),
            };
            metrics.insert(metric, values.iter().sum::<f64>() / values.len() as f64);
        }
        if let Some(update) = &update {
            metrics.insert("actor/grad_norm".into(), update.grad_norm);
        }
        if let Some((reward, kl)) = self.split {
            metrics.insert("actor/grad_norm_reward".into(), reward);
            metrics.insert("actor/grad_norm_kl".into(), kl);
        }
        if self.nonfinite.is_some() {
            metrics.insert("actor/nonfinite".into(), 1.0);
        }
        let applied = update.is_some_and(|u| u.applied);
        StepReport { metrics, skipped: self.skipped, videos: self.videos, records: Vec::new(), applied }
    }
}

/// A rank's sums of a step for the other ranks. Numbers are sent as bits, because a detail need not be finite.
#[derive(Serialize, Deserialize)]
struct Share {
    scored: Vec<SharedScore>,
    skipped: Vec<(String, String)>,
    pixels: u64,
    clamped: u64,
    nonfinite: Option<(String, u64)>,
}

#[derive(Serialize, Deserialize)]
struct SharedScore {
    loss: u64,
    score: u64,
    kl: u64,
    data: Option<u64>,
    details: BTreeMap<String, u64>,
}

impl From<&Scored> for SharedScore {
    fn from(s: &Scored) -> Self {
        let details = s.details.iter().map(|(name, value)| (name.clone(), value.to_bits())).collect();
        Self {
            loss: s.loss.to_bits(),
            score: s.score.to_bits(),
            kl: s.kl.to_bits(),
            data: s.data.map(f64::to_bits),
            details,
        }
    }
}

impl From<SharedScore> for Scored {
    fn from(s: SharedScore) -> Self {
        let details = s.details.into_iter().map(|(name, bits)| (name, f64::from_bits(bits))).collect();
        let [loss, score, kl] = [s.loss, s.score, s.kl].map(f64::from_bits);
        Self { loss, score, kl, data: s.data.map(f64::from_bits), details }
    }
}
