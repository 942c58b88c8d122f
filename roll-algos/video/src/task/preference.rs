//! The last questions of a run whose reward compares videos: is a clip better after training than before?

use roll_core::{Result, Target, Tensor, Video};
use roll_train::results::record::Comparison;
use roll_train::results::scores;
use roll_train::task::TaskContext;

use super::{ClipTask, HeldOut, samples};

impl ClipTask {
    /// Lets a reward that compares videos, if it is the only reward, compare videos of evaluated clips before and after
    /// training. Such a reward works on one rank, which has all clips.
    pub(super) fn compare_ends(&mut self, context: &mut TaskContext<'_>) -> Result<()> {
        let (Some(dir), HeldOut::Evaluated(evaluator), Some(reward)) =
            (&context.journal.dir, &self.held_out, &mut self.reward)
        else {
            return Ok(());
        };
        let (at_most, labels) = (self.config.evaluation.compare, &self.facts.labels);
        let set = context.record.first_and_last_evaluation().and_then(|(before, _)| scores::judged_set(before));
        // A reward without terms is the only one.
        let compares_ends = reward.compares() && reward.terms().is_empty() && at_most > 0;
        if !compares_ends {
            return Ok(());
        }
        let Some(set) = set else { return Ok(()) };
        let mut comparison = Comparison::default();
        for (i, sample) in evaluator.samples(set).iter().take(at_most).enumerate() {
            let [before, after] = ["before", "after"].map(|moment| samples::read_clip(dir, moment, set, i, labels));
            let (Some(before), Some(after)) = (before?, after?) else { continue };
            let target = match sample.reference_image()? {
                Some(picture) => reward.prepare(&still(picture, before.fps())?)?,
                None => Target::default(),
            };
            let target = Target { columns: sample.columns.clone(), ..target };
            let scores = reward.score_group(&[before, after], &sample.prompt, &target, context.bar)?;
            let values: Vec<f64> = scores.iter().filter_map(|score| score.value()).collect();
            match values[..] {
                [before, after] if after > before => comparison.after += 1,
                [before, after] if after < before => comparison.before += 1,
                [_, _] => comparison.equal += 1,
                // A missing score decides nothing.
                _ => {}
            }
        }
        context.record.comparison = Some(comparison);
        context.journal.write_progress(context.record)
    }
}

/// A video of one picture, `[3, H, W]`.
fn still(picture: Tensor, fps: f64) -> Result<Video> {
    let shape = [&[1], picture.shape()].concat();
    Video::new(picture.reshape(shape)?, fps)
}
