//! Estimates of a run before it is started: memory by kind of tensor, and time by phase, from the [`Layout`] that the
//! loader executes, too.

use burn_tensor::DType;
use roll_backends::Memory;
use roll_core::plan::{MemoryItem, Needs, PhaseCost, PlanInput};
use roll_core::{BuildContext, Error, Kind, Noise, Options, Result, nearest, parse_options};
use roll_network::hub::Hub;
use roll_network::options::Placement;
use roll_network::trainable::Trainable;

use crate::dit::{DitConfig, lora_parameters};
use crate::files::ComponentFiles;
use crate::layout::{BLOCK_WORDS, F32_SIZE, Layout, Machine, Networks, RESERVE};
use crate::model::{picture_unit, tokens};
use crate::options::ZImageOptions;
use crate::vae::VaeConfig;

/// Names of the published network. Both published models have its sizes.
pub const PUBLISHED: &str = "z-image";
/// Height and width of pictures in pixels if each has its own size.
const DEFAULT_SIZE: [usize; 2] = [1024, 1024];
/// Tokens of a prompt that a plan assumes, template included.
pub const PROMPT_TOKENS: usize = 128;
/// Bytes of the process itself.
const PROCESS: usize = 60 << 20;
/// Bytes per second from pageable host memory to a GPU.
const HOST_RATE: f64 = 10e9;

/// The networks of the published models.
pub fn published() -> Networks {
    let dit = DitConfig {
        dim: 3840,
        channels: 16,
        text_dim: 2560,
        freq_dim: 256,
        time_dim: 1024,
        modulation_dim: 256,
        ffn_dim: 10_240,
        layers: 30,
        noise_refiners: 2,
        context_refiners: 2,
        heads: 30,
        axes: [32, 48, 48],
    };
    Networks { dit, stored_dtype: DType::BF16, eight_bits: None, vae: VaeConfig::default() }
}

/// Estimates the memory and time of a run with these options. Only the headers of the model's files are read.
pub fn needs(options: &Options, input: &PlanInput, context: &BuildContext) -> Result<Needs> {
    let options: ZImageOptions = parse_options(Kind::Model.section(), options)?;
    if !input.passes.texts.is_empty() {
        let problem = "the algorithm trains language models, and `z_image` makes pictures: choose a model such as \
                       `causal_lm`, or an algorithm for pictures such as `reward_fl`";
        return Err(Error::config("model.name", problem));
    }
    let networks = find_networks(&options, input.network.as_deref(), context)?;
    let trainable = options.trainable();
    let layout = Layout::of(&options, networks, Machine::planned(input))?;
    let plan = Plan::new(layout, input, trainable)?;
    let [height, width] = plan.size;
    let parameters: usize = plan.layout.networks.dit.weights().iter().map(|(_, s)| s.iter().product::<usize>()).sum();
    Ok(Needs {
        work: format!("pictures of {width}x{height}, {} tokens", plan.tokens),
        facts: [("tokens".to_string(), plan.tokens as f64), ("parameters".to_string(), parameters as f64)].into(),
        memory: plan.memory(),
        time: plan.time(),
        hints: plan.hints(),
        other_devices: Default::default(),
    })
}

/// The networks of the published model `network`, or of the model's files.
fn find_networks(options: &ZImageOptions, network: Option<&str>, context: &BuildContext) -> Result<Networks> {
    match network {
        Some(PUBLISHED) => Ok(published()),
        Some(name) => Err(Error::UnknownName {
            kind: "network",
            name: name.into(),
            nearest: nearest(name, [PUBLISHED]).map(Into::into),
            known: PUBLISHED.into(),
        }),
        None if options.model_path.is_none() && options.dit_path.is_none() => {
            let problem = format!("name files, or the published model: --network {PUBLISHED}");
            Err(Error::config("model.model_path", problem))
        }
        None => {
            let files = ComponentFiles::open(options, context, &Hub::from_env())?;
            Networks::of(&files.dit, files.vae_config)
        }
    }
}

/// A run whose memory and time are estimated.
pub struct Plan<'a> {
    layout: Layout,
    input: &'a PlanInput,
    trainable: Trainable,
    /// Number of trained elements.
    trained: usize,
    /// Height and width in pixels.
    size: [usize; 2],
    /// Height and width in latent pixels.
    latents: [usize; 2],
    /// Tokens of picture and caption, filled.
    pub tokens: usize,
    keeps_attention: bool,
}

