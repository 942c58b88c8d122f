//! Environments that language-model agents act in.

use serde::{Deserialize, Serialize};

use crate::picture::without_picture_marks;
use crate::{Error, Message, PICTURE_MARK, Picture, Result};

/// An observation of the agent: a text, in which pictures may have their places.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Observation {
    /// Text shown to the agent. Each [`PICTURE_MARK`] is the place of the next of `pictures`. Without a mark, the
    /// pictures precede the text.
    pub text: String,
    /// Pictures shown to the agent. Only a model that reads pictures can act on them
    /// ([`LanguageModel::tokenize_with_pictures`](crate::LanguageModel::tokenize_with_pictures)).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pictures: Vec<Picture>,
}

impl Observation {
    /// An observation without pictures.
    pub fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), pictures: Vec::new() }
    }

    /// An observation with pictures, which have their places at the marks of the text, or precede it.
    pub fn with_pictures(text: impl Into<String>, pictures: Vec<Picture>) -> Self {
        Self { text: text.into(), pictures }
    }

    /// The observation with one mark per picture. Pictures without a mark are put before the text. A mark in a text
    /// without pictures is not one, and U+FFFD takes its place.
    ///
    /// # Errors
    /// Fails if there are marks, and not as many as pictures.
    pub fn marked(self) -> Result<Self> {
        let Self { text, pictures } = self;
        let marks = text.matches(PICTURE_MARK).count();
        match (marks, pictures.len()) {
            (_, 0) => Ok(Self::text(without_picture_marks(text))),
            (0, found) => {
                let marks = String::from(PICTURE_MARK).repeat(found);
                let separator = if text.is_empty() { "" } else { "\n" };
                Ok(Self { text: format!("{marks}{separator}{text}"), pictures })
            }
            (_, found) if found == marks => Ok(Self { text, pictures }),
            (_, found) => Err(Error::Unsupported(format!(
                "the observation has {found} pictures and marks for {marks} (U+FFFC): expected one mark for each \
                 picture, or no mark, and the pictures precede the text"
            ))),
        }
    }
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
    /// Pictures of all messages: one for each [`PICTURE_MARK`] in their contents, in the same order.
    pub pictures: Vec<Picture>,
    /// Number of the first messages that are in the model's text already, the latest answer included. 0: a text of its
    /// own begins.
    pub known: usize,
    /// Descriptions of tools for the chat template ([`crate::LanguageModel::render_chat_with_tools`]).
    pub tools: Vec<serde_json::Value>,
    /// Most tokens of the answer.
    pub max_tokens: Option<usize>,
}

/// An environment of texts and pictures, deterministic given its split, its seed and the actions.
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
///         Ok(Observation::text("Your guess?"))
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
///             observation: Observation::text(text),
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::Tensor;

    #[test]
    fn pictures_have_one_mark_each_or_precede_the_text() {
        let picture = |side: usize| Picture::new(Tensor::new(vec![0u8; side * 3], [1, side, 3]).unwrap()).unwrap();
        let marked = |text: &str, pictures: usize| {
            Observation::with_pictures(text, (1..=pictures).map(picture).collect()).marked().map(|seen| seen.text)
        };
        assert_eq!(marked("where?", 2).unwrap(), "\u{fffc}\u{fffc}\nwhere?");
        assert_eq!(marked("", 1).unwrap(), "\u{fffc}");
        assert_eq!(marked("this \u{fffc} or that \u{fffc}?", 2).unwrap(), "this \u{fffc} or that \u{fffc}?");
        assert_eq!(marked("no \u{fffc} here", 0).unwrap(), "no \u{fffd} here");
        for (text, pictures) in [("\u{fffc}", 2), ("\u{fffc}\u{fffc}", 1)] {
            let problem = marked(text, pictures).unwrap_err().to_string();
            assert!(problem.contains(&format!("has {pictures} pictures")), "{problem}");
        }
        assert_eq!(serde_json::to_string(&Observation::text("a")).unwrap(), r#"{"text":"a"}"#);
        assert_eq!(serde_json::from_str::<Observation>(r#"{"text":"a"}"#).unwrap(), Observation::text("a"));
    }
}
