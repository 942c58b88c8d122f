//! The seconds of the phases of a step, and the user's request to stop.

use std::collections::BTreeMap;
use std::time::Instant;

use roll_core::{Communicator, Error, Progress, Result, communicator};

// Names of metrics: the seconds of each phase of a step.

/// Encoding of texts and videos.
pub const ENCODE: &str = "time/encode";
/// Denoising of videos, or generation of episodes.
pub const ROLLOUT: &str = "time/rollout";
/// Decoding of latents to frames by the VAE.
pub const DECODE: &str = "time/decode";
/// Scoring by the reward.
pub const SCORING: &str = "time/score";
/// Passes of the reference policy, which a KL compares the trained policy with.
pub const REFERENCE: &str = "time/reference";
/// Passes of the model that are recorded for a gradient.
pub const FORWARD: &str = "time/forward";
/// Pulls of recorded passes, which compute the gradient.
pub const PULL: &str = "time/pull";
/// Training on clips of the data set, next to training on generated videos.
pub const DATA: &str = "time/data";
/// The optimizer's update.
pub const OPTIMIZER: &str = "time/optimizer";

/// Measures the seconds of the phases of a step. A phase ends when the next one begins.
pub struct Stopwatch<'a> {
    progress: &'a dyn Progress,
    started: Instant,
    /// Metric and start of the running phase.
    running: Option<(&'static str, Instant)>,
    seconds: BTreeMap<&'static str, f64>,
}

impl<'a> Stopwatch<'a> {
    /// Starts a stopwatch. Each of `metrics` is reported, as 0 seconds if its phase never runs.
    pub fn new(progress: &'a dyn Progress, metrics: &[&'static str]) -> Self {
        let seconds = metrics.iter().map(|m| (*m, 0.0)).collect();
        Self { progress, started: Instant::now(), running: None, seconds }
    }

    /// Begins a phase, whose seconds are added to `metric`, and shows `description` to the user. Fails if the user
    /// asked to stop.
    pub fn begin(&mut self, metric: &'static str, description: Option<&str>) -> Result<()> {
        if self.progress.interrupted() {
            return Err(Error::Interrupted);
        }
        self.begin_after_update(metric, description);
        Ok(())
    }

    /// As [`Stopwatch::begin`], but does not fail if the user asked to stop, because a step must end once parameters
    /// have changed.
    pub fn begin_after_update(&mut self, metric: &'static str, description: Option<&str>) {
        self.end_phase();
        if let Some(description) = description {
            self.progress.phase(description);
        }
        self.running = Some((metric, Instant::now()));
    }

    /// Ends the running phase and returns the seconds of each phase and of the whole step. Each is the maximum over
    /// ranks, because the other ranks wait for the slowest one.
    pub fn seconds(mut self, ranks: &dyn Communicator) -> Result<BTreeMap<String, f64>> {
        self.end_phase();
        self.seconds.insert("time/step", self.started.elapsed().as_secs_f64());
        let measured: BTreeMap<String, f64> = self.seconds.into_iter().map(|(name, s)| (name.to_string(), s)).collect();
        let mut longest = measured.clone();
        for (name, seconds) in communicator::join(ranks, &measured)?.into_iter().flatten() {
            longest.entry(name).and_modify(|most| *most = most.max(seconds));
        }
        Ok(longest)
    }

    /// Ends the running phase, if there is one, and adds its seconds to its metric.
    fn end_phase(&mut self) {
        if let Some((metric, start)) = self.running.take() {
            *self.seconds.entry(metric).or_default() += start.elapsed().as_secs_f64();
        }
    }
}
