//! One of the model's transformers, by its name, with its trained parameters.

use roll_core::{ParameterSpec, Sigma, SigmaRange};
use roll_network::lora::{self, BaseNetwork};

use super::dit::Dit;

/// A transformer and its trained part.
pub(super) struct Expert {
    /// `dit` (the high-noise expert or the only one) or `dit2`.
    pub(super) name: &'static str,
    pub(super) dit: Dit,
    /// Whether the trained parameters are adapters.
    pub(super) trains_adapters: bool,
    /// The published network that the weights belong to, if it is recognised.
    pub(super) base: Option<BaseNetwork>,
}

impl Expert {
    /// Creates the expert `name`. The trained part of `dit` must be set already.
    pub(super) fn new(name: &'static str, dit: Dit) -> Self {
        let trains_adapters = dit.parameters().is_some_and(|p| p.specs().iter().all(|s| s.name.contains(".lora_")));
        Self { name, dit, trains_adapters, base: None }
    }

    /// The expert in the terms of adapter files.
    pub(super) fn lora_expert(&self) -> lora::Expert {
        if self.name == "dit" { lora::Expert::High } else { lora::Expert::Low }
    }

    /// Names and shapes of the trainable parameters. The names begin with the expert's name.
    pub(super) fn specs(&self) -> impl Iterator<Item = ParameterSpec> {
        let specs = self.dit.parameters().map(|p| p.specs()).unwrap_or_default();
        specs.iter().map(|s| ParameterSpec { name: format!("{}.{}", self.name, s.name), shape: s.shape.clone() })
    }
}

/// The noise levels at which the trained experts are used: all levels if both experts are trained or neither is.
pub(super) fn trained_levels(experts: &[Expert], boundary: Option<f64>) -> SigmaRange {
    let is_trained = |i: usize| experts.get(i).is_some_and(|e: &Expert| e.dit.parameters().is_some());
    match (boundary.map(Sigma), is_trained(0), is_trained(1)) {
        (Some(boundary), true, false) => SigmaRange { low: boundary, ..SigmaRange::ALL },
        (Some(boundary), false, true) => SigmaRange { high: boundary, ..SigmaRange::ALL },
        _ => SigmaRange::ALL,
    }
}
