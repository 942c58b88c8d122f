//! Videos that branch from a prefix which all of them share: their steps, probabilities, advantages and loss.

use roll_core::{
    Adapter, ConditionInput, Conditioning, DiffusionModel, Error, Grad, Pullback, Result, ScheduleFacts, StateDict,
    Tensor, Timestep,
};
use roll_video::flow_grpo::StepWeight;
use roll_video::flow_grpo::loss::{PolicyShift, clip};
use roll_video::policy_gradient::LossMask;
use roll_video::policy_gradient::advantages::{Normalization, Spread, normalized};
use roll_video::policy_gradient::clip::ClipRange;
use roll_video::policy_gradient::sde::{SdeKind, SdeStep};
use roll_video::sampling::{Conditions, Guidance, Sampling};
use roll_video::{FlowSchedule, Sampler};
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};
use crate::exact::{row, wide};

#[derive(Deserialize)]
struct Config {
    steps: usize,
    shift: f64,
}

#[derive(Deserialize)]
struct Cases {
    branches: Vec<Branch>,
}

#[derive(Deserialize)]
struct Branch {
    index: usize,
    at: usize,
    width: usize,
    videos: usize,
    kind: SdeKind,
    eta: f64,
    clip_range: f64,
    noise_weight: bool,
}

/// `velocity(x, sigma) = tanh(x A) + b sigma`, on vectors of the length of b.
struct Toy {
    a: Vec<f64>,
    b: Vec<f64>,
    passes: usize,
}

impl Toy {
    fn at(&self, x: &[f32], sigma: f64) -> Vec<f64> {
        let n = self.b.len();
        let product = |j: usize| -> f64 { (0..n).map(|i| f64::from(x[i]) * self.a[i * n + j]).sum() };
        (0..n).map(|j| product(j).tanh() + self.b[j] * sigma).collect()
    }
}

impl DiffusionModel for Toy {
    fn velocity(
        &mut self,
        latents: &Tensor,
        timestep: Timestep,
        _conditioning: &Conditioning,
        _adapter: Adapter,
        _grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        self.passes += 1;
        let velocity = self.at(latents.f32s()?, timestep.0 / 1000.0);
        Ok((tensor(&velocity, [velocity.len(), 1, 1, 1])?, None))
    }
    fn schedule(&self) -> ScheduleFacts {
        unreachable!("the schedule is that of the case")
    }
    fn encode(&mut self, _input: &ConditionInput) -> Result<Conditioning> {
        Err(Error::Unsupported("the toy model has no prompt".into()))
    }
    fn decode(&mut self, latents: &Tensor, _grad: Grad) -> Result<(Tensor, Option<Pullback>)> {
        Ok((latents.clone(), None))
    }
    fn encode_video(&mut self, frames: &Tensor) -> Result<Tensor> {
        Ok(frames.clone())
    }
}

pub fn run(case: &Case) -> Outcome<Report> {
    let inputs = case.tensors("inputs.safetensors")?;
    let mut report = case.expected("outputs.safetensors")?;
    let cases: Cases = serde_json::from_slice(&std::fs::read(case.dir.join("cases.json"))?)?;
    let Config { steps, shift } = case.config()?;
    let schedule = FlowSchedule::new(steps, shift)?;
    report.compare("sigmas", &Tensor::new(schedule.sigmas().to_vec(), [steps + 1])?);
    let sampling = Sampling { schedule, sampler: Sampler::Euler, guidance: Guidance::OFF };
    for branch in &cases.branches {
        compare(branch, &inputs, &sampling, &mut report)?;
    }
    for name in report.names().iter().filter(|name| name.starts_with("tree")) {
        report.leave_out(name, "roll branches once");
    }
    Ok(report)
}

/// A stochastic step of a video.
struct Taken {
    x: Tensor,
    next: Vec<f64>,
    log_prob: f64,
}

