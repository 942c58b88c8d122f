//! The Wan2.2 VAE: encode, decode and its gradient.

use roll_core::Grad;
use roll_wan::vae::{Chunking, Vae};

use crate::case::{Case, Outcome, Report};
use crate::dit::unbatched;
use crate::vae21::{channels_first, head, statistics, video};

pub fn run(case: &Case) -> Outcome<Report> {
    let mut report = case.expected("outputs.safetensors")?;
    let inputs = case.tensors("inputs.safetensors")?;
    let weights = case.tensors("weights.safetensors")?;
    let vae = Vae::load_with_statistics(&weights, &statistics(&inputs)?, case.device())?
        .with_decoder_dtype(case.setting.dtype)?;
    let frames = video(&inputs["video"])?;
    report.compare("encode", &vae.encode(&frames)?);
    report.compare("encode_single_frame", &vae.encode(&head(&frames, 1)?)?);
    let (frames, pullback) = vae.decode(&unbatched(&inputs["latent"])?, &Chunking::default(), Grad::Record)?;
    report.compare("decode", &channels_first(&frames)?);
    let gradient = pullback.ok_or("no pullback")?.pull(&video(&inputs["g_video"])?)?;
    report.compare("decode_grad_latent", &gradient);
    Ok(report)
}
