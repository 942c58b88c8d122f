//! The demos: runs of a configuration that names neither a model nor data.
//!
//! The video demo trains on the small world in `demo/assets`, the picture demo trains the small Z-Image there, and the
//! language demo trains the small model that is built in. [`layers`] returns a demo's configuration as the lowest layer,
//! below that of the user.

use std::path::{Path, PathBuf};

use roll_backends::Backend;
use roll_core::{Error, Result};
use roll_train::config::{ConfigLayers, MergedConfig};
use serde_json::json;

/// The configuration of the video demo. In this and the other texts, `DEMO` is replaced with the directory of the
/// demo's files.
const VIDEO_CONFIG: &str = include_str!("demo.yaml");
/// The part of the video demo for each algorithm that trains on a reward.
const ALGORITHM_CONFIGS: [(&str, &str); 3] = [
    ("reward_fl", include_str!("demo_reward_fl.yaml")),
    ("diffusion_nft", include_str!("demo_diffusion_nft.yaml")),
    ("flow_grpo", include_str!("demo_flow_grpo.yaml")),
];
/// The reward of the video demo. It is left out if the user names another reward, which would not know its options.
const REWARD_CONFIG: &str = include_str!("demo_reward.yaml");
/// The environment variable that names the directory of the demo's files.
const VARIABLE: &str = "ROLL_DEMO";

roll_core::inventory::submit! { roll_core::Variable(VARIABLE) }
/// The file by which the directory of the demo's files is recognized.
const MARKER_FILE: &str = "wan22_paths.json";

/// The configuration of the picture demo.
const PICTURE_CONFIG: &str = include_str!("demo_picture.yaml");
/// The configuration of flow matching on the demo's clips.
const CLIPS_CONFIG: &str = include_str!("demo_flow_matching.yaml");
/// The configuration of supervised fine-tuning on the demo's conversations.
const CONVERSATIONS_CONFIG: &str = include_str!("demo_sft.yaml");
/// The configuration of DPO on the demo's preferences.
const PREFERENCES_CONFIG: &str = include_str!("demo_dpo.yaml");

/// The configuration of the agent.
const AGENT_CONFIG: &str = include_str!("demo_agent.yaml");
/// The configuration of the agent's environment.
const ENVIRONMENT_CONFIG: &str = include_str!("demo_agent_env.yaml");

/// Added to the video demo on a GPU: one rank with the samples of the CPU's four ranks. The demo was trained in this
/// way on a GPU, and never with several threads there.
const VIDEO_ON_GPU: &str = "ranks: 1\ntraining:\n  per_device_train_batch_size: 4\n";
/// Added to the picture demo on a GPU, with the samples of the CPU's four ranks.
const PICTURE_ON_GPU: &str = "ranks: 1\ntraining:\n  per_device_train_batch_size: 16\n";
/// Added to the language demo on a GPU. The samples of that demo are not counted by rank.
const LANGUAGE_ON_GPU: &str = "ranks: 1\n";

/// Keys that name the files of a video model.
const WAN_FILES: [&str; 2] = ["model.model_paths", "model.model_id_with_origin_paths"];
/// The key that names the clips on which a video model is trained.
const WAN_CLIPS: &str = "data.metadata";

/// The model of the picture demo.
const PICTURE_MODEL: &str = "z_image";
/// Keys that name files of such a model, or prompts.
const PICTURE_FILES: [&str; 3] = ["model.model_path", "model.dit_path", WAN_CLIPS];

