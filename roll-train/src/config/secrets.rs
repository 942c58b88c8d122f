//! Secrets of the environment in a configuration: `config.yaml` and the report name the variable instead of its value.

use std::sync::Mutex;

use config::Value;
use serde_json::Value as Json;

use super::provenance::{Provenance, to_json};
use super::yaml::child;

/// Parts of the names of variables that hold secrets.
const NAMES: [&str; 8] =
    ["TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "ACCESS_KEY", "PRIVATE_KEY", "CREDENTIAL"];
/// Shorter values are left alone: they occur by chance.
const SHORTEST: usize = 8;

/// More such parts, of names of variables that a configuration interpolates.
const MORE_NAMES: [&str; 7] = ["KEY", "PASS", "PWD", "AUTH", "COOKIE", "WEBHOOK", "SESSION"];
/// And whole words of such names.
const WORDS: [&str; 2] = ["PAT", "SAS"];
/// Longer values are no names of experiments, backends and the like.
const LONGEST_NAME: usize = 24;

/// Values of interpolated variables, longest first, what messages have instead of them, and whether they are replaced
/// within a text, and not only where they are quoted.
static OUT_OF_MESSAGES: Mutex<Vec<(String, String, bool)>> = Mutex::new(Vec::new());
/// Shorter values are hidden only where a message quotes them alone.
const SHORTEST_WITHIN: usize = 6;
/// Messages cut long values: one that agrees in this number of characters is the same.
const HEAD: usize = 16;

/// A value that comes from the environment.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AsWritten {
    origin: Option<String>,
    value: Json,
    /// Its text, with `${oc.env:NAME}` in it.
    text: String,
}

impl AsWritten {
    pub fn new(value: &Value, text: String) -> Self {
        let origin = value.origin().map(String::from);
        Self { origin, value: to_json(value.clone(), "", &mut Provenance::default()), text }
    }

    /// Whether the variable is in its text.
    fn names(&self, variable: &str) -> bool {
        let name = |end: char| self.text.contains(&format!("${{oc.env:{variable}{end}"));
        name('}') || name(',')
    }
}

/// Text that is read again as it is.
pub(super) fn escaped(text: &str) -> String {
    text.replace("${", "\\${")
}

/// Keeps the value of an interpolated variable out of messages, see [`without_secrets`].
pub(super) fn keep_out_of_messages(name: &str, value: &str) {
    if value.is_empty() || value.parse::<f64>().is_ok() {
        return;
    }
    let within = value.len() >= SHORTEST_WITHIN && may_be_secret(name, value);
    let quoted = Json::from(value).to_string();
    let forms = [value, quoted.trim_matches('"'), value.trim_end()];
    let Ok(mut known) = OUT_OF_MESSAGES.lock() else { return };
    for form in forms {
        if known.len() < 4096 && known.iter().all(|(known, ..)| known != form) {
            known.push((form.into(), format!("${{oc.env:{name}}}"), within));
        }
    }
    known.sort_by_key(|(value, ..)| std::cmp::Reverse(value.len()));
}

/// Whether the value of an interpolated variable may be a secret: a message that names a file, or the command that
/// resumes a run, is of use as it is.
fn may_be_secret(name: &str, value: &str) -> bool {
    let name = name.to_uppercase();
    let is_name = value.len() <= LONGEST_NAME && value.chars().all(|c| c.is_alphanumeric() || "._-/".contains(c));
    let is_named = NAMES.iter().chain(&MORE_NAMES).any(|part| name.contains(part))
        || name.split('_').any(|word| WORDS.contains(&word));
    !std::path::Path::new(value).exists() && (is_named || !is_name)
}

/// The text with `written` in the place of `value`, and of its beginning where a message cuts it.
fn replaced(text: &str, value: &str, written: &str) -> String {
    let head = value.char_indices().nth(HEAD).map_or(value, |(end, _)| &value[..end]);
    let (mut result, mut rest) = (String::new(), text);
    while let Some(at) = rest.find(head) {
        let same = rest[at..].chars().zip(value.chars()).take_while(|(found, own)| found == own);
        let length: usize = same.map(|(c, _)| c.len_utf8()).sum();
        result += &rest[..at];
        result += written;
        rest = &rest[at + length.max(1)..];
    }
    result + rest
}

