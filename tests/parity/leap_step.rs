//! Steps of Reward-FL whose gradient leaps (LeapAlign) or does not pass from one step to another (DRTune), on the
//! networks of the case `reward_fl_step`, with an adapter on each expert.

use std::collections::BTreeMap;

use roll_backends::optimizer::norm;
use roll_core::{Grad, Model, Tensor, flat};
use roll_video::Sampler;
use roll_video::policy_gradient::LossMask;
use roll_video::reward_fl::{Adjoint, Leap, Loss, Observer, RewardFlConfig, RolloutPlan, Trajectory, loss::step_kl};
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};
use crate::dit::peft_name;
use crate::reward_fl_step::{Bench, channels_first};

/// A case of `cases.json`.
#[derive(Deserialize)]
struct Step {
    index: usize,
    full: bool,
    kl_weight: f64,
    margin: Option<f64>,
    #[serde(flatten)]
    kind: Kind,
}

#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Kind {
    Leap { k: usize, j: usize, alpha: f64, tau: f64, similarity: bool },
    Detached { steps: Vec<usize> },
}

/// Bound on the normalised score that turns the linear loss into a hinge of this height.
pub const HINGE: f64 = 10.0;

/// The options of the loss `max(0, margin - score) - HINGE`.
pub fn hinge(margin: f64, options: RewardFlConfig) -> RewardFlConfig {
    let (reward_mean, reward_clip) = (margin - HINGE, Some(HINGE));
    RewardFlConfig { reward_mean, reward_std: 1.0, reward_weight: 1.0, reward_clip, ..options }
}

pub fn run(case: &Case) -> Outcome<Report> {
    let mut report = case.expected("outputs.safetensors")?;
    let networks = Case::on(&case.dir.join("../reward_fl_step"), case.setting.clone())?;
    let mut bench = Bench::with_high_lora(&networks, Some(&case.tensors("lora_high.safetensors")?))?;
    bench.options = RewardFlConfig { mid_timestep: 0, ..bench.options };
    let rollout = forward(&mut report, &mut bench)?;
    let steps: Vec<Step> = serde_json::from_slice(&std::fs::read(case.dir.join("cases.json"))?)?;
    for step in &steps {
        compare(&mut report, &mut bench, &rollout, step)?;
    }
    Ok(report)
}

/// Latents before and after each step, velocities with the adapters, and by step those without.
#[derive(Default)]
struct Rollout {
    latents: Vec<Tensor>,
    velocities: Vec<Tensor>,
    references: BTreeMap<usize, Tensor>,
}

impl Observer for Rollout {
    fn velocity(&mut self, _step: usize, velocity: &Tensor) {
        self.velocities.push(velocity.clone());
    }
    fn reference(&mut self, step: usize, velocity: &Tensor) {
        self.references.insert(step, velocity.clone());
    }
    fn latents(&mut self, _step: usize, latents: &Tensor) {
        self.latents.push(latents.clone());
    }
}

/// Compares what all cases have in common.
fn forward(report: &mut Report, bench: &mut Bench) -> Outcome<Rollout> {
    let plan = bench.plan()?;
    let boundary = bench.model.diffusion()?.schedule().boundary.ok_or("two experts have a boundary")?;
    let steps = plan.schedule.steps();
    let low = (0..steps).map(|i| i64::from(plan.schedule.timestep(i).uses_low_noise(boundary)));
    report.compare("step_is_low", &Tensor::new(low.collect::<Vec<_>>(), [steps])?);
    report.compare("sigmas", &Tensor::new(plan.schedule.sigmas().to_vec(), [steps + 1])?);
    let mut rollout = Rollout { latents: vec![bench.noise.clone()], ..Rollout::default() };
    let trajectory = bench.rollout(&mut rollout)?;
    for (name, tensors) in [("latents_per_step", &rollout.latents[1..]), ("velocity_per_step", &rollout.velocities)] {
        let shape = report.get(name)?.shape().to_vec();
        report.compare(name, &Tensor::new(tensors.iter().flat_map(Tensor::to_f32_vec).collect::<Vec<_>>(), shape)?);
    }
    let (frames, _) = bench.model.diffusion()?.decode(&trajectory.latents, Grad::Skip)?;
    report.compare("video_decoded", &channels_first(&frames)?);
    report.compare_value("score", bench.score(&trajectory.latents)?);
    let d_latents = bench.pull(trajectory, |_, _| (1.0, 0.0))?.d_latents;
    report.compare("d_latents_of_score", &d_latents.ok_or("no gradient")?);
    Ok(rollout)
}

