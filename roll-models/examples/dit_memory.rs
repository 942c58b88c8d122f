//! Peak memory of a transformer step with pull, beyond its weights, for a number of layers.
//!
//!     cargo run --release -p roll-models --example dit_memory -- 2
//!     cargo run --release -p roll-models --example dit_memory -- 8

use burn::tensor::DType;
use roll_backends::Memory;
use roll_core::{Adapter, Conditioning, Error, Grad, Noise, Purpose, Result, StateDict, Tensor, Timestep};
use roll_models::wan2_2::dit::{Dit, DitConfig, Trainable};

fn main() -> Result<()> {
    let layers = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(2);
    let hold = std::env::args().nth(2).is_some_and(|a| a == "hold");
    let config = DitConfig {
        dim: 512,
        in_channels: 16,
        out_channels: 16,
        patch: [1, 2, 2],
        text_dim: 512,
        freq_dim: 256,
        ffn_dim: 2048,
        layers,
        heads: 4,
        image_dim: None,
    };
    let noise = Noise::new(0);
    let device = roll_backends::device("flex")?;
    let mut weights = StateDict::new();
    for (i, (name, shape)) in config.weights().into_iter().enumerate() {
        let scale = if shape.len() == 2 { 1.0 / (shape[1] as f32).sqrt() } else { 0.1 };
        let values = noise.normal(Purpose::Synthetic, 0, i as u64, &shape)?.to_f32_vec();
        weights.insert(name, Tensor::new(values.into_iter().map(|v| v * scale).collect(), shape)?);
    }
    let mut dit = Dit::new(&weights, Some(config.heads), DType::F32, &device)?;
    drop(weights);
    if hold {
        dit = dit.with_memory(Memory::Hold);
    }
    let targets = ["q", "k", "v", "o", "ffn.0", "ffn.2"].map(String::from).to_vec();
    dit.train(&Trainable::Lora { rank: 16, alpha: 16.0, targets }, &noise, &StateDict::new())?;
    let shape = [16, 4, 64, 64];
    let latents = noise.normal(Purpose::Synthetic, 1, 0, &shape)?;
    let conditioning = Conditioning {
        context: noise.normal(Purpose::Synthetic, 1, 1, &[512, config.text_dim])?,
        channels: None,
        image_tokens: None,
        first_frame: None,
        latent_shape: shape,
    };
    // Writing 5 there resets the peak, so that what follows is the step alone.
    std::fs::write("/proc/self/clear_refs", "5").map_err(Error::file("write", "/proc/self/clear_refs"))?;
    let before = status("VmRSS")?;
    let start = std::time::Instant::now();
    let (_, pullback) = dit.velocity(&latents, Timestep(500.0), &conditioning, Adapter::On, Grad::Record)?;
    if let Some(pullback) = pullback {
        pullback.pull(&latents)?;
    }
    let peak = status("VmHWM")?;
    println!(
        "{layers} layers, 4096 tokens of width 512{}: weights and process {before:.0} MiB, peak {peak:.0} MiB, \
         step alone {:.0} MiB, {:.1} s",
        if hold { ", every activation held" } else { "" },
        peak - before,
        start.elapsed().as_secs_f64()
    );
    Ok(())
}

/// A line of /proc/self/status, in MiB.
fn status(key: &str) -> Result<f64> {
    let path = "/proc/self/status";
    let text = std::fs::read_to_string(path).map_err(Error::file("read", path))?;
    let line = text.lines().find(|l| l.starts_with(key));
    let kib = line.and_then(|l| l.split_whitespace().nth(1)).and_then(|v| v.parse::<f64>().ok());
    kib.map(|k| k / 1024.0).ok_or_else(|| Error::bad_file(path, format!("no line {key}")))
}
