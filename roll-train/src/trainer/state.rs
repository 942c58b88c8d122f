//! Writes the state of a run into checkpoints, and resumes from them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use roll_core::header;
use roll_core::{Error, Fault, Result, ResultExt, StateDict};
use roll_external::files::shell_quoted;
use roll_weights::{AVERAGED, save_safetensors};

use super::average::adapters;
use super::{Trainer, task_state};
use crate::checkpoint::{self, Checkpoint, CheckpointWriter};
use crate::progress::counted;
use crate::results::Journal;
use crate::results::record::{self, RECORD_FILE, read_record};
use crate::run_dir::RunDir;
use crate::task::{TaskState, remove_up_to};

/// The file of the optimizer's state in a checkpoint.
const OPTIMIZER_FILE: &str = "trainer/optimizer.safetensors";

/// The weight files in a checkpoint that evaluations use, and that a person would use: the trained adapters, or the
/// experts if all their weights are trained. If the run keeps averaged parameters, the files have the averages.
pub(super) fn adapter_files(checkpoint: &Checkpoint) -> Vec<PathBuf> {
    let weight_files_in = |directory: Option<&str>| -> Vec<PathBuf> {
        let names = checkpoint.manifest().files.keys();
        let names = names.filter(|name| {
            name.ends_with(".safetensors") && name.split_once('/').map(|(parent, _)| parent) == directory
        });
        names.map(|name| checkpoint.path().join(name)).collect()
    };
    let averaged = weight_files_in(Some(AVERAGED));
    // Without an average, the files in the checkpoint's own directory.
    if averaged.is_empty() { weight_files_in(None) } else { averaged }
}

impl Trainer {
    /// Resumes from a checkpoint of this configuration, on any number of ranks.
    pub fn resume(&mut self, from: &Checkpoint) -> Result<()> {
        // The average comes first, because restoring it leaves the averaged parameters in the model.
        self.restore_average(from)?;
        self.model.import_adapter(&adapters(from, None)?)?;
        self.strategy.load_state(&roll_weights::Checkpoint::open(from.file(OPTIMIZER_FILE)?)?.all()?)?;
        self.task.restore(&task_state::read(from)?)?;
        self.record = read_record(from)?;
        self.steps_done = from.step();
        self.saved = Some(from.clone());
        self.saved_step = Some(from.step());
        self.warn_of_other_batch_size(from);
        if self.steps_done > self.steps {
            let problem = format!(
                "the run has made {} steps already, and `steps` is {}: choose more",
                self.steps_done, self.steps
            );
            return Err(Error::config("steps", problem));
        }
        Ok(())
    }

    /// Logs a warning if a step had another number of samples when the checkpoint was written.
    fn warn_of_other_batch_size(&self, from: &Checkpoint) {
        let samples_now = self.task.facts().samples_per_step;
        if let Some(samples_then) = from.manifest().info["global_batch"].as_u64()
            && samples_now > 0
            && samples_then != samples_now
        {
            tracing::warn!(
                "a step had {samples_then} samples over all ranks and now has {samples_now}: the order of the data is \
                 not continued; adjust `training.gradient_accumulation_steps` to keep the number"
            );
        }
    }

    /// Writes a checkpoint of the steps that are done, unless there is one already. All ranks take part, because each
    /// has a part of the state; rank 0 writes. If this fails, older checkpoints are unchanged.
    pub(super) fn save(&mut self, journal: &mut Journal) -> Result<()> {
        if self.saved_step == Some(self.steps_done) {
            return Ok(());
        }
        let optimizer = self.strategy.state()?;
        let is_writer = journal.dir.is_some();
        let mut adapters = self.export_adapters(is_writer)?;
        if self.average.is_some() {
            let averaged = self.with_average(|trainer| trainer.export_adapters(is_writer))?;
            adapters.extend(averaged.into_iter().map(|(name, tensors)| (format!("{AVERAGED}/{name}"), tensors)));
        }
        let task_state = self.task.state(is_writer)?;
        let Some(dir) = journal.dir.clone() else {
            self.saved_step = Some(self.steps_done);
            return Ok(());
        };
        journal.sync()?;
        let checkpoint = self.write_checkpoint(&dir, &adapters, &optimizer, task_state);
        let checkpoint = checkpoint.while_doing(|| {
            let older = self.saved.as_ref().map(|saved| format!("; {} is untouched", saved.path().display()));
            format!("writing the checkpoint of step {}{}", self.steps_done, older.unwrap_or_default())
        })?;
        self.saved = Some(checkpoint);
        self.saved_step = Some(self.steps_done);
        match self.loaded.config.max_ckpt_to_keep {
            Some(keep) => checkpoint::prune(&dir.checkpoints(), keep),
            None => Ok(()),
        }
    }

