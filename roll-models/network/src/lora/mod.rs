//! Reads and writes LoRA files of every common convention, converts between conventions, and merges LoRAs into a base.
//!
//! | convention | name of a tensor | scale |
//! |---|---|---|
//! | PEFT | `base_model.model.X.lora_A.weight` | `adapter_config.json` next to the file |
//! | DiffSynth-Studio | `X.lora_A.default.weight` | always 1 |
//! | diffusers | `transformer.X.lora_A.weight`; `transformer_2.` is read, too | `lora_adapter_metadata` of the header |
//! | ComfyUI | `diffusion_model.X.lora_A.weight` or `lora_down` | the tensor `X.alpha`, over the rank |
//! | kohya | `lora_unet_X_with_underscores.lora_down.weight` | the tensor `.alpha`, over the rank |
//!
//! X is the name of a layer. A layer adds `alpha / rank * B A` to its weight. Without an `alpha` in the file, `alpha`
//! is the rank. Layers have their official names of Wan if Wan has such a layer, and otherwise the names in the file.
//!
//! Conversions are exact: matrices are copied bit for bit. DiffSynth files have no place for a scale, so the scale is
//! multiplied into `B`. If this cannot be undone exactly, the file also has the unscaled `B`, under a name that other
//! readers ignore.
//!
//! Start with [`LoraFile`] (read), [`Lora`] (contents) and [`write_lora`] (write).

pub mod about;
mod base;
mod error;
mod fused;
mod initial;
mod keys;
mod layer_names;
mod merge;
mod peft;
mod read;
mod sources;
mod write;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use roll_core::{StateDict, Tensor, header};

use serde::{Deserialize, Serialize};

use crate::weights::Checkpoint;

pub use base::BaseNetwork;
pub use error::{LoraError, not_in_base};
pub use fused::{FusedNames, fuse, to_names_of};
pub use initial::{InitialAdapter, LoraRequest, trained_parameters};
pub use keys::is_lora_key;
pub use layer_names::{LANGUAGE_MODEL, NESTED_LANGUAGE_MODELS, Names};
pub use merge::{LoraOfFile, MergeOptions, MergeResult, merge_lora, merged_on_read, names_of};
pub use peft::CONFIG_FILE as PEFT_CONFIG;
pub use read::LoraFile;
pub use sources::{
    AdapterSource, AdapterSources, AdapterWeights, OpenedAdapter, files as adapter_files, newest_checkpoint,
};
pub use write::{EncodedLora, WriteOptions, write_lora};

/// A program's scheme for the tensor names of a LoRA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Convention {
    /// PEFT's `save_pretrained`: `base_model.model.`
    Peft,
    /// DiffSynth-Studio and ROLL: no prefix, but the name of the adapter.
    DiffSynth,
    /// diffusers: `transformer.` and the layer names of diffusers.
    Diffusers,
    /// ComfyUI: `diffusion_model.`
    ComfyUi,
    /// kohya's sd-scripts and musubi-tuner: `lora_unet_` and underscores.
    Kohya,
}

impl Convention {
    /// All conventions.
    pub const ALL: [Self; 5] = [Self::Peft, Self::DiffSynth, Self::Diffusers, Self::ComfyUi, Self::Kohya];
}

impl fmt::Display for Convention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Peft => "PEFT",
            Self::DiffSynth => "DiffSynth",
            Self::Diffusers => "diffusers",
            Self::ComfyUi => "ComfyUI",
            Self::Kohya => "kohya",
        })
    }
}

/// Reads the tensors of an adapter file for [`roll_core::Model::import_adapter`]. A LoRA is converted to ComfyUI's
/// convention, so that the scale is among the tensors, wherever it is in the file. A file without a LoRA (all weights
/// of a transformer) or with adapters for both transformers is returned unchanged.
pub fn open_adapter(path: &Path) -> Result<StateDict, LoraError> {
    if path.is_file() {
        let checkpoint = Checkpoint::open(path)?;
        if !checkpoint.keys().any(is_lora_key) {
            return Ok(checkpoint.all()?);
        }
    }
    let mut file = LoraFile::open(path)?;
    let last = file.adapters.pop();
    let is_only = file.adapters.is_empty();
    match last {
        Some(lora) if is_only => {
            let options = WriteOptions { convention: Convention::ComfyUi, names: Names::Official };
            Ok(EncodedLora::new(&lora, options, &BTreeMap::new())?.state)
        }
        _ => Ok(Checkpoint::open(&file.path)?.all()?),
    }
}

