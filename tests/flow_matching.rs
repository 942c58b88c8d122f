//! Flow matching on small real networks: which weights it trains, that it lowers the loss, and that its files can be
//! used.

use std::path::Path;
use std::sync::Arc;

use roll_backends::strategy::{SingleOptions, single};
use roll_core::{
    Adapter, Algorithm, BuildContext, ConditionInput, Conditioning, Grad, Model, Noise, OptimizerConfig, Purpose,
    Sample, SampleVideo, Silent, StepContext, Strategy, Tensor, Timestep, VelocityInput, Video,
};
use roll_video::flow_matching::{FlowMatching, FlowMatchingConfig};
use roll_wan::init_tiny::{WanKind, init_tiny};
use roll_wan::{Wan, WanOptions, loading};

use crate::world::{World, fails, stderr_text};

fn open(directory: &Path, kind: WanKind, lora_rank: usize) -> Wan {
    let files = init_tiny(directory, kind, 3).unwrap();
    let options = WanOptions {
        model_paths: Some(files.model_paths.into()),
        tokenizer_path: Some(files.tokenizer),
        trainable_models: Some(if kind == WanKind::Ti2v { "dit" } else { "dit2" }.into()),
        lora_rank: Some(lora_rank),
        ..WanOptions::default()
    };
    loading::open(&options, &BuildContext { seed: 1, ..BuildContext::new("flex") }).unwrap()
}

fn values(key: u64, n: usize) -> Vec<f32> {
    let noise = Noise::new(key);
    noise.normal(Purpose::Synthetic, 0, 0, &[n]).unwrap().to_f32_vec()
}

fn clip(frames: usize, side: usize) -> Video {
    let smooth = |i: usize| (i as f32 * 0.01).sin() * 0.8;
    let pixels = (0..frames * 3 * side * side).map(smooth).collect::<Vec<f32>>();
    Video::new(Tensor::new(pixels, [frames, 3, side, side]).unwrap(), 8.0).unwrap()
}

fn conditioning(model: &mut Wan, prompt: &str, side: usize) -> Conditioning {
    let image = Some(Tensor::full([3, side, side], 0.2));
    let input = ConditionInput { prompt: prompt.into(), image, end_image: None, frames: 5, size: [side, side] };
    model.as_diffusion().unwrap().encode(&input).unwrap()
}

/// Velocity, cotangent of the latents and parameter gradients at the cotangent `d`.
fn pulled(model: &mut Wan, inputs: &[VelocityInput<'_>], d: &Tensor) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let (v, pullback) = model.as_diffusion().unwrap().velocities(inputs, Adapter::On, Grad::Record).unwrap();
    let d_x = pullback.unwrap().pull(d).unwrap();
    let mut gradients = vec![0.0; model.parameter_count()];
    model.take_gradients(&mut gradients).unwrap();
    (v.to_f32_vec(), d_x.to_f32_vec(), gradients)
}

fn assert_close(what: &str, a: &[f32], b: &[f32]) {
    let scale = b.iter().map(|b| b.abs()).fold(0.0, f32::max);
    assert!(scale > 0.0 && a.len() == b.len(), "{what}");
    assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-4 * scale), "{what}");
}

#[test]
fn batched_velocities_equal_single_ones() {
    // Two experts and conditioning channels; one expert and a known first frame.
    for (kind, side) in [(WanKind::I2v, 32), (WanKind::Ti2v, 64)] {
        let dir = tempfile::tempdir().unwrap();
        let mut model = open(dir.path(), kind, 0);
        let conditionings = ["a man", "a woman laughs", ""].map(|prompt| conditioning(&mut model, prompt, side));
        let shape = conditionings[0].latent_shape;
        let n: usize = shape.iter().product();
        let latents = [1, 2, 3].map(|key| Tensor::new(values(key, n), shape).unwrap());
        let timesteps = [Timestep(300.0), Timestep(950.0), Timestep(800.0)];
        let inputs: Vec<VelocityInput<'_>> = (0..3)
            .map(|i| VelocityInput { latents: &latents[i], timestep: timesteps[i], conditioning: &conditionings[i] })
            .collect();
        let d = Tensor::new(values(9, 3 * n), [&[3], shape.as_slice()].concat()).unwrap();
        let (v, d_x, gradients) = pulled(&mut model, &inputs, &d);
        let mut alone = (Vec::new(), Vec::new(), vec![0.0; gradients.len()]);
        for (input, d) in inputs.iter().zip(d.unstack().unwrap()) {
            let stacked = Tensor::stack(&[d]).unwrap();
            let (v, d_x, gradients) = pulled(&mut model, &[*input], &stacked);
            alone.0.extend(v);
            alone.1.extend(d_x);
            alone.2.iter_mut().zip(gradients).for_each(|(sum, g)| *sum += g);
        }
        assert_close("velocities", &v, &alone.0);
        assert_close("cotangents of the latents", &d_x, &alone.1);
        assert_close("gradients", &gradients, &alone.2);
    }
}

