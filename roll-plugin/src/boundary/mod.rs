//! Both directions of each trait: from the trait to calls, and from calls to the trait.
//!
//! A call is a message ([`message`]): facts as JSON, tensors as pointers with an owner that can be retained, objects
//! that can be called back. The side that owns an object serves it ([`object`]): it catches a panic of the object,
//! returns it as an error, and does not call the object again. The other side holds a `Remote` object that implements
//! the trait; errors of its calls name the plugin, the file and the method. Each trait has one declaration, in a file
//! of its own, from which both sides follow ([`remote`]). Comments about safety name the numbers of the contract in
//! [`crate::abi`] (P1 to P9).
//!
//! Words of these files. The host and a plugin both run this code: *this side* is the one that runs it, *the other
//! side* the one that it calls or that calls it.
//!
//! | | for one call (P1) | with ownership (P2) |
//! |---|---|---|
//! | a message that this side writes, `Outgoing` | `lend` | `give` |
//! | a message that this side reads, `Incoming` | `lent` | `owned` |
//! | an object of this side in a message | `Loan`, made by `lend` | `Gift`, made by `give` |
//! | an object of the other side | `Remote` without `release` | `Remote` with `release` |
//! | a tensor of this side in a message | `list`, of a caller's slice | `share` |
//! | a tensor of the other side | `receive` | `take` |

// Each file has both directions of its trait, of which a plugin uses only one for some traits.
#![cfg_attr(not(feature = "host"), allow(dead_code))]

mod algorithm;
mod communicator;
mod diffusion;
mod environment;
mod error;
mod export;
mod language;
mod log;
mod memory;
mod message;
mod model;
mod object;
mod options;
mod panics;
mod parts;
mod progress;
mod pullback;
mod remote;
mod remote_model;
mod reward;
mod sink;
mod source;
mod strategy;
mod tensor;

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
    pub use super::export::{Metadata, call, linked, made};
    #[cfg(feature = "abi_stable")]
    pub use crate::abi::StableTypes;
    pub use crate::abi::{RollAbi, RollMessage, RollStr};
}
