//! The end of a step, the same for every algorithm: the update, or leaving it out after a value that is not finite.

use std::collections::BTreeMap;

use roll_core::{
    Communicator, DiffusionModel, Error, LanguageModel, Model, Result, StepContext, StrategyReport, communicator,
};

use crate::AlgorithmError;

/// The reaction to a value that is not finite. Parameters never change by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnNonfinite {
    /// The update is left out and reported.
    Skip,
    /// The run stops.
    Stop,
}

/// Updates the parameters by the mean gradient of the `counted` samples of all ranks, unless a rank met a value that
/// is not finite. `before` runs first, with the number of samples of all ranks.
///
/// `nonfinite` has the name and value of a number on this rank that was not finite; such a gradient norm is put there
/// too.
pub(crate) fn finish(
    ctx: &mut StepContext<'_>,
    counted: usize,
    nonfinite: &mut Option<(String, f64)>,
    policy: OnNonfinite,
    before: impl FnOnce(&dyn Communicator, f64) -> Result<()>,
) -> Result<Option<StrategyReport>> {
    // Every rank takes the same branch: each of them must enter the collectives of the update.
    let mut sums = [counted as f32, f32::from(u8::from(nonfinite.is_some()))];
    let ranks = ctx.strategy.ranks().all.as_ref();
    ranks.all_reduce(&mut sums)?;
    // Ranks that work on one sample have all counted it.
    let copies = ranks.world_size() / ctx.strategy.ranks().data.world_size().max(1);
    let (counted, anywhere) = (f64::from(sums[0]) / copies.max(1) as f64, sums[1] > 0.0);
    let mut update = None;
    if anywhere {
        forget(ctx)?;
    } else if counted > 0.0 {
        before(ctx.strategy.ranks().all.as_ref(), counted)?;
        update = Some(ctx.strategy.step(ctx.model, ctx.learning_rate, 1.0 / counted)?);
    }
    if let Some(update) = update.as_ref().filter(|u| !u.applied) {
        nonfinite.get_or_insert(("the gradient norm".into(), update.grad_norm));
    }
    match nonfinite {
        Some((what, value)) if policy == OnNonfinite::Stop => {
            return Err(Error::NonFinite { what: what.clone(), value: *value });
        }
        Some((what, value)) => {
            tracing::warn!(step = ctx.step, value, "{what} is not finite: the update is left out");
        }
        None if anywhere && policy == OnNonfinite::Stop => {
            return Err(Error::NonFinite { what: "a score or loss of another rank".into(), value: f64::NAN });
        }
        None => {}
    }
    Ok(update)
}

/// The seconds that each phase took on the rank that took longest: the others wait for it.
pub(crate) fn slowest(
    ranks: &dyn Communicator,
    seconds: BTreeMap<&'static str, f64>,
) -> Result<BTreeMap<&'static str, f64>> {
    if ranks.world_size() == 1 {
        return Ok(seconds);
    }
    let own: BTreeMap<String, f64> = seconds.iter().map(|(name, value)| (name.to_string(), *value)).collect();
    let all = communicator::join(ranks, &own)?;
    let longest = |name: &str| all.iter().filter_map(|s| s.get(name)).copied().fold(0.0, f64::max);
    Ok(seconds.into_keys().map(|name| (name, longest(name))).collect())
}

/// Clears every gradient accumulator.
pub(crate) fn forget(ctx: &mut StepContext<'_>) -> Result<()> {
    ctx.strategy.discard();
    taken(ctx.model).map(drop)
}

/// The gradient in the model's accumulators, which are empty afterwards.
pub(crate) fn taken(model: &mut dyn Model) -> Result<Vec<f32>> {
    let mut gradients = vec![0.0; model.parameter_count()];
    model.take_gradients(&mut gradients)?;
    Ok(gradients)
}

/// The video diffusion model that `algorithm` needs.
pub(crate) fn diffusion<'a>(model: &'a mut dyn Model, algorithm: &'static str) -> Result<&'a mut dyn DiffusionModel> {
    Ok(model.as_diffusion().ok_or(AlgorithmError::NotDiffusion { algorithm })?)
}

/// The language model that `algorithm` needs.
pub(crate) fn language<'a>(model: &'a mut dyn Model, algorithm: &'static str) -> Result<&'a mut dyn LanguageModel> {
    Ok(model.as_language().ok_or(AlgorithmError::NotLanguage { algorithm })?)
}
