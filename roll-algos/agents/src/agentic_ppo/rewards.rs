//! From scores of episodes and turns to rewards of tokens.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

use super::grid::{Grid, Mask};
use super::kl::{KlController, KlEstimate};
use super::statistics::{clip_fraction, plain_mean, plain_std, row_means};

/// Added to standard deviations that rewards are divided by. A group with a smaller deviation counts as constant.
const STD_FLOOR: f64 = 1e-6;

/// The rewards over which a mean or standard deviation is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StatisticScope {
    /// All rewards of the batch.
    Batch,
    /// The rewards of the same group.
    Group,
}

/// Groups in which rewards are normalised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Grouping {
    /// One group of all rewards.
    #[default]
    Batch,
    /// Episodes with the same start.
    TrajGroupId,
    /// Episodes of the same world (`algo.tags`).
    Tags,
}

/// What is normalised, in the reference's older form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NormalizationMethod {
    /// Nothing.
    #[default]
    Identity,
    /// The mean is subtracted.
    Mean,
    /// The mean is subtracted, and the result divided by the standard deviation.
    // The reference documents another name, which its code treats alike.
    #[serde(alias = "asym_clip")]
    MeanStd,
}

/// Options of reward normalisation. `norm_mean_type` and `norm_std_type` decide; if one of them is absent, `method`
/// decides in its place.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RewardNormalization {
    /// Groups in which rewards are normalised.
    pub grouping: Grouping,
    /// What is normalised, if `norm_mean_type` or `norm_std_type` is absent.
    pub method: NormalizationMethod,
    /// The rewards whose mean is subtracted; `null`: by `method`.
    pub norm_mean_type: Option<StatisticScope>,
    /// The rewards whose standard deviation is the divisor; `null`: by `method`.
    pub norm_std_type: Option<StatisticScope>,
}

impl RewardNormalization {
    /// The normalisation that these options mean together.
    pub fn resolved(&self) -> Normalize {
        let scope = if self.grouping == Grouping::Batch { StatisticScope::Batch } else { StatisticScope::Group };
        let by_method = Normalize::by_method(self.method, scope);
        Normalize { mean: self.norm_mean_type.or(by_method.mean), std: self.norm_std_type.or(by_method.std) }
    }
}

/// A normalisation of rewards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Normalize {
    /// The rewards whose mean is subtracted; `None`: no mean is.
    pub mean: Option<StatisticScope>,
    /// The rewards whose standard deviation is the divisor; `None`: there is no divisor.
    pub std: Option<StatisticScope>,
}

impl Normalize {
    /// Returns the normalization that `method` names, with statistics over `scope`.
    pub fn by_method(method: NormalizationMethod, scope: StatisticScope) -> Self {
        match method {
            NormalizationMethod::Identity => Self::default(),
            NormalizationMethod::Mean => Self { mean: Some(scope), std: None },
            NormalizationMethod::MeanStd => Self { mean: Some(scope), std: Some(scope) },
        }
    }
}

/// The groups of positions with equal keys, in the order in which the keys first occur.
pub(super) fn groups<K: Eq + Hash>(keys: impl Iterator<Item = K>) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut group_of: HashMap<K, usize> = HashMap::new();
    for (i, key) in keys.enumerate() {
        let group = *group_of.entry(key).or_insert(groups.len());
        match groups.get_mut(group) {
            Some(indices) => indices.push(i),
            None => groups.push(vec![i]),
        }
    }
    groups
}

/// Rewards normalised by `how` in groups of equal `keys`. If a standard deviation is the divisor, the rewards of a
/// group of one become 0, as do all rewards if the deviation is close to 0.
pub fn normalize_grouped<K: Eq + Hash>(rewards: &[f64], keys: &[K], how: Normalize) -> Vec<f64> {
    let mut normalized = vec![0.0; rewards.len()];
    for group in groups(keys.iter()) {
        let members: Vec<f64> = group.iter().map(|i| rewards[*i]).collect();
        let rewards_of = |scope| match scope {
            StatisticScope::Batch => rewards,
            StatisticScope::Group => &members,
        };
        let mean = how.mean.map_or(0.0, |scope| plain_mean(rewards_of(scope)));
        let std = how.std.map(|scope| plain_std(rewards_of(scope)));
        for i in group {
            normalized[i] = match std {
                Some(std) if members.len() < 2 || std <= STD_FLOOR => 0.0,
                Some(std) => (rewards[i] - mean) / (std + STD_FLOOR),
                None => rewards[i] - mean,
            };
        }
    }
    normalized
}

/// Clamps rewards to [-bound, bound] and returns the fraction of them that changed.
pub fn clip(rewards: &mut [f64], bound: f64) -> f64 {
    let fraction = clip_fraction(rewards, bound);
    rewards.iter_mut().for_each(|r| *r = r.clamp(-bound, bound));
    fraction
}

