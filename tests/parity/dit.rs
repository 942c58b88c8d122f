//! The transformer: values, intermediates, and gradients of latents, base weights and LoRA.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use roll_core::{Adapter, Conditioning, Grad, Noise, ParameterSpec, StateDict, Tensor, Timestep};
use roll_wan::dit::{Dit, Grid, PassSettings, Trainable, embed, rotary_tables};
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};

#[derive(Deserialize)]
struct Config {
    model: Model,
    lora: Lora,
    timestep: f64,
}

#[derive(Deserialize)]
pub struct Model {
    pub num_heads: usize,
    #[serde(default)]
    pub seperated_timestep: bool,
}

#[derive(Deserialize)]
pub struct Lora {
    pub r: usize,
    pub alpha: f64,
}

pub fn run(case: &Case) -> Outcome<Report> {
    let config: Config = case.config()?;
    let mut report = case.expected("outputs.safetensors")?;
    let inputs = case.tensors("inputs.safetensors")?;
    let weights = case.tensors("weights.safetensors")?;
    let lora = case.tensors("lora.safetensors")?;
    let latents = unbatched(&inputs["latents"])?;
    let shape = latents.shape();
    let conditioning = Conditioning {
        context: unbatched(&inputs["context"])?,
        channels: inputs.get("y").map(unbatched).transpose()?,
        image_tokens: None,
        // Only its presence matters here: the tokens of the first frame have timestep zero.
        first_frame: config.model.seperated_timestep.then(|| Tensor::zeros([shape[0], 1, shape[2], shape[3]])),
        latent_shape: [shape[0], shape[1], shape[2], shape[3]],
    };
    let timestep = Timestep(config.timestep);
    let cotangent = unbatched(&inputs["g"])?;

    // Base weights, all trained, with every inner value.
    let seen: Arc<Mutex<BTreeMap<String, Tensor>>> = Arc::default();
    let sink = seen.clone();
    let mut dit = network(&weights, &config.model, case)?.with_probe(Arc::new(
        move |name: &str, value: &burn_tensor::Tensor<2>| {
            if let (Ok(value), Ok(mut seen)) = (roll_backends::to_host(value.clone()), sink.lock()) {
                seen.entry(name.into()).or_insert(value);
            }
        },
    ));
    dit.add_trainable(&Trainable::Full, &Noise::new(0), &weights)?;
    let (velocity, pullback) = dit.velocity(&latents, timestep, &conditioning, Adapter::On, Grad::Record)?;
    report.compare("velocity", &velocity);
    report.compare("grad_latents", &pullback.ok_or("no pullback")?.pull(&cotangent)?);
    for (name, gradient) in gradients(&dit)? {
        let name = format!("grad_w.{name}");
        if report.get(&name).is_ok() {
            report.compare(&name, &gradient);
        }
    }
    let seen = seen.lock().map_err(|_| "a probe panicked")?.clone();
    let grid = Grid::new(shape, dit.config().patch)?;
    report.compare("patch_emb", &channels_first(&seen["patch_embedding"], &grid)?);
    report.compare("block0_self_attn_out", &seen["blocks.0.self_attn"]);
    report.compare("block0_cross_attn_out", &seen["blocks.0.cross_attn"]);
    report.compare("block0_out", &seen["blocks.0"]);
    report.compare("head_out", &seen["head"]);
    let (cos, sin) = rotary_tables(&grid, dit.config().head_dim())?;
    report.compare("rope_cos", &cos);
    report.compare("rope_sin", &sin);
    embeddings(&mut report, &dit, &weights, &config, &conditioning, &grid, case)?;
    match case.setting.is_narrow() {
        true => report.compare("velocity_bf16_original_casts", &velocity),
        false => report.leave_out("velocity_bf16_original_casts", "the reference's bf16 run; this one is f32"),
    }

    // LoRA.
    let mut dit = network(&weights, &config.model, case)?;
    attach_lora(&mut dit, &lora, &config.lora)?;
    let (velocity, pullback) = dit.velocity(&latents, timestep, &conditioning, Adapter::On, Grad::Record)?;
    report.compare("lora.velocity", &velocity);
    report.compare("lora.grad_latents", &pullback.ok_or("no pullback")?.pull(&cotangent)?);
    for (name, gradient) in gradients(&dit)? {
        report.compare(&format!("lora.grad.{}", peft_name(&name)), &gradient);
    }
    Ok(report)
}

