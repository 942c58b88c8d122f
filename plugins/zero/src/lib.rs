//! The strategies as a plugin: the code of `roll-backends`, which `roll` has linked in by default, as a library of its
//! own.

use roll_backends as _; // links its registrations

roll_plugin::export_linked!(Strategy "single", Strategy "zero");
