//! Extracts the action from the agent's answer.

use regex::Regex;
use roll_core::{Error, Result};

/// Default pattern of an action.
pub const DEFAULT_PATTERN: &str = "<answer>(.*?)</answer>";

/// Greatest size of a compiled pattern in bytes. Larger patterns are mistakes that would only take memory.
const PATTERN_BYTES: usize = 1 << 20;

/// Finds actions in answers by a regular expression. Its last group that matches is the action; a group before it, such
/// as the agent's reasoning, is ignored.
#[derive(Clone, Debug)]
pub struct ActionPattern {
    pattern: Regex,
    /// Texts that are deleted from an answer first.
    deleted: Vec<String>,
    /// The text of the latest action; see [`ActionPattern::latest`].
    latest: String,
}

impl ActionPattern {
    /// Compiles a pattern, which is applied after the texts `deleted` are removed from an answer. A dot also matches
    /// line breaks. Fails unless the pattern is valid and has a group.
    pub fn new(pattern: &str, deleted: Vec<String>) -> Result<Self> {
        let compiled = regex::RegexBuilder::new(pattern).dot_matches_new_line(true).size_limit(PATTERN_BYTES).build();
        let pattern = compiled.map_err(|e| Error::config("env.action_pattern", e.to_string()))?;
        if pattern.captures_len() < 2 {
            return Err(Error::config("env.action_pattern", "the pattern needs a group, which holds the action"));
        }
        Ok(Self { pattern, deleted, latest: String::new() })
    }

    /// Finds the action in `text` and looks it up in `names`, ignoring case. `None` if there is no action, or one that
    /// is not in `names`.
    pub fn find<A: Copy>(&mut self, text: &str, names: &[(&str, A)]) -> Option<A> {
        let text = self.deleted.iter().fold(text.to_string(), |text, deleted| text.replace(deleted.as_str(), ""));
        let groups = self.pattern.captures(text.trim());
        let last_group = groups.and_then(|groups| Some(groups.iter().flatten().last()?.as_str().trim().to_string()));
        self.latest = last_group.unwrap_or_default();
        let wanted = self.latest.to_lowercase();
        names.iter().find(|(name, _)| name.to_lowercase() == wanted).map(|(_, action)| *action)
    }

    /// The text of the latest action, known or not; empty if the pattern did not match.
    pub fn latest(&self) -> &str {
        &self.latest
    }
}

/// The special tokens that the reference implementation deletes from an answer.
pub fn default_special_tokens() -> Vec<String> {
    vec!["<|im_start|>".into(), "<|im_end|>".into()]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const NAMES: [(&str, u8); 2] = [("Left", 0), ("Right", 2)];

    #[test]
    fn an_action_is_found_wherever_it_stands() {
        let mut pattern = ActionPattern::new(DEFAULT_PATTERN, default_special_tokens()).unwrap();
        for (text, action) in [
            ("<answer>Right</answer>", Some(2)),
            ("I go <answer>\n left </answer><|im_end|>", Some(0)),
            ("<answer>Left</answer> or <answer>Right</answer>", Some(0)),
            ("<answer>Jump</answer>", None),
            ("<answer>Right", None),
            ("", None),
        ] {
            assert_eq!(pattern.find(text, &NAMES), action, "{text}");
        }
    }

    #[test]
    fn a_pattern_with_reasoning_takes_its_last_group() {
        let mut pattern = ActionPattern::new(r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", Vec::new()).unwrap();
        let action = pattern.find("<think>the goal\nis right</think> <answer>right</answer>", &NAMES);
        assert_eq!((action, pattern.latest()), (Some(2), "right"));
        assert_eq!(pattern.find("<answer>right</answer>", &NAMES), None);
    }

    #[test]
    fn a_pattern_that_cannot_hold_an_action_is_refused() {
        assert!(ActionPattern::new("(", Vec::new()).is_err());
        assert!(ActionPattern::new("<answer>", Vec::new()).unwrap_err().to_string().contains("group"));
    }
}
