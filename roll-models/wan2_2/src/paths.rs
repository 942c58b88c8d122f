//! Finds and opens the files of a Wan pipeline, which the options `model_paths` and `model_id_with_origin_paths` name
//! as lists of files or as whole directories, and assigns each network to its role.

use std::path::{Path, PathBuf};

use roll_core::{BuildContext, Error, Result, ResultExt};
use roll_external::files;
use roll_network::hub::Hub;
use roll_network::lora::{Expert, about};
use roll_network::weights::{Checkpoint, WeightsError, expand_glob};

use super::components::{Component, recognise};
use super::options::{ModelPaths, PathEntry, WanOptions};

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

impl ComponentFiles {
    /// Opens the files of `model_paths` and `model_id_with_origin_paths`. Fails if neither is set.
    pub(super) fn open(options: &WanOptions, context: &BuildContext, hub: &Hub) -> Result<Self> {
        let ids = options.model_id_with_origin_paths.as_deref();
        let opened = match &options.model_paths {
            None => Self::resolve(None, ids, hub),
            Some(ModelPaths::Path(path)) => Self::resolve(Some(&context.resolve(path)), ids, hub),
            Some(ModelPaths::List(entries)) => Self::of_list(entries, &context.resolve(""), ids, hub),
        };
        opened.in_section("model")
    }

    /// Opens the files of both options, like the reference implementation, which combines their entries. Errors name
    /// the options without their section, which the caller adds.
    ///
    /// `model_paths` is `wan22_paths.json`: a JSON list whose entries are a file, a list of shards, or a glob.
    /// Components are recognised by their keys; the first of two transformers is the high-noise expert. Paths are
    /// relative to the directory of the JSON file or, if they do not exist there, to the working directory. A directory
    /// in the official or the diffusers layout is accepted instead of the JSON file.
    ///
    /// `model_ids` are `ORG/NAME:PATTERN` entries, separated by commas. Their files are searched for on this machine,
    /// or downloaded. An entry without a pattern means the whole model.
    pub fn resolve(model_paths: Option<&Path>, model_ids: Option<&str>, hub: &Hub) -> Result<Self> {
        let origin = match (model_paths, model_ids) {
            (Some(path), None) => path.display().to_string(),
            (None, Some(_)) => "model_id_with_origin_paths".into(),
            (Some(path), Some(_)) => format!("{} and model_id_with_origin_paths", path.display()),
            (None, None) => {
                return Err(Error::config(
                    "model_paths",
                    "no weights are named: give a wan22_paths.json, or `model.model_id_with_origin_paths`; \
                     `roll init-tiny DIR` writes a small checkpoint to try things with",
                ));
            }
        };
        let mut found = PipelineFiles::default();
        if let Some(path) = model_paths {
            found.add_path(path)?;
        }
        if let Some(ids) = model_ids {
            found.add_ids(ids, hub)?;
        }
        assemble(found, &origin)
    }

    /// Opens the files like [`ComponentFiles::resolve`], with the entries of `wan22_paths.json` instead of the file.
    /// They are relative to `directory`.
    fn of_list(entries: &[PathEntry], directory: &Path, model_ids: Option<&str>, hub: &Hub) -> Result<Self> {
        let mut found = PipelineFiles::default();
        found.add_list(entries, "`model_paths`", directory)?;
        if let Some(ids) = model_ids {
            found.add_ids(ids, hub)?;
        }
        assemble(found, "model_paths")
    }

    /// Opens the files of `wan22_paths.json`; see [`ComponentFiles::resolve`].
    pub fn from_json(path: impl AsRef<Path>) -> Result<Self> {
        Self::resolve(Some(path.as_ref()), None, &Hub::default())
    }

    /// The transformers with the names of their experts, the high-noise expert first.
    pub fn experts(&self) -> impl Iterator<Item = (&'static str, &Checkpoint)> {
        std::iter::once(("dit", &self.dit)).chain(self.dit2.as_ref().map(|file| ("dit2", file)))
    }
}

/// The files of a pipeline before their networks are recognised.
#[derive(Default)]
struct PipelineFiles {
    weights: Vec<Checkpoint>,
    /// The tokenizer that was found first.
    tokenizer: Option<PathBuf>,
}

