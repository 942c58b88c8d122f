//! Z-Image's transformer, decoder and schedule together: whole samplings with and without guidance, and the gradient of
//! a score of pictures into the LoRA through the last steps.

use std::collections::BTreeMap;

use roll_core::{Adapter, Conditioning, Grad, Noise, Pullback, StateDict, Tensor, VelocityInput};
use roll_network::lora::{AdapterWeights, LoraFile, LoraRequest, OpenedAdapter};
use roll_video::FlowSchedule;
use roll_z_image::dit::{Dit, PassSettings};
use roll_z_image::lora::initial_adapter;
use roll_z_image::vae::{Vae, VaeConfig};
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};

#[derive(Deserialize)]
struct Config {
    model: Model,
    vae: VaeConfig,
    runs: BTreeMap<String, Sampling>,
    reward: Reward,
}

#[derive(Deserialize)]
struct Model {
    axes_dims: [usize; 3],
}

#[derive(Deserialize)]
struct Sampling {
    steps: usize,
    shift: f64,
    guidance: f32,
    normalization: f64,
    truncation: f64,
}

#[derive(Deserialize)]
struct Reward {
    steps: usize,
    shift: f64,
    #[serde(rename = "K")]
    last: Vec<usize>,
}

/// The networks and inputs of the case.
struct Bench {
    dit: Dit,
    vae: Vae,
    noise: Vec<Tensor>,
    positive: Vec<Conditioning>,
    negative: Vec<Conditioning>,
}

pub fn run(case: &Case) -> Outcome<Report> {
    let config: Config = case.config()?;
    let mut report = case.expected("outputs.safetensors")?;
    let inputs = case.tensors("inputs.safetensors")?;
    let mut bench = Bench::open(case, &config, &inputs)?;
    for name in report.names().iter().filter(|name| name.starts_with("table.")) {
        let (steps, shift) = name.trim_start_matches("table.steps").split_once("_shift").ok_or("a table's name")?;
        let schedule = FlowSchedule::new(steps.parse()?, shift.parse()?)?;
        report.compare(name, &vector(schedule.sigmas())?);
    }
    for (name, sampling) in &config.runs {
        sample(&mut report, &bench, name, sampling)?;
    }
    bench.adapt(case)?;
    for last in &config.reward.last {
        reward(&mut report, &bench, &config.reward, *last, &inputs["g_picture"])?;
    }
    Ok(report)
}

impl Bench {
    fn open(case: &Case, config: &Config, inputs: &StateDict) -> Outcome<Self> {
        let dtype = case.setting.dtype;
        let dit = Dit::new(&case.tensors("dit.safetensors")?, Some(config.model.axes_dims), dtype, case.device())?
            .with_settings(PassSettings { products: dtype, ..PassSettings::default() });
        let vae = Vae::new(config.vae.clone(), &case.tensors("vae.safetensors")?, case.device())?;
        let noise = with_frame(&inputs["noise"])?.unstack()?;
        let conditioning = |kind: &str, i: usize| Conditioning {
            context: inputs[&format!("{kind}.{i}")].clone(),
            channels: None,
            image_tokens: None,
            first_frame: None,
            latent_shape: [0, 1, 2, 3].map(|axis| noise[i].shape()[axis]),
        };
        let all = |kind: &str| (0..noise.len()).map(|i| conditioning(kind, i)).collect();
        Ok(Self { dit, vae, positive: all("positive"), negative: all("negative"), noise })
    }

    /// Adds the LoRA of the case.
    fn adapt(&mut self, case: &Case) -> Outcome {
        let path = case.dir.join("lora.safetensors");
        let file = LoraFile::open(&path)?;
        let header = file.metadata.clone();
        let weights = AdapterWeights::Lora(file.one(None)?);
        let adapter =
            OpenedAdapter { path, expert: None, expert_from_file_name: false, strength: 1.0, header, weights };
        let initial = initial_adapter(vec![adapter], &LoraRequest::default(), self.dit.config())?;
        self.dit.add_trainable(&initial.trainable, &Noise::new(0), &StateDict::new())?;
        let parameters = self.dit.parameters().ok_or("no parameters")?;
        Ok(parameters.write(&roll_core::flat::from_state(parameters.specs(), &initial.parameters)?)?)
    }

