//! Scores of evaluated clips, how they change from one evaluation to another, and which changes count.

use roll_core::Evaluated;
use serde::{Deserialize, Serialize};

use crate::statistics::{Gain, decimals, paired_gain, standard_deviation};

/// The metric that counts the checks that have fallen since the evaluation before training.
pub const FALLING: &str = "eval/checks_falling";

/// A set of evaluated clips.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SetName {
    /// Clips that are trained on.
    Train,
    /// Clips that are not trained on.
    Unseen,
}

/// The results of one evaluation, set by set.
pub type Results = Vec<(SetName, Vec<Clip>)>;

/// The results of one clip.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Clip {
    /// The sample's origin.
    pub origin: String,
    /// Scores by position: the score by the trained reward, then the weighted sum of the checks, then, if there are
    /// several checks, the score by each of them. `None` if there was nothing to score, or if the score was not finite.
    pub scores: Vec<Option<f64>>,
    /// KL divergence from the base model; `None` if it was not finite.
    pub kl: Option<f64>,
}

impl Clip {
    /// The results of an evaluated sample. Values that are not finite are `None`.
    pub fn of(evaluated: &Evaluated) -> Self {
        let finite = |value: f64| value.is_finite().then_some(value);
        Self {
            origin: evaluated.origin.clone(),
            scores: evaluated.scores.iter().map(|score| score.and_then(finite)).collect(),
            kl: finite(evaluated.kl),
        }
    }
}

/// Scores of a set before and after training.
#[derive(Clone, Debug, Serialize)]
pub struct Change {
    /// Clips with a score both before and after.
    pub clips: usize,
    /// Clips without a score before or after.
    pub missing: usize,
    /// Mean score before.
    pub before: f64,
    /// Mean score after.
    pub after: f64,
    /// Mean over clips of the score after minus the score before.
    pub gain: Gain,
    /// Standard deviation, between clips, of the scores before.
    pub spread: f64,
}

/// The judgement of a change.
///
/// A rise or a fall must be both significant and large enough. It is significant if the confidence interval excludes 0.
/// It is large enough if its mean is at least [`LEAST_SPREAD`] of the spread between clips before, and at least
/// [`LEAST_SHARE`] of the mean before. Significance alone says little, because both evaluations have the same clips and
/// noise, so that the smallest drift is significant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Fewer than [`MIN_CLIPS`] clips.
    TooFewClips,
    /// Not significant, and a change that is large enough lies within the confidence interval.
    Undecided,
    /// Not large enough.
    Negligible,
    /// The mean rose.
    Rise,
    /// The mean fell.
    Fall,
}

/// Fewest clips for a judgement. A confidence interval from fewer pairs means little.
pub const MIN_CLIPS: usize = 4;
/// Smallest change that counts, in standard deviations between clips: Cohen's "small" effect (1988).
pub const LEAST_SPREAD: f64 = 0.2;
/// Smallest change that counts as a share of the mean before, for clips that hardly differ from one another.
pub const LEAST_SHARE: f64 = 0.005;

impl Change {
    /// Judges the change.
    pub fn effect(&self) -> Effect {
        let Gain { mean, ci95: [low, high] } = self.gain;
        let smallest_large = (LEAST_SPREAD * self.spread).max(LEAST_SHARE * self.before.abs());
        let is_significant = low > 0.0 || high < 0.0;
        let is_interval_small = -smallest_large < low && high < smallest_large;
        if self.clips < MIN_CLIPS {
            Effect::TooFewClips
        } else if low > 0.0 && mean >= smallest_large {
            Effect::Rise
        } else if high < 0.0 && mean <= -smallest_large {
            Effect::Fall
        } else if is_significant || is_interval_small {
            Effect::Negligible
        } else {
            Effect::Undecided
        }
    }

    /// The means before and after, with as many decimals as show their difference.
    pub fn ends(&self) -> [String; 2] {
        let digits = decimals(self.gain.mean);
        [self.before, self.after].map(|mean| format!("{mean:.digits$}"))
    }
}

/// The set by which a run is judged: the clips that are not trained on, or the training clips if there are no others.
pub fn judged_set(results: &Results) -> Option<SetName> {
    [SetName::Unseen, SetName::Train].into_iter().find(|set| !of(results, *set).is_empty())
}

