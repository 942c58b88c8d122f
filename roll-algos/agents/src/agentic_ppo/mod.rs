//! Agentic PPO: trains a language model that acts in text environments.
//!
//! A step plays episodes ([`rollout`], with [`tools`] that the agent may call), turns scores into rewards of tokens
//! ([`rewards`], [`kl`]) and rewards into advantages ([`advantages`], with a [`critic`] for `gae`), and pulls the
//! policy loss ([`loss`], [`aggregate`], [`correction`]) back through the model. Rewards, advantages and losses are
//! pure functions of grids of per-token values ([`grid`]).

pub mod advantages;
pub mod aggregate;
mod algorithm;
mod batch;
pub mod config;
pub mod correction;
pub mod critic;
pub mod engine;
pub mod episode;
pub mod grid;
pub mod kl;
pub mod loss;
pub mod metrics;
mod notes;
mod plan;
mod prepare;
mod report;
pub mod rewards;
pub mod rollout;
mod selection;
pub mod statistics;
#[cfg(test)]
mod test_support;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_of_answers;
#[cfg(test)]
mod tests_of_pictures;
pub mod tools;
mod updates;

pub use aggregate::{Aggregation, Totals};
pub use algorithm::AgenticPpo;
#[cfg(test)]
pub(crate) use batch::text_samples;
pub use config::AgenticPpoConfig;
pub use grid::{Grid, Mask};
pub use loss::{LossConfig, LossInputs, PgVariant, PolicyLoss, RatioType, policy_loss};
pub use metrics::ActorMetrics;

const NAME: &str = "agentic_ppo";
