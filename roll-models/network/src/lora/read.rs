//! Reads LoRA files of any convention.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use roll_core::{DType, StateDict, Tensor, header};
use roll_external::files;
use serde_json::Value;

use crate::weights::{Checkpoint, WeightsError};

use super::about;
use super::error::{LoraError, first_names};
use super::keys::{self, ALPHAS_KEY, Key, Part};
use super::layer_names::{self, Names};
use super::peft::{self, Config};
use super::write::{scaled_exactly, scaled_to_f32};
use super::{Convention, Difference, Expert, Layer, Lora, is_same_alpha};

/// A LoRA file with one adapter, or with one adapter for each of two transformers.
#[derive(Clone, Debug)]
pub struct LoraFile {
    /// The file's path.
    pub path: PathBuf,
    /// The convention of the tensor names.
    pub convention: Convention,
    /// The naming scheme of the layers.
    pub names: Names,
    /// The adapters, ordered by expert.
    pub adapters: Vec<Lora>,
    /// The header's entries without the scales, which are read into the adapters.
    pub metadata: BTreeMap<String, String>,
}

impl LoraFile {
    /// Opens a file or the directory of a PEFT adapter. Matrices stay memory-mapped until they are used.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, LoraError> {
        let path = path.as_ref();
        let file = if path.is_dir() { path.join(peft::WEIGHTS_FILE) } else { path.to_path_buf() };
        let checkpoint = Checkpoint::open(&file)?;
        if !checkpoint.keys().any(keys::is_lora_key) {
            return Err(no_lora(&file, &first_names(checkpoint.keys(), 3)));
        }
        let config_path = file.with_file_name(peft::CONFIG_FILE);
        let config = match files::read_filled(&config_path, files::MAX_TEXT) {
            Ok(bytes) => Some((config_path, bytes)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
            Err(e) => return Err(WeightsError::io("read", config_path)(e).into()),
        };
        let config = config.as_ref().map(|(path, bytes)| (path.as_path(), bytes.as_slice()));
        Self::read(&file, &checkpoint.all()?, checkpoint.metadata(), config)
    }

    /// Reads the tensors of an adapter whose header entries are among them. `name` is for error messages.
    pub fn from_state(name: &str, file: &StateDict) -> roll_core::Result<Self> {
        let mut tensors = file.clone();
        let metadata = header::take(&mut tensors)?;
        Ok(Self::read(Path::new(name), &tensors, metadata, None)?)
    }

