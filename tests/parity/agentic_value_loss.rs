//! The loss of a critic's values, with and without clipping.

use std::collections::BTreeMap;

use roll_agents::agentic_ppo::critic::value_loss;
use roll_agents::agentic_ppo::{Grid, Mask, Totals};
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};

/// Relative error of numbers in f64; the reference adds 1e-8 to the counts that it divides by.
const ERROR: f64 = 2e-8;
/// Error of gradients, which are differences of the reference's loss.
const DIFFERENCE_ERROR: f64 = 1e-7;

#[derive(Deserialize)]
struct Config {
    shape: [usize; 2],
    response_mask: Vec<u8>,
    cases: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    value_clip: Option<f64>,
    values: Vec<f64>,
    old_values: Vec<f64>,
    returns: Vec<f64>,
    loss: f64,
    grad_by_differences: Vec<f64>,
    metrics: BTreeMap<String, f64>,
}

pub fn run(case: &Case) -> Outcome<Report> {
    let config: Config = case.config()?;
    let columns = config.shape[1];
    let mask = Mask::new(columns, config.response_mask.iter().map(|m| *m != 0).collect())?;
    let mut report = Report::default();
    for entry in config.cases {
        let grid = |values: &[f64]| Grid::new(columns, values.to_vec());
        let (values, old, returns) = (grid(&entry.values)?, grid(&entry.old_values)?, grid(&entry.returns)?);
        let found = value_loss(&values, &old, &returns, &mask, entry.value_clip, Totals::of_rows(&mask));
        let clip = entry.value_clip;
        let mut see = |what: &str, found: f64, expected: f64| {
            let close = (found - expected).abs() <= ERROR * expected.abs().max(1.0);
            report.check(close, || format!("clip {clip:?}: {what} is {found}, expected {expected}"));
        };
        see("the loss", found.value, entry.loss);
        see("critic/error", found.error, entry.metrics["critic/error"]);
        // Without a clip the reference reports the error under this name.
        if clip.is_some() {
            see("critic/clipfrac", found.clip_fraction, entry.metrics["critic/clipfrac"]);
        }
        for (i, (found, expected)) in found.d_values.values().iter().zip(&entry.grad_by_differences).enumerate() {
            let close = (found - expected).abs() <= DIFFERENCE_ERROR;
            report.check(close, || format!("clip {clip:?}: gradient {i} is {found}, expected {expected}"));
        }
    }
    Ok(report)
}
