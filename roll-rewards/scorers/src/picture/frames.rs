//! Selects the frames that a reward scores, and reduces their values to one.

use roll_core::{Error, OnMissing, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Greatest number of [`Frames::Uniform`]. A shorter video repeats frames, so the number decides how many are in
/// memory.
const MAX_UNIFORM: usize = 4096;

/// Which frames of a video are scored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Frames {
    /// All frames.
    #[default]
    All,
    /// The first frame.
    First,
    /// The last frame.
    Last,
    /// The first and the last frame.
    FirstAndLast,
    /// Every n-th frame, starting with the first.
    Every(usize),
    /// This number of frames at equal distances, including the first and the last; with 1, the middle frame. A shorter
    /// video repeats frames. At most 4096.
    Uniform(usize),
}

impl Frames {
    /// Indices of the frames in a video of `count` frames, ascending; empty for an empty video.
    pub fn of(self, count: usize) -> Vec<usize> {
        let Some(last) = count.checked_sub(1) else { return vec![] };
        match self {
            Self::All => (0..count).collect(),
            Self::First => vec![0],
            Self::Last => vec![last],
            Self::FirstAndLast if last == 0 => vec![0],
            Self::FirstAndLast => vec![0, last],
            Self::Every(n) => (0..count).step_by(n.max(1)).collect(),
            Self::Uniform(1) => vec![last / 2],
            // i * last / (n - 1), rounded to the nearest integer; halves are rounded up.
            Self::Uniform(n) => (0..n).map(|i| (2 * i * last + n - 1) / (2 * (n - 1))).collect(),
        }
    }

    /// Fails on the number 0, and on more frames than `Uniform` allows.
    pub fn check(self) -> Result<()> {
        const KEY: &str = "reward.frames";
        match self {
            Self::Every(0) | Self::Uniform(0) => Err(Error::config(KEY, "expected at least 1, found 0")),
            Self::Uniform(n) if n > MAX_UNIFORM => {
                Err(Error::config(KEY, format!("expected at most {MAX_UNIFORM} frames, found {n}")))
            }
            _ => Ok(()),
        }
    }
}

/// How the values of frames are reduced to one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OverFrames {
    /// The mean.
    #[default]
    Mean,
    /// The minimum. Only the frame with the minimum has a gradient.
    Min,
    /// The value of the last scored frame.
    Last,
}

/// Fails, and names the key, if `on_missing` is a score that is not finite.
pub fn check_on_missing(on_missing: OnMissing) -> Result<()> {
    match on_missing {
        OnMissing::Value(value) if !value.is_finite() => {
            Err(Error::config("reward.on_missing", "expected skip, error, or a finite value"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_score_that_is_not_finite_is_named_by_its_key() {
        assert!(check_on_missing(OnMissing::Value(0.5)).is_ok());
        let error = check_on_missing(OnMissing::Value(f64::NAN)).unwrap_err();
        assert!(error.to_string().contains("reward.on_missing"));
    }

    #[test]
    fn frame_selections_have_the_documented_indices() {
        assert_eq!(Frames::All.of(3), [0, 1, 2]);
        assert_eq!(Frames::FirstAndLast.of(5), [0, 4]);
        assert_eq!(Frames::FirstAndLast.of(1), [0]);
        assert_eq!(Frames::Every(4).of(9), [0, 4, 8]);
        assert_eq!(Frames::Uniform(4).of(81), [0, 27, 53, 80]);
        assert_eq!(Frames::Uniform(5).of(5), [0, 1, 2, 3, 4]);
        assert_eq!(Frames::Uniform(1).of(9), [4]);
        assert_eq!(Frames::Uniform(4).of(2), [0, 0, 1, 1]);
        assert!(Frames::Uniform(4).of(0).is_empty());
        assert!(Frames::Uniform(0).check().is_err());
        assert!(Frames::Uniform(4096).check().is_ok());
        let told = Frames::Uniform(1_000_000_000).check().unwrap_err().to_string();
        assert!(told.contains("reward.frames") && told.contains("at most 4096"), "{told}");
    }
}
