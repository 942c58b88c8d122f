//! `roll bench`: how fast this machine makes a Reward-FL step of a model of a given size, phase by phase.
//!
//! Networks have the preset's shapes and random weights, so nothing is downloaded. What the phases sum up to is the step
//! that a run would make; what they are measured against is the fastest product of matrices of the same run.

mod fixture;
mod measure;
mod memory;
mod preset;
mod report;
mod scorer;
mod torch;

use std::path::PathBuf;

use clap::Args;
use roll_core::{Error, Result};

use fixture::Fixture;
use measure::Measured;
use preset::Preset;

/// Arguments of `roll bench`.
#[derive(Debug, Args)]
pub struct Bench {
    /// Shapes of the networks and of the video: tiny, 1.3b, ti2v-5b, a14b (one expert).
    #[arg(long, default_value = "tiny", value_name = "NAME")]
    pub preset: String,
    /// Tensor backend and device: flex, libtorch, libtorch-cuda[:N], cuda[:N], wgpu[:N].
    #[arg(long, default_value = "flex", value_name = "NAME")]
    pub backend: String,
    /// What weights are stored in and products taken in, f32 or bf16; the preset's unless given.
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<preset::DTypeName>,
    /// Blocks of the transformer; the preset's unless given. Times of the others follow.
    #[arg(long, value_name = "N")]
    pub layers: Option<usize>,
    /// Frames of the video; the preset's unless given.
    #[arg(long, value_name = "N")]
    pub frames: Option<usize>,
    /// Height and width of the video, 480x832; the preset's unless given.
    #[arg(long, value_name = "HxW")]
    pub size: Option<preset::Size>,
    /// Times that each phase is measured; the median counts. One more run warms up.
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub rounds: usize,
    /// Keep block inputs in host memory between forward and pull.
    #[arg(long)]
    pub offload: bool,
    /// Leave out encoding, decoding and their pulls, which take most of the time of small transformers.
    #[arg(long)]
    pub without_vae: bool,
    /// The same shapes in PyTorch, by the Python in the variable PYTHON (`python3`, if it is not set).
    #[arg(long)]
    pub compare: bool,
    /// Write the result as JSON too; `-` prints it instead of the table.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Measures, prints, and compares if that was asked for.
pub fn bench(args: Bench) -> Result<()> {
    if args.rounds == 0 {
        return Err(Error::config("--rounds", "must be above 0"));
    }
    let preset = Preset::of(&args)?;
    let device = roll_backends::device(&args.backend)?;
    let ceiling = measure::ceiling(&preset, &device)?;
    let phases = {
        let mut fixture = Fixture::new(&preset, &device)?;
        measure::phases(&mut fixture, &preset, args.rounds, &memory::Meter::new(&device, &args.backend))?
    };
    let measured = Measured { ceiling, phases };
    let theirs = match args.compare {
        true => Some(torch::measure(&preset, &args.backend, args.rounds)?),
        false => None,
    };
    report::write(&args, &preset, &measured, theirs.as_ref())
}
