//! The identity score of a video from the embeddings of its faces, with its gradient.

/// A score and its gradient with respect to the embeddings.
#[derive(Clone, Debug)]
pub struct Pooled {
    /// The mean over embeddings of their mean cosine similarity to the references; 0 without embeddings or references.
    pub value: f64,
    /// `d value / d embeddings`, `[frames, width]`.
    pub gradient: Vec<f32>,
}

/// The mean, over the rows of `embeddings`, of their mean cosine similarity to all rows of `references`. Both have
/// `width` columns. A zero embedding has cosine 0 and gradient 0.
///
/// # Panics
/// Panics unless both consist of whole rows.
pub fn pooled_cosine(embeddings: &[f32], references: &[f32], width: usize) -> Pooled {
    assert_eq!([embeddings.len() % width, references.len() % width], [0; 2], "whole rows of {width}");
    let (embedding_count, reference_count) = (embeddings.len() / width, references.len() / width);
    let mut pooled = Pooled { value: 0.0, gradient: vec![0.0; embeddings.len()] };
    if reference_count == 0 || embedding_count == 0 {
        return pooled;
    }
    // The mean of the cosines equals the dot product with the mean of the unit references.
    let mut target = vec![0.0; width];
    for reference in references.chunks_exact(width) {
        target.iter_mut().zip(unit(reference).0).for_each(|(t, r)| *t += r / (reference_count as f64));
    }
    for (embedding, gradient) in embeddings.chunks_exact(width).zip(pooled.gradient.chunks_exact_mut(width)) {
        let (direction, norm) = unit(embedding);
        let cosine: f64 = direction.iter().zip(&target).map(|(d, t)| d * t).sum();
        pooled.value += cosine / embedding_count as f64;
        if norm > 0.0 {
            let scale = 1.0 / (norm * embedding_count as f64);
            for ((g, d), t) in gradient.iter_mut().zip(&direction).zip(&target) {
                *g = ((t - cosine * d) * scale) as f32;
            }
        }
    }
    pooled
}

/// Least divisor in a normalisation, as in torch's `cosine_similarity`.
const MIN_DIVISOR: f64 = 1e-8;

/// The direction and length of a vector; the direction of zero is zero.
fn unit(v: &[f32]) -> (Vec<f64>, f64) {
    let norm = v.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    (v.iter().map(|x| f64::from(*x) / norm.max(MIN_DIVISOR)).collect(), norm)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gradient_check::{dot, noise};

    #[test]
    fn gradient_matches_finite_differences() {
        let width = 16;
        let (embeddings, references) = (noise(1, 3 * width), noise(2, 2 * width));
        let pooled = pooled_cosine(&embeddings, &references, width);
        for seed in 3..6 {
            let direction = noise(seed, embeddings.len());
            let value = |step: f32| {
                let moved: Vec<f32> = embeddings.iter().zip(&direction).map(|(e, d)| e + step * d).collect();
                pooled_cosine(&moved, &references, width).value
            };
            let numeric = (value(1e-2) - value(-1e-2)) / 2e-2;
            let exact = dot(&direction, &pooled.gradient);
            assert!((numeric - exact).abs() < 1e-3 * exact.abs().max(1e-2), "{numeric} {exact}");
        }
    }

    #[test]
    fn similarity_to_itself_is_one_at_any_length() {
        let e = noise(1, 8);
        let longer: Vec<f32> = e.iter().map(|v| v * 7.0).collect();
        assert!((pooled_cosine(&longer, &e, 8).value - 1.0).abs() < 1e-6);
    }

    #[test]
    fn zero_and_missing_embeddings_have_score_and_gradient_zero() {
        let e = noise(1, 8);
        for (embeddings, references) in [(vec![], e.clone()), (e.clone(), vec![]), (vec![0.0; 8], e)] {
            let pooled = pooled_cosine(&embeddings, &references, 8);
            assert_eq!(pooled.value, 0.0);
            assert!(pooled.gradient.iter().all(|g| *g == 0.0));
        }
    }
}
