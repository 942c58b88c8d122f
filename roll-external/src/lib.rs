//! Files, programs and services that roll did not make: read, started and asked within bounds.
//!
//! - [`files`]: files read up to a length, and files written whole or not at all.
//! - [`Fingerprint`]: keys of caches, made of files and settings.
//! - [`process`]: child processes that end with everything they started.
//! - [`contain`](mod@contain): calls of other crates that may panic or never end.
//! - [`tokenizer_json`]: checks of a tokenizer's file before it is used.
//! - [`service`] (feature `service`): services that are asked over HTTP.
//!
//! *What it is for*: the crates with components, and `roll-train`. *What it is not*: a part of the interfaces; an
//! author of a component does not need it.

pub mod contain;
pub mod files;
mod fingerprint;
pub mod process;
#[cfg(feature = "service")]
pub mod service;
pub mod tokenizer_json;

pub use fingerprint::Fingerprint;
