//! Learning-rate schedules, as Hugging Face transformers 4.57 defines them.

use std::f64::consts::PI;

/// Shape of the learning-rate schedule, with the names of `lr_scheduler_type` in transformers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LrSchedulerType {
    /// Always the base rate; warm-up is ignored.
    #[default]
    Constant,
    /// Linear warm-up, then the base rate.
    ConstantWithWarmup,
    /// Linear warm-up, then a linear decay to 0 at the last step.
    Linear,
    /// Linear warm-up, then half a cosine wave to 0 at the last step.
    Cosine,
    /// Linear warm-up, then `num_cycles` half cosine waves, each from the base rate to 0.
    CosineWithRestarts,
    /// Linear warm-up, then a polynomial decay from the base rate to `lr_end`: the remaining fraction of steps to the
    /// power `power`.
    Polynomial,
    /// Linear warm-up, then a decay by the inverse square root of the step, which never reaches 0: half the base rate
    /// after three times `timescale`.
    InverseSqrt,
}

/// Options of schedules; each applies only to the schedules that its documentation names.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LrSchedulerOptions {
    /// Number of cycles after the warm-up. `cosine` counts whole waves (default 0.5); `cosine_with_restarts` counts
    /// decays to 0 (default 1, which equals `cosine`).
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub num_cycles: Option<f64>,
    /// Power of `polynomial`; 1 is linear.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub power: f64,
    /// Learning rate at the end of `polynomial`; less than the base rate.
    #[schemars(range(min = 0))]
    pub lr_end: f64,
    /// Timescale of `inverse_sqrt`, in steps. `null`: the warm-up steps, or 10000 without warm-up.
    #[schemars(range(min = 1))]
    pub timescale: Option<u64>,
}

impl Default for LrSchedulerOptions {
    fn default() -> Self {
        Self { num_cycles: None, power: 1.0, lr_end: 1e-7, timescale: None }
    }
}

/// Default timescale of `inverse_sqrt` without warm-up, in steps.
const DEFAULT_TIMESCALE: u64 = 10_000;

/// The learning rate as a function of the optimizer step.
#[derive(Clone, Debug, PartialEq)]
pub struct LrSchedule {
    shape: LrSchedulerType,
    /// The base rate.
    base: f64,
    warmup_steps: u64,
    total_steps: u64,
    options: LrSchedulerOptions,
}

impl LrSchedule {
    /// Creates a schedule. `total_steps` counts the optimizer updates of the whole run, warm-up included.
    pub fn new(shape: LrSchedulerType, base: f64, warmup_steps: u64, total_steps: u64) -> Self {
        Self { shape, base, warmup_steps, total_steps, options: LrSchedulerOptions::default() }
    }

    /// Returns the schedule with other options.
    pub fn with_options(self, options: LrSchedulerOptions) -> Self {
        Self { options, ..self }
    }

    /// The learning rate of update `step`, counted from 0. With warm-up, the rate of update 0 is 0. Beyond
    /// `total_steps`, a linear schedule stays at 0 and a cosine rises again, as in transformers.
    pub fn at(&self, step: u64) -> f64 {
        let (step, warmup, total) = (step as f64, self.warmup_steps as f64, self.total_steps as f64);
        let steps_after_warmup = (total - warmup).max(1.0);
        let progress = (step - warmup) / steps_after_warmup;
        let factor = match self.shape {
            LrSchedulerType::Constant => 1.0,
            _ if step < warmup => step / warmup.max(1.0),
            LrSchedulerType::ConstantWithWarmup => 1.0,
            LrSchedulerType::Linear => ((total - step) / steps_after_warmup).max(0.0),
            LrSchedulerType::Cosine => raised_cosine(self.options.num_cycles.unwrap_or(0.5) * 2.0 * progress),
            LrSchedulerType::CosineWithRestarts if progress >= 1.0 => 0.0,
            LrSchedulerType::CosineWithRestarts => {
                raised_cosine(self.options.num_cycles.unwrap_or(1.0) * progress % 1.0)
            }
            LrSchedulerType::Polynomial => return self.polynomial(progress),
            LrSchedulerType::InverseSqrt => {
                let default = if self.warmup_steps > 0 { self.warmup_steps } else { DEFAULT_TIMESCALE };
                let timescale = self.options.timescale.unwrap_or(default) as f64;
                ((step - warmup + timescale) / timescale).sqrt().recip()
            }
        };
        self.base * factor
    }

