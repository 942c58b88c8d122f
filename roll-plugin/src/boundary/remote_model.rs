//! A model on the other side of the plugin boundary. The files `model`, `diffusion`, `language` and `parts` implement
//! their traits for it.

use serde::{Deserialize, Serialize};

use super::object::Remote;
use super::remote::Fact;
use crate::{ParameterSpec, Result};

/// Facts of a model that do not change, asked for once.
#[derive(Serialize, Deserialize)]
pub(super) struct ModelFacts {
    pub(super) parameters: Vec<ParameterSpec>,
    /// Whether it answers the methods of [`crate::DiffusionModel`].
    #[serde(default)]
    pub(super) diffusion: bool,
    /// Whether it answers the methods of [`crate::LanguageModel`].
    #[serde(default)]
    pub(super) language: bool,
}

impl Fact for ModelFacts {}

/// A model of the other side.
pub(super) struct RemoteModel {
    pub(super) remote: Remote,
    pub(super) about: ModelFacts,
}

impl RemoteModel {
    pub(super) fn new(remote: Remote) -> Result<Self> {
        Ok(Self { about: remote.call_required("about", &[])?, remote })
    }
}
