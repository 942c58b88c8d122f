//! The doubles and `skip!`, as a test elsewhere uses them.

#![allow(clippy::unwrap_used)]

mod gradients;
mod skip;