    /// Velocities of all samples at step `i` of `schedule`.
    fn velocities(
        &self,
        x: &[Tensor],
        conditionings: &[Conditioning],
        schedule: &FlowSchedule,
        i: usize,
        grad: Grad,
    ) -> Outcome<(Vec<Tensor>, Option<Pullback>)> {
        let inputs: Vec<VelocityInput<'_>> = x
            .iter()
            .zip(conditionings)
            .map(|(latents, conditioning)| VelocityInput { latents, timestep: schedule.timestep(i), conditioning })
            .collect();
        let (velocities, pullback) = self.dit.velocities(&inputs, Adapter::On, grad)?;
        Ok((velocities.unstack()?, pullback))
    }
}

/// A sampling from noise to pictures.
fn sample(report: &mut Report, bench: &Bench, name: &str, sampling: &Sampling) -> Outcome {
    let schedule = FlowSchedule::new(sampling.steps, sampling.shift)?;
    report.compare(&format!("{name}.sigmas"), &vector(schedule.sigmas())?);
    if sampling.normalization > 0.0 || sampling.truncation < 1.0 {
        let reason = "the norm limit and the truncation of guidance are options of the reference's pipeline alone";
        report.leave_out(&format!("{name}.latents"), reason);
        return Ok(());
    }
    let mut x = bench.noise.clone();
    let (mut all_velocities, mut all_latents) = (Vec::new(), vec![Tensor::stack(&x)?]);
    for i in 0..schedule.steps() {
        let (mut v, _) = bench.velocities(&x, &bench.positive, &schedule, i, Grad::Skip)?;
        if sampling.guidance > 0.0 {
            let (without, _) = bench.velocities(&x, &bench.negative, &schedule, i, Grad::Skip)?;
            let guided = |(p, n): (&Tensor, &Tensor)| combined(p, n, 1.0 + sampling.guidance, -sampling.guidance);
            v = v.iter().zip(&without).map(guided).collect::<Outcome<_>>()?;
        }
        x = x.iter().zip(&v).map(|(x, v)| combined(x, v, 1.0, schedule.delta(i))).collect::<Outcome<_>>()?;
        all_velocities.push(Tensor::stack(&v)?);
        all_latents.push(Tensor::stack(&x)?);
    }
    report.compare(&format!("{name}.velocities"), &without_frame(&Tensor::stack(&all_velocities)?, 3)?);
    report.compare(&format!("{name}.latents"), &without_frame(&Tensor::stack(&all_latents)?, 3)?);
    let mut pixels = Vec::new();
    let mut shape = Vec::new();
    for latents in &x {
        let (picture, _) = bench.vae.decode_clamped(latents, Grad::Skip)?;
        pixels.extend(picture.f32s()?.iter().map(|value| value / 2.0 + 0.5));
        shape = picture.shape().to_vec();
    }
    shape[0] = x.len();
    report.compare(&format!("{name}.picture"), &Tensor::new(pixels, shape)?);
    let reason = "its float values are compared: rounding may differ where they do";
    report.leave_out(&format!("{name}.picture_u8"), reason);
    Ok(())
}

