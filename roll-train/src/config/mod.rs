//! Configuration of a run: typed, layered, and explained.
//!
//! There are four layers, lowest first: the defaults, YAML files in their order, environment variables
//! (`ROLL_TRAINING__LEARNING_RATE=1e-5`), and arguments (`--set training.learning_rate=1e-5`). The maps of a higher
//! layer merge with the maps of a lower one. Any other value, such as a list, is replaced, and so is a map that chooses
//! something else (`merge.rs`). Unknown keys are errors that name the nearest known one, in every layer and in the
//! options of components. A file may be composed as in Hydra (`defaults`, `${a.b}`), and ROLL's own
//! `reward_fl_config.yaml` is read as it is.
//!
//! [`ConfigLayers`] collects the layers, [`MergedConfig`] is the result of merging them, and [`LoadedConfig`] is the
//! checked result. It remembers which layer each value came from.

mod compose;
mod consent;
mod declared;
mod interpolate;
mod layers;
mod loaded;
mod merge;
mod merged;
mod notes;
mod provenance;
mod reference;
mod run;
mod schema;
mod secrets;
mod sections;
#[cfg(test)]
mod test_sections;
mod trackers;
mod training;
mod yaml;

pub use declared::{DeclaredSection, SectionType};
pub use layers::ConfigLayers;
pub use loaded::{Entry, LoadedConfig};
pub use merged::MergedConfig;
pub use provenance::Provenance;
pub use roll_core::{Component, RewardComponent};
pub use run::RunConfig;
pub use schema::general;
pub use secrets::without_secrets;
pub use sections::{Section, sections, select_sections};
pub use trackers::Tracker;
pub use training::TrainingConfig;
