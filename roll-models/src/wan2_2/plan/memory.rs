//! Memory of a rank, item by item.

use roll_core::Result;
use roll_core::plan::MemoryItem;

use super::super::dit::Trainable;
use super::super::options::{IdleExpert, Placement};
use super::super::vae::{DEFAULT_CHECKPOINTS, Tiling, decoder_bytes, feature_cache_bytes};
use super::{Plan, RESERVE};

/// f32 values per token that the recomputation and the pullback of one block hold: 10 per channel of the residual
/// stream plus 4 per channel of the feed-forward layer. Measured: 208 MiB at 4096 tokens, width 512, feed-forward 2048
/// (example `dit_memory` of commit ac7d28a).
const BLOCK_WORDS: [usize; 2] = [10, 4];
/// Bytes of the process itself.
const PROCESS: usize = 60 << 20;

impl Plan {
    /// The memory of a rank at its peak. Of the pullbacks of transformer and decoder, which run at different times, the
    /// larger counts.
    pub fn memory(&self) -> Result<Vec<MemoryItem>> {
        let (networks, division, passes) = (&self.networks, &self.input.division, &self.input.passes);
        let (ranks, gpu, held) = (self.input.ranks(), self.input.memory.is_some(), passes.held());
        let mut items = vec![item("process", 0, PROCESS, "60 MiB".into())];
        if gpu {
            let formula = "CUDA's context, rewards' networks; an estimate".into();
            items.push(item("context and rewards", RESERVE, 0, formula));
        }
        // Trained weights are loaded like frozen ones, and are f32 parameters besides: both count.
        items.push(self.transformer_weights());
        let vae = networks.vae_elements();
        items.push(item("VAE weights", 4 * vae, 0, format!("{vae} x 4 B")));
        let trained = self.trained_elements()?;
        items.push(self.trained_parameters(trained));
        items.push(item("gradients in the model", 4 * trained, 0, format!("{trained} x 4 B, until they are reduced")));
        items.extend(division.memory(trained, ranks, gpu));

        let (tokens, dim, ffn) = (self.own_tokens(), networks.dit.dim, networks.dit.ffn_dim);
        let element = self.storage.block_input_bytes;
        let inputs = element * tokens * dim * networks.dit.segments() * held;
        // The device holds the input in use and the one in flight, f32.
        let (on_device, on_host) = if self.offload_inputs { (2 * 4 * tokens * dim, inputs) } else { (inputs, 0) };
        items.push(item(
            "block inputs",
            on_device,
            on_host,
            format!("{held} velocities x {} segments x {tokens} tokens x {dim} x {element} B", networks.dit.segments()),
        ));
        let (pull, decode) = (self.block_pull(), self.decoder_pull());
        let tiles = match self.tiling {
            Some(Tiling { size: [h, w], stride: [y, x] }) => format!("tiles of {h} x {w} every {y} x {x}"),
            None => "frames whole".into(),
        };
        let [a, b] = BLOCK_WORDS;
        items.push(match pull > decode {
            true => item("pull of one block", pull, 0, format!("{tokens} tokens x ({a} x {dim} + {b} x {ffn}) x 4 B")),
            false => item(
                "decoder and its pull",
                decode,
                0,
                format!("measured, in units of the decoder's feature caches; {tiles}"),
            ),
        });
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
        if self.offload_inputs && gpu && with_gradient > 0 {
            let [chunks, h, w] = self.latent_size();
            let state = feature_cache_bytes(&networks.vae, self.tiling, [h, w], self.storage.decoder_element_bytes);
            let count = chunks.saturating_sub(1).min(DEFAULT_CHECKPOINTS);
            let formula =
                format!("{count} x {state} B, one per chunk border; more if memory allows, to recompute less");
            items.push(item("decoder's feature caches", 0, count * state, formula));
        }
        Ok(items)
    }

    fn transformer_weights(&self) -> MemoryItem {
        let (experts, ranks, block) = (self.networks.experts, self.input.ranks(), self.block_bytes());
        let expert = self.expert_bytes();
        let counted = match self.storage.eight_bits {
            true => format!("{expert} B (matrices of blocks in 8 bits)"),
            false => format!("{} x {} B", self.networks.dit_elements(), self.storage.weight_bytes),
        };
        let (device, host, formula) = match self.resolved_placement() {
            Placement::Sharded => {
                let blocks = self.gathered_blocks();
                let formula = format!("{experts} x {counted} / {ranks} ranks, plus gathered blocks: {blocks}");
                (blocks * block, (expert * experts).div_ceil(ranks), formula)
            }
            Placement::Streamed => (2 * block, 0, "two blocks; the rest in its files".into()),
            Placement::Host => {
                let [small, host, block] = self.host_store();
                let formula =
                    format!("two blocks, and norms, biases and scales; the rest of {experts} x {counted} on the host");
                (2 * block + experts * small, experts * host, formula)
            }
            Placement::Auto | Placement::Resident => {
                let (on_host, note) = match self.storage.idle {
                    IdleExpert::Auto | IdleExpert::Keep => (0, ""),
                    IdleExpert::Host => (expert * experts, "; all experts in host memory, one at a time on the device"),
                    IdleExpert::Drop => (0, "; the idle expert in its files"),
                };
                let here = self.experts_on_device();
                (expert * here, on_host, format!("{here} x {counted}{note}"))
            }
        };
        item("transformer weights", device, host, formula)
    }

    /// Trained weights are sharded like frozen ones; adapters never are.
    fn trained_parameters(&self, n: usize) -> MemoryItem {
        let (ranks, full) = (self.input.ranks(), self.trainable == Trainable::Full);
        let what = if full { "all weights" } else { "adapters" };
        if !(full && ranks > 1 && self.resolved_placement() == Placement::Sharded) {
            return item("trained parameters", 4 * n, 0, format!("{n} x 4 B, {what}"));
        }
        let blocks = self.gathered_blocks();
        let formula = format!("{n} / {ranks} x 4 B, {what}, plus gathered blocks: {blocks}");
        item("trained parameters", 4 * blocks * self.networks.block_elements(), 4 * n.div_ceil(ranks), formula)
    }

    /// Number of sharded blocks on the device: the one in use, and with overlap the one in flight.
    fn gathered_blocks(&self) -> usize {
        if self.input.division.overlap_comm && self.input.ranks() > 1 { 2 } else { 1 }
    }

    /// Bytes that the recomputation and the pullback of one transformer block hold.
    pub fn block_pull(&self) -> usize {
        let dit = &self.networks.dit;
        4 * self.own_tokens() * (BLOCK_WORDS[0] * dit.dim + BLOCK_WORDS[1] * dit.ffn_dim)
    }

    /// Bytes that the decoder and its pullback hold besides weights.
    pub fn decoder_pull(&self) -> usize {
        let (vae, element) = (&self.networks.vae, self.storage.decoder_element_bytes);
        // On the CPU, host memory is the device's: nothing is offloaded.
        let offload = self.offload_inputs && self.input.memory.is_some();
        decoder_bytes(vae, self.tiling, self.latent_size(), element, offload)
    }
}

fn item(name: &str, device: usize, host: usize, formula: String) -> MemoryItem {
    MemoryItem::new(name, [device, host], formula)
}
