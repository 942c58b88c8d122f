//! Learning-rate schedules, as Hugging Face transformers 4.57 defines them.

use std::f64::consts::PI;

/// Shape of a schedule; the names of `lr_scheduler_type`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LrSchedulerType {
    /// Always the base rate; warm-up is ignored.
    #[default]
    Constant,
    /// Linear warm-up, then the base rate.
    ConstantWithWarmup,
    /// Linear warm-up, then linear to 0 at the last step.
    Linear,
    /// Linear warm-up, then half a cosine to 0 at the last step.
    Cosine,
    /// Linear warm-up, then `num_cycles` times half a cosine, each from the base rate to 0.
    CosineWithRestarts,
    /// Linear warm-up, then from the base rate to `lr_end`, by the share of steps that is left to the power `power`.
    Polynomial,
    /// Linear warm-up, then by one over the square root of the step, with no end: to a half after three times
    /// `timescale`.
    InverseSqrt,
}

/// Options of schedules; each is for those that its documentation names.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LrSchedulerOptions {
    /// Cycles after the warm-up: of `cosine` whole waves, half a one by default; of `cosine_with_restarts` falls, one by
    /// default, which makes it `cosine`.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub num_cycles: Option<f64>,
    /// Power of `polynomial`: 1 is a line.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub power: f64,
    /// Learning rate at the end of `polynomial`; below the highest.
    #[schemars(range(min = 0))]
    pub lr_end: f64,
    /// Steps that `inverse_sqrt` counts by. `null`: those of the warm-up, or 10000 without one.
    #[schemars(range(min = 1))]
    pub timescale: Option<u64>,
}

impl Default for LrSchedulerOptions {
    fn default() -> Self {
        Self { num_cycles: None, power: 1.0, lr_end: 1e-7, timescale: None }
    }
}

/// Steps that an inverse square root counts by where nothing else says.
const TIMESCALE: u64 = 10_000;

/// Learning rate by optimizer step.
#[derive(Clone, Debug, PartialEq)]
pub struct LrSchedule {
    shape: LrSchedulerType,
    base: f64,
    warmup_steps: u64,
    total_steps: u64,
    options: LrSchedulerOptions,
}

impl LrSchedule {
    /// `total_steps` counts optimizer updates of the whole run, warm-up included. Warns when `warmup_steps` has no
    /// effect.
    pub fn new(shape: LrSchedulerType, base: f64, warmup_steps: u64, total_steps: u64) -> Self {
        if shape == LrSchedulerType::Constant && warmup_steps > 0 {
            tracing::warn!(
                warmup_steps,
                "lr_scheduler_type `constant` ignores warmup_steps; use `constant_with_warmup` to warm up"
            );
        }
        Self { shape, base, warmup_steps, total_steps, options: LrSchedulerOptions::default() }
    }

    /// The same with these options.
    pub fn with_options(self, options: LrSchedulerOptions) -> Self {
        Self { options, ..self }
    }

