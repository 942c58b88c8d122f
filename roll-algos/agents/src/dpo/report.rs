//! Metrics of evaluated pairs.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use roll_core::{Communicator, Result};
use roll_step::ranks::join_f64;

use super::loss::PairLoss;

/// An evaluated pair. Arrays are `[chosen, rejected]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outcome {
    pub loss: PairLoss,
    /// Log-probabilities of the answers under the policy in training.
    pub log_probs: [f64; 2],
    /// Number of tokens of both answers.
    pub tokens: usize,
}

/// The metrics of the pairs of all ranks, of which `own` are of this rank: the mean loss under the name `loss`, means of
/// rewards and log-probabilities, the fraction of pairs whose chosen answer has the larger reward (equal rewards count half), and the number
/// of tokens. `None` without pairs.
pub(super) fn metrics(loss: &str, own: &[Outcome], ranks: &dyn Communicator) -> Result<Option<BTreeMap<String, f64>>> {
    let row = |outcome: &Outcome| {
        let ([chosen, rejected], [log_p_chosen, log_p_rejected]) = (outcome.loss.rewards, outcome.log_probs);
        let is_right = match chosen.partial_cmp(&rejected) {
            Some(Ordering::Greater) => 1.0,
            Some(Ordering::Equal) => 0.5,
            _ => 0.0,
        };
        let tokens = outcome.tokens as f64;
        [outcome.loss.value, chosen, rejected, chosen - rejected, is_right, log_p_chosen, log_p_rejected, tokens]
    };
    let all = join_f64(ranks, own.iter().flat_map(row).collect())?;
    let means = [
        loss,
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margin",
        "rewards/accuracy",
        "logps/chosen",
        "logps/rejected",
    ];
    let columns = means.len() + 1;
    let sum = |column: usize| all.iter().skip(column).step_by(columns).sum::<f64>();
    let pairs = all.len() / columns;
    let mut metrics: BTreeMap<String, f64> =
        means.iter().enumerate().map(|(i, name)| (name.to_string(), sum(i) / pairs as f64)).collect();
    metrics.insert("tokens/trained".into(), sum(means.len()));
    Ok((pairs > 0).then_some(metrics))
}
