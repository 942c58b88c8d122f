//! The window: the denoising steps of a rollout that are stochastic and trained.

use std::ops::Range;

use roll_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// How the window of stochastic steps moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WindowKind {
    /// The window stays at the first step of its range.
    Fixed,
    /// Each prompt draws one place in each round (training step) for all of its videos. With a window each, scores
    /// within a group would also differ because of where noise was added.
    #[default]
    Random,
    /// The window moves over the range as training goes on. Behind the end of the range it begins again at the start
    /// (MixGRPO, arXiv:2507.21802).
    Sliding,
}

/// The windows of a run, within a range of denoising steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Windows {
    /// How the window moves.
    pub kind: WindowKind,
    /// Number of steps of a window.
    pub size: usize,
    /// The steps that a window may hold.
    pub range: Range<usize>,
    /// Number of steps by which a sliding window moves.
    pub stride: usize,
    /// Rounds (training steps) that a sliding window stays in one place.
    pub rounds: u64,
}

impl Windows {
    /// Fails if the size, the stride or the number of rounds is 0, or if no step is left for a window.
    pub fn check(&self) -> Result<()> {
        let (size, stride) = (self.size as u64, self.stride as u64);
        for (name, value) in [("window", size), ("window_stride", stride), ("window_rounds", self.rounds)] {
            if value == 0 {
                return Err(Error::config(name, "must be at least 1, found 0"));
            }
        }
        match self.range.is_empty() {
            true => Err(Error::config("window", "no step is left that could be stochastic and trained")),
            false => Ok(()),
        }
    }

    /// The mean of the first steps of all windows.
    pub fn mean_start(&self) -> f64 {
        let Range { start, .. } = self.range;
        start as f64 + (self.places() - 1) as f64 / 2.0 * self.distance() as f64
    }

    /// Whether every window begins at step 0.
    pub fn all_start_at_zero(&self) -> bool {
        self.mean_start() == 0.0
    }

    /// Number of different first steps of windows.
    fn places(&self) -> usize {
        let Range { start, end } = self.range;
        match self.kind {
            WindowKind::Fixed => 1,
            WindowKind::Random => (end - start).saturating_sub(self.size) + 1,
            WindowKind::Sliding => (end - start).div_ceil(self.stride),
        }
    }

    /// Number of steps from one place to the next.
    fn distance(&self) -> usize {
        if self.kind == WindowKind::Sliding { self.stride } else { 1 }
    }

    /// The window of a prompt in round `round`. `draw` is the prompt's random number in [0, 1).
    pub fn at(&self, round: u64, draw: f64) -> Range<usize> {
        let Range { start, end } = self.range;
        let places = self.places();
        let place = match self.kind {
            WindowKind::Fixed => 0,
            WindowKind::Random => ((draw * places as f64) as usize).min(places - 1),
            WindowKind::Sliding => (round / self.rounds % places as u64) as usize,
        };
        let first = start + place * self.distance();
        first..(first + self.size).min(end)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn windows(kind: WindowKind) -> Windows {
        Windows { kind, size: 3, range: 2..9, stride: 2, rounds: 2 }
    }

    #[test]
    fn every_window_lies_in_its_range() {
        for kind in [WindowKind::Fixed, WindowKind::Random, WindowKind::Sliding] {
            let windows = windows(kind);
            windows.check().unwrap();
            for round in 0..40 {
                for draw in [0.0, 0.3, 0.999_999, 1.0f64.next_down()] {
                    let window = windows.at(round, draw);
                    assert!(!window.is_empty() && window.start >= 2 && window.end <= 9, "{kind:?} {window:?}");
                }
            }
        }
    }

    #[test]
    fn a_random_window_reaches_every_place_and_a_sliding_one_begins_again() {
        let random = windows(WindowKind::Random);
        let firsts: Vec<usize> = (0..5).map(|i| random.at(0, (f64::from(i) + 0.5) / 5.0).start).collect();
        assert_eq!(firsts, [2, 3, 4, 5, 6]);
        let sliding = windows(WindowKind::Sliding);
        let firsts: Vec<usize> = (0..10).map(|round| sliding.at(round, 0.0).start).collect();
        assert_eq!(firsts, [2, 2, 4, 4, 6, 6, 8, 8, 2, 2]);
    }

    #[test]
    fn mean_start_is_that_of_all_places() {
        for (kind, size) in
            [(WindowKind::Fixed, 3), (WindowKind::Random, 3), (WindowKind::Random, 9), (WindowKind::Sliding, 3)]
        {
            let windows = Windows { size, ..windows(kind) };
            let starts: Vec<usize> = (0..80).map(|i| windows.at(i, (i as f64 + 0.5) / 80.0).start).collect();
            let mean = starts.iter().sum::<usize>() as f64 / 80.0;
            assert_eq!(windows.mean_start(), mean, "{kind:?} {size}");
        }
    }

    #[test]
    fn empty_windows_are_errors() {
        for wrong in [
            Windows { size: 0, ..windows(WindowKind::Fixed) },
            Windows { range: 4..4, ..windows(WindowKind::Fixed) },
            Windows { stride: 0, ..windows(WindowKind::Sliding) },
            Windows { rounds: 0, ..windows(WindowKind::Sliding) },
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
    }
}
