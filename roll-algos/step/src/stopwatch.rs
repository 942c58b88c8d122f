//! The seconds of the phases of a step, and the user's request to stop.

use std::collections::BTreeMap;
use std::time::Instant;

use roll_core::{Communicator, Error, Progress, Result, communicator};

/// Seconds in the encoders of texts and videos; the constants that follow name the other phases of a step.
pub const ENCODE: &str = "time/encode";
/// The denoising or the generation of an episode.
pub const ROLLOUT: &str = "time/rollout";
/// The decoder of the VAE.
pub const DECODE: &str = "time/decode";
/// The reward.
pub const SCORING: &str = "time/score";
/// The policy that a KL compares with.
pub const REFERENCE: &str = "time/reference";
/// Passes of the model that are recorded.
pub const FORWARD: &str = "time/forward";
/// The gradient.
pub const PULL: &str = "time/pull";
/// Clips that are trained on beside what was generated.
pub const DATA: &str = "time/data";
/// The update.
pub const OPTIMIZER: &str = "time/optimizer";

/// Measures the seconds of the phases of a step. A phase ends when the next one begins.
pub struct Stopwatch<'a> {
    progress: &'a dyn Progress,
    started: Instant,
    running: Option<(&'static str, Instant)>,
    seconds: BTreeMap<&'static str, f64>,
}

impl<'a> Stopwatch<'a> {
    /// A stopwatch of these metrics. A phase that never runs is reported as 0.
    pub fn new(progress: &'a dyn Progress, metrics: &[&'static str]) -> Self {
        let seconds = metrics.iter().map(|m| (*m, 0.0)).collect();
        Self { progress, started: Instant::now(), running: None, seconds }
    }

    /// Begins a phase, whose seconds are added to `metric`. Fails if the user asked to stop.
    pub fn begin(&mut self, metric: &'static str, words: Option<&str>) -> Result<()> {
        if self.progress.interrupted() {
            return Err(Error::Interrupted);
        }
        self.begin_after_update(metric, words);
        Ok(())
    }

    /// Like [`Stopwatch::begin`] after parameters have changed, when the step can no longer be stopped.
    pub fn begin_after_update(&mut self, metric: &'static str, words: Option<&str>) {
        self.lap();
        if let Some(words) = words {
            self.progress.phase(words);
        }
        self.running = Some((metric, Instant::now()));
    }

    /// Ends the running phase and returns the seconds of each phase and of the whole step, each on the rank that took
    /// longest: the others wait for it.
    pub fn seconds(mut self, ranks: &dyn Communicator) -> Result<BTreeMap<String, f64>> {
        self.lap();
        self.seconds.insert("time/step", self.started.elapsed().as_secs_f64());
        let own: BTreeMap<String, f64> = self.seconds.into_iter().map(|(name, s)| (name.to_string(), s)).collect();
        let mut slowest = own.clone();
        for (name, seconds) in communicator::join(ranks, &own)?.into_iter().flatten() {
            slowest.entry(name).and_modify(|most| *most = most.max(seconds));
        }
        Ok(slowest)
    }

    fn lap(&mut self) {
        if let Some((metric, since)) = self.running.take() {
            *self.seconds.entry(metric).or_default() += since.elapsed().as_secs_f64();
        }
    }
}