/// The clips of one set; empty if there is no such set.
pub fn of<T>(sets: &[(SetName, Vec<T>)], name: SetName) -> &[T] {
    sets.iter().find(|(other, _)| *other == name).map(|(_, clips)| clips.as_slice()).unwrap_or_default()
}

/// Mean of the scores of the reward at position `reward`; `None` if there are no scores.
pub fn mean_score(clips: &[Clip], reward: usize) -> Option<f64> {
    mean(clips.iter().filter_map(|clip| *clip.scores.get(reward)?))
}

/// Mean divergence from the base model.
pub fn mean_kl<'a>(clips: impl IntoIterator<Item = &'a Clip>) -> Option<f64> {
    mean(clips.into_iter().filter_map(|clip| clip.kl))
}

/// The mean; `None` without values.
fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let values: Vec<f64> = values.collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The change between two evaluations of the same clips, by the score at position `reward` of [`Clip::scores`]. `None`
/// if no clip has both scores.
pub fn change(before: &[Clip], after: &[Clip], reward: usize) -> Option<Change> {
    let score = |clip: &Clip| *clip.scores.get(reward)?;
    let pairs: Vec<[f64; 2]> =
        before.iter().zip(after).filter_map(|(before, after)| Some([score(before)?, score(after)?])).collect();
    let (scores_before, scores_after): (Vec<f64>, Vec<f64>) =
        pairs.iter().map(|[before, after]| (*before, *after)).unzip();
    Some(Change {
        clips: pairs.len(),
        missing: before.len() - pairs.len(),
        before: mean(scores_before.iter().copied())?,
        after: mean(scores_after.iter().copied())?,
        gain: paired_gain(&pairs),
        spread: standard_deviation(&scores_before),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Scores that change by `shift` on average, and by a tenth of that more or less from clip to clip.
    fn changed(clips: usize, before: f64, spread: f64, shift: f64) -> Change {
        let clip = |score: f64| Clip { origin: String::new(), scores: vec![Some(score)], kl: None };
        let side = |i: usize| if i % 2 == 0 { 1.0 } else { -1.0 };
        let firsts: Vec<f64> = (0..clips).map(|i| before + spread * side(i)).collect();
        let after = firsts.iter().enumerate().map(|(i, first)| clip(first + shift * (1.0 + 0.1 * side(i / 2))));
        change(&firsts.iter().map(|first| clip(*first)).collect::<Vec<_>>(), &after.collect::<Vec<_>>(), 0).unwrap()
    }

    #[test]
    fn a_change_has_a_sign_and_a_size() {
        for (clips, before, spread, shift, effect) in [
            // Runs of a recipe that were called hacking: a thousandth of `motion`.
            (8, 0.0098, 0.003, -1e-5, Effect::Negligible),
            (8, 0.656, 0.1, 5e-4, Effect::Negligible),
            (24, 0.565, 0.12, 0.2, Effect::Rise),
            (24, 0.565, 0.12, -0.2, Effect::Fall),
            // Clips that are all alike: a share of the value counts.
            (8, 0.5, 0.0, 0.001, Effect::Negligible),
            (8, 0.5, 0.0, 0.01, Effect::Rise),
            // A score around 0 has no share.
            (8, 0.0, 1.0, 0.1, Effect::Negligible),
            (8, 0.0, 1.0, 0.3, Effect::Rise),
            (MIN_CLIPS - 1, 0.5, 0.1, 0.3, Effect::TooFewClips),
        ] {
            let change = changed(clips, before, spread, shift);
            assert_eq!(change.effect(), effect, "{clips} clips, {before} with {spread}, {shift}");
            let [before, after] = change.ends();
            assert_ne!(before, after);
        }
        // Both signs.
        let (mut before, after) = (Vec::new(), [0.9, 0.1, 0.8, 0.1, 0.9, 0.3]);
        before.resize(after.len(), Clip { origin: String::new(), scores: vec![Some(0.5)], kl: None });
        let after = after.map(|score| Clip { scores: vec![Some(score)], ..before[0].clone() });
        assert_eq!(change(&before, &after, 0).unwrap().effect(), Effect::Undecided);
    }
}
