//! Both directions of each trait: from the trait to its table, and from a table to the trait.
//!
//! The side that owns an object serves it (`served`): panics are caught there, become an error, and the object is not
//! called again. The other side holds a `Foreign` object that implements the trait: its errors name the plugin, the
//! file and the method. Each kind has a file in which `crossing!` writes both directions. Tensors cross as pointers
//! with an owner that can be retained; nothing is copied. Comments about safety name the numbers of the contract in
//! [`crate::abi`] (P1 to P9).
//!
//! Verbs of the functions here, by the direction of the value and its owner:
//!
//! | verb | side | direction | owner of the memory |
//! |---|---|---|---|
//! | `lend` | caller | Rust argument to a holder of its memory | caller, for the call (P1) |
//! | `wire` | caller | holder to C argument | caller, for the call (P1) |
//! | `receive` | callee | C argument to a Rust value | caller; the value ends with the call (P1) |
//! | `borrow` | callee | Rust value to the argument of the method | callee's borrow, for the call |
//! | `give` | callee | Rust result to C result | passes to the caller (P2) |
//! | `take` | caller | C result to Rust result | caller, who releases it once (P2) |
//! | `own` | both | Rust list to C list with its `release` | passes to the other side (P2) |
//! | `serve` | callee | C call to the method of a Rust object | unchanged; catches panics (P5) |

// Each file has both directions of its kind; a plugin uses one direction of some.
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
mod current_call;
#[cfg(feature = "host")]
mod discover;
#[cfg(feature = "host")]
mod load;
#[cfg(feature = "host")]
mod object_file;

#[cfg(feature = "host")]
pub use current_call::current_call;
#[cfg(feature = "host")]
pub use discover::discover;
pub use error::ErrorChain;
#[cfg(feature = "host")]
pub use error::PluginError;
#[cfg(feature = "host")]
pub use load::{Plugin, PluginComponent, load};
pub use options::OptionSpec;

/// Parts of the macros; not for use by hand.
#[doc(hidden)]
pub mod interface {
    pub use super::export::{Metadata, init, linked, made};
    #[cfg(feature = "abi_stable")]
    pub use crate::abi::StableTypes;
    pub use crate::abi::{RollAbi, RollError, RollHost, RollPlugin};
}
