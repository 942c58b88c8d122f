//! Errors of LoRA files.

use std::path::PathBuf;

use roll_core::{Error, Fault};

use crate::weights::WeightsError;

/// Why a LoRA cannot be read, written or merged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoraError {
    /// The weight file under it.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// No tensor of the file belongs to a LoRA.
    #[error("{}: expected the tensors of a LoRA, found {found}", path.display())]
    NoLora {
        /// The file.
        path: PathBuf,
        /// A few of its keys.
        found: String,
    },
    /// A key that no convention has.
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
    /// Another kind of adapter.
    #[error("{}: `{key}` belongs to {kind}; expected a plain LoRA of two matrices a layer", path.display())]
    OtherKind {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The kind of adapter that it belongs to.
        kind: &'static str,
    },
    /// Keys of two conventions.
    #[error("{}: two conventions in one file: `{first}` ({}) and `{second}` ({})", path.display(), of[0], of[1])]
    Mixed {
        /// The file.
        path: PathBuf,
        /// A key of the one.
        first: String,
        /// A key of the other.
        second: String,
        /// Both conventions.
        of: [super::Convention; 2],
    },
    /// Two keys give the same part of a layer.
    #[error("{}: the {part} of the layer `{layer}` appears twice, the second time as `{key}`", path.display())]
    Twice {
        /// The file.
        path: PathBuf,
        /// The layer.
        layer: String,
        /// Which part.
        part: &'static str,
        /// The second key.
        key: String,
    },
    /// One of the two matrices is not there.
    #[error("{}: the layer `{layer}` has no {part}, expected both matrices of every layer", path.display())]
    Incomplete {
        /// The file.
        path: PathBuf,
        /// The layer.
        layer: String,
        /// The missing part.
        part: &'static str,
    },
    /// The matrices do not go together.
    #[error("{}: layer `{layer}`: expected {expected}, found {found}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The layer.
        layer: String,
        /// Demands on the shapes.
        expected: String,
        /// The shapes found.
        found: String,
    },
    /// The configuration beside or inside the file cannot be used.
    #[error("{}: {problem}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The fault.
        problem: String,
    },
    /// A value is not finite, or became so.
    #[error("{}: the {what} of `{name}` is not finite", path.display())]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// `alpha`, `merged weight`.
        what: &'static str,
        /// The layer or tensor.
        name: String,
    },
    /// A convention has no place for something the LoRA has.
    #[error("{convention} files have no place for {what} (layer `{layer}`); choose {instead}")]
    NoPlace {
        /// The convention.
        convention: super::Convention,
        /// The fact that the format cannot hold.
        what: &'static str,
        /// The layer that has it.
        layer: String,
        /// Conventions that can.
        instead: &'static str,
    },
    /// Names with underscores that cannot be told apart.
    #[error(
        "Wan has no layer that kohya would call {names}: give the model they are for (--base), whose names tell where \
         the dots are"
    )]
    Undotted {
        /// A few of the names.
        names: String,
    },
    /// Layers that the base does not have.
    #[error(
        "{}: {count} of {total} layers of the LoRA are not in the base: {names}; is it for another model? \
         --allow-missing merges the rest", base.display()
    )]
    Unmatched {
        /// The base.
        base: PathBuf,
        /// How many.
        count: usize,
        /// Of how many.
        total: usize,
        /// All of them, or the first.
        names: String,
    },
    /// Nothing at all goes together.
    #[error("{}: no layer of the LoRA is in the base: it has {found}, the LoRA {wanted}", base.display())]
    NothingMatched {
        /// The base.
        base: PathBuf,
        /// A few names of the base.
        found: String,
        /// A few names of the LoRA.
        wanted: String,
    },
    /// The file has adapters for both transformers where one is needed.
    #[error("{}: holds adapters for both transformers; choose one (--expert)", path.display())]
    TwoExperts {
        /// The file.
        path: PathBuf,
    },
    /// The adapter of this expert is not there.
    #[error("{}: holds no adapter for the expert {expert}{}", path.display(), of_other(.found))]
    NoExpert {
        /// The file.
        path: PathBuf,
        /// Which.
        expert: super::Expert,
        /// The expert that it is for.
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

/// A few names for a message.
pub(super) fn some<'a>(names: impl IntoIterator<Item = &'a str>, at_most: usize) -> String {
    let all: Vec<&str> = names.into_iter().collect();
    let mut shown = all.iter().take(at_most).map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ");
    if all.len() > at_most {
        shown += &format!(" and {} more", all.len() - at_most);
    }
    if all.is_empty() { "none".into() } else { shown }
}
