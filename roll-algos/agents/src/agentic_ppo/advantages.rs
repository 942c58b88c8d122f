//! Advantages and returns of response tokens.

use super::config::{AgenticPpoConfig, Estimator};
use super::grid::{Grid, Mask};
use super::statistics::{clip_fraction, masked_whiten};

/// Result of [`estimate`].
#[derive(Clone, Debug)]
pub struct Advantages {
    /// Advantages; 0 outside the response.
    pub advantages: Grid,
    /// Returns, of which whitening and clipping of advantages change nothing.
    pub returns: Grid,
    /// Fraction of all advantages that the clip changed; `None` without a clip.
    pub clip_fraction: Option<f64>,
}

/// Computes the advantages of the response tokens `mask` from the rewards of tokens and, for [`Estimator::Gae`], the
/// critic's `values` (zeros if absent). `steps` are the tokens over which `gamma` discounts: the response tokens, or
/// all tokens as in ROLL.
pub fn estimate(
    rewards: &Grid,
    values: Option<&Grid>,
    mask: &Mask,
    steps: &Mask,
    config: &AgenticPpoConfig,
) -> Advantages {
    // Without response tokens there are no statistics to whiten by.
    let has_response = mask.count() > 0;
    let mut rewards = rewards.clone();
    if config.whiten_rewards && has_response {
        rewards = masked_whiten(&rewards, mask);
    }
    let rewards = rewards.masked(mask);
    let (advantages, returns) = match config.adv_estimator {
        Estimator::Gae => {
            let zeros = Grid::filled(rewards.rows(), rewards.columns(), 0.0);
            gae(&rewards, values.unwrap_or(&zeros), steps, config.gamma, config.lambd)
        }
        Estimator::AgenticReinforce => {
            let returns = segment_returns(&rewards, mask, config.gamma);
            (returns.clone(), returns)
        }
        _ => {
            let returns = discounted_returns(&rewards, steps, config.gamma);
            (returns.clone(), returns)
        }
    };
    let mut advantages = advantages;
    if config.whiten_advantages && has_response {
        advantages = masked_whiten(&advantages, mask);
    }
    advantages = advantages.masked(mask);
    let clip_fraction = config.advantage_clip.map(|bound| clip_fraction(advantages.values(), bound));
    if let Some(bound) = config.advantage_clip {
        advantages = advantages.map(|a| a.clamp(-bound, bound));
    }
    Advantages { advantages, returns, clip_fraction }
}

/// Advantages and returns (advantage + value) by generalized advantage estimation over the tokens `steps`. Both are 0
/// at other tokens.
pub fn gae(rewards: &Grid, values: &Grid, steps: &Mask, gamma: f64, lambda: f64) -> (Grid, Grid) {
    let mut advantages = Grid::filled(rewards.rows(), rewards.columns(), 0.0);
    let mut returns = advantages.clone();
    for b in 0..rewards.rows() {
        let (mut next_value, mut advantage) = (0.0, 0.0);
        for t in (0..rewards.columns()).rev().filter(|t| steps.row(b)[*t]) {
            let value = values.row(b)[t];
            let error = rewards.row(b)[t] + gamma * next_value - value;
            advantage = error + gamma * lambda * advantage;
            advantages.row_mut(b)[t] = advantage;
            returns.row_mut(b)[t] = advantage + value;
            next_value = value;
        }
    }
    (advantages, returns)
}

/// Discounted sum of the rewards from each token of `steps` on, counting tokens of `steps` only; 0 at other tokens.
pub fn discounted_returns(rewards: &Grid, steps: &Mask, gamma: f64) -> Grid {
    let mut returns = Grid::filled(rewards.rows(), rewards.columns(), 0.0);
    for b in 0..rewards.rows() {
        let mut sum = 0.0;
        for t in (0..rewards.columns()).rev().filter(|t| steps.row(b)[*t]) {
            sum = rewards.row(b)[t] + gamma * sum;
            returns.row_mut(b)[t] = sum;
        }
    }
    returns
}

/// The return of each segment, at all its tokens: the reward at its last token plus the discounted return of the next
/// segment.
pub fn segment_returns(rewards: &Grid, mask: &Mask, gamma: f64) -> Grid {
    let mut returns = Grid::filled(rewards.rows(), rewards.columns(), 0.0);
    for b in 0..rewards.rows() {
        let mut sum = 0.0;
        for segment in mask.segments(b).into_iter().rev() {
            sum = rewards.row(b)[segment.end - 1] + gamma * sum;
            returns.row_mut(b)[segment].fill(sum);
        }
    }
    returns
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn options(adv_estimator: Estimator) -> AgenticPpoConfig {
        AgenticPpoConfig { adv_estimator, gamma: 0.5, lambd: 0.9, ..AgenticPpoConfig::default() }
    }

    fn two_turns() -> (Grid, Mask) {
        let rewards = Grid::new(6, vec![0.0, 0.0, 2.0, 9.0, 0.0, 4.0]).unwrap();
        (rewards, Mask::new(6, vec![false, true, true, false, true, true]).unwrap())
    }

    #[test]
    fn observations_take_no_time() {
        let (rewards, mask) = two_turns();
        let over = |steps: &Mask| estimate(&rewards, None, &mask, steps, &options(Estimator::Reinforce)).returns;
        assert_eq!(over(&mask).row(0), [0.0, 1.5, 3.0, 0.0, 2.0, 4.0]);
        let all = Mask::new(6, vec![true; 6]).unwrap();
        assert_eq!(over(&all).row(0)[1], 0.5 * (2.0 + 0.125 * 4.0));
    }

    #[test]
    fn a_turn_has_one_return() {
        let (rewards, mask) = two_turns();
        let turns = estimate(&rewards, None, &mask, &mask, &options(Estimator::AgenticReinforce));
        assert_eq!(turns.advantages.row(0), [0.0, 4.0, 4.0, 0.0, 4.0, 4.0]);
    }

    #[test]
    fn gae_ignores_values_of_observations() {
        let (rewards, mask) = two_turns();
        let values = |observed: f64| Grid::new(6, vec![observed, 1.0, 1.0, observed, 1.0, 1.0]).unwrap();
        let gae = options(Estimator::Gae);
        let at = |observed| estimate(&rewards, Some(&values(observed)), &mask, &mask, &gae).advantages;
        assert_eq!(at(0.0), at(100.0));
        assert_eq!(at(0.0).row(0)[5], 3.0);
    }

    #[test]
    fn a_batch_without_response_or_with_one_token_is_finite() {
        let rewards = Grid::filled(2, 3, 1.0);
        for kept in [vec![false; 6], vec![false, true, false, false, false, false]] {
            let mask = Mask::new(3, kept).unwrap();
            let whiten = AgenticPpoConfig { whiten_advantages: true, whiten_rewards: true, ..options(Estimator::Grpo) };
            let found = estimate(&rewards, None, &mask, &mask, &whiten);
            assert!(found.advantages.values().iter().all(|a| a.is_finite()));
        }
    }
}
