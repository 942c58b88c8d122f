//! Errors of the scorers. Errors of ONNX files are [`roll_onnx::OnnxError`].

use std::path::PathBuf;

use roll_core::{Error, Fault};

/// Errors in the setup or use of a reward.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the message of a variant names its fields
pub enum RewardError {
    // Files
    /// No file in the directory is the required network.
    #[error(
        "no {role} in {}: expected {expected}; found {}; name the file with `{key}`",
        directory.display(), listed(.seen)
    )]
    NoNetwork {
        /// "face detector" or "face embedder".
        role: &'static str,
        directory: PathBuf,
        expected: &'static str,
        /// The ONNX files in the directory, each with the reason why it does not fit.
        seen: Vec<String>,
        key: &'static str,
    },
    /// Several files in the directory fit.
    #[error("several files in {} could be the {role}: {}; choose one with `{key}`", directory.display(), listed(.candidates))]
    SeveralNetworks {
        /// "face detector" or "face embedder".
        role: &'static str,
        directory: PathBuf,
        candidates: Vec<String>,
        key: &'static str,
    },
    /// A file is an ONNX model, but not of the required kind.
    #[error("{} cannot be the {role}: {problem}", path.display())]
    NotTheNetwork {
        /// "face detector" or "face embedder".
        role: &'static str,
        path: PathBuf,
        problem: String,
    },

    // Videos
    /// The reference shows no face.
    #[error(
        "no face in {frames} of the reference (detector threshold {threshold}); use a reference with a larger, \
         frontal face, or lower `det_threshold`"
    )]
    NoFaceInReference {
        /// The frames that were searched: "any of the 8 frames after the first".
        frames: String,
        threshold: f32,
    },

    // Texts
    /// A text of the user holds a token that steers the network.
    #[error("`{token}` is a token of the network's own, and cannot be part of the text `{text}`; remove it from there")]
    ReservedToken { token: String, text: String },

    /// A target from another scorer.
    #[error("the target of the reward `{reward}` holds no tensor `{tensor}`: it was not made by its `prepare`")]
    InvalidTarget { reward: String, tensor: String },
}

fn listed(names: &[String]) -> String {
    if names.is_empty() { "no .onnx file".into() } else { names.join(", ") }
}

impl From<RewardError> for Error {
    fn from(e: RewardError) -> Self {
        let fault = match e {
            // This is the fault of one sample; the reward's `on_missing` decides.
            RewardError::NoFaceInReference { .. } => return Error::nothing_to_score(e.to_string()),
            RewardError::InvalidTarget { .. } => Fault::Failure,
            _ => Fault::User,
        };
        Error::component(fault, e)
    }
}
