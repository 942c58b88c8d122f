//! Fails a run in which nothing is trained: after too many such steps in a row, or at its end if no step trained
//! anything.
//!
//! A step is *idle* if no parameter changed in it ([`Record::idle_steps`]).

use roll_core::{Error, Result};

use crate::progress::counted;
use crate::results::record::Record;

/// Most reasons in the message; the most frequent ones are listed.
const MAX_REASONS: usize = 5;

/// Factor on `training.max_skipped_steps` in two cases: once something was trained, since bad samples may come in a
/// row; and if the algorithm brings its own data, since the first episodes of an agent may all fail.
const PATIENCE: u64 = 10;

/// The progress of a run, and the settings that the check depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunProgress {
    /// Steps that are done.
    pub(super) steps_done: u64,
    /// Steps of the whole run.
    pub(super) steps: u64,
    /// Samples of a step over all ranks; 0 if the algorithm brings its own data.
    pub(super) samples_per_step: u64,
    /// `training.max_skipped_steps`; 0 turns the check off.
    pub(super) max_idle_steps: u64,
    /// Whether the learning rate was 0 in every step that is done, although the base rate is not 0. A warm-up begins
    /// so.
    pub(super) is_warming_up: bool,
    /// As [`crate::task::TaskFacts::idle_hint`].
    pub(super) hint: &'static str,
}

/// Fails after too many idle steps in a row. The result depends only on the record and the schedule, so that all ranks
/// agree, and a resumed run agrees with one that never stopped.
pub(super) fn check(record: &Record, progress: RunProgress) -> Result<()> {
    let RunProgress { steps_done, steps, samples_per_step, max_idle_steps, is_warming_up, .. } = progress;
    let idle_steps = record.idle_steps;
    if max_idle_steps == 0 || steps_done == 0 || idle_steps == 0 {
        return Ok(());
    }
    let never_trained = idle_steps >= steps_done;
    let every_update_was_left_out = record.skipped_updates >= steps_done;
    // A warm-up may begin with steps that train nothing. That is not a mistake: people try a configuration with
    // `--steps 1`.
    if is_warming_up && !every_update_was_left_out {
        return Ok(());
    }
    let is_impatient = never_trained && (samples_per_step > 0 || every_update_was_left_out);
    let limit = if is_impatient { max_idle_steps } else { max_idle_steps.saturating_mul(PATIENCE) };
    let ends_untrained = never_trained && steps_done >= steps;
    if idle_steps < limit && !ends_untrained {
        return Ok(());
    }
    Err(nothing_is_trained(record, progress))
}

/// The error for a run whose last [`Record::idle_steps`] trained nothing: what happened in these steps, and why.
fn nothing_is_trained(record: &Record, progress: RunProgress) -> Error {
    let RunProgress { steps_done, samples_per_step, hint, .. } = progress;
    let idle_steps = record.idle_steps;
    let never_trained = idle_steps >= steps_done;
    let every_update_was_left_out = record.skipped_updates >= steps_done;
    let which = match never_trained {
        true if idle_steps == 1 => "the first step".to_string(),
        true => format!("the first {}", counted(idle_steps, "step")),
        false => format!("the last {}, after step {}", counted(idle_steps, "step"), steps_done - idle_steps),
    };
    // Samples that were left out in steps, and not in the evaluation before training.
    let skipped_before_training = record.skipped.iter().filter(|skipped| skipped.step == 0).count() as u64;
    let skipped = record.skipped_samples.saturating_sub(skipped_before_training);
    let (what, why) = if every_update_was_left_out && samples_per_step > 0 && skipped >= steps_done * samples_per_step {
        (format!("all {skipped} samples of {which} were left out"), reasons(record))
    } else if every_update_was_left_out || (!never_trained && record.skipped_updates >= idle_steps) {
        let mut why = "values were not finite, or no sample could be trained on; the warnings above say which".into();
        if skipped > 0 {
            why = format!("{why}. Samples: {}", reasons(record));
        }
        (format!("every update of {which} was left out"), why)
    } else {
        let why = "the gradient is 0 or the learning rate is: look at `actor/grad_norm` and `lr` in the metrics, at \
                   `training.learning_rate` and its schedule, and at what is trained (`model.trainable_models`)";
        (format!("no parameter changed in {which}"), format!("{why}{hint}"))
    };
    let why = format!("{why}. `training.max_skipped_steps: 0` continues anyway");
    Error::failed(format!("nothing is trained: {what}"))(why)
}

/// The message at the end of a run that changed nothing because it ended at the beginning of its warm-up.
pub(super) fn warmup_note(progress: RunProgress) -> Option<&'static str> {
    (progress.is_warming_up && progress.steps_done >= progress.steps).then_some(
        "nothing was trained yet: the learning rate of the first step is 0, where the warm-up begins \
         (`training.warmup_steps`). Everything worked; take more steps, or set `training.warmup_steps=0`",
    )
}

