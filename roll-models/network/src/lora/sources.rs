//! Finds and opens the adapters that `lora_checkpoint` and `--adapter` name: files, directories or pairs of files, with
//! strengths.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use roll_core::{Error, Result, StateDict};
use roll_weights::AVERAGED;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::weights::Checkpoint;

use super::about;
use super::keys::is_lora_key;
use super::{Expert, Lora, LoraError, LoraFile};

/// One adapter, or several that are added up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a path, `HIGH,LOW`, a map from `dit` and `dit2` to paths, or a list of these")]
pub enum AdapterSources {
    /// One adapter, or one per expert.
    One(AdapterSource),
    /// Adapters that are added up.
    Sum(Vec<AdapterSource>),
}

/// The path of an adapter, or one path per expert. A path is a file, the directory of a PEFT adapter or a checkpoint,
/// or a run (its newest checkpoint). It may end in a strength: `=0.8`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AdapterSource {
    /// A path, or `HIGH,LOW`.
    Path(String),
    /// Paths by expert.
    PerExpert(BTreeMap<Expert, String>),
}

impl JsonSchema for AdapterSources {
    fn schema_name() -> Cow<'static, str> {
        "AdapterSources".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": ["string", "object", "array"]})
    }
}

/// An adapter that has been read.
#[derive(Clone, Debug)]
pub struct OpenedAdapter {
    /// The adapter's file.
    pub path: PathBuf,
    /// The transformer that the adapter is for, from the configuration, the tensor names, the header or the file name.
    pub expert: Option<Expert>,
    /// Whether `expert` is only a guess, from the file name or, failing that, from a name in the header.
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
        let sources = match self {
            Self::One(source) => std::slice::from_ref(source),
            Self::Sum(sources) => sources,
        };
        let mut opened = Vec::new();
        for source in sources {
            for (expert, text) in source.paths(&resolve)? {
                let (path, strength) = split_strength(text, &resolve)?;
                for file in files(&resolve(&path))? {
                    opened.extend(open(&file, expert, strength)?);
                }
            }
        }
        if opened.is_empty() {
            return Err(Error::Unsupported("expected at least one adapter, found none".into()));
        }
        Ok(opened)
    }
}

impl AdapterSource {
    /// The paths, each with the expert to which it is assigned.
    fn paths(&self, resolve: &impl Fn(&Path) -> PathBuf) -> Result<Vec<(Option<Expert>, &str)>> {
        let text = match self {
            Self::PerExpert(paths) => {
                return Ok(paths.iter().map(|(expert, path)| (Some(*expert), path.as_str())).collect());
            }
            // The name of an existing file may contain commas.
            Self::Path(text) if resolve(Path::new(text)).exists() => return Ok(vec![(None, text)]),
            Self::Path(text) => text,
        };
        match text.split(',').map(str::trim).collect::<Vec<_>>().as_slice() {
            [one] => Ok(vec![(None, one)]),
            [high, low] => Ok(vec![(Some(Expert::High), high), (Some(Expert::Low), low)]),
            several => Err(Error::Unsupported(format!(
                "`{text}`: expected one adapter, or two for the two experts, `HIGH,LOW`; found {}; several for one network \
                 are a list (--adapter A --adapter B)",
                several.len()
            ))),
        }
    }
}

/// Splits `FILE=0.8` into path and strength. The strength is 1 if it is missing.
fn split_strength(text: &str, resolve: &impl Fn(&Path) -> PathBuf) -> Result<(PathBuf, f64)> {
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
/// a run (its newest checkpoint). These are two files if each of two experts has a file of its own. If a checkpoint has
/// an averaged policy, these are the files of the average.
pub fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.into()]);
    }
    let averaged = path.join(AVERAGED);
    if averaged.is_dir() {
        tracing::info!("using {}, which evaluations use; the weights in training are beside it", averaged.display());
        return files(&averaged);
    }
    let weights = weight_files(path)?;
    if !weights.is_empty() {
        return one_adapter(path, weights);
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
    if !weight_files(path)?.is_empty() {
        return Ok(None);
    }
    let checkpoints_of_run = path.join("checkpoints");
    let checkpoints = if checkpoints_of_run.is_dir() { checkpoints_of_run.as_path() } else { path };
    let mut steps = entries(checkpoints)?;
    steps.retain(|step| {
        let name = step.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("step-") && step.join("manifest.json").is_file()
    });
    // Longer names sort last, because step numbers are padded only up to a million.
    steps.sort_by_key(|step| (step.as_os_str().len(), step.clone()));
    Ok(steps.pop())
}

