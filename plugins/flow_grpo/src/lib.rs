//! Flow-GRPO as a plugin: the code of `roll-video`, which `roll` has linked in by default, as a library of its own.

use roll_video as _; // links its registrations

roll_plugin::export_linked!(Algorithm "flow_grpo");
