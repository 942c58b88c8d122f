//! Trains the demo's video model with a reward that is defined here, in a Rust program:
//!
//!     cargo run --release -p roll-train --example own_reward [STEPS]
//!
//! The reward pulls the mean colour of every pixel towards red. A reward in a library of its own is
//! `examples/reward-plugin-template`.

use std::path::Path;

use roll_core::{
    BuildContext, Factory, Grad, Kind, Measure, Pullback, Registration, Registry, Result, RewardScorer, Score, Target,
    Tensor, Video, default_options, inventory, parse_options,
    serde::{Deserialize, Serialize},
};
use roll_train::config::ConfigLayers;
use roll_train::run_dir::{Existing, RunDir};
use roll_train::{RunSession, Trainer};

// A crate that is only named in Cargo.toml registers nothing.
use roll_algos as _;
use roll_models as _;

/// Mean of red minus the mean of green and blue, times `gain`; the fields are the options in the configuration.
#[derive(Serialize, Deserialize)]
#[serde(crate = "roll_core::serde", default)]
struct Redness {
    gain: f32,
}

impl Default for Redness {
    fn default() -> Self {
        Self { gain: 1.0 }
    }
}

impl RewardScorer for Redness {
    fn name(&self) -> &str {
        "redness"
    }

    fn measures(&self) -> Measure {
        Measure::new("redness")
    }

    fn differentiable(&self) -> bool {
        true
    }

    /// The score is linear in the frames: its gradient is the weight of each channel, whatever the frames are.
    fn score(&mut self, video: &Video, _: &str, _: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        let [frames, height, width] = video.dims();
        let pixels = height * width;
        let scale = self.gain / (frames * pixels) as f32;
        let weights = [scale, -scale / 2.0, -scale / 2.0];
        let planes = video.planes().flatten();
        let value = planes.zip(weights.iter().cycle()).map(|(plane, w)| w * plane.iter().sum::<f32>()).sum::<f32>();
        let pullback = grad.is_on().then(|| {
            Pullback::new(move |cotangent: &Tensor| {
                let cotangent = cotangent.item()?;
                let gradient: Vec<f32> =
                    (0..frames * 3 * pixels).map(|i| cotangent * weights[i / pixels % 3]).collect();
                Tensor::new(gradient, [frames, 3, height, width])
            })
        });
        Ok((Score::of(f64::from(value)), pullback))
    }
}

inventory::submit! {
    Registration {
        name: "redness",
        summary: "Red against green and blue",
        origin: "own_reward",
        version: "1",
        defaults: default_options::<Redness>,
        keys: roll_core::keys::of_defaults::<Redness>,
        factory: Factory::Reward(|options, _| {
            Ok(Box::new(parse_options::<Redness>(Kind::Reward.section(), options)?))
        }),
        planner: None,
    }
}

fn main() -> Result<()> {
    let steps = std::env::args().nth(1).unwrap_or_else(|| "8".into());
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/assets");
    let yaml = "
exp_name: redness
algo: { name: reward_fl, kl_weight: 0.05 }
model: { name: wan2_2, model_paths: DEMO/wan22_paths.json, tokenizer_path: DEMO/google/umt5-xxl, lora_rank: 8 }
reward: { name: redness, gain: 2.0 }
training: { learning_rate: 3.0e-3 }
data: { metadata: DEMO/clips/train/metadata.csv, height: 64, width: 64, num_frames: 5 }
sample_steps: 0
";
    let registry = Registry::linked()?;
    let config = ConfigLayers::new().text("own_reward.rs", &yaml.replace("DEMO", &demo.to_string_lossy()))?;
    let loaded = config.set_text("steps", &steps, "the argument")?.load(Some(&registry))?;
    let context = BuildContext { seed: loaded.config.seed, ..BuildContext::new(loaded.config.backend.clone()) };

    let directory = std::env::temp_dir().join(format!("roll-own-reward-{}", std::process::id()));
    let run = RunDir::create(directory, Existing::Refuse)?;
    let summary = Trainer::new(loaded, &registry, &context)?.run(Some(&run), &RunSession::default())?;
    for name in ["actor/score", "actor/kl_loss"] {
        println!("{name}: {:.4} at the first step, {:.4} at the last", summary.first[name], summary.last[name]);
    }
    println!("{}", run.path().join("report.html").display());
    Ok(())
}