/// The demo that the user's configuration asks for; `None` if it names a model or data, or an algorithm without a demo.
pub fn layers(user: &MergedConfig) -> Result<Option<ConfigLayers>> {
    // Whether the model is this one, and none of the keys that name its files and data is set.
    let names_model_alone = |model: &str, keys: &[&str]| {
        let is_model = user.peek("model.name").is_some_and(|name| name == model);
        is_model && keys.iter().all(|key| user.peek(key).is_none())
    };
    let algorithm = user.peek("algo.name").and_then(|name| name.as_str()).unwrap_or_default();
    let is_video_demo = names_model_alone(VIDEO.model, &[WAN_FILES[0], WAN_FILES[1], WAN_CLIPS]);
    let (layers, on_gpu) = match (algorithm, ALGORITHM_CONFIGS.iter().find(|(name, _)| *name == algorithm)) {
        (_, Some((_, config))) if is_video_demo => (faces(user, config)?, VIDEO_ON_GPU),
        ("flow_matching", _) if is_video_demo => (clips()?, VIDEO_ON_GPU),
        ("reward_fl", _) if names_model_alone(PICTURE_MODEL, &PICTURE_FILES) && names_no_reward(user) => {
            (portraits()?, PICTURE_ON_GPU)
        }
        ("sft", _) if names_model_alone(LANGUAGE.model, &["model.model_path", "algo.data"]) => {
            (texts(CONVERSATIONS_CONFIG, "conversations.jsonl")?, LANGUAGE_ON_GPU)
        }
        ("dpo", _) if names_model_alone(LANGUAGE.model, &["model.model_path", "algo.data"]) => {
            (texts(PREFERENCES_CONFIG, "preferences.jsonl")?, LANGUAGE_ON_GPU)
        }
        ("agentic_ppo", _) if names_model_alone(LANGUAGE.model, &["model.model_path"]) => {
            (agent(user)?, LANGUAGE_ON_GPU)
        }
        _ => return Ok(None),
    };
    on_one_gpu(user, layers, on_gpu).map(Some)
}

/// Adds the text `on_gpu` above the demo's layers if the backend is a GPU.
fn on_one_gpu(user: &MergedConfig, layers: ConfigLayers, on_gpu: &str) -> Result<ConfigLayers> {
    let backend = user.peek("backend").and_then(|name| name.as_str()?.split(':').next());
    match backend.is_some_and(Backend::is_numbered_name) {
        true => Ok(ConfigLayers::new().text("the demo on a GPU", on_gpu)?.over(layers)),
        false => Ok(layers),
    }
}

/// Models of one kind.
struct ModelKind {
    /// The algorithms that train such models.
    algorithms: &'static [&'static str],
    /// The built-in model of this kind.
    model: &'static str,
}

const VIDEO: ModelKind =
    ModelKind { algorithms: &["reward_fl", "diffusion_nft", "flow_grpo", "flow_matching"], model: "wan2_2" };
const LANGUAGE: ModelKind = ModelKind { algorithms: &["agentic_ppo", "sft", "dpo"], model: "causal_lm" };

/// Why a configuration does not ask for a demo although it lacks something that only a demo would bring. The variants
/// hold the reason in words.
#[derive(Clone, Debug)]
pub enum NotDemo {
    /// The algorithm does not train the model.
    WrongModel(String),
    /// The configuration names clips and no model, or a model and no clips.
    MissingPart(String),
}

/// The reason, if the configuration names a model of the wrong kind, or only one of model and clips.
pub fn why_not_demo(user: &MergedConfig) -> Option<NotDemo> {
    wrong_model(user).map(NotDemo::WrongModel).or_else(|| missing_part(user).map(NotDemo::MissingPart))
}

/// The reason, if the algorithm trains models of one kind and the model is the built-in one of the other kind.
fn wrong_model(user: &MergedConfig) -> Option<String> {
    let name = |key: &str| user.peek(key).and_then(|value| value.as_str());
    let (algorithm, model) = (name("algo.name")?, name("model.name")?);
    match (VIDEO.algorithms.contains(&algorithm), LANGUAGE.algorithms.contains(&algorithm)) {
        (true, _) if model == LANGUAGE.model => Some(format!(
            "`{algorithm}` trains video models, and `{model}` is a language model: add `--model {}`, or choose another \
             algorithm ({})",
            VIDEO.model,
            LANGUAGE.algorithms.join(", ")
        )),
        (_, true) if model == VIDEO.model => Some(format!(
            "`{algorithm}` trains language models, and `{model}` (the default) is a video model: add `--model {}`",
            LANGUAGE.model
        )),
        _ => None,
    }
}

/// The reason, if a video model is named without clips, or clips without a model.
fn missing_part(user: &MergedConfig) -> Option<String> {
    let is_one_of = |key: &str, names: &[&str]| {
        let value = user.peek(key).and_then(|value| value.as_str());
        value.is_some_and(|value| names.contains(&value))
    };
    if !(is_one_of("algo.name", VIDEO.algorithms) && is_one_of("model.name", &[VIDEO.model])) {
        return None;
    }
    // The reward is missing, too, unless one is named or the algorithm uses none.
    let needs_reward = !is_one_of("algo.name", &["flow_matching"]) && names_no_reward(user);
    let (and_reward, reward_key) = if needs_reward { (" and reward", ", `reward`") } else { ("", "") };
    let files = WAN_FILES.into_iter().find(|key| user.peek(key).is_some());
    let (named, unused, needed) = match (files, user.peek(WAN_CLIPS)) {
        (None, Some(_)) => (WAN_CLIPS, "model", WAN_FILES[0]),
        (Some(key), None) => (key, "clips", WAN_CLIPS),
        _ => return None,
    };
    Some(format!(
        "`{named}` is set, so this is not the demo, whose {unused}{and_reward} are not used: name yours \
         (`{needed}`{reward_key})"
    ))
}

