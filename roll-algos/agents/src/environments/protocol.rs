//! The protocol of environments in a process and of environments that are a service: requests and answers in JSON, one
//! of each per `reset` and `step`. [`super::process`] documents the messages.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use roll_core::{Environment, Error, Observation, Split, Transition};
use serde_json::{Value, json};

use crate::pictures::{self, SentPictures};

/// Bits of a seed that reach a process or a service. NumPy, gymnasium and C take no more, and programs that read
/// numbers as doubles would round longer seeds.
const SEED_BITS: u32 = 31;
/// Longest wait for the answer to `close`, on which nothing depends.
pub const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Number of different messages that [`warn_once`] logs.
const MAX_LOGGED: usize = 100;
/// Number of bytes of an invalid answer that an error message shows.
const SHOWN_BYTES: usize = 200;

/// Sends the requests of an environment. The errors of `begin` and `advance` describe the problem;
/// [`Transport::failed`] turns such a description into an error.
pub trait Transport: Send {
    /// Begins an episode.
    fn begin(&mut self, start: Start, transcript: &mut Transcript) -> Result<Observation, String>;
    /// Sends an action of the episode.
    fn advance(&mut self, action: &str, transcript: &mut Transcript) -> Result<Transition, String>;
    /// Ends the episode. A transport whose peer keeps something for the episode tells the peer.
    fn end(&mut self) {}
    /// The error of an episode that ended with `problem`; it names the process or service.
    fn failed(&self, problem: String) -> Error;
}

/// The start of an episode.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    seed: u64,
    split: Split,
    /// Number of the episode's group, counted over all steps.
    number: u64,
}

/// An environment whose episodes a process or a service plays.
pub struct RemoteEnvironment<T> {
    transport: T,
    transcript: Transcript,
    /// Split of the episode that comes next.
    split: Split,
    /// Number of the group of the episode that comes next.
    number: u64,
}

impl<T: Transport> RemoteEnvironment<T> {
    /// Creates the environment. Nothing is sent before the first episode.
    pub fn with_transport(transport: T) -> Self {
        Self { transport, transcript: Transcript::default(), split: Split::default(), number: 0 }
    }
}

impl<T: Transport> Environment for RemoteEnvironment<T> {
    fn enter(&mut self, split: Split, number: u64) -> roll_core::Result<()> {
        (self.split, self.number) = (split, number);
        Ok(())
    }

    fn leave(&mut self) -> roll_core::Result<()> {
        self.transport.end();
        Ok(())
    }

    fn reset(&mut self, seed: u64) -> roll_core::Result<Observation> {
        let start = Start { seed, split: self.split, number: self.number };
        self.transport.begin(start, &mut self.transcript).map_err(|problem| self.transport.failed(problem))
    }

    fn step(&mut self, action: &str) -> roll_core::Result<Transition> {
        self.transport.advance(action, &mut self.transcript).map_err(|problem| self.transport.failed(problem))
    }

    fn instructions(&self) -> String {
        self.transcript.instructions.clone()
    }

    fn solved(&self) -> Option<bool> {
        self.transcript.solved
    }

    fn action(&self) -> String {
        self.transcript.action.clone()
    }
}

/// The part of a seed that a process or a service gets.
pub fn seed_on_the_wire(seed: u64) -> u64 {
    seed % (1 << SEED_BITS)
}

/// The request that begins an episode.
pub fn reset(start: Start) -> Value {
    let seed = seed_on_the_wire(start.seed);
    json!({ "reset": { "seed": seed, "split": start.split.name(), "number": start.number } })
}

/// The request with an action.
pub fn step(action: &str) -> Value {
    json!({ "step": { "action": action } })
}

/// The request that ends an episode.
pub fn close() -> Value {
    json!({ "close": true })
}

