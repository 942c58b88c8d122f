//! Seconds of Z-Image at its real widths: a pass through the transformer with its pullback, and a decode with its
//! pullback.
//!
//! ```sh
//! cargo run --release --bin zimage_speed -- [SIDE [LAYERS]]
//! ```
//!
//! The transformer has LAYERS joint blocks (1) and one refiner of each kind, random weights in f32, a LoRA of rank 32 on
//! the linear layers of its blocks, a picture of SIDE x SIDE pixels (512) and a caption of 64 tokens. The decoder is the
//! published one, for a picture of half that side. Blocks are computed again in the pullback; `transformer_held` is a pass
//! that holds every activation instead. Prints a line of JSON: for each, seconds by the clock and of all cores, the least
//! of three. `zimage_speed.py` runs it beside diffusers.

use std::time::Instant;

use burn_tensor::DType;
use roll_backends::Memory;
use roll_core::{
    Adapter, Conditioning, Error, Grad, Noise, ParameterSpec, Pullback, Result, Sigma, StateDict, Tensor, VelocityInput,
};
use roll_network::trainable::Trainable;
use roll_z_image::dit::{Dit, DitConfig, PassMemory};
use roll_z_image::vae::{Vae, VaeConfig};

const ROUNDS: usize = 3;
const RANK: usize = 32;
const CAPTION: usize = 64;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<usize>().ok());
    let mut number = |default: usize| arguments.next().flatten().unwrap_or(default);
    let (side, layers) = (number(512), number(1));
    let [recomputed, held] = transformer_seconds(side, layers)?;
    let decode = decoder_seconds(side / 2)?;
    println!(
        "{}",
        serde_json::json!({
            "side": side, "layers": layers, "threads": rayon::current_num_threads(),
            "seconds": { "transformer": recomputed, "transformer_held": held, "decode": decode },
        })
    );
    Ok(())
}

/// A pass of the transformer with its pullback, whose blocks are computed again, or which holds every activation.
fn transformer_seconds(side: usize, layers: usize) -> Result<[[f64; 2]; 2]> {
    let config = DitConfig {
        dim: 3840,
        channels: 16,
        text_dim: 2560,
        freq_dim: 256,
        time_dim: 1024,
        modulation_dim: 256,
        ffn_dim: 10240,
        layers,
        noise_refiners: 1,
        context_refiners: 1,
        heads: 30,
        axes: [32, 48, 48],
    };
    let state = random_state(config.weights())?;
    let mut dit = Dit::new(&state, Some(config.axes), DType::F32, &roll_backends::device("flex")?)?;
    drop(state);
    let targets = ["to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3"];
    let targets = targets.map(Into::into).to_vec();
    let lora = Trainable::Lora { rank: RANK, alpha: RANK as f64, targets };
    dit.add_trainable(&lora, &Noise::new(1), &StateDict::new())?;
    let parameters = dit.parameters().ok_or_else(|| Error::Misuse("nothing is trained".into()))?;
    let mut gradient = vec![0.0; parameters.specs().iter().map(ParameterSpec::len).sum()];

    let latent_shape = [config.channels, 1, side / 8, side / 8];
    let latents = random(&latent_shape, 1.0, &mut 3)?;
    let context = random(&[CAPTION, config.text_dim], 1.0, &mut 5)?;
    let conditioning = Conditioning { context, channels: None, image_tokens: None, first_frame: None, latent_shape };
    let mut seconds = |memory: Memory| {
        least_of_rounds(|| {
            let kept = PassMemory { memory, keeps_attention: false };
            let input =
                VelocityInput { latents: &latents, timestep: Sigma(0.5).timestep(), conditioning: &conditioning };
            let (velocity, pullback) = dit.velocity_keeping(input, Adapter::On, Grad::Record, kept)?;
            pull(pullback, &velocity)?;
            parameters.take_gradients(&mut gradient).map(drop)
        })
    };
    Ok([seconds(Memory::Recompute)?, seconds(Memory::Hold)?])
}

/// A decode of the published decoder with its pullback.
fn decoder_seconds(side: usize) -> Result<[f64; 2]> {
    let config = VaeConfig::default();
    let vae = Vae::new(config.clone(), &config.random_state(1)?, &roll_backends::device("flex")?)?;
    let stride = config.spatial_stride();
    let latents = random(&[config.latent_channels, 1, side / stride, side / stride], 1.0, &mut 7)?;
    least_of_rounds(|| {
        let (picture, pullback) = vae.decode(&latents, Grad::Record)?;
        pull(pullback, &picture)
    })
}

/// Pulls a cotangent of ones back to the input.
fn pull(pullback: Option<Pullback>, output: &Tensor) -> Result<()> {
    let pullback = pullback.ok_or_else(|| Error::Misuse("no pullback".into()))?;
    pullback.pull(&Tensor::full(output.shape(), 1.0)).map(drop)
}

/// Seconds by the clock and of all cores, the least of some passes.
fn least_of_rounds(mut pass: impl FnMut() -> Result<()>) -> Result<[f64; 2]> {
    let mut seconds = [f64::INFINITY; 2];
    for _ in 0..ROUNDS {
        let (begun, cores) = (Instant::now(), core_seconds());
        pass()?;
        let found = [begun.elapsed().as_secs_f64(), core_seconds() - cores];
        seconds = std::array::from_fn(|i| seconds[i].min(found[i]));
    }
    Ok(seconds)
}

/// Time that all threads of this process had on a processor, as Linux counts it in hundredths of a second.
fn core_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// Random weights: gains near one, biases near zero, matrices that keep the size of values.
fn random_state(weights: Vec<(String, Vec<usize>)>) -> Result<StateDict> {
    let mut seed = 1;
    let mut state = StateDict::new();
    for (name, shape) in weights {
        let value = match shape[..] {
            [n] if name.contains("norm") || name == "cap_embedder.0.weight" => Tensor::full([n], 1.0),
            [n] => Tensor::full([n], 0.0),
            _ => random(&shape, (1.0 / *shape.last().unwrap_or(&1) as f64).sqrt(), &mut seed)?,
        };
        state.insert(name, value);
    }
    Ok(state)
}

/// Uniform values with this standard deviation, by a linear congruential generator (Knuth's MMIX).
fn random(shape: &[usize], deviation: f64, seed: &mut u64) -> Result<Tensor> {
    let mut draw = || {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (((*seed >> 40) as f64 / f64::from(1u32 << 23) - 1.0) * 3f64.sqrt() * deviation) as f32
    };
    Tensor::new((0..shape.iter().product()).map(|_| draw()).collect::<Vec<f32>>(), shape)
}
