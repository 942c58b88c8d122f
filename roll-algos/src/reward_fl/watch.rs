//! Where the time of a step goes, and whether the user asked to stop.

use std::collections::BTreeMap;
use std::time::Instant;

use roll_core::{Error, Progress, Result};

use super::trajectory::{Observer, Phase};

/// Ends a phase when the next begins.
pub(super) struct Watch<'a> {
    progress: &'a dyn Progress,
    started: Instant,
    running: Option<(&'static str, Instant)>,
    seconds: BTreeMap<&'static str, f64>,
}

impl<'a> Watch<'a> {
    pub(super) fn new(progress: &'a dyn Progress) -> Self {
        // Phases that never run still show, as zero.
        let seconds = METRICS.iter().map(|m| (*m, 0.0)).collect();
        Self { progress, started: Instant::now(), running: None, seconds }
    }

    /// Ends the running phase and gives the seconds of each, and of the whole.
    pub(super) fn seconds(mut self) -> BTreeMap<&'static str, f64> {
        self.lap();
        self.seconds.insert("time/step", self.started.elapsed().as_secs_f64());
        self.seconds
    }

    fn lap(&mut self) {
        if let Some((metric, since)) = self.running.take() {
            *self.seconds.entry(metric).or_default() += since.elapsed().as_secs_f64();
        }
    }
}

impl Observer for Watch<'_> {
    /// Fails when the user asked to stop.
    fn begin(&mut self, phase: Phase) -> Result<()> {
        self.lap();
        if self.progress.interrupted() {
            return Err(Error::Interrupted);
        }
        if let Some(words) = words(phase) {
            self.progress.phase(&words);
        }
        self.running = Some((metric(phase), Instant::now()));
        Ok(())
    }
}

const METRICS: [&str; 7] =
    ["time/encode", "time/rollout", "time/reference", "time/decode", "time/score", "time/pull", "time/optimizer"];

fn metric(phase: Phase) -> &'static str {
    match phase {
        Phase::Encode => "time/encode",
        Phase::Rollout { .. } => "time/rollout",
        Phase::Reference { .. } => "time/reference",
        Phase::Decode => "time/decode",
        Phase::Score => "time/score",
        Phase::PullReward | Phase::Pull { .. } => "time/pull",
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
        Phase::Optimizer => "updating parameters".into(),
    })
}
