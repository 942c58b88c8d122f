//! Learning-rate schedules, as Hugging Face transformers 4.57 defines them.

use std::f64::consts::PI;

/// Shape of a schedule; the names of `lr_scheduler_type`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
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
}

/// Learning rate by optimizer step.
#[derive(Clone, Debug, PartialEq)]
pub struct LrSchedule {
    shape: LrSchedulerType,
    base: f64,
    warmup_steps: u64,
    total_steps: u64,
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
        Self { shape, base, warmup_steps, total_steps }
    }

    /// The rate that update `step`, from 0, uses. With warm-up the first is 0. Beyond `total_steps` a linear schedule
    /// stays at 0 and a cosine rises again, as in the reference.
    pub fn at(&self, step: u64) -> f64 {
        let (step, warmup, total) = (step as f64, self.warmup_steps as f64, self.total_steps as f64);
        let remaining = (total - warmup).max(1.0);
        let factor = match self.shape {
            LrSchedulerType::Constant => 1.0,
            _ if step < warmup => step / warmup.max(1.0),
            LrSchedulerType::ConstantWithWarmup => 1.0,
            LrSchedulerType::Linear => ((total - step) / remaining).max(0.0),
            LrSchedulerType::Cosine => (0.5 * (1.0 + (PI * (step - warmup) / remaining).cos())).max(0.0),
        };
        self.base * factor
    }
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
}
