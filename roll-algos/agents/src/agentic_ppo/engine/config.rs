//! Options of rollouts by another engine.

use std::path::PathBuf;

use roll_core::{Error, Result, check_seconds};

/// The section of the configuration.
pub const SECTION: &str = "algo.rollout";

/// The error of a model whose weights are trained, with an engine.
pub fn needs_lora() -> Error {
    let problem = "an engine reads the adapter after each update: expected a LoRA (`model.lora_rank` of at least 1), found \
                   a model whose weights are trained";
    Error::config("model.lora_rank", problem)
}

/// What writes the answers of episodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EngineName {
    /// The trained model itself, in this program.
    #[default]
    Model,
    /// Servers of vLLM: `/v1/completions` with token ids.
    Vllm,
    /// Servers of SGLang: `/generate` with token ids.
    Sglang,
}

impl EngineName {
    /// Whether the trained model itself writes.
    pub fn is_model(&self) -> bool {
        *self == Self::Model
    }
}

impl std::fmt::Display for EngineName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Model => "`model`",
            Self::Vllm => "`vllm`",
            Self::Sglang => "`sglang`",
        })
    }
}

/// Options of rollouts.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RolloutConfig {
    /// What writes the answers of episodes, in training and validation. An engine serves the base model, and reads the
    /// adapter after each update: only a LoRA can be trained. Its numbers are not bit for bit those of this program, so
    /// that a run with it cannot be repeated bit for bit.
    pub name: EngineName,
    /// Addresses of the engine's servers, `http://host:8000`. Each episode keeps its server as long as that answers.
    pub urls: Vec<String>,
    /// Directory that this program writes adapters to and the servers read them from, under the same path. It holds the
    /// adapter of the present policy only.
    pub adapters: Option<PathBuf>,
    /// Environment variable with the servers' token, which is sent as `Authorization: Bearer`. Default: no token.
    pub token_env: Option<String>,
    /// Time limit of an answer in seconds.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub timeout: f64,
    /// Maximum number of repetitions of a request that failed. After them the other servers are asked; without an answer
    /// from any server the episode is dropped.
    pub retries: u32,
}

impl Default for RolloutConfig {
    fn default() -> Self {
        Self { name: EngineName::Model, urls: Vec::new(), adapters: None, token_env: None, timeout: 600.0, retries: 2 }
    }
}

impl RolloutConfig {
    /// Whether another engine than the model writes the answers.
    pub fn is_external(&self) -> bool {
        !self.name.is_model()
    }

    /// Fails if an engine has no address or no directory, and on invalid limits.
    pub fn check(&self) -> Result<()> {
        if !self.is_external() {
            return Ok(());
        }
        if self.urls.is_empty() {
            let problem = "which servers? For example `[http://127.0.0.1:8000]`";
            return Err(Error::config(format!("{SECTION}.urls"), problem));
        }
        if self.adapters.is_none() {
            let problem =
                "which directory do the servers read adapters from? This program writes one after each update";
            return Err(Error::config(format!("{SECTION}.adapters"), problem));
        }
        check_seconds(&format!("{SECTION}.timeout"), self.timeout).map(drop)
    }
}
