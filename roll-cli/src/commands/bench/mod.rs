//! `roll bench`: how fast this machine makes a step of an algorithm with a model of a given size, phase by phase.
//!
//! Networks have the preset's shapes and random weights, so nothing is downloaded. The phases sum up to the step that a
//! run would make, and `--whole-step` makes it; they are measured against the fastest product of matrices of the same
//! run.

mod fixture;
mod measure;
mod memory;
pub(super) mod preset;
mod report;
mod scorer;
mod step;
mod torch;

use roll_core::{Error, Result};

use crate::args::Bench;
use fixture::Fixture;
use memory::Meter;
use preset::Preset;

/// Measures, prints, and compares if that was asked for.
pub fn bench(args: Bench) -> Result<()> {
    if args.rounds == 0 {
        return Err(Error::config("--rounds", "must be above 0"));
    }
    let preset = Preset::of(&args)?;
    let request = torch::Request::new(&args, &preset)?;
    if args.request {
        println!("{request}");
        return Ok(());
    }
    // Opening a device takes none of its memory, and tells a missing part before anything takes minutes.
    let device = roll_backends::device(&args.backend)?;
    // Begins to count before anyone works there: whatever this process takes is its own.
    let meter = Meter::new(&device, &args.backend);
    // PyTorch is gone before the first of our tensors is made: the two together may be more than a GPU has.
    let theirs = match &args.theirs {
        Some(file) => Some(torch::read(&request, file)?),
        None if args.compare => Some(torch::measure(&request)?),
        None => None,
    };
    let measured = {
        let mut fixture = Fixture::new(&preset, &device)?;
        measure::step(&mut fixture, &preset, args.rounds, &meter)?
    };
    // After the step, whose memory it would add to.
    let ceiling = measure::ceiling(&preset, &device)?;
    report::write(&args, &preset, &report::Found { measured, ceiling, theirs })
}
