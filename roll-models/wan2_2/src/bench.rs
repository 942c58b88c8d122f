//! The presets of `roll bench`: Wan's published networks, and one that a laptop makes steps of.

use burn_tensor::{DType, Device};
use roll_backends::device::is_gpu;
use roll_backends::product_dtype;
use roll_core::{Error, Model, Noise, Result, StateDict};
use roll_network::bench::{BenchFacts, BenchNetworks, BenchPreset, BenchRequest, LORA_RANK, random};

use crate::dit::{Dit, DitConfig, PassMemory, PassSettings, Trainable};
use crate::layout::{Layout, Machine};
use crate::networks::Networks;
use crate::options::{KeepAttention, WanOptions};
use crate::plan::{Plan, PublishedModel};
use crate::vae::{Chunking, LatentStatistics, Vae, VaeConfig};
use crate::{Parts, Settings, Wan};

roll_core::inventory::submit! {
    BenchPreset {
        name: "tiny",
        model: "wan2_2",
        network: None,
        make: |request| measured(request, tiny(), Clip { dtype: DType::F32, frames: 9, size: [64, 64], text_len: 32 }),
    }
}
roll_core::inventory::submit! {
    BenchPreset {
        name: "1.3b",
        model: "wan2_2",
        network: Some("wan2_1-t2v-1_3b"),
        make: |request| published(request, "wan2_1-t2v-1_3b", 81, [480, 832]),
    }
}
roll_core::inventory::submit! {
    BenchPreset {
        name: "ti2v-5b",
        model: "wan2_2",
        network: Some("wan2_2-ti2v-5b"),
        make: |request| published(request, "wan2_2-ti2v-5b", 121, [704, 1280]),
    }
}
roll_core::inventory::submit! {
    BenchPreset {
        name: "a14b",
        model: "wan2_2",
        network: Some("wan2_2-i2v-a14b"),
        // 21 latent frames of 30x30 patches: 18,900 tokens.
        make: |request| published(request, "wan2_2-i2v-a14b", 81, [480, 480]),
    }
}

/// A preset's dtype and video.
struct Clip {
    dtype: DType,
    frames: usize,
    /// Height and width in pixels.
    size: [usize; 2],
    /// Rows of the prompt embedding.
    text_len: usize,
}

/// One expert and the VAE, and what is measured of them.
struct Measured {
    request: BenchRequest,
    networks: Networks,
    facts: BenchFacts,
}

fn published(request: &BenchRequest, name: &str, frames: usize, size: [usize; 2]) -> Result<Box<dyn BenchNetworks>> {
    let network = PublishedModel::ALL.iter().find(|n| n.name == name);
    let networks = network.ok_or_else(|| Error::Misuse(format!("no network is called `{name}`")))?.networks();
    measured(request, networks, Clip { dtype: DType::BF16, frames, size, text_len: 512 })
}

fn measured(request: &BenchRequest, mut networks: Networks, clip: Clip) -> Result<Box<dyn BenchNetworks>> {
    networks.experts = 1;
    let all_layers = networks.dit.layers;
    networks.dit.layers = request.layers_of(all_layers)?;
    let dtype = request.dtype.unwrap_or(clip.dtype);
    networks.stored_dtype = dtype;
    let (frames, size) = (request.frames.unwrap_or(clip.frames), request.size.unwrap_or(clip.size));
    check_video(&networks, frames, size)?;
    let plan = plan(request, &networks, frames, size, clip.text_len)?;
    let (dit, vae) = (&networks.dit, &networks.vae);
    let [h, w] = size.map(|n| n / vae.spatial_stride());
    let facts = BenchFacts {
        dim: dit.dim,
        ffn_dim: dit.ffn_dim,
        layers: dit.layers,
        all_layers,
        parameters: dit.weights().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum(),
        dtype,
        frames,
        size,
        tokens: plan.tokens(),
        latent_shape: [vae.z_dim, 1 + (frames - 1) / vae.temporal_stride(), h, w],
        context: [clip.text_len, dit.text_dim],
        more_channels: dit.in_channels - dit.out_channels,
        time: plan.time(),
    };
    Ok(Box::new(Measured { request: request.clone(), networks, facts }))
}

