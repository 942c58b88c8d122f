//! Answers that a regular expression finds or accepts.

use regex::{Regex, RegexBuilder};
use serde_json::Value;

/// Greatest size of a compiled pattern in bytes. Larger patterns are mistakes that would only take memory.
const PATTERN_BYTES: usize = 1 << 20;

/// Compiles a pattern. Matching takes a time proportional to the length of the text.
pub fn compiled(pattern: &str) -> Result<Regex, String> {
    RegexBuilder::new(pattern).size_limit(PATTERN_BYTES).build().map_err(|e| e.to_string())
}

/// The text that the last match of `pattern` extracts: its last group that matched, or all of it.
pub fn extracted<'t>(pattern: &Regex, text: &'t str) -> Option<&'t str> {
    let groups = pattern.captures_iter(text).last()?;
    groups.iter().flatten().last().map(|group| group.as_str().trim())
}

/// The text of a reference answer.
pub fn reference(value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.trim().into()),
        Value::Number(number) => Ok(number.to_string()),
        Value::Bool(value) => Ok(value.to_string()),
        other => Err(format!("expected a text, found {other}")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_last_match_counts() {
        let answer = compiled("<answer>(.*?)</answer>").unwrap();
        let text = "<answer>a</answer> no <answer> b </answer> <answer>c";
        assert_eq!(extracted(&answer, text), Some("b"));
        assert_eq!(extracted(&answer, "b"), None);
        assert_eq!(extracted(&compiled("(?i)yes|no").unwrap(), "Yes? NO"), Some("NO"));
    }

    #[test]
    fn patterns_that_backtrack_elsewhere_take_no_time() {
        let hostile = compiled("(a+)+$").unwrap();
        assert_eq!(extracted(&hostile, &("a".repeat(100_000) + "b")), None);
        assert!(compiled("(").is_err() && compiled("(a{1000}){1000}").is_err());
    }
}
