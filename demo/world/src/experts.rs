//! `demo-world experts`: the two transformers of the demo, trained with `roll run`.

use std::path::{Path, PathBuf};
use std::process::Command;

use roll_core::{DType, Error, Result};
use roll_wan::export::export_expert;
use roll_wan::init::{Sizes, init_experts};
use roll_wan::init_tiny::WanKind;

use crate::clips;

/// Number of people in the training data, one clip per person.
const PEOPLE: u64 = 1000;
/// Number of clips out of ten in which another person replaces the person. The reward then teaches the model to keep
/// the person of the picture.
const SWAPS: u64 = 3;
/// Seed of the initial weights and of the motions.
const SEED: u64 = 3;
/// Folder of each expert, and the suffix of its file name in a checkpoint of both experts.
const EXPERTS: [(&str, &str); 2] = [("high_noise_model", "high_noise"), ("low_noise_model", "low_noise")];

/// Writes the clips, trains both experts with `roll run --config` and writes them below `out` in bf16. `out` must
/// already contain VAE and text encoder. Clips and the run are written below `work`.
pub fn train(out: &Path, work: &Path, config: &Path, steps: Option<u64>) -> Result<()> {
    let data = work.join("clips");
    clips::write_mixed(&data, 0, PEOPLE, SEED, SWAPS)?;
    let sizes = Sizes::default();
    let paths = init_experts(out, WanKind::I2v, &sizes, SEED)?;
    let run = work.join("run");
    if run.exists() {
        return Err(Error::Unsupported(format!(
            "{} is there already: remove it, or give another --work",
            run.display()
        )));
    }
    let program = program()?;
    let mut command = Command::new(&program);
    command.arg("run").arg("--config").arg(config).arg("--out").arg(&run);
    let set = [
        ("model.model_paths", paths),
        ("model.tokenizer_path", out.join("google/umt5-xxl")),
        ("data.metadata", data.join("metadata.csv")),
    ];
    for (key, path) in set {
        command.arg("--set").arg(format!("{key}={}", path.display()));
    }
    if let Some(steps) = steps {
        command.arg("--steps").arg(steps.to_string());
    }
    let status = command.status().map_err(Error::file("start", &program))?;
    if !status.success() {
        return Err(Error::Unsupported(format!("`roll run` ended with {status}; see its messages above")));
    }
    let last = newest(&run.join("checkpoints"))?;
    for (folder, ending) in EXPERTS {
        let trained = last.join(format!("diffusion_pytorch_model_{ending}.safetensors"));
        let folder = out.join(folder);
        export_expert(&trained, &folder, &folder, DType::Bf16)?;
    }
    Ok(())
}

/// Returns the path of `roll`, which is built into the same directory as this program.
fn program() -> Result<PathBuf> {
    let own = std::env::current_exe().map_err(Error::file("find", Path::new("this program")))?;
    let program = own.with_file_name(format!("roll{}", std::env::consts::EXE_SUFFIX));
    match program.is_file() {
        true => Ok(program),
        false => {
            Err(Error::Unsupported(format!("{} is not there: `cargo build --release` makes it", program.display())))
        }
    }
}

/// Returns the checkpoint of the last step.
fn newest(checkpoints: &Path) -> Result<PathBuf> {
    let entries = std::fs::read_dir(checkpoints).map_err(Error::file("read", checkpoints))?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|p| p.is_dir());
    paths.max().ok_or_else(|| Error::bad_file(checkpoints, "expected the checkpoints of a run, found none"))
}
