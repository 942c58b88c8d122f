//! The plugin boundary of roll: components from libraries that were compiled elsewhere.
//!
//! An author of a plugin depends on this crate only. It re-exports the traits and types of
//! `roll-core` and adds one macro per kind of component, such as [`export_reward!`]. A program that loads plugins
//! enables the feature `host`, which adds `load` and `discover`.
//!
//! Start reading at [`abi`], which has the five C types that cross and the contract that both sides keep (P1 to P9).
//! `boundary` turns traits into calls and calls into traits: a call is a message, JSON with tensors and objects next to
//! it.
//!
//! A reward as a plugin, in a crate whose type is `cdylib`:
//!
//! ```ignore
//! roll_plugin::export_reward!("sharpness", "Contrast of neighbouring pixels", Sharpness);
//! ```

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod abi;
mod boundary;

pub use abi::ABI_VERSION;
#[doc(hidden)]
pub use boundary::interface;
pub use boundary::{ErrorChain, OptionSpec};
#[cfg(feature = "host")]
pub use boundary::{Plugin, PluginComponent, PluginError, current_call, discover, load};
pub use roll_core::*;

/// The environment variable that lists directories, separated as in `PATH`, whose libraries are loaded if they are
/// plugins.
pub const PATH_VARIABLE: &str = "ROLL_PLUGIN_PATH";

inventory::submit! { Variable(PATH_VARIABLE) }