fn compare(branch: &Branch, inputs: &StateDict, sampling: &Sampling, report: &mut Report) -> Outcome {
    let &Branch { index, at, width, videos, kind, eta, clip_range, noise_weight } = branch;
    let name = |name: &str| format!("branch{index}.{name}");
    let size = inputs["start"].len();
    let (schedule, n, mask) = (&sampling.schedule, sampling.schedule.steps(), LossMask::all(size));
    // Latents of the toy model, as `[C, T, H, W]`.
    let latent_shape = [size, 1, 1, 1];
    let tensor = |values: &[f64]| tensor(values, latent_shape);
    // The reference's own levels: near 1 the noise of a step amplifies their last bit.
    let sigmas = report.get("sigmas")?.to_f32_vec();
    let steps: Vec<SdeStep> = (at..at + width).map(|i| SdeStep::new(kind, eta, &sigmas, i)).collect::<Result<_>>()?;
    let mut toy = Toy { a: wide(inputs, "A")?, b: wide(inputs, "b")?, passes: 0 };
    let conditioning = Conditioning {
        context: Tensor::zeros([1, 1]),
        channels: None,
        image_tokens: None,
        first_frame: None,
        latent_shape,
    };
    let conditions = Conditions::new(&conditioning, None);

    let start = Tensor::new(inputs["start"].to_f32_vec(), latent_shape)?;
    let mut prefix = Vec::new();
    let mut record = |_: usize, xs: &[Tensor], _: &[Tensor]| {
        prefix.push(xs[0].clone());
        Ok(None)
    };
    let mut branch = sampling.begin(&conditions, &[start])?;
    sampling.advance(&mut toy, &conditions, &mut branch, 0..at, Adapter::On, &mut record)?;
    prefix.extend(branch.latents.clone());
    let (mut latents, mut taken): (Vec<Vec<Tensor>>, Vec<Vec<Taken>>) = (Vec::new(), Vec::new());
    let mut explore = |i: usize, xs: &[Tensor], vs: &[Tensor]| {
        if i > at {
            latents.push(xs.to_vec());
        }
        let Some(step) = steps.get(i - at) else { return Ok(None) };
        let (mut own, mut nexts) = (Vec::new(), Vec::new());
        for (video, (x, v)) in xs.iter().zip(vs).enumerate() {
            let z = row(inputs, &name("z"), video * width + i - at, videos * width)
                .map_err(|e| Error::Misuse(e.to_string()))?;
            let mean = step.mean(x.f32s()?, v.f32s()?);
            let next = step.next(&mean, z);
            nexts.push(tensor(&next)?);
            own.push(Taken { x: x.clone(), log_prob: step.log_prob(&next, &mean, mask), next });
        }
        taken.push(own);
        Ok(Some(nexts))
    };
    let mut rollouts = sampling.begin(&conditions, &vec![branch.latents[0].clone(); videos])?;
    sampling.advance(&mut toy, &conditions, &mut rollouts, at..n, Adapter::On, &mut explore)?;
    let ends = rollouts.latents;
    latents.push(ends.clone());
    report.check(toy.passes == at + videos * (n - at), || format!("branch {index}: {} passes", toy.passes));

    let target = wide(inputs, "target")?;
    let reward = |x: &Tensor| -> Outcome<f64> {
        let squares = x.f32s()?.iter().zip(&target).map(|(x, y)| (f64::from(*x) - y).powi(2));
        Ok(-squares.sum::<f64>() / size as f64)
    };
    let rewards = ends.iter().map(reward).collect::<Outcome<Vec<f64>>>()?;
    let scores: Vec<Option<f64>> = rewards.iter().copied().map(Some).collect();
    let advantages = normalized(&scores, &vec![0; videos], Normalization::new(Spread::Group));

    // The loss under the policy in training, and its gradient.
    toy.a = wide(inputs, "A_now")?;
    let range = ClipRange::symmetric(clip_range)?;
    let weight = if noise_weight { StepWeight::Noise } else { StepWeight::Even };
    let mean_weight = steps.iter().map(|step| weight.of(step)).sum::<f64>() / width as f64;
    let (mut loss, mut gradient, mut ratios) = (0.0, vec![0.0; size * size], Vec::new());
    for (k, (step, videos)) in steps.iter().zip(&taken).enumerate() {
        let factor = weight.of(step) / mean_weight / (width * videos.len()) as f64;
        let sigma = schedule.sigma(at + k).0;
        for (Taken { x, next, log_prob }, advantage) in videos.iter().zip(&advantages) {
            let (x, velocity) = (x.f32s()?, toy.at(x.f32s()?, sigma));
            let mean = step.mean(x, tensor(&velocity)?.f32s()?);
            let log_ratio = step.log_prob(next, &mean, mask) - log_prob;
            let (std, variance, root) = (step.std(), step.variance(), step.root());
            let shift = PolicyShift { log_ratio, squared: 0.0, std, variance, root };
            let term = clip(shift, *advantage, range).term;
            loss += factor * term.loss;
            ratios.push(term.ratio);
            let d_mean = step.d_mean(next, &mean, mask);
            for j in 0..size {
                let tanh = velocity[j] - toy.b[j] * sigma;
                let slope = factor * term.d_log_prob * step.velocity_factor() * d_mean[j] * (1.0 - tanh * tanh);
                (0..size).for_each(|i| gradient[i * size + j] += slope * f64::from(x[i]));
            }
        }
    }

    let flat = |tensors: &[Tensor]| -> Vec<f64> {
        tensors.iter().flat_map(|tensor| tensor.to_f32_vec()).map(f64::from).collect()
    };
    let log_probs: Vec<f64> = taken.iter().flatten().map(|taken| taken.log_prob).collect();
    for (key, values) in [
        ("prefix", flat(&prefix)),
        ("latents", flat(&latents.concat())),
        ("log_prob", log_probs),
        ("std", steps.iter().map(SdeStep::std).collect()),
        ("reward", rewards),
        ("advantage", advantages),
        ("ratio", ratios),
        ("loss", vec![loss]),
        ("grad_A", gradient),
    ] {
        let shape = report.get(&name(key))?.shape().to_vec();
        report.compare(&name(key), &Tensor::new(values.iter().map(|v| *v as f32).collect::<Vec<f32>>(), shape)?);
    }
    Ok(())
}

fn tensor(values: &[f64], shape: [usize; 4]) -> Result<Tensor> {
    Tensor::new(values.iter().map(|v| *v as f32).collect::<Vec<f32>>(), shape)
}
