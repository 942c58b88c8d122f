//! Caches of values that depend on a sample alone: its conditioning and the reward's target.

use std::collections::BTreeMap;
use std::sync::Arc;

use roll_core::{
    ConditionInput, Conditioning, DiffusionModel, Result, ResultExt, RewardScorer, Sample, Target, Tensor,
};

use super::{Reference, reference_video};
use crate::sample_cache::{Bytes, SampleCache};
use crate::sampling::{Conditions, negative_context};

/// Most bytes of conditionings in memory: about 75 clips of 480x480 with 81 frames. `data.cache_dir` keeps more on
/// disk.
const CONDITIONING_BYTES: usize = 1 << 30;
/// Most bytes of targets in memory. Targets are far smaller than conditionings.
const TARGET_BYTES: usize = 64 << 20;

/// Conditionings and targets of samples, kept from step to step.
pub(crate) struct Prepared {
    conditionings: SampleCache<Conditioning>,
    targets: SampleCache<PreparedTarget>,
    /// The embedding of the negative prompt, which all samples share.
    negative_context: Option<Tensor>,
    /// Latents after the steps of the high-noise expert, for samples that are about to be evaluated. The key is index
    /// and origin of the sample.
    pub(super) high_noise_latents: BTreeMap<(u64, String), Tensor>,
}

/// The reference of a sample, as prepared by the reward.
pub(crate) enum PreparedTarget {
    /// The reward's target.
    Target(Target),
    /// The reference has nothing to compare with, for this reason.
    Missing(String),
}

impl Default for Prepared {
    fn default() -> Self {
        let (conditionings, targets) = (SampleCache::new(CONDITIONING_BYTES), SampleCache::new(TARGET_BYTES));
        Self { conditionings, targets, negative_context: None, high_noise_latents: BTreeMap::new() }
    }
}

impl Prepared {
    /// Returns the conditions of a sample's video. They are encoded once, as long as the cache has room.
    /// `negative_prompt` is given if guidance is used.
    pub(crate) fn conditions(
        &mut self,
        model: &mut dyn DiffusionModel,
        sample: &Sample,
        negative_prompt: Option<&str>,
    ) -> Result<Conditions> {
        let conditioning = self.conditionings.get_or_insert(sample, || model.encode(&input(sample)?))?;
        if let (Some(prompt), None) = (negative_prompt, &self.negative_context) {
            self.negative_context = Some(negative_context(model, input(sample)?, prompt)?);
        }
        Ok(Conditions::new(&conditioning, negative_prompt.and(self.negative_context.clone())))
    }

    /// Returns the prepared reference of a sample for the reward of training. It is prepared once, as long as the cache
    /// has room.
    pub(crate) fn target(
        &mut self,
        reward: &mut dyn RewardScorer,
        sample: &Sample,
        reference: Reference,
    ) -> Result<Arc<PreparedTarget>> {
        self.targets.get_or_insert(sample, || PreparedTarget::new(reward, sample, reference))
    }
}

impl PreparedTarget {
    /// Prepares the reference of a sample. A reference with nothing to compare with is not an error here, because the
    /// reward's policy for missing scores applies later. A sample without a reference gets a target with its columns
    /// only, and is an error if the reward reads the reference.
    pub(crate) fn new(reward: &mut dyn RewardScorer, sample: &Sample, reference: Reference) -> Result<Self> {
        let video = match reference_video(sample, reference)? {
            Some(video) => video,
            None if reward.reads_reference() => sample.clip()?.clone(),
            None => return Ok(Self::Target(Target { columns: sample.columns.clone(), ..Target::default() })),
        };
        match reward.prepare(&video) {
            Ok(target) => Ok(Self::Target(Target { columns: sample.columns.clone(), ..target })),
            Err(error) => match error.missing_reason() {
                Some(reason) => Ok(Self::Missing(reason.into())),
                None => Err(error).while_doing(|| format!("preparing the reward `{}`", reward.name())),
            },
        }
    }
}

impl Bytes for PreparedTarget {
    fn bytes(&self) -> usize {
        match self {
            Self::Target(target) => target.tensors.values().map(|t| t.as_bytes().len()).sum(),
            Self::Missing(reason) => reason.len(),
        }
    }
}

/// The prompt and the pictures of a sample.
fn input(sample: &Sample) -> Result<ConditionInput> {
    let [frames, height, width] = sample.video.dims();
    Ok(ConditionInput {
        prompt: sample.prompt.clone(),
        image: sample.reference_image()?,
        end_image: sample.end_image.clone(),
        frames,
        size: [height, width],
    })
}
