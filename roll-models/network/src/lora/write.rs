//! Writes LoRA files of any convention. [`super`] describes where each convention has the scale.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use roll_core::{Error, StateDict, Tensor};
use roll_external::files;
use serde_json::Value;

use crate::weights::{WeightsError, save_safetensors};

use super::about;
use super::error::{LoraError, first_names};
use super::keys::{ALPHAS_KEY, UNSCALED};
use super::layer_names::{self, Names};
use super::peft::{self, RankAndAlpha};
use super::{Convention, Difference, Layer, Lora};

/// Options of a LoRA file.
#[derive(Clone, Copy, Debug)]
pub struct WriteOptions {
    /// The convention of the tensor names.
    pub convention: Convention,
    /// The naming scheme of the layers in a PEFT file: that of the model into which PEFT will load the file. Other
    /// conventions have one naming scheme each.
    pub names: Names,
}

/// The contents of a LoRA file.
#[derive(Clone, Debug, Default)]
pub struct EncodedLora {
    /// The tensors.
    pub state: StateDict,
    /// The header's entries.
    pub metadata: BTreeMap<String, String>,
    /// `adapter_config.json`, which PEFT needs next to the file.
    pub adapter_config: Option<Value>,
}

impl EncodedLora {
    /// Names the tensors of `lora`. The header has the entries of `metadata` (the header of the original file) and the
    /// expert. Fails if the convention cannot represent the LoRA.
    pub fn new(lora: &Lora, options: WriteOptions, metadata: &BTreeMap<String, String>) -> Result<Self, LoraError> {
        let WriteOptions { convention, names } = options;
        check_convention(lora, convention)?;
        let mut encoded = Self { metadata: metadata.clone(), ..Self::default() };
        if let Some(expert) = lora.target_expert() {
            encoded.metadata.insert(about::EXPERT.into(), expert.to_string());
        }
        // Alphas of the layers that have one, by the name of the layer.
        let mut alphas = BTreeMap::new();
        // Rank and alpha of every layer, by the name that PEFT's configuration has.
        let mut ranks_and_alphas = BTreeMap::new();
        for (name, layer) in &lora.layers {
            let stem = stem_of(name, convention, names);
            let alpha = layer.alpha.unwrap_or(layer.rank() as f64);
            if layer.alpha.is_some() {
                alphas.insert(name.clone(), alpha);
            }
            let name_in_config = stem.strip_prefix(prefix_of(convention)).unwrap_or(&stem);
            ranks_and_alphas.insert(name_in_config.to_string(), RankAndAlpha { rank: layer.rank(), alpha });
            let (a, _) = matrix_names(convention);
            if encoded.state.contains_key(&format!("{stem}{a}.weight")) {
                let what = "two layers whose names differ in dots and underscores alone";
                return Err(unrepresentable(convention, what, name, "ComfyUI or PEFT"));
            }
            encoded.add_layer(&stem, layer, convention, alpha);
        }
        for (name, difference) in &lora.differences {
            encoded.add_difference(&stem_of(name, convention, names), difference);
        }
        let has_bias = lora.layers.values().any(|layer| layer.bias.is_some());
        encoded.add_scales(convention, &alphas, &ranks_and_alphas, has_bias);
        if matches!(convention, Convention::ComfyUi | Convention::Kohya) {
            let layers = lora.layers.values().map(|layer| (layer.rank(), layer.alpha.unwrap_or(layer.rank() as f64)));
            for (name, value) in about::kohya_entries(layers, metadata) {
                encoded.metadata.entry(name).or_insert(value);
            }
        }
        Ok(encoded)
    }

    /// Adds the scales where the convention has them outside the layers' tensors: in the header, or in the
    /// configuration next to the file. `alphas` has the layers with an alpha, by the name of the layer.
    /// `ranks_and_alphas` has every layer, by the name that PEFT's configuration has.
    fn add_scales(
        &mut self,
        convention: Convention,
        alphas: &BTreeMap<String, f64>,
        ranks_and_alphas: &BTreeMap<String, RankAndAlpha>,
        has_bias: bool,
    ) {
        match convention {
            Convention::Peft => {
                self.adapter_config = Some(peft::adapter_config(peft::fields(ranks_and_alphas, has_bias, "")));
            }
            // diffusers derives the configuration itself if all scales are 1.
            Convention::Diffusers if !alphas.is_empty() => {
                let fields = peft::fields(ranks_and_alphas, has_bias, prefix_of(convention));
                self.metadata.insert(peft::DIFFUSERS_KEY.into(), Value::Object(fields).to_string());
            }
            _ => {}
        }
        if matches!(convention, Convention::Peft | Convention::DiffSynth) && !alphas.is_empty() {
            let text = serde_json::to_string(alphas).unwrap_or_default();
            self.metadata.insert(ALPHAS_KEY.into(), text);
        }
    }

