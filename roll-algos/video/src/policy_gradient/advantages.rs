//! Advantages: how much better a video is than the others of its prompt.
//!
//! A score that is missing is left out of every statistic, and has the advantage 0; so has everything in a group of
//! fewer than two scores, or of equal ones.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Divisor of differences from the group's mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Spread {
    /// The standard deviation of the group: every prompt weighs alike, however alike its videos are.
    Group,
    /// The spread of all scores of the step, over all ranks: a group of nearly equal scores does not make advantages of
    /// noise.
    #[default]
    Step,
    /// The spread of the group where it is largest.
    LargestGroup,
    /// Nothing.
    None,
}

/// How small a standard deviation may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Floor {
    /// This much is added to it.
    Added(f64),
    /// It counts as at least this much.
    AtLeast(f64),
}

/// How differences from the group's mean are brought to one scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normalization {
    /// Their divisor.
    pub spread: Spread,
    /// Whether variances are divided by n - 1 in place of n.
    pub unbiased: bool,
    /// How small the divisor may be.
    pub floor: Floor,
}

impl Normalization {
    /// Flow-GRPO's, which DiffusionNFT took over: population deviation plus 1e-4.
    pub fn new(spread: Spread) -> Self {
        Self { spread, unbiased: false, floor: Floor::Added(1e-4) }
    }

    fn deviation(&self, values: &[f64]) -> f64 {
        let n = values.len() as f64 - if self.unbiased { 1.0 } else { 0.0 };
        if n <= 0.0 || are_equal(values) {
            return 0.0;
        }
        let mean = mean(values);
        (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n).sqrt()
    }

    fn divisor(&self, deviation: f64) -> f64 {
        match self.floor {
            Floor::Added(least) => deviation + least,
            Floor::AtLeast(least) => deviation.max(least),
        }
    }
}

/// `(score - mean of its group) / spread`. Scores with equal `groups` form a group.
pub fn normalized<G: Ord>(scores: &[Option<f64>], groups: &[G], how: Normalization) -> Vec<f64> {
    let members = members(scores, groups);
    let of = |positions: &[usize]| positions.iter().filter_map(|i| scores[*i]).collect::<Vec<f64>>();
    let divisor = match how.spread {
        Spread::None => Some(1.0),
        Spread::Step => Some(how.divisor(how.deviation(&scores.iter().flatten().copied().collect::<Vec<_>>()))),
        Spread::LargestGroup => {
            Some(how.divisor(members.iter().map(|group| how.deviation(&of(group))).fold(0.0, f64::max)))
        }
        Spread::Group => None,
    };
    let mut advantages = vec![0.0; scores.len()];
    for group in members {
        let own = of(&group);
        if own.len() < 2 || are_equal(&own) {
            continue;
        }
        let (mean, divisor) = (mean(&own), divisor.unwrap_or_else(|| how.divisor(how.deviation(&own))));
        group.iter().zip(own).for_each(|(i, score)| advantages[*i] = (score - mean) / divisor);
    }
    advantages
}

/// Several rewards, normalised apart by their own `spread`, then added by `weights`, centred and scaled over the step:
/// rewards of different scales cannot drown one another. With [`Spread::Group`] this is GDPO (arXiv:2601.05242).
/// `rewards` holds the scores of each reward.
pub fn normalized_apart<G: Ord>(
    rewards: &[Vec<Option<f64>>],
    weights: &[f64],
    groups: &[G],
    spread: Spread,
) -> Vec<f64> {
    const LEAST: Floor = Floor::AtLeast(1e-6);
    let how = Normalization { spread, unbiased: false, floor: LEAST };
    let mut sums = vec![0.0; groups.len()];
    let mut informative = vec![false; groups.len()];
    for (scores, weight) in rewards.iter().zip(weights) {
        let own = normalized(scores, groups, how);
        sums.iter_mut().zip(own).for_each(|(sum, advantage)| *sum += weight * advantage);
        for group in members(scores, groups) {
            let values: Vec<f64> = group.iter().filter_map(|i| scores[*i]).collect();
            if !are_equal(&values) {
                group.iter().for_each(|i| informative[*i] = true);
            }
        }
    }
    // Videos that lack a score of any reward take no part.
    let scored = |i: usize| rewards.iter().all(|scores| scores[i].is_some());
    let present: Vec<f64> = (0..sums.len()).filter(|i| scored(*i)).map(|i| sums[i]).collect();
    if present.len() < 2 || are_equal(&present) {
        return vec![0.0; sums.len()];
    }
    let (centre, divisor) = (mean(&present), how.divisor(how.deviation(&present)));
    // The centre is rarely exactly 0: subtracted from a group of equal scores, it would make advantages of rounding.
    let counts = |i: usize| scored(i) && informative[i];
    sums.iter().enumerate().map(|(i, sum)| if counts(i) { (sum - centre) / divisor } else { 0.0 }).collect()
}

