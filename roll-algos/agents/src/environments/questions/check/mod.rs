//! Comparisons of answers with the reference answer of their question.

mod boxed;
mod choice;
mod command;
mod json;
mod number;
mod pattern;

use regex::Regex;
use roll_core::{Error, Result};
use serde_json::Value;

use boxed::Term;
pub use choice::letter_of;
pub use command::Judges;
use number::Decimal;

/// Most characters of a text that a message quotes.
const SHOWN_CHARACTERS: usize = 60;

/// How an answer is compared with the reference answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CheckKind {
    /// The last number of the answer equals the reference, a number or a text with one (after `####`, if it has that):
    /// 1,000 is 1000.0.
    #[default]
    Number,
    /// The last `\boxed{...}` of the answer equals the reference, or the reference's own box. Spaces and commands for
    /// size and spacing do not count, and numbers and fractions are compared by value.
    Boxed,
    /// The letter that the answer chooses is the reference, a letter or its number from 0.
    Choice,
    /// With `pattern`, the text that its last match extracts (its last group, or all of it) equals the reference.
    /// Without, the reference is a pattern that matches somewhere in the answer.
    Regex,
    /// The answer, or its last fenced block, is JSON and equals the reference.
    Json,
    /// The program `command` judges the answer.
    Command,
}

/// A check with its options.
pub enum Check {
    Number,
    Boxed,
    Choice,
    /// With `env.pattern`, or with a pattern in each row.
    Regex(Option<Regex>),
    Json,
    Command(Judges),
}

/// A reference answer, in the form that its check compares.
#[derive(Clone, Debug)]
pub enum Reference {
    Number(Decimal),
    Boxed(Term),
    Choice(char),
    /// A text, or a pattern.
    Text(String),
    /// Any value, for a comparison as JSON or for the program.
    Value(Value),
}

/// The judgement of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Verdict {
    pub reward: f64,
    /// Whether the answer is right.
    pub solved: bool,
    /// Whether an answer in the right form was found.
    pub valid: bool,
    /// The text that was compared; empty if there was none.
    pub found: String,
}

impl Verdict {
    /// The judgement of a found text that is right or wrong.
    fn of(found: impl Into<String>, solved: bool) -> Self {
        Self { reward: f64::from(u8::from(solved)), solved, valid: true, found: found.into() }
    }
}

impl Check {
    /// Compiles `env.pattern`.
    pub fn regex(pattern: Option<&str>) -> Result<Self> {
        let compiled = pattern.map(pattern::compiled).transpose();
        compiled.map(Self::Regex).map_err(|problem| Error::config("env.pattern", problem))
    }

    /// The reference of a row. The error describes what is wrong with `value`.
    pub fn reference(&self, value: &Value) -> Result<Reference, String> {
        Ok(match self {
            Self::Number => Reference::Number(number::reference(value)?),
            Self::Boxed => Reference::Boxed(boxed::reference(value)?),
            Self::Choice => Reference::Choice(choice::reference(value)?),
            Self::Regex(own_pattern) => {
                let text = pattern::reference(value)?;
                if own_pattern.is_none() {
                    pattern::compiled(&text)?;
                }
                Reference::Text(text)
            }
            Self::Json => Reference::Value(json::reference(value)),
            Self::Command(_) => Reference::Value(value.clone()),
        })
    }

