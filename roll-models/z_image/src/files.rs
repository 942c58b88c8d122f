//! Finds and opens the files of a model: a published directory, or one file for each network.

use std::path::{Path, PathBuf};

use roll_causal_lm::LmConfig;
use roll_core::{BuildContext, Error, Result, ResultExt};
use roll_external::files;
use roll_network::hub::Hub;
use roll_network::weights::Checkpoint;
use serde::Deserialize;
use serde_json::json;

use crate::options::ZImageOptions;
use crate::text::read_config;
use crate::transformer_file::TransformerFile;
use crate::vae::VaeConfig;

/// Patterns of the files of a published model.
const NEEDED: &[&str] = &["transformer/*", "vae/*", "text_encoder/*", "tokenizer/*"];
const OPTIONAL: &[&str] = &["scheduler/*", "model_index.json"];

/// Shift of the schedule of Z-Image-Turbo, for models without a `scheduler_config.json`.
const TURBO_SHIFT: f64 = 3.0;
/// Base of the rotary frequencies of the published text encoder.
const TEXT_ROPE_THETA: f64 = 1e6;
/// Context length of the published text encoder.
const TEXT_CONTEXT: usize = 40_960;

/// The networks of a model and what belongs to them. No tensor has been read.
#[derive(Clone, Debug)]
pub struct ComponentFiles {
    /// The transformer.
    pub dit: TransformerFile,
    /// The autoencoder.
    pub vae: Checkpoint,
    /// Its sizes.
    pub vae_config: VaeConfig,
    /// The text encoder.
    pub text: Checkpoint,
    /// Its sizes.
    pub text_config: LmConfig,
    /// The file `tokenizer.json`.
    pub tokenizer: PathBuf,
    /// Shift of the noise levels.
    pub shift: f64,
}

impl ComponentFiles {
    /// Opens the files that `options` name.
    ///
    /// # Errors
    /// Fails if a network is not named, and if a file is missing or damaged; the error names the option.
    pub fn open(options: &ZImageOptions, context: &BuildContext, hub: &Hub) -> Result<Self> {
        let directory = options.model_path.as_deref().map(|name| locate(name, context, hub)).transpose()?;
        let find = |given: &Option<PathBuf>, key: &str, folder: &str| match (given, &directory) {
            (Some(path), _) => Ok(context.resolve(path)),
            (None, Some(directory)) => Ok(directory.join(folder)),
            (None, None) => Err(Error::config(
                format!("model.{key}"),
                "no weights are named: name the directory of a published model by `model.model_path`, or a file for each \
                 network; `roll init-tiny DIR --kind z_image` writes a small model to try things with",
            )),
        };
        let open = |given: &Option<PathBuf>, key: &str, folder: &str| {
            let path = find(given, key, folder)?;
            Checkpoint::open_any(&path).map_err(Error::from).while_doing(|| format!("`model.{key}`"))
        };
        let dit = open(&options.dit_path, "dit_path", "transformer")?;
        let vae = open(&options.vae_path, "vae_path", "vae")?;
        let text = open(&options.text_encoder_path, "text_encoder_path", "text_encoder")?;
        let tokenizer = match find(&options.tokenizer_path, "tokenizer_path", "tokenizer")? {
            directory if directory.is_dir() => directory.join("tokenizer.json"),
            file => file,
        };
        Ok(Self {
            dit: TransformerFile::new(dit)?,
            vae_config: vae_config(&vae)?,
            text_config: text_config(&text)?,
            shift: directory.as_deref().map_or(Ok(TURBO_SHIFT), shift)?,
            vae,
            text,
            tokenizer,
        })
    }
}

