//! The end of a step of every algorithm: the update, which is skipped after a value that is not finite.

use roll_core::{
    Communicator, DiffusionModel, Error, LanguageModel, Model, Result, RewardScorer, StepContext, StrategyReport,
};

use crate::AlgorithmError;

/// The reaction to a value that is not finite. Parameters never change by such a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnNonfinite {
    /// Leave the update out and report it.
    Skip,
    /// Stop the run.
    Stop,
}

/// Updates the parameters by the mean gradient over the samples of all ranks, of which this rank has `counted`, unless
/// a rank met a value that is not finite. A part of a sample counts as a fraction. Returns `None` if there was no
/// update.
///
/// `before_update` runs on every rank just before an update that takes place, with the number of samples of all ranks.
/// Reward-FL measures gradient norms in it; other algorithms pass [`nothing_before_update`].
///
/// `nonfinite` is the name and value of a number on this rank that was not finite. If it is `None`, it is set to the
/// gradient norm if that is not finite, or to a description of another rank's value.
pub fn finish(
    ctx: &mut StepContext<'_>,
    counted: f64,
    nonfinite: &mut Option<(String, f64)>,
    policy: OnNonfinite,
    before_update: impl FnOnce(&dyn Communicator, f64) -> Result<()>,
) -> Result<Option<StrategyReport>> {
    // Every rank must take the same branch, because the update consists of collectives that all ranks enter.
    let mut sums = [counted as f32, f32::from(u8::from(nonfinite.is_some()))];
    let ranks = ctx.strategy.ranks().all.as_ref();
    ranks.all_reduce(&mut sums)?;
    // With sequence parallelism, each rank of a token group has counted the group's samples.
    let ranks_per_sample = ranks.world_size() / ctx.strategy.ranks().data.world_size().max(1);
    let (all_counted, any_nonfinite) = (f64::from(sums[0]) / ranks_per_sample.max(1) as f64, sums[1] > 0.0);
    let mut update = None;
    if any_nonfinite {
        discard_gradients(ctx)?;
    } else if all_counted > 0.0 {
        before_update(ctx.strategy.ranks().all.as_ref(), all_counted)?;
        update = Some(ctx.strategy.step(ctx.model, ctx.learning_rate, 1.0 / all_counted)?);
    }
    if let Some(update) = update.as_ref().filter(|u| !u.applied) {
        nonfinite.get_or_insert(("the gradient norm".into(), update.grad_norm));
    }
    if let Some((what, value)) = nonfinite
        && policy == OnNonfinite::Skip
    {
        tracing::warn!(step = ctx.step, value, "{what} is not finite: the update is left out");
    }
    if any_nonfinite {
        nonfinite.get_or_insert_with(|| ("a score or loss of another rank".into(), f64::NAN));
    }
    match nonfinite {
        Some((what, value)) if policy == OnNonfinite::Stop => {
            Err(Error::NonFinite { what: what.clone(), value: *value })
        }
        _ => Ok(update),
    }
}

/// A `before_update` of [`finish`] that does nothing.
pub fn nothing_before_update(_ranks: &dyn Communicator, _all_samples: f64) -> Result<()> {
    Ok(())
}

/// Runs `step`. If it fails, discards the partial gradient, so that none is left for the next step.
pub fn discard_on_error<T>(
    ctx: &mut StepContext<'_>,
    step: impl FnOnce(&mut StepContext<'_>) -> Result<T>,
) -> Result<T> {
    let result = step(ctx);
    if result.is_err() {
        discard_gradients(ctx)?;
    }
    result
}

/// Clears the gradient accumulators of the strategy and of the model.
pub fn discard_gradients(ctx: &mut StepContext<'_>) -> Result<()> {
    ctx.strategy.discard();
    take_gradients(ctx.model).map(drop)
}

/// Returns the gradient in the model's accumulators and clears them.
pub fn take_gradients(model: &mut dyn Model) -> Result<Vec<f32>> {
    let mut gradients = vec![0.0; model.parameter_count()];
    model.take_gradients(&mut gradients)?;
    Ok(gradients)
}

/// The video diffusion model that `algorithm` needs.
pub fn diffusion<'a>(model: &'a mut dyn Model, algorithm: &'static str) -> Result<&'a mut dyn DiffusionModel> {
    Ok(model.as_diffusion().ok_or(AlgorithmError::OtherModel { algorithm, kind: "video diffusion models" })?)
}

/// The language model that `algorithm` needs.
pub fn language<'a>(model: &'a mut dyn Model, algorithm: &'static str) -> Result<&'a mut dyn LanguageModel> {
    Ok(model.as_language().ok_or(AlgorithmError::OtherModel { algorithm, kind: "language models" })?)
}

/// Fails unless the model has parameters to train.
pub fn check_trainable(model: &dyn Model) -> Result<()> {
    match model.parameter_count() {
        0 => Err(AlgorithmError::NothingToTrain.into()),
        _ => Ok(()),
    }
}

/// The reward that `algorithm` needs.
pub fn reward<'a>(ctx: &'a mut StepContext<'_>, algorithm: &'static str) -> Result<&'a mut dyn RewardScorer> {
    match ctx.reward.as_deref_mut() {
        Some(reward) => Ok(reward),
        None => Err(AlgorithmError::NoReward { algorithm }.into()),
    }
}