/// The demo of an agent. Its environment is left out if the user names another one.
fn agent(user: &MergedConfig) -> Result<ConfigLayers> {
    tracing::info!("no model is named: this is the demo, with the built-in small language model");
    let layers = ConfigLayers::new().text("the demo", AGENT_CONFIG)?;
    match user.peek("env.name").is_none_or(|name| name == "frozen_lake") {
        true => layers.text("the demo", ENVIRONMENT_CONFIG),
        false => Ok(layers),
    }
}

/// The demo of flow matching, on the small world's clips and without a reward.
fn clips() -> Result<ConfigLayers> {
    let directory = directory()?;
    tracing::info!("no model and no data are named: this is the demo in {}", directory.display());
    text_in("the demo", CLIPS_CONFIG, &directory)
}

/// The picture demo, in which portraits learn to follow their prompts.
fn portraits() -> Result<ConfigLayers> {
    let directory = directory()?;
    tracing::info!("no model files and no prompts are named: this is the picture demo in {}", directory.display());
    text_in("the demo", PICTURE_CONFIG, &directory)
}

/// The demo of an algorithm on texts from the agent's environment: its configuration, and the name of the file with the
/// texts.
fn texts(config: &str, file: &str) -> Result<ConfigLayers> {
    let directory = directory()?;
    tracing::info!(
        "no model and no data are named: this is the demo, with the built-in small language model, on {}",
        directory.join(file).display()
    );
    text_in("the demo", config, &directory)
}

/// A configuration in whose text `DEMO` means `directory`. `name` is its origin in messages.
fn text_in(name: &str, config: &str, directory: &Path) -> Result<ConfigLayers> {
    let quoted = serde_json::Value::from(directory.to_string_lossy()).to_string();
    ConfigLayers::new().text(name, &config.replace("DEMO", quoted.trim_matches('"')))
}

/// The demo of an algorithm that trains on the similarity of faces; `algorithm` is its text in [`ALGORITHM_CONFIGS`].
fn faces(user: &MergedConfig, algorithm: &str) -> Result<ConfigLayers> {
    let directory = directory()?;
    tracing::info!("no model and no data are named: this is the demo in {}", directory.display());
    let layers = text_in("the demo", VIDEO_CONFIG, &directory)?;
    let layers = text_in("the demo", algorithm, &directory)?.over(layers);
    match names_another_reward(user) {
        true => Ok(layers),
        false => Ok(text_in("the demo's reward", REWARD_CONFIG, &directory)?.over(layers)),
    }
}

/// Whether the user names no reward.
fn names_no_reward(user: &MergedConfig) -> bool {
    user.peek("reward").is_none_or(|rewards| *rewards == json!([]))
}

/// Whether the user names a reward that is not the demo's.
fn names_another_reward(user: &MergedConfig) -> bool {
    let first = user.peek("reward").and_then(|rewards| rewards.get(0)?.get("name"));
    first.is_some_and(|name| name != "insightface")
}

/// `$ROLL_DEMO`, the demo installed next to the program, or the checkout that it was built from.
fn directory() -> Result<PathBuf> {
    let installed = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("../share/roll/demo")));
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let checkout = manifest.parent().unwrap_or(manifest).join("demo/assets");
    let candidates = match std::env::var_os(VARIABLE) {
        Some(given) => vec![PathBuf::from(given)],
        None => installed.into_iter().chain([checkout]).collect(),
    };
    let found = candidates.iter().find(|c| c.join(MARKER_FILE).is_file());
    found.map(|dir| dir.canonicalize().unwrap_or_else(|_| dir.clone())).ok_or_else(|| {
        let last = candidates.last().map(|c| c.display().to_string()).unwrap_or_default();
        Error::Unsupported(format!(
            "no model and no data are named, and the demo's files are not in {last}. If the checkout was moved or \
             `roll` was built elsewhere, name the directory: {VARIABLE}=path/to/demo/assets. If files were deleted, \
             `git checkout demo/assets` brings them back. Or name a model and data of your own: `model.model_paths` \
             and `data.metadata`"
        ))
    })
}
