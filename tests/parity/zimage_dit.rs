//! Z-Image's transformer: values, intermediates, gradients of latents, base weights and LoRA, and LoRA files and single
//! files of other programs.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use roll_core::{Adapter, Conditioning, Grad, Noise, StateDict, Tensor, Timestep, VelocityInput};
use roll_network::lora::{AdapterWeights, LoraFile, LoraRequest, OpenedAdapter};
use roll_z_image::dit::{Dit, PassSettings, Trainable};
use roll_z_image::{keys, lora};
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};
use crate::dit::own_name;

#[derive(Deserialize)]
struct Config {
    model: Model,
    lora: crate::dit::Lora,
    cases: BTreeMap<String, Inputs>,
}

#[derive(Deserialize)]
struct Model {
    axes_dims: [usize; 3],
}

#[derive(Deserialize)]
struct Inputs {
    t: Vec<f64>,
}

/// The files that contain one adapter under the names of different programs.
const STYLES: [&str; 6] = ["peft", "diffusion_model", "transformer", "diffsynth", "kohya", "comfy_fused"];
/// The case that has LoRA and bf16, and more intermediate values.
const FIRST: &str = "wide";

pub fn run(case: &Case) -> Outcome<Report> {
    let config: Config = case.config()?;
    let mut report = case.expected("outputs.safetensors")?;
    let weights = case.tensors("weights.safetensors")?;
    let inputs = case.tensors("inputs.safetensors")?;
    for (name, settings) in &config.cases {
        let samples = Samples::new(name, &settings.t, &inputs)?;
        base(case, &mut report, &config, &weights, &samples)?;
    }
    let samples = Samples::new(FIRST, &config.cases[FIRST].t, &inputs)?;
    trained_lora(case, &mut report, &config, &weights, &samples)?;
    for style in STYLES {
        let mut dit = network(case, &config, &weights)?;
        let path = case.dir.join(format!("lora_{style}.safetensors"));
        let adapter = opened(&path)?;
        let initial = lora::initial_adapter(vec![adapter], &LoraRequest::default(), dit.config())?;
        dit.add_trainable(&initial.trainable, &Noise::new(0), &StateDict::new())?;
        let parameters = dit.parameters().ok_or("no parameters")?;
        parameters.write(&roll_core::flat::from_state(parameters.specs(), &initial.parameters)?)?;
        let (velocity, _) = dit.velocities(&samples.inputs(), Adapter::On, Grad::Skip)?;
        report.compare(&format!("{FIRST}.style.velocity"), &without_frames(&velocity)?);
    }
    single_file(case, &mut report, &weights)?;
    Ok(report)
}

/// The samples of one case.
struct Samples {
    name: String,
    latents: Vec<Tensor>,
    conditionings: Vec<Conditioning>,
    timesteps: Vec<Timestep>,
    /// `[B, C, 1, H, W]`.
    cotangent: Tensor,
}

impl Samples {
    fn new(name: &str, times: &[f64], inputs: &StateDict) -> Outcome<Self> {
        let latents = with_frames(&inputs[&format!("{name}.latents")])?.unstack()?;
        let conditioning = |i: usize| Conditioning {
            context: inputs[&format!("{name}.caption.{i}")].clone(),
            channels: None,
            image_tokens: None,
            first_frame: None,
            latent_shape: [0, 1, 2, 3].map(|axis| latents[i].shape()[axis]),
        };
        Ok(Self {
            name: name.to_string(),
            conditionings: (0..latents.len()).map(conditioning).collect(),
            latents,
            timesteps: times.iter().map(|t| Timestep(1000.0 * (1.0 - t))).collect(),
            cotangent: with_frames(&inputs[&format!("{name}.g")])?,
        })
    }

    fn inputs(&self) -> Vec<VelocityInput<'_>> {
        let all = self.latents.iter().zip(&self.conditionings).zip(&self.timesteps);
        all.map(|((latents, conditioning), timestep)| VelocityInput { latents, timestep: *timestep, conditioning })
            .collect()
    }
}

