//! Shared by the tests of the command line: a small checkpoint, clips, and settings of a run that takes a few
//! hundredths of a second a step.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use roll_core::{BuildContext, Registry, Tensor, Video};
use roll_train::config::ConfigLayers;
use roll_train::run_dir::RunDir;
use roll_train::{RunSession, RunSummary, Trainer};
use roll_wan::init_tiny::{WanKind, init_tiny};
use serde_json::Value;

use crate::program;
pub use crate::program::{fails, stderr_text};

/// Names model, data and sizes.
pub const SETTINGS: [&str; 7] = [
    "model.model_paths=tiny/wan22_paths.json",
    "model.tokenizer_path=tiny/google/umt5-xxl",
    "model.lora_rank=2",
    "data.metadata=metadata.csv",
    "data.height=64",
    "data.width=64",
    "data.num_frames=5",
];

/// Names a small Z-Image, which `roll init-tiny pictures --kind z_image` writes, and the first frames of the clips.
pub const PICTURES: [&str; 5] = [
    "model={name: z_image, model_path: pictures, lora_rank: 2}",
    "data.metadata=metadata.csv",
    "data.height=64",
    "data.width=64",
    "data.num_frames=1",
];

/// As few denoising steps as there can be, and no sample videos.
pub const SHORT: [&str; 4] =
    ["sample_steps=0", "algo.num_inference_steps=2", "algo.mid_timestep=1", "algo.final_timestep=1"];

/// A directory with all of it; commands run there.
pub struct World {
    dir: tempfile::TempDir,
}

impl World {
    /// Makes a world of this number of clips, each of one grey: `0.mp4`, `1.mp4`, ...
    pub fn new(clips: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        init_tiny(dir.path().join("tiny"), WanKind::I2v, 3).unwrap();
        for i in 0..clips {
            let video = Video::new(Tensor::full([9, 3, 64, 64], 0.2 * i as f32 - 0.5), 8.0).unwrap();
            roll_media::write_mp4(dir.path().join(format!("{i}.mp4")), &video).unwrap();
        }
        let rows: String = (0..clips).map(|i| format!("{i}.mp4,a grey square {i}\n")).collect();
        std::fs::write(dir.path().join("metadata.csv"), format!("video,prompt\n{rows}")).unwrap();
        Self { dir }
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// `roll` with these arguments, without settings of the user who runs the test.
    pub fn command(&self, arguments: &[&str]) -> Command {
        program::command(self.dir.path(), arguments)
    }

    /// Runs it to its end.
    pub fn roll(&self, arguments: &[&str]) -> Output {
        program::roll(self.dir.path(), arguments)
    }

    /// Output of a command that must succeed.
    pub fn done(&self, arguments: &[&str]) -> String {
        program::done(self.dir.path(), arguments)
    }

    /// `roll run` on the clips for this many steps, with [`SETTINGS`] and `settings`.
    pub fn training(&self, out: &str, steps: u64, settings: &[&str]) -> Command {
        self.training_of(&SETTINGS, out, steps, settings)
    }

    /// The same for another model: `model` is [`PICTURES`] or [`SETTINGS`].
    pub fn training_of(&self, model: &[&str], out: &str, steps: u64, settings: &[&str]) -> Command {
        let mut command = self.command(&["run", "--out", out, "--steps", &steps.to_string()]);
        for setting in model.iter().chain(settings) {
            command.args(["--set", setting]);
        }
        command
    }

    /// The same through the library, in this process; it must succeed.
    pub fn train(&self, out: &str, steps: u64, settings: &[&str]) -> RunSummary {
        roll_train::signature::keep_key_in(Some(program::STATE.into()));
        let registry = Registry::linked().unwrap();
        let steps = format!("steps={steps}");
        // As for the program: the backend alone comes from the user who runs the test.
        let backend = std::env::var("ROLL_BACKEND").map(|backend| format!("backend={backend}"));
        let mut layers = ConfigLayers::new().set(&steps).unwrap();
        let nowhere = ["data.cache_dir=none"];
        for setting in backend.iter().map(String::as_str).chain(nowhere).chain(SETTINGS).chain(settings.iter().copied())
        {
            layers = layers.set(setting).unwrap();
        }
        let loaded = layers.load(Some(&registry)).unwrap();
        let context = BuildContext {
            seed: loaded.config.seed,
            base_dir: self.dir.path().into(),
            ..BuildContext::new(loaded.config.backend.clone())
        };
        let run = RunDir::create(self.path(out)).unwrap();
        let trained = Trainer::new(loaded, &registry, &context).and_then(|t| t.run(Some(&run), &RunSession::default()));
        trained.unwrap_or_else(|error| panic!("{}", error.chain()))
    }

    /// Metrics of a run without those that differ from run to run.
    pub fn metrics(&self, out: &str) -> Vec<Value> {
        metrics(&self.path(out))
    }

    /// `summary.json` without times, memory and answers from a cache.
    pub fn summary(&self, out: &str) -> Value {
        let mut summary: Value =
            serde_json::from_slice(&std::fs::read(self.path(out).join("summary.json")).unwrap()).unwrap();
        for measured in ["seconds", "peak_memory"] {
            summary.as_object_mut().unwrap().remove(measured);
        }
        for part in ["first", "last"] {
            summary[part].as_object_mut().unwrap().retain(|name, _| !differs(name));
        }
        summary
    }
}

/// Whether a metric differs from run to run: a time, or the requests and tokens that a cache saved.
fn differs(name: &str) -> bool {
    let of_judge = ["answered_from_cache", "/requests", "reward/tokens"];
    name.starts_with("time/") || of_judge.iter().any(|end| name.ends_with(end))
}

/// Metrics of the run in this directory without those that differ from run to run.
pub fn metrics(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let rows = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    rows.map(|mut row| {
        row.as_object_mut().unwrap().retain(|name, _| !differs(name));
        row
    })
    .collect()
}

/// A file of a run's checkpoint.
pub fn checkpoint_file(run: &Path, step: u64, file: &str) -> Vec<u8> {
    let path = run.join(format!("checkpoints/step-{step:06}")).join(file);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}
