//! Passes frames of a video through a network, reduces the output rows to one score, and pulls the gradient back.
//!
//! An *item* is one element of the network's batch: a frame or, for networks that take videos, all selected frames.

use rayon::prelude::*;
use roll_core::{Error, Grad, Pullback, Result, Score, Tensor, Video};

use super::{Frames, Input, OverFrames, Preprocess};

/// Maps the cotangent of a network's rows to the cotangent of its input.
pub type RowsPull = Box<dyn FnOnce(Tensor) -> Result<Tensor>>;

/// A network with a row of numbers per item of its input.
pub trait RowNetwork: Send {
    /// Computes the output, f32 `[N, ...]`, for an input in the network's layout.
    fn rows(&self, input: Tensor) -> Result<Tensor>;
    /// Computes the output like [`RowNetwork::rows`], and its pullback.
    fn rows_vjp(&self, input: Tensor) -> Result<(Tensor, RowsPull)>;
}

/// Maps a row to a value. Returns the value and its gradient with respect to the row.
pub type RowScore<'a> = dyn Fn(&[f32]) -> Result<(f64, Vec<f32>)> + 'a;

/// How a network scores a video.
pub struct FrameScorer<'a> {
    /// The network.
    pub network: &'a dyn RowNetwork,
    /// How frames become the network's input.
    pub input: &'a Input,
    /// Which frames are scored.
    pub frames: Frames,
    /// How the values of frames are reduced to one.
    pub over: OverFrames,
    /// Number of items per batch.
    pub batch: usize,
}

/// Gradients with respect to prepared frames: the frame's index, and values `[3, height, width]`.
type FrameGradients = Vec<(usize, Vec<f32>)>;

