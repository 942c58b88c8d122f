//! Memory of a rank, item by item.

use roll_core::Result;
use roll_core::plan::MemoryItem;

use super::super::dit::Trainable;
use super::super::layout::{
    BLOCK_WORDS, CheckpointCount, F32_SIZE, RESERVE, attention_bytes, block_input_bytes, block_pullback_bytes,
};
use super::super::options::{IdleExpert, Placement};
use super::super::vae::{RESTORED_STATES, Tiling, decoder_bytes, feature_cache_bytes};
use super::Plan;

/// Bytes of the process itself.
const PROCESS: usize = 60 << 20;

impl Plan {
    /// The memory of a rank at its peak. The pullbacks of transformer and decoder run at different times, so only the
    /// larger one counts.
    pub fn memory(&self) -> Result<Vec<MemoryItem>> {
        let (networks, division) = (self.networks(), &self.input.division);
        // Only a GPU has a memory of its own.
        let (ranks, is_gpu) = (self.input.ranks(), self.input.memory.is_some());
        let mut items = vec![on_host("process", PROCESS, "60 MiB".into())];
        if is_gpu {
            let formula = "CUDA's context, rewards' networks; an estimate".into();
            items.push(on_device("context and rewards", RESERVE, formula));
        }
        // In full training, weights count twice: as they are loaded, and as f32 parameters.
        items.push(self.transformer_weights());
        let vae = networks.vae_elements();
        items.push(on_device("VAE weights", F32_SIZE * vae, format!("{vae} x 4 B")));
        let trained = self.trained_elements()?;
        items.push(self.trained_parameters(trained));
        if self.keeps_initial_adapter {
            let formula = format!("{trained} x 4 B, as in `model.lora_checkpoint`");
            items.push(on_device("reference of the KL", F32_SIZE * trained, formula));
        }
        let formula = format!("{trained} x 4 B, until they are reduced");
        items.push(on_device("gradients in the model", F32_SIZE * trained, formula));
        // Sums of gradients, optimizer state and buffers, as the ranks divide them.
        items.extend(division.memory(trained, ranks, is_gpu));

        items.push(self.block_inputs());
        items.extend(self.video.keep_attention.then(|| self.kept_attention()));
        items.push(self.largest_pullback());
        let [_, decoded_with_gradient] = self.input.passes.decoded();
        items.push(self.decoded_frames(decoded_with_gradient > 0));
        if self.layout.offload_inputs && is_gpu && decoded_with_gradient > 0 {
            items.push(self.offloaded_feature_caches());
        }
        Ok(items)
    }

    /// The frames of a video, f32: at most those before and after the clamp, and with a gradient the cotangents of
    /// both.
    fn decoded_frames(&self, has_gradient: bool) -> MemoryItem {
        let ([height, width], frames) = (self.size(), self.input.frames);
        let copies = if has_gradient { 4 } else { 2 };
        let bytes_per_pixel = 3 * F32_SIZE;
        let formula = format!("{copies} x {frames} frames x {height} x {width} pixels x {bytes_per_pixel} B");
        on_host("decoded frames", copies * frames * height * width * bytes_per_pixel, formula)
    }

    /// The decoder's states, its feature caches, that are kept at some borders of chunks. The pullback of the decoder
    /// recomputes each chunk (one latent frame) from them. States that are not offloaded count in
    /// [`Plan::decoder_pullback`] instead.
    fn offloaded_feature_caches(&self) -> MemoryItem {
        let ([chunks, ..], state) = (self.latent_size(), self.decoder_state());
        let count = chunks.saturating_sub(1).min(self.video.checkpoints.least());
        let more = match self.video.checkpoints {
            CheckpointCount::Of(_) => "",
            CheckpointCount::InHostMemory => "; more if memory allows, to recompute less",
        };
        on_host("decoder's feature caches", count * state, format!("{count} checkpoints x {state} B{more}"))
    }