/// Fails unless the model can represent videos of this length and size.
fn check_video(networks: &Networks, frames: usize, size: [usize; 2]) -> Result<()> {
    let vae = &networks.vae;
    let [_, ph, pw] = networks.dit.patch;
    let units = [vae.spatial_stride() * ph, vae.spatial_stride() * pw];
    if !size.iter().zip(units).all(|(n, unit)| n.is_multiple_of(unit)) {
        let problem = format!("must be multiples of {} and {}, found {:?}", units[0], units[1], size);
        return Err(Error::config("--size", problem));
    }
    let stride = vae.temporal_stride();
    match frames > 0 && (frames - 1).is_multiple_of(stride) {
        true => Ok(()),
        false => Err(Error::config(
            "--frames",
            format!("must be 1, {}, {}, ...; found {}", 1 + stride, 1 + 2 * stride, frames),
        )),
    }
}

/// The plan of a step, by which operations are counted.
fn plan(request: &BenchRequest, networks: &Networks, frames: usize, size: [usize; 2], text_len: usize) -> Result<Plan> {
    let input = request.plan_input(frames, size);
    let options = WanOptions {
        weight_store: request.weight_store,
        weights_dtype: request.weights_dtype(),
        keep_attention: KeepAttention::Of(request.keep_attention),
        ..WanOptions::default()
    };
    let layout = Layout::of(&options, networks.clone(), Machine::planned(&input))?;
    let trained_experts = vec!["dit2".into()];
    Plan::new(layout, input, trainable(), trained_experts, text_len)
}

/// The trained LoRA.
fn trainable() -> Trainable {
    let targets = ["q", "k", "v", "o", "ffn.0", "ffn.2"].map(String::from).to_vec();
    Trainable::Lora { rank: LORA_RANK, alpha: LORA_RANK as f64, targets }
}

/// Networks whose step takes seconds on a laptop.
fn tiny() -> Networks {
    let dit = DitConfig {
        dim: 256,
        in_channels: 36,
        out_channels: 16,
        patch: [1, 2, 2],
        text_dim: 64,
        freq_dim: 256,
        ffn_dim: 1024,
        layers: 4,
        heads: 4,
        image_dim: None,
    };
    let vae = VaeConfig { encoder_dim: 16, decoder_dim: 16, ..VaeConfig::wan2_1() };
    Networks { dit, experts: 1, stored_dtype: DType::F32, eight_bits: None, vae }
}

impl BenchNetworks for Measured {
    fn facts(&self) -> &BenchFacts {
        &self.facts
    }

    fn model(&self, device: &Device, vae_dtype: DType) -> Result<Box<dyn Model>> {
        let (request, dtype) = (&self.request, self.facts.dtype);
        let (dit, vae) = (&self.networks.dit, &self.networks.vae);
        let is_block = |name: &str| name.starts_with("blocks.");
        let store = random::transformer_store(request, dit.weights(), dtype, is_block, device)?;
        let mut expert = Dit::with_store(dit.clone(), store).with_settings(PassSettings {
            products: product_dtype(device, dtype),
            fp8_products: request.fp8_products,
            activations: None,
            kept: PassMemory { memory: request.memory(), keeps_attention: request.keep_attention },
        });
        expert.add_trainable(&trainable(), &Noise::new(0), &StateDict::new())?;
        let statistics = LatentStatistics::published(vae.z_dim)
            .ok_or_else(|| Error::Misuse(format!("no statistics for {} channels", vae.z_dim)))?;
        let vae = Vae::with_store(vae.clone(), &statistics, random::resident(vae.weights(), device)?)?
            .with_decoder_dtype(vae_dtype)?;
        let chunking = chunking(request, device);
        let settings = Settings { shift: None, boundary: None, uses_end_image: false, chunking };
        Ok(Box::new(Wan::new(Parts { dit: expert, dit2: None, vae, text: None, clip: None }, settings)))
    }
}

/// Chunking of the VAE, without tiling. By default the decoder's pull keeps the caches of all chunks on a GPU, and the
/// usual number of caches on the CPU.
fn chunking(request: &BenchRequest, device: &Device) -> Chunking {
    let offload = request.offload && is_gpu(device);
    let checkpoints = match (request.vae_checkpoints, is_gpu(device)) {
        (Some(count), _) => count,
        (None, true) => usize::MAX,
        (None, false) => Chunking::default().checkpoints,
    };
    Chunking { tiling: None, checkpoints, offload }
}
