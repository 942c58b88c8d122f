//! Gradients of a video from the cotangents of a network's inputs.

use roll_core::{Grad, Pullback, Result, Tensor, Video};
use roll_media::Pixels;

/// The gradient of a video, `[T, 3, H, W]`, from the cotangents of all values of `media` (rank 1, one medium after
/// another), times `factor`. All media are of the same video.
pub fn pull_all(media: &[Pixels], cotangent: &[f32], factor: f32, video: &[usize]) -> Result<Tensor> {
    let mut gradient = vec![0.0; video.iter().product()];
    let mut rest = cotangent;
    for pixels in media {
        let (part, others) = rest.split_at(pixels.input_len());
        pixels.pull(part, &mut gradient)?;
        rest = others;
    }
    gradient.iter_mut().for_each(|g| *g *= factor);
    Tensor::new(gradient, video)
}

/// The pullback of a score that is the mean over several reads, each of which has been pulled back: `d_pixels` is the
/// sum of the cotangents of all values of `media`, `share` the weight of a read. `None` if the score is not
/// differentiated.
pub fn mean_pullback(
    media: Vec<Pixels>,
    d_pixels: Vec<f32>,
    share: f64,
    video: &Video,
    grad: Grad,
) -> Option<Pullback> {
    let shape = video.frames().shape().to_vec();
    grad.is_on().then(|| {
        Pullback::new(move |cotangent| {
            pull_all(&media, &d_pixels, (f64::from(cotangent.item()?) * share) as f32, &shape)
        })
    })
}
