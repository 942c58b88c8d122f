//! Options of Flow-GRPO that do nothing beside others.

use roll_core::{ConfiguredOptions, Kind, OptionNotes, Result};

use crate::notes::{buckets, shift};

use super::NAME;

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Algorithm, name: NAME, notes }
}

fn notes(said: &ConfiguredOptions<'_>) -> Result<Vec<String>> {
    let eta = match said.is("algo.sde", "wan") {
        true => said.idle(&["algo.eta"], "`algo.sde: wan` sets the noise by the table of levels alone"),
        false => None,
    };
    let sliding = match said.is("algo.window_kind", "sliding") {
        true => None,
        false => said.idle(&["algo.window_stride", "algo.window_rounds"], "`algo.window_kind` is not `sliding`"),
    };
    let clip = match said.is("algo.loss", "dppo") {
        true => said.idle(&["algo.clip_range", "algo.clip_range_high"], "`algo.loss: dppo` clips no ratio"),
        false => said.idle(&["algo.divergence_threshold"], "`algo.loss` is not `dppo`"),
    };
    Ok([shift(said), buckets(said, NAME), eta, sliding, clip].into_iter().flatten().collect())
}
