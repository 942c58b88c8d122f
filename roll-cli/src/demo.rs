//! The runs that are made when nothing is named: the small world in `demo/assets`, and the small agent that is built
//! in.

use std::path::{Path, PathBuf};

use roll_backends::Backend;
use roll_core::{Error, Result};
use roll_train::config::{ConfigLayers, MergedConfig};
use serde_json::json;

/// The configuration; `DEMO` is replaced with the directory of the demo's files.
const CONFIG: &str = include_str!("demo.yaml");
/// Its part for each algorithm that trains on a reward of videos.
const ALGORITHMS: [(&str, &str); 3] = [
    ("reward_fl", include_str!("demo_reward_fl.yaml")),
    ("diffusion_nft", include_str!("demo_diffusion_nft.yaml")),
    ("flow_grpo", include_str!("demo_flow_grpo.yaml")),
];
/// Its reward, in a file of its own: options of one reward are unknown to another.
const REWARD: &str = include_str!("demo_reward.yaml");
/// Names that directory.
const VARIABLE: &str = "ROLL_DEMO";

roll_core::inventory::submit! { roll_core::Variable(VARIABLE) }
/// The file without which there is no demo.
const MARK: &str = "wan22_paths.json";

/// Flow matching on its clips.
const CLIPS: &str = include_str!("demo_flow_matching.yaml");
/// Supervised training on its conversations.
const CONVERSATIONS: &str = include_str!("demo_sft.yaml");

/// The agent's configuration, and that of its environment.
const AGENT: &str = include_str!("demo_agent.yaml");
const AGENT_ENVIRONMENT: &str = include_str!("demo_agent_env.yaml");

/// On a GPU, one rank has the samples of the four: the demo has trained on one so, and never with several threads.
const GPU: &str = "ranks: 1\ntraining:\n  per_device_train_batch_size: 4\n";
/// The same where samples are not counted by rank.
const GPU_TEXT: &str = "ranks: 1\n";

/// Keys that name the files of a video model, and the clips that it is trained on.
const WAN_FILES: [&str; 2] = ["model.model_paths", "model.model_id_with_origin_paths"];
const WAN_CLIPS: &str = "data.metadata";

/// The lowest layer of a configuration that is of a demo's kind and names neither model nor data of its own; `None`
/// for others.
pub fn layers(own: &MergedConfig) -> Result<Option<ConfigLayers>> {
    let is = |key: &str, name: &str| own.peek(key).is_some_and(|value| value == name);
    // Whether the model is this one, and none of the keys that name files is set.
    let lacks =
        |model: &str, files: &[&str]| is("model.name", model) && files.iter().all(|key| own.peek(key).is_none());
    let algorithm = own.peek("algo.name").and_then(|name| name.as_str()).unwrap_or_default();
    let lacks_video = lacks(VIDEO.1, &[WAN_FILES[0], WAN_FILES[1], WAN_CLIPS]);
    let (layers, on_gpu) = match (algorithm, ALGORITHMS.iter().find(|(name, _)| *name == algorithm)) {
        (_, Some((_, config))) if lacks_video => (faces(own, config)?, GPU),
        ("flow_matching", _) if lacks_video => (clips()?, GPU),
        ("sft", _) if lacks(TEXT.1, &["model.model_path", "algo.data"]) => (conversations()?, GPU_TEXT),
        ("agentic_ppo", _) if lacks(TEXT.1, &["model.model_path"]) => (agent(own)?, GPU_TEXT),
        _ => return Ok(None),
    };
    on_one_gpu(own, layers, on_gpu).map(Some)
}

/// Adds `on_gpu` on top if the backend is a GPU.
fn on_one_gpu(own: &MergedConfig, layers: ConfigLayers, on_gpu: &str) -> Result<ConfigLayers> {
    let backend = own.peek("backend").and_then(|name| name.as_str()?.split(':').next());
    match backend.is_some_and(Backend::is_numbered_name) {
        true => Ok(ConfigLayers::new().text("the demo on a GPU", on_gpu)?.over(layers)),
        false => Ok(layers),
    }
}

/// Algorithms that train video models, and those that train language models; the built-in model of each kind.
const VIDEO: (&[&str], &str) = (&["reward_fl", "diffusion_nft", "flow_grpo", "flow_matching"], "wan2_2");
const TEXT: (&[&str], &str) = (&["agentic_ppo", "sft"], "causal_lm");

/// Why a configuration is not that of the demo although it lacks something that only the demo would bring.
#[derive(Clone, Debug)]
pub enum NotDemo {
    /// The algorithm does not train the model.
    WrongModel(String),
    /// It names clips and no model, or a model and no clips.
    MissingPart(String),
}

/// `None` where a configuration names both model and clips, or neither.
pub fn why_not_demo(own: &MergedConfig) -> Option<NotDemo> {
    wrong_model(own).map(NotDemo::WrongModel).or_else(|| missing_part(own).map(NotDemo::MissingPart))
}

