//! Policy losses of trained steps, and their gradients back to the velocities of guidance.

use roll_core::StateDict;
use roll_video::flow_grpo::loss::{PolicyShift, StepTerm, clip, divergence, dppo, guard, mean_shift};
use roll_video::policy_gradient::LossMask;
use roll_video::policy_gradient::clip::{ClipRange, bounded};
use roll_video::policy_gradient::sde::{SdeKind, SdeStep};
use serde::Deserialize;
use serde_json::Value;

use crate::case::{Case, Outcome, Report};
use crate::exact::{Exact, entries, row, wide};

#[derive(Deserialize)]
struct Entry {
    index: usize,
    variant: String,
    inputs: String,
    #[serde(default)]
    clip_range: f64,
    #[serde(default)]
    adv_clip_max: f64,
    #[serde(default)]
    beta: f64,
    #[serde(default)]
    kl: String,
    #[serde(default)]
    kl_mask_threshold: f64,
    #[serde(default)]
    normalised: bool,
    kind: Option<SdeKind>,
    eta: Option<f64>,
    #[serde(default)]
    steps: Vec<usize>,
    #[serde(default)]
    guidance: f64,
    metrics: Value,
}

pub fn run(case: &Case) -> Outcome<Report> {
    let inputs = case.tensors("inputs.safetensors")?;
    let mut exact = Exact::open(case)?;
    for entry in entries::<Entry>(case)? {
        match entry.variant.as_str() {
            "step" => window(&entry, &inputs, &mut exact)?,
            _ => batch(&entry, &inputs, &mut exact)?,
        }
    }
    Ok(exact.report)
}

/// A batch by its means and log-probabilities.
fn batch(entry: &Entry, inputs: &StateDict, exact: &mut Exact) -> Outcome {
    let of = |name: &str| wide(inputs, &format!("{}.{name}", entry.inputs));
    let (new, old, advantages) = (of("log_prob")?, of("old_log_prob")?, of("advantages")?);
    let (levels, roots) = (of("std_dev_t")?, of("sqrt_dt")?);
    let rows = new.len();
    let count = rows as f64;
    let means = [of("mean")?, of("mean_old")?, of("mean_ref")?];
    let size = means[0].len() / rows;
    let mask = LossMask::all(size);
    let mean = |kind: usize, i: usize| &means[kind][i * size..(i + 1) * size];
    let own: Vec<f64> = (0..rows).map(|i| mean_shift(mean(0, i), mean(1, i), mask)).collect();
    // The authors' script of GRPO-Guard has one bias for the batch.
    let of_batch = entry.variant == "guard_batch_bias";
    let squared: Vec<f64> = if of_batch { vec![own.iter().sum::<f64>() / count; rows] } else { own };
    let term = |i: usize| -> Outcome<StepTerm> {
        let advantage = |bound: f64| bounded(advantages[i], bound);
        let std = levels[i] * roots[i];
        let (log_ratio, squared, variance, root) = (new[i] - old[i], squared[i], std * std, roots[i]);
        let shift = PolicyShift { log_ratio, squared, std, variance, root };
        Ok(match entry.variant.as_str() {
            "grpo" | "grpo_wan" => clip(shift, advantage(entry.adv_clip_max), ClipRange::symmetric(entry.clip_range)?),
            "guard" | "guard_batch_bias" => {
                guard(shift, advantage(entry.adv_clip_max), ClipRange::symmetric(entry.clip_range)?)
            }
            "dppo" => {
                let unit = PolicyShift { std: 1.0, ..shift };
                let distance = divergence(if entry.normalised { shift } else { unit });
                dppo(shift, advantages[i], distance, entry.kl_mask_threshold)
            }
            other => return Err(format!("an unknown variant, `{other}`").into()),
        })
    };
    let terms = (0..rows).map(term).collect::<Outcome<Vec<StepTerm>>>()?;
    let output = |name: &str| format!("{:03}.{name}", entry.index);
    let policy = terms.iter().map(|t| t.term.loss).sum::<f64>() / count;
    let kl_variance = |i: usize| match entry.kl.as_str() {
        "std_dt" => 2.0 * (levels[i] * roots[i]).powi(2),
        _ => 2.0 * levels[i].powi(2),
    };
    let kl = (0..rows).map(|i| mean_shift(mean(0, i), mean(2, i), mask) / kl_variance(i)).sum::<f64>() / count;
    exact.compare(&output("loss"), &[policy + entry.beta * kl])?;
    exact.compare(&output("grad_log_prob"), &terms.iter().map(|t| t.term.d_log_prob / count).collect::<Vec<_>>())?;
    if exact.has(&output("policy_loss")) {
        exact.compare(&output("policy_loss"), &[policy])?;
    }
    if exact.has(&output("kl_loss")) {
        exact.compare(&output("kl_loss"), &[kl])?;
    }
    if exact.has(&output("grad_mean")) {
        let all: f64 = terms.iter().map(|t| t.d_squared).sum::<f64>() / count;
        let gradient = (0..rows).flat_map(|i| {
            let slope = 2.0 * if of_batch { all } else { terms[i].d_squared } / (count * size as f64);
            let of_kl = entry.beta * 2.0 / (kl_variance(i) * count * size as f64);
            let [own, old, reference] = [0, 1, 2].map(|kind| mean(kind, i));
            (0..size).map(move |k| slope * (own[k] - old[k]) + of_kl * (own[k] - reference[k]))
        });
        exact.compare(&output("grad_mean"), &gradient.collect::<Vec<f64>>())?;
    }
    let share = |of: &dyn Fn(usize) -> bool| (0..rows).filter(|i| of(*i)).count() as f64 / count;
    let (ratio, log_ratio) = (|i: usize| terms[i].term.ratio, |i: usize| new[i] - old[i]);
    let mean_of = |of: &dyn Fn(usize) -> f64| (0..rows).map(of).sum::<f64>() / count;
    let mut found = vec![
        ("approx_kl", 0.5 * mean_of(&|i| log_ratio(i).powi(2))),
        ("ratio_mean", mean_of(&ratio)),
        ("ppo_kl", -mean_of(&log_ratio)),
        ("policy_loss", policy),
        ("kl_loss", kl),
        ("masked_fraction", share(&|i| terms[i].is_dropped)),
    ];
    if let Ok(range) = ClipRange::symmetric(entry.clip_range) {
        found.push(("clipfrac", share(&|i| range.is_out(ratio(i)))));
        found.push(("clipfrac_gt_one", share(&|i| range.is_above(ratio(i)))));
        found.push(("clipfrac_lt_one", share(&|i| range.is_below(ratio(i)))));
    }
    for (name, value) in found {
        if !entry.metrics[name].is_null() {
            exact.metric(&entry.metrics, name, value);
        }
    }
    Ok(())
}