/// The directory of the model `name`: a path, or a published model.
fn locate(name: &Path, context: &BuildContext, hub: &Hub) -> Result<PathBuf> {
    let path = context.resolve(name);
    let text = name.to_string_lossy();
    let is_published =
        text.split('/').filter(|part| !part.is_empty()).count() == 2 && !text.starts_with(['.', '/', '~']);
    match (path.is_dir(), is_published) {
        (true, _) => Ok(path),
        (false, true) if !path.exists() => hub
            .directory(&text, NEEDED, OPTIONAL)
            .map_err(Error::from)
            .while_doing(|| format!("the path {} does not exist; looking for a published model", path.display())),
        _ => {
            let problem = format!(
                "expected a directory with `transformer`, `vae`, `text_encoder` and `tokenizer`, or a published model such \
                 as Tongyi-MAI/Z-Image-Turbo; found {}; single files are named by `model.dit_path`, `model.vae_path`, \
                 `model.text_encoder_path` and `model.tokenizer_path`",
                path.display()
            );
            Err(Error::config("model.model_path", problem))
        }
    }
}

/// The sizes in the `config.json` next to a VAE; without the file, those of the published VAE.
fn vae_config(vae: &Checkpoint) -> Result<VaeConfig> {
    let file = vae.path().with_file_name("config.json");
    if !file.exists() || vae.keys().any(|key| key.contains("decoder.mid.block_1")) {
        return Ok(VaeConfig::default());
    }
    let json = files::read_text(&file, files::MAX_TEXT).map_err(Error::file("read", &file))?;
    VaeConfig::parse(&json, &file)
}

/// The sizes in the `config.json` next to a text encoder; without the file, those of the weights, with the constants of
/// the published encoder.
fn text_config(text: &Checkpoint) -> Result<LmConfig> {
    let file = text.path().with_file_name("config.json");
    if file.exists() {
        return read_config(&file);
    }
    let shape = |key: &str| match text.info(key).map(|info| info.shape.as_slice()) {
        Some(shape) => Ok(shape.to_vec()),
        None => {
            let problem = format!("expected the weights of a Qwen3 text encoder, found no `{key}`");
            Err(Error::bad_file(text.path(), problem))
        }
    };
    let size = |key: &str, axis: usize| Ok::<_, Error>(shape(key)?.get(axis).copied().unwrap_or(0));
    let head_dim = size("model.layers.0.self_attn.q_norm.weight", 0)?.max(1);
    let layers = (0..).take_while(|i| text.contains(&format!("model.layers.{i}.self_attn.q_proj.weight"))).count();
    let config = json!({
        "model_type": "qwen3",
        "vocab_size": size("model.embed_tokens.weight", 0)?,
        "hidden_size": size("model.embed_tokens.weight", 1)?,
        "intermediate_size": size("model.layers.0.mlp.gate_proj.weight", 0)?,
        "num_hidden_layers": layers,
        "num_attention_heads": size("model.layers.0.self_attn.q_proj.weight", 0)? / head_dim,
        "num_key_value_heads": size("model.layers.0.self_attn.k_proj.weight", 0)? / head_dim,
        "head_dim": head_dim,
        "rope_theta": TEXT_ROPE_THETA,
        "max_position_embeddings": TEXT_CONTEXT,
        "tie_word_embeddings": true,
    });
    LmConfig::parse(config.to_string().as_bytes()).map_err(|problem| Error::bad_file(text.path(), problem))
}

/// The entries of a `scheduler_config.json` that are read.
#[derive(Deserialize)]
struct Scheduler {
    shift: Option<f64>,
}

/// The shift in the `scheduler/scheduler_config.json` of a model's directory; without the file, that of Turbo.
fn shift(directory: &Path) -> Result<f64> {
    let file = directory.join("scheduler/scheduler_config.json");
    if !file.exists() {
        tracing::warn!(
            "{} is missing: the shift of the noise levels is {TURBO_SHIFT}, that of Z-Image-Turbo (base: 6); `algo.shift` \
             sets another",
            file.display()
        );
        return Ok(TURBO_SHIFT);
    }
    let json = files::read_text(&file, files::MAX_TEXT).map_err(Error::file("read", &file))?;
    let scheduler: Scheduler = serde_json::from_str(&json).map_err(|e| Error::bad_file(&file, e.to_string()))?;
    match scheduler.shift.unwrap_or(TURBO_SHIFT) {
        shift if shift.is_finite() && shift > 0.0 => Ok(shift),
        shift => Err(Error::bad_file(&file, format!("`shift`: expected a number above 0, found {shift}"))),
    }
}
