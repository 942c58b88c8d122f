//! Agentic PPO: trains a language model that acts in text environments.
//!
//! The parts are pure functions of grids of per-token values ([`grid`]): rewards of tokens ([`rewards`], [`kl`]),
//! advantages ([`advantages`]), the policy loss and its gradient ([`loss`], [`aggregate`], [`correction`]), and batches
//! of equal work ([`balance`]).

pub mod advantages;
pub mod aggregate;
pub mod balance;
pub mod correction;
pub mod grid;
pub mod kl;
pub mod loss;
pub mod metrics;
pub mod rewards;
pub mod statistics;

pub use aggregate::{Aggregation, Totals};
pub use grid::{Grid, Mask};
pub use loss::{LossConfig, LossInputs, PgVariant, PolicyLoss, RatioType, policy_loss};
