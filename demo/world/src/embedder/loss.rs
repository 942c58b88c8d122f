//! The CosFace loss: classification of people by the cosine between an embedding and one learned direction per person.

use burn_tensor::{Device, Tensor, activation};
use roll_backends::Scope;
use roll_core::{ParameterSpec, Result};

use super::WIDTH;
use crate::training::upload;

/// Number of people that an embedder is trained on.
pub const CLASSES: usize = 800;
/// Factor of the cosines before the softmax.
const SCALE: f32 = 18.0;
/// Final margin, which is subtracted from the cosine of the correct person.
const MARGIN: f32 = 0.2;

/// Specification of the learned directions, `[CLASSES, WIDTH]`.
pub fn classes() -> ParameterSpec {
    ParameterSpec { name: "classes.weight".into(), shape: vec![CLASSES, WIDTH] }
}

/// Returns the margin at `step`: 0 for the first tenth of the run, then rising linearly over three tenths.
pub fn margin(step: u64, steps: u64) -> f32 {
    let done = step as f32 / steps.max(1) as f32;
    MARGIN * ((done - 0.1) / 0.3).clamp(0.0, 1.0)
}

/// Returns the mean cross-entropy of `embeddings`, `[N, WIDTH]`. Each of `classes`, `[N]`, is below [`CLASSES`].
pub fn identity(
    embeddings: Tensor<2>,
    classes: &[usize],
    margin: f32,
    scope: &Scope<'_>,
    device: &Device,
) -> Result<Tensor<1>> {
    let n = classes.len();
    let directions = scope.weight::<2>("classes.weight")?;
    let cosines = unit(embeddings).matmul(unit(directions).transpose());
    let mut right = vec![0.0; n * CLASSES];
    classes.iter().enumerate().for_each(|(row, class)| right[row * CLASSES + class] = 1.0);
    let right = upload(right, [n, CLASSES], device).autodiff();
    let logits = (cosines - right.clone() * margin) * SCALE;
    Ok((activation::log_softmax(logits, 1) * right).sum() * (-1.0 / n as f32))
}

/// Normalizes rows to length 1.
fn unit(rows: Tensor<2>) -> Tensor<2> {
    let squares = (rows.clone() * rows.clone()).sum_dim(1);
    rows / (squares + 1e-12).sqrt()
}