/// Adds the `adapter_config.json` that PEFT needs next to a file with these tensors to the header of `file`
/// ([`header::BESIDE`]). `fields` replace fields of this configuration.
pub fn put_peft_config(file: &mut StateDict, fields: &[(&str, Option<&str>)]) -> roll_core::Result<()> {
    let lora = LoraFile::from_state("the adapter", file)?.one(None)?;
    let options = WriteOptions { convention: Convention::Peft, names: Names::Official };
    match EncodedLora::new(&lora, options, &BTreeMap::new())?.adapter_config {
        Some(mut config) => {
            fields.iter().for_each(|(key, value)| config[*key] = (*value).into());
            let name = format!("{}{PEFT_CONFIG}", header::BESIDE);
            header::put(file, BTreeMap::from([(name, format!("{config:#}\n"))]))
        }
        None => Ok(()),
    }
}

/// One of Wan2.2's two transformers: the one that an adapter belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Expert {
    /// The first transformer: high noise.
    #[serde(rename = "dit", alias = "high", alias = "high_noise")]
    High,
    /// The second transformer: low noise.
    #[serde(rename = "dit2", alias = "low", alias = "low_noise")]
    Low,
}

impl fmt::Display for Expert {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::High => "high_noise",
            Self::Low => "low_noise",
        })
    }
}

/// The low-rank addition to one linear or convolution layer.
#[derive(Clone, Debug)]
pub struct Layer {
    /// `A`: `[rank, in]`, or `[rank, in, ...]` for a convolution.
    pub down: Tensor,
    /// `B`: `[out, rank]`, or `[out, rank, 1, ...]` for a convolution.
    pub up: Tensor,
    /// Numerator of the scale, if the file has one; `None` means the rank.
    pub alpha: Option<f64>,
    /// Added to the layer's bias with the same scale (`lora_B.bias`).
    pub bias: Option<Tensor>,
}

impl Layer {
    /// The rank: the number of rows of `A`.
    pub fn rank(&self) -> usize {
        self.down.shape().first().copied().unwrap_or_default()
    }

    /// The scale `alpha / rank`.
    pub fn scale(&self) -> f64 {
        self.alpha.map_or(1.0, |alpha| alpha / self.rank() as f64)
    }
}

/// Differences of whole parameters, which some files have for norms and biases in addition to the low-rank layers. They
/// are added without a scale.
#[derive(Clone, Debug, Default)]
pub struct Difference {
    /// Difference of the weight (`.diff`).
    pub weight: Option<Tensor>,
    /// Difference of the bias (`.diff_b`).
    pub bias: Option<Tensor>,
    /// Difference of the parameter `modulation` of a block or of the head (`.diff_m`).
    pub modulation: Option<Tensor>,
}

/// Whether two alphas of a layer are the same up to the rounding with which files store them.
fn is_same_alpha(found: f64, expected: f64) -> bool {
    const RELATIVE_TOLERANCE: f64 = 1e-6;
    (found - expected).abs() <= RELATIVE_TOLERANCE * expected.abs()
}

/// The adapter of one transformer.
#[derive(Clone, Debug, Default)]
pub struct Lora {
    /// The transformer, if the tensor names identify it.
    pub expert: Option<Expert>,
    /// The transformer that the adapter was trained for, if the header names it ([`about`]).
    pub trained_for: Option<Expert>,
    /// Low-rank additions by the name of the layer.
    pub layers: BTreeMap<String, Layer>,
    /// Whole differences by the name of the layer.
    pub differences: BTreeMap<String, Difference>,
    /// Names of kohya's files whose dots are unknown, because Wan has no such layer. These layers can be merged and
    /// written to kohya files, but not converted to a convention with dots.
    pub undotted: Vec<String>,
}

