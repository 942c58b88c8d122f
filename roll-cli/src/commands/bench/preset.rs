//! The networks, video and dtypes that `roll bench` measures, by the name of a preset and the other arguments.

use burn_tensor::DType;
use roll_backends::EightBits;
use roll_core::plan::{Division, Passes, PlanInput, Speed};
use roll_core::{Error, Registry, Result, nearest};
use roll_network::precision::WeightsDType;
use roll_train::config::ConfigLayers;
use roll_wan::dit::{DitConfig, Trainable};
use roll_wan::layout::{Layout, Machine};
use roll_wan::networks::Networks;
use roll_wan::plan::{Plan, PublishedModel};
use roll_wan::vae::VaeConfig;
use roll_wan::{KeepAttention, WanOptions};

use crate::args::Bench;

/// Rank of the LoRA.
pub const LORA_RANK: usize = 32;

/// The networks and the video that are measured: a preset, changed by the arguments.
pub struct Preset<'a> {
    pub args: &'a Bench,
    pub name: &'static str,
    /// The networks, reduced to the measured number of blocks.
    pub networks: Networks,
    /// Blocks of the whole network.
    pub all_layers: usize,
    /// The plan of a step, by which operations are counted.
    pub plan: Plan,
    /// Dtype of stored weights and of products.
    pub dtype: DType,
    /// Dtype of the VAE's decoder.
    pub vae_dtype: DType,
    pub frames: usize,
    /// Height and width of the video.
    pub size: [usize; 2],
    /// Rows of the prompt embedding.
    pub text_len: usize,
    /// Number of passes through each network in a step.
    pub passes: Passes,
}

/// Presets of published models: the preset's name, and the model's name in `roll plan`.
pub const PUBLISHED: [(&str, &str); 3] =
    [("1.3b", "wan2_1-t2v-1_3b"), ("ti2v-5b", "wan2_2-ti2v-5b"), ("a14b", "wan2_2-i2v-a14b")];

const NAMES: [&str; 4] = ["tiny", "1.3b", "ti2v-5b", "a14b"];

impl<'a> Preset<'a> {
    /// The preset that the arguments choose.
    pub fn of(args: &'a Bench) -> Result<Self> {
        // A published model may be named as in `roll plan`, too.
        let wanted = PUBLISHED
            .iter()
            .find(|(_, network)| *network == args.preset)
            .map_or(args.preset.as_str(), |(preset, _)| *preset);
        let name = NAMES.into_iter().find(|name| *name == wanted).ok_or_else(|| Error::UnknownName {
            kind: "preset",
            name: args.preset.clone(),
            nearest: nearest(&args.preset, NAMES).map(Into::into),
            known: NAMES.join(", "),
        })?;
        let (mut networks, dtype, frames, size, text_len) = match name {
            "1.3b" => (published("wan2_1-t2v-1_3b")?, DType::BF16, 81, [480, 832], 512),
            "ti2v-5b" => (published("wan2_2-ti2v-5b")?, DType::BF16, 121, [704, 1280], 512),
            // 21 latent frames of 30x30 patches: 18,900 tokens.
            "a14b" => (published("wan2_2-i2v-a14b")?, DType::BF16, 81, [480, 480], 512),
            _ => (tiny(), DType::F32, 9, [64, 64], 32),
        };
        networks.experts = 1;
        let all_layers = networks.dit.layers;
        if let Some(layers) = args.layers {
            if layers == 0 || layers > all_layers {
                return Err(Error::config("--layers", format!("expected 1 to {all_layers}, found {layers}")));
            }
            networks.dit.layers = layers;
        }
        let dtype = args.dtype.unwrap_or(dtype);
        networks.stored_dtype = dtype;
        let (frames, size) = (args.frames.unwrap_or(frames), args.size.unwrap_or(size));
        check_video(&networks, frames, size)?;
        let passes = passes(args)?;
        let preset = Self {
            plan: plan(args, &networks, frames, size, text_len, &passes)?,
            args,
            name,
            networks,
            all_layers,
            dtype,
            vae_dtype: args.vae_dtype.unwrap_or(DType::F32),
            frames,
            size,
            text_len,
            passes,
        };
        preset.check()?;
        Ok(preset)
    }

    /// Fails on arguments that do not fit each other or the networks.
    fn check(&self) -> Result<()> {
        let [_, videos_with_gradient] = self.passes.decoded();
        if self.args.whole_step && videos_with_gradient == 0 {
            let problem = "expected an algorithm that back-propagates its score, reward_fl, since others record their \
                           passes a few at a time; leave it out to measure phases one by one";
            return Err(Error::config("--whole-step", problem));
        }
        if self.args.fp8_products && self.args.weights_dtype != Some(EightBits::E4m3) {
            return Err(Error::config("--fp8-products", "expected `--weights-dtype fp8` beside it"));
        }
        Ok(())
    }

