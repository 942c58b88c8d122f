//! Clamps frames to [-1, 1].

use rayon::prelude::*;
use roll_core::{Error, Pullback, Result, Tensor};

/// Clamps f32 `frames` of any shape to [-1, 1]. NaN stays NaN. The cotangent of the frames is zero where they were
/// outside.
pub(super) fn clamp(frames: &Tensor) -> Result<(Tensor, Pullback)> {
    let values = frames.f32s()?;
    // Bit mask of the values outside. Threads work on whole words, so that none is shared.
    let mut outside = vec![0u64; values.len().div_ceil(WORD)];
    let mut clamped = vec![0f32; values.len()];
    let parts = values.par_chunks(WORD).zip(clamped.par_chunks_mut(WORD)).zip(&mut outside);
    parts.with_min_len(WORDS_PER_TASK).for_each(|((values, clamped), outside)| {
        for (i, (v, clamped)) in values.iter().zip(clamped).enumerate() {
            *outside |= u64::from(v.abs() > 1.0) << i;
            *clamped = v.clamp(-1.0, 1.0);
        }
    });
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
    Ok((clamped, pullback))
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
        let (clamped, pullback) = clamp(&frames).unwrap();
        assert_eq!(clamped.f32s().unwrap(), [-1.0, -1.0, 0.25, 1.0, 1.0]);
        let pulled = pullback.pull(&Tensor::full([5], 2.0)).unwrap();
        assert_eq!(pulled.f32s().unwrap(), [0.0, 2.0, 2.0, 2.0, 0.0]);
    }

    #[test]
    fn clamping_in_parallel_equals_clamping_one_by_one() {
        let values: Vec<f32> = (0..200_003).map(|i| (i * 7919 % 4001) as f32 / 1000.0 - 2.0).collect();
        let (clamped, pullback) = clamp(&Tensor::new(values.clone(), [values.len()]).unwrap()).unwrap();
        let pulled = pullback.pull(&Tensor::full([values.len()], 3.0)).unwrap();
        for (i, v) in values.iter().enumerate() {
            assert_eq!(clamped.f32s().unwrap()[i], v.clamp(-1.0, 1.0));
            assert_eq!(pulled.f32s().unwrap()[i], if v.abs() > 1.0 { 0.0 } else { 3.0 });
        }
    }
}