impl FrameScorer<'_> {
    /// The output rows of every item of `video`; empty for a video without frames.
    pub fn rows(&self, video: &Video) -> Result<Vec<Vec<f32>>> {
        let items = self.items(video);
        let preprocess = self.preprocess(video, &items)?;
        let mut rows = Vec::new();
        for batch in items.chunks(self.batch) {
            rows.extend(split(&self.network.rows(self.batch_input(video, &preprocess, batch)?)?, batch.len())?);
        }
        Ok(rows)
    }

    /// Scores `video`; the score is missing if the video has no frames. Details: `frames` (number of scored frames)
    /// and, with several items, their `lowest` and `highest` value.
    ///
    /// If [`Grad::Record`] is given, each batch is pulled back through the network immediately, with cotangent 1, so
    /// that only one batch of activations is in memory. The pullback scales this gradient and distributes it to the
    /// frames.
    pub fn score(&self, video: &Video, row_score: &RowScore<'_>, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        let mut items = self.items(video);
        if self.over == OverFrames::Last {
            items.drain(..items.len().saturating_sub(1));
        }
        if items.is_empty() || video.frames().is_empty() {
            return Ok((Score::Missing { reason: "the video has no pixels".into() }, None));
        }
        let preprocess = self.preprocess(video, &items)?;
        // The frame with the minimum is known only when all frames are scored. It is then scored again with a gradient.
        let first_grad = if self.over == OverFrames::Min { Grad::Skip } else { grad };
        let (values, mut gradients) = self.pass(video, &preprocess, &items, row_score, first_grad)?;
        let least_item = (0..values.len()).min_by(|&a, &b| values[a].total_cmp(&values[b])).unwrap_or(0);
        let value = match self.over {
            OverFrames::Min => values[least_item],
            OverFrames::Mean | OverFrames::Last => values.iter().sum::<f64>() / values.len() as f64,
        };
        if self.over == OverFrames::Min && grad.is_on() {
            (_, gradients) = self.pass(video, &preprocess, &items[least_item..=least_item], row_score, grad)?;
        }
        let scored_frames: usize = items.iter().map(Vec::len).sum();
        let mut details = vec![("frames", scored_frames as f64)];
        if values.len() > 1 {
            details.push(("lowest", values[least_item]));
            details.push(("highest", values.iter().copied().fold(f64::NEG_INFINITY, f64::max)));
        }
        let details = details.into_iter().map(|(name, value)| (name.to_string(), value)).collect();
        let pullback = grad.is_on().then(|| {
            let frames = video.frames().clone();
            Pullback::new(move |cotangent| pull_frames(&frames, &preprocess, &gradients, cotangent.item()?))
        });
        Ok((Score::Value { value, details }, pullback))
    }

    /// The frames of each item.
    fn items(&self, video: &Video) -> Vec<Vec<usize>> {
        let mut frames = self.frames.of(video.dims()[0]);
        if self.input.layout.is_video() {
            return if frames.is_empty() { vec![] } else { vec![frames] };
        }
        // A short video repeats frames, which are scored once.
        frames.dedup();
        frames.into_iter().map(|t| vec![t]).collect()
    }

    /// The preparation of the video's frames. Without items nothing is prepared, and the video's own size may be 0, so
    /// another size takes its place.
    fn preprocess(&self, video: &Video, items: &[Vec<usize>]) -> Result<Preprocess> {
        let [_, height, width] = video.dims();
        let frame_size = if items.is_empty() { [1, 1] } else { [height, width] };
        Preprocess::new(self.input, frame_size)
    }

    /// The network's input for a batch of items.
    fn batch_input(&self, video: &Video, preprocess: &Preprocess, items: &[Vec<usize>]) -> Result<Tensor> {
        let frames = items.concat();
        let pictures: Vec<Vec<f32>> = frames.par_iter().map(|&t| preprocess.forward(video.frame(t))).collect();
        let layout = self.input.layout;
        let values = layout.frames_to_layout(pictures.concat(), frames.len());
        Tensor::new(values, layout.shape(frames.len(), preprocess.size()))
    }

    /// Computes the value of each item and, with [`Grad::Record`], the gradient of the mean value with respect to the
    /// prepared frames.
    fn pass(
        &self,
        video: &Video,
        preprocess: &Preprocess,
        items: &[Vec<usize>],
        row_score: &RowScore<'_>,
        grad: Grad,
    ) -> Result<(Vec<f64>, FrameGradients)> {
        let (mut values, mut gradients) = (Vec::new(), Vec::new());
        for batch in items.chunks(self.batch) {
            let input = self.batch_input(video, preprocess, batch)?;
            if !grad.is_on() {
                for row in split(&self.network.rows(input)?, batch.len())? {
                    let (value, _) = row_score(&row)?;
                    values.push(value);
                }
                continue;
            }
            let (rows, pull) = self.network.rows_vjp(input)?;
            let mut cotangent = Vec::with_capacity(rows.len());
            for row in split(&rows, batch.len())? {
                let (value, gradient) = row_score(&row)?;
                values.push(value);
                cotangent.extend(gradient.iter().map(|g| g / items.len() as f32));
            }
            let input_gradient = pull(Tensor::new(cotangent, rows.shape())?)?;
            let frames = batch.concat();
            let gradient = self.input.layout.layout_to_frames(input_gradient.to_f32_vec(), frames.len());
            let frame_gradients = gradient.chunks_exact(gradient.len() / frames.len()).map(<[f32]>::to_vec);
            gradients.extend(frames.iter().copied().zip(frame_gradients));
        }
        Ok((values, gradients))
    }
}

/// Splits an output into the rows of `items` items.
fn split(output: &Tensor, items: usize) -> Result<Vec<Vec<f32>>> {
    check_rows(output, items)?;
    let values = output.to_f32_vec();
    Ok(values.chunks_exact(values.len() / items).map(<[f32]>::to_vec).collect())
}

/// Fails unless an output has a row for each of `items` items.
pub(crate) fn check_rows(output: &Tensor, items: usize) -> Result<()> {
    match output.shape().first() {
        Some(&rows) if rows == items && !output.is_empty() => Ok(()),
        _ => Err(Error::shape("the output of a network", format!("[{items}, ...] for {items} items"), output.shape())),
    }
}

/// The cotangent of `frames`. `gradients` are the gradients of the prepared frames for a cotangent of 1.
fn pull_frames(frames: &Tensor, preprocess: &Preprocess, gradients: &FrameGradients, cotangent: f32) -> Result<Tensor> {
    let values = frames.f32s()?;
    let values_per_frame = values.len() / frames.shape()[0];
    let mut gradient = vec![0.0; values.len()];
    gradient.par_chunks_mut(values_per_frame).enumerate().for_each(|(t, out)| {
        for (_, part) in gradients.iter().filter(|(frame, _)| *frame == t) {
            let scaled: Vec<f32> = part.iter().map(|g| g * cotangent).collect();
            preprocess.pull(&values[t * values_per_frame..][..values_per_frame], &scaled, out);
        }
    });
    Tensor::new(gradient, frames.shape())
}
