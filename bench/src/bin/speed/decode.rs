//! VAE decode and pull with a decoder of the official width; PyTorch reads the same weights from a file.

use std::path::{Path, PathBuf};

use burn_tensor::Device;
use roll_core::{Grad, Tensor};
use roll_wan::vae::{Chunking, LatentStatistics, Vae, VaeConfig};

use super::{Failure, normal};

pub struct Fixture {
    vae: Vae,
    latents: Tensor,
    cotangent: Tensor,
    path: PathBuf,
}

impl Fixture {
    pub fn new(path: &Path, device: &Device) -> Result<Self, Failure> {
        let mut state = VaeConfig::wan2_1().random_state(0)?;
        let vae = Vae::load(&state, device)?;
        let latents = normal(1, &[16, 5, 16, 16], 1.0)?;
        let cotangent = normal(2, &[17, 3, 128, 128], 1.0)?;
        let LatentStatistics { mean, std } = LatentStatistics::published(16).ok_or("no statistics")?;
        // PyTorch holds frames as [3, T, H, W].
        let turned = turn(&cotangent)?;
        state.insert("bench.latents".into(), latents.clone());
        state.insert("bench.cotangent".into(), turned);
        state.insert("bench.mean".into(), Tensor::new(mean, [16])?);
        state.insert("bench.std".into(), Tensor::new(std, [16])?);
        roll_network::weights::save_safetensors(path, &state, &Default::default())?;
        Ok(Self { vae, latents, cotangent, path: path.to_path_buf() })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn run(&self) -> Result<f64, Failure> {
        let (_, pullback) = self.vae.decode_clamped(&self.latents, &Chunking::default(), Grad::Record)?;
        let gradient = pullback.ok_or("no pullback")?.pull(&self.cotangent)?;
        Ok(gradient.f32s()?.iter().map(|v| f64::from(v.abs())).sum())
    }
}

fn turn(frames: &Tensor) -> Result<Tensor, Failure> {
    let [t, c, h, w] = *frames.shape() else { return Err("frames are [T, 3, H, W]".into()) };
    let values = frames.f32s()?;
    let mut turned = Vec::with_capacity(values.len());
    for channel in 0..c {
        for frame in 0..t {
            turned.extend_from_slice(&values[(frame * c + channel) * h * w..][..h * w]);
        }
    }
    Ok(Tensor::new(turned, [c, t, h, w])?)
}
