//! Slow copies of the parameters: the policy that generates, and the one that is evaluated.

use serde::{Deserialize, Serialize};

/// How much of the old policy stays when it follows the current one: `old <- d old + (1 - d) current`, d being a
/// function of the steps done. Those of DiffusionNFT (arXiv:2509.16117), by its numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OldDecay {
    /// d = 0: the current policy (type 0).
    Follow,
    /// d = min(0.001 n, 0.5) (type 1).
    #[default]
    Ramp,
    /// d = 0 before step 75, then min(0.0075 (n - 75), 0.999) (type 2).
    LateRamp,
}

impl OldDecay {
    /// d after step `n`, counted from 0.
    pub fn at(self, n: u64) -> f64 {
        match self {
            Self::Follow => 0.0,
            Self::Ramp => (0.001 * n as f64).min(0.5),
            Self::LateRamp if n < 75 => 0.0,
            Self::LateRamp => (0.0075 * (n - 75) as f64).min(0.999),
        }
    }
}

/// Weight of the copy that is evaluated after `n` updates, of which at most `most`: `min((1 + n) / (10 + n), most)`.
pub fn evaluation_decay(n: u64, most: f64) -> f64 {
    ((1 + n) as f64 / (10 + n) as f64).min(most)
}

/// `copy <- d copy + (1 - d) current`, in f32.
pub fn blend(copy: &mut [f32], current: &[f32], d: f64) {
    let (stays, comes) = (d as f32, (1.0 - d) as f32);
    copy.iter_mut().zip(current).for_each(|(copy, current)| *copy = stays * *copy + comes * current);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_decay_stays_below_one() {
        for decay in [OldDecay::Follow, OldDecay::Ramp, OldDecay::LateRamp] {
            for n in [0, 1, 74, 75, 76, 1000, u64::MAX] {
                assert!((0.0..1.0).contains(&decay.at(n)), "{decay:?} {n}");
            }
            assert_eq!(decay.at(0), 0.0);
        }
        assert_eq!((OldDecay::Ramp.at(100), OldDecay::LateRamp.at(77)), (0.1, 0.015));
        assert_eq!(evaluation_decay(u64::MAX / 2, 0.9), 0.9);
    }
}