#[test]
fn full_training_gradients_match_finite_differences() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = open(dir.path(), WanKind::I2v, 0);
    let conditioning = conditioning(&mut model, "a face turns", 32);
    let shape = conditioning.latent_shape;
    let n: usize = shape.iter().product();
    let latents = Tensor::new(values(1, n), shape).unwrap();
    let input = VelocityInput { latents: &latents, timestep: Timestep(500.0), conditioning: &conditioning };
    let d = Tensor::new(values(2, n), [&[1], shape.as_slice()].concat()).unwrap();
    let (_, _, gradient) = pulled(&mut model, &[input], &d);

    let mut at = vec![0.0; gradient.len()];
    model.read_parameters(&mut at).unwrap();
    let specs = model.parameters().to_vec();
    let mut start = 0;
    for spec in &specs {
        let part = start..start + spec.len();
        start = part.end;
        let norm = gradient[part.clone()].iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        assert!(norm > 0.0, "{} has no gradient", spec.name);
        // One of each family is compared with differences along its own gradient.
        let checked = ["patch_embedding.", "text_embedding.0.w", "time_projection", "head.", "blocks.0.modulation"];
        let checked = checked.into_iter().chain(["blocks.1.norm3", "blocks.1.cross_attn.norm_k", "blocks.0.ffn.2.w"]);
        if !checked.into_iter().any(|name| spec.name.contains(name)) {
            continue;
        }
        let mut moved = |h: f64| {
            let mut values = at.clone();
            for i in part.clone() {
                values[i] += (h * f64::from(gradient[i]) / norm) as f32;
            }
            model.write_parameters(&values).unwrap();
            let (v, _) = model.as_diffusion().unwrap().velocities(&[input], Adapter::On, Grad::Skip).unwrap();
            v.f32s().unwrap().iter().zip(d.f32s().unwrap()).map(|(v, d)| f64::from(*v) * f64::from(*d)).sum::<f64>()
        };
        let h = 5e-3;
        let quotient = (moved(h) - moved(-h)) / (2.0 * h);
        assert!((quotient / norm - 1.0).abs() < 0.02, "{}: {quotient} instead of {norm}", spec.name);
    }
}

#[test]
fn lora_and_full_training_learn_a_clip() {
    for (lora_rank, rate) in [(4, 2e-2), (0, 1e-3)] {
        let dir = tempfile::tempdir().unwrap();
        let mut model = open(dir.path(), WanKind::I2v, lora_rank);
        let sample = Sample::new(0, "a clip", "a wave", SampleVideo::Clip(Arc::new(clip(5, 32))));
        let mut algorithm = FlowMatching::new(FlowMatchingConfig {
            draws_per_sample: 4,
            draws_at_once: 4,
            ..FlowMatchingConfig::default()
        });
        algorithm.check(&mut model, None).unwrap();
        let mut strategy = single(SingleOptions::default());
        strategy.attach(&mut model, &OptimizerConfig::default()).unwrap();
        let mut step = |step: u64, learning_rate: f64| {
            let mut context = StepContext {
                step,
                samples: std::slice::from_ref(&sample),
                model: &mut model,
                reward: None,
                strategy: &mut strategy,
                learning_rate,
                noise: &Noise::new(7),
                progress: &Silent,
                want_videos: false,
            };
            algorithm.step(&mut context).unwrap().metrics["actor/loss"]
        };
        let before = step(1000, 0.0);
        for i in 0..20 {
            step(i, rate);
        }
        let after = step(1000, 0.0);
        assert!(after < 0.9 * before, "rank {lora_rank}: from {before} to {after}");
    }
}

/// A small checkpoint and a moving clip.
fn world() -> World {
    let world = World::new(1);
    roll_media::write_mp4(world.path("0.mp4"), &clip(5, 64)).unwrap();
    world
}

/// Trains for three steps; returns the log.
fn train(world: &World, out: &str, settings: &[&str]) -> String {
    let base = ["algo.name=flow_matching", "training.learning_rate=1e-3", "algo.num_inference_steps=2"];
    let output = world.training(out, 3, &[&base[..], settings].concat()).output().unwrap();
    assert!(output.status.success(), "{}", stderr_text(&output));
    stderr_text(&output)
}

