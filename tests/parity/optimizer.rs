//! AdamW, clipping, and learning-rate schedules.

use std::collections::BTreeMap;

use roll_backends::optimizer::{AdamW, LrSchedule, LrSchedulerType, Moments, clip_coefficient, norm, scale};
use roll_core::{OptimizerConfig, ParameterSpec, StateDict, Tensor, flat};
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};

#[derive(Deserialize)]
struct Config {
    hyper: BTreeMap<String, Hyper>,
    steps: usize,
    schedule: Schedule,
}

#[derive(Deserialize)]
struct Hyper {
    lr: f64,
    betas: [f64; 2],
    eps: f64,
    weight_decay: f64,
    max_grad_norm: f64,
}

#[derive(Deserialize)]
struct Schedule {
    types: Vec<LrSchedulerType>,
    base_lr: f64,
    warmup: u64,
    total: u64,
}

pub fn run(case: &Case) -> Outcome<Report> {
    let config: Config = case.config()?;
    let inputs = case.tensors("inputs.safetensors")?;
    let mut report = case.expected("outputs.safetensors")?;
    let layout = Layout::new(&inputs);
    for (name, hyper) in &config.hyper {
        adam(&mut report, &layout, &inputs, &format!("adamw.{name}"), hyper, config.steps)?;
        // Same formula to rounding, written without clipping.
        let unclipped = Hyper { max_grad_norm: 0.0, ..*hyper };
        adam(&mut report, &layout, &inputs, &format!("deepspeed.{name}"), &unclipped, config.steps)?;
    }
    for shape in config.schedule.types {
        let name = format!("lr.{}", serde_json::to_value(shape)?.as_str().ok_or("no name")?);
        let Schedule { base_lr, warmup, total, .. } = config.schedule;
        let schedule = LrSchedule::new(shape, base_lr, warmup, total);
        let steps = report.get(&name)?.len();
        let rates = (0..steps).map(|t| schedule.at(t as u64) as f32).collect::<Vec<_>>();
        report.compare(&name, &Tensor::new(rates, [steps])?);
    }
    Ok(report)
}

/// The parameters of the case as one flat vector: the inputs that are not gradients of a step.
struct Layout(Vec<ParameterSpec>);

impl Layout {
    fn new(inputs: &StateDict) -> Self {
        let parameters = inputs.iter().filter(|(name, _)| !name.starts_with("step"));
        Self(parameters.map(|(name, t)| ParameterSpec { name: name.clone(), shape: t.shape().to_vec() }).collect())
    }

    fn read(&self, inputs: &StateDict, prefix: &str) -> Outcome<Vec<f32>> {
        let values = self.0.iter().map(|s| {
            let name = format!("{prefix}{}", s.name);
            inputs.get(&name).map(Tensor::to_f32_vec).ok_or(format!("the case holds no input `{name}`"))
        });
        Ok(values.collect::<Result<Vec<_>, _>>()?.concat())
    }

    /// Compares the tensors that the case holds under `prefix`.
    fn compare(&self, report: &mut Report, prefix: &str, values: &[f32]) -> Outcome {
        for (name, tensor) in flat::to_state(&self.0, values)? {
            let name = format!("{prefix}{name}");
            if report.get(&name).is_ok() {
                report.compare(&name, &tensor);
            }
        }
        Ok(())
    }
}

fn adam(report: &mut Report, layout: &Layout, inputs: &StateDict, name: &str, hyper: &Hyper, steps: usize) -> Outcome {
    let Hyper { betas, eps, weight_decay, max_grad_norm, lr } = *hyper;
    let optimizer = AdamW::new(&OptimizerConfig { betas, eps, weight_decay, max_grad_norm });
    let mut parameters = layout.read(inputs, "")?;
    let mut moments = Moments::zeros(parameters.len());
    let mut norms = Vec::new();
    for t in 0..steps {
        let mut gradients = layout.read(inputs, &format!("step{t}."))?;
        let grad_norm = norm(&gradients);
        norms.push(grad_norm as f32);
        scale(&mut gradients, clip_coefficient(grad_norm, max_grad_norm));
        layout.compare(report, &format!("{name}.clipped_grad.step{t}."), &gradients)?;
        optimizer.update(&mut parameters, &gradients, &mut moments, lr);
        layout.compare(report, &format!("{name}.param.step{t}."), &parameters)?;
    }
    layout.compare(report, &format!("{name}.exp_avg."), &moments.exp_avg)?;
    layout.compare(report, &format!("{name}.exp_avg_sq."), &moments.exp_avg_sq)?;
    let name = format!("{name}.grad_norm");
    if report.get(&name).is_ok() {
        report.compare(&name, &Tensor::new(norms, [steps])?);
    }
    Ok(())
}
