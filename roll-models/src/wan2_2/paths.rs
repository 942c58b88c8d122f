//! The files of a Wan pipeline: `model_paths`, `model_id_with_origin_paths`, and whole directories.

use std::path::{Path, PathBuf};

use roll_core::{Error, Result, ResultExt};
use roll_external::files;

use crate::hub::Hub;
use crate::weights::{Checkpoint, WeightsError, expand_glob};

use super::components::{Component, recognise};

/// The networks of a pipeline under official key names. No tensor has been read.
#[derive(Clone, Debug)]
pub struct ComponentFiles {
    /// The only transformer or the high-noise expert.
    pub dit: Checkpoint,
    /// The low-noise expert.
    pub dit2: Option<Checkpoint>,
    /// UMT5 text encoder.
    pub text_encoder: Option<Checkpoint>,
    /// VAE.
    pub vae: Checkpoint,
    /// The kind of the VAE: [`Component::Vae21`] or [`Component::Vae22`].
    pub vae_kind: Component,
    /// CLIP image encoder of Wan2.1 I2V.
    pub clip: Option<Checkpoint>,
    /// A `tokenizer.json` next to the weights, as in the official and the diffusers repositories.
    pub tokenizer: Option<PathBuf>,
}

/// One entry of `wan22_paths.json`.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(untagged)]
pub enum PathEntry {
    /// A file, an index of shards, a glob, or a directory of the official or the diffusers layout.
    One(String),
    /// The shards of one network.
    Shards(Vec<String>),
}

impl ComponentFiles {
    /// Resolves the two options of the model; like the reference implementation, it combines the entries of both.
    /// Errors name the options without their section, which the caller adds.
    pub fn resolve(model_paths: Option<&Path>, model_ids: Option<&str>, hub: &Hub) -> Result<Self> {
        let mut found = Vec::new();
        if let Some(path) = model_paths {
            found.extend(from_json(path)?);
        }
        if let Some(ids) = model_ids {
            found.extend(from_ids(ids, hub)?);
        }
        let origin = match (model_paths, model_ids) {
            (Some(path), None) => path.display().to_string(),
            (None, Some(_)) => "model_id_with_origin_paths".into(),
            (Some(path), Some(_)) => format!("{} and model_id_with_origin_paths", path.display()),
            (None, None) => {
                return Err(Error::config("model_paths", "expected a JSON list of weight files, found nothing"));
            }
        };
        assemble(found, &origin)
    }

    /// Reads `wan22_paths.json`: a JSON list whose entries are a file, a list of shards, or a glob. Components are
    /// recognised by their keys; the first of two transformers is the high-noise expert. Paths are relative to the
    /// directory of the JSON file or, if they do not exist there, to the working directory. A directory in the official
    /// or the diffusers layout is accepted instead of the JSON file.
    pub fn from_json(path: impl AsRef<Path>) -> Result<Self> {
        Self::resolve(Some(path.as_ref()), None, &Hub::default())
    }

    /// Resolves `ORG/NAME:PATTERN` entries, separated by commas, on this machine or by a download. An entry without a
    /// pattern means the whole model.
    pub fn from_ids(ids: &str, hub: &Hub) -> Result<Self> {
        Self::resolve(None, Some(ids), hub)
    }

    /// All files of the networks, for a manifest.
    pub fn paths(&self) -> Vec<PathBuf> {
        let optional = [&self.dit2, &self.text_encoder, &self.clip];
        [&self.dit, &self.vae]
            .into_iter()
            .chain(optional.into_iter().flatten())
            .flat_map(|c| c.paths().map(Path::to_path_buf))
            .collect()
    }
}

/// A file of an entry.
enum Found {
    Weights(Checkpoint),
    Tokenizer(PathBuf),
}

fn from_json(path: &Path) -> Result<Vec<Found>> {
    if path.is_dir() {
        return from_directory(path);
    }
    let text = files::read_text(path, files::MAX_TEXT).map_err(Error::file("read", path))?;
    let entries: Vec<PathEntry> = serde_json::from_str(&text).map_err(|e| {
        Error::bad_file(path, format!("expected a JSON list whose entries are a path or a list of shards: {e}"))
    })?;
    if entries.is_empty() {
        return Err(Error::bad_file(path, "expected a list of weight files, found an empty list"));
    }
    let directory = path.parent().unwrap_or(Path::new(""));
    let mut found = Vec::new();
    for (number, entry) in entries.iter().enumerate() {
        let opened =
            open_entry(entry, directory).while_doing(|| format!("{}: entry {}", path.display(), number + 1))?;
        found.extend(opened);
    }
    Ok(found)
}

fn open_entry(entry: &PathEntry, directory: &Path) -> Result<Vec<Found>> {
    let shards = match entry {
        PathEntry::Shards(shards) => {
            let mut files = Vec::new();
            for shard in shards {
                files.extend(locate(shard, directory)?);
            }
            files
        }
        PathEntry::One(path) => {
            let found = locate(path, directory)?;
            match found.as_slice() {
                [one] if one.is_dir() => return from_directory(one),
                [one] => return Ok(vec![Found::Weights(Checkpoint::open(one)?)]),
                _ => found,
            }
        }
    };
    Ok(vec![Found::Weights(Checkpoint::open_shards(&shards)?)])
}