#[test]
fn flow_matching_needs_no_reward() {
    let world = world();
    let log = train(&world, "run", &["model.lora_rank=2", "algo.draws_per_sample=2"]);
    assert!(log.contains("step 3/3  loss ") && !log.contains("NaN") && !log.contains("score"), "{log}");
    for file in ["config.yaml", "metrics.jsonl", "summary.json", "checkpoints/step-000003/adapter.safetensors"] {
        assert!(world.path("run").join(file).exists(), "{file}");
    }
    assert!(world.path("run/samples/step-000003/sample-000000.mp4").exists());
    let metrics = std::fs::read_to_string(world.path("run/metrics.jsonl")).unwrap();
    let last: serde_json::Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    for name in ["actor/loss", "actor/grad_norm", "time/forward", "time/pull", "time/encode", "lr"] {
        assert!(last[name].is_f64(), "{name}: {last}");
    }
    // `dit2` is trained: only its noise levels, in quarters.
    let keys = last.as_object().unwrap().keys();
    let parts: Vec<&String> = keys.filter(|k| k.starts_with("loss/")).collect();
    let quarters = ["loss/0.000-0.225", "loss/0.225-0.450", "loss/0.450-0.675", "loss/0.675-0.900"];
    assert!(!parts.is_empty() && parts.iter().all(|k| quarters.contains(&k.as_str())), "{parts:?}");
}

#[test]
fn an_exported_expert_is_a_base() {
    let world = world();
    train(&world, "run", &["model.lora_rank=0", "sample_steps=0"]);
    let checkpoint = "run/checkpoints/step-000003";
    let export = |out: &str, dtype: &str| {
        let base = "tiny/low_noise_model";
        world.done(&["export-expert", checkpoint, "--base", base, "--out", out, "--dtype", dtype])
    };
    export("trained/low_noise_model", "f32");
    export("halved", "bf16");
    let size = |file: &str| std::fs::metadata(world.path(file)).unwrap().len();
    let (whole, half) =
        ("trained/low_noise_model/diffusion_pytorch_model.safetensors", "halved/diffusion_pytorch_model.safetensors");
    assert!(size(half) < size(whole) * 6 / 10);
    assert_ne!(
        std::fs::read(world.path(whole)).unwrap(),
        std::fs::read(world.path("tiny/low_noise_model/diffusion_pytorch_model.safetensors")).unwrap()
    );

    // Training goes on from either, beside the other networks of the checkpoint.
    for expert in [whole, half] {
        let list = std::fs::read_to_string(world.path("tiny/wan22_paths.json")).unwrap();
        let list = list.replace("low_noise_model/diffusion_pytorch_model.safetensors", &format!("../{expert}"));
        std::fs::write(world.path("tiny/next.json"), list).unwrap();
        let out = expert.replace('/', "-");
        train(&world, &out, &["model.model_paths=tiny/next.json", "sample_steps=0", "model.lora_rank=2"]);
    }

    let refused = world.roll(&["export-expert", "tiny", "--base", "tiny/low_noise_model", "--out", "x"]);
    fails(&refused, 2, &["lora_rank: 0"]);
}

#[test]
fn initialised_experts_train_with_their_prompt_length() {
    let world = world();
    world.done(&["init-experts", "own", "--dim", "32", "--heads", "2", "--layers", "1", "--text-dim", "32"]);
    for file in ["models_t5_umt5-xxl-enc-bf16.safetensors", "Wan2.1_VAE.safetensors"] {
        std::fs::copy(world.path("tiny").join(file), world.path("own").join(file)).unwrap();
    }
    let settings = ["model.model_paths=own/wan22_paths.json", "model.lora_rank=0", "model.trainable_models=dit,dit2"];
    train(&world, "run", &settings);
    for name in ["diffusion_pytorch_model_high_noise", "diffusion_pytorch_model_low_noise"] {
        assert!(world.path(&format!("run/checkpoints/step-000003/{name}.safetensors")).exists());
    }
    let config = std::fs::read_to_string(world.path("own/low_noise_model/config.json")).unwrap();
    assert!(config.contains("\"text_len\": 32"));
    std::fs::write(
        world.path("own/low_noise_model/config.json"),
        config.replace("\"text_len\": 32", "\"text_len\": 16"),
    )
    .unwrap();
    let output = world.training("refused", 3, &["algo.name=flow_matching", settings[0]]).output().unwrap();
    fails(&output, 2, &["text_len"]);
}