/// The most frequent reasons for which samples were left out since the first step, each with its first sample.
fn reasons(record: &Record) -> String {
    let first_step = 1;
    let mut reasons: Vec<_> = record.skip_reasons(first_step).into_iter().collect();
    reasons.sort_by_key(|(_, (count, _))| std::cmp::Reverse(*count));
    let listed = reasons.iter().take(MAX_REASONS);
    let listed = listed.map(|(reason, (count, sample))| format!("{count} x {reason} (as {sample})"));
    let text = listed.collect::<Vec<_>>().join("; ");
    match reasons.len().saturating_sub(MAX_REASONS) {
        0 => text,
        unlisted => format!("{text}; and {unlisted} other reasons"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::record::Skipped;

    /// After `steps` steps of two samples, `skipped` of which were left out, the last `idle` steps changed nothing.
    fn record(steps: u64, skipped: u64, idle: u64) -> Record {
        let reason = |i: u64| if i % 3 == 2 { "no face in the reference" } else { "no face in any of 5 frames" };
        let skip = |i: u64| Skipped { step: 1 + i / 2, sample: format!("row {i}"), reason: reason(i).into() };
        let mut record = Record {
            skipped_samples: skipped + 1,
            skipped_updates: skipped / 2,
            idle_steps: idle,
            ..Record::default()
        };
        record.skipped.push(Skipped { step: 0, sample: "row 9".into(), reason: "it cannot be read".into() });
        record.skipped.extend((0..skipped).map(skip));
        assert!(steps >= record.skipped_updates);
        record
    }

    /// A run of 100 steps, stopped after 5.
    fn progress(steps_done: u64, samples_per_step: u64) -> RunProgress {
        let (steps, max_idle_steps) = (100, 5);
        RunProgress { steps_done, steps, samples_per_step, max_idle_steps, is_warming_up: false, hint: "; a hint" }
    }

    fn message(record: &Record, progress: RunProgress) -> String {
        check(record, progress).err().map(|e| e.chain()).unwrap_or_default()
    }

    #[test]
    fn stops_if_all_samples_are_skipped_and_counts_the_reasons() {
        let text = message(&record(5, 10, 5), progress(5, 2));
        for part in [
            "`training.max_skipped_steps: 0`",
            "all 10 samples of the first 5 steps",
            "7 x no face in any of 5 frames (as row 0); 3 x no face in the reference (as row 2)",
        ] {
            assert!(text.contains(part), "no {part}: {text}");
        }
        assert!(!text.contains("it cannot be read"), "{text}");
    }

    #[test]
    fn stops_if_updates_are_skipped_or_parameters_do_not_change() {
        let nonfinite = Record { skipped_updates: 5, idle_steps: 5, ..Record::default() };
        assert!(message(&nonfinite, progress(5, 2)).contains("every update of the first 5 steps was left out"));
        assert!(message(&nonfinite, progress(5, 0)).contains("every update"), "of an agent too");
        let still = Record { idle_steps: 5, ..Record::default() };
        let text = message(&still, progress(5, 2));
        assert!(text.contains("no parameter changed in the first 5 steps") && text.contains("; a hint."), "{text}");
        assert!(check(&still, progress(5, 0)).is_ok(), "an agent's first episodes may all fail");
        let later = Record { idle_steps: 50, ..Record::default() };
        assert!(message(&later, progress(70, 2)).contains("the last 50 steps, after step 20"));
    }

    #[test]
    fn continues_below_the_limit_and_without_one() {
        assert!(check(&record(4, 8, 4), progress(4, 2)).is_ok());
        assert!(check(&record(5, 9, 0), progress(5, 2)).is_ok());
        assert!(check(&record(60, 12, 49), progress(60, 2)).is_ok());
        assert!(check(&record(5, 10, 5), RunProgress { max_idle_steps: 0, ..progress(5, 2) }).is_ok());
    }

    #[test]
    fn fails_at_the_end_if_no_parameter_ever_changed() {
        let end = |done| RunProgress { steps: done, ..progress(done, 2) };
        assert!(message(&record(2, 4, 2), end(2)).contains("all 4 samples of the first 2 steps"));
        assert!(message(&Record { idle_steps: 1, ..Record::default() }, end(1)).contains("in the first step"));
        assert!(check(&record(3, 4, 2), end(3)).is_ok(), "it was trained in one");
    }

    #[test]
    fn a_run_of_one_warmup_step_succeeds_with_a_note() {
        let one = RunProgress { steps: 1, is_warming_up: true, max_idle_steps: 1, ..progress(1, 2) };
        assert!(check(&Record { idle_steps: 1, ..Record::default() }, one).is_ok());
        assert!(warmup_note(one).is_some_and(|note| note.contains("`training.warmup_steps`")));
        assert_eq!(warmup_note(RunProgress { steps: 2, ..one }), None, "there is more to come");
        assert_eq!(warmup_note(RunProgress { is_warming_up: false, ..one }), None);
        assert!(message(&record(1, 2, 1), one).contains("all 2 samples"), "left out is left out");
    }
}
