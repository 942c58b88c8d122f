//! The tensors of an algorithm in a checkpoint, such as an older policy.

use std::collections::BTreeMap;

use roll_core::{Algorithm, Error, Result, StateDict, Tensor};
use roll_weights::save_safetensors;

use crate::checkpoint::{Checkpoint, CheckpointWriter};

/// The tensors of [`Algorithm::tensors`]; there when the algorithm has some.
const ALGORITHM_FILE: &str = "trainer/algorithm.safetensors";

pub(super) fn write(algorithm: &dyn Algorithm, checkpoint: &mut CheckpointWriter) -> Result<()> {
    let tensors = algorithm.tensors()?;
    match tensors.is_empty() {
        true => Ok(()),
        false => checkpoint.with(ALGORITHM_FILE, |path| Ok(save_safetensors(path, &tensors, &BTreeMap::new())?)),
    }
}

/// Returns the tensors of a checkpoint to `algorithm`. Fails, and loads none, if they are not the tensors that it
/// keeps.
pub(super) fn restore(algorithm: &mut dyn Algorithm, from: &Checkpoint) -> Result<()> {
    let expected = algorithm.tensors()?;
    let (at, saved) = match from.manifest().files.contains_key(ALGORITHM_FILE) {
        true => {
            let at = from.file(ALGORITHM_FILE)?;
            let saved = roll_weights::Checkpoint::open(&at)?.all()?;
            (at, saved)
        }
        false => (from.path().to_path_buf(), StateDict::new()),
    };
    compare(&expected, &saved).map_err(|problem| Error::bad_file(at, problem))?;
    match saved.is_empty() {
        true => Ok(()),
        false => algorithm.load_tensors(&saved),
    }
}

/// The first difference between names, shapes and dtypes, in words.
fn compare(expected: &StateDict, saved: &StateDict) -> std::result::Result<(), String> {
    const REMEDY: &str = "go on with the algorithm, the options and the model that it was written with";
    for (name, tensor) in expected {
        let Some(found) = saved.get(name) else {
            return Err(format!("the algorithm's tensor `{name}` is not in the checkpoint: {REMEDY}"));
        };
        let form = |of: &Tensor| (of.shape().to_vec(), of.dtype());
        if form(found) != form(tensor) {
            let ((shape, dtype), (has, of)) = (form(tensor), form(found));
            return Err(format!(
                "the algorithm's tensor `{name}`: expected {dtype:?} of shape {shape:?}, found {of:?} of shape \
                 {has:?}; {REMEDY}"
            ));
        }
    }
    match saved.keys().find(|name| !expected.contains_key(*name)) {
        Some(name) => {
            Err(format!("the checkpoint has the tensor `{name}`, which the algorithm does not keep: {REMEDY}"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use roll_core::{Model, RewardScorer, StepContext, StepReport};

    use super::*;

    /// An algorithm with these tensors.
    #[derive(Clone)]
    struct WithTensors(StateDict);

    impl Algorithm for WithTensors {
        fn check(&mut self, _: &mut dyn Model, _: Option<&dyn RewardScorer>) -> Result<()> {
            Ok(())
        }
        fn step(&mut self, _: &mut StepContext<'_>) -> Result<StepReport> {
            Ok(StepReport::default())
        }
        fn tensors(&self) -> Result<StateDict> {
            Ok(self.0.clone())
        }
        fn load_tensors(&mut self, tensors: &StateDict) -> Result<()> {
            self.0 = tensors.clone();
            Ok(())
        }
    }

    fn with_tensors(tensors: &[(&str, &[f32], &[usize])]) -> WithTensors {
        let tensor = |(name, values, shape): &(&str, &[f32], &[usize])| {
            (name.to_string(), Tensor::new(values.to_vec(), *shape).unwrap())
        };
        WithTensors(tensors.iter().map(tensor).collect())
    }

    fn values(of: &WithTensors) -> Vec<Vec<f32>> {
        of.0.values().map(Tensor::to_f32_vec).collect()
    }

    /// As the trainer writes them.
    fn saved(of: &WithTensors) -> (tempfile::TempDir, Checkpoint) {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = CheckpointWriter::begin(dir.path(), 1).unwrap();
        write(of, &mut writer).unwrap();
        let checkpoint = writer.finish(serde_json::Value::Null).unwrap();
        (dir, checkpoint)
    }

    #[test]
    fn tensors_are_restored_bit_for_bit() {
        let before =
            with_tensors(&[("average", &[f32::MIN_POSITIVE / 2.0, -0.0], &[2]), ("old", &[1.0 / 3.0; 6], &[2, 3])]);
        let (_dir, checkpoint) = saved(&before);
        let mut after = with_tensors(&[("average", &[7.0; 2], &[2]), ("old", &[7.0; 6], &[2, 3])]);
        restore(&mut after, &checkpoint).unwrap();
        let bits = |of: &WithTensors| values(of).concat().into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(&after), bits(&before));
    }

    #[test]
    fn an_algorithm_without_tensors_writes_no_file() {
        let (_dir, checkpoint) = saved(&with_tensors(&[]));
        assert!(checkpoint.manifest().files.is_empty());
        restore(&mut with_tensors(&[]), &checkpoint).unwrap();
    }

    #[test]
    fn rejects_missing_unexpected_and_misshapen_tensors() {
        let (_dir, checkpoint) = saved(&with_tensors(&[("old", &[1.0; 6], &[2, 3])]));
        let (_empty, none) = saved(&with_tensors(&[]));
        let other = WithTensors([("old".to_string(), Tensor::new(vec![0i64; 6], [2, 3]).unwrap())].into());
        for (mut algorithm, from, parts) in [
            (
                with_tensors(&[("old", &[7.0; 6], &[3, 2])]),
                &checkpoint,
                ["`old`: expected F32 of shape [3, 2]", "[2, 3]"],
            ),
            (other, &checkpoint, ["expected I64 of shape [2, 3]", "found F32"]),
            (
                with_tensors(&[("new", &[7.0], &[1]), ("old", &[7.0; 6], &[2, 3])]),
                &checkpoint,
                ["`new`", "not in the checkpoint"],
            ),
            (with_tensors(&[]), &checkpoint, ["`old`", "does not keep"]),
            (with_tensors(&[("old", &[7.0; 6], &[2, 3])]), &none, ["`old`", "not in the checkpoint"]),
        ] {
            let before = values(&algorithm);
            let message = restore(&mut algorithm, from).unwrap_err().to_string();
            assert!(parts.iter().all(|part| message.contains(part)) && message.contains("go on with"), "{message}");
            assert_eq!(values(&algorithm), before);
        }
    }
}