    /// Adds the tensors of a layer, whose names begin with `stem`.
    fn add_layer(&mut self, stem: &str, layer: &Layer, convention: Convention, alpha: f64) {
        let (a, b) = matrix_names(convention);
        let mut up = layer.up.clone();
        // DiffSynth has no alpha, so the scale is multiplied into B. If this cannot be undone exactly, the file also
        // has the unscaled B. Layers with a bias have the scale 1 (`check_convention`).
        if convention == Convention::DiffSynth && layer.scale() != 1.0 {
            match scaled_exactly(&up, layer.scale()) {
                Some(exact) => up = exact,
                None => {
                    self.state.insert(format!("{stem}{UNSCALED}"), layer.up.clone());
                    up = scaled_to_f32(&up, layer.scale());
                }
            }
        }
        self.state.insert(format!("{stem}{a}.weight"), layer.down.clone());
        self.state.insert(format!("{stem}{b}.weight"), up);
        if let Some(bias) = layer.bias.clone() {
            self.state.insert(format!("{stem}{b}.bias"), bias);
        }
        let has_alpha = match convention {
            Convention::Kohya => true,
            Convention::ComfyUi => layer.alpha.is_some(),
            _ => false,
        };
        if has_alpha {
            self.state.insert(format!("{stem}.alpha"), Tensor::scalar(alpha as f32));
        }
    }

    /// Adds the tensors of whole differences, whose names begin with `stem`.
    fn add_difference(&mut self, stem: &str, difference: &Difference) {
        let parts = [(".diff", &difference.weight), (".diff_b", &difference.bias), (".diff_m", &difference.modulation)];
        for (suffix, tensor) in parts {
            if let Some(tensor) = tensor {
                self.state.insert(format!("{stem}{suffix}"), tensor.clone());
            }
        }
    }

    /// Writes the file, then `adapter_config.json` next to it, both atomically. If an `adapter_config.json` exists
    /// there that belongs to another adapter or cannot be read, this fails and writes nothing.
    pub fn save(&self, path: &Path) -> Result<(), LoraError> {
        let config = self.adapter_config.as_ref();
        let config = config.map(|config| (path.with_file_name(peft::CONFIG_FILE), format!("{config:#}\n")));
        if let Some((config_path, text)) = &config {
            match files::read(config_path, files::MAX_TEXT) {
                Ok(found) if found == text.as_bytes() => {}
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Ok(_) => {
                    let problem = "belongs to another adapter; write into a directory of its own";
                    return Err(LoraError::invalid(config_path, problem));
                }
                Err(e) => return Err(WeightsError::io("read", config_path)(e).into()),
            }
        }
        save_safetensors(path, &self.state, &self.metadata)?;
        match &config {
            Some((config_path, text)) => write_config(config_path, text),
            None => Ok(()),
        }
    }
}

fn write_config(path: &Path, text: &str) -> Result<(), LoraError> {
    files::write_atomically(path, text.as_bytes()).map_err(|error| match error {
        Error::File { action, path, source } => WeightsError::Io { action, path, source }.into(),
        error => LoraError::invalid(path, error.to_string()),
    })
}

/// Converts `lora` and writes it to `out`: a file or, for PEFT, a directory, which is created. Returns the file's path.
pub fn write_lora(
    lora: &Lora,
    options: WriteOptions,
    metadata: &BTreeMap<String, String>,
    out: &Path,
) -> Result<PathBuf, LoraError> {
    let encoded = EncodedLora::new(lora, options, metadata)?;
    let is_file = out.extension().is_some_and(|e| e.eq_ignore_ascii_case("safetensors"));
    let file = match (options.convention, is_file) {
        (_, true) => out.to_path_buf(),
        (Convention::Peft, false) => {
            std::fs::create_dir_all(out).map_err(WeightsError::io("create", out))?;
            out.join(peft::WEIGHTS_FILE)
        }
        (_, false) => {
            return Err(LoraError::Weights(WeightsError::Format {
                path: out.into(),
                expected: "the name of a file that ends in .safetensors".into(),
                found: "another name".into(),
            }));
        }
    };
    encoded.save(&file)?;
    Ok(file)
}

