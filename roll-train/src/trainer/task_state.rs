//! Where a checkpoint has the state of a task: JSON in the manifest, and tensors in a file. Each is left out if the
//! task has none.

use std::collections::BTreeMap;

use roll_core::{Result, StateDict};
use roll_weights::save_safetensors;

use crate::checkpoint::{Checkpoint, CheckpointWriter};
use crate::task::TaskState;

/// The file of the tensors.
const FILE: &str = "trainer/algorithm.safetensors";
/// The key of the JSON in the manifest's `info`.
const KEY: &str = "algorithm";

/// Writes the state. Its JSON is added to `info`, which becomes the part of the manifest that the trainer fills.
pub(super) fn write(state: TaskState, checkpoint: &mut CheckpointWriter, info: &mut serde_json::Value) -> Result<()> {
    if !state.json.is_null() {
        info[KEY] = state.json;
    }
    match state.tensors.is_empty() {
        true => Ok(()),
        false => checkpoint.add_file(FILE, |path| Ok(save_safetensors(path, &state.tensors, &BTreeMap::new())?)),
    }
}

/// Reads the state, which is empty if the task had none.
pub(super) fn read(from: &Checkpoint) -> Result<TaskState> {
    let json = from.manifest().info.get(KEY).cloned().unwrap_or_default();
    let (tensors, origin) = match from.manifest().files.contains_key(FILE) {
        true => {
            let file = from.file(FILE)?;
            (roll_weights::Checkpoint::open(&file)?.all()?, file)
        }
        false => (StateDict::new(), from.path().to_path_buf()),
    };
    Ok(TaskState { json, tensors, origin })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::Tensor;

    use super::*;

    fn written(state: TaskState) -> (tempfile::TempDir, Checkpoint) {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = CheckpointWriter::begin(dir.path(), 1).unwrap();
        let mut info = serde_json::json!({});
        write(state, &mut writer, &mut info).unwrap();
        (dir, writer.finish(info).unwrap())
    }

    #[test]
    fn a_state_is_read_bit_for_bit() {
        let tensor = |values: &[f32], shape: &[usize]| Tensor::new(values.to_vec(), shape).unwrap();
        let tensors: StateDict = [
            ("average".to_string(), tensor(&[f32::MIN_POSITIVE / 2.0, -0.0], &[2])),
            ("old".to_string(), tensor(&[1.0 / 3.0; 6], &[2, 3])),
        ]
        .into();
        let json = serde_json::json!({"kl": 0.1});
        let state = TaskState { json: json.clone(), tensors: tensors.clone(), ..TaskState::default() };
        let (_dir, checkpoint) = written(state);
        let found = read(&checkpoint).unwrap();
        let bytes = |state: &StateDict| state.values().map(|tensor| tensor.as_bytes().to_vec()).collect::<Vec<_>>();
        assert_eq!((found.json, bytes(&found.tensors)), (json, bytes(&tensors)));
        assert!(found.origin.ends_with(FILE) && found.tensors.keys().eq(tensors.keys()));
    }

    #[test]
    fn a_task_without_state_writes_nothing() {
        let (_dir, checkpoint) = written(TaskState::default());
        assert!(checkpoint.manifest().files.is_empty() && checkpoint.manifest().info.get(KEY).is_none());
        let found = read(&checkpoint).unwrap();
        assert!(found.json.is_null() && found.tensors.is_empty() && found.origin == checkpoint.path());
    }
}
