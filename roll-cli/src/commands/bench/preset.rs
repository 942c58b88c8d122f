//! What `roll bench` measures, by the name of a preset and the other arguments.

use burn_tensor::DType;
use roll_backends::EightBits;
use roll_core::plan::Passes;
use roll_core::{Error, Registry, Result, nearest};
use roll_network::bench::{BenchFacts, BenchNetworks, BenchPreset, BenchRequest, presets};
use roll_train::config::ConfigLayers;

use crate::args::Bench;

/// The networks and the video that are measured: a preset, changed by the arguments.
pub struct Preset<'a> {
    pub args: &'a Bench,
    pub name: &'static str,
    /// The networks, reduced to the measured number of blocks.
    pub networks: Box<dyn BenchNetworks>,
    /// Dtype of the VAE's decoder.
    pub vae_dtype: DType,
    /// Number of passes through each network in a step.
    pub passes: Passes,
}

/// The preset of this name, or of the published networks of this name.
pub fn named(name: &str) -> Option<&'static BenchPreset> {
    presets().into_iter().find(|preset| preset.name == name || preset.network == Some(name))
}

/// The name in `roll plan` of the published networks of a preset; another name is returned as it is.
pub fn network_name(name: &str) -> &str {
    named(name).and_then(|preset| preset.network).unwrap_or(name)
}

impl<'a> Preset<'a> {
    /// The preset that the arguments choose.
    pub fn of(args: &'a Bench) -> Result<Self> {
        // A published model may be named as in `roll plan`, too.
        let preset = named(&args.preset).ok_or_else(|| {
            let names: Vec<&str> = presets().iter().map(|preset| preset.name).collect();
            Error::UnknownName {
                kind: "preset",
                name: args.preset.clone(),
                nearest: nearest(&args.preset, names.iter().copied()).map(Into::into),
                known: names.join(", "),
            }
        })?;
        let passes = passes(args)?;
        let networks = (preset.make)(&BenchRequest {
            layers: args.layers,
            frames: args.frames,
            size: args.size,
            dtype: args.dtype,
            eight_bits: args.weights_dtype,
            fp8_products: args.fp8_products,
            weight_store: args.weight_store,
            offload: args.offload,
            keep_attention: args.keep_attention,
            vae_checkpoints: args.vae_checkpoints,
            passes: passes.clone(),
        })?;
        let vae_dtype = args.vae_dtype.unwrap_or(DType::F32);
        let preset = Self { args, name: preset.name, networks, vae_dtype, passes };
        preset.check()?;
        Ok(preset)
    }

    /// The sizes of the networks and of the step.
    pub fn facts(&self) -> &BenchFacts {
        self.networks.facts()
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
        assert_eq!(
            (a14b.facts().latent_shape, a14b.facts().tokens, a14b.facts().dtype),
            ([16, 21, 60, 60], 18_900, DType::BF16)
        );
    }

    #[test]
    fn z_image_has_4224_tokens_in_bf16() {
        let args = args("bench --preset z-image");
        let facts = Preset::of(&args).unwrap().networks.facts().clone();
        assert_eq!((facts.latent_shape, facts.tokens, facts.dtype), ([16, 1, 128, 128], 4096 + 128, DType::BF16));
        // 6.155 billion weights; the cost of a call by the published sizes, 56.6 TFLOP.
        assert_eq!(facts.parameters, 6_154_908_736);
        let rollout = facts.time.iter().find(|phase| phase.name == "time/rollout").unwrap().flops / 8.0;
        assert!((56.0e12..57.5e12).contains(&rollout), "{rollout:e}");
        assert_eq!(network_name("z-image"), "z-image");
        assert_eq!(network_name("a14b"), "wan2_2-i2v-a14b");
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
