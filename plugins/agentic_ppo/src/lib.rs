//! Agentic PPO as a plugin: the code of `roll-algos`, which `roll` links in by default, built as a separate library.

use roll_algos as _; // links its registrations

// The parts of `roll-algos` that this library offers.
roll_plugin::export_linked!(
    Algorithm "agentic_ppo",
    Environment "frozen_lake",
    Environment "sokoban",
    Environment "process",
);
