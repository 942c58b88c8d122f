//! Slow copies of the parameters: the old policy, and the average that is evaluated.

use roll_core::{EVALUATED_POLICY, Error, Model, Result, StateDict, Tensor};

use super::averages::{blend, evaluation_decay};

/// Names of the copies in a state.
const OLD: &str = "old_policy";
const EVALUATED: &str = EVALUATED_POLICY;

/// Copies of the flat parameters, each whole on every rank.
#[derive(Debug, Default)]
pub(crate) struct SlowCopies {
    /// The policy that generates.
    old: Option<Vec<f32>>,
    /// The one that is evaluated.
    evaluated: Option<Vec<f32>>,
}

/// The model's parameters as they are now.
pub(crate) fn parameters(model: &dyn Model) -> Result<Vec<f32>> {
    let mut values = vec![0.0; model.parameter_count()];
    model.read_parameters(&mut values)?;
    Ok(values)
}

/// Runs `work` with `values` as the model's parameters, and restores the former ones, also after an error.
pub(crate) fn with_parameters<C, T>(
    context: &mut C,
    model: impl Fn(&mut C) -> &mut dyn Model,
    values: &[f32],
    work: impl FnOnce(&mut C) -> Result<T>,
) -> Result<T> {
    let current = parameters(model(context))?;
    model(context).write_parameters(values)?;
    let done = work(context);
    model(context).write_parameters(&current)?;
    done
}

impl SlowCopies {
    /// Copies the current parameters of the model for the copies that are used.
    pub(crate) fn begin(&mut self, model: &dyn Model, keeps_old: bool, keeps_evaluated: bool) -> Result<()> {
        let copy = |keeps: bool| keeps.then(|| parameters(model)).transpose();
        *self = Self { old: copy(keeps_old)?, evaluated: copy(keeps_evaluated)? };
        Ok(())
    }

    /// The policy that generates; initially a copy of the model.
    pub(crate) fn old(&mut self, model: &dyn Model) -> Result<&[f32]> {
        check_length(OLD, self.old.as_deref(), model)?;
        match &mut self.old {
            Some(old) => Ok(old),
            none => Ok(none.insert(parameters(model)?)),
        }
    }

    /// The policy to evaluate; `None` if it is the model.
    pub(crate) fn evaluated(&self, model: &dyn Model) -> Result<Option<&[f32]>> {
        check_length(EVALUATED, self.evaluated.as_deref(), model)?;
        Ok(self.evaluated.as_deref())
    }

    /// Lets the generating policy follow the model: `old <- d old + (1 - d) model`.
    pub(crate) fn follow(&mut self, model: &dyn Model, d: f64) -> Result<()> {
        let current = parameters(model)?;
        self.old(model)?;
        self.old.iter_mut().for_each(|old| blend(old, &current, d));
        Ok(())
    }

    /// Lets the evaluated policy, if one is kept, follow the model after `updates` of them, by a weight of at most
    /// `most`.
    pub(crate) fn average(&mut self, model: &dyn Model, updates: u64, most: f64) -> Result<()> {
        check_length(EVALUATED, self.evaluated.as_deref(), model)?;
        if let Some(evaluated) = &mut self.evaluated {
            blend(evaluated, &parameters(model)?, evaluation_decay(updates, most));
        }
        Ok(())
    }

    /// The copies that there are, for a checkpoint.
    pub(crate) fn state(&self) -> Result<StateDict> {
        let copies = [(OLD, &self.old), (EVALUATED, &self.evaluated)];
        let there = copies.into_iter().filter_map(|(name, copy)| Some((name, copy.as_ref()?)));
        there.map(|(name, copy)| Ok((name.to_string(), Tensor::new(copy.clone(), [copy.len()])?))).collect()
    }

    /// Restores [`SlowCopies::state`].
    pub(crate) fn load(&mut self, state: &StateDict) -> Result<()> {
        if let Some(name) = state.keys().find(|name| *name != OLD && *name != EVALUATED) {
            return Err(Error::Misuse(format!("the tensor `{name}` does not belong to this algorithm")));
        }
        let copy = |name: &str| state.get(name).map(|tensor| Ok::<_, Error>(tensor.f32s()?.to_vec())).transpose();
        *self = Self { old: copy(OLD)?, evaluated: copy(EVALUATED)? };
        Ok(())
    }
}

/// Fails if the length of a copy is not that of the model's parameters.
fn check_length(name: &str, copy: Option<&[f32]>, model: &dyn Model) -> Result<()> {
    match copy {
        Some(copy) if copy.len() != model.parameter_count() => {
            Err(Error::shape(name, format!("{} parameters", model.parameter_count()), &[copy.len()]))
        }
        _ => Ok(()),
    }
}