    /// Channels, frames, height and width of the latents.
    pub fn latent_shape(&self) -> [usize; 4] {
        let vae = &self.networks.vae;
        let [h, w] = self.size.map(|n| n / vae.spatial_stride());
        [vae.z_dim, 1 + (self.frames - 1) / vae.temporal_stride(), h, w]
    }
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
fn plan(
    args: &Bench,
    networks: &Networks,
    frames: usize,
    size: [usize; 2],
    text_len: usize,
    passes: &Passes,
) -> Result<Plan> {
    let input = PlanInput {
        network: None,
        frames,
        size: Some(size),
        memory: None,
        samples: 1,
        ranks: 1,
        passes: passes.clone(),
        division: Division::default(),
        // Any speed does, because only operations and tokens are read from the plan.
        speed: Speed { flops: 1.0, link: 1.0, read: 1.0 },
    };
    let options = WanOptions {
        weight_store: args.weight_store,
        weights_dtype: match args.weights_dtype {
            None => WeightsDType::Auto,
            Some(EightBits::Int8) => WeightsDType::Int8,
            Some(EightBits::E4m3 | EightBits::E5m2) => WeightsDType::Fp8,
        },
        keep_attention: KeepAttention::Of(args.keep_attention),
        ..WanOptions::default()
    };
    let layout = Layout::of(&options, networks.clone(), Machine::planned(&input))?;
    let trained_experts = vec!["dit2".into()];
    Plan::new(layout, input, trainable(), trained_experts, text_len)
}

/// The trained LoRA.
pub fn trainable() -> Trainable {
    let targets = ["q", "k", "v", "o", "ffn.0", "ffn.2"].map(String::from).to_vec();
    Trainable::Lora { rank: LORA_RANK, alpha: LORA_RANK as f64, targets }
}

/// The passes of the algorithm with its default options and the given ones, and with guidance if requested.
fn passes(args: &Bench) -> Result<Passes> {
    let registry = Registry::linked()?;
    let mut layers = ConfigLayers::new().set_text("algo.name", &args.algo, "--algo")?;
    if args.guided {
        // Any scale but 1 takes a second velocity, for the negative prompt and without gradient.
        layers = layers.set_text("algo.guidance_scale", "2", "--guided")?;
    }
    for setting in &args.settings {
        if !setting.starts_with("algo.") || setting.starts_with("algo.name=") {
            return Err(Error::config(setting, "expected an option of the algorithm, `algo.KEY=VALUE`, after --set"));
        }
        layers = layers.set(setting)?;
    }
    let algorithm = layers.load(Some(&registry))?.config.algo;
    registry.passes(&algorithm.name, &algorithm.options)
}

fn published(name: &str) -> Result<Networks> {
    let network = PublishedModel::ALL.iter().find(|n| n.name == name);
    Ok(network.ok_or_else(|| Error::Misuse(format!("no network is called `{name}`")))?.networks())
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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct BenchCommand {
        #[command(flatten)]
        bench: Bench,
    }

    fn args(line: &str) -> Bench {
        BenchCommand::parse_from(line.split_whitespace()).bench
    }

    #[test]
    fn a14b_has_18900_tokens_in_bf16() {
        let args = args("bench --preset a14b");
        let a14b = Preset::of(&args).unwrap();
        assert_eq!((a14b.latent_shape(), a14b.plan.tokens(), a14b.dtype), ([16, 21, 60, 60], 18_900, DType::BF16));
    }

    #[test]
    fn the_step_is_that_of_the_given_options() {
        let passes = |line: &str| Preset::of(&args(line)).map(|preset| preset.passes).map_err(|e| e.to_string());
        let counts = |line: &str| passes(line).map(|passes| (passes.forward, passes.pulled, passes.held()));
        assert_eq!(counts("bench"), Ok((8, 4, 4)));
        let leap = "bench --set algo.trained_steps.leap.discount=0.3 --set algo.mid_timestep=0";
        assert_eq!(counts(leap), Ok((8, 2, 2)));
        assert_eq!(counts("bench --guided --set algo.trained_steps.last=1"), Ok((16, 1, 1)));
        for (wrong, key) in [("model.lora_rank=3", "an option of the algorithm"), ("algo.trained=3", "`algo.trained`")]
        {
            let message = passes(&format!("bench --set {wrong}")).unwrap_err();
            assert!(message.contains(key), "{message}");
        }
    }

    #[test]
    fn whole_step_needs_an_algorithm_that_back_propagates_its_score() {
        let args = args("bench --algo diffusion_nft --whole-step");
        let message = Preset::of(&args).err().unwrap().to_string();
        assert!(message.contains("reward_fl"), "{message}");
    }
}
