//! A played episode: tokens, turns and ending.

use roll_core::{LanguageModel, Result};
use roll_external::json;

use super::tools::ToolCall;
use crate::environments::seed_on_the_wire;

/// One answer of the agent, and its result.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Step {
    /// The environment's text that the agent answered.
    pub observation: String,
    /// Its answer, with the end of its turn if it wrote one.
    pub response: String,
    /// The action that the environment read in the answer; empty if it found or reports none.
    #[serde(default)]
    pub action: String,
    /// The reward.
    pub reward: f64,
    /// Whether the environment could read an action.
    pub valid: bool,
    /// The tokens it wrote, as a range of the episode's.
    pub tokens: std::ops::Range<usize>,
    /// Index in the episode's tokens at which the conversation before this answer begins: 0 unless turns have prompts
    /// of their own.
    #[serde(default)]
    pub begins: usize,
    /// Calls of tools that the agent made before it answered; `tokens` holds them and their results too.
    #[serde(default)]
    pub calls: Vec<ToolCall>,
}

/// Why an episode ended.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// Solved or lost.
    Terminated,
    /// The environment cut it off.
    Truncated,
    /// All turns were used.
    TurnLimit,
    /// The next answer would not fit.
    TokenLimit,
    /// The environment failed.
    Failed(String),
}

/// One episode.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct Episode {
    /// Episodes of one group had the same start.
    pub group: usize,
    /// World of the environment, where it has several; empty otherwise.
    pub tag: String,
    /// Seed of the start.
    pub seed: u64,
    /// All tokens.
    pub tokens: Vec<u32>,
    /// Which of them the agent wrote.
    pub response: Vec<bool>,
    /// Log-probabilities that generation reported, under the distribution it drew from; 0 for the others.
    pub log_probs: Vec<f32>,
    /// Log-probabilities at temperature 1 over the whole vocabulary; those of `log_probs` if the model does not report
    /// them.
    pub raw_log_probs: Vec<f32>,
    /// The agent's turns.
    pub steps: Vec<Step>,
    /// Whether the task was solved.
    pub solved: bool,
    /// Why it ended.
    pub ending: Ending,
}

impl Episode {
    /// Sum of its rewards.
    pub fn score(&self) -> f64 {
        self.steps.iter().map(|s| s.reward).sum()
    }

    /// Whether there is something to learn from.
    pub fn is_usable(&self) -> bool {
        !matches!(self.ending, Ending::Failed(_)) && !self.steps.is_empty()
    }

    /// What the model read and wrote, with special tokens: pieces `{"read": ...}` and `{"wrote": ...}`. Turns with
    /// prompts of their own follow each other.
    pub fn texts(&self, model: &dyn LanguageModel) -> Result<serde_json::Value> {
        let mut start = 0;
        let pieces = self.response.chunk_by(|one, next| one == next).map(|part| {
            let tokens = &self.tokens[start..start + part.len()];
            start += part.len();
            let key = if part[0] { "wrote" } else { "read" };
            model.detokenize(tokens).map(|text| serde_json::json!({ (key): text }))
        });
        pieces.collect()
    }

    /// Returns the episode as a JSON object for people to read. `what` becomes its `kind`.
    pub fn record(&self, step: u64, what: &str) -> serde_json::Value {
        let turns = self.steps.iter().map(|s| {
            let mut turn = serde_json::json!({
                "observation": s.observation, "response": s.response, "reward": s.reward, "valid": s.valid,
            });
            if !s.calls.is_empty() {
                turn["calls"] = json::with_texts(serde_json::json!(s.calls));
            }
            turn
        });
        let mut record = serde_json::json!({
            "step": step,
            "kind": what,
            "group": self.group,
            // What an environment in another process got. Programs that read numbers as doubles would round the whole.
            "seed": seed_on_the_wire(self.seed),
            "whole_seed": self.seed.to_string(),
            "score": self.score(),
            "solved": self.solved,
            "ending": self.ending,
            "tokens": self.tokens.len(),
            "turns": turns.collect::<Vec<_>>(),
        });
        if !self.tag.is_empty() {
            record["tag"] = self.tag.as_str().into();
        }
        record
    }
}
