//! The last questions of a run whose reward compares videos: is a clip better after training than before?

use roll_core::{Result, Target, Tensor, Video};

use super::Trainer;
use crate::evaluation;
use crate::progress::StoppableBar;
use crate::results::record::Comparison;
use crate::results::{self, Journal};

impl Trainer {
    /// Lets a reward that compares videos, and is the only one, compare those of evaluated clips before and after
    /// training. Such a reward works on one rank, which has all clips.
    pub(super) fn compare_ends(&mut self, journal: &Journal, bar: &StoppableBar) -> Result<()> {
        let (Some(dir), Some(evaluator), Some(reward)) = (&journal.dir, &self.evaluator, &mut self.reward) else {
            return Ok(());
        };
        let at_most = self.loaded.config.evaluation.compare;
        let set = self.record.first_and_last_evaluation().and_then(|(before, _)| evaluation::judged_set(before));
        let Some(set) = set.filter(|_| reward.compares() && reward.terms().is_empty() && at_most > 0) else {
            return Ok(());
        };
        let mut comparison = Comparison::default();
        for (i, sample) in evaluator.samples(set).iter().take(at_most).enumerate() {
            let [before, after] =
                ["before", "after"].map(|moment| results::read_clip(dir, moment, set, i, &self.labels));
            let (Some(before), Some(after)) = (before?, after?) else { continue };
            let target = match sample.reference_image()? {
                Some(picture) => reward.prepare(&still(picture, before.fps())?)?,
                None => Target::default(),
            };
            let target = Target { columns: sample.columns.clone(), ..target };
            let scores = reward.score_group(&[before, after], &sample.prompt, &target, bar)?;
            let values: Vec<f64> = scores.iter().filter_map(|score| score.value()).collect();
            match values[..] {
                [before, after] if after > before => comparison.after += 1,
                [before, after] if after < before => comparison.before += 1,
                [_, _] => comparison.equal += 1,
                _ => {}
            }
        }
        self.record.comparison = Some(comparison);
        journal.write_progress(&self.record, &self.labels)
    }
}

/// A video of one picture, `[3, H, W]`.
fn still(picture: Tensor, fps: f64) -> Result<Video> {
    let shape = [&[1], picture.shape()].concat();
    Video::new(picture.reshape(shape)?, fps)
}