impl PipelineFiles {
    /// Adds the files of the option `model_paths`: a `wan22_paths.json` or a directory.
    fn add_path(&mut self, path: &Path) -> Result<()> {
        if path.is_dir() {
            return self.add_directory(path);
        }
        if path.is_file() && !path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json")) {
            let problem = "expected a JSON list of weight files (wan22_paths.json) or a directory; a pipeline has at \
                           least a transformer and a VAE, so one weight file is not enough";
            return Err(Error::bad_file(path, problem));
        }
        let text = files::read_text(path, files::MAX_TEXT).map_err(Error::file("read", path))?;
        let entries: Vec<PathEntry> = serde_json::from_str(&text).map_err(|e| {
            Error::bad_file(path, format!("expected a JSON list whose entries are a path or a list of shards: {e}"))
        })?;
        self.add_list(&entries, &path.display().to_string(), path.parent().unwrap_or(Path::new("")))
    }

    /// Adds the entries of a list. `origin` is the list's name in errors.
    fn add_list(&mut self, entries: &[PathEntry], origin: &str, directory: &Path) -> Result<()> {
        if entries.is_empty() {
            let problem = format!("expected a list of weight files, found an empty list in {origin}");
            return Err(Error::config("model_paths", problem));
        }
        for (number, entry) in entries.iter().enumerate() {
            self.add_entry(entry, directory).while_doing(|| format!("{origin}: entry {}", number + 1))?;
        }
        Ok(())
    }

    /// Adds an entry: a path, a glob of shards, a directory, or a list of shards.
    fn add_entry(&mut self, entry: &PathEntry, directory: &Path) -> Result<()> {
        let checkpoint = match entry {
            PathEntry::One(path) => match locate(path, directory)?.as_slice() {
                [one] if one.is_dir() => return self.add_directory(one),
                [one] => Checkpoint::open(one)?,
                shards => Checkpoint::open_shards(shards)?,
            },
            PathEntry::Shards(entries) => {
                let mut shards = Vec::new();
                for shard in entries {
                    shards.extend(locate(shard, directory)?);
                }
                Checkpoint::open_shards(&shards)?
            }
        };
        self.weights.push(checkpoint);
        Ok(())
    }

    /// Adds the files of published models.
    fn add_ids(&mut self, ids: &str, hub: &Hub) -> Result<()> {
        for id in ids.split(',').map(str::trim).filter(|id| !id.is_empty()) {
            match id.split_once(':') {
                Some((model, pattern)) if !matches!(pattern, "" | "./") => {
                    self.weights.push(Checkpoint::open_shards(&hub.files(model, pattern)?)?);
                }
                _ => {
                    let model = id.trim_end_matches("./").trim_end_matches(':');
                    let all_files = ["**"];
                    self.add_directory(&hub.directory(model, &all_files, &[])?)?;
                }
            }
        }
        Ok(())
    }

    /// Adds all weights and the tokenizer in a directory. It has the official or the diffusers layout, or is the folder
    /// of one component in the diffusers layout.
    fn add_directory(&mut self, directory: &Path) -> Result<()> {
        let escaped = glob::Pattern::escape(&directory.to_string_lossy());
        let count_before = self.weights.len();
        for (folder, stem) in FOLDERS {
            let index = directory.join(folder).join(format!("{stem}.safetensors.index.json"));
            if index.is_file() {
                self.weights.push(Checkpoint::open(index)?);
                continue;
            }
            let found = if folder.is_empty() {
                open_glob(&format!("{escaped}/{stem}*.safetensors"), Matching::ExceptTopLevelNames)?
            } else {
                open_glob(&format!("{escaped}/{folder}/{stem}*.safetensors"), Matching::All)?
            };
            self.weights.extend(found);
        }
        for name in TOP_LEVEL_NAMES {
            self.weights.extend(open_glob(&format!("{escaped}/{name}"), Matching::All)?);
        }
        let tokenizer = TOKENIZERS.iter().map(|t| directory.join(t)).find(|t| t.is_file());
        self.tokenizer = self.tokenizer.take().or(tokenizer);
        if self.weights.len() == count_before {
            return Err(WeightsError::Directory {
                path: directory.into(),
                hint:
                    " without weights in the official layout (high_noise_model/, models_t5_*, Wan2.1_VAE.*) or in that \
                       of diffusers (transformer/, vae/, text_encoder/)"
                        .into(),
            }
            .into());
        }
        Ok(())
    }
}

/// The files that match an entry of a list, a path or glob that is relative to `directory` or to the working directory.
fn locate(entry: &str, directory: &Path) -> Result<Vec<PathBuf>> {
    // `join` returns an absolute path unchanged.
    let candidates = [directory.join(entry), PathBuf::from(entry)];
    if let Some(path) = candidates.iter().find(|p| p.exists()) {
        return Ok(vec![path.clone()]);
    }
    if entry.contains(['*', '?', '[']) {
        let mut patterns = vec![entry.to_string()];
        if !Path::new(entry).is_absolute() && !directory.as_os_str().is_empty() {
            let in_directory = format!("{}/{entry}", glob::Pattern::escape(&directory.to_string_lossy()));
            patterns.insert(0, in_directory);
        }
        for pattern in &patterns {
            match expand_glob(pattern) {
                Err(WeightsError::NoMatch { .. }) => {}
                other => return Ok(other?),
            }
        }
        return Err(WeightsError::NoMatch { pattern: patterns.join("` or `") }.into());
    }
    let missing = std::io::Error::from(std::io::ErrorKind::NotFound);
    Err(WeightsError::io("read", &candidates[0])(missing).into())
}

