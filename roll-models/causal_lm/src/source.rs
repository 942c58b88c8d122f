//! Finds and reads the files of a model: a Hugging Face directory, a GGUF file, a model of the Hugging Face hub, or the
//! model that is built into the program.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use roll_core::{Error, Result, ResultExt};
use roll_external::files;
use roll_network::headers::check_tensors;
use roll_network::hub::Hub;
use roll_network::new_checkpoint::TinyCheckpoint;
use roll_network::tokenizer::Tokenizer;
use roll_network::weights::{Checkpoint, parse_safetensors};

use super::chat::ChatTemplate;
use super::config::LmConfig;
use super::gguf;
use super::loaded::LoadedModel;
use super::model::Origin;

/// Patterns of files that every published model has.
const NEEDED: &[&str] = &["config.json", "*.safetensors"];
/// Patterns of files that a published model may have: tokenizer, chat template, index of shards.
const ALSO: &[&str] = &["*.json", "*.jinja"];

/// Returns the path of the model `name`: `resolved` (`name` as an absolute path) if it exists, otherwise the path of
/// the published model `name`, which is downloaded if it is missing. `ORG/NAME` is the directory of a published model,
/// `ORG/NAME:FILE.gguf` one of its files.
pub fn locate(name: &Path, resolved: PathBuf, hub: &Hub) -> Result<PathBuf> {
    let name = name.to_string_lossy();
    let (model, file) = name.split_once(':').map_or((&*name, None), |(model, file)| (model, Some(file)));
    let is_published =
        model.split('/').filter(|part| !part.is_empty()).count() == 2 && !name.starts_with(['.', '/', '~']);
    // `FOLDER/NAME.gguf` looks like a published model, but is a path that does not exist.
    if resolved.exists() || !is_published || (file.is_none() && model.ends_with(".gguf")) {
        return Ok(resolved);
    }
    let found = match file {
        None => hub.directory(model, NEEDED, ALSO),
        Some(file) => hub.directory(model, &[file], &[]).map(|directory| directory.join(file)),
    };
    found.map_err(Error::from).while_doing(|| {
        format!("the path {} does not exist; looking for a published model instead", resolved.display())
    })
}

/// Reads the model at `path`: a directory or a GGUF file. With `headers_only`, weights are checked and not read.
pub fn open(path: &Path, headers_only: bool) -> Result<LoadedModel> {
    if is_gguf(path)? { gguf::open(path, headers_only) } else { open_directory(path, headers_only) }
}

/// Returns whether `path` is a GGUF file (by its name) and not a directory. Fails if it does not exist or is another
/// kind of file.
pub(super) fn is_gguf(path: &Path) -> Result<bool> {
    if !path.exists() {
        let problem = "it does not exist; a published model is named with its organisation, such as \
                       Qwen/Qwen2.5-0.5B-Instruct";
        return Err(Error::bad_file(path, problem));
    }
    let is_gguf = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    if path.is_file() && !is_gguf {
        let problem = "expected the directory of a model (config.json, tokenizer.json, safetensors) or a .gguf file";
        return Err(Error::bad_file(path, problem));
    }
    Ok(is_gguf)
}

/// Reads the model in a Hugging Face directory.
fn open_directory(directory: &Path, headers_only: bool) -> Result<LoadedModel> {
    let mut config = LmConfig::read(&directory.join("config.json"))?;
    let weights = open_weights(directory)?;
    if headers_only {
        check_tensors(&weights, &config.weights())?;
    }
    let tokenizer = directory.join("tokenizer.json");
    let tokenizer = tokenizer.exists().then(|| Tokenizer::load(&tokenizer)).transpose()?;
    let template = ChatTemplate::load(directory)?;
    if let Some(tokenizer) = &tokenizer {
        add_end_of_tokenizer(&mut config, tokenizer, directory)?;
    }
    Ok(LoadedModel {
        config,
        // Tensors of safetensors files point into the mapped file, so this reads nothing.
        state: weights.all()?,
        quantised: BTreeMap::new(),
        tokenizer,
        template,
        location: directory.display().to_string(),
    })
}