/// The files that match a path or glob of the JSON file.
fn locate(entry: &str, directory: &Path) -> Result<Vec<PathBuf>> {
    // `join` returns an absolute path unchanged.
    let places = [directory.join(entry), PathBuf::from(entry)];
    if let Some(path) = places.iter().find(|p| p.exists()) {
        return Ok(vec![path.clone()]);
    }
    if entry.contains(['*', '?', '[']) {
        let beside = format!("{}/{entry}", glob::Pattern::escape(&directory.to_string_lossy()));
        let patterns = match (Path::new(entry).is_absolute(), directory.as_os_str().is_empty()) {
            (false, false) => vec![beside, entry.to_string()],
            _ => vec![entry.to_string()],
        };
        for pattern in &patterns {
            match expand_glob(pattern) {
                Err(WeightsError::NoMatch { .. }) => {}
                other => return Ok(other?),
            }
        }
        return Err(WeightsError::NoMatch { pattern: patterns.join("` or `") }.into());
    }
    let missing = std::io::Error::from(std::io::ErrorKind::NotFound);
    Err(WeightsError::io("read", &places[0])(missing).into())
}

fn from_ids(ids: &str, hub: &Hub) -> Result<Vec<Found>> {
    let mut found = Vec::new();
    for id in ids.split(',').map(str::trim).filter(|id| !id.is_empty()) {
        match id.split_once(':') {
            Some((model, pattern)) if !matches!(pattern, "" | "./") => {
                let files = hub.files(model, pattern)?;
                found.push(Found::Weights(Checkpoint::open_shards(&files)?));
            }
            _ => found.extend(from_directory(&hub.directory(
                id.trim_end_matches("./").trim_end_matches(':'),
                &["**"],
                &[],
            )?)?),
        }
    }
    Ok(found)
}

/// Folders of a whole model and the stem of the files in them, the high-noise expert first. An empty folder is the
/// model's own directory.
const FOLDERS: &[(&str, &str)] = &[
    ("high_noise_model", "diffusion_pytorch_model"),
    ("low_noise_model", "diffusion_pytorch_model"),
    ("transformer", "diffusion_pytorch_model"),
    ("transformer_2", "diffusion_pytorch_model"),
    ("vae", "diffusion_pytorch_model"),
    ("text_encoder", "model"),
    ("", "diffusion_pytorch_model"),
    ("", "model"),
];

/// Files at the top level of official repositories.
const TOP: &[&str] = &["models_t5_*", "Wan2.1_VAE.*", "Wan2.2_VAE.*", "models_clip_*"];

/// Paths of tokenizers in the official and the diffusers layout. Opening a `spiece.model` is an error.
const TOKENIZERS: &[&str] = &[
    "google/umt5-xxl/tokenizer.json",
    "tokenizer/tokenizer.json",
    "google/umt5-xxl/spiece.model",
    "tokenizer/spiece.model",
];

/// The weights in the directory of a whole model, of one network, or of the files of two experts.
pub fn networks(directory: &Path) -> Result<Vec<Checkpoint>> {
    let escaped = glob::Pattern::escape(&directory.to_string_lossy());
    let pairs = ["adapter", "diffusion_pytorch_model"]
        .map(|stem| ["high_noise", "low_noise"].map(|expert| format!("{escaped}/{stem}_{expert}.safetensors")));
    for pair in pairs {
        let found: Vec<PathBuf> = pair.iter().flat_map(|pattern| expand_glob(pattern).unwrap_or_default()).collect();
        if found.len() == 2 {
            return found.into_iter().map(|file| Ok(Checkpoint::open(file)?)).collect();
        }
    }
    let found = from_directory(directory)?.into_iter();
    Ok(found.filter_map(|found| if let Found::Weights(weights) = found { Some(weights) } else { None }).collect())
}

/// All weights and tokenizers in a directory of the official or the diffusers layout, or in one component's directory
/// of the latter.
fn from_directory(directory: &Path) -> Result<Vec<Found>> {
    let escaped = glob::Pattern::escape(&directory.to_string_lossy());
    let mut found = Vec::new();
    for (folder, stem) in FOLDERS {
        let place = directory.join(folder);
        let index = place.join(format!("{stem}.safetensors.index.json"));
        if index.is_file() {
            found.push(Found::Weights(Checkpoint::open(index)?));
            continue;
        }
        let inside = match folder.is_empty() {
            true => escaped.clone(),
            false => format!("{escaped}/{folder}"),
        };
        found.extend(weights(&format!("{inside}/{stem}*.safetensors"), folder.is_empty())?);
    }
    for name in TOP {
        found.extend(weights(&format!("{escaped}/{name}"), false)?);
    }
    found.extend(TOKENIZERS.iter().map(|t| directory.join(t)).find(|t| t.is_file()).map(Found::Tokenizer));
    if !found.iter().any(|f| matches!(f, Found::Weights(_))) {
        return Err(WeightsError::Directory {
            path: directory.into(),
            hint: " without weights in the official layout (high_noise_model/, models_t5_*, Wan2.1_VAE.*) or in that \
                   of diffusers (transformer/, vae/, text_encoder/)"
                .into(),
        }
        .into());
    }
    Ok(found)
}

