//! A run that trains nothing must not go on until its end, nor end as if it had.

use std::collections::BTreeMap;

use roll_core::{Error, Result};

use crate::progress::counted;
use crate::results::record::Record;

/// Number of reasons in the message: the most frequent ones.
const TOLD: usize = 5;

/// Once something was trained, this many times the limit is waited for: clips without a face may come in a row. So it
/// is for an agent, whose first episodes may all fail alike.
const PATIENCE: u64 = 10;

/// How far a run is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Course {
    /// Steps done.
    pub(super) done: u64,
    /// Steps that it is to do.
    pub(super) steps: u64,
    /// Samples of a step over all ranks; 0 where the algorithm brings its own data.
    pub(super) batch: u64,
    /// `training.max_skipped_steps`.
    pub(super) limit: u64,
    /// The learning rate of every step done is 0 although the base rate is not: the warm-up begins at 0.
    pub(super) warms_up: bool,
}

/// Fails once too many steps in a row trained nothing. It depends on the record and the schedule alone, so that all
/// ranks agree, and so does a run that was resumed.
pub(super) fn check(record: &Record, course: Course) -> Result<()> {
    let Course { done, steps, batch, limit, warms_up } = course;
    let idle = record.idle_steps;
    if limit == 0 || done == 0 || idle == 0 {
        return Ok(());
    }
    let never = idle >= done;
    let left_out = record.skipped_updates >= done;
    // No mistake: `--steps 1` is how people see whether everything works.
    if warms_up && !left_out {
        return Ok(());
    }
    let patience = if never && (batch > 0 || left_out) { limit } else { limit.saturating_mul(PATIENCE) };
    if idle < patience && !(never && done >= steps) {
        return Ok(());
    }
    let which = match never {
        true if idle == 1 => "the first step".to_string(),
        true => format!("the first {}", counted(idle, "step")),
        false => format!("the last {}, after step {}", counted(idle, "step"), done - idle),
    };
    let before_training = record.skipped.iter().filter(|skipped| skipped.step == 0).count() as u64;
    let skipped = record.skipped_samples.saturating_sub(before_training);
    let (what, why) = if left_out && batch > 0 && skipped >= done * batch {
        (format!("all {skipped} samples of {which} were left out"), reasons(record))
    } else if left_out || (!never && record.skipped_updates >= idle) {
        let mut why = "values were not finite, or no sample could be trained on; the warnings above say which".into();
        if skipped > 0 {
            why = format!("{why}. Samples: {}", reasons(record));
        }
        (format!("every update of {which} was left out"), why)
    } else {
        let why = "the gradient is 0 or the learning rate is: look at `actor/grad_norm` and `lr` in the metrics, at \
                   `training.learning_rate` and its schedule, and at what is trained (`model.trainable_models`)";
        let agent = if batch == 0 { "; of an agent: all episodes of each group may have one score" } else { "" };
        (format!("no parameter changed in {which}"), format!("{why}{agent}"))
    };
    let why = format!("{why}. `training.max_skipped_steps: 0` continues anyway");
    Err(Error::failed(format!("nothing is trained: {what}"))(why))
}

/// The message at the end of a run that did no more than the first step of its warm-up, and changed nothing.
pub(super) fn warmed_up_alone(course: Course) -> Option<&'static str> {
    (course.warms_up && course.done >= course.steps).then_some(
        "nothing was trained yet: the learning rate of the first step is 0, where the warm-up begins \
         (`training.warmup_steps`). Everything worked; take more steps, or set `training.warmup_steps=0`",
    )
}

