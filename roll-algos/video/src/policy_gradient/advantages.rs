//! Advantages: how much better a video is than other videos of its prompt.
//!
//! A missing score is left out of every statistic and gets the advantage 0. All scores of a group get the advantage 0
//! if the group has fewer than two scores or only equal scores.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The divisor of a score's difference from the mean of its group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Spread {
    /// The standard deviation of the group's scores. Every prompt then has the same weight, even if its scores differ
    /// little.
    Group,
    /// The standard deviation of all scores of the step, over all ranks. Groups of nearly equal scores then keep small
    /// advantages, because their differences may be noise.
    #[default]
    Step,
    /// The largest of the standard deviations of the step's groups.
    LargestGroup,
    /// No division.
    None,
}

/// How a standard deviation is kept from being a divisor near 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Floor {
    /// This number is added to the deviation.
    Added(f64),
    /// A deviation below this number is replaced by it.
    AtLeast(f64),
}

/// How differences from the group's mean are brought to one scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normalization {
    /// The standard deviation that divides the differences.
    pub spread: Spread,
    /// Whether variances are divided by n - 1 in place of n.
    pub unbiased: bool,
    /// How the divisor is kept away from 0.
    pub floor: Floor,
}

impl Normalization {
    /// The normalization of Flow-GRPO and DiffusionNFT: the divisor is the population deviation plus 1e-4.
    pub fn new(spread: Spread) -> Self {
        Self { spread, unbiased: false, floor: Floor::Added(1e-4) }
    }

    /// The standard deviation; 0 for equal values.
    fn deviation(&self, values: &[f64]) -> f64 {
        let n = values.len() as f64 - if self.unbiased { 1.0 } else { 0.0 };
        if n <= 0.0 || are_equal(values) {
            return 0.0;
        }
        let mean = mean_of(values);
        (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n).sqrt()
    }

    /// The divisor for a standard deviation.
    fn divisor(&self, deviation: f64) -> f64 {
        match self.floor {
            Floor::Added(number) => deviation + number,
            Floor::AtLeast(least) => deviation.max(least),
        }
    }
}

/// The advantages of `scores`: `(score - mean of its group) / divisor`. `groups` names the group of each score.
pub fn normalized<G: Ord>(scores: &[Option<f64>], groups: &[G], how: Normalization) -> Vec<f64> {
    let groups = members(scores, groups);
    let scores_of = |group: &[usize]| group.iter().filter_map(|i| scores[*i]).collect::<Vec<f64>>();
    // The divisor of all groups; `None` if each group has its own.
    let common_divisor = match how.spread {
        Spread::None => Some(1.0),
        Spread::Step => {
            let all_scores: Vec<f64> = scores.iter().flatten().copied().collect();
            Some(how.divisor(how.deviation(&all_scores)))
        }
        Spread::LargestGroup => {
            let largest = groups.iter().map(|group| how.deviation(&scores_of(group))).fold(0.0, f64::max);
            Some(how.divisor(largest))
        }
        Spread::Group => None,
    };
    let mut advantages = vec![0.0; scores.len()];
    for group in groups {
        let group_scores = scores_of(&group);
        if group_scores.len() < 2 || are_equal(&group_scores) {
            continue;
        }
        let mean = mean_of(&group_scores);
        let divisor = common_divisor.unwrap_or_else(|| how.divisor(how.deviation(&group_scores)));
        group.iter().zip(group_scores).for_each(|(i, score)| advantages[*i] = (score - mean) / divisor);
    }
    advantages
}

/// The advantages of several rewards. Each reward is normalised apart, by its own `spread`. The results are added by
/// `weights`, then centred and scaled over the step. So a reward with a large scale cannot drown other rewards. With
/// [`Spread::Group`] this is GDPO (arXiv:2601.05242). `rewards` holds the scores of each reward.
pub fn normalized_apart<G: Ord>(
    rewards: &[Vec<Option<f64>>],
    weights: &[f64],
    groups: &[G],
    spread: Spread,
) -> Vec<f64> {
    const FLOOR: Floor = Floor::AtLeast(1e-6);
    let how = Normalization { spread, unbiased: false, floor: FLOOR };
    let mut sums = vec![0.0; groups.len()];
    let mut is_in_informative_group = vec![false; groups.len()];
    for (scores, weight) in rewards.iter().zip(weights) {
        let advantages = normalized(scores, groups, how);
        sums.iter_mut().zip(advantages).for_each(|(sum, advantage)| *sum += weight * advantage);
        for group in members(scores, groups) {
            let values: Vec<f64> = group.iter().filter_map(|i| scores[*i]).collect();
            if !are_equal(&values) {
                group.iter().for_each(|i| is_in_informative_group[*i] = true);
            }
        }
    }
    // Videos without a score of one of the rewards take no part.
    let has_all_scores = |i: usize| rewards.iter().all(|scores| scores[i].is_some());
    let complete_sums: Vec<f64> = (0..sums.len()).filter(|i| has_all_scores(*i)).map(|i| sums[i]).collect();
    if complete_sums.len() < 2 || are_equal(&complete_sums) {
        return vec![0.0; sums.len()];
    }
    let (centre, divisor) = (mean_of(&complete_sums), how.divisor(how.deviation(&complete_sums)));
    // The centre is rarely exactly 0. Subtracted from a group of equal scores, it would turn rounding into advantages.
    let has_advantage = |i: usize| has_all_scores(i) && is_in_informative_group[i];
    sums.iter().enumerate().map(|(i, sum)| if has_advantage(i) { (sum - centre) / divisor } else { 0.0 }).collect()
}

/// Positions of the highest ceil(n / 2) scores, then of the lowest floor(n / 2) scores, each part ascending. If there
/// are at most n scores, the positions of all of them.
pub fn best_and_worst(scores: &[Option<f64>], n: usize) -> Vec<usize> {
    let mut ascending: Vec<(usize, f64)> = scores.iter().enumerate().filter_map(|(i, s)| Some((i, (*s)?))).collect();
    ascending.sort_by(|a, b| a.1.total_cmp(&b.1));
    let ascending: Vec<usize> = ascending.into_iter().map(|(i, _)| i).collect();
    if ascending.len() <= n {
        return ascending;
    }
    let first_of_best = ascending.len() - n.div_ceil(2);
    [&ascending[first_of_best..], &ascending[..n / 2]].concat()
}

/// Statistics of the groups of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GroupStatistics {
    /// Number of groups with a score.
    pub groups: usize,
    /// Number of groups without advantages: fewer than two scores, or equal scores.
    pub uninformative: usize,
    /// The population deviation of the scores of a group, as a mean over the groups.
    pub deviation: f64,
}

impl GroupStatistics {
    /// The statistics of `scores`. `groups` names the group of each score.
    pub fn of<G: Ord>(scores: &[Option<f64>], groups: &[G]) -> Self {
        let how = Normalization::new(Spread::Group);
        let groups = members(scores, groups);
        let mut deviations = Vec::new();
        for group in &groups {
            let group_scores: Vec<f64> = group.iter().filter_map(|i| scores[*i]).collect();
            deviations.push(how.deviation(&group_scores));
        }
        Self {
            groups: groups.len(),
            uninformative: deviations.iter().filter(|deviation| **deviation == 0.0).count(),
            deviation: if deviations.is_empty() { 0.0 } else { mean_of(&deviations) },
        }
    }
}

/// The groups: for each, the positions of its scores that are not missing.
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

fn mean_of(values: &[f64]) -> f64 {
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