/// Compares the base weights, all trained, with every intermediate value.
fn base(case: &Case, report: &mut Report, config: &Config, weights: &StateDict, samples: &Samples) -> Outcome {
    let seen: Arc<Mutex<BTreeMap<String, Tensor>>> = Arc::default();
    let sink = seen.clone();
    let probe = move |name: &str, value: &burn_tensor::Tensor<2>| {
        if let (Ok(value), Ok(mut seen)) = (roll_backends::to_host(value.clone()), sink.lock()) {
            seen.entry(name.into()).or_insert(value);
        }
    };
    let mut dit = network(case, config, weights)?.with_probe(Arc::new(probe));
    dit.add_trainable(&Trainable::Full, &Noise::new(0), weights)?;
    let (velocity, pullback) = dit.velocities(&samples.inputs(), Adapter::On, Grad::Record)?;
    let name = &samples.name;
    report.compare(&format!("{name}.velocity"), &without_frames(&velocity)?);
    let d_latents = pullback.ok_or("no pullback")?.pull(&samples.cotangent)?;
    report.compare(&format!("{name}.grad_latents"), &without_frames(&d_latents)?);
    for (weight, gradient) in gradients(&dit)? {
        let name = format!("{name}.grad_w.{weight}");
        if report.get(&name).is_ok() {
            report.compare(&name, &gradient);
        }
    }
    let seen = seen.lock().map_err(|_| "a probe panicked")?.clone();
    for (value, found) in &seen {
        let name = format!("{name}.{value}");
        let Ok(expected) = report.get(&name) else { continue };
        let lengths = caption_lengths(samples, value, expected)?;
        let found = padded(found, &lengths, expected.shape())?;
        report.compare(&name, &found);
    }
    for i in 0..samples.latents.len() {
        report.leave_out(&format!("{name}.grad_caption.{i}"), "captions have no gradient: the text encoder is frozen");
    }
    for sequence in ["image", "caption", "unified"] {
        let mask = format!("{name}.{sequence}_mask");
        if report.get(&mask).is_ok() {
            report.leave_out(&mask, "attention runs within each sample, without a mask");
        }
    }
    if name == FIRST {
        let reason = "only the picture's rows are computed: the velocity compares them";
        report.leave_out(&format!("{name}.final_layer_out"), reason);
        match case.setting.is_narrow() {
            true => report.compare(&format!("{name}.velocity_bf16"), &without_frames(&velocity)?),
            false => report.leave_out(&format!("{name}.velocity_bf16"), "the reference's bf16 run; this one is f32"),
        }
    }
    Ok(())
}

/// Compares values and gradients with an adapter of every linear layer of the blocks.
fn trained_lora(case: &Case, report: &mut Report, config: &Config, weights: &StateDict, samples: &Samples) -> Outcome {
    let lora = case.tensors("lora.safetensors")?;
    let own_state: StateDict = lora.iter().map(|(key, tensor)| (own_name(key), tensor.clone())).collect();
    let mut targets: Vec<String> =
        own_state.keys().filter_map(|key| Some(key.split(".lora_").next()?.to_string())).collect();
    targets.dedup();
    let mut dit = network(case, config, weights)?;
    let trainable = Trainable::Lora { rank: config.lora.r, alpha: config.lora.alpha, targets };
    dit.add_trainable(&trainable, &Noise::new(0), &StateDict::new())?;
    let parameters = dit.parameters().ok_or("no parameters")?;
    parameters.write(&roll_core::flat::from_state(parameters.specs(), &own_state)?)?;
    let (velocity, pullback) = dit.velocities(&samples.inputs(), Adapter::On, Grad::Record)?;
    let name = format!("{}.lora", samples.name);
    report.compare(&format!("{name}.velocity"), &without_frames(&velocity)?);
    let d_latents = pullback.ok_or("no pullback")?.pull(&samples.cotangent)?;
    report.compare(&format!("{name}.grad_latents"), &without_frames(&d_latents)?);
    for (parameter, gradient) in gradients(&dit)? {
        report.compare(&format!("{name}.grad.{}", crate::dit::peft_name(&parameter)), &gradient);
    }
    Ok(())
}

