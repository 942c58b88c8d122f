//! The types that cross the boundary between `roll` and its plugins, and the contract that both sides keep.
//!
//! Everything is `#[repr(C)]` and made of numbers, pointers and `extern "C"` functions, so that a plugin may be written
//! in any language; `roll-plugin/include/roll_plugin.h` has the same types in C, for rewards. An author of a Rust
//! plugin does not see this module: `boundary` turns tables into traits and traits into tables.
//!
//! A plugin is a shared library with up to three symbols: `roll_plugin_abi` ([`RollAbi`]), `roll_plugin_init`
//! ([`InitFn`]), and `roll_plugin_types` of Rust plugins (`StableTypes`, feature `abi_stable`). The loader looks at the
//! file, then at the version, then at the types, and only then calls anything.
//!
//! A text as it crosses, a pointer and a length that are lent for the call (P1, P9):
//!
//! ```
//! use roll_plugin::abi::RollStr;
//!
//! let name = String::from("sharpness");
//! let lent = RollStr { data: name.as_ptr(), len: name.len() };
//!
//! // SAFETY: `name` lives longer than `lent`.
//! let bytes = unsafe { std::slice::from_raw_parts(lent.data, lent.len) };
//! assert_eq!(bytes, name.as_bytes());
//! ```
//!
//! # The contract
//!
//! Both sides keep it; comments about safety refer to it by number.
//!
//! - **P1, lent.** A pointer in an argument is lent for the call: that holds for texts, lists, tensors, and objects
//!   without `release`. To keep a tensor, call its `retain`, or copy it if that is null.
//! - **P2, owned.** An answer belongs to the caller, who calls each `release` once with its `owner` (or `state`). An
//!   object with `release` in an argument belongs to the callee. A null `release` means that there is nothing to free.
//!   `release` may be called on any thread.
//! - **P3, permanent.** Tables, and a plugin's description of itself, live and stay unchanged as long as the library,
//!   which is never unloaded; [`RollHost`] lives as long as the process.
//! - **P4, threads.** An object is called by one thread at a time, not always the same one. Several may call at once:
//!   the functions that a trait takes by `&self` where that trait is `Sync` (communicators, gradient sinks), those of
//!   [`RollHost`] and of [`RollProgress`], and `make` and `plan` of a component.
//! - **P5, panics.** No panic, exception or `longjmp` crosses. A side whose code panicked answers with an error and
//!   answers every later call of that object with an error too. Objects that it lent out (a gradient sink) count as
//!   parts of it.
//! - **P6, growth.** Tables, and descriptions that may grow, begin with their size in bytes ([`Grows`]). They grow at
//!   the end and in a minor version only, by members for which all bytes zero mean "not there". A reader takes the
//!   smaller of the two sizes; members beyond it are absent. Everything else has the same layout as long as the major
//!   version is the same.
//! - **P7, answers.** A function that returns `u32` returns [`OK`] after it filled in `out`, if it has one, and
//!   anything else after it filled in `error`. `out` and `error` may be written, and hold nothing that must be
//!   released.
//! - **P8, kinds.** The `table` of an object is that of one kind: the kind of the function that made or takes the
//!   object. A null table in an argument means that there is no such object.
//! - **P9, values.** Texts are UTF-8 without a final zero. A flag is 1 for yes and 0 for no. A list of length 0 may
//!   have any pointer; others are aligned and hold the stated number of items.
#![allow(missing_docs)] // the header documents each field

#[macro_use]
mod growth;
mod algorithm;
mod environment;
mod model;
mod plugin;
mod reward;
#[cfg(feature = "abi_stable")]
mod stable;
mod strategy;
mod values;

pub use algorithm::*;
pub use environment::*;
pub use growth::{Grows, read};
pub use model::*;
pub use plugin::*;
pub use reward::*;
#[cfg(feature = "abi_stable")]
pub use stable::StableTypes;
pub use strategy::*;
pub use values::*;

/// Major and minor version of the boundary: those of this crate.
pub const ABI_VERSION: [u32; 2] = [number(env!("CARGO_PKG_VERSION_MAJOR")), number(env!("CARGO_PKG_VERSION_MINOR"))];

/// The beginning of the symbol `roll_plugin_abi`.
pub const MAGIC: [u8; 8] = *b"ROLLPLUG";

/// Success of a call; anything else means that the error was filled in.
pub const OK: u32 = 0;

pub const FAULT_USER: u32 = 1;
pub const FAULT_FAILURE: u32 = 2;
pub const FAULT_INTERRUPT: u32 = 3;
/// A reference holds nothing to compare with: the fault of one sample, and not of the run.
pub const FAULT_NOTHING: u32 = 4;

/// The dtype of a tensor that is not there.
pub const NO_TENSOR: u32 = u32::MAX;

/// Between the messages of an error's chain, outermost first: ASCII's record separator.
pub const CHAIN: char = '\u{1e}';

const fn number(digits: &str) -> u32 {
    let (digits, mut at, mut number) = (digits.as_bytes(), 0, 0);
    while at < digits.len() {
        number = 10 * number + (digits[at] - b'0') as u32;
        at += 1;
    }
    number
}
