//! The identity reward as a plugin: the code of `roll-rewards`, which `roll` has linked in by default, as a library of
//! its own.

use roll_rewards as _; // or what it registers is not linked

roll_plugin::export_linked!(Reward "insightface");