/// Checks that a single file of these weights has the bits of the checkpoint.
fn single_file(case: &Case, report: &mut Report, weights: &StateDict) -> Outcome {
    let map: BTreeMap<String, Vec<String>> = serde_json::from_slice(&std::fs::read(case.dir.join("key_map.json"))?)?;
    let mut single = StateDict::new();
    for (key, parts) in &map {
        let rows: usize = parts.iter().map(|part| weights[part].shape()[0]).sum();
        let shape = [&[rows], &weights[&parts[0]].shape()[1..]].concat();
        let values: Vec<f32> = parts.iter().flat_map(|part| weights[part].to_f32_vec()).collect();
        single.insert(format!("model.diffusion_model.{key}"), Tensor::new(values, shape)?);
    }
    let restored = keys::to_checkpoint(single)?;
    let is_same = restored.len() == weights.len()
        && weights.iter().all(|(key, tensor)| {
            restored
                .get(key)
                .is_some_and(|found| found.shape() == tensor.shape() && found.as_bytes() == tensor.as_bytes())
        });
    report.check(is_same, || "the weights of a single file differ from those of the checkpoint".into());
    Ok(())
}

/// The network in the case's dtype, on its device.
fn network(case: &Case, config: &Config, weights: &StateDict) -> Outcome<Dit> {
    let dtype = case.setting.dtype;
    Ok(Dit::new(weights, Some(config.model.axes_dims), dtype, case.device())?
        .with_settings(PassSettings { products: dtype, ..PassSettings::default() }))
}

/// Opens a LoRA file.
fn opened(path: &Path) -> Outcome<OpenedAdapter> {
    let file = LoraFile::open(path)?;
    Ok(OpenedAdapter {
        path: path.into(),
        expert: None,
        expert_from_file_name: false,
        strength: 1.0,
        header: file.metadata.clone(),
        weights: AdapterWeights::Lora(file.one(None)?),
    })
}

fn gradients(dit: &Dit) -> Outcome<StateDict> {
    let parameters = dit.parameters().ok_or("no parameters")?;
    let mut flat = vec![0.0; parameters.specs().iter().map(|spec| spec.len()).sum()];
    parameters.take_gradients(&mut flat)?;
    Ok(roll_core::flat::to_state(parameters.specs(), &flat)?)
}

/// `[B, C, H, W]` to `[B, C, 1, H, W]`.
fn with_frames(pictures: &Tensor) -> Outcome<Tensor> {
    let [b, c, h, w] = *pictures.shape() else { return Err("expected [B, C, H, W]".into()) };
    Ok(pictures.reshape([b, c, 1, h, w])?)
}

/// `[B, C, 1, H, W]` to `[B, C, H, W]`.
fn without_frames(videos: &Tensor) -> Outcome<Tensor> {
    let [b, c, 1, h, w] = *videos.shape() else { return Err("expected [B, C, 1, H, W]".into()) };
    Ok(videos.reshape([b, c, h, w])?)
}

/// Rows of each sample in the value `name`, which the reference stores as `expected`.
fn caption_lengths(samples: &Samples, name: &str, expected: &Tensor) -> Outcome<Vec<usize>> {
    let [_, longest, _] = *expected.shape() else { return Ok(vec![1; samples.latents.len()]) };
    let captions: Vec<usize> =
        samples.conditionings.iter().map(|c| c.context.shape()[0].next_multiple_of(32)).collect();
    let longest_caption = captions.iter().copied().max().ok_or("no sample")?;
    let lengths = |beside_caption: usize| captions.iter().map(|length| beside_caption + length).collect();
    Ok(match name.split(['.', '_']).next() {
        Some("caption" | "context") => lengths(0),
        Some("image" | "noise") => vec![longest; captions.len()],
        _ => lengths(longest - longest_caption),
    })
}

/// The rows of several samples, each filled with zeros to the longest.
fn padded(rows: &Tensor, lengths: &[usize], shape: &[usize]) -> Outcome<Tensor> {
    let [samples, longest, width] = *shape else { return Ok(rows.reshape(shape)?) };
    let source = rows.to_f32_vec();
    let (mut start, mut values) = (0, Vec::new());
    for length in lengths {
        values.extend_from_slice(source.get(start * width..(start + length) * width).ok_or("too few rows")?);
        values.resize(values.len() + (longest - length) * width, 0.0);
        start += length;
    }
    Ok(Tensor::new(values, [samples, longest, width])?)
}