    /// The inputs of the checkpointing segments of recorded passes. A segment keeps its input until its pullback, which
    /// recomputes the rest.
    fn block_inputs(&self) -> MemoryItem {
        let (tokens, dim, segments) = (self.own_tokens(), self.networks().dit.dim, self.networks().dit.segments());
        let (passes, element) = (self.input.passes.held(), self.layout.products.size());
        let input_bytes = |passes: usize| passes * block_input_bytes(&self.networks().dit, tokens, element);
        // If inputs are offloaded, the device holds those of the passes that fit. It also holds, in f32, the input in
        // use and the one in flight of the other passes. On the CPU, device and host are the same memory, and the
        // copies are made all the same.
        let on_device = if self.layout.offload_inputs { self.video.passes_on_device.min(passes) } else { passes };
        let in_flight = if on_device < passes { 2 * F32_SIZE * tokens * dim } else { 0 };
        let bytes = Bytes { device: input_bytes(on_device) + in_flight, host: input_bytes(passes - on_device) };
        let formula = format!("{passes} velocities x {segments} segments x {tokens} tokens x {dim} x {element} B");
        item("block inputs", bytes, formula)
    }

    /// What `model.keep_attention` keeps of a recorded pass.
    fn kept_attention(&self) -> MemoryItem {
        let (tokens, dit, passes) = (self.own_tokens(), &self.networks().dit, self.input.passes.held());
        let (dim, layers, heads, element) = (dit.dim, dit.layers, dit.heads, self.layout.products.size());
        let bytes = passes * attention_bytes(dit, tokens, element);
        let formula =
            format!("{passes} velocities x {layers} blocks x {tokens} tokens x ({dim} x {element} + {heads} x 4) B");
        on_device("results of attention", bytes, formula)
    }

    /// The pullback of a block or that of the decoder.
    fn largest_pullback(&self) -> MemoryItem {
        let (block, decoder) = (self.block_pullback(), self.decoder_pullback(self.video.checkpoints.least()));
        if block > decoder {
            let ([residual, feed_forward], dit) = (BLOCK_WORDS, &self.networks().dit);
            let formula = format!(
                "{} tokens x ({residual} x {} + {feed_forward} x {}) x 4 B",
                self.own_tokens(),
                dit.dim,
                dit.ffn_dim
            );
            return on_device("pullback of one block", block, formula);
        }
        let tiles = match self.video.tiling {
            Some(Tiling { size: [h, w], stride: [down, right] }) => {
                format!("tiles of {h} x {w} every {down} x {right}")
            }
            None => "frames whole".into(),
        };
        let (count, state) = (self.video.checkpoints.least(), self.decoder_state());
        let formula = format!("{count} checkpoints x {state} B, and the work on a chunk, as measured; {tiles}");
        on_device("decoder and its pullback", decoder, formula)
    }

    /// Bytes of the decoder's state at a chunk border.
    fn decoder_state(&self) -> usize {
        let [_, h, w] = self.latent_size();
        feature_cache_bytes(&self.networks().vae, self.video.tiling, [h, w], self.layout.decoder_dtype.size())
    }

