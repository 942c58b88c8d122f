//! The loss of DiffusionNFT and its parts, and the schedules of its slow copies.

use roll_core::StateDict;
use roll_video::diffusion_nft::loss::Noised;
use roll_video::diffusion_nft::loss::nft::{AdvantageMode, Nft};
use roll_video::policy_gradient::old_policy::OldDecay;
use roll_video::policy_gradient::{LossMask, distance};
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};
use crate::exact::{Exact, entries, row, wide};

#[derive(Deserialize)]
struct Entry {
    index: usize,
    inputs: String,
    beta: f64,
    adv_clip_max: f64,
    adv_mode: AdvantageMode,
    kl_beta: f64,
}

pub fn run(case: &Case) -> Outcome<Report> {
    let inputs = case.tensors("inputs.safetensors")?;
    let mut exact = Exact::open(case)?;
    for entry in entries::<Entry>(case)? {
        loss(&entry, &inputs, &mut exact)?;
    }
    slow_copies(&inputs, &mut exact)?;
    Ok(exact.report)
}

fn loss(entry: &Entry, inputs: &StateDict, exact: &mut Exact) -> Outcome {
    let input = |name: &str| format!("{}.{name}", entry.inputs);
    let nft = Nft { beta: entry.beta, bound: entry.adv_clip_max, mode: entry.adv_mode };
    nft.check()?;
    let (times, advantages) = (wide(inputs, &input("t"))?, wide(inputs, &input("advantages"))?);
    let (rows, batch) = (times.len(), times.len() as f64);
    let (mut parts, mut sums) = (vec![Vec::new(); 5], [0.0; 5]);
    let (mut noised, mut gradient) = (Vec::new(), Vec::new());
    for (i, (t, advantage)) in times.iter().zip(&advantages).enumerate() {
        let read = |name: &str| row(inputs, &input(name), i, rows);
        let (data, noise, velocity, old) = (read("x0")?, read("noise")?, read("velocity")?, read("velocity_old")?);
        let (reference, mask) = (read("velocity_ref")?, LossMask::all(data.len()));
        let at = Noised { data, noise, t: *t, velocity, old, mask };
        at.check()?;
        let term = nft.at(*advantage, &at);
        let own = [term.share, term.positive, term.negative, term.weights[0], term.weights[1]];
        parts.iter_mut().zip(own).for_each(|(all, value)| all.push(value));
        let mut slopes = term.loss.gradient;
        distance::add_squared_gradient(&mut slopes, entry.kl_beta, velocity, reference, mask);
        gradient.extend(slopes.into_iter().map(|d| d / batch));
        noised.extend(data.iter().zip(noise).map(|(x, e)| (1.0 - t) * f64::from(*x) + t * f64::from(*e)));
        let kl = distance::squared(velocity, reference, mask);
        let moved = distance::squared(velocity, old, mask);
        let old_kl = distance::squared(old, reference, mask);
        let all = [term.loss.value, kl, term.loss.value + entry.kl_beta * kl, moved, old_kl];
        sums.iter_mut().zip(all).for_each(|(sum, value)| *sum += value / batch);
    }
    let output = |name: &str| format!("{:03}.{name}", entry.index);
    let names = ["r", "positive_loss", "negative_loss", "weight_positive", "weight_negative"];
    for (name, values) in names.iter().zip(&parts) {
        exact.compare(&output(name), values)?;
    }
    for (name, value) in ["policy_loss", "kl_div", "total_loss", "old_deviate", "old_kl_div"].iter().zip(sums) {
        exact.compare(&output(name), &[value])?;
    }
    exact.compare(&output("unweighted_policy_loss"), &[sums[0] / entry.adv_clip_max])?;
    exact.compare(&output("grad"), &gradient)?;
    exact.compare(&input("xt"), &noised)
}

/// The blends are kept in f32, as parameters are.
fn slow_copies(inputs: &StateDict, exact: &mut Exact) -> Outcome {
    let steps = inputs["decay.steps"].as_slice::<i64>()?;
    let rounds = inputs["old_policy.global_step"].as_slice::<i64>()?;
    for (kind, decay) in [OldDecay::Follow, OldDecay::Ramp, OldDecay::LateRamp].into_iter().enumerate() {
        let weights: Vec<f64> = steps.iter().map(|n| decay.at(*n as u64)).collect();
        exact.compare(&format!("decay.type{kind}"), &weights)?;
        let mut old = inputs["old_policy.initial"].to_f32_vec();
        let mut all: Vec<f32> = Vec::new();
        for (i, n) in rounds.iter().enumerate() {
            roll_core::flat::blend(&mut old, row(inputs, "old_policy.current", i, rounds.len())?, decay.at(*n as u64));
            all.extend(&old);
        }
        let name = format!("old_policy.type{kind}");
        let shape = exact.report.get(&name)?.shape().to_vec();
        exact.report.compare(&name, &roll_core::Tensor::new(all, shape)?);
    }
    let interval = inputs["ema.interval"].as_slice::<i64>()?[0] as u64;
    let updates = inputs["ema.current"].shape()[0];
    let mut ema = inputs["ema.initial"].to_f32_vec();
    let mut all: Vec<f32> = Vec::new();
    for n in 1..=updates as u64 {
        if (n + 1).is_multiple_of(interval) {
            roll_core::flat::blend(
                &mut ema,
                row(inputs, "ema.current", n as usize - 1, updates)?,
                roll_train::trainer::average_decay(n, 0.9),
            );
        }
        all.extend(&ema);
    }
    let shape = exact.report.get("ema.values")?.shape().to_vec();
    exact.report.compare("ema.values", &roll_core::Tensor::new(all, shape)?);
    Ok(())
}
