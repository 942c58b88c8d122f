//! Conditions of image-to-video models.

use roll_core::Tensor;
use roll_wan::conditioning::{first_frame_latents, image_channels};
use roll_wan::vae::{Chunking, Vae};
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};
use crate::dit::unbatched;

#[derive(Deserialize)]
struct Config {
    frames: usize,
}

pub fn run(case: &Case) -> Outcome<Report> {
    let Config { frames } = case.config()?;
    let mut report = case.expected("outputs.safetensors")?;
    let inputs = case.tensors("inputs.safetensors")?;
    let device = case.device();
    let vae = |neighbour: &str| -> Outcome<Vae> {
        Ok(Vae::load(&case.tensors(&format!("../{neighbour}/weights.safetensors"))?, device)?)
    };
    let chunking = Chunking::default();
    let image = unbatched(&inputs["image"])?;
    let end_image = unbatched(&inputs["end_image"])?;
    let vae21 = vae("vae21_tiny")?;
    report.compare("y", &image_channels(&vae21, &image, None, frames, &chunking)?);
    report.compare("y_with_end_image", &image_channels(&vae21, &image, Some(&end_image), frames, &chunking)?);
    let first: Tensor = first_frame_latents(&vae("vae22_tiny")?, &image, &chunking)?;
    report.compare("ti2v_first_frame_latents", &first);
    report.compare("preprocessed_u8", &unit_pixels(&inputs["image_u8"])?);
    Ok(report)
}

/// Converts u8 pixels to f32 in [-1, 1].
fn unit_pixels(pixels: &Tensor) -> roll_core::Result<Tensor> {
    let values = pixels.as_slice::<u8>()?.iter().map(|&v| f32::from(v) / 127.5 - 1.0).collect::<Vec<f32>>();
    Tensor::new(values, pixels.shape())
}
