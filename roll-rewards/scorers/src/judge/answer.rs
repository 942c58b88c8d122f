//! Reads scores from the answers of a chat completion service.

use roll_core::{Error, Result};
use roll_external::service::excerpt;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

/// How an answer becomes a score in [0, 1].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AnswerKind {
    /// P(yes) / (P(yes) + P(no)) from the log-probabilities of the first word. If the service sends no
    /// log-probabilities, 1 for yes and 0 for no.
    #[default]
    Yes,
    /// The first number of the answer, mapped from `[lowest, highest]` to [0, 1].
    Number([f64; 2]),
}

impl AnswerKind {
    /// Fails unless the lowest number of a range is below the highest.
    pub fn check(self) -> Result<()> {
        match self {
            Self::Number([low, high]) if !(low < high && (high - low).is_finite()) => Err(Error::config(
                "reward.answer.number",
                format!("expected two numbers, the lowest first; found [{low}, {high}]"),
            )),
            _ => Ok(()),
        }
    }

    /// The form of a valid answer, for the end of the question and for errors.
    pub fn form(self) -> String {
        match self {
            Self::Yes => "one word, yes or no".into(),
            Self::Number([low, high]) => format!("one number from {low} to {high}"),
        }
    }

    /// The score of an answer's body. Fails if the answer is invalid; the error quotes the beginning of the answer.
    pub fn score(self, body: &[u8]) -> std::result::Result<f64, String> {
        // serde_json refuses a depth beyond 128, and the client limits the length of the body.
        let answer: Json = serde_json::from_slice(body).unwrap_or_default();
        let choice = &answer["choices"][0];
        let text = choice["message"]["content"].as_str();
        let score = match (self, first_word_candidates(choice)) {
            (Self::Yes, Some(candidates)) => probability_of_yes(candidates),
            (Self::Yes, None) => text.and_then(yes_or_no),
            (Self::Number(range), _) => text.and_then(|text| first_number(text, range)),
        };
        score.ok_or_else(|| {
            let found = excerpt(text.map_or(body, str::as_bytes));
            format!("expected {}, found `{found}`", self.form())
        })
    }
}

/// The number of tokens of a request and its answer, as counted by the service; 0 if the service does not count them.
pub fn token_count(body: &[u8]) -> u64 {
    let answer: Json = serde_json::from_slice(body).unwrap_or_default();
    // A greater number is a mistake of the service, and could overflow the sum over requests.
    u64::from(answer["usage"]["total_tokens"].as_u64().and_then(|tokens| u32::try_from(tokens).ok()).unwrap_or(0))
}

/// The candidates (`top_logprobs`) for the first word of an answer, i.e. for its first token with a letter or digit.
/// `None` without log-probabilities.
fn first_word_candidates(choice: &Json) -> Option<&Vec<Json>> {
    let tokens = choice["logprobs"]["content"].as_array()?.iter();
    let mut listed = tokens.filter_map(|token| Some((token["token"].as_str()?, token["top_logprobs"].as_array()?)));
    let (_, candidates) = listed.find(|(token, _)| token.contains(char::is_alphanumeric))?;
    Some(candidates).filter(|candidates| !candidates.is_empty())
}

/// P(yes) / (P(yes) + P(no)) from candidates for a token; `None` if neither word is among them.
fn probability_of_yes(candidates: &[Json]) -> Option<f64> {
    let is_word = |token: &Json, word: &str| {
        let token = token["token"].as_str().unwrap_or_default();
        token.trim_matches(|c: char| !c.is_alphanumeric()).eq_ignore_ascii_case(word)
    };
    // The sum over the spellings of a word: "Yes", " yes", ...
    let probability = |word: &str| -> f64 {
        let spellings = candidates.iter().filter(|token| is_word(token, word));
        spellings.filter_map(|token| token["logprob"].as_f64()).map(|p| p.min(0.0).exp()).sum()
    };
    let (yes, no) = (probability("yes"), probability("no"));
    (yes + no > 0.0).then(|| yes / (yes + no))
}

/// The score of a text whose first word is yes or no; `None` for another text.
fn yes_or_no(text: &str) -> Option<f64> {
    let word = text.split(|c: char| !c.is_alphanumeric()).find(|word| !word.is_empty())?;
    match word.to_ascii_lowercase().as_str() {
        "yes" => Some(1.0),
        "no" => Some(0.0),
        _ => None,
    }
}

/// The first number of a text, mapped from `[low, high]` to [0, 1]; `None` if it lies outside or there is no number.
fn first_number(text: &str, [low, high]: [f64; 2]) -> Option<f64> {
    let digit = text.find(|c: char| c.is_ascii_digit())?;
    let start = text[..digit].trim_end_matches(['-', '.']).len();
    let length = text[digit..].find(|c: char| !(c.is_ascii_digit() || c == '.'));
    let end = length.map_or(text.len(), |length| digit + length);
    let value: f64 = text[start..end].trim_end_matches('.').parse().ok()?;
    (low..=high).contains(&value).then(|| (value - low) / (high - low))
}
