//! The trained parameters of a network with frozen weights: adapters or every weight, and their values at the start of
//! training ([`Trained`]).

use std::sync::{Arc, Mutex, PoisonError};

use burn_tensor::Device;
use roll_backends::{Parameters, Snapshot};
use roll_core::{Adapter, Communicator, Error, Noise, ParameterSpec, Result, StateDict};

use crate::trainable::{Trainable, lora_parameters};

/// The trained parameters of a network. The default trains none.
pub struct Trained {
    /// Adapters, or every weight.
    parameters: Option<Parameters>,
    /// The parameters of [`Adapter::Start`].
    initial: Option<InitialParameters>,
    /// Whether every weight is among the parameters.
    is_full: bool,
    lora_scale: f64,
    /// The ranks between which the parameters are sharded if every weight is trained.
    ranks: Option<Arc<dyn Communicator>>,
}

/// The trained parameters at the start of training, if they come from a file.
struct InitialParameters {
    state: StateDict,
    /// The parameters on the device, from the first pass that uses them.
    parameters: Mutex<Option<Parameters>>,
}

impl Default for Trained {
    fn default() -> Self {
        Self { parameters: None, initial: None, is_full: false, lora_scale: 1.0, ranks: None }
    }
}

impl Trained {
    /// Shards the parameters between `ranks` if every weight is trained ([`Parameters::sharded`]). Adapters are small
    /// and are replicated on every rank.
    pub fn shard(&mut self, ranks: Arc<dyn Communicator>) {
        self.ranks = Some(ranks);
    }

    /// Creates the parameters that `trainable` selects among `weights` (pairs of name and shape) on `device`. Adapters
    /// do not change the network at first; see [`lora_parameters`], which also explains `examples`. `base` contains the
    /// initial weights of full fine-tuning, whose order is that of `weights`.
    ///
    /// # Errors
    /// Fails if a target names no linear layer, or `base` has not all weights.
    pub fn choose(
        &mut self,
        trainable: &Trainable,
        weights: Vec<(String, Vec<usize>)>,
        examples: &str,
        noise: &Noise,
        base: &StateDict,
        device: &Device,
    ) -> Result<()> {
        self.is_full = *trainable == Trainable::Full;
        match trainable {
            Trainable::Frozen => self.parameters = None,
            Trainable::Lora { .. } | Trainable::Layers { .. } => {
                let (specs, values) = lora_parameters(weights, trainable, noise, examples)?;
                self.lora_scale = trainable.lora_scale();
                self.parameters = Some(Parameters::new(specs, values, device));
            }
            Trainable::Full => {
                let specs = weights.into_iter().map(|(name, shape)| ParameterSpec { name, shape }).collect();
                self.parameters = Some(self.upload(specs, base, device)?);
            }
        }
        Ok(())
    }

    /// The parameters, if there are any.
    pub fn parameters(&self) -> Option<&Parameters> {
        self.parameters.as_ref()
    }

    /// Whether every weight is trained.
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    /// Whether the parameters are adapters.
    pub fn is_adapter(&self) -> bool {
        self.parameters.as_ref().is_some_and(|all| all.specs().iter().all(|spec| spec.name.contains(".lora_")))
    }

    /// Scale of the adapters, `alpha / rank`.
    pub fn lora_scale(&self) -> f64 {
        self.lora_scale
    }

    /// Sets the parameters of [`Adapter::Start`], by name. The device holds them from the first pass that uses them.
    pub fn start_from(&mut self, state: StateDict) {
        self.initial = Some(InitialParameters { state, parameters: Mutex::default() });
    }

    /// The parameters that a pass with `adapter` uses; `None` if it runs the frozen network. Parameters at the start of
    /// training are uploaded to `device` if they are not there yet.
    pub fn snapshot(&self, adapter: Adapter, device: &Device) -> Result<Option<Snapshot>> {
        match adapter {
            Adapter::On => Ok(self.parameters.as_ref().map(Parameters::snapshot)),
            Adapter::Start => self.initial_snapshot(device),
            Adapter::Off => Ok(None),
        }
    }

    fn initial_snapshot(&self, device: &Device) -> Result<Option<Snapshot>> {
        let (Some(initial), Some(trained)) = (&self.initial, &self.parameters) else { return Ok(None) };
        let mut uploaded = initial.parameters.lock().unwrap_or_else(PoisonError::into_inner);
        if uploaded.is_none() {
            *uploaded = Some(self.upload(trained.specs().to_vec(), &initial.state, device)?);
        }
        Ok(uploaded.as_ref().map(Parameters::snapshot))
    }

    /// Creates parameters on the device with the values of `state`, sharded between the ranks if every weight is
    /// trained.
    fn upload(&self, specs: Vec<ParameterSpec>, state: &StateDict, device: &Device) -> Result<Parameters> {
        let value = |spec: &ParameterSpec| match state.get(&spec.name) {
            Some(value) => Ok(value.to_f32_vec()),
            None => Err(Error::Misuse(format!("training needs the weight `{}`", spec.name))),
        };
        match &self.ranks {
            Some(ranks) if self.is_full => Parameters::sharded(specs, value, device, ranks.clone()),
            _ => {
                let values = specs.iter().map(value).collect::<Result<_>>()?;
                Ok(Parameters::new(specs, values, device))
            }
        }
    }
}
