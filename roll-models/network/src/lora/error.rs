//! Errors of LoRA files.

use std::path::{Path, PathBuf};

use roll_core::{Error, Fault};

use crate::weights::WeightsError;

use super::layer_names;

/// Why a LoRA cannot be read, written or merged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the message of a variant names its fields
pub enum LoraError {
    /// An error of the weight file.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A file that is not a valid LoRA, or does not fit its base.
    #[error("{}: {problem}", path.display())]
    Invalid { path: PathBuf, problem: String },
    /// The convention cannot represent something in the LoRA.
    #[error("{0}")]
    Unrepresentable(String),
    /// A value is not finite, or a merged weight would not be.
    #[error("{}: the {what} of `{name}` is not finite", path.display())]
    NotFinite {
        path: PathBuf,
        /// The kind of value: `alpha`, `merged weight`.
        what: &'static str,
        name: String,
    },
    /// No layer of the LoRA is in the base.
    #[error("{}: no layer of the LoRA is in the base: it has {found}, the LoRA {wanted}", base.display())]
    NothingMatched {
        base: PathBuf,
        /// Some names of the base.
        found: String,
        /// Some names of the LoRA.
        wanted: String,
    },
    /// The file has adapters for both transformers, but one is required.
    #[error("{}: holds adapters for both transformers; choose one (--expert)", path.display())]
    TwoExperts { path: PathBuf },
    /// The file has no adapter for this expert.
    #[error("{}: holds no adapter for the expert {expert}{}", path.display(), other_expert(.found))]
    NoExpert {
        path: PathBuf,
        /// The requested expert.
        expert: super::Expert,
        /// The expert of the adapter in the file, if it is known.
        found: Option<super::Expert>,
    },
}

fn other_expert(found: &Option<super::Expert>) -> String {
    found.map(|expert| format!("; it is for {expert}")).unwrap_or_default()
}

impl LoraError {
    pub(super) fn invalid(path: &Path, problem: impl Into<String>) -> Self {
        Self::Invalid { path: path.into(), problem: problem.into() }
    }
}

impl From<LoraError> for Error {
    fn from(e: LoraError) -> Self {
        match e {
            LoraError::Weights(e) => e.into(),
            e => Error::component(Fault::User, e),
        }
    }
}

/// Describes the layers of a LoRA that the base does not have, for the errors of all commands: their names, and a guess
/// which networks have such layers. `total` is the number of the LoRA's layers.
pub fn not_in_base(missing: &[&str], total: usize) -> String {
    let is_of_language_model = |name: &&str| name.contains("layers.") && name.contains("_proj");
    let is_of_wan = |name: &&str| layer_names::is_known(name.trim_end_matches(".weight"));
    let guess = if missing.iter().all(is_of_language_model) {
        "it is one of a language model"
    } else if missing.iter().all(is_of_wan) {
        "they are layers of Wan: is it for a model of another kind or size?"
    } else {
        "is it for another model?"
    };
    const MAX_NAMES: usize = 40;
    format!(
        "{} of {total} layers of the LoRA are not in the base: {}; {guess}",
        missing.len(),
        first_names(missing.iter().copied(), MAX_NAMES)
    )
}

/// Formats the first `at_most` names of a list for a message.
pub(super) fn first_names<'a>(names: impl IntoIterator<Item = &'a str>, at_most: usize) -> String {
    let all: Vec<&str> = names.into_iter().collect();
    let mut shown = all.iter().take(at_most).map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ");
    if all.len() > at_most {
        shown += &format!(" and {} more", all.len() - at_most);
    }
    if all.is_empty() { "none".into() } else { shown }
}
