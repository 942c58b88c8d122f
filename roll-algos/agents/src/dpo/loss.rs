//! The loss of a pair of answers, and its derivatives.
//!
//! With s the log-probability of an answer under the policy minus that under the reference, divided by the number of its
//! tokens if lengths are normalised, and x = beta (s_chosen - s_rejected) - margin:
//!
//! - sigmoid (Rafailov et al. 2023; with smoothing cDPO, Mitchell 2023; without reference and with lengths normalised
//!   SimPO, Meng et al. 2024): -(1 - smoothing) log sigmoid(x) - smoothing log sigmoid(-x)
//! - IPO (Azar et al. 2023): (s_chosen - s_rejected - 1 / (2 beta))^2, of normalised lengths
//!
//! The reward of an answer is beta s.

use super::config::DpoConfig;

/// An answer's log-probability under the policy and under the reference, and its number of tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Answer {
    /// Log-probability under the policy in training.
    pub log_prob: f64,
    /// Log-probability under the reference policy; 0 without a reference.
    pub reference: f64,
    /// Number of tokens of the answer.
    pub tokens: usize,
}

/// The loss of a pair, and what it follows from. Arrays are `[chosen, rejected]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairLoss {
    /// The loss.
    pub value: f64,
    /// Derivatives of the loss in the log-probability of each answer, and so in that of each of its tokens.
    pub slopes: [f64; 2],
    /// Rewards of the answers.
    pub rewards: [f64; 2],
}

/// The loss of the pair `[chosen, rejected]`.
pub fn pair_loss(config: &DpoConfig, pair: [Answer; 2]) -> PairLoss {
    let beta = config.beta;
    // The factor between an answer's log-ratio and its score.
    let scales = pair.map(|answer| if config.normalises_lengths() { 1.0 / answer.tokens as f64 } else { 1.0 });
    let score = |side: usize| (pair[side].log_prob - pair[side].reference) * scales[side];
    let scores = [score(0), score(1)];
    let difference = scores[0] - scores[1];
    let (value, d_difference) = if config.ipo {
        let distance = difference - 0.5 / beta;
        (distance * distance, 2.0 * distance)
    } else {
        let (x, smoothing) = (beta * difference - config.margin, config.label_smoothing);
        let value = (1.0 - smoothing) * softplus(-x) + smoothing * softplus(x);
        (value, beta * (smoothing * sigmoid(x) - (1.0 - smoothing) * sigmoid(-x)))
    };
    PairLoss {
        value,
        slopes: [d_difference * scales[0], -d_difference * scales[1]],
        rewards: scores.map(|score| beta * score),
    }
}

/// log(1 + e^x), which is -log sigmoid(-x), without overflow.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(log_probs: [f64; 2]) -> [Answer; 2] {
        let answer = |log_prob, reference, tokens| Answer { log_prob, reference, tokens };
        [answer(log_probs[0], -11.0, 4), answer(log_probs[1], -7.5, 7)]
    }

    fn forms() -> Vec<DpoConfig> {
        let default = DpoConfig::default();
        vec![
            default.clone(),
            DpoConfig { label_smoothing: 0.2, beta: 0.7, ..default.clone() },
            DpoConfig { length_normalised: true, beta: 2.0, margin: 1.0, ..default.clone() },
            DpoConfig { ipo: true, beta: 0.3, ..default },
        ]
    }

    #[test]
    fn slopes_match_finite_differences() {
        for config in forms() {
            for at in [[-9.0, -8.0], [-30.0, -2.0], [-1.0, -60.0]] {
                let loss = pair_loss(&config, pair(at));
                for side in 0..2 {
                    let moved = |by: f64| {
                        let mut moved = at;
                        moved[side] += by;
                        pair_loss(&config, pair(moved)).value
                    };
                    let quotient = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                    assert!((quotient - loss.slopes[side]).abs() < 1e-7, "{config:?} at {at:?}: {quotient} {loss:?}");
                }
            }
        }
    }

    #[test]
    fn huge_differences_have_finite_losses() {
        let config = DpoConfig { beta: 10.0, ..DpoConfig::default() };
        let loss = |log_probs| pair_loss(&config, pair(log_probs));
        let (wrong, right) = (loss([-5000.0, 0.0]), loss([0.0, -5000.0]));
        assert!((wrong.value - 10.0 * 4996.5).abs() < 1e-6 && wrong.slopes == [-10.0, 10.0], "{wrong:?}");
        assert!(right.value == 0.0 && right.slopes.map(f64::abs) == [0.0, 0.0], "{right:?}");
    }

    #[test]
    fn a_policy_that_is_the_reference_has_the_loss_of_a_coin() {
        let loss = pair_loss(&DpoConfig::default(), pair([-11.0, -7.5]));
        assert!((loss.value - 2f64.ln()).abs() < 1e-15 && loss.rewards == [0.0, 0.0], "{loss:?}");
        assert_eq!(loss.slopes, [-0.05, 0.05]);
    }
}
