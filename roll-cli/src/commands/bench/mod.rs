//! `roll bench`: how fast this machine makes a step of an algorithm with a model of a given size, phase by phase.
//!
//! Networks have the preset's shapes and random weights, so nothing is downloaded. What the phases sum up to is the step
//! that a run would make; what they are measured against is the fastest product of matrices of the same run.

mod fixture;
mod measure;
mod memory;
pub(super) mod preset;
mod report;
mod scorer;
mod torch;

use roll_core::{Error, Result};

use crate::args::Bench;
use fixture::Fixture;
use measure::Measured;
use preset::Preset;

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
