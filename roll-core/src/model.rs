//! A trainable model, whatever it generates.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::{DeviceUpdates, DiffusionModel, LanguageModel, Result, Tensor, WeightPlacement};

/// Named tensors, sorted by name.
pub type StateDict = BTreeMap<String, Tensor>;

/// Name and shape of one trainable tensor, whose elements are f32.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ParameterSpec {
    /// The name, unique within the model. It never changes, because checkpoints are keyed by it.
    pub name: String,
    /// Shape; the elements are row-major in the flat layout.
    pub shape: Vec<usize>,
}

impl ParameterSpec {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A model with trainable parameters.
///
/// The trainable parameters form one flat f32 vector: [`Model::parameters`] in order, each row-major. Pullbacks of
/// the model add parameter gradients to accumulators inside it, in the same layout.
pub trait Model: Send {
    /// The trainable parameters; their order is the flat layout, and does not change while the model lives.
    fn parameters(&self) -> &[ParameterSpec];

    /// Length of the flat layout.
    fn parameter_count(&self) -> usize {
        self.parameters().iter().map(ParameterSpec::len).sum()
    }

    /// Copies the parameters to `out`, of exactly [`Model::parameter_count`] values.
    fn read_parameters(&self, out: &mut [f32]) -> Result<()>;

    /// Replaces the parameters. Pullbacks recorded before still use the old values.
    fn write_parameters(&mut self, values: &[f32]) -> Result<()>;

    /// Adds the accumulated gradients to `add_into` and clears the accumulators.
    fn take_gradients(&mut self, add_into: &mut [f32]) -> Result<()>;

    /// Access to single parameters, if the model supports it. Strategies then need no copy of all parameters. A wrapper
    /// that collects the gradients itself returns `None`.
    fn parts(&mut self) -> Option<&mut dyn ParameterParts> {
        None
    }

    /// How the model is spread over devices and ranks.
    fn distribution(&self) -> Distribution {
        Distribution::default()
    }

    /// The diffusion interface, if this is a diffusion model.
    fn as_diffusion(&mut self) -> Option<&mut dyn DiffusionModel> {
        None
    }

    /// The language interface, if this is a language model.
    fn as_language(&mut self) -> Option<&mut dyn LanguageModel> {
        None
    }

    /// The result of training for users, as files: name of the file (without directory or extension) and its
    /// tensors under the names other programs read. The metadata of a file's header is one further entry among its
    /// tensors ([`header`]).
    fn export_adapter(&self) -> Result<BTreeMap<String, StateDict>>;

    /// Loads the result of [`Model::export_adapter`]. Fails if a tensor is missing, unexpected or misshapen, and then
    /// changes nothing.
    fn import_adapter(&mut self, files: &BTreeMap<String, StateDict>) -> Result<()>;
}

/// How a model is spread over devices and ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Distribution {
    /// Where the frozen weights are. `None`: the model knows one place only and ignores
    /// [`crate::BuildContext::placement`].
    pub weights: Option<WeightPlacement>,
    /// Number of ranks that the tokens of a pass are sharded over ([`crate::BuildContext::token_ranks`]).
    pub token_ranks: usize,
}

impl Default for Distribution {
    fn default() -> Self {
        Self { weights: None, token_ranks: 1 }
    }
}

/// Access to single parameters of a model, the delivery of their gradients during a pull, and updates on their device.
/// `which` are positions in [`Model::parameters`]; the values of these parameters are a range of the flat layout.
pub trait ParameterParts {
    /// As [`Model::read_parameters`].
    fn read_part(&self, which: Range<usize>, out: &mut [f32]) -> Result<()>;
    /// As [`Model::write_parameters`].
    fn write_part(&mut self, which: Range<usize>, values: &[f32]) -> Result<()>;
    /// As [`Model::take_gradients`].
    fn take_gradients_part(&mut self, which: Range<usize>, add_into: &mut [f32]) -> Result<()>;

    /// Makes pulls hand the gradient of each parameter to `sink` as soon as it is complete; `None` ends the delivery.
    /// Returns false if the model does not support it. Gradients are then accumulated in the model, for
    /// [`Model::take_gradients`].
    fn deliver_gradients(&mut self, _sink: Option<Arc<dyn GradientSink>>) -> bool {
        false
    }