    /// Judges `answer`. `request` makes the program's request. Fails only if the program does.
    pub fn judge(
        &self,
        answer: &str,
        reference: &Reference,
        request: impl FnOnce() -> Value,
    ) -> Result<Verdict, String> {
        if let Self::Command(judges) = self {
            return judges.judge(&request());
        }
        let answer = without_thoughts(answer);
        let found = match (self, reference) {
            (_, Reference::Number(right)) => {
                number::numbers(answer).pop().map(|(text, found)| Verdict::of(text, found == *right))
            }
            (_, Reference::Boxed(right)) => {
                boxed::last_box(answer).map(|text| Verdict::of(text, Term::of(text) == *right))
            }
            (_, Reference::Choice(right)) => choice::chosen(answer).map(|found| Verdict::of(found, found == *right)),
            (Self::Regex(Some(extract)), Reference::Text(right)) => {
                pattern::extracted(extract, answer).map(|found| Verdict::of(found, found == right))
            }
            (_, Reference::Text(right)) => {
                let matched =
                    pattern::compiled(right).ok().and_then(|p| p.find(answer).map(|m| m.as_str().to_string()));
                // Every answer has the right form, because the row's pattern knows the right answer only.
                Some(Verdict::of(matched.clone().unwrap_or_default(), matched.is_some()))
            }
            (_, Reference::Value(right)) => {
                json::answered(answer).map(|found| Verdict::of(found.to_string(), json::equal(&found, right)))
            }
        };
        Ok(found.unwrap_or_default())
    }
}

/// `answer` without the thoughts before it. Nothing is left of an answer whose thoughts do not end.
fn without_thoughts(answer: &str) -> &str {
    match answer.rsplit_once("</think>") {
        Some((_, rest)) => rest,
        None if answer.contains("<think>") => "",
        None => answer,
    }
}

/// The beginning of a text, for a message.
fn shortened(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARACTERS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.into(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    fn verdict(check: &Check, reference: Value, answer: &str) -> Verdict {
        check.judge(answer, &check.reference(&reference).unwrap(), || json!(null)).unwrap()
    }

    #[test]
    fn every_check_rewards_the_right_answer_alone() {
        let answer = Check::regex(Some("(?i)answer: *(\\w+)")).unwrap();
        let yes = Check::regex(None).unwrap();
        for (check, reference, right, wrong, invalid) in [
            (&Check::Number, json!("#### 1,000"), "It is 1000.0.", "1000 or 1001", "a thousand"),
            (&Check::Boxed, json!(r"\frac12"), r"\boxed{0.5}", r"0.5, \boxed{2}", "0.5"),
            (&Check::Choice, json!("B"), "Answer: B", "B or (C)", "both"),
            (&answer, json!("yes"), "Answer: yes", "answer: yes, no, answer: no", "yes"),
            (&Check::Json, json!({"a": 1}), "{\"a\": 1.0}", "{\"a\": 2}", "a = 1"),
        ] {
            let found = verdict(check, reference.clone(), right);
            assert_eq!((found.reward, found.solved, found.valid), (1.0, true, true), "{right}");
            let found = verdict(check, reference.clone(), wrong);
            assert_eq!((found.reward, found.solved, found.valid), (0.0, false, true), "{wrong}");
            assert_eq!(verdict(check, reference.clone(), invalid), Verdict::default(), "{invalid}");
            assert_eq!(verdict(check, reference.clone(), ""), Verdict::default());
            // Thoughts are no answer, whether they end or not.
            assert_eq!(verdict(check, reference.clone(), &format!("<think>{right}")), Verdict::default());
            assert_eq!(verdict(check, reference.clone(), &format!("<think>{right}</think> hm")), Verdict::default());
            assert!(verdict(check, reference, &format!("<think>{wrong}</think>{right}")).solved);
        }
        assert!(verdict(&yes, json!("(?i)^yes"), "Yes!").solved && !verdict(&yes, json!("(?i)^yes"), "no, yes").solved);
    }

    #[test]
    fn references_that_cannot_be_compared_are_refused() {
        for (check, reference) in [
            (Check::Number, json!("none")),
            (Check::Boxed, json!("")),
            (Check::Choice, json!("Rome")),
            (Check::regex(None).unwrap(), json!("(")),
            (Check::regex(Some("x")).unwrap(), json!(["x"])),
        ] {
            assert!(check.reference(&reference).is_err(), "{reference}");
        }
        assert!(Check::regex(Some("(")).err().unwrap().to_string().contains("env.pattern"));
    }
}
