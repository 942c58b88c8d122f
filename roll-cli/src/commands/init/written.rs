//! The answers of `roll init` as a YAML file.

use roll_core::Options;
use roll_core::serde_json::Value as Json;

use super::answers::{Answers, insert};
use crate::commands::config::{inline, wrapped};

/// Columns of a comment.
const COLUMNS: usize = 100;
/// The sections, in the order of the file.
const SECTIONS: [&str; 8] = ["algo", "model", "env", "reward", "data", "training", "evaluation", "strategy"];

/// The configuration as YAML, each key after its meaning; `about` is the first comment.
pub fn yaml(answers: &Answers, about: &str) -> String {
    let mut tree = Options::new();
    answers.values().iter().for_each(|(key, value)| insert(&mut tree, key, value.clone()));
    let mut text = String::new();
    write_comment(&mut text, "", about);
    for (key, value) in tree.iter().filter(|(key, _)| !SECTIONS.contains(&key.as_str())) {
        write_entry(&mut text, answers, key, key, value);
    }
    for section in SECTIONS {
        if let Some(Json::Object(keys)) = tree.get(section) {
            text += &format!("\n{section}:\n");
            keys.iter()
                .for_each(|(name, value)| write_entry(&mut text, answers, &format!("{section}.{name}"), name, value));
        }
    }
    text
}

/// Writes a key and its value, after a comment with the meaning of the key.
fn write_entry(text: &mut String, answers: &Answers, key: &str, name: &str, value: &Json) {
    let indent = if key == name { "" } else { "  " };
    if let Some(known) = answers.key(key) {
        // The first paragraph of a description says what the key is.
        write_comment(text, indent, known.about.split("\n\n").next().unwrap_or_default());
    }
    *text += &format!("{indent}{name}: {}\n", inline(value));
}

fn write_comment(text: &mut String, indent: &str, about: &str) {
    for line in wrapped(about, COLUMNS) {
        *text += &format!("{indent}# {line}\n");
    }
}
