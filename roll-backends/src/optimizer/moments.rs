//! The moments of AdamW, in f32 or in half the memory.

use std::ops::Range;

use half::bf16;

/// Moments of a flat slice of parameters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Moments {
    /// Running mean of the gradient.
    pub exp_avg: Moment,
    /// Running mean of the squared gradient; of the same dtype.
    pub exp_avg_sq: Moment,
    /// Number of updates so far.
    pub step: u64,
}

/// One moment of each parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum Moment {
    /// Exact: four bytes each.
    F32(Vec<f32>),
    /// Two bytes each, rounded at random at every update ([`crate::optimizer::AdamW`]).
    Bf16(Vec<bf16>),
}

impl Default for Moment {
    fn default() -> Self {
        Self::F32(Vec::new())
    }
}

impl Moments {
    /// Zero moments of `n` parameters, in f32.
    pub fn zeros(n: usize) -> Self {
        Self { exp_avg: Moment::F32(vec![0.0; n]), exp_avg_sq: Moment::F32(vec![0.0; n]), step: 0 }
    }

    /// Zero moments of `n` parameters, in bf16.
    pub fn zeros_bf16(n: usize) -> Self {
        Self { exp_avg: Moment::Bf16(vec![bf16::ZERO; n]), exp_avg_sq: Moment::Bf16(vec![bf16::ZERO; n]), step: 0 }
    }

    /// Zero moments of `n` parameters.
    pub fn zeros_as(n: usize, in_bf16: bool) -> Self {
        if in_bf16 { Self::zeros_bf16(n) } else { Self::zeros(n) }
    }

    /// Number of parameters.
    pub fn len(&self) -> usize {
        self.exp_avg.len()
    }

    /// Whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Moment {
    /// Number of parameters.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    /// Whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether it takes two bytes each.
    pub fn is_bf16(&self) -> bool {
        matches!(self, Self::Bf16(_))
    }

    /// The values of a range; exact.
    pub fn f32s(&self, range: Range<usize>) -> Vec<f32> {
        match self {
            Self::F32(values) => values[range].to_vec(),
            Self::Bf16(values) => values[range].iter().map(|v| v.to_f32()).collect(),
        }
    }

    /// Replaces the values from `start` on; rounded to the nearest where they take two bytes, which those that were
    /// read from such a moment are already.
    pub fn write(&mut self, start: usize, from: &[f32]) {
        match self {
            Self::F32(values) => values[start..start + from.len()].copy_from_slice(from),
            Self::Bf16(values) => {
                values[start..start + from.len()].iter_mut().zip(from).for_each(|(v, f)| *v = bf16::from_f32(*f));
            }
        }
    }
}