/// The prefix of a convention. diffusers' loader drops every key without `transformer.`, even those for the second
/// transformer, which its caller chooses by `load_into_transformer_2`.
fn prefix_of(convention: Convention) -> &'static str {
    match convention {
        Convention::Peft => "base_model.model.",
        Convention::DiffSynth => "",
        Convention::Diffusers => "transformer.",
        Convention::ComfyUi => "diffusion_model.",
        Convention::Kohya => "lora_unet_",
    }
}

/// Endings of the names of a layer's matrices A and B, before `.weight`.
fn matrix_names(convention: Convention) -> (&'static str, &'static str) {
    match convention {
        Convention::Kohya => (".lora_down", ".lora_up"),
        Convention::DiffSynth => (".lora_A.default", ".lora_B.default"),
        _ => (".lora_A", ".lora_B"),
    }
}

/// The beginning of the names of a layer's tensors: prefix and layer.
fn stem_of(layer: &str, convention: Convention, names: Names) -> String {
    let prefix = prefix_of(convention);
    match (convention, names) {
        (Convention::Kohya, _) => format!("{prefix}{}", layer_names::flat(layer)),
        (Convention::Diffusers, _) | (Convention::Peft, Names::Diffusers) => {
            format!("{prefix}{}", layer_names::diffusers(layer))
        }
        _ => format!("{prefix}{layer}"),
    }
}

/// The error for a part of a LoRA that the convention cannot represent. `instead` names conventions that can.
fn unrepresentable(convention: Convention, what: &str, layer: &str, instead: &str) -> LoraError {
    LoraError::Unrepresentable(format!(
        "{convention} files have no place for {what} (layer `{layer}`); choose {instead}"
    ))
}

/// Fails if the convention cannot represent the whole LoRA.
fn check_convention(lora: &Lora, convention: Convention) -> Result<(), LoraError> {
    const MAX_NAMES: usize = 5;
    if convention != Convention::Kohya && !lora.undotted.is_empty() {
        return Err(LoraError::Unrepresentable(format!(
            "Wan has no layer that kohya would call {}: give the model they are for (--base), whose names tell where the \
             dots are",
            first_names(lora.undotted.iter().map(String::as_str), MAX_NAMES)
        )));
    }
    let is_comfyui_or_kohya = matches!(convention, Convention::ComfyUi | Convention::Kohya);
    if let Some(layer) = lora.differences.keys().next()
        && !is_comfyui_or_kohya
    {
        let what = "differences of whole parameters (.diff, .diff_b, .diff_m)";
        return Err(unrepresentable(convention, what, layer, "ComfyUI or kohya"));
    }
    let has_unrepresentable_bias = |layer: &Layer| {
        layer.bias.is_some() && (is_comfyui_or_kohya || (convention == Convention::DiffSynth && layer.scale() != 1.0))
    };
    if let Some((name, _)) = lora.layers.iter().find(|(_, layer)| has_unrepresentable_bias(layer)) {
        return Err(unrepresentable(convention, "a scaled bias (lora_B.bias)", name, "PEFT or diffusers"));
    }
    Ok(())
}

/// Returns `tensor * factor` in its own dtype if division restores the same bits, and `None` otherwise.
pub(super) fn scaled_exactly(tensor: &Tensor, factor: f64) -> Option<Tensor> {
    let product = scaled_to_f32(tensor, factor).to_float(tensor.dtype()).ok()?;
    let back = scaled_to_f32(&product, 1.0 / factor).to_float(tensor.dtype()).ok()?;
    (back.as_bytes() == tensor.as_bytes()).then_some(product)
}

/// Computes `tensor * factor` in f64 and rounds it to f32.
pub(super) fn scaled_to_f32(tensor: &Tensor, factor: f64) -> Tensor {
    let values: Vec<f32> = tensor.to_f32_vec().into_iter().map(|v| (f64::from(v) * factor) as f32).collect();
    // The number of values is unchanged, so the shape fits.
    Tensor::new(values, tensor.shape()).unwrap_or_else(|_| tensor.clone())
}