/// Scores and gradients of a sampling whose last steps are recorded.
fn reward(report: &mut Report, bench: &Bench, reward: &Reward, last: usize, cotangents: &Tensor) -> Outcome {
    let name = |part: &str| format!("reward.last{last}.{part}");
    let schedule = FlowSchedule::new(reward.steps, reward.shift)?;
    let mut x = bench.noise.clone();
    let mut recorded = Vec::new();
    for i in 0..schedule.steps() {
        let is_recorded = i + last >= schedule.steps();
        if i + last == schedule.steps() {
            report.compare(&name("latents_start"), &without_frame(&Tensor::stack(&x)?, 2)?);
        }
        let grad = if is_recorded { Grad::Record } else { Grad::Skip };
        let (v, pullback) = bench.velocities(&x, &bench.positive, &schedule, i, grad)?;
        recorded.extend(pullback.map(|pullback| (schedule.delta(i), pullback)));
        x = x.iter().zip(&v).map(|(x, v)| combined(x, v, 1.0, schedule.delta(i))).collect::<Outcome<_>>()?;
    }
    report.compare(&name("latents_end"), &without_frame(&Tensor::stack(&x)?, 2)?);
    let (mut pictures, mut scores, mut d_x) = (Vec::new(), Vec::new(), Vec::new());
    for (latents, cotangent) in x.iter().zip(cotangents.unstack()?) {
        let (picture, pullback) = bench.vae.decode(latents, Grad::Record)?;
        // Pixels of the reference are in 0..1.
        let picture =
            Tensor::new(picture.f32s()?.iter().map(|v| v / 2.0 + 0.5).collect::<Vec<f32>>(), picture.shape())?;
        let products = picture.f32s()?.iter().zip(cotangent.f32s()?).map(|(p, g)| f64::from(*p) * f64::from(*g));
        scores.push(products.sum::<f64>() as f32);
        // The score is the mean over the samples.
        let of_mean = scaled(&cotangent.reshape(picture.shape())?, 0.5 / x.len() as f32)?;
        d_x.push(pullback.ok_or("no pullback")?.pull(&of_mean)?);
        pictures.push(picture.reshape(cotangent.shape())?);
    }
    report.compare(&name("picture_unclamped"), &Tensor::stack(&pictures)?);
    report.compare(&name("score"), &vector(&scores)?);
    let mut d_x = Tensor::stack(&d_x)?;
    for (delta, pullback) in recorded.into_iter().rev() {
        d_x = combined(&d_x, &pullback.pull(&scaled(&d_x, delta)?)?, 1.0, 1.0)?;
    }
    report.compare(&name("grad_latents_start"), &without_frame(&d_x, 2)?);
    let parameters = bench.dit.parameters().ok_or("no parameters")?;
    let mut gradient = vec![0.0; parameters.specs().iter().map(|spec| spec.len()).sum()];
    parameters.take_gradients(&mut gradient)?;
    for (parameter, gradient) in roll_core::flat::to_state(parameters.specs(), &gradient)? {
        let peft = parameter.replace(".weight", ".default.weight");
        report.compare(&name(&format!("grad.base_model.model.{peft}")), &gradient);
    }
    Ok(())
}

fn vector(values: &[f32]) -> Outcome<Tensor> {
    Ok(Tensor::new(values.to_vec(), [values.len()])?)
}

/// `a * x + b * y`.
fn combined(x: &Tensor, y: &Tensor, a: f32, b: f32) -> Outcome<Tensor> {
    let values = x.f32s()?.iter().zip(y.f32s()?).map(|(x, y)| a * x + b * y);
    Ok(Tensor::new(values.collect::<Vec<f32>>(), x.shape())?)
}

fn scaled(x: &Tensor, factor: f32) -> Outcome<Tensor> {
    Ok(Tensor::new(x.f32s()?.iter().map(|v| factor * v).collect::<Vec<f32>>(), x.shape())?)
}

/// `[B, C, H, W]` to `[B, C, 1, H, W]`.
fn with_frame(pictures: &Tensor) -> Outcome<Tensor> {
    let [b, c, h, w] = *pictures.shape() else { return Err("expected [B, C, H, W]".into()) };
    Ok(pictures.reshape([b, c, 1, h, w])?)
}

/// Removes the axis of frames, which has the number `axis`.
fn without_frame(videos: &Tensor, axis: usize) -> Outcome<Tensor> {
    let mut shape = videos.shape().to_vec();
    shape.remove(axis);
    Ok(videos.reshape(shape)?)
}
