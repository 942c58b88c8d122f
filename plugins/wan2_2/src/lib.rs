//! Wan2.2 as a plugin: the code of `roll-wan`, which `roll` has linked in by default, as a library of its own.

use roll_wan as _; // links its registrations

roll_plugin::export_linked!(Model "wan2_2");