    fn polynomial(&self, progress: f64) -> f64 {
        let end = self.options.lr_end;
        (self.base - end) * (1.0 - progress).max(0.0).powf(self.options.power) + end
    }
}

/// A cosine wave of period 2 between 0 and 1: 1 at 0, 0 at 1, 1 at 2.
fn raised_cosine(progress: f64) -> f64 {
    (0.5 * (1.0 + (PI * progress).cos())).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_constant_ignores_warm_up() {
        assert_eq!(LrSchedule::new(LrSchedulerType::Constant, 2.0, 10, 50).at(0), 2.0);
        assert_eq!(LrSchedule::new(LrSchedulerType::ConstantWithWarmup, 2.0, 10, 50).at(5), 1.0);
    }

    #[test]
    fn decaying_schedules_end_at_zero_after_any_warm_up() {
        for shape in [LrSchedulerType::Linear, LrSchedulerType::Cosine] {
            assert!(LrSchedule::new(shape, 2.0, 10, 50).at(50).abs() < 1e-12);
            assert!(LrSchedule::new(shape, 2.0, 50, 50).at(60).is_finite());
        }
    }

    /// Asserts the learning rate at each given step.
    fn follows(schedule: LrSchedule, expected: &[(u64, f64)]) {
        for &(step, rate) in expected {
            assert!(
                (schedule.at(step) - rate).abs() < 1e-12,
                "{schedule:?} at {step}: {} for {rate}",
                schedule.at(step)
            );
        }
    }

    // Expected values are computed by hand from transformers' formulas, for base rate 2, 10 steps of warm-up and 50
    // steps in all.
    #[test]
    fn cosine_restarts_decay_in_each_cycle() {
        let restarts = LrSchedule::new(LrSchedulerType::CosineWithRestarts, 2.0, 10, 50);
        // One cycle; cos(pi / 4) = 0.7071..., cos(pi / 2) = 0.
        follows(restarts.clone(), &[(5, 1.0), (10, 2.0), (20, 1.0 + 0.5_f64.sqrt()), (30, 1.0), (50, 0.0), (60, 0.0)]);
        let two = LrSchedulerOptions { num_cycles: Some(2.0), ..LrSchedulerOptions::default() };
        // Two cycles; the second begins at step 30.
        follows(restarts.with_options(two), &[(10, 2.0), (20, 1.0), (30, 2.0), (40, 1.0), (50, 0.0)]);
    }

    #[test]
    fn a_whole_cosine_wave_returns_to_the_base_rate() {
        let whole = LrSchedulerOptions { num_cycles: Some(1.0), ..LrSchedulerOptions::default() };
        let cosine = LrSchedule::new(LrSchedulerType::Cosine, 2.0, 10, 50).with_options(whole);
        follows(cosine, &[(10, 2.0), (20, 1.0), (30, 0.0), (50, 2.0)]);
    }

    #[test]
    fn a_polynomial_decays_to_its_end() {
        let options = |power, lr_end| LrSchedulerOptions { power, lr_end, ..LrSchedulerOptions::default() };
        let polynomial = LrSchedule::new(LrSchedulerType::Polynomial, 2.0, 10, 50);
        // Power 2 and end 1: halfway the rate is (2 - 1) * 0.25 + 1.
        let square = polynomial.clone().with_options(options(2.0, 1.0));
        follows(square, &[(5, 1.0), (10, 2.0), (20, 1.5625), (30, 1.25), (50, 1.0), (60, 1.0)]);
        follows(polynomial, &[(30, 1.0 + 0.5e-7), (50, 1e-7)]);
    }

    #[test]
    fn an_inverse_square_root_halves_after_three_timescales() {
        let root = LrSchedule::new(LrSchedulerType::InverseSqrt, 2.0, 10, 50);
        // The timescale is the warm-up: sqrt(10 / 40).
        follows(root.clone(), &[(5, 1.0), (10, 2.0), (40, 1.0), (90, 2.0 / 3.0)]);
        let slow = LrSchedulerOptions { timescale: Some(20), ..LrSchedulerOptions::default() };
        follows(root.with_options(slow), &[(10, 2.0), (70, 1.0)]);
        follows(LrSchedule::new(LrSchedulerType::InverseSqrt, 2.0, 0, 50), &[(0, 2.0), (30_000, 1.0)]);
    }
}