fn compare(report: &mut Report, bench: &mut Bench, rollout: &Rollout, step: &Step) -> Outcome {
    let name = |what: &str| format!("{:03}.{what}", step.index);
    let (trained, adjoint, weighted) = match &step.kind {
        &Kind::Leap { k, j, alpha, tau, similarity } => {
            (vec![k, j], Adjoint::Leap(Leap { discount: alpha, similarity_floor: Some(tau) }), similarity)
        }
        Kind::Detached { steps } => (steps.clone(), Adjoint::Detached, false),
    };
    let plan = RolloutPlan { acting: trained.clone(), trained, adjoint, ..bench.plan()? };
    let mut options = RewardFlConfig { kl_weight: step.kl_weight, ..bench.options.clone() };
    if let Some(margin) = step.margin {
        options = hinge(margin, options);
    }
    let lowest = if step.margin.is_some() { HINGE } else { 0.0 };

    let trajectory = bench.rollout_of(&plan, &mut roll_video::reward_fl::Unobserved)?;
    if let Kind::Leap { k, j, .. } = step.kind {
        leaps(report, &plan, rollout, [k, j], &name)?;
        report.compare_value(&name("w_sim"), trajectory.similarity);
    }
    let kl_steps = plan.trained.iter().map(|i| {
        let (v, u) = (&rollout.velocities[*i], &rollout.references[i]);
        Ok(step_kl(v, u, plan.schedule.sigma(*i), LossMask::all(v.len()))?.0 as f32)
    });
    report.compare(&name("kl_steps"), &Tensor::new(kl_steps.collect::<Outcome<Vec<_>>>()?, [plan.trained.len()])?);
    report.compare_value(&name("kl"), trajectory.kl);
    let shape = trajectory.latents.shape().to_vec();
    let pulled = bench.pull(trajectory, |score, trajectory: &Trajectory| {
        let similarity = if weighted { trajectory.similarity } else { 1.0 };
        let loss = Loss::at(score, trajectory.kl, similarity, &options);
        report.compare_value(&name("loss"), loss.value + similarity * lowest);
        report.compare_value(&name("reward_loss"), Loss::at(score, 0.0, 1.0, &options).value + lowest);
        (loss.d_score, loss.d_kl)
    })?;
    report.compare(&name("d_latents"), &pulled.d_latents.unwrap_or_else(|| Tensor::zeros(shape)));
    report.compare_value(&name("grad_norm"), norm(&pulled.gradient));
    gradients(report, bench, &pulled.gradient, step.full, &name)
}

/// Compares where the leaps end, and how far that is from the rollout.
fn leaps(
    report: &mut Report,
    plan: &RolloutPlan,
    rollout: &Rollout,
    [k, j]: [usize; 2],
    name: &impl Fn(&str) -> String,
) -> Outcome {
    for (from, to, end, distance) in [(k, j, "x_hat_j", "d_j"), (j, plan.last + 1, "x_hat_0", "d_0")] {
        let [start, stop] = [from, to].map(|i| plan.schedule.sigma(i));
        let leap = Sampler::Euler.start().step(start, stop, &rollout.latents[from], &rollout.velocities[from])?;
        if report.get(&name(end)).is_ok() {
            report.compare(&name(end), &leap);
        }
        let (a, b) = (leap.f32s()?, rollout.latents[to].f32s()?);
        report.compare_value(&name(distance), LossMask::all(a.len()).mean(|i| f64::from((a[i] - b[i]).abs())));
    }
    Ok(())
}

/// Compares the gradients by expert: tensors if `full`, or of each its norm and its product with the parameters.
pub fn gradients(
    report: &mut Report,
    bench: &mut Bench,
    gradient: &[f32],
    full: bool,
    name: &impl Fn(&str) -> String,
) -> Outcome {
    let mut parameters = vec![0.0; gradient.len()];
    bench.model.read_parameters(&mut parameters)?;
    let [gradient, parameters] = [gradient, &parameters].map(|values| flat::to_state(bench.model.parameters(), values));
    let (gradient, parameters) = (gradient?, parameters?);
    for (expert, prefix) in [("high", "dit."), ("low", "dit2.")] {
        let mut summaries: BTreeMap<String, [f32; 2]> = BTreeMap::new();
        for (own, tensor) in &gradient {
            let Some(own_name) = own.strip_prefix(prefix) else { continue };
            let values = tensor.f32s()?;
            if full && report.get(&name(&format!("grad.{expert}.{}", peft_name(own_name)))).is_ok() {
                report.compare(&name(&format!("grad.{expert}.{}", peft_name(own_name))), tensor);
                continue;
            }
            let product = values.iter().zip(parameters[own].f32s()?).map(|(g, w)| f64::from(*g) * f64::from(*w));
            summaries.insert(peft_name(own_name), [norm(values) as f32, product.sum::<f64>() as f32]);
        }
        let what = [name(&format!("grad_norms.{expert}")), name(&format!("grad_dot_weight.{expert}"))];
        for (i, what) in what.iter().enumerate() {
            if report.get(what).is_ok() {
                let values: Vec<f32> = summaries.values().map(|summary| summary[i]).collect();
                report.compare(what, &Tensor::new(values, [summaries.len()])?);
            } else {
                // Present in neither form: no step of the case uses the expert.
                let is_zero = summaries.values().all(|[norm, _]| *norm == 0.0);
                report.check(is_zero, || format!("{what}: the case has no gradient for this expert"));
            }
        }
    }
    Ok(())
}
