//! Clamps frames to [-1, 1].

use rayon::prelude::*;
use roll_core::{Error, Pullback, Result, Tensor};

/// Clamped frames and the fraction of values that were outside.
#[derive(Debug)]
pub struct Clamped {
    /// Frames in [-1, 1], in the shape of the input.
    pub frames: Tensor,
    /// Fraction of the values that were outside, in [0, 1].
    pub fraction: f64,
    /// Maps to the cotangent of the unclamped frames, which is zero where they were outside.
    pub pullback: Pullback,
}

/// Clamps f32 `frames` of any shape to [-1, 1]. NaN stays NaN.
pub fn clamp(frames: &Tensor) -> Result<Clamped> {
    let values = frames.f32s()?;
    // Bit mask of the values outside. Threads work on whole words, so that none is shared.
    let mut outside = vec![0u64; values.len().div_ceil(WORD)];
    let mut clamped = vec![0f32; values.len()];
    let parts = values.par_chunks(WORD).zip(clamped.par_chunks_mut(WORD)).zip(&mut outside);
    let count: usize = parts
        .with_min_len(WORDS_PER_TASK)
        .map(|((values, clamped), outside)| {
            for (i, (v, clamped)) in values.iter().zip(clamped).enumerate() {
                *outside |= u64::from(v.abs() > 1.0) << i;
                *clamped = v.clamp(-1.0, 1.0);
            }
            outside.count_ones() as usize
        })
        .sum();
    let fraction = count as f64 / values.len().max(1) as f64;
    let shape = frames.shape().to_vec();
    let clamped = Tensor::new(clamped, frames.shape())?;
    let pullback = Pullback::new(move |cotangent| {
        if cotangent.shape() != shape {
            return Err(Error::shape("cotangent of the clamped frames", format!("{shape:?}"), cotangent.shape()));
        }
        let values = cotangent.f32s()?.par_iter().enumerate().with_min_len(WORD * WORDS_PER_TASK);
        let pulled = values.map(|(i, &g)| if outside[i / WORD] >> (i % WORD) & 1 == 1 { 0.0 } else { g });
        let pulled: Vec<f32> = pulled.collect();
        Tensor::new(pulled, shape.as_slice())
    });
    Ok(Clamped { frames: clamped, fraction, pullback })
}

/// Values per word of the mask: one bit each, so the mask takes a 32nd of the frames' memory.
const WORD: usize = 64;
/// Minimum number of words per task of a thread.
const WORDS_PER_TASK: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradient_is_zero_outside_and_one_on_the_bounds() {
        let frames = Tensor::new(vec![-1.5f32, -1.0, 0.25, 1.0, 1.5], [5]).unwrap();
        let clamped = clamp(&frames).unwrap();
        assert_eq!(clamped.frames.f32s().unwrap(), [-1.0, -1.0, 0.25, 1.0, 1.0]);
        assert_eq!(clamped.fraction, 0.4);
        let pulled = clamped.pullback.pull(&Tensor::full([5], 2.0)).unwrap();
        assert_eq!(pulled.f32s().unwrap(), [0.0, 2.0, 2.0, 2.0, 0.0]);
    }

    #[test]
    fn clamping_in_parallel_equals_clamping_one_by_one() {
        let values: Vec<f32> = (0..200_003).map(|i| (i * 7919 % 4001) as f32 / 1000.0 - 2.0).collect();
        let count = values.iter().filter(|v| v.abs() > 1.0).count();
        let clamped = clamp(&Tensor::new(values.clone(), [values.len()]).unwrap()).unwrap();
        assert_eq!(clamped.fraction, count as f64 / values.len() as f64);
        let pulled = clamped.pullback.pull(&Tensor::full([values.len()], 3.0)).unwrap();
        for (i, v) in values.iter().enumerate() {
            assert_eq!(clamped.frames.f32s().unwrap()[i], v.clamp(-1.0, 1.0));
            assert_eq!(pulled.f32s().unwrap()[i], if v.abs() > 1.0 { 0.0 } else { 3.0 });
        }
    }
}
