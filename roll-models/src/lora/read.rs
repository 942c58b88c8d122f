//! Reads LoRA files of any convention.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use roll_core::{DType, StateDict, Tensor};
use roll_external::files;
use serde_json::Value;

use crate::weights::{Checkpoint, WeightsError};

use super::about;
use super::error::{LoraError, some};
use super::keys::{self, ALPHAS_KEY, Key, Part};
use super::layer_names::{self, Names};
use super::peft::{self, Config};
use super::write::{rounded, scaled};
use super::{Convention, Difference, Expert, Layer, Lora, adapter_files};

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
        let file = match path.is_dir() {
            true => path.join(peft::WEIGHTS_FILE),
            false => path.to_path_buf(),
        };
        let checkpoint = Checkpoint::open(&file)?;
        if !checkpoint.keys().any(keys::is_lora_key) {
            return Err(LoraError::NoLora { path: file, found: some(checkpoint.keys(), 3) });
        }
        let beside = file.with_file_name(peft::CONFIG_FILE);
        let config = match files::read(&beside, files::MAX_TEXT) {
            Ok(bytes) => Some((beside, bytes)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
            Err(e) => return Err(WeightsError::io("read", beside)(e).into()),
        };
        let config = config.as_ref().map(|(path, bytes)| (path.as_path(), bytes.as_slice()));
        Self::read(&file, &checkpoint.all()?, checkpoint.metadata(), config)
    }

    /// Opens a file, the directory of a PEFT adapter or a checkpoint, or a run (its newest checkpoint), as `--adapter`
    /// does. Returns two files if each of two experts has its own and `expert` is `None`.
    pub fn open_named(path: &Path, expert: Option<Expert>) -> roll_core::Result<Vec<Self>> {
        let mut opened = Vec::new();
        for file in adapter_files(path)? {
            opened.push(Self::open(file)?);
        }
        if let (2.., Some(expert)) = (opened.len(), expert) {
            opened.retain(|file| file.adapters.iter().any(|lora| lora.is_for() == Some(expert)));
        }
        if let (true, Some(expert)) = (opened.is_empty(), expert) {
            return Err(LoraError::NoExpert { path: path.into(), expert, found: None }.into());
        }
        Ok(opened)
    }

    /// Reads the tensors and metadata of a file. `config` is the `adapter_config.json` next to the file (path and
    /// contents), which is used for PEFT files only. `path` is for error messages.
    pub fn read(
        path: &Path,
        state: &StateDict,
        mut metadata: BTreeMap<String, String>,
        config: Option<(&Path, &[u8])>,
    ) -> Result<Self, LoraError> {
        let keys = state.keys().map(|key| Ok((key.as_str(), keys::parse(path, key)?)));
        let keys = keys.collect::<Result<Vec<(&str, Key<'_>)>, LoraError>>()?;
        let convention = convention(path, &keys)?;
        let header = Header::take(path, &mut metadata, convention)?;
        let beside = match (convention, config) {
            (Convention::Peft, Some((path, bytes))) => Config::read(path, &object(path, bytes)?, "")?,
            _ => None,
        };
        let names = match keys.iter().any(|(_, key)| layer_names::is_diffusers(key.layer)) {
            true => Names::Diffusers,
            false => Names::Official,
        };
        let mut adapters: BTreeMap<Option<Expert>, RawAdapter> = BTreeMap::new();
        for (full, key) in &keys {
            adapters.entry(key.expert).or_default().add(path, full, key, convention, &state[*full])?;
        }
        // If the file has an adapter for the second transformer, the adapter without a number is for the first.
        if adapters.contains_key(&Some(Expert::Low))
            && let Some(first) = adapters.remove(&None)
        {
            adapters.insert(Some(Expert::High), first);
        }
        let adapters = adapters.into_iter().map(|(expert, raw)| raw.finish(path, expert, &header, beside.as_ref()));
        let mut adapters = adapters.collect::<Result<Vec<Lora>, LoraError>>()?;
        if let [only] = adapters.as_mut_slice() {
            only.trained_for = about::expert(path, &metadata)?;
        }
        for adapter in &adapters {
            adapter.check_finite(path)?;
        }
        Ok(Self { path: path.into(), convention, names, adapters, metadata })
    }

    /// Returns one adapter: the `expert`'s if the file has two, else the only one. Fails if the file has two and
    /// `expert` is `None`, or if the adapter is for another expert.
    pub fn one(mut self, expert: Option<Expert>) -> Result<Lora, LoraError> {
        match (self.adapters.len(), expert) {
            (2.., None) => Err(LoraError::TwoExperts { path: self.path }),
            (2.., Some(expert)) => {
                let at = self.adapters.iter().position(|a| a.expert == Some(expert));
                at.map(|at| self.adapters.swap_remove(at)).ok_or(LoraError::NoExpert {
                    path: self.path,
                    expert,
                    found: None,
                })
            }
            _ => match (self.adapters.pop(), expert) {
                (Some(lora), Some(expert)) if lora.is_for().is_some_and(|own| own != expert) => {
                    Err(LoraError::NoExpert { path: self.path, expert, found: lora.is_for() })
                }
                (Some(lora), _) => Ok(lora),
                (None, _) => Err(LoraError::NoLora { path: self.path, found: "no tensors".into() }),
            },
        }
    }
}

