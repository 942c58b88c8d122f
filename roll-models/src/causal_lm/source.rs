//! Where a model comes from: a Hugging Face directory, a GGUF file, or the program itself.

use std::path::Path;

use roll_core::{Error, Result, StateDict};

use super::chat::ChatTemplate;
use super::config::LmConfig;
use super::gguf;
use super::tokenizer::Tokenizer;
use crate::weights::{Checkpoint, parse_safetensors};

/// What a model is put together from.
pub struct Parts {
    /// Shape of the network.
    pub config: LmConfig,
    /// Weights under the names of Hugging Face.
    pub state: StateDict,
    /// Text to ids, where there is one.
    pub tokenizer: Option<Tokenizer>,
    /// How conversations are written, where it is told.
    pub template: Option<ChatTemplate>,
    /// Where all this was found, for messages.
    pub place: String,
}

/// The model at `path`: a directory, or a GGUF file.
pub fn open(path: &Path) -> Result<Parts> {
    let gguf = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    match (path.is_file(), gguf) {
        (_, true) => gguf::open(path),
        (true, false) => {
            let problem =
                "expected the directory of a model (config.json, tokenizer.json, safetensors) or a .gguf file";
            Err(Error::bad_file(path, problem))
        }
        (false, false) => directory(path),
    }
}

fn directory(directory: &Path) -> Result<Parts> {
    let config = LmConfig::read(&directory.join("config.json"))?;
    let tokenizer = directory.join("tokenizer.json");
    Ok(Parts {
        config,
        state: open_weights(directory)?.all()?,
        tokenizer: tokenizer.exists().then(|| Tokenizer::load(&tokenizer)).transpose()?,
        template: ChatTemplate::load(directory)?,
        place: directory.display().to_string(),
    })
}

/// The weights of a directory: an index of shards, else one file, else all safetensors that are there.
fn open_weights(directory: &Path) -> Result<Checkpoint> {
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

/// The small model for FrozenLake; `examples/demo_agent` makes it.
pub fn built_in() -> Result<Parts> {
    const CONFIG: &[u8] = include_bytes!("../../assets/demo_agent/config.json");
    const TOKENIZER: &[u8] = include_bytes!("../../assets/demo_agent/tokenizer.json");
    const TEMPLATE: &str = include_str!("../../assets/demo_agent/chat_template.jinja");
    const WEIGHTS: &[u8] = include_bytes!("../../assets/demo_agent/model.safetensors");
    let place = "the model that is built in";
    let broken = |problem: String| Error::bad_file(place, problem);
    Ok(Parts {
        config: LmConfig::parse(CONFIG).map_err(broken)?,
        state: parse_safetensors(place, WEIGHTS)?,
        tokenizer: Some(Tokenizer::parse(TOKENIZER).map_err(broken)?),
        template: Some(ChatTemplate::new(TEMPLATE.into(), String::new(), String::new()).map_err(broken)?),
        place: place.into(),
    })
}
