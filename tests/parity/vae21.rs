//! The Wan2.1 VAE: encode and decode, in chunks and tiles, inner values, gradients.

use std::collections::BTreeMap;

use roll_core::{Grad, StateDict, Tensor};
use roll_wan::vae::{Chunking, LatentStatistics, Tiling, Vae, blend_mask};
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};
use crate::dit::unbatched;

#[derive(Deserialize)]
struct Config {
    tiled_decode: Tiles,
    tiled_encode: Tiles,
}

#[derive(Deserialize)]
struct Tiles {
    tile_size: [usize; 2],
    tile_stride: [usize; 2],
}

impl Tiles {
    fn chunking(&self) -> Chunking {
        let tiling = Tiling { size: self.tile_size, stride: self.tile_stride };
        Chunking { tiling: Some(tiling), ..Chunking::default() }
    }
}

pub fn run(case: &Case) -> Outcome<Report> {
    let config: Config = case.config()?;
    let mut report = case.expected("outputs.safetensors")?;
    let inputs = case.tensors("inputs.safetensors")?;
    let weights = case.tensors("weights.safetensors")?;
    let device = case.device();
    let vae =
        Vae::load_with_statistics(&weights, &statistics(&inputs)?, device)?.with_decoder_dtype(case.setting.dtype)?;
    let whole = Chunking::default();

    let video = video(&inputs["video"])?;
    report.compare("encode", &vae.encode(&video)?);
    report.compare("encode_single_frame", &vae.encode(&head(&video, 1)?)?);
    let plain = LatentStatistics::identity(vae.config().z_dim);
    let unnormalised = Vae::load_with_statistics(&weights, &plain, device)?;
    report.compare("encode_unnormalised_mu", &unnormalised.encode(&video)?);
    let encoded =
        vae.encode_with(&self::video(&inputs["video_tiled"])?, &config.tiled_encode.chunking(), Grad::Skip)?;
    report.compare("tiled_encode", &encoded.0);

    let latents = unbatched(&inputs["latent"])?;
    let cotangent = self::video(&inputs["g_video"])?;
    let (frames, pullback) = vae.decode(&latents, &whole, Grad::Record)?;
    let gradient = pullback.ok_or("no pullback")?.pull(&cotangent)?;
    for way in ["chunked", "oneshot"] {
        report.compare(&format!("decode_{way}"), &channels_first(&frames)?);
        report.compare(&format!("decode_{way}_grad_latent"), &gradient);
    }
    let (frames, pullback) = vae.decode_clamped(&latents, &whole, Grad::Record)?;
    report.compare("decode_clamped", &channels_first(&frames)?);
    let gradient = pullback.ok_or("no pullback")?.pull(&cotangent)?;
    report.compare("decode_clamped_grad_latent", &gradient);
    let single = vae.decode(&channels_first(&head(&channels_first(&latents)?, 1)?)?, &whole, Grad::Skip)?.0;
    report.compare("decode_single_latent_frame", &channels_first(&single)?);

    let latents_tiled = unbatched(&inputs["latent_tiled"])?;
    let (frames, pullback) = vae.decode_clamped(&latents_tiled, &config.tiled_decode.chunking(), Grad::Record)?;
    report.compare("tiled_decode", &channels_first(&frames)?);
    let gradient = pullback.ok_or("no pullback")?.pull(&self::video(&inputs["g_tiled"])?)?;
    report.compare("tiled_decode_grad_latent", &gradient);
    let default_tiles = Chunking { tiling: Some(Tiling::default()), ..whole };
    let (frames, _) = vae.decode_clamped(&latents_tiled, &default_tiles, Grad::Skip)?;
    report.compare("tiled_decode_default_tiles", &channels_first(&frames)?);

    for (name, value) in inner_values(&vae, &latents)? {
        let name = format!("dec.{}", name.trim_start_matches("decoder."));
        if report.get(&name).is_ok() {
            report.compare(&name, &value);
        }
    }
    for name in report.names() {
        if let Some(parameters) = name.strip_prefix("mask_example_") {
            report.compare(&name, &mask(parameters)?);
        }
    }
    Ok(report)
}

/// The latent statistics of the case.
pub fn statistics(inputs: &StateDict) -> Outcome<LatentStatistics> {
    let given = LatentStatistics { mean: inputs["latent_mean"].to_f32_vec(), std: inputs["latent_std"].to_f32_vec() };
    let published = LatentStatistics::published(given.mean.len()).ok_or("no published statistics")?;
    match given == published {
        true => Ok(published),
        false => Ok(given),
    }
}

/// Every layer's value, its chunks joined in time.
fn inner_values(vae: &Vae, latents: &Tensor) -> Outcome<BTreeMap<String, Tensor>> {
    let mut chunks: BTreeMap<String, Vec<Tensor>> = BTreeMap::new();
    vae.decode_probed(latents, &mut |name, value| chunks.entry(name.into()).or_default().push(value.clone()))?;
    chunks
        .into_iter()
        .map(|(name, chunks)| {
            let mut shape = chunks[0].shape().to_vec();
            shape[1] = chunks.iter().map(|c| c.shape()[1]).sum();
            let values = (0..shape[0]).flat_map(|channel| {
                chunks.iter().flat_map(move |chunk| {
                    let frames = chunk.len() / chunk.shape()[0];
                    chunk.f32s().unwrap_or(&[])[channel * frames..][..frames].to_vec()
                })
            });
            Ok((name, Tensor::new(values.collect::<Vec<f32>>(), shape)?))
        })
        .collect()
}

/// `HxW_borderAxB_boundTBLR`.
fn mask(parameters: &str) -> Outcome<Tensor> {
    let pair = |s: &str| -> Outcome<[usize; 2]> {
        let (a, b) = s.split_once('x').ok_or("no pair")?;
        Ok([a.parse()?, b.parse()?])
    };
    let mut parts = parameters.split('_');
    let mut part = |prefix: &str| parts.next().and_then(|p| p.strip_prefix(prefix)).ok_or("another mask name");
    let (size, border, bound) = (pair(part("")?)?, pair(part("border")?)?, part("bound")?);
    let bound: Vec<bool> = bound.chars().map(|c| c == '1').collect();
    let bound = bound.try_into().map_err(|_| "not four bounds")?;
    Ok(Tensor::new(blend_mask(size, border, bound), size)?)
}

/// `[1, C, T, H, W]` to `[T, C, H, W]`.
pub fn video(batch: &Tensor) -> Outcome<Tensor> {
    channels_first(&unbatched(batch)?)
}

/// Swaps the first two axes of four.
pub fn channels_first(tensor: &Tensor) -> Outcome<Tensor> {
    let &[a, b, h, w] = tensor.shape() else { return Err("not of rank four".into()) };
    let values = tensor.f32s()?;
    let planes = (0..b).flat_map(|j| (0..a).map(move |i| i * b + j));
    let turned: Vec<f32> = planes.flat_map(|p| values[p * h * w..(p + 1) * h * w].iter().copied()).collect();
    Ok(Tensor::new(turned, [b, a, h, w])?)
}

/// The first `n` of the first axis.
pub fn head(tensor: &Tensor, n: usize) -> Outcome<Tensor> {
    let mut shape = tensor.shape().to_vec();
    shape[0] = n;
    let len = shape.iter().product();
    Ok(Tensor::new(tensor.f32s()?[..len].to_vec(), shape)?)
}
