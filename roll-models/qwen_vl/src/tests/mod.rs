//! Parity with transformers, and facts of reading and loading.
#![allow(clippy::unwrap_used)]

mod answering;
mod fixture;
mod loading;
mod parity;
mod plan;
mod policy;
mod reading;