fn embeddings(
    report: &mut Report,
    dit: &Dit,
    weights: &StateDict,
    config: &Config,
    conditioning: &Conditioning,
    grid: &Grid,
    case: &Case,
) -> Outcome {
    let device = case.device();
    let resident = roll_backends::Resident::new(weights, case.setting.dtype, device);
    let weights = roll_backends::WeightStore::segment(&resident, "")?;
    let tape = roll_backends::Tape::off();
    // As in a pass, whatever its products are taken in.
    let products = burn_tensor::DType::F32;
    let scope =
        roll_backends::Scope { weights: &weights, trainable: None, lora_scale: 1.0, tape: &tape, products, fp8: false };
    let known = if config.model.seperated_timestep { grid.tokens_per_frame() } else { 0 };
    let timesteps: Vec<_> = match known {
        0 => vec![Timestep(config.timestep)],
        _ => (0..grid.tokens()).map(|i| Timestep(if i < known { 0.0 } else { config.timestep })).collect(),
    };
    let sinusoid = embed::sinusoid(&timesteps, dit.config().freq_dim, device);
    let (t, modulation) = embed::time(&scope, sinusoid)?;
    report.compare("t", &roll_backends::to_host(t)?);
    let dim = dit.config().dim;
    let modulation = roll_backends::to_host(modulation)?;
    report.compare("t_mod", &modulation.reshape([modulation.shape()[0], 6, dim])?);
    let context = roll_backends::to_device::<2>(&conditioning.context, device)?;
    report.compare("context_emb", &roll_backends::to_host(embed::text(&scope, context)?)?);
    Ok(())
}

/// The network in the case's dtype, on its device.
pub fn network(weights: &StateDict, model: &Model, case: &Case) -> Outcome<Dit> {
    let dtype = case.setting.dtype;
    Ok(Dit::new(weights, Some(model.num_heads), dtype, case.device())?
        .with_settings(PassSettings { products: dtype, ..PassSettings::default() }))
}

/// Without the batch axis, which must have length one.
pub fn unbatched(tensor: &Tensor) -> Outcome<Tensor> {
    match tensor.shape().split_first() {
        Some((1, rest)) => Ok(tensor.reshape(rest)?),
        _ => Err(format!("expected a batch of one, found {:?}", tensor.shape()).into()),
    }
}

/// The adapter of the case, under this project's names.
pub fn attach_lora(dit: &mut Dit, lora: &StateDict, config: &Lora) -> Outcome {
    let mut targets: Vec<String> = lora
        .keys()
        .filter_map(|k| k.split(".lora_").next()?.strip_prefix("base_model.model."))
        .map(str::to_string)
        .collect();
    targets.dedup();
    let trainable = Trainable::Lora { rank: config.r, alpha: config.alpha, targets };
    dit.add_trainable(&trainable, &Noise::new(0), &StateDict::new())?;
    let parameters = dit.parameters().ok_or("no parameters")?;
    let state = lora.iter().map(|(k, t)| (own_name(k), t.clone())).collect();
    parameters.write(&roll_core::flat::from_state(parameters.specs(), &state)?)?;
    Ok(())
}

/// This project's name of a PEFT tensor.
pub fn own_name(peft: &str) -> String {
    peft.trim_start_matches("base_model.model.").replace(".default.weight", ".weight")
}

/// The PEFT name of one of this project's parameters.
pub fn peft_name(own: &str) -> String {
    format!("base_model.model.{}", own.replace(".weight", ".default.weight"))
}

fn gradients(dit: &Dit) -> Outcome<StateDict> {
    let parameters = dit.parameters().ok_or("no parameters")?;
    let mut flat = vec![0.0; parameters.specs().iter().map(ParameterSpec::len).sum()];
    parameters.take_gradients(&mut flat)?;
    Ok(roll_core::flat::to_state(parameters.specs(), &flat)?)
}

/// `[tokens, C]` to `[C, T, H, W]` of patches.
fn channels_first(tokens: &Tensor, grid: &Grid) -> Outcome<Tensor> {
    let (n, c) = (tokens.shape()[0], tokens.shape()[1]);
    let values = tokens.f32s()?;
    let turned = (0..c).flat_map(|i| (0..n).map(move |j| values[j * c + i])).collect::<Vec<_>>();
    let [t, h, w] = grid.patches;
    Ok(Tensor::new(turned, [c, t, h, w])?)
}