    /// Reads the tensors and metadata of a file. `config` is the `adapter_config.json` next to the file (path and
    /// contents), which is used for PEFT files only. `path` is for error messages.
    pub fn read(
        path: &Path,
        state: &StateDict,
        mut metadata: BTreeMap<String, String>,
        config: Option<(&Path, &[u8])>,
    ) -> Result<Self, LoraError> {
        // The configuration is read before the keys, because it can name the kind of an adapter that is not a LoRA.
        let config_of_file = match config {
            Some((path, bytes)) if state.keys().any(|key| key.starts_with(keys::PEFT)) => {
                Config::read(path, &parse_object(path, bytes)?, "")?
            }
            _ => None,
        };
        let keys = state.keys().map(|key| Ok((key.as_str(), keys::parse(path, key)?)));
        let keys = keys.collect::<Result<Vec<(&str, Key<'_>)>, LoraError>>()?;
        let convention = common_convention(path, &keys)?;
        let peft_config = if convention == Convention::Peft { config_of_file } else { None };
        let header = Header::take(path, &mut metadata, convention)?;
        let has_diffusers_names = keys.iter().any(|(_, key)| layer_names::is_diffusers(&key.layer));
        let names = if has_diffusers_names { Names::Diffusers } else { Names::Official };
        let mut adapters: BTreeMap<Option<Expert>, RawAdapter> = BTreeMap::new();
        for (text, key) in &keys {
            adapters.entry(key.expert).or_default().add(path, text, key, convention, &state[*text])?;
        }
        assign_unnumbered(path, &mut adapters)?;
        let adapters = adapters.into_iter().map(|(expert, raw)| {
            // In the header, only the second transformer has a prefix of its own.
            let expert_of_prefix = expert.filter(|expert| *expert == Expert::Low);
            let config = peft_config.as_ref().or_else(|| header.diffusers.get(&expert_of_prefix));
            raw.finish(path, expert, &Scales { convention, config, alphas: header.alphas.as_ref() })
        });
        let mut adapters = adapters.collect::<Result<Vec<Lora>, LoraError>>()?;
        if let [only] = adapters.as_mut_slice() {
            only.trained_for = about::expert(path, &metadata)?;
        }
        for adapter in &adapters {
            adapter.check_finite(path)?;
        }
        Ok(Self { path: path.into(), convention, names, adapters, metadata })
    }

    /// Returns the only adapter, or the adapter for `expert` if the file has two. Fails if the file has two adapters
    /// and `expert` is `None`, or if the only adapter is for another expert.
    pub fn one(self, expert: Option<Expert>) -> Result<Lora, LoraError> {
        let Self { path, mut adapters, .. } = self;
        if adapters.len() > 1 {
            let Some(expert) = expert else { return Err(LoraError::TwoExperts { path }) };
            let found = adapters.into_iter().find(|adapter| adapter.expert == Some(expert));
            return found.ok_or(LoraError::NoExpert { path, expert, found: None });
        }
        let lora = adapters.pop().ok_or_else(|| no_lora(&path, "no tensors"))?;
        match (expert, lora.target_expert()) {
            (Some(expert), Some(found)) if found != expert => {
                Err(LoraError::NoExpert { path, expert, found: Some(found) })
            }
            _ => Ok(lora),
        }
    }
}

/// Assigns the adapter whose keys have no prefix of an expert to the first transformer if the file also has an adapter
/// for the second. Fails if the file has such an adapter and another one for the first transformer.
fn assign_unnumbered(path: &Path, adapters: &mut BTreeMap<Option<Expert>, RawAdapter>) -> Result<(), LoraError> {
    if adapters.contains_key(&None) && adapters.contains_key(&Some(Expert::High)) {
        let problem = "has layers with the prefix of the first expert, `transformer_1.`, and others with none of an \
                       expert: expected one of both kinds, or `transformer_1.` and `transformer_2.`";
        return Err(LoraError::invalid(path, problem));
    }
    if adapters.contains_key(&Some(Expert::Low))
        && let Some(first) = adapters.remove(&None)
    {
        adapters.insert(Some(Expert::High), first);
    }
    Ok(())
}

fn no_lora(path: &Path, found: &str) -> LoraError {
    LoraError::invalid(path, format!("expected the tensors of a LoRA, found {found}"))
}

/// The common convention of all keys (text and parsed key). Fails if two keys have different conventions.
fn common_convention(path: &Path, keys: &[(&str, Key<'_>)]) -> Result<Convention, LoraError> {
    // Some keys are the same in several conventions.
    let mut conventions = keys.iter().filter_map(|(text, key)| Some((*text, key.convention?)));
    let Some((first, convention)) = conventions.next() else { return Ok(Convention::DiffSynth) };
    if let Some((second, other)) = conventions.find(|(_, other)| *other != convention) {
        let problem = format!("two conventions in one file: `{first}` ({convention}) and `{second}` ({other})");
        return Err(LoraError::invalid(path, problem));
    }
    Ok(convention)
}

/// Scales that a file has in its header.
#[derive(Default)]
struct Header {
    /// diffusers' configuration, by the transformer of its prefix.
    diffusers: BTreeMap<Option<Expert>, Config>,
    /// This project's alphas, by the official name of the layer.
    alphas: Option<BTreeMap<String, f64>>,
}

impl Header {
    /// Removes the scales from the metadata, so that they cannot contradict scales that are written later.
    fn take(path: &Path, metadata: &mut BTreeMap<String, String>, convention: Convention) -> Result<Self, LoraError> {
        let mut header = Self::default();
        if let Some(text) = metadata.remove(peft::DIFFUSERS_KEY)
            && convention == Convention::Diffusers
        {
            let object = parse_object(path, text.as_bytes())?;
            for (expert, prefix) in [(None, "transformer."), (Some(Expert::Low), "transformer_2.")] {
                if let Some(config) = Config::read(path, &object, prefix)? {
                    header.diffusers.insert(expert, config);
                }
            }
        }
        if let Some(text) = metadata.remove(ALPHAS_KEY)
            && matches!(convention, Convention::Peft | Convention::DiffSynth)
        {
            header.alphas = Some(serde_json::from_str(&text).map_err(|e| {
                LoraError::invalid(path, format!("`{ALPHAS_KEY}` of the header: expected numbers by layer: {e}"))
            })?);
        }
        Ok(header)
    }
}

/// Parses a JSON object.
fn parse_object(path: &Path, bytes: &[u8]) -> Result<serde_json::Map<String, Value>, LoraError> {
    serde_json::from_slice(bytes).map_err(|e| LoraError::invalid(path, format!("expected a JSON object: {e}")))
}

/// An adapter whose tensors are being collected.
#[derive(Default)]
struct RawAdapter {
    /// Each layer's tensors. The key is the layer's official name.
    layers: BTreeMap<String, RawLayer>,
    /// See [`Lora::undotted`].
    undotted: Vec<String>,
}

/// A layer whose tensors are being collected.
#[derive(Default)]
struct RawLayer {
    /// The layer's name in the file.
    name: String,
    parts: Vec<(Part, Tensor)>,
    /// The name of the adapter in the layer's keys.
    adapter: Option<String>,
}

/// Where the alpha of a layer can be, other than in a tensor of the layer.
struct Scales<'a> {
    convention: Convention,
    /// PEFT's configuration, next to the file or in the header.
    config: Option<&'a Config>,
    /// This project's alphas in the header.
    alphas: Option<&'a BTreeMap<String, f64>>,
}

impl RawAdapter {
    /// Adds a tensor; `key` is its parsed name `text`. Fails if the layer already has such a tensor.
    fn add(
        &mut self,
        path: &Path,
        text: &str,
        key: &Key<'_>,
        convention: Convention,
        tensor: &Tensor,
    ) -> Result<(), LoraError> {
        let official_name = match convention {
            Convention::Kohya => layer_names::unflatten(&key.layer).unwrap_or_else(|| {
                let name = key.layer.to_string();
                if !self.undotted.contains(&name) {
                    self.undotted.push(name.clone());
                }
                name
            }),
            _ => layer_names::official_of_dotted(&key.layer),
        };
        let layer = self.layers.entry(official_name.clone()).or_default();
        layer.name = key.layer.to_string();
        let twice = |part: &str| {
            let layer = &official_name;
            let problem = format!("the {part} of the layer `{layer}` appears twice, the second time as `{text}`");
            Err(LoraError::invalid(path, problem))
        };
        if layer.parts.iter().any(|(part, _)| *part == key.part) {
            return twice(key.part.name());
        }
        match (&layer.adapter, key.adapter) {
            (Some(first), Some(second)) if first != second => return twice("name of the adapter"),
            (None, Some(adapter)) => layer.adapter = Some(adapter.into()),
            _ => {}
        }
        if !matches!(tensor.dtype(), DType::F32 | DType::Bf16 | DType::F16) && key.part != Part::Alpha {
            let found = format!("{} in `{text}`", tensor.dtype());
            return Err(layer_error(path, &official_name, "values of f32, bf16 or f16", &found));
        }
        layer.parts.push((key.part, tensor.clone()));
        Ok(())
    }

    /// Makes the adapter from its tensors. Fails if a layer is not complete.
    fn finish(self, path: &Path, expert: Option<Expert>, scales: &Scales<'_>) -> Result<Lora, LoraError> {
        let mut lora = Lora { expert, undotted: self.undotted, ..Lora::default() };
        for (name, mut raw) in self.layers {
            let weight = raw.take(Part::Difference);
            let bias = raw.take(Part::DifferenceOfBias);
            let modulation = raw.take(Part::DifferenceOfModulation);
            if weight.is_some() || bias.is_some() || modulation.is_some() {
                lora.differences.insert(name.clone(), Difference { weight, bias, modulation });
            }
            if !raw.parts.is_empty() {
                let layer = raw.finish(path, &name, scales)?;
                lora.layers.insert(name, layer);
            }
        }
        Ok(lora)
    }
}

impl RawLayer {
    /// Removes a tensor and returns it.
    fn take(&mut self, part: Part) -> Option<Tensor> {
        let at = self.parts.iter().position(|(p, _)| *p == part)?;
        Some(self.parts.swap_remove(at).1)
    }

    /// Makes the layer from its tensors. `name` is its official name.
    fn finish(mut self, path: &Path, name: &str, scales: &Scales<'_>) -> Result<Layer, LoraError> {
        let missing = |part: Part| {
            let problem = format!("the layer `{name}` has no {}, expected both matrices of every layer", part.name());
            LoraError::invalid(path, problem)
        };
        let down = self.take(Part::Down).ok_or_else(|| missing(Part::Down))?;
        let up = self.take(Part::Up).ok_or_else(|| missing(Part::Up))?;
        let bias = self.take(Part::UpBias);
        check_shapes(path, name, &down, &up, bias.as_ref())?;
        if let Some(config) = scales.config {
            config.check(&self.name, down.shape()[0], bias.is_some())?;
        }
        let alpha = self.alpha(path, name, down.shape()[0], scales)?;
        let mut layer = Layer { down, up, alpha, bias };
        let alpha_in_header = scales.alphas.is_some_and(|alphas| alphas.contains_key(name));
        let b_has_scale = alpha_in_header && scales.convention == Convention::DiffSynth;
        self.undo_scale(path, name, &mut layer, b_has_scale)?;
        Ok(layer)
    }

    /// Removes the scale from the matrix B of `layer` if `b_has_scale`, as in the DiffSynth files of this project (see
    /// the documentation of the module [`super`]).
    fn undo_scale(&mut self, path: &Path, name: &str, layer: &mut Layer, b_has_scale: bool) -> Result<(), LoraError> {
        match (self.take(Part::UnscaledUp), b_has_scale) {
            // A file of another program or convention.
            (None, false) => Ok(()),
            // The file also has the unscaled `B`.
            (Some(unscaled), true) => {
                check_shapes(path, name, &layer.down, &unscaled, None)?;
                layer.up = unscaled;
                Ok(())
            }
            // A scale of 0 cannot be divided out.
            (None, true) if layer.scale() == 0.0 => {
                let problem = format!("layer `{name}`: the header says alpha 0, which cannot be undone");
                Err(LoraError::invalid(path, problem))
            }
            // The scale is divided out: in the matrix's own dtype if that is exact, otherwise in f32.
            (None, true) => {
                let factor = 1.0 / layer.scale();
                layer.up = scaled_exactly(&layer.up, factor).unwrap_or_else(|| scaled_to_f32(&layer.up, factor));
                Ok(())
            }
            (Some(_), false) => {
                let problem = format!("layer `{name}`: an unscaled matrix B without `{ALPHAS_KEY}` in the header");
                Err(LoraError::invalid(path, problem))
            }
        }
    }

    /// The alpha of the layer; `None` if it equals the rank. Fails if the header contradicts the configuration.
    fn alpha(&mut self, path: &Path, name: &str, rank: usize, scales: &Scales<'_>) -> Result<Option<f64>, LoraError> {
        let in_tensor = match self.take(Part::Alpha) {
            None => None,
            Some(alpha) if alpha.len() == 1 => Some(f64::from(alpha.to_f32_vec()[0])),
            Some(alpha) => {
                let problem = format!("the alpha of `{name}`: expected one number, found {:?}", alpha.shape());
                return Err(LoraError::invalid(path, problem));
            }
        };
        let in_header = scales.alphas.and_then(|alphas| alphas.get(name)).copied();
        let in_config = scales.config.map(|config| config.alpha(&self.name, rank));
        if let (Some(header), Some(config)) = (in_header, in_config)
            && !is_same_alpha(header, config)
        {
            let problem = format!(
                "layer `{name}`: its header says alpha {header}, {} beside it {config}; remove one of them",
                peft::CONFIG_FILE
            );
            return Err(LoraError::invalid(path, problem));
        }
        let alpha = in_tensor.or(in_config).or(in_header).filter(|alpha| *alpha != rank as f64);
        // The scale is used as an f32.
        if alpha.is_some_and(|alpha| !(alpha as f32).is_finite()) {
            return Err(LoraError::NotFinite { path: path.into(), what: "alpha", name: name.into() });
        }
        Ok(alpha)
    }
}

pub(super) fn layer_error(path: &Path, layer: &str, expected: &str, found: &str) -> LoraError {
    LoraError::invalid(path, format!("layer `{layer}`: expected {expected}, found {found}"))
}

/// Fails unless A is `[rank, in, ...]`, B `[out, rank, 1, ...]` and the bias, if there is one, `[out]`.
fn check_shapes(path: &Path, name: &str, down: &Tensor, up: &Tensor, bias: Option<&Tensor>) -> Result<(), LoraError> {
    match (down.shape(), up.shape()) {
        ([rank, _, ..], [out, columns, rest @ ..]) if rank == columns && *rank > 0 && rest.iter().all(|d| *d == 1) => {
            match bias {
                Some(bias) if bias.shape() != [*out] => {
                    Err(layer_error(path, name, &format!("a bias of {out} values"), &format!("{:?}", bias.shape())))
                }
                _ => Ok(()),
            }
        }
        (down, up) => {
            let expected = "A of [rank, in, ...] and B of [out, rank, 1, ...]";
            Err(layer_error(path, name, expected, &format!("A {down:?}, B {up:?}")))
        }
    }
}