/// A message in which `${oc.env:NAME}` replaces the values of variables that configurations of this process
/// interpolated.
pub fn without_secrets(message: &str) -> String {
    let mut text = message.to_string();
    let Ok(known) = OUT_OF_MESSAGES.lock() else { return text };
    for (value, written, within) in known.iter() {
        if *within {
            text = replaced(&text, value, written);
        }
        for quote in ['`', '"'] {
            text = text.replace(&format!("{quote}{value}{quote}"), &format!("{quote}{written}{quote}"));
        }
    }
    text
}

/// Writes values of the environment as they were interpolated, and puts `${oc.env:NAME}` in the place of every secret
/// among `variables` that occurs in another text of `value`; reading it again yields the same configuration if the
/// variable is the same. What looks like an interpolation already is escaped. Numbers stay: they are no secrets, and a
/// run goes on with them where the variable is not set.
pub(super) fn hide(
    value: &mut Json,
    provenance: &Provenance,
    written: &[AsWritten],
    variables: impl IntoIterator<Item = (String, String)>,
) {
    let is_named = |name: &str| NAMES.iter().any(|part| name.to_uppercase().contains(part));
    let is_interpolated = |name: &str| written.iter().any(|one| one.names(name));
    let mut secrets: Vec<(String, String)> = variables
        .into_iter()
        .filter(|(_, value)| value.len() >= SHORTEST)
        .filter(|(name, value)| is_named(name) || (is_interpolated(name) && may_be_secret(name, value)))
        // Read again it would be a number.
        .filter(|(_, value)| value.parse::<f64>().is_err())
        .collect();
    // A secret may contain another.
    secrets.sort_by_key(|(name, value)| (std::cmp::Reverse(value.len()), name.clone()));
    Hiding { provenance, written, secrets }.hide("", value);
}

struct Hiding<'a> {
    provenance: &'a Provenance,
    written: &'a [AsWritten],
    secrets: Vec<(String, String)>,
}

impl Hiding<'_> {
    fn hide(&self, key: &str, value: &mut Json) {
        if matches!(value, Json::String(_) | Json::Array(_) | Json::Object(_))
            && let Some(one) =
                self.written.iter().find(|one| one.value == *value && self.provenance.is_from(key, &one.origin))
        {
            *value = one.text.clone().into();
            return;
        }
        match value {
            Json::String(text) => {
                *text = escaped(text);
                for (name, secret) in &self.secrets {
                    *text = text.replace(secret, &format!("${{oc.env:{name}}}"));
                }
            }
            Json::Array(items) => {
                items.iter_mut().enumerate().for_each(|(i, item)| self.hide(&child(key, i), item));
            }
            Json::Object(map) => map.iter_mut().for_each(|(name, item)| self.hide(&child(key, name), item)),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn messages_name_variables_instead_of_values() {
        let long = "/%xyz".repeat(30);
        keep_out_of_messages("TEST_LONG_VALUE", &long);
        keep_out_of_messages("TEST_EXPERIMENT", "my-experiment-4711");
        for (message, expected) in [
            (
                format!("found {long}, {}...", &long[..79]),
                "found ${oc.env:TEST_LONG_VALUE}, ${oc.env:TEST_LONG_VALUE}...",
            ),
            // A name is of use within a path or a command.
            ("roll run --resume runs/my-experiment-4711".into(), "roll run --resume runs/my-experiment-4711"),
            ("found `my-experiment-4711`".into(), "found `${oc.env:TEST_EXPERIMENT}`"),
            ("/%xy".into(), "/%xy"),
        ] {
            assert_eq!(without_secrets(&message), expected);
        }
    }

    #[test]
    fn replaces_secrets_by_the_names_of_their_variables() {
        let mut value = json!({
            "reward": [{"name": "http", "options": {"key": "hf_0123456789", "n": 3}}],
            "on_finish": ["curl", "-H", "Authorization: hf_0123456789 s3cr3t-phrase", "${n} abcdefgh"],
        });
        let variables = [
            ("HF_TOKEN", "hf_0123456789"),
            ("My_Password", "s3cr3t-phrase"),
            ("SHORT_TOKEN", "curl"),
            ("HOME", "abcdefgh"),
            ("N_TOKEN", "00000003"),
        ];
        let variables = variables.map(|(name, value)| (name.to_string(), value.to_string()));
        hide(&mut value, &Provenance::default(), &[], variables);
        let expected = json!({
            "reward": [{"name": "http", "options": {"key": "${oc.env:HF_TOKEN}", "n": 3}}],
            "on_finish": [
                "curl", "-H", "Authorization: ${oc.env:HF_TOKEN} ${oc.env:My_Password}", "\\${n} abcdefgh",
            ],
        });
        assert_eq!(value, expected);
    }
}
