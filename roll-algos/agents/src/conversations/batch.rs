//! The evaluation of samples by a model, padded on the right to one length.

use std::borrow::Borrow;

use roll_core::{Adapter, Grad, LanguageModel, Pullback, Result, ResultExt, StepContext, Tensor, TokenStats};
use roll_step::AlgorithmError;

use super::Tokens;

/// The model's evaluation of B samples.
pub(crate) struct Evaluated {
    /// Log-probabilities and entropies, `[B, columns]`: 0 of tokens that are not trained on. Column t is the prediction of
    /// token t + 1.
    pub stats: TokenStats,
    /// Whether each prediction is trained on, `[B, columns]`.
    trained: Vec<bool>,
    /// `[B, columns]`; a row has one prediction less than the longest sample has tokens.
    shape: [usize; 2],
    pullback: Option<Pullback>,
}

/// Evaluates samples.
pub(crate) fn evaluate<T: Borrow<Tokens>>(
    model: &mut dyn LanguageModel,
    samples: &[T],
    adapter: Adapter,
    grad: Grad,
) -> Result<Evaluated> {
    let width = samples.iter().map(|t| t.borrow().ids.len()).max().unwrap_or(0);
    let (mut ids, mut mask, mut wanted, mut trained) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for tokens in samples.iter().map(Borrow::borrow) {
        let padding = width - tokens.ids.len();
        ids.extend(tokens.ids.iter().map(|id| i64::from(*id)).chain(std::iter::repeat_n(0, padding)));
        mask.extend(tokens.ids.iter().map(|_| 1u8).chain(std::iter::repeat_n(0, padding)));
        let row = || tokens.train.iter().copied().chain(std::iter::repeat_n(false, padding));
        wanted.extend(row().map(u8::from));
        // Column t is the prediction of token t + 1.
        trained.extend(row().skip(1));
    }
    let shape = [samples.len(), width];
    let (ids, mask, wanted) = (Tensor::new(ids, shape)?, Tensor::new(mask, shape)?, Tensor::new(wanted, shape)?);
    let (stats, pullback) = model.evaluate(&ids, &mask, &wanted, adapter, grad)?;
    Ok(Evaluated { stats, trained, shape: [samples.len(), width.saturating_sub(1)], pullback })
}

impl Evaluated {
    /// The sum of `values`, `[B, columns]`, over the tokens that are trained on.
    pub fn sum(&self, values: &Tensor) -> Result<f64> {
        Ok(sum_of(values.f32s()?, &self.trained))
    }

    /// The log-probability of each sample's trained tokens together.
    pub fn log_probs(&self) -> Result<Vec<f64>> {
        let columns = self.shape[1].max(1);
        let rows = self.stats.log_probs.f32s()?.chunks(columns).zip(self.trained.chunks(columns));
        Ok(rows.map(|(values, trained)| sum_of(values, trained)).collect())
    }

    /// Pulls back a loss and adds its gradient to the strategy. `slopes` are its derivatives in the log-probability of
    /// each trained token, one per sample. Entropies are not in the loss.
    pub fn pull(self, ctx: &mut StepContext<'_>, slopes: &[f64]) -> Result<()> {
        let [rows, columns] = self.shape;
        let slope = |(i, trained): (usize, &bool)| if *trained { slopes[i / columns] as f32 } else { 0.0 };
        // [2, B, columns]: first for the log-probabilities, then for the entropies.
        let mut cotangent: Vec<f32> = self.trained.iter().enumerate().map(slope).collect();
        cotangent.resize(2 * self.trained.len(), 0.0);
        let pullback = self.pullback.ok_or(AlgorithmError::NoPullback { what: "the language model".into() })?;
        let cotangent = Tensor::new(cotangent, [2, rows, columns])?;
        ctx.strategy.before_last_pull(ctx.model)?;
        pullback.pull(&cotangent).while_doing(|| "pulling back the loss".into())?;
        ctx.strategy.accumulate(ctx.model)
    }
}

fn sum_of(values: &[f32], trained: &[bool]) -> f64 {
    values.iter().zip(trained).filter(|(_, trained)| **trained).map(|(value, _)| f64::from(*value)).sum()
}
