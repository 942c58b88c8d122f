//! Memory of a rank, item by item.

use roll_core::Result;
use roll_core::plan::MemoryItem;

use super::super::dit::Trainable;
use super::super::layout::{
    BLOCK_WORDS, CheckpointCount, RESERVE, attention_bytes, block_input_bytes, block_pullback_bytes,
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
        let (networks, division, passes) = (self.networks(), &self.input.division, &self.input.passes);
        // Only a GPU has a memory of its own.
        let (ranks, gpu) = (self.input.ranks(), self.input.memory.is_some());
        let mut items = vec![item("process", 0, PROCESS, "60 MiB".into())];
        if gpu {
            let formula = "CUDA's context, rewards' networks; an estimate".into();
            items.push(item("context and rewards", RESERVE, 0, formula));
        }
        // In full training, weights count twice: as they are loaded, and as f32 parameters.
        items.push(self.transformer_weights());
        let vae = networks.vae_elements();
        items.push(item("VAE weights", 4 * vae, 0, format!("{vae} x 4 B")));
        let trained = self.trained_elements()?;
        items.push(self.trained_parameters(trained));
        if self.keeps_start {
            let formula = format!("{trained} x 4 B, as in `model.lora_checkpoint`");
            items.push(item("reference of the KL", 4 * trained, 0, formula));
        }
        items.push(item("gradients in the model", 4 * trained, 0, format!("{trained} x 4 B, until they are reduced")));
        // Sums of gradients, optimizer state and buffers, as the ranks divide them.
        items.extend(division.memory(trained, ranks, gpu));

        items.push(self.block_inputs());
        items.extend(self.video.keep_attention.then(|| self.kept_attention()));
        items.push(self.largest_pullback());
        let [height, width] = self.size();
        let [_, with_gradient] = passes.decoded();
        // At most the frames before and after the clamp, and with a gradient the cotangents of both.
        let (frames, copies) = (self.input.frames, if with_gradient > 0 { 4 } else { 2 });
        items.push(item(
            "decoded frames",
            0,
            copies * frames * height * width * 3 * 4,
            format!("{copies} x {frames} frames x {height} x {width} pixels x 12 B"),
        ));
        // The pullback of the decoder recomputes each chunk (one latent frame) from the decoder's state, its feature caches,
        // which are kept at some borders of chunks. Offloaded states are in host memory and count here, others in
        // `decoder_pullback`.
        if self.layout.offload_inputs && gpu && with_gradient > 0 {
            let ([chunks, ..], state) = (self.latent_size(), self.decoder_state());
            let count = chunks.saturating_sub(1).min(self.video.checkpoints.least());
            let more = match self.video.checkpoints {
                CheckpointCount::Of(_) => "",
                CheckpointCount::InHostMemory => "; more if memory allows, to recompute less",
            };
            let formula = format!("{count} checkpoints x {state} B{more}");
            items.push(item("decoder's feature caches", 0, count * state, formula));
        }
        Ok(items)
    }

    /// A checkpointing segment of a recorded pass keeps its input until its pullback, which recomputes the rest.
    fn block_inputs(&self) -> MemoryItem {
        let (tokens, dim, segments) = (self.own_tokens(), self.networks().dit.dim, self.networks().dit.segments());
        let (passes, element) = (self.input.passes.held(), self.layout.products.size());
        let input_bytes = |passes: usize| passes * block_input_bytes(&self.networks().dit, tokens, element);
        // If inputs are offloaded, the device holds those of the passes that fit. It also holds, in f32, the input in
        // use and the one in flight of the other passes. On the CPU, device and host are the same memory, and the
        // copies are made all the same.
        let on_device = if self.layout.offload_inputs { self.video.passes_on_device.min(passes) } else { passes };
        let in_flight = if on_device < passes { 2 * 4 * tokens * dim } else { 0 };
        let (device, host) = (input_bytes(on_device) + in_flight, input_bytes(passes - on_device));
        let formula = format!("{passes} velocities x {segments} segments x {tokens} tokens x {dim} x {element} B");
        item("block inputs", device, host, formula)
    }

    /// What `model.keep_attention` keeps of a recorded pass.
    fn kept_attention(&self) -> MemoryItem {
        let (tokens, dit, passes) = (self.own_tokens(), &self.networks().dit, self.input.passes.held());
        let (dim, layers, heads, element) = (dit.dim, dit.layers, dit.heads, self.layout.products.size());
        let bytes = passes * attention_bytes(dit, tokens, element);
        let formula =
            format!("{passes} velocities x {layers} blocks x {tokens} tokens x ({dim} x {element} + {heads} x 4) B");
        item("results of attention", bytes, 0, formula)
    }

    /// The pullback of a block or that of the decoder.
    fn largest_pullback(&self) -> MemoryItem {
        let (block, decoder) = (self.block_pullback(), self.decoder_pullback(self.video.checkpoints.least()));
        if block > decoder {
            let ([a, b], dit) = (BLOCK_WORDS, &self.networks().dit);
            let formula = format!("{} tokens x ({a} x {} + {b} x {}) x 4 B", self.own_tokens(), dit.dim, dit.ffn_dim);
            return item("pullback of one block", block, 0, formula);
        }
        let tiles = match self.video.tiling {
            Some(Tiling { size: [h, w], stride: [y, x] }) => format!("tiles of {h} x {w} every {y} x {x}"),
            None => "frames whole".into(),
        };
        let (count, state) = (self.video.checkpoints.least(), self.decoder_state());
        let formula = format!("{count} checkpoints x {state} B, and the work on a chunk, as measured; {tiles}");
        item("decoder and its pullback", decoder, 0, formula)
    }

    /// Bytes of the decoder's state at a chunk border.
    fn decoder_state(&self) -> usize {
        let [_, h, w] = self.latent_size();
        feature_cache_bytes(&self.networks().vae, self.video.tiling, [h, w], self.layout.decoder.size())
    }

    fn transformer_weights(&self) -> MemoryItem {
        let (layout, networks, ranks) = (&self.layout, self.networks(), self.input.ranks());
        let (experts, block) = (networks.experts, layout.bytes_of(&networks.block_weights()).all());
        let expert = layout.expert_bytes();
        let counted = match layout.eight_bits {
            Some(_) => format!("{expert} B (matrices of blocks in 8 bits)"),
            None => format!("{} x {} B", networks.dit_elements(), layout.storage.dtype.size()),
        };
        let (device, host, formula) = match layout.placement {
            Placement::Sharded => {
                let blocks = self.gathered_blocks();
                let formula =
                    format!("gathered blocks: {blocks}; {experts} x {counted} / {ranks} ranks in host memory");
                (blocks * block, (expert * experts).div_ceil(ranks), formula)
            }
            Placement::Streamed => (2 * block, 0, "two blocks; the rest in its files".into()),
            Placement::Host => {
                let weights = layout.bytes_of(&networks.dit.weights());
                let block = layout.bytes_of(&networks.block_weights());
                let formula =
                    format!("two blocks, and norms, biases and scales; the rest of {experts} x {counted} on the host");
                (2 * block.large + experts * weights.small, experts * weights.large, formula)
            }
            Placement::Auto | Placement::Resident => {
                let (on_host, note) = match layout.idle {
                    IdleExpert::Auto | IdleExpert::Keep => (0, ""),
                    IdleExpert::Host => (expert * experts, "; all experts in host memory, one at a time on the device"),
                    IdleExpert::Drop => (0, "; the idle expert in its files"),
                };
                let here = layout.experts_on_device();
                (expert * here, on_host, format!("{here} x {counted}{note}"))
            }
        };
        item("transformer weights", device, host, formula)
    }

    /// Trained weights are sharded like frozen ones; adapters never are.
    fn trained_parameters(&self, n: usize) -> MemoryItem {
        let (ranks, full) = (self.input.ranks(), self.trainable == Trainable::Full);
        let what = if full { "all weights" } else { "adapters" };
        if !(full && ranks > 1 && self.layout.placement == Placement::Sharded) {
            return item("trained parameters", 4 * n, 0, format!("{n} x 4 B, {what}"));
        }
        let blocks = self.gathered_blocks();
        let formula = format!("{what}, gathered blocks: {blocks}; {n} / {ranks} x 4 B in host memory");
        item("trained parameters", 4 * blocks * self.networks().block_elements(), 4 * n.div_ceil(ranks), formula)
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
        let (vae, element) = (&self.networks().vae, self.layout.decoder.size());
        // The decoder offloads its states on GPUs only.
        let on_gpu = self.input.memory.is_some();
        let on_device = if self.layout.offload_inputs && on_gpu { RESTORED_STATES } else { checkpoints };
        decoder_bytes(vae, self.video.tiling, self.latent_size(), element, on_device)
    }
}

fn item(name: &str, device: usize, host: usize, formula: String) -> MemoryItem {
    MemoryItem::new(name, [device, host], formula)
}
