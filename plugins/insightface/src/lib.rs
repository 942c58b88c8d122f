//! The identity reward as a plugin: the code of `roll-rewards`, which `roll` has linked in by default, as a library of
//! its own.

use roll_rewards as _; // links its registrations

roll_plugin::export_linked!(Reward "insightface");
