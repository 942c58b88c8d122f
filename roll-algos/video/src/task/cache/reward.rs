//! A reward whose targets are cached.

use roll_core::{Grad, Measure, OnMissing, Pullback, Result, RewardScorer, Score, Target, Video};
use roll_external::Fingerprint;

use super::CacheStore;

/// Wraps a reward.
pub struct CachedReward {
    inner: Box<dyn RewardScorer>,
    key: String,
    store: CacheStore,
}

impl CachedReward {
    /// Wraps `inner`. Returns it unchanged if it has no key for its targets, or compares videos.
    pub fn wrap(inner: Box<dyn RewardScorer>, store: &CacheStore) -> Result<Box<dyn RewardScorer>> {
        match inner.target_key()? {
            Some(key) if !inner.compares() => Ok(Box::new(Self { inner, key, store: store.clone() })),
            _ => Ok(inner),
        }
    }
}

// `score_group` has its default, because a reward that compares videos is not wrapped.
impl RewardScorer for CachedReward {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn measures(&self) -> Measure {
        self.inner.measures()
    }

    fn terms(&self) -> Vec<(String, f64)> {
        self.inner.terms()
    }

    fn differentiable(&self) -> bool {
        self.inner.differentiable()
    }

    fn reads_reference(&self) -> bool {
        self.inner.reads_reference()
    }

    fn prepare(&mut self, reference: &Video) -> Result<Target> {
        let key = Fingerprint::new("target")
            .text("version", env!("CARGO_PKG_VERSION"))
            .text("reward", &self.key)
            .text("fps", reference.fps())
            .tensor("reference", reference.frames());
        let tensors = self.store.get("targets", &key.finish(), || Ok(self.inner.prepare(reference)?.tensors))?;
        Ok(Target::of(tensors))
    }

    fn score(&mut self, video: &Video, prompt: &str, target: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        self.inner.score(video, prompt, target, grad)
    }

    fn target_key(&self) -> Result<Option<String>> {
        Ok(Some(self.key.clone()))
    }

    fn is_elsewhere(&self) -> bool {
        self.inner.is_elsewhere()
    }

    fn check_prompt(&self, prompt: &str) -> Result<()> {
        self.inner.check_prompt(prompt)
    }

    fn unscorable(&self) -> Option<String> {
        self.inner.unscorable()
    }

    fn on_missing(&self) -> OnMissing {
        self.inner.on_missing()
    }
}
