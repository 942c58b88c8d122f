//! Direct preference optimization: trains a language model on pairs of answers, of which one is preferred.
//!
//! A step evaluates both answers of each pair under the policy, and once per pair under the reference, and pulls the
//! [`loss`] back.

mod algorithm;
mod config;
pub mod loss;
mod notes;
mod preferences;
mod reference;
mod report;
mod rows;
mod step;
#[cfg(test)]
mod tests;

pub use algorithm::Dpo;
pub use config::DpoConfig;
pub use preferences::Preferences;

const NAME: &str = "dpo";
