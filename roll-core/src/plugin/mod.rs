//! Components from libraries that were compiled elsewhere.
//!
//! The crate `roll-abi` has the types that cross, and the contract that both sides keep: tables of `extern "C"`
//! functions over `#[repr(C)]` types. This module turns traits into tables and tables into traits, so that a library
//! offers [`crate::Registration`]s like those that are linked in. Comments about safety name the numbers of the
//! contract (P1 to P9).
//!
//! The side that owns an object serves it (`served`): panics are caught there, become an error, and the object is not
//! called again. The other side holds a `Foreign` object that implements the trait: its errors name the plugin, the
//! file and the method. Each kind has a file in which `crossing!` writes both directions. Tensors cross as
//! pointers with an owner that can be retained; nothing is copied.
//!
//! Plugin authors do not see it: they implement a trait of this crate and write one line, such as
//! [`export_reward!`](crate::export_reward). Programs that load plugins have the feature `host`.

// Both directions of each kind stand together; a plugin takes one of some.
#![cfg_attr(not(feature = "host"), allow(dead_code))]

mod algorithm;
mod communicator;
mod crossing;
mod data;
mod diffusion;
mod environment;
mod error;
mod export;
mod foreign;
mod foreign_model;
mod language;
mod log;
mod memory;
mod model;
mod options;
mod panics;
mod parts;
mod pullback;
mod reward;
mod served;
mod sink;
mod source;
mod step;
mod strategy;
mod tensor;
mod wire;

#[cfg(feature = "host")]
pub mod check;
#[cfg(feature = "host")]
mod discover;
#[cfg(feature = "host")]
mod load;
#[cfg(feature = "host")]
mod object_file;
#[cfg(feature = "host")]
mod under_way;

#[cfg(feature = "host")]
pub use discover::discover;
pub use error::Chain;
#[cfg(feature = "host")]
pub use error::PluginError;
#[cfg(feature = "host")]
pub use load::{LoadedComponent, Plugin, load};
pub use options::{OptionKind, OptionSpec};
pub use roll_abi::ABI_VERSION;
#[cfg(feature = "host")]
pub use under_way::under_way;

/// Lists directories, separated as in `PATH`, whose libraries are loaded when they are plugins.
pub const PATH_VARIABLE: &str = "ROLL_PLUGIN_PATH";

inventory::submit! { crate::Variable(PATH_VARIABLE) }

/// Parts of the macros; not for use by hand.
#[doc(hidden)]
pub mod interface {
    pub use super::export::{Metadata, init, linked, made};
    #[cfg(feature = "abi_stable")]
    pub use roll_abi::StableTypes;
    pub use roll_abi::{RollAbi, RollError, RollHost, RollPlugin};
}