/// The checkpoint whose shards match `pattern`; `None` without a match. A `loose` pattern may also match the files of
/// another network (`model*` matches `models_t5_*`); files with a pattern of their own are excluded.
fn weights(pattern: &str, loose: bool) -> Result<Option<Found>> {
    let mut files = match expand_glob(pattern) {
        Err(WeightsError::NoMatch { .. }) => return Ok(None),
        files => files?,
    };
    if loose {
        files.retain(|f| !f.file_name().is_some_and(|n| n.to_string_lossy().starts_with("models_")));
    }
    // If the same network is present in both formats, safetensors are used.
    if files.iter().any(|f| f.extension().is_some_and(|e| e == "safetensors")) {
        files.retain(|f| f.extension().is_some_and(|e| e == "safetensors"));
    }
    match files.is_empty() {
        true => Ok(None),
        false => Ok(Some(Found::Weights(Checkpoint::open_shards(&files)?))),
    }
}

/// Assigns every network to its role. Fails if a network is missing or appears too often.
fn assemble(found: Vec<Found>, origin: &str) -> Result<ComponentFiles> {
    let mut dits: Vec<Checkpoint> = Vec::new();
    let (mut text_encoder, mut vae, mut clip, mut tokenizer) = (None, None, None, None);
    for item in found {
        let checkpoint = match item {
            Found::Tokenizer(path) => {
                tokenizer.get_or_insert(path);
                continue;
            }
            Found::Weights(checkpoint) => checkpoint,
        };
        let (component, checkpoint) = recognise(checkpoint)?;
        let path = checkpoint.path().to_path_buf();
        let before: Option<Checkpoint> = match component {
            Component::Dit => {
                dits.push(checkpoint);
                (dits.len() > 2).then(|| dits[0].clone())
            }
            Component::TextEncoder => text_encoder.replace(checkpoint),
            Component::Vae21 | Component::Vae22 => vae.replace((component, checkpoint)).map(|(_, c)| c),
            Component::Clip => clip.replace(checkpoint),
            Component::Lora => {
                return Err(Error::bad_file(
                    path,
                    "expected a network of the pipeline, found a LoRA adapter; adapters are loaded by the key that \
                     names them, not by `model_paths`",
                ));
            }
        };
        if let Some(before) = before {
            let (at_most, what) = match component {
                Component::Dit => ("two transformers", "a third".into()),
                other => ("one of each network", format!("a second {other}")),
            };
            return Err(Error::config(
                "model_paths",
                format!(
                    "expected at most {at_most}, found {what} ({}; the first is {})",
                    path.display(),
                    before.path().display()
                ),
            ));
        }
    }
    let missing =
        |what: &str| Error::config("model_paths", format!("expected a {what} among the files of {origin}, found none"));
    let mut dits = dits.into_iter();
    let dit =
        dits.next().ok_or_else(|| missing("Wan transformer (keys `patch_embedding.weight`, `head.modulation`)"))?;
    let dit2 = dits.next();
    if let Some(second) = &dit2 {
        warn_of_order(&dit, second);
    }
    let (vae_kind, vae) = vae.ok_or_else(|| missing("Wan VAE (keys `encoder.conv1.weight`, `conv2.weight`)"))?;
    let tokenizer = tokenizer.or_else(|| beside(text_encoder.as_ref()?));
    Ok(ComponentFiles { dit, dit2, text_encoder, vae, vae_kind, clip, tokenizer })
}

/// Warns if the file names contradict the order in the list, which determines the experts.
fn warn_of_order(first: &Checkpoint, second: &Checkpoint) {
    let says = |c: &Checkpoint, word: &str| c.path().to_string_lossy().to_lowercase().contains(word);
    if says(first, "low_noise") || says(second, "high_noise") {
        tracing::warn!(
            high = %first.path().display(),
            low = %second.path().display(),
            "the first transformer of the list is used as the high-noise expert, but the file names say the opposite"
        );
    }
}

/// The tokenizer next to the text encoder's file.
fn beside(text_encoder: &Checkpoint) -> Option<PathBuf> {
    let directory = text_encoder.path().parent()?;
    let places = [Some(directory), directory.parent()];
    let mut candidates = places.into_iter().flatten().flat_map(|d| TOKENIZERS.iter().map(move |t| d.join(t)));
    candidates.find(|t| t.is_file())
}

#[cfg(test)]
#[path = "paths_tests.rs"]
mod tests;
