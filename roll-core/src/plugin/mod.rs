//! Components from libraries that somebody else compiled.
//!
//! A plugin is a shared library with three symbols: `roll_plugin_abi` (data: magic and version), `roll_plugin_layout`
//! (Rust plugins: how the types of the boundary are laid out), and `roll_plugin_init`. The loader looks at the file,
//! then at the version, then at the layout, and only then calls anything. What it gets are [`crate::Registration`]s as
//! those that are linked in.
//!
//! At the boundary stand tables of `extern "C"` functions over `#[repr(C)]` types (`abi`, and each kind's own file).
//! The side that owns an object serves it (`call::serve`): panics are caught there, become an error, and the object is
//! not called again. The other side holds a `Foreign` object that implements the trait: its errors name the plugin, the
//! file and the method. Tensors cross as pointers with an owner that can be retained; nothing is copied. Libraries are
//! never unloaded, so whatever points into them stays good.
//!
//! Plugin authors see none of it: they implement a trait of this crate and write one line, such as
//! [`export_reward!`](crate::export_reward).

mod abi;
mod algorithm;
mod call;
pub mod check;
mod data;
mod diffusion;
mod discover;
mod environment;
mod error;
mod export;
mod language;
mod layout;
mod load;
mod log;
mod model;
mod object_file;
mod options;
mod pullback;
mod reward;
mod step;
mod strategy;

pub use abi::ABI_VERSION;
pub use discover::{PATH_VARIABLE, discover};
pub use error::{Chain, PluginError};
pub use load::{LoadedComponent, Plugin, load};
pub use options::{OptionKind, OptionSpec};

/// What the macros need; not for use by hand.
#[doc(hidden)]
pub mod interface {
    pub use super::abi::{RollAbi, RollError, RollHost, RollPlugin};
    pub use super::export::{Metadata, init, linked, made};
    pub use super::layout::{LayoutTag, Structure, structures};
}
