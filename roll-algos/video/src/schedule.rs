//! The noise levels that a flow-matching sampler passes through.
//!
//! A shift `s` bends a noise level `t` in [0, 1] towards noise: `sigma = s t / (1 + (s - 1) t)`. Tables are computed in
//! f32 where the reference implementation does so, because the rounded value of a timestep decides whether it lies
//! above or below the boundary between the experts.

use roll_core::{Error, Result, ScheduleFacts, Sigma, Timestep};

/// The timestep of pure noise: the scale that the networks were trained on.
const TRAIN_TIMESTEPS: f32 = 1000.0;

/// A table of `n + 1` noise levels for `n` steps. The levels descend to 0, the data, except in the one step of
/// `FlowSchedule::between`.
#[derive(Clone, Debug, PartialEq)]
pub struct FlowSchedule {
    sigmas: Vec<f32>,
    timesteps: Vec<f32>,
}

impl FlowSchedule {
    /// `steps` steps from pure noise to data: `t = linspace(1000, 0, steps + 1) / 1000`, shifted. This is the table of
    /// Wan's training.
    pub fn new(steps: usize, shift: f64) -> Result<Self> {
        check(steps, shift)?;
        let step = -f64::from(TRAIN_TIMESTEPS) / steps as f64;
        let linear = (0..steps).map(|i| (i as f64 * step + f64::from(TRAIN_TIMESTEPS)) as f32 / TRAIN_TIMESTEPS);
        Ok(Self::shifted(linear, shift))
    }

    /// The table of Wan's official UniPC sampler: `t = linspace(0.999, 0, steps + 1)`, shifted. The timesteps that the
    /// model receives are truncated to integers.
    pub fn unipc(steps: usize, shift: f64) -> Result<Self> {
        check(steps, shift)?;
        // The first level is an f32 number and the arithmetic is f64, as in the official sampler, because the last bit
        // may decide to which integer a timestep is truncated.
        let first = f64::from(0.999f32);
        let linear = (0..steps).map(|i| i as f64 * (-first / steps as f64) + first);
        let levels: Vec<f64> = linear.map(|t| shift * t / (1.0 + (shift - 1.0) * t)).collect();
        let timesteps = levels.iter().map(|s| (s * f64::from(TRAIN_TIMESTEPS)).trunc() as f32).chain([0.0]).collect();
        Ok(Self { sigmas: levels.iter().map(|s| *s as f32).chain([0.0]).collect(), timesteps })
    }

    /// The table of given timesteps, to which the shift is applied. Distilled models list theirs (`[1000, 750, 500,
    /// 250]` with shift 5).
    pub fn from_timesteps(timesteps: &[u32], shift: f64) -> Result<Self> {
        check(timesteps.len(), shift)?;
        let descends = timesteps.windows(2).all(|w| w[0] > w[1]);
        if !descends || timesteps.iter().any(|&t| t == 0 || t > TRAIN_TIMESTEPS as u32) {
            return Err(Error::config(
                "timesteps",
                format!("must descend within 1 to {TRAIN_TIMESTEPS}, found {timesteps:?}"),
            ));
        }
        Ok(Self::shifted(timesteps.iter().map(|&t| t as f32 / TRAIN_TIMESTEPS), shift))
    }

    /// One step from the noise level `from` to `to`, in either direction.
    pub(crate) fn between(from: Sigma, to: Sigma) -> Self {
        let sigmas = vec![from.0 as f32, to.0 as f32];
        Self { timesteps: sigmas.iter().map(|s| s * TRAIN_TIMESTEPS).collect(), sigmas }
    }

    /// The table of the noise levels `linear` after the shift, with timesteps that are not rounded.
    fn shifted(linear: impl Iterator<Item = f32>, shift: f64) -> Self {
        let (shift, excess) = (shift as f32, (shift - 1.0) as f32);
        let sigmas: Vec<f32> = linear.map(|t| shift * t / (1.0 + excess * t)).chain([0.0]).collect();
        let timesteps = sigmas.iter().map(|s| s * TRAIN_TIMESTEPS).collect();
        Self { sigmas, timesteps }
    }