/// Adds the id of the `eos_token` of a directory's `tokenizer_config.json`.
pub fn add_end_of_tokenizer(config: &mut LmConfig, tokenizer: &Tokenizer, directory: &Path) -> Result<()> {
    let end = end_of_tokenizer(directory)?.and_then(|text| tokenizer.id(&text));
    config.add_end_ids(end.into_iter().filter(|id| (*id as usize) < config.vocab).collect());
    Ok(())
}

/// Returns the `eos_token` of a directory's `tokenizer_config.json`. Many fine-tunes name the end of a turn only there.
fn end_of_tokenizer(directory: &Path) -> Result<Option<String>> {
    let file = directory.join("tokenizer_config.json");
    if !file.exists() {
        return Ok(None);
    }
    let bytes = files::read_filled(&file, files::MAX_TEXT).map_err(Error::file("read", &file))?;
    let config: serde_json::Value =
        serde_json::from_slice(&bytes).map_err(|e| Error::bad_file(&file, e.to_string()))?;
    // A text, or an object with its text in `content`.
    let token = &config["eos_token"];
    Ok(token.as_str().or(token["content"].as_str()).map(Into::into))
}

/// Opens the weights of a directory: an index of shards, else `model.safetensors`, else all safetensors files.
pub fn open_weights(directory: &Path) -> Result<Checkpoint> {
    for name in ["model.safetensors.index.json", "model.safetensors"] {
        let path = directory.join(name);
        if path.exists() {
            return Ok(Checkpoint::open(path)?);
        }
    }
    let pattern = glob::Pattern::escape(&directory.to_string_lossy());
    Checkpoint::open_glob(&format!("{pattern}/*.safetensors")).map_err(|_| {
        let problem = "expected model.safetensors, or shards with model.safetensors.index.json; found none";
        Error::bad_file(directory, problem)
    })
}

/// Text files of a model's directory that other programs need next to the weights. The last three are of models that
/// see.
pub(super) const BESIDE: [&str; 10] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
];

/// Returns how other programs find the model at `path` (`None`: the built-in model). `published` is the model's name if
/// it is a published one. With `with_files`, also reads the text files that other programs need next to the weights.
pub fn origin(path: Option<&Path>, published: Option<PathBuf>, with_files: bool) -> Result<Origin> {
    let mut origin = Origin::default();
    let Some(path) = path else {
        if with_files {
            let files = built_in_files().into_iter();
            origin.files = files.map(|(name, bytes)| (name.into(), String::from_utf8_lossy(bytes).into())).collect();
        }
        return Ok(origin);
    };
    if is_gguf(path)? {
        if with_files {
            origin.files = gguf::files_for_others(path).unwrap_or_else(|e| {
                tracing::warn!("checkpoints will have weights alone, which other programs cannot open: {}", e.chain());
                BTreeMap::new()
            });
        }
        return Ok(origin);
    }
    let base = published.or_else(|| std::path::absolute(path).ok());
    origin.base = base.map(|base| base.to_string_lossy().into_owned());
    for name in BESIDE.iter().filter(|name| with_files && path.join(name).exists()) {
        let file = path.join(name);
        let text = files::read_text(&file, files::MAX_TEXT).map_err(Error::file("read", &file))?;
        origin.files.insert((*name).into(), text);
    }
    Ok(origin)
}

// The files of the built-in model.
const CONFIG: &[u8] = include_bytes!("../assets/demo_agent/config.json");
const TOKENIZER: &[u8] = include_bytes!("../assets/demo_agent/tokenizer.json");
const TEMPLATE: &str = include_str!("../assets/demo_agent/chat_template.jinja");
const WEIGHTS: &[u8] = include_bytes!("../assets/demo_agent/model.safetensors");

