//! The detector's loss: cross-entropy of the scores, distances of boxes and landmarks.

use burn_tensor::{Device, Tensor, activation};
use roll_backends::NdTensor;
use roll_core::Result;

use super::anchors::{self, Targets};
use crate::network::Network;
use crate::training::upload;

/// Weight of the boxes' error (a fraction of the face) relative to the scores' cross-entropy.
const BOXES: f32 = 6.0;
/// Weight of the landmarks' error (a fraction of the face). Landmarks decide how well faces are aligned.
const LANDMARKS: f32 = 20.0;
/// Errors (fractions of the face) well below this are squared; errors above count linearly.
const SMOOTH: f32 = 0.01;
/// Initial probability of a face per anchor.
const PRIOR: f32 = 0.02;

/// Returns the loss of a batch, divided by its number of positive anchors. `outputs` holds, for each level, the scores
/// before the sigmoid, the boxes and the landmarks.
pub fn detection(outputs: &[NdTensor], targets: Targets, batch: usize, device: &Device) -> Result<Tensor<1>> {
    let anchors = anchors::count();
    let answering = targets.face.iter().sum::<f32>().max(1.0);
    let tensor = |values: Vec<f32>, width: usize| upload(values, [batch, anchors, width], device).autodiff();
    let (face, counts, share) = (tensor(targets.face, 1), tensor(targets.counts, 1), tensor(targets.share, 1));
    let scores = levels(outputs, 0)?;
    // Cross-entropy of a logit x with the target t, without overflow: max(x, 0) - t x + ln(1 + exp(-|x|)).
    let entropy = activation::relu(scores.clone()) - face * scores.clone() + (scores.abs().neg().exp() + 1.0).log();
    let distance = |part: usize, values: Vec<f32>, width: usize| -> Result<Tensor<1>> {
        let off = (levels(outputs, part)? - tensor(values, width)) * share.clone();
        Ok(((off.clone() * off + SMOOTH * SMOOTH).sqrt() - SMOOTH).sum() / width as f32)
    };
    let boxes = distance(1, targets.boxes, 4)?;
    let landmarks = distance(2, targets.landmarks, 10)?;
    Ok(((entropy * counts).sum() + boxes * BOXES + landmarks * LANDMARKS) / answering)
}

/// Concatenates one part of all levels: `[N, anchors, width]`.
fn levels(outputs: &[NdTensor], part: usize) -> Result<Tensor<3>> {
    let levels = outputs.iter().skip(part).step_by(3).map(|level| level.rank::<3>()).collect::<Result<Vec<_>>>()?;
    Ok(Tensor::cat(levels, 1))
}

/// Sets the scores' biases to the prior probability of a face. Otherwise thousands of wrong scores would dominate the
/// loss.
pub fn start_with_few_faces(network: &Network, values: &mut [f32]) {
    let mut start = 0;
    for spec in &network.parameters {
        if spec.name.starts_with("score") && spec.name.ends_with(".bias") {
            values[start..start + spec.len()].fill((PRIOR / (1.0 - PRIOR)).ln());
        }
        start += spec.len();
    }
}
