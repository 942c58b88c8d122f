//! The flow-matching loss: the squared distance of a velocity from `noise - data`, the velocity of the straight path
//! between data and noise.

use crate::FlowSchedule;
use roll_core::{Error, Result, Sigma, Tensor};

/// The noised data at a noise level: `x = (1 - sigma) data + sigma noise`.
pub fn mixed(data: &Tensor, noise: &[f32], sigma: Sigma) -> Result<Tensor> {
    let s = sigma.0 as f32;
    let values = data.f32s()?.iter().zip(noise).map(|(x, e)| (1.0 - s) * x + s * e).collect::<Vec<f32>>();
    Tensor::new(values, data.shape())
}

/// Returns the mean of `(v - (noise - data))^2` over elements of `[C, T, H, W]`, and its gradient with respect to `v`.
/// The first `known` frames are left out, because they are given to the model. With `weights`, `[T, H, W]`, the mean is
/// weighted. Fails if the weights add up to 0.
pub fn velocity_loss(
    v: &Tensor,
    data: &Tensor,
    noise: &[f32],
    known: usize,
    weights: Option<&[f32]>,
) -> Result<(f64, Tensor)> {
    let [channels, frames, height, width] = *v.shape() else {
        return Err(Error::shape("velocity", "[C, T, H, W]", v.shape()));
    };
    if data.shape() != v.shape() || noise.len() != v.len() {
        return Err(Error::shape("velocity", format!("{:?}", data.shape()), v.shape()));
    }
    // Numbers of elements of one channel, and of its known frames.
    let (channel_len, known_len) = (frames * height * width, known.min(frames) * height * width);
    if let Some(weights) = weights.filter(|weights| weights.len() != channel_len) {
        return Err(Error::shape("weights of the loss", format!("{:?}", [frames, height, width]), &[weights.len()]));
    }
    let weight_at = |position: usize| weights.map_or(1.0, |weights| weights[position]);
    let total_weight = channels as f64 * (known_len..channel_len).map(|i| f64::from(weight_at(i))).sum::<f64>();
    if total_weight <= 0.0 {
        return Err(Error::Misuse("a loss in which nothing counts".into()));
    }
    let slope = (2.0 / total_weight) as f32;
    let mut squares = 0.0;
    let mut gradient = vec![0.0; v.len()];
    let (v, x) = (v.f32s()?, data.f32s()?);
    for start in (0..channels).map(|c| c * channel_len) {
        for position in known_len..channel_len {
            let (weight, i) = (weight_at(position), start + position);
            let difference = v[i] - (noise[i] - x[i]);
            squares += f64::from(weight) * f64::from(difference).powi(2);
            gradient[i] = slope * weight * difference;
        }
    }
    Ok((squares / total_weight, Tensor::new(gradient, data.shape())?))
}

/// Number of noise levels in a table of weights: one for each timestep of the network.
const TABLE_STEPS: usize = 1000;

/// Factor of the loss at each noise level.
#[derive(Clone, Debug, PartialEq)]
pub enum Weighting {
    /// 1 at every level.
    Uniform,
    /// The weight of the nearest level of a fine schedule: the schedule, and the weight of each of its steps.
    Table(FlowSchedule, Vec<f32>),
}

impl Weighting {
    /// A bell around the middle whose mean is 1 over levels drawn with this shift.
    pub fn bell(shift: f64) -> Result<Self> {
        let schedule = FlowSchedule::new(TABLE_STEPS, shift)?;
        let weights = schedule.training_weights();
        Ok(Self::Table(schedule, weights))
    }

    /// The weight at `sigma`.
    pub fn at(&self, sigma: Sigma) -> f64 {
        match self {
            Self::Uniform => 1.0,
            Self::Table(schedule, weights) => {
                let sigmas = &schedule.sigmas()[..schedule.steps()];
                // The levels descend: `sigma` lies between entry `below - 1` and entry `below`.
                let below = sigmas.partition_point(|s| f64::from(*s) > sigma.0);
                let distance = |i: usize| (f64::from(sigmas[i]) - sigma.0).abs();
                let neighbours = below.saturating_sub(1)..=below.min(sigmas.len() - 1);
                let nearest = neighbours.min_by(|a, b| distance(*a).total_cmp(&distance(*b))).unwrap_or(0);
                f64::from(weights[nearest])
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn gradient_matches_finite_differences_and_is_zero_for_known_frames() {
        let data = Tensor::new(vec![0.1f32, 0.2, -0.3, 0.4], [2, 2, 1, 1]).unwrap();
        let noise = [1.0, -1.0, 0.5, 0.2];
        let at = |second: f32, known| {
            let v = Tensor::new(vec![0.3, second, 0.1, -0.2], [2, 2, 1, 1]).unwrap();
            velocity_loss(&v, &data, &noise, known, None).unwrap()
        };
        for known in [0, 1] {
            let quotient = (at(0.61, known).0 - at(0.59, known).0) / 0.02;
            assert!((quotient - f64::from(at(0.6, known).1.f32s().unwrap()[1])).abs() < 1e-4);
        }
        let gradient = at(0.6, 1).1;
        assert_eq!([gradient.f32s().unwrap()[0], gradient.f32s().unwrap()[2]], [0.0, 0.0]);
        // Two values count: (0.6 + 1.2)^2 and (-0.2 + 0.2)^2.
        assert!((at(0.6, 1).0 - 1.62).abs() < 1e-6);
    }

    #[test]
    fn weights_choose_what_counts() {
        let data = Tensor::new(vec![0.1f32, 0.2, -0.3, 0.4], [2, 2, 1, 1]).unwrap();
        let at = |second: f32, weights: Option<&[f32]>| {
            let v = Tensor::new(vec![0.3, second, 0.1, -0.2], [2, 2, 1, 1]).unwrap();
            velocity_loss(&v, &data, &[1.0, -1.0, 0.5, 0.2], 0, weights)
        };
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} or {b}");
        // A weight for each frame, the same in both channels; a common factor has no effect.
        close(at(0.6, Some(&[0.5, 0.5])).unwrap().0, at(0.6, None).unwrap().0);
        let (loss, gradient) = at(0.6, Some(&[0.0, 0.5])).unwrap();
        close(loss, (1.8f64.powi(2) + 0.0) / 2.0);
        assert_eq!([0, 2].map(|i| gradient.f32s().unwrap()[i]), [0.0; 2]);
        let weights = Some(&[1.0, 0.25][..]);
        let quotient = (at(0.61, weights).unwrap().0 - at(0.59, weights).unwrap().0) / 0.02;
        assert!((quotient - f64::from(at(0.6, weights).unwrap().1.f32s().unwrap()[1])).abs() < 1e-4);
        assert!(at(0.6, Some(&[0.0, 0.0])).is_err() && at(0.6, Some(&[1.0; 4])).is_err());
    }

    #[test]
    fn the_bell_is_highest_in_the_middle_and_has_mean_one() {
        let bell = Weighting::bell(5.0).unwrap();
        assert!(bell.at(Sigma(0.5)) > bell.at(Sigma(0.9)) && bell.at(Sigma(0.5)) > bell.at(Sigma(0.1)));
        let shifted = |u: f64| Sigma(5.0 * u / (1.0 + 4.0 * u));
        let mean = (0..2000).map(|i| bell.at(shifted((f64::from(i) + 0.5) / 2000.0))).sum::<f64>() / 2000.0;
        assert!((mean - 1.0).abs() < 1e-2, "{mean}");
    }
}
