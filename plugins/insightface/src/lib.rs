//! The identity reward as a plugin: the code of `roll-rewards`, which `roll` links in by default, built as a separate
//! library.

use roll_rewards as _; // links its registrations

roll_plugin::export_linked!(Reward "insightface");
