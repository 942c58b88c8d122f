//! `roll bench`: how fast this machine makes a step of an algorithm with a model of a given size, phase by phase.
//!
//! Networks have the preset's shapes and random weights, so nothing is downloaded. The phases sum up to the step that a
//! run would make; with `--whole-step`, whole steps are made. Rates are compared with that of the fastest matrix
//! product of the same shapes on the same device.

mod fixture;
mod measure;
mod memory;
pub(super) mod preset;
mod report;
mod scorer;
mod step;

use roll_backends::ops::Fp8Products;
use roll_core::{Error, Result};
use roll_network::options::{Placement, VaeDType};
use roll_network::precision::DeviceTraits;

use crate::args::Bench;
use crate::output::refuse_existing;
use fixture::Fixture;
use measure::Round;
use memory::Meter;
use preset::Preset;

/// Measures the step that the arguments describe, and prints or saves the result.
pub fn bench(args: Bench) -> Result<()> {
    if args.rounds == 0 {
        return Err(Error::config("--rounds", "must be above 0"));
    }
    let json_file = args.json.iter().filter(|path| path.as_os_str() != "-");
    json_file.into_iter().try_for_each(|path| refuse_existing(path, args.force))?;
    if args.weight_store == Placement::Streamed && args.weights_dtype.is_some() {
        let problem = "weights in eight bits are not streamed: leave `--weights-dtype` out, or choose `host`";
        return Err(Error::config("--weight-store", problem));
    }
    let mut preset = Preset::of(&args)?;
    // Opening a device takes none of its memory, and reports a missing part before anything takes minutes.
    let device = roll_backends::device(&args.backend)?;
    if args.fp8_products
        && let Fp8Products::Missing(reason) = Fp8Products::of(&device)
    {
        let problem = format!("`{}` takes no products in fp8: {reason}", args.backend);
        return Err(Error::config("--fp8-products", problem));
    }
    preset.vae_dtype = args.vae_dtype.map_or_else(|| VaeDType::Auto.of(DeviceTraits::of(&device)), Ok)?;
    // Made before the first tensor, so that all memory of this process counts.
    let meter = Meter::new(&device, &args.backend);
    let measured = {
        let mut fixture = Fixture::new(&preset, &device)?;
        let no_ceiling_yet = None;
        let save = |measured: &measure::Measurement| preset.save(measured, no_ceiling_yet);
        measure::measure_step(&preset, args.rounds, &meter, &save, |timer, round| match round {
            Round::WholeStep => step::whole(&mut fixture, &preset, timer),
            Round::Phases => step::by_phases(&mut fixture, &preset, timer),
        })?
    };
    // Measured last, because its matrices would count as memory of the step.
    let ceiling = measure::peak_product_rate(&preset, &device)?;
    preset.report(&measured, ceiling)
}