/// A window of steps, from the velocities of guidance on.
fn window(entry: &Entry, inputs: &StateDict, exact: &mut Exact) -> Outcome {
    let input = |name: &str| format!("{}.{name}", entry.inputs);
    let advantages = wide(inputs, &input("advantages"))?;
    let (rows, count) = (advantages.len(), advantages.len() as f64);
    let steps = entry.steps.len();
    let old = wide(inputs, &input("old_log_prob"))?;
    let sigmas = inputs[&input("sigmas")].f32s()?;
    let range = ClipRange::symmetric(entry.clip_range)?;
    let kind = entry.kind.ok_or("no kind of step")?;
    let mut total = 0.0;
    for (n, at) in entry.steps.iter().enumerate() {
        let step = SdeStep::new(kind, entry.eta.unwrap_or(0.0), sigmas, *at)?;
        let (mut log_probs, mut loss) = (Vec::new(), 0.0);
        let (mut to_cond, mut to_uncond) = (Vec::new(), Vec::new());
        for (i, advantage) in advantages.iter().enumerate() {
            let latents = |k: usize| row(inputs, &input("latents"), i * (steps + 1) + k, rows * (steps + 1));
            let read = |name: &str| row(inputs, &input(name), i * steps + n, rows * steps);
            let (x, next) = (latents(n)?, latents(n + 1)?.iter().map(|v| f64::from(*v)).collect::<Vec<f64>>());
            let (cond, uncond) = (read("cond")?, read("uncond")?);
            let mask = LossMask::all(x.len());
            let guided = |k: usize| f64::from(uncond[k]) + entry.guidance * (f64::from(cond[k]) - f64::from(uncond[k]));
            let mean = |k: usize| step.latents_factor() * f64::from(x[k]) + step.velocity_factor() * guided(k);
            let mean: Vec<f64> = (0..x.len()).map(mean).collect();
            let log_prob = step.log_prob(&next, &mean, mask);
            let shift = PolicyShift {
                log_ratio: log_prob - old[i * steps + n],
                squared: 0.0,
                std: step.std(),
                variance: step.variance(),
                root: step.root(),
            };
            let term = clip(shift, bounded(*advantage, entry.adv_clip_max), range).term;
            let reference: Vec<f64> = read("mean_ref")?.iter().map(|v| f64::from(*v)).collect();
            let scale = if entry.kl == "std_dt" { step.noise_scale() * step.root() } else { step.noise_scale() };
            let variance = 2.0 * scale * scale;
            loss += (term.loss + entry.beta * mean_shift(&mean, &reference, mask) / variance) / count;
            let d_log_prob = step.d_mean(&next, &mean, mask);
            let slopes = mean.iter().zip(&reference).zip(&d_log_prob).map(|((mean, reference), d_log_prob)| {
                let of_kl = entry.beta * 2.0 * (mean - reference) / (variance * x.len() as f64);
                (term.d_log_prob * d_log_prob + of_kl) * step.velocity_factor() / (count * steps as f64)
            });
            for d in slopes {
                to_cond.push(entry.guidance * d);
                to_uncond.push((1.0 - entry.guidance) * d);
            }
            log_probs.push(log_prob);
        }
        let output = |name: &str| format!("{:03}.step{n}.{name}", entry.index);
        exact.compare(&output("log_prob"), &log_probs)?;
        exact.compare(&output("loss"), &[loss])?;
        exact.compare(&output("grad_cond"), &to_cond)?;
        if exact.has(&output("grad_uncond")) {
            exact.compare(&output("grad_uncond"), &to_uncond)?;
        }
        total += loss / steps as f64;
    }
    let whole = format!("{:03}.loss", entry.index);
    if exact.has(&whole) {
        exact.compare(&whole, &[total])?;
    }
    Ok(())
}
