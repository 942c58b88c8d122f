//! Times the phases of a training step.

use std::collections::BTreeMap;

use roll_core::{Progress, Result};

use super::trajectory::{Observer, Phase};
use crate::stopwatch::Stopwatch;

/// A stopwatch whose phases end when the next one begins.
pub(super) struct Watch<'a>(Stopwatch<'a>);

impl<'a> Watch<'a> {
    pub(super) fn new(progress: &'a dyn Progress) -> Self {
        Self(Stopwatch::new(progress, &METRICS))
    }

    /// Ends the current phase and returns the seconds of each phase and of the whole step.
    pub(super) fn seconds(self) -> BTreeMap<&'static str, f64> {
        self.0.seconds()
    }
}

impl Observer for Watch<'_> {
    /// Fails if the user requested a stop.
    fn begin(&mut self, phase: Phase) -> Result<()> {
        self.0.begin(metric(phase), words(phase).as_deref())
    }
}

const METRICS: [&str; 8] = [
    "time/encode",
    "time/rollout",
    "time/reference",
    "time/decode",
    "time/score",
    "time/pull",
    "time/data",
    "time/optimizer",
];

fn metric(phase: Phase) -> &'static str {
    match phase {
        Phase::Encode => "time/encode",
        Phase::Rollout { .. } => "time/rollout",
        Phase::Reference { .. } => "time/reference",
        Phase::Decode => "time/decode",
        Phase::Score => "time/score",
        Phase::PullReward | Phase::Pull { .. } => "time/pull",
        Phase::Data => "time/data",
        Phase::Optimizer => "time/optimizer",
    }
}

fn words(phase: Phase) -> Option<String> {
    Some(match phase {
        Phase::Encode => "encoding prompt and reference".into(),
        Phase::Rollout { step, of } => format!("denoising step {} of {of}", step + 1),
        Phase::Reference { .. } => return None,
        Phase::Decode => "decoding".into(),
        Phase::Score => "scoring".into(),
        Phase::PullReward => "pulling back through reward and decoder".into(),
        Phase::Pull { step, of } => format!("pulling back through denoising step {} of {of}", step + 1),
        Phase::Data => "training on the clip".into(),
        Phase::Optimizer => "updating parameters".into(),
    })
}
