//! The key `track_with`: where metrics go.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

const KEY: &str = "track_with";

/// Where metrics go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Tracker {
    /// TensorBoard's event files.
    Tensorboard,
    /// `metrics.jsonl`.
    Jsonl,
}

/// Other values that ROLL takes.
const WITHOUT_EFFECT: [&str; 3] = ["wandb", "swanlab", "stdout"];

/// Turns one name into a list of one and `null` into the default, and removes ROLL's trackers that do not exist here;
/// if none is left, the default applies. Returns the note for the user.
pub(super) fn normalize(tree: &mut Json) -> Option<String> {
    let map = tree.as_object_mut()?;
    let value = map.get_mut(KEY)?;
    if value.is_string() {
        *value = Json::Array(vec![value.take()]);
    }
    let without = |name: &Json| name.as_str().is_some_and(|name| WITHOUT_EFFECT.contains(&name));
    let (unknown, known): (Vec<Json>, Vec<Json>) = match value {
        Json::Array(names) => names.drain(..).partition(without),
        Json::Null => Default::default(),
        _ => return None, // the check of its type reports it
    };
    if known.is_empty() && (value.is_null() || !unknown.is_empty()) {
        map.remove(KEY);
    } else {
        *value = Json::Array(known);
    }
    let names: Vec<&str> = unknown.iter().filter_map(Json::as_str).collect();
    (!names.is_empty()).then(|| {
        format!("`{KEY}`: {} has no effect here; metrics go to tensorboard and to metrics.jsonl", names.join(", "))
    })
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
    fn takes_a_name_or_a_list_and_notes_other_trackers_of_roll() {
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
