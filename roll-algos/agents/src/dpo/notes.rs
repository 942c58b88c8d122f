//! Options of DPO that have no effect in combination with others.

use roll_core::{ConfiguredOptions, IdleKeys, Kind, OptionNotes, Result, When};

use super::NAME;
use crate::notes::{DATA, VIDEOS, refuse_clips};

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Algorithm, name: NAME, idle: IDLE, more: Some(preferences) }
}

const IDLE: &[IdleKeys] = &[
    DATA,
    VIDEOS,
    IdleKeys {
        keys: &["algo.label_smoothing", "algo.margin", "algo.length_normalised"],
        when: When::Is("algo.ipo", &["true"]),
        because: "the loss of `algo.ipo: true` has neither smoothing nor a margin, and always normalises lengths",
    },
];

/// Refuses clips.
fn preferences(config: &ConfiguredOptions<'_>) -> Result<Vec<String>> {
    let reasons =
        ["preferences to train on are named by `algo.data`", "preferences to validate on are named by `algo.val_data`"];
    refuse_clips(config, reasons).map(|()| Vec::new())
}
