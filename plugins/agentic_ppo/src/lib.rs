//! Agentic PPO as a plugin: the code of `roll-agents`, which `roll` links in by default, built as a separate library.

use roll_agents as _; // links its registrations

// The parts of `roll-agents` that this library offers.
roll_plugin::export_linked!(
    Algorithm "agentic_ppo",
    Environment "frozen_lake",
    Environment "sokoban",
    Environment "process",
);
