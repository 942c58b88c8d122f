//! Language models: logits, log-probabilities, gradients, greedy generation.

use roll_agents::agentic_ppo::Mask;
use roll_backends::Memory;
use roll_causal_lm::{CausalLm, LmConfig, Network};
use roll_core::{Adapter, Grad, LanguageModel, Model, Noise, Sampling, Tensor, flat};
use roll_network::trainable::Trainable;
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};

#[derive(Deserialize)]
struct Config {
    new_tokens: usize,
}

pub fn run(case: &Case) -> Outcome<Report> {
    let config: Config = case.config()?;
    let inputs = case.tensors("inputs.safetensors")?;
    let mut report = case.expected("outputs.safetensors")?;
    let mut model = model(case, Memory::Recompute)?;
    for side in ["left", "right"] {
        let (ids, mask) = (&inputs[&format!("{side}.ids")], &inputs[&format!("{side}.mask")]);
        report.compare(&format!("{side}.logits"), &model.network().logits(ids, mask, Adapter::On)?);
        let (stats, _) = model.evaluate(ids, mask, mask, Adapter::Off, Grad::Skip)?;
        report.compare(&format!("{side}.log_probs"), &stats.log_probs);
        report.leave_out(&format!("{side}.position_ids"), "the model computes them itself");
    }
    gradients(case, &inputs["right.ids"], &inputs["right.mask"], &mut report)?;
    let left = [&inputs["left.ids"], &inputs["left.mask"]];
    generation(&mut model, left, config.new_tokens, case.tolerance(1e-5), &mut report)?;
    Ok(report)
}

/// The model of the case, all weights trainable, whose turns never end.
fn model(case: &Case, memory: Memory) -> Outcome<CausalLm> {
    let mut config = LmConfig::read(&case.dir.join("hf_config.json"))?;
    config.end_ids.clear();
    let state = case.tensors("model.safetensors")?;
    let dtype = case.setting.dtype;
    let mut network = Network::new(config, &state, dtype, case.device())?.with_memory(memory).with_products(dtype);
    network.add_trainable(&Trainable::Full, &Noise::new(0), &state)?;
    Ok(CausalLm::new(network, None, None)?)
}

/// The mean negative log-likelihood of all predicted tokens, and its gradient, whatever the pullback keeps.
fn gradients(case: &Case, ids: &Tensor, mask: &Tensor, report: &mut Report) -> Outcome {
    for memory in [Memory::Hold, Memory::Offload, Memory::Recompute] {
        let mut model = model(case, memory)?;
        let (stats, pullback) = model.evaluate(ids, mask, mask, Adapter::On, Grad::Record)?;
        let (log_probs, shape) = (stats.log_probs.f32s()?, stats.log_probs.shape());
        let kept = Mask::from_tensor("mask", mask)?.of_predictions()?;
        let count = kept.count() as f32;
        let predicted: Vec<f32> = kept.kept().iter().map(|k| f32::from(u8::from(*k))).collect();
        let nll = log_probs.iter().zip(&predicted).map(|(l, p)| f64::from(-l * p)).sum::<f64>() / f64::from(count);
        report.compare_value("nll", nll);

        let d_log_probs = predicted.iter().map(|p| -p / count);
        let cotangent = d_log_probs.chain(std::iter::repeat_n(0.0, predicted.len())).collect::<Vec<f32>>();
        let pullback = pullback.ok_or("no pullback")?;
        pullback.pull(&Tensor::new(cotangent, [2, shape[0], shape[1]])?)?;
        let mut gradient = vec![0.0; model.parameter_count()];
        model.take_gradients(&mut gradient)?;
        let gradients = flat::to_state(model.parameters(), &gradient)?;
        for name in report.names().iter().filter_map(|n| n.strip_prefix("grad.")) {
            report.compare(&format!("grad.{name}"), gradients.get(name).ok_or("no such parameter")?);
        }
    }
    Ok(())
}

/// Greedy continuation with the cache, beside one forward pass over everything without.
fn generation(
    model: &mut CausalLm,
    [ids, mask]: [&Tensor; 2],
    count: usize,
    tolerance: f64,
    report: &mut Report,
) -> Outcome {
    let [rows, columns] = *ids.shape() else { return Err("ids are not [B, L]".into()) };
    let kept = Mask::from_tensor("mask", mask)?;
    let prompts: Vec<Vec<u32>> = ids
        .as_slice::<i64>()?
        .chunks(columns)
        .enumerate()
        .map(|(b, row)| row.iter().zip(kept.row(b)).filter(|(_, kept)| **kept).map(|(id, _)| *id as u32).collect())
        .collect();
    let sampling = Sampling::greedy(count);
    let found = model.generate(&prompts, &sampling)?;
    let tokens: Vec<i64> = found.iter().flat_map(|g| g.tokens.iter().map(|t| i64::from(*t))).collect();
    report.compare("generate.ids", &Tensor::new(tokens, [rows, count])?);

    let (mut logits, mut margins) = (Vec::new(), Vec::new());
    for (prompt, generation) in prompts.iter().zip(&found) {
        let all: Vec<i64> = prompt.iter().chain(&generation.tokens).map(|t| i64::from(*t)).collect();
        let ones = Tensor::new(vec![1u8; all.len()], [1, all.len()])?;
        let length = all.len();
        let values = model.network().logits(&Tensor::new(all, [1, length])?, &ones, Adapter::On)?.to_f32_vec();
        let vocab = values.len() / length;
        for (row, log_prob) in values.chunks(vocab).skip(prompt.len() - 1).zip(&generation.log_probs) {
            let mut sorted = row.to_vec();
            sorted.sort_by(|a, b| b.total_cmp(a));
            margins.push(sorted[0] - sorted[1]);
            let log_sum = row.iter().map(|l| f64::from(l - sorted[0]).exp()).sum::<f64>().ln();
            report.check((f64::from(*log_prob) + log_sum).abs() < tolerance, || {
                format!("generation reports the log-probability {log_prob}, a pass without cache {}", -log_sum)
            });
            logits.extend_from_slice(row);
        }
    }
    let vocab = logits.len() / (rows * count);
    report.compare("generate.logits", &Tensor::new(logits, [rows, count, vocab])?);
    report.compare("generate.margin", &Tensor::new(margins, [rows, count])?);
    Ok(())
}
