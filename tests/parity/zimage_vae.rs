//! The autoencoder of Z-Image: encode and decode, inner values, gradients of pictures and latents.

use std::path::Path;

use roll_core::{Grad, Tensor};
use roll_z_image::vae::{Vae, VaeConfig};
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};

#[derive(Deserialize)]
struct Config {
    model: serde_json::Value,
}

pub fn run(case: &Case) -> Outcome<Report> {
    let config: Config = case.config()?;
    let mut report = case.expected("outputs.safetensors")?;
    let inputs = case.tensors("inputs.safetensors")?;
    let config = VaeConfig::parse(&config.model.to_string(), Path::new("config.json"))?;
    let (scale, shift) = (config.scaling_factor as f32, config.shift_factor as f32);
    let vae = Vae::new(config, &case.tensors("weights.safetensors")?, case.device())?
        .with_decoder_dtype(case.setting.dtype)?;

    // Pictures of a batch are encoded and decoded one by one.
    let (mut latents, mut d_images) = (Vec::new(), Vec::new());
    for (image, cotangent) in items(&inputs["image"])?.iter().zip(items(&inputs["g_latents"])?) {
        let (encoded, pullback) = vae.encode(image, Grad::Record)?;
        let cotangent = cotangent.reshape(encoded.shape())?;
        d_images.push(pullback.ok_or("no pullback")?.pull(&cotangent)?);
        latents.push(encoded);
    }
    let mean = |latents: &[Tensor]| -> Outcome<Tensor> {
        let unscaled = |v: f32| v / scale + shift;
        let batch = batch(latents)?;
        Ok(Tensor::new(batch.f32s()?.iter().map(|v| unscaled(*v)).collect(), batch.shape())?)
    };
    report.compare("latents_from_mean", &batch(&latents)?);
    report.compare("mean", &mean(&latents)?);
    report.compare("encode_grad_image", &batch(&d_images)?);
    let ragged = vae.encode(&inputs["image_ragged"], Grad::Skip)?.0;
    report.compare("mean_ragged", &mean(&[ragged])?);

    let (mut pictures, mut clamped, mut d_latents) = (Vec::new(), Vec::new(), Vec::new());
    for (latents, cotangent) in items(&inputs["latents"])?.iter().zip(items(&inputs["g_image"])?) {
        let latents = as_video(latents)?;
        let (picture, pullback) = vae.decode(&latents, Grad::Record)?;
        d_latents.push(pullback.ok_or("no pullback")?.pull(&cotangent)?);
        pictures.push(picture);
        let (picture, _) = vae.decode_clamped(&latents, Grad::Skip)?;
        let halves = picture.f32s()?.iter().map(|v| v / 2.0 + 0.5).collect();
        clamped.push(Tensor::new::<f32>(halves, picture.shape())?);
    }
    report.compare("decode", &batch(&pictures)?);
    report.compare("picture", &batch(&clamped)?);
    report.compare("decode_grad_latents", &batch(&d_latents)?);
    let odd = vae.decode(&as_video(&inputs["latents_odd"])?, Grad::Skip)?.0;
    report.compare("decode_odd", &odd);
    compare_inner_values(&vae, &items(&inputs["latents"])?, &mut report)?;

    for name in report.names() {
        let reason = match name.as_str() {
            "logvar" | "std" | "latents_from_sample" => "latents are the mean",
            _ if name.starts_with("tiled_") => "tiles would change the picture and are not offered",
            _ if name.starts_with("decode_grad_w.") => "the weights are frozen",
            _ => continue,
        };
        report.leave_out(&name, reason);
    }
    Ok(report)
}

/// Compares the outputs of the decoder's stages. The last block of a stage has the stage's output.
fn compare_inner_values(vae: &Vae, latents: &[Tensor], report: &mut Report) -> Outcome {
    let mut seen: Vec<(String, Vec<Tensor>)> = Vec::new();
    for latents in latents {
        vae.decode_probed(&as_video(latents)?, &mut |block, value| {
            let name = match block.strip_prefix("decoder.").unwrap_or(block).split('.').collect::<Vec<_>>()[..] {
                ["mid_block", "attentions", _] => "dec.mid_attention".to_string(),
                [stage @ "up_blocks", number, ..] => format!("dec.{stage}.{number}"),
                [stage, ..] => format!("dec.{stage}"),
                [] => return,
            };
            match seen.iter_mut().find(|(earlier, _)| *earlier == name) {
                None => seen.push((name, vec![value.clone()])),
                Some((_, values)) => values.push(value.clone()),
            }
        })?;
    }
    for (name, values) in &seen {
        if report.get(name).is_err() {
            continue;
        }
        // Per picture, the last block of the stage.
        let per_picture = values.len() / latents.len();
        let last: Vec<_> = values.chunks(per_picture).filter_map(|blocks| blocks.last().cloned()).collect();
        report.compare(name, &batch(&last)?);
    }
    Ok(())
}

/// The items of a batch, each `[1, C, H, W]`.
fn items(batch: &Tensor) -> Outcome<Vec<Tensor>> {
    let parts = batch.unstack()?;
    Ok(parts.iter().map(|x| x.reshape([&[1], x.shape()].concat())).collect::<Result<_, _>>()?)
}

/// `[1, C, H, W]` as `[C, 1, H, W]`.
fn as_video(latents: &Tensor) -> Outcome<Tensor> {
    let &[1, c, h, w] = latents.shape() else { return Err("not one picture".into()) };
    Ok(latents.reshape([c, 1, h, w])?)
}

/// Joins pictures, `[1, C, H, W]` or `[C, 1, H, W]`, to `[B, C, H, W]`.
fn batch(pictures: &[Tensor]) -> Outcome<Tensor> {
    let &[a, b, h, w] = pictures[0].shape() else { return Err("not of rank four".into()) };
    let planes: Vec<_> = pictures.iter().map(|x| x.reshape([a * b, h, w])).collect::<Result<_, _>>()?;
    Ok(Tensor::stack(&planes)?)
}
