//! The remaining time of a run, estimated from its first steps and logged once.

use crate::progress::{counted, duration};

/// Number of steps of this process after which the remaining time is estimated. The first step does not count, because
/// it also encodes prompts and clips, and fills caches.
const TIMED_STEPS: usize = 3;

/// The durations that the estimate is computed from.
#[derive(Default)]
pub(super) struct Pace {
    /// Seconds of the first steps of this process.
    step_seconds: Vec<f64>,
    /// Seconds of the first evaluation of this process.
    evaluation_seconds: Option<f64>,
}

impl Pace {
    /// Adds the duration of an evaluation. Only the first one counts, since later ones take as long.
    pub(super) fn add_evaluation(&mut self, seconds: f64) {
        self.evaluation_seconds.get_or_insert(seconds);
    }

    /// Adds the duration of a step. Returns the message about the remaining time once, after [`TIMED_STEPS`] steps.
    pub(super) fn add_step(&mut self, seconds: f64, steps_left: u64, evaluations_left: u64) -> Option<String> {
        if self.step_seconds.len() == TIMED_STEPS {
            return None;
        }
        self.step_seconds.push(seconds);
        if self.step_seconds.len() < TIMED_STEPS || steps_left == 0 {
            return None;
        }
        let counted_steps = &self.step_seconds[1..];
        let seconds_of_step = counted_steps.iter().sum::<f64>() / counted_steps.len() as f64;
        let mut seconds_left = seconds_of_step * steps_left as f64;
        let mut parts = format!("{} of {}", counted(steps_left, "step"), duration(seconds_of_step));
        match self.evaluation_seconds {
            _ if evaluations_left == 0 => {}
            Some(seconds_of_evaluation) => {
                seconds_left += seconds_of_evaluation * evaluations_left as f64;
                let evaluations = counted(evaluations_left, "evaluation");
                parts += &format!(", {evaluations} of {}", duration(seconds_of_evaluation));
            }
            None => parts += ", and evaluations",
        }
        Some(format!("about {} left: {parts}", duration(seconds_left)))
    }
}

/// The number of evaluations that follow step `done` of `steps`: one after every `every`-th step, unless that is 0, and
/// one after the last step.
pub(super) fn evaluations_left(done: u64, steps: u64, every: u64) -> u64 {
    match every {
        0 => u64::from(done < steps),
        every => (steps / every - done / every) + u64::from(done < steps && !steps.is_multiple_of(every)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remaining_time_is_returned_once_and_excludes_the_first_step() {
        let mut pace = Pace::default();
        pace.add_evaluation(20.0);
        pace.add_evaluation(1.0);
        assert_eq!(pace.add_step(60.0, 59, 6), None);
        assert_eq!(pace.add_step(5.0, 58, 6), None);
        let message = pace.add_step(7.0, 57, 6).unwrap_or_default();
        assert_eq!(message, "about 8 min left: 57 steps of 6.0 s, 6 evaluations of 20.0 s");
        assert_eq!(pace.add_step(7.0, 56, 6), None);
    }

    #[test]
    fn a_finished_run_has_no_remaining_time() {
        let mut pace = Pace::default();
        assert!((0..3).rev().all(|left| pace.add_step(1.0, left, 0).is_none()));
    }

    #[test]
    fn counts_the_evaluation_after_the_last_step_once() {
        assert_eq!([10, 7, 20, 0].map(|every| evaluations_left(3, 20, every)), [2, 3, 1, 1]);
        assert_eq!([10, 7, 20, 0].map(|every| evaluations_left(20, 20, every)), [0; 4]);
    }
}
