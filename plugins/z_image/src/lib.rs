//! Z-Image as a plugin: the code of `roll-z-image`, which `roll` has linked in by default, as a library of its own.

use roll_z_image as _; // links its registrations

roll_plugin::export_linked!(Model "z_image");
