//! Letters of multiple-choice questions.

use std::sync::LazyLock;

use regex::Regex;
use serde_json::Value;

use super::boxed::{Term, last_box};

#[allow(clippy::unwrap_used, clippy::disallowed_methods)] // patterns are constants
fn compiled(pattern: &str) -> Regex {
    Regex::new(pattern).unwrap()
}

/// "the answer is (B)", "Answer: B", "option B".
static ANNOUNCED: LazyLock<Regex> = LazyLock::new(|| {
    compiled(
        r"(?i)\b(?:answer|choice|option)(?:\s+is)?\s*:?[\s*_$]*(?:\(([a-z])\)|\\text\{\(?((?-i:[A-Z]))\)?\}|((?-i:[A-Z]))\b)",
    )
});
/// The letter alone, with marks around it.
static ALONE: LazyLock<Regex> = LazyLock::new(|| compiled(r"^\W*([A-Za-z])\W*$"));
/// "B) Paris", "B. Paris".
static FIRST: LazyLock<Regex> = LazyLock::new(|| compiled(r"^[\s*]*([A-Z])[).:]"));
/// "(B)"
static PARENTHESISED: LazyLock<Regex> = LazyLock::new(|| compiled(r"\(([A-Za-z])\)"));

/// The letter that an answer chooses. The first of these that the answer has: the last box, the last letter after the
/// word "answer", "choice" or "option", an answer that is nothing but the letter or begins with it, and the last letter
/// in parentheses.
pub fn chosen(text: &str) -> Option<char> {
    if let Some(boxed) = last_box(text) {
        return letter(&ALONE, Term::of(boxed).text());
    }
    let patterns = [&ANNOUNCED, &ALONE, &FIRST, &PARENTHESISED];
    patterns.into_iter().find_map(|pattern| letter(pattern, text))
}

/// The letter of the last match of `pattern`, in upper case.
fn letter(pattern: &Regex, text: &str) -> Option<char> {
    let groups = pattern.captures_iter(text).last()?;
    let group = groups.iter().skip(1).flatten().next()?;
    group.as_str().chars().next().map(|c| c.to_ascii_uppercase())
}

/// The letter of a reference answer: the letter itself, alone or before its text, or its number, counted from 0.
pub fn reference(value: &Value) -> Result<char, String> {
    let expected = || format!("expected a letter, or its number counted from 0; found {value}");
    match value {
        Value::Number(number) => {
            let number = number.as_u64().and_then(|number| u8::try_from(number).ok()).filter(|number| *number < 26);
            number.map(letter_of).ok_or_else(expected)
        }
        Value::String(text) => letter(&ALONE, text).or_else(|| letter(&FIRST, text)).ok_or_else(expected),
        _ => Err(expected()),
    }
}

/// The letter of choice `number`, from 0.
pub fn letter_of(number: u8) -> char {
    (b'A' + number.min(25)) as char
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    #[test]
    fn the_letter_is_found_in_the_usual_forms() {
        for text in [
            "B",
            "b",
            " (B). ",
            "**B**",
            "B) Paris",
            "B. Paris, not A.",
            "The answer is B.",
            "The correct answer is: (b)",
            "Answer: **B**",
            "A is wrong. Answer: B",
            "answer: A. No, the answer is B",
            r"So $\boxed{B}$ and not A",
            r"\boxed{\text{(B)}}",
            r"the answer is $\text{B}$",
            "(A) is too small, I take (B)",
        ] {
            assert_eq!(chosen(text), Some('B'), "{text}");
        }
        for text in ["", "Paris", "A dog is an animal", "I do not know", r"\boxed{Bee}", "the answer is a dog", "AB"] {
            assert_eq!(chosen(text), None, "{text}");
        }
        // All of them at once is the last of them.
        assert_eq!(chosen("(A) (B) (C) (D)"), Some('D'));
    }

    #[test]
    fn a_reference_is_a_letter_or_its_number() {
        for (value, expected) in [(json!("C"), 'C'), (json!("(c)"), 'C'), (json!("C. Rome"), 'C'), (json!(2), 'C')] {
            assert_eq!(reference(&value), Ok(expected), "{value}");
        }
        for value in [json!("Rome"), json!(26), json!(-1), json!(1.5), json!(""), json!(null)] {
            assert!(reference(&value).unwrap_err().contains("expected a letter"), "{value}");
        }
    }
}
