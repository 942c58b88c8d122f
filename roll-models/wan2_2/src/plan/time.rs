//! Time of a step, phase by phase.

use roll_core::plan::PhaseCost;

use super::super::dit::Trainable;
use super::super::options::{IdleExpert, Placement};
use super::super::vae::{Tiling, VaeConfig};
use super::Plan;

/// Bytes per second from pageable host memory to a GPU.
const HOST_RATE: f64 = 10e9;
/// Rates of the decoder and of its pull on a GPU, in bf16, relative to the rate of the transformer. Measured on an H200:
/// 123 and 181 of 550 TFLOP/s (bench/results/gpu/2026-11-28-h200.md).
const DECODER_RATES: [f64; 2] = [0.22, 0.33];
/// Operations of a 3x3x3 convolution per position, input channel and output channel: 27 products and 27 sums.
const CONV3D_FLOPS: f64 = 2.0 * 27.0;
/// Operations of a 3x3 convolution per position, input channel and output channel.
const CONV2D_FLOPS: f64 = 2.0 * 9.0;

/// Passes of a transformer in one phase of a step.
struct TransformerPasses {
    count: f64,
    /// Floating-point operations of one pass.
    flops: f64,
    /// How often a pass exchanges tokens for heads and back. An exchange does not overlap computation.
    exchanges: f64,
}

impl Plan {
    /// The phases of a step, of all samples of a rank, under the names of their metrics. Transfers overlap computation
    /// if weights are prefetched.
    pub fn time(&self) -> Vec<PhaseCost> {
        let (input, speed) = (&self.input, self.input.speed);
        let (forward_flops, pull_flops) = (self.forward_flops(), self.pull_flops());
        let pixels = (input.frames * self.size().iter().product::<usize>()) as f64;
        let decode_flops = decoder_flops(&self.networks().vae) * pixels * self.tile_overlap();
        let [without_gradient, with_gradient] = input.passes.decoded();
        let [samples, velocities, recorded, references] =
            [input.samples, input.passes.forward, input.passes.pulled, input.passes.references()].map(|n| n as f64);
        // Only a GPU has a memory of its own.
        let is_gpu = input.memory.is_some();
        let [decode_rate, decoder_pull_rate] = if is_gpu { DECODER_RATES } else { [1.0; 2] };
        let decoder = |name: &str, flops: f64, rate: f64| PhaseCost {
            name: name.into(),
            flops,
            moved: 0.0,
            seconds: flops / (speed.flops * rate),
        };
        let rollout = TransformerPasses { count: samples * velocities, flops: forward_flops, exchanges: 1.0 };
        let reference = TransformerPasses { count: samples * references, flops: forward_flops, exchanges: 1.0 };
        let decoded = samples * (without_gradient + with_gradient) as f64;
        let pull = TransformerPasses { count: samples * recorded, flops: pull_flops, exchanges: 2.0 };
        let mut phases = vec![
            self.transformer_cost("time/rollout", rollout),
            self.transformer_cost("time/reference", reference),
            decoder("time/decode", decoded * decode_flops, decode_rate),
            self.transformer_cost("time/pull", pull),
        ];
        if with_gradient > 0 {
            // The decoder is recomputed and then pulled back.
            let flops = samples * with_gradient as f64 * 2.0 * decode_flops;
            phases.push(decoder("time/pull (decoder)", flops, decoder_pull_rate));
        }
        phases.extend(self.expert_changes(self.layout.expert_bytes() as f64));
        phases
    }

    /// The cost of passes of a transformer.
    fn transformer_cost(&self, name: &str, passes: TransformerPasses) -> PhaseCost {
        let (input, speed) = (&self.input, self.input.speed);
        let weights = self.layout.expert_bytes() as f64;
        // The bytes of weights that a pass transfers, and the rate of the transfer.
        let (moved_per_pass, rate) = match self.layout.placement {
            Placement::Sharded => (weights * (1.0 - 1.0 / input.ranks() as f64), speed.link),
            Placement::Streamed => (weights, speed.read),
            Placement::Host => (weights, HOST_RATE),
            Placement::Auto | Placement::Resident => (0.0, speed.link),
        };
        let overlaps = match self.layout.placement {
            Placement::Streamed | Placement::Host => true,
            Placement::Sharded => input.division.overlap_comm,
            Placement::Auto | Placement::Resident => false,
        };
        let (flops, moved) = (passes.flops * passes.count, moved_per_pass * passes.count);
        let exchanged = passes.exchanges * self.all_to_all_bytes() * passes.count;
        let (compute, transfer) = (flops / speed.flops, moved / rate);
        let seconds = if overlaps { compute.max(transfer) } else { compute + transfer };
        PhaseCost { name: name.into(), flops, moved: moved + exchanged, seconds: seconds + exchanged / speed.link }
    }

