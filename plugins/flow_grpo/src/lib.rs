//! Flow-GRPO as a plugin: the code of `roll-algos`, which `roll` has linked in by default, as a library of its own.

use roll_algos as _; // or what it registers is not linked

roll_plugin::export_linked!(Algorithm "flow_grpo");
