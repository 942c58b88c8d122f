//! The remaining time of a run, logged once the first steps are known.

use crate::progress::{counted, duration};

/// The pace is logged after this number of steps of the process. The first is left out: it also encodes prompts and
/// clips, and fills caches.
const STEPS: usize = 3;

/// Seconds of the first steps of this process and of its first evaluation.
#[derive(Default)]
pub(super) struct Pace {
    steps: Vec<f64>,
    evaluation: Option<f64>,
}

impl Pace {
    /// An evaluation took this long. That before training is like the later ones.
    pub(super) fn evaluated(&mut self, seconds: f64) {
        self.evaluation.get_or_insert(seconds);
    }

    /// A step took this long. Once, after the first steps, returns the message on the steps and evaluations that are
    /// left.
    pub(super) fn stepped(&mut self, seconds: f64, steps_left: u64, evaluations_left: u64) -> Option<String> {
        if self.steps.len() == STEPS {
            return None;
        }
        self.steps.push(seconds);
        if self.steps.len() < STEPS || steps_left == 0 {
            return None;
        }
        let step = self.steps[1..].iter().sum::<f64>() / (STEPS - 1) as f64;
        let mut seconds = step * steps_left as f64;
        let mut parts = format!("{} of {}", counted(steps_left, "step"), duration(step));
        match self.evaluation.filter(|_| evaluations_left > 0) {
            Some(evaluation) => {
                seconds += evaluation * evaluations_left as f64;
                parts += &format!(", {} of {}", counted(evaluations_left, "evaluation"), duration(evaluation));
            }
            None if evaluations_left > 0 => parts += ", and evaluations",
            None => {}
        }
        Some(format!("about {} left: {parts}", duration(seconds)))
    }
}

/// Evaluations after the step `done` of `steps`: every so often, and after the last.
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
    fn the_time_left_is_told_once_and_without_the_first_step() {
        let mut pace = Pace::default();
        pace.evaluated(20.0);
        pace.evaluated(1.0);
        assert_eq!(pace.stepped(60.0, 59, 6), None);
        assert_eq!(pace.stepped(5.0, 58, 6), None);
        let told = pace.stepped(7.0, 57, 6).unwrap_or_default();
        assert_eq!(told, "about 8 min left: 57 steps of 6.0 s, 6 evaluations of 20.0 s");
        assert_eq!(pace.stepped(7.0, 56, 6), None);
    }

    #[test]
    fn nothing_is_told_of_a_run_that_is_over() {
        let mut pace = Pace::default();
        assert!((0..3).rev().all(|left| pace.stepped(1.0, left, 0).is_none()));
    }

    #[test]
    fn the_last_step_is_evaluated_once() {
        assert_eq!([10, 7, 20, 0].map(|every| evaluations_left(3, 20, every)), [2, 3, 1, 1]);
        assert_eq!([10, 7, 20, 0].map(|every| evaluations_left(20, 20, every)), [0; 4]);
    }
}
