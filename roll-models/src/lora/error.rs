//! Errors of LoRA files.

use std::path::PathBuf;

use roll_core::{Error, Fault};

use crate::weights::WeightsError;

/// Why a LoRA cannot be read, written or merged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoraError {
    /// An error of the weight file.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// No tensor of the file belongs to a LoRA.
    #[error("{}: expected the tensors of a LoRA, found {found}", path.display())]
    NoLora {
        /// The file.
        path: PathBuf,
        /// Some of its keys.
        found: String,
    },
    /// A key that belongs to no convention.
    #[error(
        "{}: `{key}` is no tensor of a LoRA: expected a name that ends in .lora_A.weight, .lora_B.weight, \
         .lora_down.weight, .lora_up.weight, .alpha, .diff, .diff_b or .diff_m", path.display()
    )]
    UnknownKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
    },
    /// An adapter that is not a LoRA.
    #[error("{}: `{key}` belongs to {kind}; expected a plain LoRA of two matrices a layer", path.display())]
    OtherKind {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The kind of adapter that the key belongs to.
        kind: &'static str,
    },
    /// Keys of two conventions in one file.
    #[error("{}: two conventions in one file: `{first}` ({}) and `{second}` ({})", path.display(), of[0], of[1])]
    Mixed {
        /// The file.
        path: PathBuf,
        /// A key of the first convention.
        first: String,
        /// A key of the second convention.
        second: String,
        /// Both conventions.
        of: [super::Convention; 2],
    },
    /// Two keys name the same part of a layer.
    #[error("{}: the {part} of the layer `{layer}` appears twice, the second time as `{key}`", path.display())]
    Twice {
        /// The file.
        path: PathBuf,
        /// The layer.
        layer: String,
        /// The part of the layer.
        part: &'static str,
        /// The second key.
        key: String,
    },
    /// One of the two matrices of a layer is missing.
    #[error("{}: the layer `{layer}` has no {part}, expected both matrices of every layer", path.display())]
    Incomplete {
        /// The file.
        path: PathBuf,
        /// The layer.
        layer: String,
        /// The missing part.
        part: &'static str,
    },
    /// The shapes of the matrices contradict each other or the base.
    #[error("{}: layer `{layer}`: expected {expected}, found {found}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The layer.
        layer: String,
        /// The requirement on the shapes.
        expected: String,
        /// The shapes found.
        found: String,
    },
    /// The configuration next to or inside the file cannot be used.
    #[error("{}: {problem}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The reason.
        problem: String,
    },
    /// A value is not finite, or a merged weight would not be.
    #[error("{}: the {what} of `{name}` is not finite", path.display())]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The kind of value: `alpha`, `merged weight`.
        what: &'static str,
        /// The layer or tensor.
        name: String,
    },
    /// The convention cannot represent something in the LoRA.
    #[error("{convention} files have no place for {what} (layer `{layer}`); choose {instead}")]
    NoPlace {
        /// The convention.
        convention: super::Convention,
        /// The part that the format cannot represent.
        what: &'static str,
        /// The layer that has it.
        layer: String,
        /// Conventions that can represent it.
        instead: &'static str,
    },
    /// Names with underscores whose dots cannot be recovered.
    #[error(
        "Wan has no layer that kohya would call {names}: give the model they are for (--base), whose names tell where \
         the dots are"
    )]
    Undotted {
        /// Some of the names.
        names: String,
    },
    /// Some layers of the LoRA are not in the base.
    #[error(
        "{}: {count} of {total} layers of the LoRA are not in the base: {names}; is it for another model? \
         --allow-missing merges the rest", base.display()
    )]
    Unmatched {
        /// The base.
        base: PathBuf,
        /// Number of these layers.
        count: usize,
        /// Number of all layers of the LoRA.
        total: usize,
        /// The names, possibly shortened.
        names: String,
    },
    /// No layer of the LoRA is in the base.
    #[error("{}: no layer of the LoRA is in the base: it has {found}, the LoRA {wanted}", base.display())]
    NothingMatched {
        /// The base.
        base: PathBuf,
        /// Some names of the base.
        found: String,
        /// Some names of the LoRA.
        wanted: String,
    },
    /// The file has adapters for both transformers, but one is required.
    #[error("{}: holds adapters for both transformers; choose one (--expert)", path.display())]
    TwoExperts {
        /// The file.
        path: PathBuf,
    },
    /// The file has no adapter for this expert.
    #[error("{}: holds no adapter for the expert {expert}{}", path.display(), of_other(.found))]
    NoExpert {
        /// The file.
        path: PathBuf,
        /// The requested expert.
        expert: super::Expert,
        /// The expert of the adapter in the file, if it is known.
        found: Option<super::Expert>,
    },
}

fn of_other(found: &Option<super::Expert>) -> String {
    found.map(|expert| format!("; it is for {expert}")).unwrap_or_default()
}

impl From<LoraError> for Error {
    fn from(e: LoraError) -> Self {
        match e {
            LoraError::Weights(e) => e.into(),
            e => Error::component(Fault::User, e),
        }
    }
}

/// Formats the first names of a list for a message.
pub(super) fn some<'a>(names: impl IntoIterator<Item = &'a str>, at_most: usize) -> String {
    let all: Vec<&str> = names.into_iter().collect();
    let mut shown = all.iter().take(at_most).map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ");
    if all.len() > at_most {
        shown += &format!(" and {} more", all.len() - at_most);
    }
    if all.is_empty() { "none".into() } else { shown }
}
