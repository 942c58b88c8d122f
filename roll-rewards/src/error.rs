//! Errors of the scorers. Those of ONNX files are [`crate::onnx::OnnxError`].

use std::path::PathBuf;

use roll_core::{Error, Fault};

/// Errors of a reward that is set up, or used against its rules.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RewardError {
    // Files
    /// No file of the directory is the network that is needed.
    #[error(
        "no {role} in {}: expected {expected}; found {}; name the file with `{key}`",
        directory.display(), listed(.seen)
    )]
    NoNetwork {
        /// "face detector" or "face embedder".
        role: &'static str,
        /// The directory.
        directory: PathBuf,
        /// The kind of file that would have been taken.
        expected: &'static str,
        /// The ONNX files in it, each with the reason against it.
        seen: Vec<String>,
        /// The option that names a file.
        key: &'static str,
    },
    /// More than one file could be the network.
    #[error("several files in {} could be the {role}: {}; choose one with `{key}`", directory.display(), listed(.candidates))]
    SeveralNetworks {
        /// "face detector" or "face embedder".
        role: &'static str,
        /// The directory.
        directory: PathBuf,
        /// The files.
        candidates: Vec<String>,
        /// The option that names a file.
        key: &'static str,
    },
    /// A file is an ONNX model, but not the kind that is needed.
    #[error("{} cannot be the {role}: {problem}", path.display())]
    NotTheNetwork {
        /// "face detector" or "face embedder".
        role: &'static str,
        /// The file.
        path: PathBuf,
        /// The difference between the expected and the found.
        problem: String,
    },

    // Videos
    /// The reference shows no face.
    #[error(
        "no face in {frames} of the reference (detector threshold {threshold}); use a reference with a larger, \
         frontal face, or lower `det_threshold`"
    )]
    NoFaceInReference {
        /// Which frames were searched: "any of the 8 frames after the first".
        frames: String,
        /// The detector's threshold.
        threshold: f32,
    },

    /// A target that another scorer made.
    #[error("the target of the reward `{reward}` holds no tensor `{tensor}`: it was not made by its `prepare`")]
    StrangeTarget {
        /// The reward.
        reward: String,
        /// The missing tensor.
        tensor: String,
    },
}

fn listed(names: &[String]) -> String {
    if names.is_empty() { "no .onnx file".into() } else { names.join(", ") }
}

impl From<RewardError> for Error {
    fn from(e: RewardError) -> Self {
        let fault = match e {
            // One sample's fault: its reward's `on_missing` decides.
            RewardError::NoFaceInReference { .. } => return Error::nothing_to_score(e.to_string()),
            RewardError::StrangeTarget { .. } => Fault::Failure,
            _ => Fault::User,
        };
        Error::component(fault, e)
    }
}