/// The common convention of all keys. Fails if two keys have different conventions.
fn convention(path: &Path, keys: &[(&str, Key<'_>)]) -> Result<Convention, LoraError> {
    let mut known = keys.iter().filter_map(|(full, key)| Some((*full, key.convention?)));
    let Some((first, convention)) = known.next() else { return Ok(Convention::DiffSynth) };
    if let Some((second, other)) = known.find(|(_, other)| *other != convention) {
        let of = [convention, other];
        return Err(LoraError::Mixed { path: path.into(), first: first.into(), second: second.into(), of });
    }
    Ok(convention)
}

/// Scales in the header.
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
            let object = object(path, text.as_bytes())?;
            for (expert, prefix) in [(None, "transformer."), (Some(Expert::Low), "transformer_2.")] {
                if let Some(config) = Config::read(path, &object, prefix)? {
                    header.diffusers.insert(expert, config);
                }
            }
        }
        if let Some(text) = metadata.remove(ALPHAS_KEY)
            && matches!(convention, Convention::Peft | Convention::DiffSynth)
        {
            let alphas: BTreeMap<String, f64> = serde_json::from_str(&text).map_err(|e| LoraError::Config {
                path: path.into(),
                problem: format!("`{ALPHAS_KEY}` of the header: expected numbers by layer: {e}"),
            })?;
            header.alphas = Some(alphas);
        }
        Ok(header)
    }
}

fn object(path: &Path, bytes: &[u8]) -> Result<serde_json::Map<String, Value>, LoraError> {
    serde_json::from_slice(bytes)
        .map_err(|e| LoraError::Config { path: path.into(), problem: format!("expected a JSON object: {e}") })
}

/// An adapter whose keys are being collected, by the official name of the layer.
#[derive(Default)]
struct RawAdapter {
    layers: BTreeMap<String, RawLayer>,
    undotted: Vec<String>,
    convention: Option<Convention>,
}

#[derive(Default)]
struct RawLayer {
    /// The layer's name in the file.
    name: String,
    parts: Vec<(Part, Tensor)>,
    adapter: Option<String>,
}

impl RawLayer {
    fn take(&mut self, part: Part) -> Option<Tensor> {
        let at = self.parts.iter().position(|(p, _)| *p == part)?;
        Some(self.parts.swap_remove(at).1)
    }
}

impl RawAdapter {
    fn add(
        &mut self,
        path: &Path,
        full: &str,
        key: &Key<'_>,
        convention: Convention,
        tensor: &Tensor,
    ) -> Result<(), LoraError> {
        self.convention = Some(convention);
        let official = match convention {
            Convention::Kohya => layer_names::unflatten(key.layer).unwrap_or_else(|| {
                if !self.undotted.iter().any(|n| n == key.layer) {
                    self.undotted.push(key.layer.into());
                }
                key.layer.into()
            }),
            _ => layer_names::official(key.layer),
        };
        let layer = self.layers.entry(official.clone()).or_default();
        layer.name = key.layer.into();
        let twice = |part| LoraError::Twice { path: path.into(), layer: official.clone(), part, key: full.into() };
        if layer.parts.iter().any(|(part, _)| *part == key.part) {
            return Err(twice(key.part.name()));
        }
        match (&layer.adapter, key.adapter) {
            (Some(first), Some(second)) if first != second => return Err(twice("name of the adapter")),
            (None, Some(adapter)) => layer.adapter = Some(adapter.into()),
            _ => {}
        }
        if !matches!(tensor.dtype(), DType::F32 | DType::Bf16 | DType::F16) && key.part != Part::Alpha {
            return Err(LoraError::Shape {
                path: path.into(),
                layer: official,
                expected: "values of f32, bf16 or f16".into(),
                found: format!("{} in `{full}`", tensor.dtype()),
            });
        }
        layer.parts.push((key.part, tensor.clone()));
        Ok(())
    }

