//! Clamps frames to [-1, 1].

use rayon::prelude::*;
use roll_core::{Error, Pullback, Tensor};

/// Clamps the values of frames of `shape` to [-1, 1], in place. NaN stays NaN. Returns the pullback, which sets the
/// cotangent to zero at the values that were outside.
pub(super) fn clamp(values: &mut [f32], shape: &[usize]) -> Pullback {
    // One bit per value: whether the value was outside. Threads work on whole words, so that no two threads share a
    // word.
    let mut outside = vec![0u64; values.len().div_ceil(WORD_BITS)];
    let parts = values.par_chunks_mut(WORD_BITS).zip(&mut outside).with_min_len(WORDS_PER_TASK);
    parts.for_each(|(values_of_word, word)| {
        for (i, v) in values_of_word.iter_mut().enumerate() {
            *word |= u64::from(v.abs() > 1.0) << i;
            *v = v.clamp(-1.0, 1.0);
        }
    });
    let shape = shape.to_vec();
    Pullback::new(move |cotangent| {
        if cotangent.shape() != shape {
            return Err(Error::shape("cotangent of the clamped frames", format!("{shape:?}"), cotangent.shape()));
        }
        let values = cotangent.f32s()?.par_iter().enumerate().with_min_len(WORD_BITS * WORDS_PER_TASK);
        let pulled = values.map(|(i, &g)| if outside[i / WORD_BITS] >> (i % WORD_BITS) & 1 == 1 { 0.0 } else { g });
        let pulled: Vec<f32> = pulled.collect();
        Tensor::new(pulled, shape.as_slice())
    })
}

/// Values per word of the mask. A value takes one bit, so the mask takes a 32nd of the frames' memory.
const WORD_BITS: usize = 64;
/// Minimum number of words per task of a thread.
const WORDS_PER_TASK: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradient_is_zero_outside_and_one_on_the_bounds() {
        let mut frames = [-1.5f32, -1.0, 0.25, 1.0, 1.5];
        let pullback = clamp(&mut frames, &[5]);
        assert_eq!(frames, [-1.0, -1.0, 0.25, 1.0, 1.0]);
        let pulled = pullback.pull(&Tensor::full([5], 2.0)).unwrap();
        assert_eq!(pulled.f32s().unwrap(), [0.0, 2.0, 2.0, 2.0, 0.0]);
    }

    #[test]
    fn clamping_in_parallel_equals_clamping_one_by_one() {
        let values: Vec<f32> = (0..200_003).map(|i| (i * 7919 % 4001) as f32 / 1000.0 - 2.0).collect();
        let mut clamped = values.clone();
        let pullback = clamp(&mut clamped, &[values.len()]);
        let pulled = pullback.pull(&Tensor::full([values.len()], 3.0)).unwrap();
        for (i, v) in values.iter().enumerate() {
            assert_eq!(clamped[i], v.clamp(-1.0, 1.0));
            assert_eq!(pulled.f32s().unwrap()[i], if v.abs() > 1.0 { 0.0 } else { 3.0 });
        }
    }
}
