//! `demo-world vae`: a small VAE with the architecture of Wan2.1's, trained on the faces of the demo world.

mod initial;
mod loss;
mod moments;
mod samples;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use burn_tensor::{Device, Tensor};
use roll_backends::{Resident, Scope};
use roll_core::{Error, ParameterSpec, Result, StateDict};
use roll_wan::vae::{LatentStatistics, Vae, VaeConfig};
use roll_network::weights::{Checkpoint, save_safetensors};

use crate::training::batches::for_each_batch;
use crate::training::{Plan, Trainer, upload};
use moments::Moments;
use samples::{Curriculum, Part, Stage};

/// File below the output directory, with the name of Wan2.1's VAE.
pub const FILE: &str = "Wan2.1_VAE.safetensors";
/// Height and width of the frames.
pub const SIDE: usize = 64;
/// Frames of a clip.
pub const FRAMES: usize = 9;
/// Channels of the latents.
const CHANNELS: usize = 16;
/// Standard deviation of the noise that is added to latents before decoding in training, because a diffusion model's
/// latents are not exact either.
const NOISE: f32 = 0.1;

/// Returns the configuration: a sixth of the published network's width, half its depth, otherwise the same.
pub fn config() -> VaeConfig {
    VaeConfig { encoder_dim: 16, decoder_dim: 16, num_res_blocks: 1, ..VaeConfig::wan2_1() }
}

/// A part of the training with its own learning rate schedule. Each round continues from the weights of the previous
/// one.
#[derive(Clone, Copy, Debug)]
struct Round {
    steps: u64,
    learning_rate: f64,
    /// Weight of the squared error relative to the absolute error.
    squared: f32,
    curriculum: Curriculum,
}

/// Crops of clips, and whole clips at the end.
const CLIPS: Curriculum = Curriculum { stills: 0.0, details: 0.97, anywhere: 0.25 };

/// The first round teaches eyes and mouths, mostly on single pictures. The other rounds teach motion and the rest of
/// the picture.
const ROUNDS: [Round; 4] = [
    Round {
        steps: 8000,
        learning_rate: 3e-3,
        squared: 0.5,
        curriculum: Curriculum { stills: 0.8, details: 0.98, anywhere: 0.0 },
    },
    Round { steps: 5000, learning_rate: 5e-4, squared: 4.0, curriculum: CLIPS },
    Round { steps: 2700, learning_rate: 4e-4, squared: 4.0, curriculum: CLIPS },
    Round {
        steps: 12000,
        learning_rate: 6e-4,
        squared: 32.0,
        curriculum: Curriculum { stills: 0.0, details: 0.9, anywhere: 0.5 },
    },
];

/// Trains the VAE and writes its file below `out`. `steps` overrides the number of updates of each round. With `from`,
/// training continues from that VAE and runs only the last round.
pub fn train(steps: Option<u64>, from: Option<&Path>, out: &Path) -> Result<()> {
    let device = roll_backends::device("flex")?;
    let (mut state, first) = match from {
        Some(path) => (Checkpoint::open(path)?.all()?, ROUNDS.len() - 1),
        None => (initial::state(&config(), 7)?, 0),
    };
    for round in first..ROUNDS.len() {
        state = train_round(round, state, steps, &device)?;
    }
    let path = out.join(FILE);
    std::fs::create_dir_all(out).map_err(Error::file("create the directory", out))?;
    save_safetensors(&path, &state, &Default::default())?;
    println!("wrote {}", path.display());
    Ok(())
}

/// Runs a round from the weights in `state` and returns its weights in bf16.
fn train_round(number: usize, state: StateDict, steps: Option<u64>, device: &Device) -> Result<StateDict> {
    let round = ROUNDS[number];
    // Each round draws other clips.
    let before: u64 = ROUNDS[..number].iter().map(|round| round.steps).sum();
    let plan = Plan {
        name: format!("vae, round {} of {}", number + 1, ROUNDS.len()),
        steps: steps.unwrap_or(round.steps),
        parts: 2,
        batch: 8,
        learning_rate: round.learning_rate,
        warmup: 100,
        weight_decay: 1e-4,
        // The resulting rate is 0.02 at a learning rate of 3e-3. Muon reaches in 300 updates the loss of 2000 updates
        // of AdamW.
        muon: Some(20.0 / 3.0),
        report_every: 50,
    };
    let Plan { steps, parts, batch, .. } = plan;
    let specs: Vec<_> =
        state.iter().map(|(key, t)| ParameterSpec { name: key.clone(), shape: t.shape().to_vec() }).collect();
    let values = state.values().flat_map(roll_core::Tensor::to_f32_vec).collect();
    let mut trainer = Trainer::new(plan, specs.clone(), values, device)?;
    let mut moments = Moments::new(CHANNELS);
    for_each_batch(
        steps,
        |step| Ok(round.curriculum.batch(step as f64 / steps as f64, before + step, parts, batch)),
        |samples| {
            let seen: Vec<_> = samples.iter().map(|_| Mutex::new(None)).collect();
            let numbered = samples.into_iter().enumerate().collect();
            trainer.update(numbered, |(i, part): (usize, Part), scope| {
                let (loss, latents) = reconstruct(part, round.squared, scope, &moments, device)?;
                *seen[i].lock().unwrap_or_else(PoisonError::into_inner) = Some(latents);
                Ok(loss)
            })?;
            // Moments are updated in the order of the parts, so that the result is reproducible.
            seen.into_iter().filter_map(|s| s.into_inner().ok().flatten()).for_each(|found| moments.update(&found));
            Ok(())
        },
    )?;
    let mut rest = trainer.values();
    specs
        .into_iter()
        .map(|spec| {
            let (values, tail) = rest.split_at(spec.len());
            rest = tail;
            let tensor = roll_core::Tensor::new(values.to_vec(), spec.shape)?;
            Ok((spec.name, tensor.to_float(roll_core::DType::Bf16)?))
        })
        .collect()
}

/// Returns the loss of a part of a batch, and the moments of its latents.
fn reconstruct(
    part: Part,
    squared: f32,
    scope: &Scope<'_>,
    moments: &Moments,
    device: &Device,
) -> Result<(Tensor<1>, Moments)> {
    let snapshot = scope.trainable.ok_or_else(|| Error::Misuse("a VAE is trained on no parameters".into()))?;
    let store = Arc::new(Resident::tracked(snapshot, scope.tape));
    let statistics = LatentStatistics::published(CHANNELS)
        .ok_or_else(|| Error::Unsupported(format!("no latent statistics are published for {CHANNELS} channels")))?;
    let vae = Vae::with_store(config(), &statistics, store)?;
    let frames = upload(part.frames, part.shape, device).autodiff();
    let latents = match part.stage {
        Stage::Stills => vae.encode_stills(frames.clone())?,
        Stage::Clips | Stage::WholeClips => vae.encode_recorded(frames.clone())?,
    };
    let shape = latents.dims();
    let count = shape.iter().product();
    let noise = upload(samples::noise(part.seed, count, NOISE), shape, device).autodiff();
    let noisy = latents.clone() + noise;
    let decoded = match part.stage {
        Stage::Stills => vae.decode_stills(noisy)?,
        Stage::Clips | Stage::WholeClips => vae.decode_recorded(noisy)?,
    };
    let found = Moments::of(&roll_backends::to_host(latents.clone())?)?;
    let loss = loss::reconstruction(decoded, frames, squared) + loss::latents(latents, moments, device);
    Ok((loss, found))
}
