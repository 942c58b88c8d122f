//! The policy loss over a grid of configurations: value, metrics, gradient in the logits.

use std::collections::BTreeMap;

use roll_agents::agentic_ppo::{Grid, LossConfig, LossInputs, Mask, Totals, policy_loss};
use roll_core::Tensor;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::case::{Case, Outcome, Report};
use crate::logits::FromLogits;

/// Times its own f32 error that a metric may differ by, and the floor of that.
const METRIC_FACTOR: f64 = 8.0;
const METRIC_FLOOR: f64 = 1e-6;

#[derive(Deserialize)]
struct Entry {
    index: usize,
    config: serde_json::Map<String, Value>,
    metrics: BTreeMap<String, f64>,
    metrics_rel_f32_err: f64,
}

pub fn run(case: &Case) -> Outcome<Report> {
    let mut report = case.expected("outputs.safetensors")?;
    let inputs = case.tensors("inputs.safetensors")?;
    let entries: Vec<Entry> = serde_json::from_slice(&std::fs::read(case.dir.join("cases.json"))?)?;
    let grid = |name: &str| -> Outcome<Grid> { Ok(Grid::from_tensor(name, &inputs[name])?) };
    let (old, infer) = (grid("old_log_probs")?, grid("infer_logprobs")?);
    let (reference, advantages) = (grid("ref_log_probs")?, grid("advantages")?);
    let mask = Mask::from_tensor("response_mask", &inputs["response_mask"])?.of_predictions()?;
    let scores: Vec<f64> = inputs["episode_scores"].f32s()?.iter().map(|s| f64::from(*s)).collect();

    let (logits, ids) = (&inputs["logits"], inputs["input_ids"].as_slice::<i64>()?);
    let [rows, columns, vocab] = *logits.shape() else { return Err("logits are not [B, L, V]".into()) };
    // The last token of a row predicts nothing; any target will do for its cotangent of zero.
    let targets: Vec<i64> =
        ids.chunks(columns).flat_map(|row| row[1..].iter().copied().chain([row[columns - 1]])).collect();
    let predictions = |values: &[f32]| -> Outcome<Grid> {
        let kept = values.chunks(columns).flat_map(|row| row[..columns - 1].iter().map(|v| f64::from(*v)));
        Ok(Grid::new(columns - 1, kept.collect())?)
    };
    let padded = |grid: &Grid| -> Vec<f32> {
        (0..rows).flat_map(|b| grid.row(b).iter().map(|v| *v as f32).chain([0.0])).collect()
    };

    let (mut losses, mut gradients) = (vec![0.0f32; entries.len()], vec![0.0f32; entries.len() * logits.len()]);
    for entry in &entries {
        let current = FromLogits::new(logits, &targets)?;
        let (log_probs, entropy) = (predictions(&current.log_probs)?, predictions(&current.entropy)?);
        let (config, old_is_current) = configuration(&entry.config)?;
        let loss_inputs = LossInputs {
            log_probs: &log_probs,
            entropy: Some(&entropy),
            old_log_probs: (!old_is_current).then_some(&old),
            infer_log_probs: Some(&infer),
            ref_log_probs: Some(&reference),
            advantages: &advantages,
            response_mask: &mask,
            episode_scores: &scores,
        };
        let found = policy_loss(&config, &loss_inputs, Totals::of_responses(&mask))?;
        losses[entry.index] = found.value as f32;
        let d_entropy = found.d_entropy.as_ref().map_or_else(|| vec![0.0; rows * columns], &padded);
        let gradient = current.pull(&padded(&found.d_log_probs), &d_entropy)?;
        gradients[entry.index * logits.len()..][..logits.len()].copy_from_slice(&gradient);

        let allowed = (METRIC_FACTOR * entry.metrics_rel_f32_err).max(METRIC_FLOOR);
        let metrics = found.metrics.named();
        for (name, expected) in &entry.metrics {
            let value = metrics.get(name).copied();
            // The terms of the loss may cancel: its error is that of the largest.
            let terms = match name == "actor/total_loss@sum" {
                true => entry.metrics.get("actor/pg_loss@sum").map_or(0.0, |term| term.abs()),
                false => 0.0,
            };
            let size = expected.abs().max(terms).max(METRIC_FLOOR.sqrt());
            let close = value.is_some_and(|v| (v - expected).abs() <= allowed * size);
            report.check(close, || format!("case {}: {name} is {value:?}, expected {expected}", entry.index));
        }
    }
    report.compare("total_loss", &Tensor::new(losses, [entries.len()])?);
    report.compare("grad_logits", &Tensor::new(gradients, [entries.len(), rows, columns, vocab])?);
    Ok(report)
}

/// The options of one entry, under our names where they differ, and whether the update has not begun.
fn configuration(entry: &serde_json::Map<String, Value>) -> Outcome<(LossConfig, bool)> {
    let mut options = entry.clone();
    let old_is_current = options.remove("old_is_current").is_some_and(|v| v == json!(true));
    // `null` means weights of one and no filter, the default.
    match options.remove("correction") {
        None | Some(Value::Null) => {}
        Some(correction) => {
            options.insert("train_infer_correction".into(), correction);
        }
    }
    if let Some(Value::Object(variant)) = options.remove("variant_args") {
        options.extend(variant);
    }
    if options["loss_agg_mode"] == json!("token-mean") {
        options["loss_agg_mode"] = json!("token-mean-unmasked");
    }
    options.insert("reference_metrics".into(), json!(true));
    Ok((serde_json::from_value(Value::Object(options))?, old_is_current))
}
