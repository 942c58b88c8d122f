//! Values of `lora_checkpoint` and `--adapter`: files, directories or pairs of files, with strengths.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use roll_core::{Error, Result, StateDict};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::weights::Checkpoint;

use super::about;
use super::keys::is_lora_key;
use super::{Expert, Lora, LoraFile};

/// One or several adapters: a path; `HIGH,LOW`, one path per expert; a map from experts to paths; or a list of these,
/// whose adapters are added up. A path may end in a strength: `=0.8`. A path is a file, the directory of a PEFT adapter
/// or a checkpoint, or a run (its newest checkpoint).
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub struct AdapterSources(Json);

impl JsonSchema for AdapterSources {
    fn schema_name() -> Cow<'static, str> {
        "AdapterSources".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": ["string", "object", "array"]})
    }
}

impl<'de> Deserialize<'de> for AdapterSources {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Json::deserialize(deserializer)?;
        let one = |value: &Json| match value {
            Json::String(text) => !text.is_empty(),
            Json::Object(map) => {
                !map.is_empty() && map.iter().all(|(expert, path)| named_expert(expert).is_some() && path.is_string())
            }
            _ => false,
        };
        let known = match &value {
            Json::Array(items) => !items.is_empty() && items.iter().all(one),
            value => one(value),
        };
        match known {
            true => Ok(Self(value)),
            false => Err(D::Error::custom(format!(
                "expected a path, `HIGH,LOW`, a map from `dit` and `dit2` to paths, or a list of these; found {value}"
            ))),
        }
    }
}

impl From<&Path> for AdapterSources {
    fn from(path: &Path) -> Self {
        Self(path.to_string_lossy().into())
    }
}

impl fmt::Display for AdapterSources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Json::String(text) => f.write_str(text),
            other => write!(f, "{other}"),
        }
    }
}

/// An adapter that has been read.
#[derive(Clone, Debug)]
pub struct OpenedAdapter {
    /// The adapter's file.
    pub path: PathBuf,
    /// The transformer that the adapter is for, from the configuration, the tensor names, the header or the file name.
    pub expert: Option<Expert>,
    /// Whether only the file name contains the transformer.
    pub expert_from_file_name: bool,
    /// Factor of the adapter's additions.
    pub strength: f64,
    /// The contents.
    pub weights: AdapterWeights,
    /// The header's entries.
    pub header: BTreeMap<String, String>,
}

/// Contents of an adapter file.
#[derive(Clone, Debug)]
pub enum AdapterWeights {
    /// Adapters of layers.
    Lora(Lora),
    /// All weights of a network, from full fine-tuning.
    Full(StateDict),
}

impl AdapterSources {
    /// Reads all adapters. `resolve` makes relative paths absolute. Fails if a file is for another expert than the
    /// configuration assigns it to.
    pub fn open(&self, resolve: impl Fn(&Path) -> PathBuf) -> Result<Vec<OpenedAdapter>> {
        let items = match &self.0 {
            Json::Array(items) => items.as_slice(),
            one => std::slice::from_ref(one),
        };
        let mut opened = Vec::new();
        for item in items {
            for (expert, text) in named(item, &resolve)? {
                let (path, strength) = with_strength(text, &resolve)?;
                for file in files(&resolve(&path))? {
                    opened.extend(open(&file, expert, strength)?);
                }
            }
        }
        Ok(opened)
    }
}

/// The paths of one entry, each with the expert that the entry assigns it to.
fn named<'a>(item: &'a Json, resolve: &impl Fn(&Path) -> PathBuf) -> Result<Vec<(Option<Expert>, &'a str)>> {
    match item {
        Json::Object(map) => {
            Ok(map.iter().filter_map(|(expert, path)| Some((Some(named_expert(expert)?), path.as_str()?))).collect())
        }
        item => {
            let text = item.as_str().unwrap_or_default();
            // The name of an existing file may contain commas.
            if resolve(Path::new(text)).exists() {
                return Ok(vec![(None, text)]);
            }
            match text.split(',').map(str::trim).collect::<Vec<_>>().as_slice() {
                [one] => Ok(vec![(None, one)]),
                [high, low] => Ok(vec![(Some(Expert::High), high), (Some(Expert::Low), low)]),
                several => Err(Error::Unsupported(format!(
                    "`{text}`: expected one adapter, or two for the two experts, `HIGH,LOW`; found {}; several for one \
                     network are a list (--adapter A --adapter B)",
                    several.len()
                ))),
            }
        }
    }
}

fn named_expert(name: &str) -> Option<Expert> {
    match name {
        "dit" | "high" | "high_noise" => Some(Expert::High),
        "dit2" | "low" | "low_noise" => Some(Expert::Low),
        _ => None,
    }
}

/// Splits `FILE=0.8` into path and strength. The strength is 1 if it is missing.
fn with_strength(text: &str, resolve: &impl Fn(&Path) -> PathBuf) -> Result<(PathBuf, f64)> {
    let whole = PathBuf::from(text);
    if resolve(&whole).exists() {
        return Ok((whole, 1.0));
    }
    match text.rsplit_once('=') {
        Some((path, strength)) => match strength.trim().parse::<f64>() {
            Ok(strength) if strength.is_finite() => Ok((path.into(), strength)),
            _ => {
                Err(Error::Unsupported(format!("`{text}`: expected a finite strength behind `=`, found `{strength}`")))
            }
        },
        None => Ok((whole, 1.0)),
    }
}

