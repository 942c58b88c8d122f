//! The note on keys that have no effect here.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::super::agentic_table::{WITHOUT_EFFECT, matches_pattern};
use super::super::tree::ReferenceTree;

/// A note that lists the keys without effect by the reason, and says how many keys have an effect.
pub fn without_effect(path: &Path, from: &ReferenceTree) -> Option<String> {
    let unused = from.unused(path);
    if unused.is_empty() {
        return None;
    }
    let mut by_reason: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for key in &unused {
        by_reason.entry(reason_without_effect(key)).or_default().insert(of_all_tags(key));
    }
    let joined = |keys: BTreeSet<String>| keys.into_iter().collect::<Vec<_>>().join(", ");
    let listed = by_reason.into_iter().map(|(reason, keys)| format!("{} ({reason})", joined(keys)));
    let (with, without) = from.counts(path, &unused);
    Some(format!(
        "{}: an agentic configuration of ROLL; {with} keys have an effect here, {without} have none: {}",
        path.display(),
        listed.collect::<Vec<_>>().join("; ")
    ))
}

/// The reason why a key has no effect here.
fn reason_without_effect(key: &str) -> &'static str {
    let is_entry_of_custom_envs = key.strip_prefix("custom_envs.").is_some_and(|rest| !rest.contains('.'));
    if is_entry_of_custom_envs {
        return "no tag names it";
    }
    let known = WITHOUT_EFFECT.iter().find(|(pattern, _)| matches_pattern(pattern, key));
    known.map_or("there is nothing like it", |(_, reason)| *reason)
}

/// A key in one entry of `custom_envs` with `*` for the entry's name, since most entries have the same keys.
fn of_all_tags(key: &str) -> String {
    match key.strip_prefix("custom_envs.").and_then(|rest| rest.split_once('.')) {
        Some((_, rest)) => format!("custom_envs.*.{rest}"),
        None => key.to_string(),
    }
}
