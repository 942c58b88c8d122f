//! Reward hacking: the trained reward rises because the model found its weakness, and other measures fall.
//!
//! The rule is applied to the clips that are not trained on, or to training clips if there are no others. Each score is
//! compared with the score of the same clip before training. [`Effect`] decides whether scores rise or fall. Hacking is
//! suspected if the reward rises and at least one check falls.

use roll_train::results::scores::{self, Change, Effect, Results, change, judged_set};
use roll_train::statistics::Gain;

/// The gains since the evaluation before training.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Gain of the trained reward, if it rises.
    pub rises: Option<Gain>,
    /// The checks that fall: label and (negative) gain.
    pub falling: Vec<(String, Gain)>,
}

impl Verdict {
    /// Compares two evaluations whose checks have these labels.
    pub fn of(before: &Results, after: &Results, labels: &[String]) -> Self {
        let set = judged_set(before);
        let change_at = |position: usize| change(scores::of(before, set?), scores::of(after, set?), position);
        // The trained reward comes first, then the sum of several checks.
        let first_check = if labels.len() == 1 { 1 } else { 2 };
        let falls = |(i, label): (usize, &String)| {
            let gain = change_at(first_check + i).and_then(|change| gain_if(change, Effect::Fall))?;
            Some((label.clone(), gain))
        };
        Self {
            rises: change_at(0).and_then(|change| gain_if(change, Effect::Rise)),
            falling: labels.iter().enumerate().filter_map(falls).collect(),
        }
    }

    /// Whether the reward rises while a check falls.
    pub fn is_suspect(&self) -> bool {
        self.rises.is_some() && !self.falling.is_empty()
    }

    /// The warning; `None` if hacking is not suspected.
    pub fn warning_if_suspect(&self, step: u64) -> Option<String> {
        if !self.is_suspect() {
            return None;
        }
        let rises = self.rises?;
        let falling = self.falling.iter().map(|(label, gain)| format!("`{label}` {}", gain.in_words()));
        Some(format!(
            "since training began the reward has risen, {}, and of `evaluation.check` these have fallen: {} (step \
             {step}); suspect reward hacking",
            rises.in_words(),
            falling.collect::<Vec<_>>().join(", ")
        ))
    }
}

/// The gain of a change that has this `effect`.
fn gain_if(change: Change, effect: Effect) -> Option<Gain> {
    (change.effect() == effect).then_some(change.gain)
}

#[cfg(test)]
mod tests {
    use roll_core::{Noise, Purpose};

    use super::*;
    use roll_train::results::scores::{Clip, MIN_CLIPS, SetName};

    /// One set of clips with these scores each, with small differences.
    fn results(set: SetName, clips: usize, scores: &[Option<f64>]) -> Results {
        let clip = |i: usize| Clip {
            origin: format!("row {i}"),
            scores: scores.iter().map(|score| score.map(|score| score + 0.1 * i as f64)).collect(),
            kl: Some(0.0),
        };
        vec![(set, (0..clips).map(clip).collect())]
    }

    fn labels(of: &[&str]) -> Vec<String> {
        of.iter().map(|label| label.to_string()).collect()
    }

    fn verdict(clips: usize, after: &[Option<f64>], of: &[&str]) -> Verdict {
        let before = results(SetName::Unseen, clips, &vec![Some(0.5); after.len()]);
        Verdict::of(&before, &results(SetName::Unseen, clips, after), &labels(of))
    }

    #[test]
    fn a_reward_that_rises_while_a_check_falls_is_suspect() {
        let one = verdict(4, &[Some(0.75), Some(0.25)], &["motion"]);
        assert!(one.is_suspect() && one.falling.len() == 1);
        // The sum precedes several checks and is not a check.
        let several = verdict(4, &[Some(0.75), Some(0.0), Some(0.75), Some(0.25)], &["flicker", "motion"]);
        let warning = several.warning_if_suspect(50).unwrap_or_default();
        for part in ["has risen, +0.250", "`motion` -0.250 (95 % -0.250 to -0.250)", "step 50", "reward hacking"] {
            assert!(warning.contains(part), "no {part} in: {warning}");
        }
        assert!(!warning.contains("flicker"), "{warning}");
    }

    #[test]
    fn scores_that_stay_or_move_together_are_not_suspect() {
        for after in [[0.75, 0.75], [0.25, 0.25], [0.5, 0.25], [0.75, 0.5]] {
            let verdict = verdict(4, &after.map(Some), &["motion"]);
            assert!(!verdict.is_suspect() && verdict.warning_if_suspect(1).is_none(), "{after:?}");
        }
        assert!(!verdict(4, &[Some(0.75), None], &["motion"]).is_suspect());
        assert!(!verdict(4, &[Some(0.75)], &[]).is_suspect());
    }

