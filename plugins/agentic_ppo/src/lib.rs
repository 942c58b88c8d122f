//! Agentic PPO as a plugin: the code of `roll-algos`, which `roll` has linked in by default, as a library of its own.

use roll_algos as _; // links its registrations

roll_plugin::export_linked!(
    Algorithm "agentic_ppo",
    Environment "frozen_lake",
    Environment "sokoban",
    Environment "process",
);