    /// The adapters of the model if this rank writes them, else none. Sharded weights are gathered for the rank that
    /// writes, so the other ranks take part until it is done.
    fn export_adapters(&mut self, is_writer: bool) -> Result<BTreeMap<String, StateDict>> {
        let adapters = if is_writer { self.model.export_adapter() } else { Ok(BTreeMap::new()) };
        self.strategy.ranks().all.barrier()?;
        adapters
    }

    /// Adds measurements to the checkpoint of this step if they were made after it was written. Then removes the
    /// partial results of evaluations, since the checkpoint has all of them.
    pub(super) fn add_late_measurements(&mut self, journal: &mut Journal) -> Result<()> {
        let (Some(dir), Some(saved)) = (journal.dir.clone(), &self.saved) else { return Ok(()) };
        if saved.step() == self.steps_done && read_record(saved)?.pending.is_some() {
            journal.sync()?;
            record::amend(saved, &self.record)?;
        }
        remove_up_to(&dir, self.steps_done)
    }

    /// Writes the files of a checkpoint.
    fn write_checkpoint(
        &self,
        dir: &RunDir,
        adapters: &BTreeMap<String, StateDict>,
        optimizer: &StateDict,
        task_state: TaskState,
    ) -> Result<Checkpoint> {
        let mut writer = CheckpointWriter::begin(&dir.checkpoints(), self.steps_done)?;
        if let Some(run) = dir.identity(&self.loaded.config) {
            writer.set_run(run);
        }
        // Texts for the headers of weight files. They must be the same for the same run, because checkpoints are
        // compared bit for bit, and so have no time.
        let header_texts = BTreeMap::from([
            (header::STEPS.to_string(), self.steps_done.to_string()),
            (header::RUN.to_string(), self.loaded.config.experiment().to_string()),
        ]);
        for (name, tensors) in adapters {
            let file = format!("{name}.safetensors");
            writer.add_file(&file, |path| Ok(save_safetensors(path, tensors, &header_texts)?))?;
            let texts_of_model = tensors.get(header::KEY).map(header::read).transpose()?.unwrap_or_default();
            for (key, text) in texts_of_model {
                // A key with the prefix `beside:` is the name of a text file to write next to the weights.
                if let Some(file_name) = key.strip_prefix(header::BESIDE) {
                    let directory = name.rsplit_once('/').map(|(directory, _)| format!("{directory}/"));
                    writer.add_bytes(&(directory.unwrap_or_default() + file_name), text.as_bytes())?;
                }
            }
        }
        writer.add_file(OPTIMIZER_FILE, |path| Ok(save_safetensors(path, optimizer, &BTreeMap::new())?))?;
        let record = serde_json::to_vec_pretty(&self.record)
            .map_err(Error::failed("the record of the run cannot be written as JSON"))?;
        writer.add_bytes(RECORD_FILE, &record)?;
        let mut info = serde_json::json!({
            "world_size": self.strategy.ranks().all.world_size(),
            "global_batch": Some(self.task.facts().samples_per_step).filter(|samples| *samples > 0),
        });
        task_state::write(task_state, &mut writer, &mut info)?;
        writer.finish(info)
    }

    /// Writes a checkpoint to resume from, after the run was asked to stop.
    pub(super) fn stop(&mut self, journal: &mut Journal) -> Result<()> {
        journal.open(&self.loaded, &self.record)?;
        self.save(journal)?;
        // The other ranks wait until the checkpoint is written, because `mpirun` kills the whole job when a rank exits.
        self.strategy.ranks().all.barrier()?;
        if let Some(dir) = &journal.dir {
            let steps = counted(self.steps_done, "step");
            tracing::warn!("stopped after {steps}; go on with: roll run --resume {}", shell_quoted(dir.path()));
        }
        Ok(())
    }

    /// Returns `outcome`. If it is an error other than an interrupt, this first writes a checkpoint of the steps that
    /// are done, so that a failing reward does not cost the training up to then. With several ranks no checkpoint is
    /// written, since all of them would have to take part, and one has failed.
    pub(super) fn checkpoint_on_error<T>(&mut self, outcome: Result<T>, journal: &mut Journal) -> Result<T> {
        if outcome.as_ref().is_err_and(|error| error.fault() != Fault::Interrupt) {
            self.save_steps_done(journal);
        }
        outcome
    }

    /// Writes a checkpoint after a failure, if there are steps that are not saved, and logs whether that succeeded.
    fn save_steps_done(&mut self, journal: &mut Journal) {
        let Some(dir) = journal.dir.clone() else { return };
        let has_other_ranks = self.strategy.ranks().all.world_size() != 1;
        if has_other_ranks || self.steps_done == 0 || self.saved_step == Some(self.steps_done) {
            return;
        }
        let (steps, checkpoints) = (counted(self.steps_done, "step"), dir.checkpoints());
        match self.save(journal) {
            Ok(()) => tracing::warn!("the training of {steps} is saved in {}", checkpoints.display()),
            Err(error) => tracing::warn!("the training of {steps} could not be saved: {}", error.chain()),
        }
    }
}
