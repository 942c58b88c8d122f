//! The optimizer's state in a checkpoint, the same for every strategy and number of ranks.
//!
//! Its tensors are `step` (an i64 scalar), and for each parameter `exp_avg.NAME` and `exp_avg_sq.NAME`: first and
//! second moment, f32, in the shape of the parameter.

use roll_core::{DType, Error, ParameterSpec, Result, StateDict, Tensor, flat};

const STEP: &str = "step";
const EXP_AVG: &str = "exp_avg.";
const EXP_AVG_SQ: &str = "exp_avg_sq.";

/// Adds the first and second moments of some parameters, in their flat layout.
pub(super) fn save_part(state: &mut StateDict, specs: &[ParameterSpec], moments: [&[f32]; 2]) -> Result<()> {
    for (kind, values) in [EXP_AVG, EXP_AVG_SQ].into_iter().zip(moments) {
        for (name, tensor) in flat::to_state(specs, values)? {
            state.insert(format!("{kind}{name}"), tensor);
        }
    }
    Ok(())
}

pub(super) fn save_step(state: &mut StateDict, step: u64) -> Result<()> {
    let step = i64::try_from(step).unwrap_or(i64::MAX);
    state.insert(STEP.into(), Tensor::new(vec![step], [])?);
    Ok(())
}

/// A checked optimizer state, whose tensors match the parameters.
pub(super) struct SavedOptimizerState<'a> {
    state: &'a StateDict,
    pub(super) step: u64,
}

impl<'a> SavedOptimizerState<'a> {
    /// Checks a state. Fails if a tensor is missing, unexpected, misshapen, or holds values that no moment can have:
    /// values that are not finite, and negative second moments.
    pub(super) fn check(specs: &[ParameterSpec], state: &'a StateDict) -> Result<Self> {
        let step = state.get(STEP).ok_or_else(|| invalid_state(format!("`{STEP}` is missing")))?;
        let step = match step.as_slice::<i64>() {
            Ok([step]) if *step >= 0 => *step as u64,
            _ => return Err(invalid_state(format!("`{STEP}` must be one i64, at least 0, found {step:?}"))),
        };
        for spec in specs {
            for kind in [EXP_AVG, EXP_AVG_SQ] {
                let name = format!("{kind}{}", spec.name);
                let tensor =
                    state.get(&name).ok_or_else(|| invalid_state(format!("{kind}*: `{}` is missing", spec.name)))?;
                if tensor.dtype() != DType::F32 {
                    return Err(invalid_state(format!("`{name}` must be f32, found {}", tensor.dtype())));
                }
                if tensor.shape() != spec.shape {
                    let (expected, found) = (&spec.shape, tensor.shape());
                    return Err(invalid_state(format!("`{name}`: expected shape {expected:?}, found {found:?}")));
                }
                let values = tensor.to_f32_vec();
                if let Some(at) = values.iter().position(|v| !v.is_finite()) {
                    return Err(invalid_state(format!("`{name}`: value {at} is {}", values[at])));
                }
                if kind == EXP_AVG_SQ && values.iter().any(|v| *v < 0.0) {
                    return Err(invalid_state(format!("`{name}`: a mean of squares is negative")));
                }
            }
        }
        let is_known = |key: &str| {
            let name = key.strip_prefix(EXP_AVG).or_else(|| key.strip_prefix(EXP_AVG_SQ));
            key == STEP || name.is_some_and(|name| specs.iter().any(|s| s.name == name))
        };
        match state.keys().find(|key| !is_known(key)) {
            Some(key) => Err(invalid_state(format!("the tensor `{key}` does not belong to it"))),
            None => Ok(Self { state, step }),
        }
    }

    /// First and second moments of some parameters, in the flat layout.
    pub(super) fn flat(&self, specs: &[ParameterSpec]) -> Result<[Vec<f32>; 2]> {
        let moments_of_kind = |kind: &str| {
            let mut flat = Vec::new();
            for spec in specs {
                let name = format!("{kind}{}", spec.name);
                let tensor = self.state.get(&name).ok_or_else(|| invalid_state(format!("`{name}` is missing")))?;
                flat.extend(tensor.to_f32_vec());
            }
            Ok::<_, Error>(flat)
        };
        Ok([moments_of_kind(EXP_AVG)?, moments_of_kind(EXP_AVG_SQ)?])
    }
}

fn invalid_state(problem: String) -> Error {
    Error::Unsupported(format!("this optimizer state does not fit the model under training: {problem}"))
}