/// The reason, if the algorithm trains models of one kind and the model is the built-in one of the other kind.
fn wrong_model(own: &MergedConfig) -> Option<String> {
    let name = |key: &str| own.peek(key).and_then(|value| value.as_str());
    let (algorithm, model) = (name("algo.name")?, name("model.name")?);
    match (VIDEO.0.contains(&algorithm), TEXT.0.contains(&algorithm)) {
        (true, _) if model == TEXT.1 => Some(format!(
            "`{algorithm}` trains video models, and `{model}` is a language model: add `--model {}`, or choose another \
             algorithm ({})",
            VIDEO.1,
            TEXT.0.join(", ")
        )),
        (_, true) if model == VIDEO.1 => Some(format!(
            "`{algorithm}` trains language models, and `{model}` (the default) is a video model: add `--model {}`",
            TEXT.1
        )),
        _ => None,
    }
}

fn missing_part(own: &MergedConfig) -> Option<String> {
    let is = |key: &str, names: &[&str]| own.peek(key).and_then(|v| v.as_str()).is_some_and(|v| names.contains(&v));
    if !(is("algo.name", VIDEO.0) && is("model.name", &[VIDEO.1])) {
        return None;
    }
    // Flow matching has none, and one that is named is used.
    let scores = !is("algo.name", &["flow_matching"]) && own.peek("reward").is_none_or(|rewards| *rewards == json!([]));
    let (also, too) = if scores { (" and reward", ", `reward`") } else { ("", "") };
    let files = WAN_FILES.into_iter().find(|key| own.peek(key).is_some());
    let (named, unused, needed) = match (files, own.peek(WAN_CLIPS)) {
        (None, Some(_)) => (WAN_CLIPS, "model", WAN_FILES[0]),
        (Some(key), None) => (key, "clips", WAN_CLIPS),
        _ => return None,
    };
    Some(format!(
        "`{named}` is set, so this is not the demo, whose {unused}{also} are not used: name yours (`{needed}`{too})"
    ))
}

/// The agent: its environment only where no other one is named.
fn agent(own: &MergedConfig) -> Result<ConfigLayers> {
    tracing::info!("no model is named: this is the demo, with the built-in small language model");
    let layers = ConfigLayers::new().text("the demo", AGENT)?;
    match own.peek("env.name").is_none_or(|name| name == "frozen_lake") {
        true => layers.text("the demo", AGENT_ENVIRONMENT),
        false => Ok(layers),
    }
}

/// The small world's clips, trained on without a reward.
fn clips() -> Result<ConfigLayers> {
    let directory = directory()?;
    tracing::info!("no model and no data are named: this is the demo in {}", directory.display());
    text_in("the demo", CLIPS, &directory)
}

/// Conversations of the agent's environment.
fn conversations() -> Result<ConfigLayers> {
    let directory = directory()?;
    tracing::info!(
        "no model and no data are named: this is the demo, with the built-in small language model, on {}",
        directory.join("conversations.jsonl").display()
    );
    text_in("the demo", CONVERSATIONS, &directory)
}

/// A configuration of files in the demo's directory.
fn text_in(name: &str, config: &str, directory: &Path) -> Result<ConfigLayers> {
    let quoted = serde_json::Value::from(directory.to_string_lossy()).to_string();
    ConfigLayers::new().text(name, &config.replace("DEMO", quoted.trim_matches('"')))
}

/// Defaults of the built-in demo. Its reward's options are used only if the user names no other reward.
fn faces(own: &MergedConfig, algorithm: &str) -> Result<ConfigLayers> {
    let directory = directory()?;
    tracing::info!("no model and no data are named: this is the demo in {}", directory.display());
    let layers = text_in("the demo", CONFIG, &directory)?;
    let layers = text_in("the demo", algorithm, &directory)?.over(layers);
    match names_another_reward(own) {
        true => Ok(layers),
        false => Ok(text_in("the demo's reward", REWARD, &directory)?.over(layers)),
    }
}

fn names_another_reward(own: &MergedConfig) -> bool {
    let first = own.peek("reward").and_then(|rewards| rewards.get(0)?.get("name"));
    first.is_some_and(|name| name != "insightface")
}

/// `$ROLL_DEMO`, the demo installed next to the program, or the checkout that it was built from.
fn directory() -> Result<PathBuf> {
    let installed = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("../share/roll/demo")));
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let checkout = manifest.parent().unwrap_or(manifest).join("demo/assets");
    let candidates = match std::env::var_os(VARIABLE) {
        Some(own) => vec![PathBuf::from(own)],
        None => installed.into_iter().chain([checkout]).collect(),
    };
    let found = candidates.iter().find(|c| c.join(MARK).is_file());
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
