//! Access to external files, programs and services, bounded in size and time.
//!
//! - [`files`]: files read up to a length, and files written whole or not at all.
//! - [`Fingerprint`]: keys of caches, made of files and settings; [`sha256`]: hashes of files.
//! - [`json`]: JSON with integers of any size, as Python reads and writes it.
//! - [`process`]: child processes that end together with the processes they started.
//! - [`responder`]: child processes that answer requests, within limits of time.
//! - [`contain`](mod@contain): calls into other crates that may panic or hang.
//! - [`tokenizer_json`]: checks of a tokenizer's file before it is used.
//! - [`service`] (feature `service`): requests to HTTP services.
//!
//! `roll-train` and the crates that implement components use this crate. Authors of plugins do not need it. It depends
//! on `roll-core` and on no other crate of this project. Start reading at [`files`] and [`process`].
//!
//! ```
//! use roll_external::{Fingerprint, files};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let path = std::env::temp_dir().join(format!("roll-doc-{}.txt", std::process::id()));
//! files::write_atomically(&path, b"twelve bytes")?;
//! assert_eq!(files::read_text(&path, 12)?, "twelve bytes");
//! assert!(files::read(&path, 11).is_err(), "the file is longer than 11 bytes");
//!
//! let key = |frames| -> roll_core::Result<String> {
//!     Ok(Fingerprint::new("latents").file(&path)?.text("frames", frames).finish())
//! };
//! assert_eq!(key(81)?, key(81)?);
//! assert_ne!(key(81)?, key(49)?, "other settings need another key");
//! # std::fs::remove_file(&path)?;
//! # Ok(())
//! # }
//! ```

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod contain;
pub mod files;
mod fingerprint;
pub mod json;
pub mod process;
pub mod responder;
#[cfg(feature = "service")]
pub mod service;
pub mod tokenizer_json;

pub use fingerprint::{Fingerprint, hex, sha256};
