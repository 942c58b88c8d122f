//! Environments that language-model agents act in.

use serde::{Deserialize, Serialize};

use crate::{Message, Result};

/// An observation of the agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Observation {
    /// Text shown to the agent.
    pub text: String,
}

/// The consequence of an action.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transition {
    /// The next observation.
    pub observation: Observation,
    /// Reward of the action.
    #[serde(with = "crate::number")]
    pub reward: f64,
    /// Whether the task was solved or lost.
    #[serde(default)]
    pub terminated: bool,
    /// Whether a limit of the environment ended the episode before the task was solved or lost.
    #[serde(default)]
    pub truncated: bool,
    /// Whether the action was valid, which is the default.
    #[serde(default = "crate::yes")]
    pub valid: bool,
}

/// The set of starts that an episode begins from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// Starts that the agent is trained on.
    #[default]
    Train,
    /// Starts that only validations play.
    Validation,
}

impl Split {
    /// Its name in requests: `train` or `validation`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Validation => "validation",
        }
    }
}

/// A request to the model of a program that writes its prompts itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatRequest {
    /// The whole conversation.
    pub messages: Vec<Message>,
    /// Number of the first messages that are in the model's text already, the latest answer included. 0: a text of its
    /// own begins.
    pub known: usize,
    /// Descriptions of tools for the chat template ([`crate::LanguageModel::render_chat_with_tools`]).
    pub tools: Vec<serde_json::Value>,
    /// Most tokens of the answer.
    pub max_tokens: Option<usize>,
}

/// A text environment, deterministic given its split, its seed and the actions.
///
/// ```
/// use roll_core::{Environment, Observation, Result, Transition};
///
/// /// Guess a number from 0 to 9.
/// #[derive(Default)]
/// struct Guess {
///     number: u64,
///     tries: u32,
/// }
///
/// impl Environment for Guess {
///     fn instructions(&self) -> String {
///         "Guess a number from 0 to 9.".into()
///     }
///     fn reset(&mut self, seed: u64) -> Result<Observation> {
///         *self = Self { number: seed % 10, tries: 0 };
///         Ok(Observation { text: "Your guess?".into() })
///     }
///     fn step(&mut self, action: &str) -> Result<Transition> {
///         self.tries += 1;
///         let guess: Option<u64> = action.trim().parse().ok();
///         let found = guess == Some(self.number);
///         let text = match guess {
///             Some(guess) if guess < self.number => "more",
///             Some(guess) if guess > self.number => "less",
///             Some(_) => "yes",
///             None => "that is no number",
///         };
///         Ok(Transition {
///             observation: Observation { text: text.into() },
///             reward: f64::from(u8::from(found)),
///             terminated: found,
///             truncated: self.tries == 4,
///             valid: guess.is_some(),
///         })
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let mut world = Guess::default();
/// world.reset(7)?;
/// assert_eq!(world.step("5")?.observation.text, "more");
/// assert!(!world.step("seven")?.valid);
/// let last = world.step("7")?;
/// assert!(last.terminated && last.reward == 1.0);
/// # Ok(())
/// # }
/// ```
pub trait Environment: Send {
    /// Announces the next episode: the set that it starts from, and the number of its group (the episodes with the same
    /// start). Called before each `reset`. An environment that makes its starts from the seed may ignore the set,
    /// because seeds of validations differ from seeds of training. An environment with a finite set of starts, such as
    /// the rows of a file, must keep the two sets apart.
    ///
    /// `number` counts the groups of all steps and ranks from 0, separately for each world of the environment `mixed`
    /// and for each validation. An environment that plays n rows in their order takes row `number % n`, in epoch
    /// `number / n`.
    fn enter(&mut self, _split: Split, _number: u64) -> Result<()> {
        Ok(())
    }

    /// Ends the episode, whatever the reason: the environment ended it, the agent used up its turns or tokens, or it
    /// failed. Called once for each `reset`.
    fn leave(&mut self) -> Result<()> {
        Ok(())
    }

    /// Starts a new episode and returns its first observation.
    fn reset(&mut self, seed: u64) -> Result<Observation>;
    /// Applies the agent's text, which has no end-of-turn token.
    fn step(&mut self, action: &str) -> Result<Transition>;

    /// The task and the possible answers, shown to the agent once, before the first observation. Empty if observations
    /// contain them.
    fn instructions(&self) -> String {
        String::new()
    }

    /// Names of the environment's worlds, if it has several: `reset` with seed s opens world `s % count`. Empty: the
    /// environment is one world.
    fn kinds(&self) -> Vec<String> {
        Vec::new()
    }

    /// Whether the task is solved in its present state. `None`: the environment does not know, and an episode counts as
    /// solved when it terminated with a positive reward.
    fn solved(&self) -> Option<bool> {
        None
    }

    /// The action that the environment read from the latest answer, for the history in later prompts. Empty: the answer
    /// had no action, and the history has the whole answer without its thoughts.
    fn action(&self) -> String {
        String::new()
    }

    /// The request that the model answers next, from a program that writes its prompts itself. `None`: the prompt is
    /// made from the observation.
    fn chat(&self) -> Option<ChatRequest> {
        None
    }
}
