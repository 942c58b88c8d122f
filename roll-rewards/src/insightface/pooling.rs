//! The pooled identity score.

/// A score and its gradient with respect to the embeddings.
#[derive(Clone, Debug)]
pub struct Pooled {
    /// The mean over scored frames of their mean cosine similarity to the references; 0 if either is empty.
    pub value: f64,
    /// `d value / d embeddings`, `[frames, width]`.
    pub gradient: Vec<f32>,
}

/// The mean, over the frames with a face, of their mean cosine similarity to all usable references.
///
/// `embeddings` are `[found.len(), width]`, `references` `[usable.len(), width]`. A zero embedding has cosine 0 and
/// gradient 0.
///
/// # Panics
/// Panics unless the lengths fit.
pub fn pooled_cosine(embeddings: &[f32], found: &[bool], references: &[f32], usable: &[bool], width: usize) -> Pooled {
    assert_eq!(embeddings.len(), found.len() * width, "one embedding per frame");
    assert_eq!(references.len(), usable.len() * width, "one embedding per reference");
    let usable = references.chunks_exact(width).zip(usable).filter(|(_, usable)| **usable).map(|(r, _)| unit(r).0);
    let usable: Vec<_> = usable.collect();
    let scored = found.iter().filter(|f| **f).count();
    let mut pooled = Pooled { value: 0.0, gradient: vec![0.0; embeddings.len()] };
    if usable.is_empty() || scored == 0 {
        return pooled;
    }
    // The mean of the cosines equals the product with the mean of the unit references.
    let mut target = vec![0.0; width];
    for reference in &usable {
        target.iter_mut().zip(reference).for_each(|(t, r)| *t += r / (usable.len() as f64));
    }
    let rows = embeddings.chunks_exact(width).zip(pooled.gradient.chunks_exact_mut(width)).zip(found);
    for ((embedding, gradient), _) in rows.filter(|(_, found)| **found) {
        let (direction, norm) = unit(embedding);
        let cosine = product(&direction, &target);
        pooled.value += cosine / scored as f64;
        if norm > 0.0 {
            let scale = 1.0 / (norm * scored as f64);
            for ((g, d), t) in gradient.iter_mut().zip(&direction).zip(&target) {
                *g = ((t - cosine * d) * scale) as f32;
            }
        }
    }
    pooled
}

/// Whether each row of `references` (`[n, width]`) is used: rows of zeros (frames without a face) are not. With
/// `skip_first` the first row is not used either, because the model receives that frame as its condition.
pub fn usable_references(references: &[f32], width: usize, skip_first: bool) -> Vec<bool> {
    let rows = references.chunks_exact(width).enumerate();
    rows.map(|(t, row)| !(skip_first && t == 0) && row.iter().any(|v| *v != 0.0)).collect()
}

/// The direction and length of a vector; the direction of zero is zero.
pub(super) fn unit(v: &[f32]) -> (Vec<f64>, f64) {
    let norm = v.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    // The lower bound is that of torch's cosine_similarity.
    (v.iter().map(|x| f64::from(*x) / norm.max(1e-8)).collect(), norm)
}

pub(super) fn product(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gradient_check::{dot, noise};

    #[test]
    fn the_gradient_agrees_with_central_differences() {
        let (width, found, usable) = (16, [true, false, true, true], [false, true, true]);
        let (embeddings, references) = (noise(1, 4 * width), noise(2, 3 * width));
        let pooled = pooled_cosine(&embeddings, &found, &references, &usable, width);
        for seed in 3..6 {
            let direction = noise(seed, embeddings.len());
            let value = |step: f32| {
                let moved: Vec<f32> = embeddings.iter().zip(&direction).map(|(e, d)| e + step * d).collect();
                pooled_cosine(&moved, &found, &references, &usable, width).value
            };
            let numeric = (value(1e-2) - value(-1e-2)) / 2e-2;
            let exact = dot(&direction, &pooled.gradient);
            assert!((numeric - exact).abs() < 1e-3 * exact.abs().max(1e-2), "{numeric} {exact}");
        }
        assert!(pooled.gradient[width..2 * width].iter().all(|g| *g == 0.0));
    }

    #[test]
    fn an_embedding_scores_one_against_itself_at_any_length() {
        let e = noise(1, 8);
        let longer: Vec<f32> = e.iter().map(|v| v * 7.0).collect();
        assert!((pooled_cosine(&longer, &[true], &e, &[true], 8).value - 1.0).abs() < 1e-6);
    }

    #[test]
    fn zeros_and_nothing_give_zero_and_no_gradient() {
        let e = noise(1, 8);
        for (embedding, found, usable) in
            [(e.clone(), false, true), (e.clone(), true, false), (vec![0.0; 8], true, true)]
        {
            let pooled = pooled_cosine(&embedding, &[found], &e, &[usable], 8);
            assert_eq!(pooled.value, 0.0);
            assert!(pooled.gradient.iter().all(|g| *g == 0.0));
        }
    }
}