/// Why samples were left out: the most frequent reasons, each with one sample.
fn reasons(record: &Record) -> String {
    let mut reasons: BTreeMap<&str, (usize, &str)> = BTreeMap::new();
    for left_out in record.skipped.iter().filter(|skipped| skipped.step > 0) {
        reasons.entry(left_out.reason.as_str()).or_insert((0, left_out.sample.as_str())).0 += 1;
    }
    let mut reasons: Vec<_> = reasons.into_iter().collect();
    reasons.sort_by_key(|(_, (count, _))| std::cmp::Reverse(*count));
    let more = reasons.len().saturating_sub(TOLD);
    let told = reasons.iter().take(TOLD).map(|(reason, (count, sample))| format!("{count} x {reason} (as {sample})"));
    let mut told = told.collect::<Vec<_>>().join("; ");
    if more > 0 {
        told.push_str(&format!("; and {more} other reasons"));
    }
    told
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
    fn course(done: u64, batch: u64) -> Course {
        Course { done, steps: 100, batch, limit: 5, warms_up: false }
    }

    fn told(record: &Record, course: Course) -> String {
        check(record, course).err().map(|e| e.chain()).unwrap_or_default()
    }

    #[test]
    fn a_run_whose_first_steps_left_everything_out_stops_and_counts_the_reasons() {
        let told = told(&record(5, 10, 5), course(5, 2));
        for part in [
            "`training.max_skipped_steps: 0`",
            "all 10 samples of the first 5 steps",
            "7 x no face in any of 5 frames (as row 0); 3 x no face in the reference (as row 2)",
        ] {
            assert!(told.contains(part), "no {part}: {told}");
        }
        assert!(!told.contains("it cannot be read"), "{told}");
    }

    #[test]
    fn updates_that_are_left_out_and_parameters_that_stay_stop_a_run_too() {
        let nonfinite = Record { skipped_updates: 5, idle_steps: 5, ..Record::default() };
        assert!(told(&nonfinite, course(5, 2)).contains("every update of the first 5 steps was left out"));
        assert!(told(&nonfinite, course(5, 0)).contains("every update"), "of an agent too");
        let still = Record { idle_steps: 5, ..Record::default() };
        assert!(told(&still, course(5, 2)).contains("no parameter changed in the first 5 steps"));
        assert!(check(&still, course(5, 0)).is_ok(), "an agent's first episodes may all fail");
        let later = Record { idle_steps: 50, ..Record::default() };
        assert!(told(&later, course(70, 2)).contains("the last 50 steps, after step 20"));
    }

    #[test]
    fn a_run_goes_on_before_that_where_something_was_trained_or_where_it_was_told_to() {
        assert!(check(&record(4, 8, 4), course(4, 2)).is_ok());
        assert!(check(&record(5, 9, 0), course(5, 2)).is_ok());
        assert!(check(&record(60, 12, 49), course(60, 2)).is_ok());
        assert!(check(&record(5, 10, 5), Course { limit: 0, ..course(5, 2) }).is_ok());
    }

    #[test]
    fn a_run_that_never_changed_a_parameter_fails_at_its_end_however_short_it_was() {
        let end = |done| Course { steps: done, ..course(done, 2) };
        assert!(told(&record(2, 4, 2), end(2)).contains("all 4 samples of the first 2 steps"));
        assert!(told(&Record { idle_steps: 1, ..Record::default() }, end(1)).contains("in the first step"));
        assert!(check(&record(3, 4, 2), end(3)).is_ok(), "it was trained in one");
    }

    #[test]
    fn a_run_of_one_step_of_warm_up_succeeds_and_says_that_nothing_was_trained() {
        let one = Course { steps: 1, warms_up: true, limit: 1, ..course(1, 2) };
        assert!(check(&Record { idle_steps: 1, ..Record::default() }, one).is_ok());
        assert!(warmed_up_alone(one).is_some_and(|told| told.contains("`training.warmup_steps`")));
        assert_eq!(warmed_up_alone(Course { steps: 2, ..one }), None, "there is more to come");
        assert_eq!(warmed_up_alone(Course { warms_up: false, ..one }), None);
        assert!(told(&record(1, 2, 1), one).contains("all 2 samples"), "left out is left out");
    }
}
