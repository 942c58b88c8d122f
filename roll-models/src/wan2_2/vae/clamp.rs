//! Clamping frames to [-1, 1].

use std::sync::Arc;

use roll_core::{Error, Pullback, Result, Tensor};

/// Frames in [-1, 1], and how many values had to be put there.
#[derive(Debug)]
pub struct Clamped {
    /// Shape of the input.
    pub frames: Tensor,
    /// Part of the values that lay outside, in [0, 1].
    pub fraction: f64,
    /// Cotangent of the unclamped frames: zero where they lay outside.
    pub pullback: Pullback,
}

/// Clamps f32 `frames` of any shape to [-1, 1]. A value that is not a number stays one.
pub fn clamp(frames: &Tensor) -> Result<Clamped> {
    let values = frames.f32s()?;
    let mut outside = Bits::zeros(values.len());
    let mut count = 0usize;
    let clamped = values.iter().enumerate().map(|(i, &v)| {
        if v.abs() > 1.0 {
            outside.set(i);
            count += 1;
        }
        v.clamp(-1.0, 1.0)
    });
    let clamped = Tensor::new(clamped.collect::<Vec<f32>>(), frames.shape())?;
    let shape = frames.shape().to_vec();
    let outside = Arc::new(outside);
    let pullback = Pullback::new(move |cotangent| {
        if cotangent.shape() != shape {
            return Err(Error::shape("cotangent of the clamped frames", format!("{shape:?}"), cotangent.shape()));
        }
        let values = cotangent.f32s()?.iter().enumerate().map(|(i, &g)| if outside.get(i) { 0.0 } else { g });
        Tensor::new(values.collect::<Vec<f32>>(), shape)
    });
    Ok(Clamped { frames: clamped, fraction: count as f64 / values.len().max(1) as f64, pullback })
}

/// One bit per value: a 32nd of the frames.
struct Bits(Vec<u64>);

impl Bits {
    fn zeros(len: usize) -> Self {
        Self(vec![0; len.div_ceil(64)])
    }
    fn set(&mut self, i: usize) {
        self.0[i / 64] |= 1 << (i % 64);
    }
    fn get(&self, i: usize) -> bool {
        self.0[i / 64] >> (i % 64) & 1 == 1
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_gradient_is_zero_outside_and_one_on_the_border() {
        let frames = Tensor::new(vec![-1.5f32, -1.0, 0.25, 1.0, 1.5], [5]).unwrap();
        let clamped = clamp(&frames).unwrap();
        assert_eq!(clamped.frames.f32s().unwrap(), [-1.0, -1.0, 0.25, 1.0, 1.0]);
        assert_eq!(clamped.fraction, 0.4);
        let pulled = clamped.pullback.pull(&Tensor::full([5], 2.0)).unwrap();
        assert_eq!(pulled.f32s().unwrap(), [0.0, 2.0, 2.0, 2.0, 0.0]);
    }
}