    /// Optimizer updates on the device of the parameters. `None`: parameters are updated in host memory, through
    /// [`Model::read_parameters`] and [`Model::write_parameters`].
    fn device_updates(&self) -> Option<Box<dyn DeviceUpdates>> {
        None
    }
}

/// Takes gradients during a pull, so that their reduction overlaps the rest of the pull.
pub trait GradientSink: Send + Sync {
    /// Takes the gradient of the parameter at `position` in [`Model::parameters`]: the sum of the gradients of earlier
    /// pulls, which the model has accumulated, and of this pull, row-major. The model does not keep it. The gradient of
    /// a parameter that a pass uses twice is delivered in two parts, to be added. Returns false to refuse the gradient;
    /// the model then accumulates it as if there were no sink.
    fn deliver(&self, position: usize, gradient: &[f32]) -> bool;
}

/// Flat vectors of parameters: moving averages of them, and their conversion to named tensors and back. `specs` are the
/// names and shapes of the parameters, in the order of the flat layout.
pub mod flat {
    use super::{Model, ParameterSpec, StateDict};
    use crate::{Error, Result, Tensor};

    /// The parameters of a model as they are now.
    pub fn read(model: &dyn Model) -> Result<Vec<f32>> {
        let mut values = vec![0.0; model.parameter_count()];
        model.read_parameters(&mut values)?;
        Ok(values)
    }

    /// Updates a moving average: `average <- decay average + (1 - decay) current`, in f32.
    pub fn blend(average: &mut [f32], current: &[f32], decay: f64) {
        let (weight_of_average, weight_of_current) = (decay as f32, (1.0 - decay) as f32);
        for (average, current) in average.iter_mut().zip(current) {
            *average = weight_of_average * *average + weight_of_current * current;
        }
    }

    /// Splits `values` by `specs`.
    pub fn to_state(specs: &[ParameterSpec], values: &[f32]) -> Result<StateDict> {
        let mut rest = values;
        let mut state = StateDict::new();
        for spec in specs {
            let (head, tail) = rest.split_at_checked(spec.len()).ok_or_else(|| {
                Error::shape("flat parameters", format!("at least {} values", spec.len()), &[rest.len()])
            })?;
            state.insert(spec.name.clone(), Tensor::new(head.to_vec(), spec.shape.clone())?);
            rest = tail;
        }
        Ok(state)
    }

    /// Joins the tensors of `state` in the order of `specs`. Fails on a missing, unexpected or misshapen tensor, and on
    /// a value that is not finite. The entry of a [`super::header`] is ignored.
    pub fn from_state(specs: &[ParameterSpec], state: &StateDict) -> Result<Vec<f32>> {
        let mut values = Vec::with_capacity(specs.iter().map(ParameterSpec::len).sum());
        for spec in specs {
            let tensor =
                state.get(&spec.name).ok_or_else(|| Error::Misuse(format!("the tensor `{}` is missing", spec.name)))?;
            if tensor.shape() != spec.shape {
                return Err(Error::shape(&spec.name, format!("{:?}", spec.shape), tensor.shape()));
            }
            let start = values.len();
            values.extend(tensor.to_f32_vec());
            if let Some(value) = values[start..].iter().find(|value| !value.is_finite()) {
                let problem = format!("the tensor `{}` holds {value}; every value must be finite", spec.name);
                return Err(Error::Unsupported(problem));
            }
        }
        let is_unexpected =
            |name: &&String| *name != super::header::KEY && !specs.iter().any(|spec| &spec.name == *name);
        if let Some(name) = state.keys().find(is_unexpected) {
            return Err(Error::Misuse(format!("the tensor `{name}` is not one that is expected")));
        }
        Ok(values)
    }
}

/// Metadata of a file of tensors: texts by name. A [`StateDict`] carries the metadata as one more entry, because it
/// then passes wherever tensors pass, also across the boundary of plugins. The writer of a file moves the entry into
/// the file's header. Readers of tensors ignore the entry.
pub mod header {
    use std::collections::BTreeMap;

    use super::StateDict;
    use crate::{Error, Result, Tensor};

    /// Name of the entry, which no tensor of a safetensors file can have: JSON text, as `u8`.
    pub const KEY: &str = "__metadata__";