    /// The frozen weights of all transformers, by the layout's placement.
    fn transformer_weights(&self) -> MemoryItem {
        let (layout, networks, ranks) = (&self.layout, self.networks(), self.input.ranks());
        let (experts, block) = (networks.experts, layout.bytes_of(&networks.block_weights()).all());
        let expert = layout.expert_bytes();
        let expert_formula = match layout.eight_bits {
            Some(_) => format!("{expert} B (matrices of blocks in 8 bits)"),
            None => format!("{} x {} B", networks.dit_elements(), layout.storage.dtype.size()),
        };
        let (bytes, formula) = match layout.placement {
            Placement::Sharded => {
                let blocks = self.gathered_blocks();
                let formula =
                    format!("gathered blocks: {blocks}; {experts} x {expert_formula} / {ranks} ranks in host memory");
                (Bytes { device: blocks * block, host: (expert * experts).div_ceil(ranks) }, formula)
            }
            Placement::Streamed => (Bytes { device: 2 * block, host: 0 }, "two blocks; the rest in its files".into()),
            Placement::Host => {
                let weights = layout.bytes_of(&networks.dit.weights());
                let block = layout.bytes_of(&networks.block_weights());
                let formula = format!(
                    "two blocks, and norms, biases and scales; the rest of {experts} x {expert_formula} on the host"
                );
                let device = 2 * block.large + experts * weights.small;
                (Bytes { device, host: experts * weights.large }, formula)
            }
            Placement::Auto | Placement::Resident => {
                let (host, note) = match layout.idle {
                    IdleExpert::Auto | IdleExpert::Keep => (0, ""),
                    IdleExpert::Host => (expert * experts, "; all experts in host memory, one at a time on the device"),
                    IdleExpert::Drop => (0, "; the idle expert in its files"),
                };
                let count = layout.experts_on_device();
                (Bytes { device: expert * count, host }, format!("{count} x {expert_formula}{note}"))
            }
        };
        item("transformer weights", bytes, formula)
    }

    /// The `count` trained parameters. In full training, they are sharded like frozen weights; adapters never are.
    fn trained_parameters(&self, count: usize) -> MemoryItem {
        let (ranks, trains_all_weights) = (self.input.ranks(), self.trainable == Trainable::Full);
        let what = if trains_all_weights { "all weights" } else { "adapters" };
        let is_sharded = trains_all_weights && ranks > 1 && self.layout.placement == Placement::Sharded;
        if !is_sharded {
            return on_device("trained parameters", F32_SIZE * count, format!("{count} x 4 B, {what}"));
        }
        let blocks = self.gathered_blocks();
        let formula = format!("{what}, gathered blocks: {blocks}; {count} / {ranks} x 4 B in host memory");
        let device = F32_SIZE * blocks * self.networks().block_elements();
        item("trained parameters", Bytes { device, host: F32_SIZE * count.div_ceil(ranks) }, formula)
    }

    /// Number of sharded blocks on the device: the one in use, and with overlap the one in flight.
    fn gathered_blocks(&self) -> usize {
        if self.input.division.overlap_comm && self.input.ranks() > 1 { 2 } else { 1 }
    }

    /// Bytes that the recomputation and the pullback of one transformer block hold.
    pub fn block_pullback(&self) -> usize {
        block_pullback_bytes(&self.networks().dit, self.own_tokens())
    }

    /// Bytes that the decoder and its pullback hold besides weights, with this number of checkpoints.
    pub fn decoder_pullback(&self, checkpoints: usize) -> usize {
        let (vae, element) = (&self.networks().vae, self.layout.decoder_dtype.size());
        // The decoder offloads its states on GPUs only.
        let is_gpu = self.input.memory.is_some();
        let states_on_device = if self.layout.offload_inputs && is_gpu { RESTORED_STATES } else { checkpoints };
        decoder_bytes(vae, self.video.tiling, self.latent_size(), element, states_on_device)
    }
}

/// Bytes by the memory that they are in.
struct Bytes {
    device: usize,
    host: usize,
}

/// An item of the plan; `formula` explains its bytes.
fn item(name: &str, bytes: Bytes, formula: String) -> MemoryItem {
    MemoryItem::new(name, [bytes.device, bytes.host], formula)
}

/// An item that is on the device only.
fn on_device(name: &str, bytes: usize, formula: String) -> MemoryItem {
    item(name, Bytes { device: bytes, host: 0 }, formula)
}

/// An item that is in host memory only.
fn on_host(name: &str, bytes: usize, formula: String) -> MemoryItem {
    item(name, Bytes { device: 0, host: bytes }, formula)
}