/// An answer to any of the three requests. Its keys are documented in [`super::process`].
#[derive(Debug, serde::Deserialize)]
pub struct Answer {
    error: Option<String>,
    observation: Option<String>,
    #[serde(default)]
    pictures: Vec<String>,
    instructions: Option<String>,
    reward: Option<f64>,
    terminated: Option<bool>,
    #[serde(default)]
    truncated: bool,
    valid: Option<bool>,
    solved: Option<bool>,
    action: Option<String>,
    #[serde(default)]
    closes: bool,
    #[serde(flatten)]
    unknown: BTreeMap<String, serde::de::IgnoredAny>,
}

impl Answer {
    /// Parses an answer. The error quotes it.
    pub fn parse(text: &str) -> Result<Self, String> {
        // .NET and PowerShell write a byte-order mark before UTF-8.
        let text = text.trim_start_matches('\u{feff}');
        serde_json::from_str(text).map_err(|e| format!("its answer {} is not valid: {e}", shortened(text.as_bytes())))
    }

    /// Returns the answer unless it reports an error. Logs keys without effect.
    pub fn accepted(self) -> Result<Self, String> {
        if let Some(note) = self.note_on_unknown_keys() {
            warn_once(&note);
        }
        match self.error {
            Some(error) => Err(format!("it reports: {error}")),
            None => Ok(self),
        }
    }

    /// The observation; `request` is the one that this answers.
    fn observation(&mut self, request: &str) -> Result<Observation, String> {
        let text = self.observation.take().ok_or_else(|| format!("its answer to `{request}` has no `observation`"))?;
        let mut pictures = SentPictures::default();
        for encoded in &self.pictures {
            pictures.push(pictures::from_base64(encoded)).map_err(|problem| format!("`pictures`: {problem}"))?;
        }
        Observation::with_pictures(text, pictures.into_vec()).marked().map_err(|e| e.chain())
    }

    /// A sentence on the keys that are not read, if there are any.
    fn note_on_unknown_keys(&self) -> Option<String> {
        if self.unknown.is_empty() {
            return None;
        }
        let unknown: Vec<String> = self.unknown.keys().map(|key| format!("`{}`", key.escape_debug())).collect();
        Some(format!(
            "answers of the environment have keys without effect: {}; keys with one are `error`, `observation`, \
             `pictures`, `instructions`, `reward`, `terminated`, `truncated`, `valid`, `solved`, `action` and `closes`",
            unknown.join(", ")
        ))
    }
}

/// Logs a warning, unless the same one was logged before.
pub fn warn_once(message: &str) {
    static LOGGED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut logged = LOGGED.lock().unwrap_or_else(PoisonError::into_inner);
    if logged.len() < MAX_LOGGED && logged.insert(message.into()) {
        tracing::warn!("{message}");
    }
}

/// Facts about the current episode from the latest answers.
#[derive(Debug, Default)]
pub struct Transcript {
    /// Instructions in the answer to `reset`.
    pub instructions: String,
    /// Whether the episode is solved, according to the latest answer.
    pub solved: Option<bool>,
    /// The action that the latest answer reports; empty if it reports none.
    pub action: String,
    /// Whether the answer to `reset` asks for a `close`.
    pub closes: bool,
}

impl Transcript {
    /// Reads an answer to `reset`.
    pub fn read_reset(&mut self, mut answer: Answer) -> Result<Observation, String> {
        let observation = answer.observation("reset")?;
        self.instructions = answer.instructions.unwrap_or_default();
        (self.solved, self.action, self.closes) = (answer.solved, String::new(), answer.closes);
        Ok(observation)
    }

    /// Reads an answer to `step`.
    pub fn read_step(&mut self, mut answer: Answer) -> Result<Transition, String> {
        let missing = |key: &str| format!("its answer to `step` has no `{key}`");
        (self.solved, self.action) = (answer.solved, answer.action.take().unwrap_or_default());
        Ok(Transition {
            observation: answer.observation("step")?,
            reward: answer.reward.ok_or_else(|| missing("reward"))?,
            terminated: answer.terminated.ok_or_else(|| missing("terminated"))?,
            truncated: answer.truncated,
            valid: answer.valid.unwrap_or(true),
        })
    }
}