fn built_in_files() -> [(&'static str, &'static [u8]); 3] {
    [("config.json", CONFIG), ("tokenizer.json", TOKENIZER), ("chat_template.jinja", TEMPLATE.as_bytes())]
}

roll_core::inventory::submit! {
    TinyCheckpoint {
        kind: "lm",
        about: "The built-in language model, which plays FrozenLake, as a directory in Hugging Face's layout",
        write: |directory, _| {
            write_built_in(directory)?;
            let line = format!("model.model_path      {}", directory.display());
            Ok(vec![line, "It plays FrozenLake and knows nothing else.".into()])
        },
    }
}

/// Writes the built-in model to `directory`, which is created.
pub fn write_built_in(directory: &Path) -> Result<()> {
    std::fs::create_dir_all(directory).map_err(Error::file("create the directory", directory))?;
    for (name, bytes) in built_in_files().into_iter().chain([("model.safetensors", WEIGHTS)]) {
        let path = directory.join(name);
        std::fs::write(&path, bytes).map_err(Error::file("write", &path))?;
    }
    Ok(())
}

/// Reads the small model for FrozenLake that is part of the program; `demo/agent` trains it.
pub fn built_in() -> Result<LoadedModel> {
    let location = "the built-in model";
    let broken = |problem: String| Error::bad_file(location, problem);
    Ok(LoadedModel {
        config: LmConfig::parse(CONFIG).map_err(broken)?,
        state: parse_safetensors(location, WEIGHTS)?,
        quantised: BTreeMap::new(),
        tokenizer: Some(Tokenizer::parse(TOKENIZER).map_err(broken)?),
        template: Some(ChatTemplate::new(TEMPLATE.into(), String::new(), String::new()).map_err(broken)?),
        location: location.into(),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_end_token_of_the_tokenizer_ends_a_turn() {
        let dir = tempfile::tempdir().unwrap();
        write_built_in(dir.path()).unwrap();
        let ends = || open(dir.path(), true).unwrap().config.end_ids;
        let before = ends();
        let tokenizer = Tokenizer::load(&dir.path().join("tokenizer.json")).unwrap();
        let other = (0..before[0].max(9)).find(|id| !before.contains(id)).unwrap();
        let text = tokenizer.token(other).unwrap();
        for token in [serde_json::json!(text), serde_json::json!({"content": text})] {
            let config = serde_json::json!({"eos_token": token}).to_string();
            std::fs::write(dir.path().join("tokenizer_config.json"), format!("\u{feff}{config}")).unwrap();
            assert!(ends().contains(&other) && ends().len() == before.len() + 1);
        }
    }

    #[test]
    fn existing_paths_precede_published_models() {
        let root = tempfile::tempdir().unwrap();
        let hub = Hub { caches: vec![root.path().join("hub")], folders: Vec::new(), remote: None };
        let snapshot = root.path().join("hub/models--org--name/snapshots/x");
        std::fs::create_dir_all(&snapshot).unwrap();
        for file in ["config.json", "model.safetensors", "model.gguf"] {
            std::fs::write(snapshot.join(file), b"").unwrap();
        }
        let locate = |name: &str| locate(Path::new(name), root.path().join(name), &hub);
        assert_eq!(locate("org/name").unwrap(), snapshot);
        assert_eq!(locate("org/name:model.gguf").unwrap(), snapshot.join("model.gguf"));
        for path in ["plain", "./org/name", "a/b/c", "models/other.gguf"] {
            assert_eq!(locate(path).unwrap(), root.path().join(path));
        }
        let hint = open(&root.path().join("plain"), false).err().unwrap().to_string();
        assert!(hint.contains("does not exist") && hint.contains("Qwen/Qwen2.5-0.5B-Instruct"), "{hint}");
        std::fs::create_dir_all(root.path().join("org/name")).unwrap();
        assert_eq!(locate("org/name").unwrap(), root.path().join("org/name"));
        let missing = locate("org/none").unwrap_err().chain();
        assert!(missing.contains("does not exist") && missing.contains("hf download org/none"), "{missing}");
    }
}
