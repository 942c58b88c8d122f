//! Running mean and variance of each latent channel.

use roll_core::{Result, Tensor};

/// Decay of the running moments per update.
const KEPT: f32 = 0.98;

/// Mean and variance of each channel.
#[derive(Clone, Debug, PartialEq)]
pub struct Moments {
    /// Means.
    pub mean: Vec<f32>,
    /// Variances.
    pub variance: Vec<f32>,
}

impl Moments {
    /// Returns the moments of a standard normal distribution.
    pub fn new(channels: usize) -> Self {
        Self { mean: vec![0.0; channels], variance: vec![1.0; channels] }
    }

    /// Computes the moments of latents, f32 `[C, ...]`.
    pub fn of(latents: &Tensor) -> Result<Self> {
        let values = latents.f32s()?;
        let channels = latents.shape().first().copied().unwrap_or(0);
        let mut found = Self { mean: vec![], variance: vec![] };
        for channel in values.chunks_exact((values.len() / channels.max(1)).max(1)) {
            let n = channel.len() as f64;
            let mean = channel.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
            let variance = channel.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n;
            found.mean.push(mean as f32);
            found.variance.push(variance as f32);
        }
        Ok(found)
    }

    /// Adds a batch to the running moments. The batch's variance is measured around the running mean, because a batch
    /// of one person varies less than people do.
    pub fn update(&mut self, batch: &Self) {
        for (i, (mean, variance)) in self.mean.iter_mut().zip(&mut self.variance).enumerate() {
            let spread = batch.variance[i] + (batch.mean[i] - *mean).powi(2);
            *variance = KEPT * *variance + (1.0 - KEPT) * spread;
            *mean = KEPT * *mean + (1.0 - KEPT) * batch.mean[i];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_moments_reach_those_of_what_they_see() {
        let batches = [[1.0f32, 3.0, -1.0, -1.0], [5.0, 7.0, 1.0, 1.0]];
        let mut moments = Moments::new(2);
        for step in 0..2000 {
            let latents = Tensor::new(batches[step % 2].to_vec(), [2, 2]).unwrap();
            moments.update(&Moments::of(&latents).unwrap());
        }
        // Channel 0 sees 1, 3, 5, 7; channel 1 sees -1, -1, 1, 1.
        for (found, expected) in moments.mean.iter().zip([4.0, 0.0]).chain(moments.variance.iter().zip([5.0, 1.0])) {
            assert!((found - expected).abs() < 0.15, "{moments:?}");
        }
    }
}