impl Lora {
    /// Rounds all tensors to `dtype`.
    ///
    /// # Errors
    /// Fails if `dtype` is no floating-point dtype.
    pub fn to_float(&mut self, dtype: roll_core::DType) -> roll_core::Result<()> {
        let layers =
            self.layers.values_mut().map(|layer| [Some(&mut layer.down), Some(&mut layer.up), layer.bias.as_mut()]);
        let differences = self.differences.values_mut();
        let differences = differences.map(|d| [d.weight.as_mut(), d.bias.as_mut(), d.modulation.as_mut()]);
        for tensor in layers.chain(differences).flatten().flatten() {
            *tensor = tensor.to_float(dtype)?;
        }
        Ok(())
    }

    /// Recovers the dots of undotted names from the parameter names of their model, and gives layers of a language model
    /// the names that they have there.
    pub fn resolve<'a>(&mut self, parameters: impl IntoIterator<Item = &'a str>) {
        let modules: BTreeMap<String, String> = parameters
            .into_iter()
            .filter_map(|key| key.strip_suffix(".weight"))
            .map(|module| (layer_names::flat(module), module.to_string()))
            .collect();
        self.undotted.retain(|name| {
            let Some(dotted) = modules.get(name) else { return true };
            if let Some(layer) = self.layers.remove(name) {
                self.layers.insert(dotted.clone(), layer);
            }
            if let Some(difference) = self.differences.remove(name) {
                self.differences.insert(dotted.clone(), difference);
            }
            false
        });
        let is_known = |name: &str| modules.get(&layer_names::flat(name)).is_some_and(|dotted| dotted == name);
        for name in self.layers.keys().filter(|name| !is_known(name)).cloned().collect::<Vec<_>>() {
            let own = layer_names::language_names(&name).find(|other| is_known(other));
            if let Some((own, layer)) = own.and_then(|own| Some((own, self.layers.remove(&name)?))) {
                self.layers.insert(own, layer);
            }
        }
    }

    /// The names of layers that Wan does not have. If no layer is in one of Wan's blocks, the LoRA is for another model
    /// and only its undotted names are returned.
    pub fn unknown_layers(&self) -> Vec<&str> {
        let names = || self.layers.keys().chain(self.differences.keys()).map(String::as_str);
        let is_for_wan = names().any(|name| name.starts_with("blocks.") && layer_names::is_known(name));
        if is_for_wan {
            names().filter(|name| !layer_names::is_known(name)).collect()
        } else {
            self.undotted.iter().map(String::as_str).collect()
        }
    }

    /// The transformer that the adapter is for, if the file identifies it.
    pub fn target_expert(&self) -> Option<Expert> {
        self.expert.or(self.trained_for)
    }

    /// Fails on a value that is not finite, and names its layer. `path` is for the error message.
    pub fn check_finite(&self, path: &Path) -> Result<(), LoraError> {
        let layers = self.layers.iter().flat_map(|(name, layer)| {
            let parts = [("matrix A", Some(&layer.down)), ("matrix B", Some(&layer.up)), ("bias", layer.bias.as_ref())];
            parts.map(|(what, tensor)| (what, name, tensor))
        });
        let differences = self.differences.iter().flat_map(|(name, difference)| {
            let parts = [&difference.weight, &difference.bias, &difference.modulation];
            parts.map(|tensor| ("difference", name, tensor.as_ref()))
        });
        for (what, name, tensor) in layers.chain(differences) {
            if tensor.is_some_and(|tensor| tensor.to_f32_vec().iter().any(|value| !value.is_finite())) {
                return Err(LoraError::NotFinite { path: path.into(), what, name: name.clone() });
            }
        }
        Ok(())
    }

    /// The ranks that occur, in ascending order.
    pub fn ranks(&self) -> Vec<usize> {
        let mut ranks: Vec<usize> = self.layers.values().map(Layer::rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}
