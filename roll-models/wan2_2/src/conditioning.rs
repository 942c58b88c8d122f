//! Conditioning of image-to-video models: latents of the known frames, and a mask that marks these frames.

use roll_core::{Error, Grad, Result, Tensor};

use super::vae::{Chunking, Vae};

/// Returns the channels that I2V models concatenate to the noise, f32 `[temporal stride + C, T, H, W]`: the mask, then
/// the latents of a video of `frames` frames. The video starts with `image` (f32 `[3, H', W']` in [-1, 1]), ends with
/// `end_image` if there is one, and is grey in between.
///
/// The mask has one channel per video frame of a latent frame, and is 1 where the video frame is known. The first
/// latent frame encodes a single video frame, so all its channels are 1.
///
/// Fails if the pictures differ in size, or if the VAE cannot encode a video of `frames` frames.
pub fn image_channels(
    vae: &Vae,
    image: &Tensor,
    end_image: Option<&Tensor>,
    frames: usize,
    chunking: &Chunking,
) -> Result<Tensor> {
    let [h, w] = picture_size("image", image)?;
    let latent_frames = vae.config().latent_frames(frames)?;
    let mut video = vec![0f32; frames * 3 * h * w];
    video[..3 * h * w].copy_from_slice(image.f32s()?);
    if let Some(end_image) = end_image {
        if end_image.shape() != image.shape() {
            return Err(Error::shape("end image", format!("{:?}, as the image", image.shape()), end_image.shape()));
        }
        if frames < 2 {
            return Err(Error::Unsupported("an end image needs a video of more than one frame".into()));
        }
        video[(frames - 1) * 3 * h * w..].copy_from_slice(end_image.f32s()?);
    }
    let video = Tensor::new(video, [frames, 3, h, w])?;
    let (latents, _) = vae.encode_with(&video, chunking, Grad::Skip)?;
    let &[channels, _, lh, lw] = latents.shape() else {
        return Err(Error::shape("image latents", "[C, T, H, W]", latents.shape()));
    };
    let mask_channels = vae.config().temporal_stride();
    let plane = lh * lw;
    // The mask, `[mask_channels, latent_frames, lh, lw]`. The first latent frame is known in all channels.
    let mut mask = vec![0f32; mask_channels * latent_frames * plane];
    for channel in 0..mask_channels {
        let start = channel * latent_frames * plane;
        mask[start..start + plane].fill(1.0);
    }
    // The end image is the last video frame of the last latent frame: the last plane of the last channel.
    if end_image.is_some() {
        let last_plane = mask.len() - plane;
        mask[last_plane..].fill(1.0);
    }
    let values = [mask.as_slice(), latents.f32s()?].concat();
    Tensor::new(values, [mask_channels + channels, latent_frames, lh, lw])
}

/// Encodes `image`, f32 `[3, H', W']` in [-1, 1], as the known first latent frame of TI2V models, f32 `[C, 1, H, W]`.
pub fn first_frame_latents(vae: &Vae, image: &Tensor, chunking: &Chunking) -> Result<Tensor> {
    let [h, w] = picture_size("image", image)?;
    Ok(vae.encode_with(&image.reshape([1, 3, h, w])?, chunking, Grad::Skip)?.0)
}

/// Height and width of a picture, which errors call `what`.
fn picture_size(what: &str, picture: &Tensor) -> Result<[usize; 2]> {
    match *picture.shape() {
        [3, h, w] => Ok([h, w]),
        _ => Err(Error::shape(what, "[3, H, W]", picture.shape())),
    }
}