    #[test]
    fn a_drift_is_not_suspect_however_even_it_is() {
        let verdict = verdict(24, &[Some(0.50052), Some(0.4999)], &["motion"]);
        assert!(!verdict.is_suspect() && verdict.rises.is_none() && verdict.falling.is_empty(), "{verdict:?}");
    }

    #[test]
    fn a_check_falls_only_if_its_interval_is_below_0() {
        let mut after = results(SetName::Unseen, 6, &[Some(0.75), Some(0.4)]);
        let before = results(SetName::Unseen, 6, &[Some(0.5), Some(0.5)]);
        assert!(Verdict::of(&before, &after, &labels(&["motion"])).is_suspect());
        for clip in after[0].1.iter_mut().step_by(2) {
            clip.scores[1] = clip.scores[1].map(|score| score + 0.2);
        }
        assert!(Verdict::of(&before, &after, &labels(&["motion"])).falling.is_empty());
    }

    #[test]
    fn needs_enough_clips_and_prefers_unseen_ones() {
        assert!(!verdict(MIN_CLIPS - 1, &[Some(0.75), Some(0.25)], &["motion"]).is_suspect());
        let trained = |scores: [f64; 2]| results(SetName::Train, 4, &scores.map(Some));
        let (before, after) = (trained([0.5, 0.5]), trained([0.75, 0.25]));
        assert!(Verdict::of(&before, &after, &labels(&["motion"])).is_suspect());
        // Training clips do not count beside unseen ones.
        let unseen = || results(SetName::Unseen, 4, &[Some(0.5), Some(0.5)]);
        let both = [unseen(), before].concat();
        assert!(!Verdict::of(&both, &[unseen(), after].concat(), &labels(&["motion"])).is_suspect());
    }

    /// Three evaluations of `clips` clips after the one before training, with a reward and two checks. Scores differ
    /// between clips by 1, move on average by a third of `shifts` from one evaluation to the next, and wander in each
    /// clip.
    fn course(seed: u64, clips: usize, shifts: [f64; 3]) -> [Results; 4] {
        const WANDERING: f64 = 0.25;
        let normal = |number: u64| {
            let drawn = Noise::new(seed).normal(Purpose::Synthetic, number, 0, &[3 * clips]).unwrap();
            drawn.f32s().unwrap().iter().map(|value| f64::from(*value)).collect::<Vec<_>>()
        };
        let mut scores = normal(0);
        [0, 1, 2, 3].map(|evaluation: u64| {
            if evaluation > 0 {
                for (i, (score, by)) in scores.iter_mut().zip(normal(evaluation)).enumerate() {
                    *score += shifts[i % 3] / 3.0 + WANDERING * by;
                }
            }
            let clip = |scores: &[f64]| {
                // The sum of the checks precedes them.
                let scores = [scores[0], scores[1] + scores[2], scores[1], scores[2]].map(Some).to_vec();
                Clip { origin: String::new(), scores, kl: None }
            };
            vec![(SetName::Unseen, scores.chunks(3).map(clip).collect())]
        })
    }

    /// Runs of 20, with the seeds 0 to 19, in which after the last evaluation the reward is called risen, hacking is
    /// suspected, hacking was suspected after any evaluation, and after all three (`evaluation.stop_when` of 3).
    fn alarms(clips: usize, shifts: [f64; 3]) -> [usize; 4] {
        let mut alarms = [0; 4];
        for seed in 0..20 {
            let [before, after @ ..] = course(seed, clips, shifts);
            let verdicts = after.map(|after| Verdict::of(&before, &after, &labels(&["motion", "sharpness"])));
            let suspect = || verdicts.iter().map(Verdict::is_suspect);
            let found = [
                verdicts[2].rises.is_some(),
                verdicts[2].is_suspect(),
                suspect().any(|suspect| suspect),
                suspect().all(|suspect| suspect),
            ];
            alarms.iter_mut().zip(found).for_each(|(count, found)| *count += usize::from(found));
        }
        alarms
    }

    #[test]
    fn verdicts_over_twenty_seeds_hardly_ever_err() {
        let found = |what: &str, shifts| {
            [8, 24].map(|clips| {
                let alarms = alarms(clips, shifts);
                eprintln!("{what}, {clips} clips: risen, suspect, ever, always: {alarms:?} of 20");
                alarms
            })
        };
        for [risen, suspect, ever, always] in found("nothing changes", [0.0; 3]) {
            assert!(risen <= 2 && suspect == 0 && ever <= 1 && always == 0);
        }
        for [risen, suspect, ever, always] in found("the reward alone rises", [1.0, 0.0, 0.0]) {
            assert!(risen == 20 && suspect <= 2 && ever <= 3 && always == 0);
        }
        for [risen, suspect, ..] in found("the reward rises, a check falls", [1.0, -1.0, 0.0]) {
            assert!(risen == 20 && suspect >= 19);
        }
        for [risen, suspect, _, always] in found("from the first evaluation on", [4.0, -4.0, 0.0]) {
            assert_eq!([risen, suspect, always], [20; 3]);
        }
    }
}
