//! The averaged parameters of a run (`training.average`): an exponential moving average that evaluations use, and that
//! checkpoints have in `averaged/`.

use std::collections::BTreeMap;

use roll_core::{Error, Result, StateDict, flat};
use roll_weights::AVERAGED;

use super::Trainer;
use crate::checkpoint::Checkpoint;

impl Trainer {
    /// Adds the parameters after a step to the average, if there is one.
    pub(super) fn update_average(&mut self) -> Result<()> {
        if let Some(average) = &mut self.average {
            let decay = decay(self.steps_done, self.loaded.config.training.average);
            flat::blend(average, &flat::read(self.model.as_ref())?, decay);
        }
        Ok(())
    }

    /// Runs `work` while the model has the averaged parameters, if there is an average, and then writes the trained
    /// parameters back, also after an error. All ranks must call this.
    pub(super) fn with_average<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let Some(average) = &self.average else { return work(self) };
        let trained = flat::read(self.model.as_ref())?;
        self.model.write_parameters(average)?;
        let result = work(self);
        self.model.write_parameters(&trained)?;
        result
    }

    /// Restores the average from the adapters in `averaged/` of a checkpoint. This leaves the averaged parameters in
    /// the model, so the trained ones must be restored afterwards.
    pub(super) fn restore_average(&mut self, from: &Checkpoint) -> Result<()> {
        let averaged = adapters(from, Some(AVERAGED))?;
        let problem = match &mut self.average {
            None if averaged.is_empty() => return Ok(()),
            None => "has an average of the parameters: go on with the value that `training.average` had",
            Some(_) if averaged.is_empty() => "has no average of the parameters: go on with `training.average: 0`",
            Some(average) => {
                self.model.import_adapter(&averaged)?;
                return self.model.read_parameters(average);
            }
        };
        Err(Error::bad_file(from.path(), format!("the checkpoint {problem}")))
    }
}

/// The weight of the old average after a step, counted from 1: `min((1 + step) / (10 + step), max_decay)`, as in
/// DiffusionNFT (arXiv:2509.16117).
pub fn decay(step: u64, max_decay: f64) -> f64 {
    (step.saturating_add(1) as f64 / step.saturating_add(10) as f64).min(max_decay)
}

/// The adapters in a directory of a checkpoint, by name. `None` is the checkpoint's own directory.
pub(super) fn adapters(checkpoint: &Checkpoint, directory: Option<&str>) -> Result<BTreeMap<String, StateDict>> {
    let mut adapters = BTreeMap::new();
    for file in checkpoint.manifest().files.keys() {
        let (parent, file_name) = match file.rsplit_once('/') {
            Some((parent, file_name)) => (Some(parent), file_name),
            None => (None, file.as_str()),
        };
        if let Some(name) = file_name.strip_suffix(".safetensors")
            && parent == directory
        {
            adapters.insert(name.to_string(), roll_weights::Checkpoint::open(checkpoint.file(file)?)?.all()?);
        }
    }
    Ok(adapters)
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
