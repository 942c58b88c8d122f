//! Estimates of a training run before it is started: memory by kind of tensor, and time by phase.
//!
//! Weights, gradients and optimizer state are counted exactly, from the shapes. The rest of a step's memory is a
//! formula whose factors were measured on the CPU, where all values are f32 whatever the storage dtype. Dtypes, tiles
//! and the location of weights are taken from the [`Layout`] that the loader executes, too.

mod memory;
mod needs;
mod presets;
#[cfg(test)]
mod tests;
mod time;

use roll_core::plan::PlanInput;
use roll_core::{Noise, Result};

pub use needs::needs;
pub use presets::PublishedModel;

use super::dit::{Trainable, lora_parameters};
use super::layout::{Layout, VideoLayout};
use super::networks::Networks;
use super::vae::VaeConfig;

/// A run whose memory and time are estimated.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Where the model's parts lie.
    pub layout: Layout,
    /// What the run's videos keep on the device.
    pub video: VideoLayout,
    /// The videos, the passes of the algorithm, the ranks and the memory of a device.
    pub input: PlanInput,
    /// The trained part of each trained expert.
    pub trainable: Trainable,
    /// Whether the model keeps a copy of the adapter that training starts from, for passes of the KL's reference.
    pub keeps_initial_adapter: bool,
    /// Names of the trained experts, `dit` (high noise) and `dit2`.
    pub trained_experts: Vec<String>,
    /// Tokens of the prompt, padding included.
    pub text_len: usize,
}

impl Plan {
    /// A plan of a run on `layout` that trains `trainable` of `trained_experts`.
    pub fn new(
        layout: Layout,
        input: PlanInput,
        trainable: Trainable,
        trained_experts: Vec<String>,
        text_len: usize,
    ) -> Result<Self> {
        let size = input.size.unwrap_or(DEFAULT_SIZE);
        let latents = latent_size(&layout.networks.vae, input.frames, size);
        let trained = trained_elements(&layout.networks, &trainable)? * trained_experts.len();
        let video = layout.video(trained, latents);
        Ok(Self { layout, video, input, trainable, keeps_initial_adapter: false, trained_experts, text_len })
    }

    /// The networks.
    pub(super) fn networks(&self) -> &Networks {
        &self.layout.networks
    }

    /// Number of trained elements of all experts.
    pub fn trained_elements(&self) -> Result<usize> {
        Ok(trained_elements(self.networks(), &self.trainable)? * self.trained_experts.len())
    }

    /// Height and width in pixels.
    pub(super) fn size(&self) -> [usize; 2] {
        self.input.size.unwrap_or(DEFAULT_SIZE)
    }

    /// Shape of the latents without channels: frames, height, width.
    pub(super) fn latent_size(&self) -> [usize; 3] {
        latent_size(&self.networks().vae, self.input.frames, self.size())
    }

    /// Number of tokens of a video.
    pub fn tokens(&self) -> usize {
        let [t, h, w] = self.latent_size();
        let [pt, ph, pw] = self.networks().dit.patch;
        t.div_ceil(pt) * h.div_ceil(ph) * w.div_ceil(pw)
    }

    /// Whether the tokens of a video can be sharded among the `count` ranks of a group.
    pub(super) fn can_shard_tokens(&self, count: usize) -> bool {
        let (ranks, heads) = (self.input.ranks(), self.networks().dit.heads);
        // With stage 3, all ranks gather weights together. A rank that waits for its group would block the other
        // groups, so a group has one rank or all.
        let allowed = self.input.division.stage < 3 || count == 1 || count == ranks;
        allowed && [ranks, self.tokens(), heads].iter().all(|n| n.is_multiple_of(count))
    }

    /// Number of tokens that a rank computes.
    pub fn own_tokens(&self) -> usize {
        self.tokens().div_ceil(self.input.division.token_ranks.max(1))
    }
}

/// Height and width of videos in pixels if each clip has its own size.
const DEFAULT_SIZE: [usize; 2] = [480, 832];

/// Shape of the latents of a video without channels: frames, height, width.
fn latent_size(vae: &VaeConfig, frames: usize, [height, width]: [usize; 2]) -> [usize; 3] {
    let space = vae.spatial_stride();
    [frames.saturating_sub(1) / vae.temporal_stride() + 1, height.div_ceil(space), width.div_ceil(space)]
}

/// Number of trained elements of one expert.
fn trained_elements(networks: &Networks, trainable: &Trainable) -> Result<usize> {
    Ok(match trainable {
        Trainable::Frozen => 0,
        Trainable::Full => networks.dit_elements(),
        Trainable::Lora { .. } | Trainable::Layers { .. } => {
            // Names and shapes do not depend on the draws.
            let (specs, _) = lora_parameters(&networks.dit, trainable, &Noise::new(0))?;
            specs.iter().map(|spec| spec.len()).sum()
        }
    })
}
