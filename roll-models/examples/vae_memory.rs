//! Peak memory and time of VAE decode and its pull, with random weights.
//!
//! `cargo run --release --example vae_memory -- [--dim 96] [--frames 17] [--size 128] [--checkpoints 4]
//! [--version 2.1|2.2] [--skip-pull]`, each number in a process of its own, since the peak is the process's.

use std::time::Instant;

use roll_core::{Error, Grad, Noise, Purpose, Result};
use roll_models::wan2_2::vae::{Chunking, Vae, VaeConfig, VaeVersion};

fn main() -> Result<()> {
    let dim = option("--dim", 96)?;
    let frames = option("--frames", 17)?;
    let size = option("--size", 128)?;
    let checkpoints = option("--checkpoints", Chunking::default().checkpoints)?;
    let pull = !std::env::args().any(|a| a == "--skip-pull");
    let (version, z_dim) = match value("--version").as_deref() {
        None | Some("2.1") => (VaeVersion::V2_1, 16),
        Some("2.2") => (VaeVersion::V2_2, 48),
        Some(other) => return Err(Error::config("--version", format!("expected 2.1 or 2.2, found {other}"))),
    };
    let config = VaeConfig {
        version,
        // The encoder takes no part: a narrow one leaves the decoder's figures alone.
        encoder_dim: 8,
        decoder_dim: dim,
        z_dim,
        dim_mult: vec![1, 2, 4, 4],
        num_res_blocks: 2,
        temporal_downsample: vec![false, true, true],
    };
    let state = config.random_state(1)?;
    let vae = Vae::load(&state, &roll_backends::device("flex")?)?;
    drop(state);
    let loaded = peak_mib();
    let facts = vae.facts();
    let [h, w] = facts.latent_size([size, size])?;
    let shape = [facts.z_channels, facts.latent_frames(frames)?, h, w];
    let latents = Noise::new(2).normal(Purpose::Latents, 0, 0, &shape)?;
    let chunking = Chunking { checkpoints, ..Chunking::default() };
    let grad = if pull { Grad::Record } else { Grad::Skip };
    let begin = Instant::now();
    let decoded = vae.decode_clamped(&latents, &chunking, grad)?;
    let decode = begin.elapsed().as_secs_f64();
    let begin = Instant::now();
    if let Some(pullback) = decoded.pullback {
        pullback.pull(&decoded.frames)?;
    }
    let pulled = begin.elapsed().as_secs_f64();
    println!(
        "frames {frames} size {size} dim {dim} checkpoints {checkpoints}: decode {decode:.2} s, pull {pulled:.2} s, \
         peak RSS {:.0} MiB (after loading {loaded:.0} MiB)",
        peak_mib()
    );
    Ok(())
}

/// Peak resident set of this process; 0 where the system does not say.
fn peak_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok()).unwrap_or(0.0) / 1024.0
}

fn value(name: &str) -> Option<String> {
    std::env::args().skip_while(|a| a != name).nth(1)
}

fn option(name: &str, default: usize) -> Result<usize> {
    match value(name) {
        None => Ok(default),
        Some(text) => text.parse().map_err(|e| Error::config(name, format!("expected a number, found {text}: {e}"))),
    }
}
