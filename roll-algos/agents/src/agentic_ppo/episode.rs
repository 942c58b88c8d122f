//! A played episode: its tokens, its turns, its ending, and the record of it for people.

use roll_core::{LanguageModel, Picture, Result};
use roll_external::json;

use super::tools::ToolCall;
use crate::environments::seed_on_the_wire;
use crate::pictures;

/// One answer of the agent, and its result.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Step {
    /// The environment's text that the agent answered.
    pub observation: String,
    /// Positions in the episode's pictures, one for each mark of `observation`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pictures: Vec<usize>,
    /// The agent's answer, with the token that ends the turn, if the agent wrote one.
    pub response: String,
    /// The action that the environment found in the answer; empty if it found none or does not report it.
    #[serde(default)]
    pub action: String,
    /// The environment's reward, less the penalty.
    pub reward: f64,
    /// The part of `reward` that `algo.length_penalty` subtracted.
    #[serde(default)]
    pub penalty: f64,
    /// Whether the answer was cut off by a limit on tokens.
    #[serde(default)]
    pub truncated: bool,
    /// Whether the environment could read an action.
    pub valid: bool,
    /// The range of the episode's tokens that belongs to this answer. It begins with the first token that the agent
    /// wrote in this turn, and includes calls of tools and their results.
    pub tokens: std::ops::Range<usize>,
    /// Position in the episode's tokens at which the prompt of this answer begins: 0 unless turns have prompts of their
    /// own.
    #[serde(default)]
    pub begins: usize,
    /// Calls of tools that the agent made before it answered.
    #[serde(default)]
    pub calls: Vec<ToolCall>,
}

/// Why an episode ended.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// Solved or lost.
    Terminated,
    /// The environment cut the episode off.
    Truncated,
    /// All turns were used.
    TurnLimit,
    /// The next answer would exceed the maximum number of tokens.
    TokenLimit,
    /// The environment failed.
    Failed(String),
    /// No server of the engine wrote an answer.
    NoAnswer(String),
}

/// One episode.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct Episode {
    /// Number of the group, over all ranks. Episodes of one group have the same start.
    pub group: usize,
    /// Name of the world, if the environment has several; empty otherwise.
    pub tag: String,
    /// Seed of the start.
    pub seed: u64,
    /// All tokens.
    pub tokens: Vec<u32>,
    /// Different pictures that the tokens show, in the order in which the agent first saw them.
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "pictures::list")]
    pub pictures: Vec<Picture>,
    /// Whether the agent wrote each token.
    pub response: Vec<bool>,
    /// Log-probabilities that generation reported, under the distribution it drew from; 0 for tokens that the agent
    /// read.
    pub log_probs: Vec<f32>,
    /// Log-probabilities at temperature 1 over the whole vocabulary. The same as `log_probs` if the model does not
    /// report them.
    pub raw_log_probs: Vec<f32>,
    /// The agent's turns.
    pub steps: Vec<Step>,
    /// Whether the task was solved.
    pub solved: bool,
    /// Why the episode ended.
    pub ending: Ending,
}

impl Episode {
    /// Sum of the rewards of all turns.
    pub fn score(&self) -> f64 {
        self.steps.iter().map(|s| s.reward).sum()
    }

    /// Whether the episode can be trained on: neither the environment nor an engine failed, and the agent wrote
    /// something.
    pub fn is_usable(&self) -> bool {
        !matches!(self.ending, Ending::Failed(_) | Ending::NoAnswer(_)) && !self.steps.is_empty()
    }

    /// The texts that the model read and wrote, with special tokens, as a list of `{"read": ...}` and `{"wrote": ...}`.
    /// If turns have prompts of their own, the list has one turn after another.
    pub fn texts(&self, model: &dyn LanguageModel) -> Result<serde_json::Value> {
        let mut start = 0;
        let pieces = self.response.chunk_by(|one, next| one == next).map(|run| {
            let tokens = &self.tokens[start..start + run.len()];
            start += run.len();
            let key = if run[0] { "wrote" } else { "read" };
            model.detokenize(tokens).map(|text| serde_json::json!({ (key): pictures::described(&text, &[]) }))
        });
        pieces.collect()
    }

    /// Returns the episode as a JSON object for people to read. `kind` says what the episode was played for.
    pub fn record(&self, step: u64, kind: &str) -> Result<serde_json::Value> {
        let turns = self.steps.iter().map(|s| {
            let shown: Vec<&Picture> = s.pictures.iter().map(|position| &self.pictures[*position]).collect();
            let observation = pictures::described(&s.observation, &shown);
            let mut turn = serde_json::json!({
                "observation": observation, "response": s.response, "reward": s.reward, "valid": s.valid,
            });
            if !shown.is_empty() {
                turn["pictures"] = shown.into_iter().map(pictures::to_data_url).collect::<Result<Vec<_>>>()?.into();
            }
            if s.truncated {
                turn["truncated"] = true.into();
            }
            if s.penalty != 0.0 {
                turn["penalty"] = s.penalty.into();
            }
            if !s.calls.is_empty() {
                turn["calls"] = json::with_texts(serde_json::json!(s.calls));
            }
            Ok(turn)
        });
        let turns = turns.collect::<Result<Vec<_>>>()?;
        let mut record = serde_json::json!({
            "step": step,
            "kind": kind,
            "group": self.group,
            // The part of the seed that an environment in another process gets. The whole seed is a text, because
            // programs that read numbers as doubles would round it.
            "seed": seed_on_the_wire(self.seed),
            "whole_seed": self.seed.to_string(),
            "score": self.score(),
            "solved": self.solved,
            "ending": self.ending,
            "tokens": self.tokens.len(),
            "turns": turns,
        });
        if !self.tag.is_empty() {
            record["tag"] = self.tag.as_str().into();
        }
        Ok(record)
    }
}
