//! The strategies as a plugin: the code of `roll-backends`, which `roll` has linked in by default, as a library of its
//! own.

use roll_backends as _; // or what it registers is not linked

roll_plugin::export_linked!(Strategy "single", Strategy "zero");