/// The paths of a directory's entries, sorted.
fn entries(directory: &Path) -> Result<Vec<PathBuf>> {
    let listing = std::fs::read_dir(directory).map_err(Error::file("list", directory))?;
    let mut paths: Vec<PathBuf> = listing.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    Ok(paths)
}

/// The weight files of a directory.
fn weight_files(directory: &Path) -> Result<Vec<PathBuf>> {
    Ok(entries(directory)?.into_iter().filter(|file| file.extension().is_some_and(|e| e == "safetensors")).collect())
}

/// Selects the weight files in `directory` that make up one adapter. Fails if the choice is ambiguous.
fn one_adapter(directory: &Path, weights: Vec<PathBuf>) -> Result<Vec<PathBuf>> {
    /// Names of adapter files in this project, PEFT, and of whole transformers in diffusers.
    const STEMS: [&str; 4] = ["adapter", "adapter_model", "model", "diffusion_pytorch_model"];
    let stem_without_expert = |file: &Path| {
        let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        stem.trim_end_matches("_high_noise").trim_end_matches("_low_noise").to_string()
    };
    let has_both_experts = |files: &[&PathBuf]| {
        let experts: Vec<_> = files.iter().map(|file| about::expert_of_name(file)).collect();
        matches!(experts[..], [Some(a), Some(b)] if a != b)
    };
    let with_known_stem: Vec<&PathBuf> =
        weights.iter().filter(|file| STEMS.contains(&stem_without_expert(file).as_str())).collect();
    let all: Vec<&PathBuf> = weights.iter().collect();
    for files in [with_known_stem, all] {
        if files.len() == 1 || has_both_experts(&files) {
            return Ok(files.into_iter().cloned().collect());
        }
    }
    let names: Vec<_> = weights.iter().filter_map(|file| Some(file.file_name()?.to_string_lossy())).collect();
    Err(Error::bad_file(directory, format!("holds several weight files; name one of them: {}", names.join(", "))))
}

impl LoraFile {
    /// Opens a file, the directory of a PEFT adapter or a checkpoint, or a run (its newest checkpoint), as `--adapter`
    /// does. Returns two files if each of two experts has a file of its own and `expert` is `None`.
    pub fn open_named(path: &Path, expert: Option<Expert>) -> Result<Vec<Self>> {
        let mut opened = files(path)?.iter().map(Self::open).collect::<Result<Vec<_>, _>>()?;
        if let Some(expert) = expert {
            if opened.len() >= 2 {
                opened.retain(|file| file.adapters.iter().any(|lora| lora.target_expert() == Some(expert)));
            }
            if opened.is_empty() {
                return Err(LoraError::NoExpert { path: path.into(), expert, found: None }.into());
            }
        }
        Ok(opened)
    }
}

/// Reads the adapters of a file. Fails if the file is for another expert than `assigned`.
fn open(path: &Path, assigned: Option<Expert>, strength: f64) -> Result<Vec<OpenedAdapter>> {
    let checkpoint = Checkpoint::open(path)?;
    let is_lora = checkpoint.keys().any(is_lora_key);
    // The file's adapters, each with the expert that tensor names or header say, and the header.
    let adapters: Vec<(Option<Expert>, AdapterWeights, BTreeMap<String, String>)> = if is_lora {
        let file = LoraFile::open(path)?;
        let header = file.metadata;
        let loras = file.adapters.into_iter();
        loras.map(|lora| (lora.target_expert(), AdapterWeights::Lora(lora), header.clone())).collect()
    } else {
        let header = checkpoint.metadata();
        vec![(about::expert(path, &header)?, AdapterWeights::Full(checkpoint.all()?), header)]
    };
    let (mut opened, has_both_experts) = (Vec::new(), adapters.len() > 1);
    for (stated, weights, header) in adapters {
        if let (Some(assigned), Some(stated)) = (assigned, stated)
            && assigned != stated
        {
            // Only the requested expert of a file with both is used.
            if has_both_experts {
                continue;
            }
            let name = |expert| if expert == Expert::High { "`dit`, high_noise" } else { "`dit2`, low_noise" };
            let problem = format!("is an adapter for {}; it was to be used for {}", name(stated), name(assigned));
            return Err(Error::bad_file(path, problem));
        }
        let known = assigned.or(stated);
        let guessed =
            about::expert_of_name(path).or_else(|| about::expert_of_header(&header).map(|(expert, _)| expert));
        if let Some(used) = known
            && !has_both_experts
        {
            about::warn_of_exchange(path, &header, used);
        }
        opened.push(OpenedAdapter {
            path: path.into(),
            expert: known.or(guessed),
            expert_from_file_name: known.is_none() && guessed.is_some(),
            strength,
            weights,
            header,
        });
    }
    Ok(opened)
}