/// Discounted return of each turn within its episode. Per sample, `scores` has the reward of its turn, `trajectories`
/// the key of its episode, and `steps` the number of its turn.
pub fn step_returns<K: Eq + Hash>(scores: &[f64], trajectories: &[K], steps: &[usize], gamma: f64) -> Vec<f64> {
    let mut returns = vec![0.0; scores.len()];
    for mut episode in groups(trajectories.iter()) {
        episode.sort_by_key(|i| std::cmp::Reverse(steps[*i]));
        let mut sum = 0.0;
        for i in episode {
            sum = scores[i] + gamma * sum;
            returns[i] = sum;
        }
    }
    returns
}

/// GiGPO's rewards of turns: `episode_weight * episode + step_weight * step`.
///
/// `episode` are `episode_scores`, normalised by all options of `normalization` in groups of equal `episode_keys`.
/// `step` are `step_returns`, normalised by the option `method` alone in groups of equal `state_keys`.
pub fn gigpo_rewards<E: Eq + Hash, S: Eq + Hash>(
    (episode_scores, episode_keys): (&[f64], &[E]),
    (step_returns, state_keys): (&[f64], &[S]),
    normalization: &RewardNormalization,
    [episode_weight, step_weight]: [f64; 2],
) -> Vec<f64> {
    let episode = normalize_grouped(episode_scores, episode_keys, normalization.resolved());
    let step =
        normalize_grouped(step_returns, state_keys, Normalize::by_method(normalization.method, StatisticScope::Group));
    episode.iter().zip(&step).map(|(e, s)| episode_weight * e + step_weight * s).collect()
}

/// A grid of predictions, with one column less than `attention`, that has each row's reward at the prediction of its
/// last token. A row without tokens has no reward.
pub fn at_last_token(rewards: &[f64], attention: &Mask) -> Grid {
    let mut grid = Grid::filled(attention.rows(), attention.columns().saturating_sub(1), 0.0);
    for (b, reward) in rewards.iter().enumerate().take(attention.rows()) {
        // Token t is predicted in column t - 1; token 0 is not predicted.
        if let Some(last @ 1..) = attention.row(b).iter().rposition(|kept| *kept) {
            grid.row_mut(b)[last - 1] = *reward;
        }
    }
    grid
}

/// Result of [`with_kl`].
#[derive(Clone, Debug)]
pub struct TokenRewards {
    /// Rewards of tokens, `[B, T]`.
    pub rewards: Grid,
    /// The metrics `critic/kl`, `critic/kl_coef` and, with a clip, `critic/token_reward_clip_frac`.
    pub metrics: BTreeMap<String, f64>,
}

/// Subtracts the KL to the reference policy, times the controller's coefficient, from the reward of each response
/// token, and clips the result to +-`clip`. Updates the controller with the KL, averaged over the tokens of each row
/// and then over rows.
pub fn with_kl(
    rewards: &Grid,
    (log_probs, ref_log_probs): (&Grid, &Grid),
    mask: &Mask,
    estimate: KlEstimate,
    clip: Option<f64>,
    controller: &mut KlController,
) -> TokenRewards {
    let kl = estimate.of(log_probs, ref_log_probs).masked(mask);
    let coefficient = controller.value();
    let mut rewards = rewards.zip(&kl, |r, kl| r - coefficient * kl);
    // As in the reference implementation, samples without a token that is trained on count as 0.
    let current = plain_mean(&row_means(&kl, mask));
    controller.update(current, mask.rows());
    let mut metrics = BTreeMap::from([("critic/kl".into(), current), ("critic/kl_coef".into(), coefficient)]);
    if let Some(bound) = clip {
        metrics.insert("critic/token_reward_clip_frac".into(), clip_fraction(rewards.values(), bound));
        rewards = rewards.map(|r| r.clamp(-bound, bound));
    }
    TokenRewards { rewards, metrics }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_group_of_one_and_a_constant_group_have_no_normalised_reward() {
        let both = Normalize { mean: Some(StatisticScope::Group), std: Some(StatisticScope::Group) };
        assert_eq!(normalize_grouped(&[1.0, 3.0, 5.0, 5.0], &["a", "b", "c", "c"], both), [0.0; 4]);
        assert!(normalize_grouped(&[], &[0u8; 0], both).is_empty());
    }

    #[test]
    fn reward_is_placed_at_the_last_attended_token() {
        let attention = Mask::new(4, vec![true, true, true, false, false, false, false, false]).unwrap();
        assert_eq!(at_last_token(&[2.0, 7.0], &attention).values(), [0.0, 2.0, 0.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn explicit_statistics_win_over_the_method() {
        let explicit = RewardNormalization {
            grouping: Grouping::TrajGroupId,
            method: NormalizationMethod::Mean,
            norm_mean_type: Some(StatisticScope::Batch),
            norm_std_type: None,
        };
        assert_eq!(explicit.resolved(), Normalize { mean: Some(StatisticScope::Batch), std: None });
    }
}