    /// The rate that update `step`, from 0, uses. With warm-up the first is 0. Beyond `total_steps` a linear schedule
    /// stays at 0 and a cosine rises again, as in the reference.
    pub fn at(&self, step: u64) -> f64 {
        let (step, warmup, total) = (step as f64, self.warmup_steps as f64, self.total_steps as f64);
        let remaining = (total - warmup).max(1.0);
        let progress = (step - warmup) / remaining;
        let factor = match self.shape {
            LrSchedulerType::Constant => 1.0,
            _ if step < warmup => step / warmup.max(1.0),
            LrSchedulerType::ConstantWithWarmup => 1.0,
            LrSchedulerType::Linear => ((total - step) / remaining).max(0.0),
            LrSchedulerType::Cosine => half_wave(self.options.num_cycles.unwrap_or(0.5) * 2.0 * progress),
            LrSchedulerType::CosineWithRestarts if progress >= 1.0 => 0.0,
            LrSchedulerType::CosineWithRestarts => half_wave(self.options.num_cycles.unwrap_or(1.0) * progress % 1.0),
            LrSchedulerType::Polynomial => return self.polynomial(progress),
            LrSchedulerType::InverseSqrt => {
                let warmed_up = if self.warmup_steps > 0 { self.warmup_steps } else { TIMESCALE };
                let timescale = self.options.timescale.unwrap_or(warmed_up) as f64;
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

/// From 1 at 0 to 0 at 1, and back.
fn half_wave(progress: f64) -> f64 {
    (0.5 * (1.0 + (PI * progress).cos())).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constant_ignores_warm_up_and_constant_with_warmup_does_not() {
        assert_eq!(LrSchedule::new(LrSchedulerType::Constant, 2.0, 10, 50).at(0), 2.0);
        assert_eq!(LrSchedule::new(LrSchedulerType::ConstantWithWarmup, 2.0, 10, 50).at(5), 1.0);
    }

    #[test]
    fn decaying_schedules_end_at_zero_even_when_warm_up_is_the_whole_run() {
        for shape in [LrSchedulerType::Linear, LrSchedulerType::Cosine] {
            assert!(LrSchedule::new(shape, 2.0, 10, 50).at(50).abs() < 1e-12);
            assert!(LrSchedule::new(shape, 2.0, 50, 50).at(60).is_finite());
        }
    }

    /// `rates[i]` at `steps[i]`, to the digits that were derived.
    fn follows(schedule: LrSchedule, expected: &[(u64, f64)]) {
        for &(step, rate) in expected {
            assert!(
                (schedule.at(step) - rate).abs() < 1e-12,
                "{schedule:?} at {step}: {} for {rate}",
                schedule.at(step)
            );
        }
    }

    // By hand from transformers' formulas, with base rate 2, 10 steps of warm-up and 50 steps in all.
    #[test]
    fn restarts_fall_from_the_base_rate_to_zero_in_each_cycle() {
        let restarts = LrSchedule::new(LrSchedulerType::CosineWithRestarts, 2.0, 10, 50);
        // One cycle: cos(pi / 4) = 0.7071..., cos(pi / 2) = 0.
        follows(restarts.clone(), &[(5, 1.0), (10, 2.0), (20, 1.0 + 0.5_f64.sqrt()), (30, 1.0), (50, 0.0), (60, 0.0)]);
        let two = LrSchedulerOptions { num_cycles: Some(2.0), ..LrSchedulerOptions::default() };
        // Two: the second begins at step 30.
        follows(restarts.with_options(two), &[(10, 2.0), (20, 1.0), (30, 2.0), (40, 1.0), (50, 0.0)]);
    }

    #[test]
    fn a_whole_wave_of_the_cosine_is_back_at_its_end() {
        let whole = LrSchedulerOptions { num_cycles: Some(1.0), ..LrSchedulerOptions::default() };
        let cosine = LrSchedule::new(LrSchedulerType::Cosine, 2.0, 10, 50).with_options(whole);
        follows(cosine, &[(10, 2.0), (20, 1.0), (30, 0.0), (50, 2.0)]);
    }

    #[test]
    fn a_polynomial_falls_to_its_end_and_stays_there() {
        let options = |power, lr_end| LrSchedulerOptions { power, lr_end, ..LrSchedulerOptions::default() };
        let polynomial = LrSchedule::new(LrSchedulerType::Polynomial, 2.0, 10, 50);
        // Power 2 to 1: half the way is (2 - 1) * 0.25 + 1.
        let square = polynomial.clone().with_options(options(2.0, 1.0));
        follows(square, &[(5, 1.0), (10, 2.0), (20, 1.5625), (30, 1.25), (50, 1.0), (60, 1.0)]);
        follows(polynomial, &[(30, 1.0 + 0.5e-7), (50, 1e-7)]);
    }

    #[test]
    fn an_inverse_square_root_is_a_half_after_three_times_its_timescale() {
        let root = LrSchedule::new(LrSchedulerType::InverseSqrt, 2.0, 10, 50);
        // The warm-up is its timescale: sqrt(10 / 40).
        follows(root.clone(), &[(5, 1.0), (10, 2.0), (40, 1.0), (90, 2.0 / 3.0)]);
        let slow = LrSchedulerOptions { timescale: Some(20), ..LrSchedulerOptions::default() };
        follows(root.with_options(slow), &[(10, 2.0), (70, 1.0)]);
        follows(LrSchedule::new(LrSchedulerType::InverseSqrt, 2.0, 0, 50), &[(0, 2.0), (30_000, 1.0)]);
    }
}
