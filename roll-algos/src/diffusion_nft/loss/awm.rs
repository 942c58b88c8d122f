//! The loss of Advantage Weighted Matching (arXiv:2509.25050): the loss of flow matching takes the place of minus the
//! log-probability in a clipped policy loss.

use serde::{Deserialize, Serialize};

use super::{Noised, Valued};
use crate::policy_gradient::clip::{ClipRange, PolicyTerm, clipped};

/// The proxy of the log-probability, m being the loss of flow matching at the noise level t.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Matching {
    /// `-m`.
    Uniform,
    /// `-t m`.
    T,
    /// `-t^2 m`.
    TSquared,
    /// `-t (sqrt(m + 1e-10) - 1e-5)`.
    Huber,
    /// `-(t / p) ((m + 1e-10)^p - 1e-10^p)` with p = 1/4.
    #[default]
    Ghuber,
}

/// Below this the roots are smooth.
const SMOOTH: f64 = 1e-10;
/// The power of [`Matching::Ghuber`].
pub const GHUBER_POWER: f64 = 0.25;

impl Matching {
    /// The log-probability and its slope in m. `power` is that of [`Matching::Ghuber`].
    pub fn log_prob(self, m: f64, t: f64, power: f64) -> [f64; 2] {
        match self {
            Self::Uniform => [-m, -1.0],
            Self::T => [-t * m, -t],
            Self::TSquared => [-t * t * m, -t * t],
            Self::Huber => {
                let root = (m + SMOOTH).sqrt();
                [-t * (root - SMOOTH.sqrt()), -t / (2.0 * root)]
            }
            Self::Ghuber => {
                let raised = (m + SMOOTH).powf(power);
                [-(t / power) * (raised - SMOOTH.powf(power)), -t * raised / (m + SMOOTH)]
            }
        }
    }
}

/// One sample at several noise levels.
#[derive(Clone, Debug, PartialEq)]
pub struct AwmTerms {
    /// Log-probabilities at the levels under the policy in training, and under the old one.
    pub log_probs: Vec<[f64; 2]>,
    /// The policy losses: one for each level, or one of all levels.
    pub terms: Vec<PolicyTerm>,
    /// Gradients in the velocities of the mean of `terms`.
    pub gradients: Vec<Vec<f64>>,
}

/// Whether each noise level has a ratio of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ratio {
    /// One for each level.
    #[default]
    Level,
    /// One for all levels of a sample, of the mean of their log-probabilities.
    Sample,
}

/// The clipped loss of a sample at its noise levels.
pub fn at(
    matching: Matching,
    power: f64,
    advantage: f64,
    range: ClipRange,
    ratio: Ratio,
    levels: &[Noised<'_>],
) -> AwmTerms {
    let n = levels.len() as f64;
    let of = |at: &Noised<'_>, velocity: &[f32]| matching.log_prob(at.matching(velocity), at.t, power);
    let found: Vec<[[f64; 2]; 2]> = levels.iter().map(|at| [of(at, at.velocity), of(at, at.old)]).collect();
    let difference = |[[new, _], [old, _]]: &[[f64; 2]; 2]| new - old;
    let terms: Vec<PolicyTerm> = match ratio {
        Ratio::Level => found.iter().map(|one| clipped(difference(one), advantage, range)).collect(),
        Ratio::Sample => {
            vec![clipped(found.iter().map(difference).sum::<f64>() / n, advantage, range)]
        }
    };
    let gradients = levels.iter().zip(&found).enumerate().map(|(i, (at, [[_, slope], _]))| {
        let term = terms.get(i).unwrap_or(&terms[0]);
        at.matching_gradient(term.d_log_prob * slope / n)
    });
    let gradients = gradients.collect();
    AwmTerms { log_probs: found.iter().map(|[[new, _], [old, _]]| [*new, *old]).collect(), terms, gradients }
}

/// The loss of one level, with a ratio of its own.
pub fn at_level(matching: Matching, advantage: f64, range: ClipRange, at: &Noised<'_>) -> (PolicyTerm, Valued) {
    let mut found = self::at(matching, GHUBER_POWER, advantage, range, Ratio::Level, &[*at]);
    let (term, gradient) = (found.terms[0], found.gradients.remove(0));
    (term, Valued { value: term.loss, gradient })
}
