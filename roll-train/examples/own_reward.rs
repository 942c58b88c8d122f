//! Trains the demo's video model with a reward that is defined here, in a Rust program:
//!
//!     cargo run --release -p roll-train --example own_reward [STEPS]
//!
//! The reward pulls the mean colour of every pixel towards red. A reward in a library of its own is
//! `examples/reward-plugin-template`.

use std::path::Path;

use roll_core::serde::{Deserialize, Serialize};
use roll_core::{Grad, Measure, Pullback, Registry, Result, RewardScorer, Score, Target, Tensor, Video};
use roll_train::{Run, RunSummary};
use roll_video::reward_fl::RewardFlConfig;
use roll_video::rows::DataConfig;
use roll_wan::WanOptions;

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
        // One plane for each channel of each frame, in the order red, green, blue.
        let planes = video.planes().flatten();
        let weighted_sums =
            planes.zip(weights.iter().cycle()).map(|(plane, weight)| weight * plane.iter().sum::<f32>());
        let value = weighted_sums.sum::<f32>();
        let pullback = grad.is_on().then(|| {
            Pullback::new(move |cotangent: &Tensor| {
                let cotangent = cotangent.item()?;
                let channel_of = |i: usize| i / pixels % weights.len();
                let gradient: Vec<f32> =
                    (0..frames * weights.len() * pixels).map(|i| cotangent * weights[channel_of(i)]).collect();
                Tensor::new(gradient, [frames, weights.len(), height, width])
            })
        });
        Ok((Score::of(f64::from(value)), pullback))
    }
}

/// Number of steps if the command line names none.
const DEFAULT_STEPS: u64 = 8;

/// Trains for `steps` steps, and keeps the run in `directory`.
pub fn train(steps: u64, directory: &Path) -> Result<RunSummary> {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/assets");
    let registry = Registry::linked()?.with_reward("redness", |options: Redness, _| Ok(options))?;
    let run = Run::builder(&registry)
        .model(WanOptions {
            model_paths: Some(demo.join("wan22_paths.json").into()),
            tokenizer_path: Some(demo.join("google/umt5-xxl")),
            lora_rank: Some(8),
            ..WanOptions::default()
        })
        .algorithm(RewardFlConfig { kl_weight: 0.05, ..RewardFlConfig::default() })
        .reward("redness", Redness { gain: 2.0 })
        .section(DataConfig {
            metadata: Some(demo.join("clips/train/metadata.csv")),
            height: Some(64),
            width: Some(64),
            num_frames: 5,
            ..DataConfig::default()
        })
        .set("training.learning_rate", 3e-3)
        .set("sample_steps", 0)
        .steps(steps)
        .dir(directory)
        .build()?;
    run.train()
}

fn main() -> Result<()> {
    let steps = match std::env::args().nth(1) {
        Some(steps) => steps.parse().expect("STEPS is a whole number"),
        None => DEFAULT_STEPS,
    };
    let directory = std::env::temp_dir().join(format!("roll-own-reward-{}", std::process::id()));
    let summary = train(steps, &directory)?;
    for name in ["actor/score", "actor/kl_loss"] {
        println!("{name}: {:.4} at the first step, {:.4} at the last", summary.first[name], summary.last[name]);
    }
    for (name, path) in &summary.written {
        println!("{name}: {}", path.display());
    }
    Ok(())
}