    /// The changes of experts that take turns on the device. `weights` are the bytes of one expert. `None` if no expert
    /// is moved as a whole.
    fn expert_changes(&self, weights: f64) -> Option<PhaseCost> {
        let rate = match (self.layout.placement, self.layout.idle) {
            (Placement::Auto | Placement::Resident, IdleExpert::Host) => HOST_RATE,
            (Placement::Auto | Placement::Resident, IdleExpert::Drop) => self.input.speed.read,
            _ => return None,
        };
        let samples = self.input.samples;
        // A round uses both experts in turn, so it has two changes.
        let rounds = match (&self.input.passes.videos, &self.trained_experts[..]) {
            // Videos that are compared with one another. The rollouts of all samples share one round. The update of
            // each sample takes about two (more if a window of stochastic steps crosses the boundary).
            (Some(_), _) => 1 + 2 * samples,
            // The score is pulled back through the low-noise expert only. All samples pass through the frozen
            // high-noise expert first.
            (None, [trained]) if trained == "dit2" => 1,
            // The score is pulled back through the high-noise expert too. The samples pass through both one by one.
            (None, _) => samples,
        };
        let moved = 2.0 * weights * rounds as f64;
        Some(PhaseCost { name: "change of experts".into(), flops: 0.0, moved, seconds: moved / rate })
    }

    /// Latent pixels that the tiles of the VAE compute, overlaps counted again, divided by those of the frame.
    fn tile_overlap(&self) -> f64 {
        let [_, height, width] = self.latent_size();
        let tiles = |tiling: &Tiling| tiling.covered_pixels([height, width]) as f64 / (height * width).max(1) as f64;
        self.video.tiling.as_ref().map_or(1.0, tiles)
    }

    /// Bytes that a rank sends to the other ranks of its token group in a forward pass: queries, keys, values and
    /// results of self-attention, in f32.
    fn all_to_all_bytes(&self) -> f64 {
        let (dit, group) = (&self.networks().dit, self.input.division.token_ranks.max(1) as f64);
        // Four tensors of four bytes per value.
        let bytes_per_channel = 4.0 * 4.0;
        bytes_per_channel * (self.own_tokens() * dit.dim * dit.layers) as f64 * (1.0 - 1.0 / group)
    }

    /// Floating-point operations of a rank in one transformer pass.
    pub fn forward_flops(&self) -> f64 {
        let (tokens, text) = (self.own_tokens() as f64, self.text_len as f64);
        let dit = &self.networks().dit;
        let (dim, ffn, layers) = (dit.dim as f64, dit.ffn_dim as f64, dit.layers as f64);
        // Self-attention has four projections of every token, cross-attention two of it and two of the text.
        let products = 2.0 * tokens * (6.0 * dim * dim + 2.0 * dim * ffn) + 2.0 * text * 2.0 * dim * dim;
        layers * products + self.attention_flops()
    }

    /// Floating-point operations of the pullback of one recorded pass. Blocks are recomputed. The cotangent takes one
    /// product per weight, and a second one if the weight itself is trained. Attention stores no probabilities: its
    /// pullback has five products, the scores again and four derivatives, where the forward pass has two.
    pub fn pull_flops(&self) -> f64 {
        let (forward, attention) = (self.forward_flops(), self.attention_flops());
        let products_per_weight = if self.trainable == Trainable::Full { 2.0 } else { 1.0 };
        // The recomputation reads results of self-attention that were kept.
        let kept_flops = if self.video.keep_attention { self.self_attention_flops() } else { 0.0 };
        forward - kept_flops + products_per_weight * (forward - attention) + 2.5 * attention
    }

    /// Forward operations of the attention of all tokens to one another. Self-attention is sharded by heads.
    fn self_attention_flops(&self) -> f64 {
        let [own, tokens] = [self.own_tokens(), self.tokens()].map(|n| n as f64);
        4.0 * own * tokens * (self.networks().dit.dim * self.networks().dit.layers) as f64
    }

    /// Forward operations of the attention of all tokens to one another and to the text. Self-attention is sharded by
    /// heads.
    fn attention_flops(&self) -> f64 {
        let [own, tokens, text] = [self.own_tokens(), self.tokens(), self.text_len].map(|n| n as f64);
        4.0 * own * (tokens + text) * (self.networks().dit.dim * self.networks().dit.layers) as f64
    }
}

/// Floating-point operations of the decoder per pixel of a frame: its 3x3x3 convolutions, and the 3x3 convolutions of
/// the upsampling.
fn decoder_flops(vae: &VaeConfig) -> f64 {
    let stages = vae.dim_mult.len();
    let patch = vae.pixel_patch() as f64;
    // A residual block has two convolutions, and a stage of the decoder has one block more than one of the encoder.
    let convolutions = 2.0 * (vae.num_res_blocks as f64 + 1.0);
    let mut flops = 0.0;
    // Positions of a stage for each pixel of the result; stage 0 is the last, at full size.
    let mut positions = 1.0 / (patch * patch);
    for stage in 0..stages {
        let width = (vae.decoder_dim * vae.dim_mult[stage]) as f64;
        // The middle of the network, two residual blocks, has the size of the latents.
        let count = if stage + 1 == stages { convolutions + 4.0 } else { convolutions };
        flops += positions * count * CONV3D_FLOPS * width * width;
        if stage + 1 < stages {
            let input_width = (vae.decoder_dim * vae.dim_mult[stage + 1]) as f64;
            // The convolution of the upsampling, which halves the channels in the Wan2.1 VAE.
            flops += positions * CONV2D_FLOPS * input_width * input_width / 2.0;
            let time_factor = if vae.temporal_downsample[stage] { 2.0 } else { 1.0 };
            positions /= 4.0 * time_factor;
        }
    }
    flops
}