/// Folders of a whole model, and the beginning of the names of their files; the high-noise expert comes first. An empty
/// folder is the model's own directory.
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
const TOP_LEVEL_NAMES: &[&str] = &["models_t5_*", "Wan2.1_VAE.*", "Wan2.2_VAE.*", "models_clip_*"];

/// Paths of tokenizers in the official and the diffusers layout. Opening a `spiece.model` is an error.
const TOKENIZERS: &[&str] = &[
    "google/umt5-xxl/tokenizer.json",
    "tokenizer/tokenizer.json",
    "google/umt5-xxl/spiece.model",
    "tokenizer/spiece.model",
];

/// The weights in a directory: of a whole model, of one network, or of the files of two experts (adapters or
/// transformers).
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
    let mut found = PipelineFiles::default();
    found.add_directory(directory)?;
    Ok(found.weights)
}

/// Which of the files that match a pattern belong to the network.
#[derive(PartialEq)]
enum Matching {
    All,
    /// All except files whose names begin with `models_`: `model*` also matches `models_t5_*` and `models_clip_*` of
    /// [`TOP_LEVEL_NAMES`].
    ExceptTopLevelNames,
}

/// The checkpoint whose shards match `pattern`; `None` without a match.
fn open_glob(pattern: &str, matching: Matching) -> Result<Option<Checkpoint>> {
    let mut files = match expand_glob(pattern) {
        Err(WeightsError::NoMatch { .. }) => return Ok(None),
        files => files?,
    };
    if matching == Matching::ExceptTopLevelNames {
        files.retain(|f| !f.file_name().is_some_and(|n| n.to_string_lossy().starts_with("models_")));
    }
    // If the same network is present in both formats, safetensors are used.
    if files.iter().any(|f| f.extension().is_some_and(|e| e == "safetensors")) {
        files.retain(|f| f.extension().is_some_and(|e| e == "safetensors"));
    }
    if files.is_empty() {
        return Ok(None);
    }
    Ok(Some(Checkpoint::open_shards(&files)?))
}

/// Assigns every network to its role. Fails if a network is missing or appears too often.
fn assemble(found: PipelineFiles, origin: &str) -> Result<ComponentFiles> {
    let mut dits: Vec<Checkpoint> = Vec::new();
    let (mut text_encoder, mut vae, mut clip) = (None, None, None);
    for checkpoint in found.weights {
        let (component, checkpoint) = recognise(checkpoint)?;
        let path = checkpoint.path().to_path_buf();
        // A checkpoint that already has the role, if there is one too many.
        let previous: Option<Checkpoint> = match component {
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
        if let Some(previous) = previous {
            let (at_most, what) = match component {
                Component::Dit => ("two transformers", "a third".into()),
                other => ("one of each network", format!("a second {other}")),
            };
            return Err(Error::config(
                "model_paths",
                format!(
                    "expected at most {at_most}, found {what} ({}; the first is {})",
                    path.display(),
                    previous.path().display()
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
        // The order in the list determines the experts.
        for (file, expert) in [(&dit, Expert::High), (second, Expert::Low)] {
            about::warn_of_exchange(file.path(), &file.metadata(), expert);
        }
    }
    let (vae_kind, vae) = vae.ok_or_else(|| missing("Wan VAE (keys `encoder.conv1.weight`, `conv2.weight`)"))?;
    let tokenizer = found.tokenizer.or_else(|| tokenizer_next_to(text_encoder.as_ref()?));
    Ok(ComponentFiles { dit, dit2, text_encoder, vae, vae_kind, clip, tokenizer })
}

/// The tokenizer next to the text encoder's file, or in the directory above.
fn tokenizer_next_to(text_encoder: &Checkpoint) -> Option<PathBuf> {
    let directory = text_encoder.path().parent()?;
    let directories = [Some(directory), directory.parent()];
    let mut candidates = directories.into_iter().flatten().flat_map(|d| TOKENIZERS.iter().map(move |t| d.join(t)));
    candidates.find(|t| t.is_file())
}

/// Describes the operation in which an error occurred: reading this file.
pub(super) fn reading(file: &Checkpoint) -> String {
    format!("reading {}", file.path().display())
}

#[cfg(test)]
#[path = "paths_tests.rs"]
mod tests;