/// Positions of the highest ceil(n / 2) scores, then of the lowest floor(n / 2), each part ascending. All scores if
/// there are at most n.
pub fn best_and_worst(scores: &[Option<f64>], n: usize) -> Vec<usize> {
    let mut ascending: Vec<(usize, f64)> = scores.iter().enumerate().filter_map(|(i, s)| Some((i, (*s)?))).collect();
    ascending.sort_by(|a, b| a.1.total_cmp(&b.1));
    let ascending: Vec<usize> = ascending.into_iter().map(|(i, _)| i).collect();
    if ascending.len() <= n {
        return ascending;
    }
    let best = ascending.len() - n.div_ceil(2);
    [&ascending[best..], &ascending[..n / 2]].concat()
}

/// Statistics of the groups of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GroupStatistics {
    /// Groups with a score.
    pub groups: usize,
    /// Number of groups without advantages: fewer than two scores, or equal scores.
    pub uninformative: usize,
    /// Mean over groups of the scores' population deviation.
    pub deviation: f64,
}

impl GroupStatistics {
    /// The statistics of `scores`; equal `groups` share a prompt.
    pub fn of<G: Ord>(scores: &[Option<f64>], groups: &[G]) -> Self {
        let how = Normalization::new(Spread::Group);
        let members = members(scores, groups);
        let deviations: Vec<f64> = members
            .iter()
            .map(|group| how.deviation(&group.iter().filter_map(|i| scores[*i]).collect::<Vec<_>>()))
            .collect();
        Self {
            groups: members.len(),
            uninformative: deviations.iter().filter(|deviation| **deviation == 0.0).count(),
            deviation: if deviations.is_empty() { 0.0 } else { mean(&deviations) },
        }
    }
}

/// Positions of the scores that are there, by group.
fn members<G: Ord>(scores: &[Option<f64>], groups: &[G]) -> Vec<Vec<usize>> {
    let mut members: BTreeMap<&G, Vec<usize>> = BTreeMap::new();
    for (i, (score, group)) in scores.iter().zip(groups).enumerate() {
        if score.is_some() {
            members.entry(group).or_default().push(i);
        }
    }
    members.into_values().collect()
}

