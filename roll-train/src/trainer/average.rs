//! The averaged parameters of a run: kept, evaluated and saved in `averaged/` of its checkpoints.

use std::collections::BTreeMap;

use roll_core::{Error, Result, StateDict, flat};
use roll_weights::AVERAGED;

use super::Trainer;
use crate::checkpoint::Checkpoint;

impl Trainer {
    pub(super) fn update_average(&mut self) -> Result<()> {
        if let Some(average) = &mut self.average {
            let d = decay(self.steps_done, self.loaded.config.training.average);
            flat::blend(average, &flat::read(self.model.as_ref())?, d);
        }
        Ok(())
    }

    /// Runs `work` with the averaged parameters in the model, if there are any, and restores the parameters in training,
    /// also after an error. All ranks must call it.
    pub(super) fn with_average<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let Some(average) = &self.average else { return work(self) };
        let in_training = flat::read(self.model.as_ref())?;
        self.model.write_parameters(average)?;
        let done = work(self);
        self.model.write_parameters(&in_training)?;
        done
    }

    /// Restores the average from the adapters in `averaged/` of a checkpoint. The parameters in training are not kept.
    pub(super) fn restore_average(&mut self, from: &Checkpoint) -> Result<()> {
        let adapters = adapters(from, Some(AVERAGED))?;
        let problem = match (&mut self.average, adapters.is_empty()) {
            (None, true) => return Ok(()),
            (Some(average), false) => {
                self.model.import_adapter(&adapters)?;
                return self.model.read_parameters(average);
            }
            (None, false) => "has an average of the parameters: go on with the value that `training.average` had",
            (Some(_), true) => "has no average of the parameters: go on with `training.average: 0`",
        };
        Err(Error::bad_file(from.path(), format!("the checkpoint {problem}")))
    }
}

/// Weight of the past after step `n`, counted from 1: `min((1 + n) / (10 + n), most)`, as DiffusionNFT
/// (arXiv:2509.16117) has it.
pub fn decay(n: u64, most: f64) -> f64 {
    (n.saturating_add(1) as f64 / n.saturating_add(10) as f64).min(most)
}

/// The adapters in a directory of a checkpoint, by name. `None`: those beside its other directories.
pub(super) fn adapters(checkpoint: &Checkpoint, directory: Option<&str>) -> Result<BTreeMap<String, StateDict>> {
    let files = checkpoint.manifest().files.keys();
    let in_directory = files.filter_map(|file| match (file.rsplit_once('/'), directory) {
        (None, None) => Some((file, file.as_str())),
        (Some((of, name)), Some(directory)) if of == directory => Some((file, name)),
        _ => None,
    });
    let adapters = in_directory.filter_map(|(file, name)| Some((file, name.strip_suffix(".safetensors")?)));
    adapters
        .map(|(file, name)| Ok((name.to_string(), roll_weights::Checkpoint::open(checkpoint.file(file)?)?.all()?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decay_rises_to_the_most() {
        assert_eq!([1, 8, 98].map(|n| decay(n, 0.9)), [2.0 / 11.0, 0.5, 0.9]);
        assert_eq!(decay(u64::MAX, 0.995), 0.995);
    }
}
