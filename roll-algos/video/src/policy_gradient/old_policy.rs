//! The old policy, which generates the videos and slowly follows the policy in training.

use roll_core::{Error, Model, Result, StateDict, StepContext, Tensor, flat};
use serde::{Deserialize, Serialize};

/// Name of the old policy's tensor in a checkpoint.
const OLD: &str = "old_policy";
/// The step at which the decay of [`OldDecay::LateRamp`] begins to rise.
const LATE_RAMP_START: u64 = 75;

/// How much of the old policy stays when it follows the current one after a step: `old <- d old + (1 - d) current`,
/// with a decay d that depends on the number n of the step. The variants are the decay types of DiffusionNFT
/// (arXiv:2509.16117).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OldDecay {
    /// d = 0: the old policy becomes the current one (type 0).
    Follow,
    /// d = min(0.001 n, 0.5) (type 1).
    #[default]
    Ramp,
    /// d = 0 before step 75, then min(0.0075 (n - 75), 0.999) (type 2).
    LateRamp,
}

impl OldDecay {
    /// d after step `n`, counted from 0.
    pub fn at(self, n: u64) -> f64 {
        match self {
            Self::Follow => 0.0,
            Self::Ramp => (0.001 * n as f64).min(0.5),
            Self::LateRamp if n < LATE_RAMP_START => 0.0,
            Self::LateRamp => (0.0075 * (n - LATE_RAMP_START) as f64).min(0.999),
        }
    }
}

/// The flat parameters of the old policy, whole on every rank; `None` before they are first read.
#[derive(Debug, Default)]
pub(crate) struct OldPolicy(Option<Vec<f32>>);

/// Runs `work` with `values` as the model's parameters, and restores the former parameters, also after an error.
pub(crate) fn with_parameters<'c, T>(
    ctx: &mut StepContext<'c>,
    values: &[f32],
    work: impl FnOnce(&mut StepContext<'c>) -> Result<T>,
) -> Result<T> {
    let current = flat::read(ctx.model)?;
    ctx.model.write_parameters(values)?;
    let done = work(ctx);
    ctx.model.write_parameters(&current)?;
    done
}

impl OldPolicy {
    /// A copy of the model's parameters as they are now.
    pub(crate) fn of(model: &dyn Model) -> Result<Self> {
        Ok(Self(Some(flat::read(model)?)))
    }

    /// The parameters of the old policy. At first they are copied from the model. Fails if their number is not that of
    /// the model's parameters.
    pub(crate) fn parameters(&mut self, model: &dyn Model) -> Result<&[f32]> {
        let old = match &mut self.0 {
            Some(old) => old,
            not_read_yet => not_read_yet.insert(flat::read(model)?),
        };
        if old.len() != model.parameter_count() {
            return Err(Error::shape(OLD, format!("{} parameters", model.parameter_count()), &[old.len()]));
        }
        Ok(old)
    }

    /// Follows the model: `old <- d old + (1 - d) model`.
    pub(crate) fn follow(&mut self, model: &dyn Model, d: f64) -> Result<()> {
        let current = flat::read(model)?;
        self.0.iter_mut().for_each(|old| flat::blend(old, &current, d));
        Ok(())
    }

    /// The old policy's tensor, for a checkpoint.
    pub(crate) fn state(&self) -> Result<StateDict> {
        let tensor = |old: &Vec<f32>| Ok((OLD.to_string(), Tensor::new(old.clone(), [old.len()])?));
        self.0.iter().map(tensor).collect()
    }

    /// Restores the result of [`OldPolicy::state`].
    pub(crate) fn load(&mut self, state: &StateDict) -> Result<()> {
        if let Some(name) = state.keys().find(|name| *name != OLD) {
            return Err(Error::Misuse(format!("the tensor `{name}` does not belong to this algorithm")));
        }
        self.0 = state.get(OLD).map(|tensor| Ok::<_, Error>(tensor.f32s()?.to_vec())).transpose()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_decay_stays_below_one() {
        for decay in [OldDecay::Follow, OldDecay::Ramp, OldDecay::LateRamp] {
            for n in [0, 1, 74, 75, 76, 1000, u64::MAX] {
                assert!((0.0..1.0).contains(&decay.at(n)), "{decay:?} {n}");
            }
            assert_eq!(decay.at(0), 0.0);
        }
        assert_eq!((OldDecay::Ramp.at(100), OldDecay::LateRamp.at(77)), (0.1, 0.015));
    }
}