    /// Number of steps, one less than the table has entries.
    pub fn steps(&self) -> usize {
        self.sigmas.len() - 1
    }

    /// All noise levels, the last one 0.
    pub fn sigmas(&self) -> &[f32] {
        &self.sigmas
    }

    /// All noise levels on the model's scale, the last one 0.
    pub fn timesteps(&self) -> &[f32] {
        &self.timesteps
    }

    /// Noise level before step `i`; for `i == steps()`, after the last step. Panics if `i` is larger.
    pub fn sigma(&self, i: usize) -> Sigma {
        Sigma(f64::from(self.sigmas[i]))
    }

    /// [`FlowSchedule::sigma`] on the model's scale.
    pub fn timestep(&self, i: usize) -> Timestep {
        Timestep(f64::from(self.timesteps[i]))
    }

    /// The noise level before step `i`, computed from the timestep. The model compares it with the boundary of its
    /// experts.
    pub(crate) fn expert_level(&self, i: usize) -> Sigma {
        Sigma(self.timestep(i).0 / f64::from(TRAIN_TIMESTEPS))
    }

    /// Whether trainable parameters act at step `i`.
    pub(crate) fn is_trained(&self, i: usize, facts: ScheduleFacts) -> bool {
        facts.trained.contains(self.expert_level(i))
    }

    /// The factor of the velocity in step `i`: `sigma_{i+1} - sigma_i`, which is negative. Panics unless `i < steps()`.
    pub fn delta(&self, i: usize) -> f32 {
        self.sigmas[i + 1] - self.sigmas[i]
    }

    /// Weight of each timestep (without the final 0) in flow-matching training: a bell around the middle, whose mean is
    /// 1. The formula assumes a step for each of the network's 1000 timesteps.
    pub fn training_weights(&self) -> Vec<f32> {
        let n = self.steps() as f64;
        let bell = |t: &f32| (-2.0 * ((f64::from(*t) - n / 2.0) / n).powi(2)).exp();
        let bells: Vec<f64> = self.timesteps[..self.steps()].iter().map(bell).collect();
        let least = bells.iter().copied().fold(f64::INFINITY, f64::min);
        let total: f64 = bells.iter().map(|b| b - least).sum();
        bells.iter().map(|b| ((b - least) * (n / total)) as f32).collect()
    }
}

/// Fails unless there is a step, and the shift is a positive number.
fn check(steps: usize, shift: f64) -> Result<()> {
    if steps == 0 {
        return Err(Error::config("num_inference_steps", "must be at least 1"));
    }
    if !(shift.is_finite() && shift > 0.0) {
        return Err(Error::config("shift", format!("must be a positive number, found {shift}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_table_descends_from_its_start_to_the_data() {
        for schedule in
            [FlowSchedule::new(7, 3.0).unwrap(), FlowSchedule::from_timesteps(&[1000, 500, 1], 3.0).unwrap()]
        {
            assert_eq!(schedule.sigma(0), Sigma(1.0));
            assert_eq!(schedule.timestep(0), Timestep(1000.0));
            assert_eq!(schedule.sigma(schedule.steps()), Sigma(0.0));
            assert!((0..schedule.steps()).all(|i| schedule.delta(i) < 0.0));
        }
    }

    #[test]
    fn a_boundary_belongs_to_the_high_noise_expert() {
        assert!(!Timestep(900.0).uses_low_noise(0.9));
        assert!(Timestep(899.9).uses_low_noise(0.9));
    }

    #[test]
    fn training_weights_have_mean_one() {
        let weights = FlowSchedule::new(1000, 5.0).unwrap().training_weights();
        assert!((weights.iter().sum::<f32>() / 1000.0 - 1.0).abs() < 1e-5);
    }

    #[test]
    fn invalid_schedules_are_errors() {
        assert!(FlowSchedule::new(0, 5.0).is_err());
        assert!(FlowSchedule::new(4, f64::NAN).is_err());
        assert!(FlowSchedule::new(4, -1.0).is_err());
        assert!(FlowSchedule::from_timesteps(&[250, 500], 5.0).is_err());
        assert!(FlowSchedule::from_timesteps(&[2000], 5.0).is_err());
    }
}