    /// Name of the text with the number of optimizer steps that an adapter was trained for.
    pub const STEPS: &str = "roll.steps";
    /// Name of the text with the name of the experiment that trained an adapter.
    pub const RUN: &str = "roll.run";

    /// Prefix of the names of texts that do not belong in the header. Each becomes a text file next to the file of
    /// tensors. The rest of the name is the name of the text file.
    pub const BESIDE: &str = "beside:";

    /// Adds `metadata` to the metadata of `state`.
    pub fn put(state: &mut StateDict, metadata: BTreeMap<String, String>) -> Result<()> {
        let mut all = take(state)?;
        all.extend(metadata);
        let text = serde_json::to_vec(&all).map_err(Error::failed("the header of a file cannot be written as JSON"))?;
        let length = text.len();
        state.insert(KEY.into(), Tensor::new(text, [length])?);
        Ok(())
    }

    /// Removes the metadata from `state` and returns it; returns an empty map if `state` has no metadata.
    pub fn take(state: &mut StateDict) -> Result<BTreeMap<String, String>> {
        match state.remove(KEY) {
            Some(text) => read(&text),
            None => Ok(BTreeMap::new()),
        }
    }

    /// The metadata in `entry`, the entry called [`KEY`].
    pub fn read(entry: &Tensor) -> Result<BTreeMap<String, String>> {
        serde_json::from_slice(entry.as_bytes())
            .map_err(|e| Error::Misuse(format!("`{KEY}`: expected texts by name, as JSON: {e}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_entries_are_not_parameters() {
        let specs = [ParameterSpec { name: "w".into(), shape: vec![2] }];
        let mut state = flat::to_state(&specs, &[1.0, 2.0]).unwrap();
        header::put(&mut state, [("a".to_string(), "1".to_string())].into()).unwrap();
        header::put(&mut state, [("b".to_string(), "2".to_string())].into()).unwrap();
        assert_eq!(flat::from_state(&specs, &state).unwrap(), [1.0, 2.0]);
        let words = header::take(&mut state).unwrap();
        assert_eq!(words.into_iter().map(|(k, v)| k + &v).collect::<Vec<_>>(), ["a1", "b2"]);
        assert_eq!((header::take(&mut state).unwrap().len(), state.len()), (0, 1));
    }

    #[test]
    fn named_tensors_round_trip_in_the_order_of_the_layout() {
        let spec = |name: &str, shape: &[usize]| ParameterSpec { name: name.into(), shape: shape.to_vec() };
        let specs = [spec("old.w", &[2]), spec("old.b", &[1, 1]), spec("ema.w", &[2])];
        let values = [1.0, 2.0, 3.0, 4.0, 5.0];
        let good = flat::to_state(&specs, &values).unwrap();
        assert_eq!(good.keys().map(String::as_str).collect::<Vec<_>>(), ["ema.w", "old.b", "old.w"]);
        assert_eq!(flat::from_state(&specs, &good).unwrap(), values);
        assert!(flat::from_state(&[], &StateDict::new()).unwrap().is_empty());
        type Spoil = fn(&mut StateDict);
        let spoilt: [(&str, Spoil); 4] = [
            ("`old.b` is missing", |s| drop(s.remove("old.b"))),
            ("`new.w` is not one", |s| drop(s.insert("new.w".into(), Tensor::zeros([2])))),
            ("[2]", |s| drop(s.insert("ema.w".into(), Tensor::zeros([3])))),
            ("NaN", |s| drop(s.insert("ema.w".into(), Tensor::full([2], f32::NAN)))),
        ];
        for (expected, spoil) in spoilt {
            let mut state = good.clone();
            spoil(&mut state);
            let error = flat::from_state(&specs, &state).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn rejects_nonfinite_parameters_by_name() {
        let specs = [ParameterSpec { name: "w".into(), shape: vec![2] }];
        for value in [f32::NAN, f32::INFINITY] {
            let state = flat::to_state(&specs, &[1.0, value]).unwrap();
            let error = flat::from_state(&specs, &state).unwrap_err();
            assert!(error.to_string().contains("`w`") && error.fault() == crate::Fault::User, "{error}");
        }
    }
}