impl<'a> Plan<'a> {
    /// A plan of a run on `layout` that trains `trainable`.
    pub fn new(layout: Layout, input: &'a PlanInput, trainable: Trainable) -> Result<Self> {
        let dit = &layout.networks.dit;
        let trained = match &trainable {
            Trainable::Frozen => 0,
            Trainable::Full => dit.weights().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum(),
            // Names and shapes do not depend on the draws.
            lora => lora_parameters(dit, lora, &Noise::new(0))?.0.iter().map(|spec| spec.len()).sum(),
        };
        let size = input.size.unwrap_or(DEFAULT_SIZE);
        if !picture_unit(&layout.networks.vae).has_size(size) {
            let [height, width] = size;
            let unit = picture_unit(&layout.networks.vae);
            let problem = format!("{width}x{height}: expected multiples of {}x{}", unit.width, unit.height);
            return Err(Error::config("data.height", problem));
        }
        let latents = size.map(|side| side / layout.networks.vae.spatial_stride());
        let tokens = tokens(latents, PROMPT_TOKENS);
        let keeps_attention = layout.keeps_attention(trained, tokens, latents);
        Ok(Self { layout, input, trainable, trained, size, latents, tokens, keeps_attention })
    }

    /// The memory of a rank at its peak. The pullbacks of transformer and decoder run at different times, so only the
    /// larger one counts.
    fn memory(&self) -> Vec<MemoryItem> {
        let (layout, trained, passes) = (&self.layout, self.trained, self.input.passes.held());
        let (ranks, is_gpu) = (self.input.ranks(), self.input.memory.is_some());
        let item = |name: &str, bytes: [usize; 2], formula: String| MemoryItem::new(name, bytes, formula);
        let mut items = vec![item("process", [0, PROCESS], "60 MiB".into())];
        if is_gpu {
            items.push(item(
                "context and rewards",
                [RESERVE, 0],
                "CUDA's context, rewards' networks; an estimate".into(),
            ));
        }
        items.push(self.transformer_weights());
        items.push(item("VAE weights", [layout.vae_bytes(), 0], format!("{} x 4 B", layout.vae_bytes() / F32_SIZE)));
        let what = if self.trainable == Trainable::Full { "all weights" } else { "adapters" };
        items.push(item("trained parameters", [F32_SIZE * trained, 0], format!("{trained} x 4 B, {what}")));
        let formula = format!("{trained} x 4 B, until they are reduced");
        items.push(item("gradients in the model", [F32_SIZE * trained, 0], formula));
        items.extend(self.input.division.memory(trained, ranks, is_gpu));
        items.push(self.block_inputs());
        if self.keeps_attention {
            let formula = format!("{passes} velocities x {} B", layout.attention_bytes(self.tokens));
            items.push(item("results of attention", [passes * layout.attention_bytes(self.tokens), 0], formula));
        }
        items.push(self.largest_pullback());
        let [height, width] = self.size;
        let formula = format!("4 x {height} x {width} pixels x 12 B");
        items.push(item("decoded pictures", [0, 4 * height * width * 3 * F32_SIZE], formula));
        items
    }

    /// The frozen weights of the transformer, by the layout's placement.
    fn transformer_weights(&self) -> MemoryItem {
        let (layout, ranks) = (&self.layout, self.input.ranks());
        let (all, block) = (layout.weight_bytes(), layout.block_bytes());
        let stored = if layout.eight_bits.is_some() { " (matrices of blocks in 8 bits)" } else { "" };
        let (bytes, formula) = match layout.placement {
            Placement::Auto | Placement::Resident => ([all, 0], format!("{all} B{stored}")),
            Placement::Streamed => ([2 * block, 0], "two blocks; the rest in its files".into()),
            Placement::Host => ([2 * block, all], format!("two blocks; {all} B{stored} on the host")),
            Placement::Sharded => ([2 * block, all.div_ceil(ranks)], format!("two blocks; {all} B / {ranks} ranks")),
        };
        MemoryItem::new("transformer weights", bytes, formula)
    }

    /// The inputs of the segments of recorded passes.
    fn block_inputs(&self) -> MemoryItem {
        let (layout, passes) = (&self.layout, self.input.passes.held());
        let (dim, segments) = (layout.networks.dit.dim, layout.networks.dit.segments());
        let bytes = passes * layout.block_input_bytes(self.tokens);
        // The input in use and the one in flight, in f32.
        let in_flight = 2 * F32_SIZE * self.tokens * dim;
        let bytes = if layout.memory == Memory::Offload { [in_flight, bytes] } else { [bytes, 0] };
        let element = layout.products.size();
        let formula =
            format!("{passes} velocities x {segments} segments x {} tokens x {dim} x {element} B", self.tokens);
        MemoryItem::new("block inputs", bytes, formula)
    }

