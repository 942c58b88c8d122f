//! Frame-by-frame losses between two clips of equal length, with their gradients with respect to the first.

use super::pooling::{product, unit};

/// The loss `1 - cosine` between the embeddings of corresponding frames, averaged over the frames in `mask`.
///
/// `embeddings` and `references` are `[mask.len(), width]`. Without a frame the loss is 0.
///
/// # Panics
/// Panics unless the lengths fit.
pub fn embedding_loss(embeddings: &[f32], references: &[f32], mask: &[bool], width: usize) -> (f64, Vec<f32>) {
    assert_eq!([embeddings.len(), references.len()], [mask.len() * width; 2], "one embedding per frame");
    let frames = mask.iter().filter(|m| **m).count() as f64;
    let (mut loss, mut gradient) = (0.0, vec![0.0; embeddings.len()]);
    let rows = embeddings.chunks_exact(width).zip(references.chunks_exact(width));
    for (((embedding, reference), out), _) in
        rows.zip(gradient.chunks_exact_mut(width)).zip(mask).filter(|(_, mask)| **mask)
    {
        let ((direction, norm), (target, _)) = (unit(embedding), unit(reference));
        let cosine = product(&direction, &target);
        loss += (1.0 - cosine) / frames;
        if norm > 0.0 {
            for ((g, d), t) in out.iter_mut().zip(&direction).zip(&target) {
                *g = ((cosine * d - t) / (norm * frames)) as f32;
            }
        }
    }
    (loss, gradient)
}

/// The absolute distance of landmarks, summed over x and y, averaged over the points and the frames in `mask`.
///
/// `landmarks` and `references` are `[mask.len(), points, 2]`. Without a frame the loss is 0.
///
/// # Panics
/// Panics unless the lengths fit.
pub fn landmark_loss(landmarks: &[f32], references: &[f32], mask: &[bool], points: usize) -> (f64, Vec<f32>) {
    assert_eq!([landmarks.len(), references.len()], [mask.len() * points * 2; 2], "one set of landmarks per frame");
    let weight = 1.0 / (mask.iter().filter(|m| **m).count().max(1) * points.max(1)) as f64;
    let (mut loss, mut gradient) = (0.0, vec![0.0; landmarks.len()]);
    for (i, ((a, b), g)) in landmarks.iter().zip(references).zip(&mut gradient).enumerate() {
        if mask[i / (points * 2)] && a != b {
            let difference = f64::from(*a) - f64::from(*b);
            loss += difference.abs() * weight;
            *g = (difference.signum() * weight) as f32;
        }
    }
    (loss, gradient)
}
