//! Options of Flow-GRPO that have no effect in combination with others.

use roll_core::{IdleKeys, Kind, OptionNotes, When};

use crate::kl_reference::KL_REFERENCE;
use crate::notes::{GUIDANCE, SHIFT, policy_gradient};

use super::NAME;

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Algorithm, name: NAME, idle: IDLE, more: Some(policy_gradient) }
}

/// Keys without effect under a condition on one key.
const IDLE: &[IdleKeys] = &[
    SHIFT,
    GUIDANCE,
    KL_REFERENCE,
    IdleKeys {
        keys: &["algo.eta"],
        when: When::Is("algo.sde", &["wan"]),
        because: "`algo.sde: wan` sets the noise by the table of levels alone",
    },
    IdleKeys {
        keys: &["algo.window_stride", "algo.window_rounds"],
        when: When::IsNot("algo.window_kind", &["sliding"]),
        because: "`algo.window_kind` is not `sliding`",
    },
    IdleKeys {
        keys: &["algo.clip_range", "algo.clip_range_high"],
        when: When::Is("algo.loss", &["dppo"]),
        because: "`algo.loss: dppo` clips no ratio",
    },
    IdleKeys {
        keys: &["algo.divergence_threshold"],
        when: When::IsNot("algo.loss", &["dppo"]),
        because: "`algo.loss` is not `dppo`",
    },
    IdleKeys {
        keys: &["algo.clip_range", "algo.clip_range_high", "algo.divergence_threshold"],
        when: When::Is("algo.updates_per_step", &["1"]),
        because: "with one update a step every ratio is 1, within any bound",
    },
];