/// The beginning of an answer, for an error message.
pub fn shortened(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(&line[..line.len().min(SHOWN_BYTES)]);
    match line.len() {
        0..=SHOWN_BYTES => format!("`{text}`"),
        length => format!("`{text}...` ({length} bytes)"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::{Picture, Tensor};

    use super::*;

    #[test]
    fn a_reset_has_the_split_and_a_seed_of_31_bits() {
        let start = Start { seed: 10_198_910_770_185_064_458, split: Split::Validation, number: 3 };
        let request = reset(start)["reset"].clone();
        assert_eq!(request["split"], "validation");
        assert!(request["seed"].as_u64().is_some_and(|seed| seed < 1 << 31), "{request}");
        let start = Start { seed: 7, split: Split::Train, number: 12 };
        assert_eq!(reset(start)["reset"], json!({"seed": 7, "split": "train", "number": 12}));
    }

    #[test]
    fn keys_without_effect_are_named() {
        let note = |text: &str| Answer::parse(text).unwrap().note_on_unknown_keys();
        assert_eq!(note(r#"{"observation": "a", "action": "b"}"#), None);
        let found = note(r#"{"observation": "a", "truncted": true, "info": {"a": [1]}}"#).unwrap();
        assert!(found.contains("`info`, `truncted`;") && found.contains("`truncated`"), "{found}");
    }

    #[test]
    fn a_byte_order_mark_is_no_part_of_an_answer() {
        let answer = Answer::parse("\u{feff}{\"observation\": \"a\"}\r").unwrap();
        assert_eq!(answer.observation.as_deref(), Some("a"));
    }

    #[test]
    fn an_answer_may_report_its_action() {
        let mut transcript = Transcript::default();
        let answer = r#"{"observation": "a", "reward": 0, "terminated": false, "action": "Left"}"#;
        transcript.read_step(Answer::parse(answer).unwrap()).unwrap();
        assert_eq!(transcript.action, "Left");
        transcript.read_reset(Answer::parse(r#"{"observation": "a"}"#).unwrap()).unwrap();
        assert_eq!(transcript.action, "");
    }

    #[test]
    fn pictures_have_their_places_in_the_text_or_a_clear_error() {
        let png = pictures::to_base64(&Picture::new(Tensor::new(vec![9u8; 12], [2, 2, 3]).unwrap()).unwrap()).unwrap();
        let reset = |answer: Value| Transcript::default().read_reset(Answer::parse(&answer.to_string()).unwrap());
        let seen = reset(json!({"observation": "where?", "pictures": [png]})).unwrap();
        assert_eq!((seen.text.as_str(), seen.pictures[0].size()), ("\u{fffc}\nwhere?", [2, 2]));
        assert_eq!(reset(json!({"observation": "a \u{fffc} b", "pictures": [png]})).unwrap().text, "a \u{fffc} b");
        assert_eq!(reset(json!({"observation": "a \u{fffc} b"})).unwrap().text, "a \u{fffd} b");
        for (answer, problem) in [
            (json!({"observation": "a", "pictures": [png, "?"]}), "`pictures`: picture 1 (from 0): not base64"),
            (json!({"observation": "a", "pictures": ["YWJj"]}), "picture 0 (from 0): not a PNG"),
            (json!({"observation": "a", "pictures": vec![png.as_str(); 65]}), "picture 64 (from 0): at most 64"),
            (json!({"observation": "\u{fffc}\u{fffc}", "pictures": [png]}), "1 pictures and marks for 2"),
            (json!({"pictures": [png]}), "no `observation`"),
        ] {
            let found = reset(answer).unwrap_err();
            assert!(found.contains(problem), "{found}");
        }
    }
}
