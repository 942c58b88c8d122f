//! The run that is made when nothing is named: the small world in `assets/demo`.

use std::path::{Path, PathBuf};

use roll_core::config::{ConfigLayers, Loaded};
use roll_core::{Error, Result};

/// The configuration; `DEMO` stands for the directory of the demo's files.
const CONFIG: &str = include_str!("demo.yaml");
/// Its reward, apart: the options of one reward are none of another's.
const REWARD: &str = include_str!("demo_reward.yaml");
/// Names that directory.
const VARIABLE: &str = "ROLL_DEMO";
/// The file without which there is no demo.
const MARK: &str = "wan22_paths.json";

/// Whether the configuration is of the demo's kind and names neither model nor data of its own.
pub fn is_wanted(loaded: &Loaded) -> bool {
    let named = ["model.model_paths", "model.model_id_with_origin_paths", "data.metadata"];
    loaded.config.algo.name == "reward_fl"
        && loaded.config.model.name == "wan2_2"
        && !named.iter().any(|key| loaded.provenance.is_set(key))
}

/// The demo's configuration as the lowest layer, for a run that names what `loaded` does.
pub fn layers(loaded: &Loaded) -> Result<ConfigLayers> {
    let directory = directory()?;
    let quoted = serde_json::Value::from(directory.to_string_lossy()).to_string();
    let text = |config: &str| config.replace("DEMO", quoted.trim_matches('"'));
    tracing::info!("no model and no data are named: this is the demo in {}", directory.display());
    let layers = ConfigLayers::new().text("the demo", &text(CONFIG))?;
    match loaded.config.reward.iter().any(|reward| reward.name != "insightface") {
        true => Ok(layers),
        false => layers.text("the demo's reward", &text(REWARD)),
    }
}

/// `$ROLL_DEMO`, what is installed beside the program, or the checkout that it was built from.
fn directory() -> Result<PathBuf> {
    let installed = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("../share/roll/demo")));
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/demo");
    let candidates = match std::env::var_os(VARIABLE) {
        Some(own) => vec![PathBuf::from(own)],
        None => installed.into_iter().chain([checkout]).collect(),
    };
    let found = candidates.iter().find(|c| c.join(MARK).is_file());
    found.map(|dir| dir.canonicalize().unwrap_or_else(|_| dir.clone())).ok_or_else(|| {
        let last = candidates.last().map(|c| c.display().to_string()).unwrap_or_default();
        Error::Unsupported(format!(
            "no model and no data are named, and the demo's files are not there ({last}): `git checkout assets/demo` \
             brings them back, `cargo run --release -p demo-world -- all` makes them anew; or name your own with \
             `model.model_paths` and `data.metadata` (see `roll config`)"
        ))
    })
}