/// The adapter files of a path: the file itself, or the files in the directory of a PEFT adapter, of a checkpoint or of
/// a run (its newest checkpoint). Returns two files if each of two experts has its own.
pub fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.into()]);
    }
    let weights = weights(path)?;
    if !weights.is_empty() {
        return of_one_adapter(path, weights);
    }
    match newest_checkpoint(path)? {
        Some(newest) => files(&newest),
        None => Err(Error::bad_file(
            path,
            "expected an adapter (adapter.safetensors, or adapter_model.safetensors of PEFT), a checkpoint of a run, or \
             a run with checkpoints",
        )),
    }
}

/// The newest complete checkpoint of a run or of a directory of checkpoints. `None` if the directory has no checkpoint,
/// or contains weights itself.
pub fn newest_checkpoint(path: &Path) -> Result<Option<PathBuf>> {
    if !weights(path)?.is_empty() {
        return Ok(None);
    }
    let checkpoints = [path.join("checkpoints"), path.to_path_buf()].into_iter().find(|place| place.is_dir());
    let mut steps = entries(&checkpoints.unwrap_or_default())?;
    steps.retain(|step| {
        let name = step.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("step-") && step.join("manifest.json").is_file()
    });
    // Longer names sort last, because step numbers are padded only up to a million.
    steps.sort_by_key(|step| (step.as_os_str().len(), step.clone()));
    Ok(steps.pop())
}

fn entries(place: &Path) -> Result<Vec<PathBuf>> {
    let listing = std::fs::read_dir(place).map_err(Error::file("list", place))?;
    let mut paths: Vec<PathBuf> = listing.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    Ok(paths)
}

/// The weight files of a directory.
fn weights(place: &Path) -> Result<Vec<PathBuf>> {
    Ok(entries(place)?.into_iter().filter(|file| file.extension().is_some_and(|e| e == "safetensors")).collect())
}

/// Selects the weight files in `place` that make up one adapter. Fails if the choice is ambiguous.
fn of_one_adapter(place: &Path, weights: Vec<PathBuf>) -> Result<Vec<PathBuf>> {
    const STEMS: [&str; 4] = ["adapter", "adapter_model", "model", "diffusion_pytorch_model"];
    let stem = |file: &Path| {
        let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        stem.trim_end_matches("_high_noise").trim_end_matches("_low_noise").to_string()
    };
    let of_both = |files: &[&PathBuf]| {
        let experts: Vec<_> = files.iter().map(|file| about::expert_of_name(file)).collect();
        matches!(experts[..], [Some(a), Some(b)] if a != b)
    };
    let known: Vec<&PathBuf> = weights.iter().filter(|file| STEMS.contains(&stem(file).as_str())).collect();
    let all: Vec<&PathBuf> = weights.iter().collect();
    for files in [known, all] {
        if files.len() == 1 || of_both(&files) {
            return Ok(files.into_iter().cloned().collect());
        }
    }
    let names: Vec<_> = weights.iter().filter_map(|file| Some(file.file_name()?.to_string_lossy())).collect();
    Err(Error::bad_file(place, format!("holds several weight files; name one of them: {}", names.join(", "))))
}

fn open(path: &Path, given_for: Option<Expert>, strength: f64) -> Result<Vec<OpenedAdapter>> {
    let checkpoint = Checkpoint::open(path)?;
    let read: Vec<(Option<Expert>, AdapterWeights, BTreeMap<String, String>)> = match checkpoint.keys().any(is_lora_key)
    {
        true => {
            let file = LoraFile::open(path)?;
            let header = file.metadata;
            file.adapters.into_iter().map(|lora| (lora.is_for(), AdapterWeights::Lora(lora), header.clone())).collect()
        }
        false => {
            let header = checkpoint.metadata();
            vec![(about::expert(path, &header)?, AdapterWeights::Full(checkpoint.all()?), header)]
        }
    };
    let (mut opened, for_both) = (Vec::new(), read.len() > 1);
    for (said, weights, header) in read {
        if let (Some(given), Some(said)) = (given_for, said)
            && given != said
        {
            // A file with adapters for both experts: only the requested one is used.
            if for_both {
                continue;
            }
            return Err(other_expert(path, said, given));
        }
        let by_name = about::expert_of_name(path);
        opened.push(OpenedAdapter {
            path: path.into(),
            expert: given_for.or(said).or(by_name),
            expert_from_file_name: given_for.or(said).is_none() && by_name.is_some(),
            strength,
            weights,
            header,
        });
    }
    Ok(opened)
}

/// The error for a file that is for `said` but was assigned to `given`.
pub(crate) fn other_expert(path: &Path, said: Expert, given: Expert) -> Error {
    let name = |expert| if expert == Expert::High { "`dit`, high_noise" } else { "`dit2`, low_noise" };
    Error::bad_file(path, format!("is an adapter for {}; it was to be used for {}", name(said), name(given)))
}
