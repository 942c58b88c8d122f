//! Wan2.2 as a plugin: the code of `roll-models`, which `roll` has linked in by default, as a library of its own.

use roll_models as _; // or what it registers is not linked

roll_plugin::export_linked!(Model "wan2_2");