/// Whether all values are equal. Their computed deviation need not be 0, because sums are rounded.
fn are_equal(values: &[f64]) -> bool {
    values.windows(2).all(|pair| pair[0] == pair[1])
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUPS: [&str; 6] = ["a", "a", "a", "b", "b", "c"];

    #[test]
    fn equal_scores_and_a_score_alone_have_no_advantage() {
        let scores = [0.1, 0.2, 0.3, 0.7, 0.7, 5.0].map(Some);
        for spread in [Spread::Group, Spread::Step, Spread::LargestGroup, Spread::None] {
            let found = normalized(&scores, &GROUPS, Normalization::new(spread));
            assert!(found[0] < 0.0 && found[2] > 0.0 && found[3..] == [0.0; 3], "{spread:?} {found:?}");
        }
        let equal = [Some(1.0 / 3.0); 6];
        assert_eq!(normalized(&equal, &GROUPS, Normalization::new(Spread::Group)), [0.0; 6]);
        assert_eq!(normalized_apart(&[equal.to_vec()], &[1.0], &GROUPS, Spread::Group), [0.0; 6]);
    }

    #[test]
    fn groups_of_equal_scores_in_every_reward_have_no_advantage_after_centring() {
        let first = [0.1, 0.25, 0.33, 0.7, 0.7, 0.7].map(Some);
        let second = [0.9, 0.15, 0.2, 0.3, 0.3, 0.3].map(Some);
        let groups = ["a", "a", "a", "b", "b", "b"];
        for spread in [Spread::Group, Spread::Step, Spread::LargestGroup, Spread::None] {
            let found = normalized_apart(&[first.to_vec(), second.to_vec()], &[0.3, 0.7], &groups, spread);
            assert!(found[..3].iter().all(|a| *a != 0.0) && found[3..] == [0.0; 3], "{spread:?} {found:?}");
        }
    }

    #[test]
    fn the_spread_applies_to_each_of_several_rewards() {
        let first = [0.1, 0.25, 0.33, 0.7, 5.0, 0.7].map(Some);
        let second = [0.9, 0.15, 0.2, 0.3, 0.3, 0.4].map(Some);
        let apart = |spread| normalized_apart(&[first.to_vec(), second.to_vec()], &[1.0, 1.0], &GROUPS, spread);
        let all = [Spread::Group, Spread::Step, Spread::LargestGroup, Spread::None].map(apart);
        for (i, one) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|other| other != one), "{all:?}");
        }
    }

    #[test]
    fn a_missing_score_is_in_no_statistic() {
        let how = Normalization::new(Spread::Step);
        let whole = [0.1, 0.2, 0.3, 0.5, 0.7, 5.0].map(Some);
        let without = [Some(0.1), None, Some(0.3), Some(0.5), Some(0.7), Some(5.0)];
        let (left, groups) = ([0.1, 0.3, 0.5, 0.7, 5.0].map(Some), ["a", "a", "b", "b", "c"]);
        let found = normalized(&without, &GROUPS, how);
        let expected = normalized(&left, &groups, how);
        assert_eq!((found[0], found[1], &found[2..]), (expected[0], 0.0, &expected[1..]));
        assert_ne!(found[0], normalized(&whole, &GROUPS, how)[0]);
        let apart = normalized_apart(&[whole.to_vec(), without.to_vec()], &[1.0, 1.0], &GROUPS, Spread::Group);
        assert!(apart[1] == 0.0 && apart[5] == 0.0 && apart.iter().sum::<f64>().abs() < 1e-12);
        let statistics = GroupStatistics::of(&without, &GROUPS);
        assert_eq!((statistics.groups, statistics.uninformative), (3, 1));
    }

    #[test]
    fn rewards_normalised_apart_are_independent_of_scale() {
        let (small, large) = ([0.001, 0.002, 0.003, 0.0, 0.0, 0.0], [300.0, 200.0, 100.0, 0.0, 0.0, 0.0]);
        let rewards = [small.map(Some).to_vec(), large.map(Some).to_vec()];
        for spread in [Spread::Group, Spread::Step, Spread::LargestGroup] {
            let apart = |weights: [f64; 2]| normalized_apart(&rewards, &weights, &GROUPS, spread);
            assert!(apart([1.0, 1.0]).iter().all(|a| a.abs() < 1e-9), "{spread:?}");
            assert!(apart([2.0, 1.0])[2] > 1.0, "{spread:?}");
        }
    }

    #[test]
    fn the_best_and_the_worst_are_those_that_have_scores() {
        let scores = [Some(3.0), None, Some(1.0), Some(2.0), Some(5.0)];
        assert_eq!(best_and_worst(&scores, 3), [0, 4, 2]);
        assert_eq!(best_and_worst(&scores, 2), [4, 2]);
        assert_eq!(best_and_worst(&scores, 9), [2, 3, 0, 4]);
    }
}
