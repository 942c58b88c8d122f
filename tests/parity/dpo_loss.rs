//! The loss of preferences, its gradient, and rewards, by the formulas of TRL.

use std::collections::BTreeMap;

use roll_agents::dpo::DpoConfig;
use roll_agents::dpo::loss::{Answer, PairLoss, pair_loss};
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};

/// Relative error of numbers in f64.
const ERROR: f64 = 1e-12;

#[derive(Deserialize)]
struct Config {
    pairs: usize,
    /// Log-probabilities of tokens: chosen and rejected answers, pairs, tokens.
    policy: [Vec<Vec<f64>>; 2],
    reference: [Vec<Vec<f64>>; 2],
    cases: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    options: DpoConfig,
    losses: Vec<f64>,
    gradient: [Vec<f64>; 2],
    metrics: BTreeMap<String, f64>,
}

pub fn run(case: &Case) -> Outcome<Report> {
    let config: Config = case.config()?;
    let mut report = Report::default();
    for entry in &config.cases {
        let options = &entry.options;
        let mut see = |what: &str, found: f64, expected: f64| {
            let close = (found - expected).abs() <= ERROR * expected.abs().max(1.0);
            report.check(close, || format!("{options:?}: {what} is {found}, expected {expected}"));
        };
        let answer = |side: usize, pair: usize| {
            let tokens = &config.policy[side][pair];
            let reference: f64 = config.reference[side][pair].iter().sum();
            let reference = if options.reference_free { 0.0 } else { reference };
            Answer { log_prob: tokens.iter().sum(), reference, tokens: tokens.len() }
        };
        let losses: Vec<PairLoss> =
            (0..config.pairs).map(|pair| pair_loss(options, [answer(0, pair), answer(1, pair)])).collect();
        let count = config.pairs as f64;
        for (pair, loss) in losses.iter().enumerate() {
            see("a loss", loss.value, entry.losses[pair]);
            for side in 0..2 {
                see("a derivative", loss.slopes[side] / count, entry.gradient[side][pair]);
            }
        }
        let mean = |of: &dyn Fn(&PairLoss) -> f64| losses.iter().map(of).sum::<f64>() / count;
        let is_right = |loss: &PairLoss| f64::from(u8::from(loss.rewards[0] > loss.rewards[1]));
        see("the loss", mean(&|loss| loss.value), entry.metrics["loss"]);
        see("rewards/chosen", mean(&|loss| loss.rewards[0]), entry.metrics["rewards/chosen"]);
        see("rewards/rejected", mean(&|loss| loss.rewards[1]), entry.metrics["rewards/rejected"]);
        see("rewards/margin", mean(&|loss| loss.rewards[0] - loss.rewards[1]), entry.metrics["rewards/margins"]);
        see("rewards/accuracy", mean(&is_right), entry.metrics["rewards/accuracies"]);
    }
    Ok(report)
}