    /// The pullback of a block or that of the decoder.
    fn largest_pullback(&self) -> MemoryItem {
        let (block, decoder) = (self.layout.block_pullback_bytes(self.tokens), self.layout.decoder_bytes(self.latents));
        if block > decoder {
            let ([residual, feed_forward], dit) = (BLOCK_WORDS, &self.layout.networks.dit);
            let formula =
                format!("{} tokens x ({residual} x {} + {feed_forward} x {}) x 4 B", self.tokens, dit.dim, dit.ffn_dim);
            return MemoryItem::new("pullback of one block", [block, 0], formula);
        }
        let source = if self.layout.machine.device.is_gpu { "an estimate" } else { "as counted" };
        let words = self.layout.decoder_words();
        let formula = format!("inputs of its blocks, and {words} x the largest in f32; {source}");
        MemoryItem::new("decoder and its pullback", [decoder, 0], formula)
    }

    /// The phases of a step, of all samples of a rank, under the names of their metrics.
    pub fn time(&self) -> Vec<PhaseCost> {
        let (input, speed) = (self.input, self.input.speed);
        let [samples, velocities, recorded, references] =
            [input.samples, input.passes.forward, input.passes.pulled, input.passes.references()].map(|n| n as f64);
        let (forward, attention) = self.forward_flops();
        // Blocks are recomputed; the cotangent takes one product per weight, and a second one if the weight is trained.
        let products = if self.trainable == Trainable::Full { 2.0 } else { 1.0 };
        let pull = forward + products * (forward - attention) + 2.5 * attention;
        let (moved, rate) = match self.layout.placement {
            Placement::Auto | Placement::Resident => (0.0, speed.link),
            Placement::Streamed => (self.layout.weight_bytes() as f64, speed.read),
            Placement::Host => (self.layout.weight_bytes() as f64, HOST_RATE),
            Placement::Sharded => (self.layout.weight_bytes() as f64, speed.link),
        };
        let passes = |name: &str, count: f64, flops: f64| PhaseCost {
            name: name.into(),
            flops: count * flops,
            moved: count * moved,
            seconds: count * (flops / speed.flops).max(moved / rate),
        };
        let decode = self.layout.networks.vae.decoder_flops(self.latents);
        let decoder =
            |name: &str, flops: f64| PhaseCost { name: name.into(), flops, moved: 0.0, seconds: flops / speed.flops };
        let [without_gradient, with_gradient] = input.passes.decoded();
        let decoded = samples * (without_gradient + with_gradient) as f64;
        let mut phases = vec![
            passes("time/rollout", samples * velocities, forward),
            passes("time/reference", samples * references, forward),
            decoder("time/decode", decoded * decode),
            passes("time/pull", samples * recorded, pull),
        ];
        if with_gradient > 0 {
            // Each block is recomputed and pulled back.
            phases.push(decoder("time/pull (decoder)", samples * with_gradient as f64 * 2.0 * decode));
        }
        phases
    }

    /// Floating-point operations of one pass, and of its attention.
    fn forward_flops(&self) -> (f64, f64) {
        let dit = &self.layout.networks.dit;
        let caption = DitConfig::filled(PROMPT_TOKENS);
        let groups =
            [(dit.layers, self.tokens), (dit.noise_refiners, self.tokens - caption), (dit.context_refiners, caption)];
        let (mut products, mut attention) = (0.0, 0.0);
        for (blocks, tokens) in groups {
            let (blocks, tokens) = (blocks as f64, tokens as f64);
            let weights = (4 * dit.dim * dit.dim + 3 * dit.dim * dit.ffn_dim) as f64;
            products += 2.0 * blocks * tokens * weights;
            attention += 4.0 * blocks * tokens * tokens * dit.dim as f64;
        }
        (products + attention, attention)
    }

    /// Settings that would save memory and are not set yet.
    fn hints(&self) -> Vec<String> {
        let mut hints = Vec::new();
        let mut hint = |applies: bool, text: &str| hints.extend(applies.then(|| text.to_string()));
        let layout = &self.layout;
        let is_resident = layout.placement == Placement::Resident;
        hint(
            layout.eight_bits.is_none() && is_resident && self.trainable != Trainable::Full,
            "model.weights_dtype=int8 rounds the matrices of the frozen blocks to eight bits",
        );
        hint(is_resident, "model.weight_store=host keeps the frozen weights in host memory, and prefetches a block");
        hint(self.keeps_attention, "model.keep_attention=false computes results of attention again in the pull");
        hint(
            layout.memory != Memory::Offload,
            "model.use_gradient_checkpointing_offload=true keeps block inputs in host memory",
        );
        hint(true, "fewer pixels: data.height and data.width");
        hints
    }
}
