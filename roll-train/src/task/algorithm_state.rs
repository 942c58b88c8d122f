//! The state of an algorithm in a checkpoint: JSON, and tensors such as an older policy.

use roll_core::{Algorithm, Error, Result, StateDict, Tensor};

use super::TaskState;

/// The state of `algorithm`. All ranks must call it; only the rank with `is_writer` gets tensors.
pub fn state(algorithm: &dyn Algorithm, is_writer: bool) -> Result<TaskState> {
    let json = algorithm.state();
    let tensors = if is_writer { algorithm.tensors()? } else { StateDict::new() };
    Ok(TaskState { json, tensors, ..TaskState::default() })
}

/// Restores a saved state of `algorithm`. Fails, and loads no tensor, if the saved tensors are not those it keeps.
pub fn restore(algorithm: &mut dyn Algorithm, saved: &TaskState) -> Result<()> {
    // Comes first, because the names of the algorithm's tensors follow from this state.
    algorithm.load_state(&saved.json)?;
    check_tensors(&algorithm.tensors()?, &saved.tensors).map_err(|problem| Error::bad_file(&saved.origin, problem))?;
    match saved.tensors.is_empty() {
        true => Ok(()),
        false => algorithm.load_tensors(&saved.tensors),
    }
}

/// Fails with the first difference between names, shapes and dtypes, in words.
fn check_tensors(expected: &StateDict, saved: &StateDict) -> std::result::Result<(), String> {
    const REMEDY: &str = "go on with the algorithm, the options and the model that it was written with";
    for (name, tensor) in expected {
        let Some(found) = saved.get(name) else {
            return Err(format!("the algorithm's tensor `{name}` is not in the checkpoint: {REMEDY}"));
        };
        let form = |tensor: &Tensor| format!("{:?} of shape {:?}", tensor.dtype(), tensor.shape());
        if (found.shape(), found.dtype()) != (tensor.shape(), tensor.dtype()) {
            return Err(format!(
                "the algorithm's tensor `{name}`: expected {}, found {}; {REMEDY}",
                form(tensor),
                form(found)
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
    use roll_core::{Model, OwnDataAlgorithm, RewardScorer, Samples, StepContext, StepReport};

    use super::*;

    /// An algorithm with these tensors.
    #[derive(Clone)]
    struct WithTensors(StateDict);

    impl OwnDataAlgorithm for WithTensors {}

    impl Algorithm for WithTensors {
        fn samples(self: Box<Self>) -> Samples {
            Samples::Own(self)
        }
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

    /// As a checkpoint has it.
    fn saved(of: &WithTensors) -> TaskState {
        TaskState { origin: "algorithm.safetensors".into(), ..state(of, true).unwrap() }
    }

    #[test]
    fn only_the_rank_that_saves_copies_tensors() {
        let algorithm = with_tensors(&[("old", &[1.0], &[1])]);
        assert_eq!([true, false].map(|saves| state(&algorithm, saves).unwrap().tensors.len()), [1, 0]);
    }

    #[test]
    fn an_algorithm_without_tensors_takes_none() {
        let state = saved(&with_tensors(&[]));
        assert!(state.json.is_null() && state.tensors.is_empty());
        restore(&mut with_tensors(&[]), &state).unwrap();
    }

    #[test]
    fn rejects_missing_unexpected_and_misshapen_tensors() {
        let state = saved(&with_tensors(&[("old", &[1.0; 6], &[2, 3])]));
        let none = saved(&with_tensors(&[]));
        let other = WithTensors([("old".to_string(), Tensor::new(vec![0i64; 6], [2, 3]).unwrap())].into());
        for (mut algorithm, from, parts) in [
            (with_tensors(&[("old", &[7.0; 6], &[3, 2])]), &state, ["`old`: expected F32 of shape [3, 2]", "[2, 3]"]),
            (other, &state, ["expected I64 of shape [2, 3]", "found F32"]),
            (
                with_tensors(&[("new", &[7.0], &[1]), ("old", &[7.0; 6], &[2, 3])]),
                &state,
                ["`new`", "not in the checkpoint"],
            ),
            (with_tensors(&[]), &state, ["`old`", "does not keep"]),
            (with_tensors(&[("old", &[7.0; 6], &[2, 3])]), &none, ["`old`", "not in the checkpoint"]),
        ] {
            let before = values(&algorithm);
            let message = restore(&mut algorithm, from).unwrap_err().to_string();
            let parts = [parts[0], parts[1], "go on with", "algorithm.safetensors"];
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
            assert_eq!(values(&algorithm), before);
        }
    }
}
