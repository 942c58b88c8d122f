//! Measures the norms of the gradients of reward and KL separately, to show which of them drives the update.
//!
//! The model accumulates one gradient. A second rollout computes the KL's part alone, and the reward's part is the
//! difference.

use std::collections::BTreeMap;

use roll_core::{
    Communicator, DiffusionModel, Distribution, LanguageModel, Model, ParameterParts, ParameterSpec, Result, StateDict,
    Strategy,
};

/// Sums of gradients over the samples of this rank.
pub(super) struct GradientSplit {
    /// Gradient of the whole loss.
    total: Vec<f32>,
    /// Gradient of the KL's term.
    kl: Vec<f32>,
}

impl GradientSplit {
    pub(super) fn new(parameters: usize) -> Self {
        Self { total: vec![0.0; parameters], kl: vec![0.0; parameters] }
    }

    /// Adds the gradients of one sample to the sums: `gradients` of the whole loss, taken from the model, and
    /// `kl_alone`. Passes `gradients` on to the strategy unchanged.
    pub(super) fn accumulate(
        &mut self,
        strategy: &mut dyn Strategy,
        model: &mut dyn Model,
        gradients: Vec<f32>,
        kl_alone: &[f32],
    ) -> Result<()> {
        self.total.iter_mut().zip(&gradients).for_each(|(sum, g)| *sum += g);
        self.kl.iter_mut().zip(kl_alone).for_each(|(sum, g)| *sum += g);
        strategy.accumulate(&mut WithGradient { model, gradients })
    }

    /// Returns the norms of the gradients of reward and KL, as means over the `scored` samples of all ranks.
    pub(super) fn norms(mut self, ranks: &dyn Communicator, scored: f64) -> Result<(f64, f64)> {
        ranks.all_reduce(&mut self.total)?;
        ranks.all_reduce(&mut self.kl)?;
        let norm = |squares: f64| squares.sqrt() / scored;
        let reward = self.total.iter().zip(&self.kl).map(|(t, k)| (f64::from(*t) - f64::from(*k)).powi(2)).sum();
        let kl = self.kl.iter().map(|k| f64::from(*k).powi(2)).sum();
        Ok((norm(reward), norm(kl)))
    }
}

/// A model whose accumulated gradient was taken for the measurement and is returned to the strategy.
struct WithGradient<'a> {
    model: &'a mut dyn Model,
    gradients: Vec<f32>,
}

#[deny(clippy::missing_trait_methods)]
impl Model for WithGradient<'_> {
    fn take_gradients(&mut self, add_into: &mut [f32]) -> Result<()> {
        add_into.iter_mut().zip(std::mem::take(&mut self.gradients)).for_each(|(sum, g)| *sum += g);
        self.model.take_gradients(add_into)
    }

    // None, because parts would take the gradient from the model, which no longer has it.
    fn parts(&mut self) -> Option<&mut dyn ParameterParts> {
        None
    }

    fn parameters(&self) -> &[ParameterSpec] {
        self.model.parameters()
    }

    fn parameter_count(&self) -> usize {
        self.model.parameter_count()
    }

    fn read_parameters(&self, out: &mut [f32]) -> Result<()> {
        self.model.read_parameters(out)
    }

    fn write_parameters(&mut self, values: &[f32]) -> Result<()> {
        self.model.write_parameters(values)
    }

    fn distribution(&self) -> Distribution {
        self.model.distribution()
    }

    fn as_language(&mut self) -> Option<&mut dyn LanguageModel> {
        self.model.as_language()
    }

    fn export_adapter(&self) -> Result<BTreeMap<String, StateDict>> {
        self.model.export_adapter()
    }

    fn import_adapter(&mut self, files: &BTreeMap<String, StateDict>) -> Result<()> {
        self.model.import_adapter(files)
    }

    fn as_diffusion(&mut self) -> Option<&mut dyn DiffusionModel> {
        self.model.as_diffusion()
    }
}
