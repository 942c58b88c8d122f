//! Options of DiffusionNFT that have no effect in combination with others.

use roll_core::{IdleKeys, Kind, OptionNotes, When};

use crate::notes::{SHIFT, buckets};

use super::NAME;

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Algorithm, name: NAME, idle: IDLE, more: Some(buckets) }
}

const IDLE: &[IdleKeys] = &[
    SHIFT,
    IdleKeys {
        keys: &["algo.beta", "algo.advantage_mode"],
        when: When::IsNot("algo.loss", &["nft"]),
        because: "`algo.loss` is not `nft`",
    },
    IdleKeys {
        keys: &["algo.clip_range", "algo.matching"],
        when: When::IsNot("algo.loss", &["awm"]),
        because: "`algo.loss` is not `awm`",
    },
    IdleKeys {
        keys: &["algo.reward_gradient.max_timestep_boundary"],
        when: When::Is("algo.reward_gradient.weight", &["0"]),
        because: "`algo.reward_gradient.weight` is 0",
    },
];
