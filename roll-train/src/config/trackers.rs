//! The key `track_with`: where metrics go.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

/// The configuration key.
const KEY: &str = "track_with";
/// The end of the note on trackers without effect: which trackers have one.
const ALTERNATIVES: &str = "`tensorboard` and `jsonl` have, and `on_metrics` passes the metrics to a program";

/// Where metrics go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Tracker {
    /// TensorBoard's event files.
    Tensorboard,
    /// `metrics.jsonl`.
    Jsonl,
}

/// Trackers of Alibaba's ROLL, whose configurations are accepted, that do not exist here.
const ROLL_ONLY: [&str; 3] = ["wandb", "swanlab", "stdout"];

/// Makes the value of `track_with` a list: one name becomes a list of one. Trackers of [`ROLL_ONLY`] are removed, with
/// a note for the user. The default applies to `null`, and if no tracker is left.
pub(super) fn normalize(tree: &mut Json) -> Option<String> {
    let map = tree.as_object_mut()?;
    let value = map.get_mut(KEY)?;
    if value.is_string() {
        *value = Json::Array(vec![value.take()]);
    }
    let is_ignored = |name: &Json| name.as_str().is_some_and(|name| ROLL_ONLY.contains(&name));
    let (ignored, kept): (Vec<Json>, Vec<Json>) = match value {
        Json::Array(names) => names.drain(..).partition(is_ignored),
        Json::Null => Default::default(),
        // Deserialization reports the wrong type.
        _ => return None,
    };
    if kept.is_empty() && (value.is_null() || !ignored.is_empty()) {
        map.remove(KEY);
    } else {
        *value = Json::Array(kept);
    }
    let names: Vec<&str> = ignored.iter().filter_map(Json::as_str).collect();
    (!names.is_empty()).then(|| format!("`{KEY}`: {} has no effect here; {ALTERNATIVES}", names.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::super::ConfigLayers;
    use super::*;

    fn load(value: &str) -> Result<(Vec<Tracker>, Vec<String>), String> {
        let loaded = ConfigLayers::new().set_text(KEY, value, "--set").and_then(|layers| layers.load(None));
        loaded.map(|loaded| (loaded.config.track_with, loaded.notes)).map_err(|e| e.to_string())
    }

    #[test]
    fn accepts_a_name_a_list_or_null_and_notes_ignored_trackers() {
        use Tracker::{Jsonl, Tensorboard};
        assert_eq!(load("tensorboard").unwrap(), (vec![Tensorboard], vec![]));
        assert_eq!(load("[jsonl, tensorboard]").unwrap(), (vec![Jsonl, Tensorboard], vec![]));
        assert_eq!(load("[]").unwrap(), (vec![], vec![]));
        assert_eq!(load("null").unwrap(), (vec![Tensorboard, Jsonl], vec![]));
        let (trackers, notes) = load("wandb").unwrap();
        assert!(trackers == [Tensorboard, Jsonl] && notes.len() == 1 && notes[0].contains("wandb"), "{notes:?}");
        let (trackers, notes) = load("[swanlab, jsonl]").unwrap();
        assert!(trackers == [Jsonl] && notes[0].contains("swanlab"), "{notes:?}");
        assert!(load("mlflow").unwrap_err().contains("`track_with"));
        assert!(load("3").unwrap_err().contains("`track_with"));
    }
}
