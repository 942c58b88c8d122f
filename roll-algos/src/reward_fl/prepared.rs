//! What depends on a sample alone: its conditioning and the reward's target.

use std::collections::VecDeque;
use std::sync::Arc;

use roll_core::{
    ConditionInput, Conditioning, DiffusionModel, Result, ResultExt, RewardScorer, Sample, Target, Tensor, Video,
};

use super::Reference;

/// Prompts and pictures are encoded anew when all remembered ones exceed this: host memory is the decoder's.
const REMEMBERED_BYTES: usize = 256 << 20;

/// Conditioning and target of one sample.
pub(super) struct Prepared {
    pub(super) conditioning: Conditioning,
    pub(super) target: Target,
}

impl Prepared {
    pub(super) fn new(
        model: &mut dyn DiffusionModel,
        reward: &mut dyn RewardScorer,
        sample: &Sample,
        reference: Reference,
    ) -> Result<Self> {
        let reference = reference_video(sample, reference)?;
        let target = reward.prepare(&reference).while_doing(|| format!("preparing the reward `{}`", reward.name()))?;
        Ok(Self { conditioning: conditioning(model, sample)?, target })
    }

    fn bytes(&self) -> usize {
        let Conditioning { context, channels, image_tokens, first_frame, .. } = &self.conditioning;
        let conditioning = [Some(context), channels.as_ref(), image_tokens.as_ref(), first_frame.as_ref()];
        conditioning.into_iter().flatten().chain(self.target.tensors.values()).map(|t| t.as_bytes().len()).sum()
    }
}

/// Prompt and pictures of a sample as the model takes them.
pub(super) fn conditioning(model: &mut dyn DiffusionModel, sample: &Sample) -> Result<Conditioning> {
    let [frames, height, width] = sample.video.dims();
    model.encode(&ConditionInput {
        prompt: sample.prompt.clone(),
        image: Some(sample.reference_image()?),
        end_image: sample.end_image.clone(),
        frames,
        size: [height, width],
    })
}

/// What the reward compares the sample's result with.
pub(super) fn reference_video(sample: &Sample, reference: Reference) -> Result<Arc<Video>> {
    let still = |image: Tensor| -> Result<_> {
        let shape = [&[1], image.shape()].concat();
        Ok(Arc::new(Video::new(image.reshape(shape)?, sample.video.fps())?))
    };
    match reference {
        Reference::Clip => Ok(sample.video.clone()),
        Reference::Image => still(sample.reference_image()?),
        Reference::FirstFrame => {
            let [_, height, width] = sample.video.dims();
            still(Tensor::new(sample.video.frame(0).to_vec(), [3, height, width])?)
        }
    }
}

/// The last prepared samples, as many as fit.
#[derive(Default)]
pub(super) struct PreparedSamples {
    entries: VecDeque<(u64, String, Arc<Prepared>)>,
}

impl PreparedSamples {
    pub(super) fn get(&self, sample: &Sample) -> Option<Arc<Prepared>> {
        let same = |(index, origin, _): &&(u64, String, _)| *index == sample.index && *origin == sample.origin;
        self.entries.iter().find(same).map(|(_, _, prepared)| prepared.clone())
    }

    pub(super) fn insert(&mut self, sample: &Sample, prepared: Prepared) -> Arc<Prepared> {
        let prepared = Arc::new(prepared);
        self.entries.push_back((sample.index, sample.origin.clone(), prepared.clone()));
        while self.entries.iter().map(|(_, _, p)| p.bytes()).sum::<usize>() > REMEMBERED_BYTES {
            self.entries.pop_front();
        }
        prepared
    }
}
