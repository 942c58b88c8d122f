//! Options of DiffusionNFT that do nothing beside others.

use roll_core::{ConfiguredOptions, Kind, OptionNotes, Result};

use crate::notes::{buckets, shift};

use super::NAME;

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Algorithm, name: NAME, notes }
}

fn notes(said: &ConfiguredOptions<'_>) -> Result<Vec<String>> {
    let of_loss = |loss: &str, keys: &[&str]| match said.is("algo.loss", loss) {
        true => None,
        false => said.idle(keys, &format!("`algo.loss` is not `{loss}`")),
    };
    let bound = match said.value("algo.reward_gradient.weight").and_then(|weight| weight.as_f64()) {
        Some(0.0) => said.idle(&["algo.reward_gradient.max_timestep_boundary"], "`algo.reward_gradient.weight` is 0"),
        _ => None,
    };
    Ok([
        shift(said),
        buckets(said, NAME),
        of_loss("nft", &["algo.beta", "algo.advantage_mode"]),
        of_loss("awm", &["algo.clip_range", "algo.matching"]),
        bound,
    ]
    .into_iter()
    .flatten()
    .collect())
}
