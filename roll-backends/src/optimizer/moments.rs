//! The moments of AdamW.

/// Moments of a flat slice of parameters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Moments {
    /// Running mean of the gradient.
    pub exp_avg: Vec<f32>,
    /// Running mean of its square.
    pub exp_avg_sq: Vec<f32>,
    /// Updates so far.
    pub step: u64,
}

impl Moments {
    /// Zero moments of `n` parameters.
    pub fn zeros(n: usize) -> Self {
        Self { exp_avg: vec![0.0; n], exp_avg_sq: vec![0.0; n], step: 0 }
    }
}