    fn finish(
        self,
        path: &Path,
        expert: Option<Expert>,
        header: &Header,
        beside: Option<&Config>,
    ) -> Result<Lora, LoraError> {
        let mut lora = Lora { expert, undotted: self.undotted, ..Lora::default() };
        let own = if expert == Some(Expert::Low) { expert } else { None };
        let said = beside.or_else(|| header.diffusers.get(&own));
        for (name, mut raw) in self.layers {
            let weight = raw.take(Part::Difference);
            let bias = raw.take(Part::DifferenceOfBias);
            let modulation = raw.take(Part::DifferenceOfModulation);
            if weight.is_some() || bias.is_some() || modulation.is_some() {
                lora.differences.insert(name.clone(), Difference { weight, bias, modulation });
            }
            if raw.parts.is_empty() {
                continue;
            }
            let layer = raw.finish(path, &name, said, header.alphas.as_ref(), self.convention)?;
            lora.layers.insert(name, layer);
        }
        Ok(lora)
    }
}

impl RawLayer {
    fn finish(
        mut self,
        path: &Path,
        name: &str,
        said: Option<&Config>,
        alphas: Option<&BTreeMap<String, f64>>,
        convention: Option<Convention>,
    ) -> Result<Layer, LoraError> {
        let missing = |part: Part| LoraError::Incomplete { path: path.into(), layer: name.into(), part: part.name() };
        let down = self.take(Part::Down).ok_or_else(|| missing(Part::Down))?;
        let up = self.take(Part::Up).ok_or_else(|| missing(Part::Up))?;
        let bias = self.take(Part::UpBias);
        check_shapes(path, name, &down, &up, bias.as_ref())?;
        let rank = down.shape()[0];
        let not_finite = || LoraError::NotFinite { path: path.into(), what: "alpha", name: name.into() };
        let config = |problem: String| LoraError::Config { path: path.into(), problem };
        let stored = match self.take(Part::Alpha) {
            None => None,
            Some(alpha) if alpha.len() == 1 => Some(f64::from(alpha.to_f32_vec()[0])),
            Some(alpha) => {
                return Err(config(format!("the alpha of `{name}`: expected one number, found {:?}", alpha.shape())));
            }
        };
        let own = alphas.and_then(|alphas| alphas.get(name)).copied();
        let beside = said.map(|config| config.alpha(&self.name, rank));
        if let (Some(own), Some(beside)) = (own, beside)
            && (own - beside).abs() > 1e-6 * beside.abs()
        {
            return Err(config(format!(
                "layer `{name}`: its header says alpha {own}, {} beside it {beside}; remove one of them",
                peft::CONFIG_FILE
            )));
        }
        let alpha = stored.or(beside).or(own).filter(|alpha| *alpha != rank as f64);
        // The scale is used as an f32.
        if alpha.is_some_and(|alpha| !(alpha as f32).is_finite()) {
            return Err(not_finite());
        }
        let up = match (self.take(Part::UnscaledUp), own, convention) {
            (Some(unscaled), Some(_), Some(Convention::DiffSynth)) => {
                check_shapes(path, name, &down, &unscaled, None)?;
                unscaled
            }
            // Written by this project: `B` contains the scale, which is a power of two.
            (None, Some(_), Some(Convention::DiffSynth)) => {
                let scale = alpha.map_or(1.0, |alpha| alpha / rank as f64);
                if scale == 0.0 {
                    return Err(config(format!("layer `{name}`: the header says alpha 0, which cannot be undone")));
                }
                scaled(&up, 1.0 / scale).unwrap_or_else(|| rounded(&up, 1.0 / scale))
            }
            (Some(_), _, _) => {
                return Err(config(format!(
                    "layer `{name}`: an unscaled matrix B without `{ALPHAS_KEY}` in the header"
                )));
            }
            (None, _, _) => up,
        };
        Ok(Layer { down, up, alpha, bias })
    }
}

fn check_shapes(path: &Path, name: &str, down: &Tensor, up: &Tensor, bias: Option<&Tensor>) -> Result<(), LoraError> {
    let shape =
        |expected: String, found: String| LoraError::Shape { path: path.into(), layer: name.into(), expected, found };
    match (down.shape(), up.shape()) {
        ([rank, _, ..], [out, columns, rest @ ..]) if rank == columns && *rank > 0 && rest.iter().all(|d| *d == 1) => {
            match bias {
                Some(bias) if bias.shape() != [*out] => {
                    Err(shape(format!("a bias of {out} values"), format!("{:?}", bias.shape())))
                }
                _ => Ok(()),
            }
        }
        (a, b) => Err(shape("A of [rank, in, ...] and B of [out, rank, 1, ...]".into(), format!("A {a:?}, B {b:?}"))),
    }
}
