//! Bounded access to external files, programs and services.
//!
//! - [`files`]: files read up to a length, and files written whole or not at all.
//! - [`Fingerprint`]: keys of caches, made of files and settings.
//! - [`process`]: child processes that end together with the processes they started.
//! - [`contain`](mod@contain): calls of other crates that may panic or hang.
//! - [`tokenizer_json`]: checks of a tokenizer's file before it is used.
//! - [`service`] (feature `service`): requests to HTTP services.
//!
//! The crate is for the crates with components and for `roll-train`. It is not part of the interfaces: an author of a
//! component does not need it.

pub mod contain;
pub mod files;
mod fingerprint;
pub mod process;
#[cfg(feature = "service")]
pub mod service;
pub mod tokenizer_json;

pub use fingerprint::Fingerprint;
