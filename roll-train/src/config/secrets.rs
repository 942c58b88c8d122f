//! Secrets that a configuration takes from environment variables. [`hide`] puts `${oc.env:NAME}` in their place in
//! `config.yaml` and the report, [`without_secrets`] does so in messages.

use std::sync::Mutex;

use config::Value;
use serde_json::Value as Json;

use super::provenance::{Provenance, to_json};
use super::yaml::child;

/// Parts of names of variables that hold secrets.
const SECRET_PARTS: [&str; 8] =
    ["TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "ACCESS_KEY", "PRIVATE_KEY", "CREDENTIAL"];
/// Shortest value of such a variable that is replaced in a configuration. Shorter ones may occur there by chance.
const MIN_SECRET_LENGTH: usize = 8;

/// Further parts of names of secrets, for the variables that a configuration interpolates.
const MORE_SECRET_PARTS: [&str; 7] = ["KEY", "PASS", "PWD", "AUTH", "COOKIE", "WEBHOOK", "SESSION"];
/// Whole words in names of secrets, for the variables that a configuration interpolates.
const SECRET_WORDS: [&str; 2] = ["PAT", "SAS"];
/// Longest value that may be the name of an experiment, a backend or the like, and so no secret.
const MAX_NAME_LENGTH: usize = 24;

/// A text that messages must not contain.
struct Hidden {
    /// The text itself.
    value: String,
    /// The text that messages have instead, `${oc.env:NAME}`.
    written: String,
    /// Whether the value is replaced anywhere in a message. Otherwise it is replaced only where it is quoted by itself.
    is_replaced_anywhere: bool,
}

/// Values of interpolated variables, longest first.
static OUT_OF_MESSAGES: Mutex<Vec<Hidden>> = Mutex::new(Vec::new());
/// Most values that are kept out of messages.
const MAX_HIDDEN: usize = 4096;
/// Shortest value that is replaced anywhere in a message.
const MIN_LENGTH_ANYWHERE: usize = 6;
/// Messages cut long values. A text that begins with this number of characters of a value is taken for the value.
const HEAD_LENGTH: usize = 16;

/// A value that a file interpolates from the environment, and the text that the file has for it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AsWritten {
    /// The place of the interpolation.
    origin: Option<String>,
    /// The value after interpolation.
    value: Json,
    /// The text in the file, with `${oc.env:NAME}` in it.
    text: String,
}

impl AsWritten {
    pub fn new(value: &Value, text: String) -> Self {
        let origin = value.origin().map(String::from);
        Self { origin, value: to_json(value.clone(), "", &mut Provenance::default()), text }
    }

    /// Whether the text interpolates the variable, without or with a default.
    fn interpolates(&self, variable: &str) -> bool {
        let names_before = |end: char| self.text.contains(&format!("${{oc.env:{variable}{end}"));
        names_before('}') || names_before(',')
    }
}

/// The text with every `${` escaped, so that interpolation yields the text itself.
pub(super) fn escaped(text: &str) -> String {
    text.replace("${", "\\${")
}

/// Keeps the value of an interpolated variable out of messages, see [`without_secrets`].
pub(super) fn keep_out_of_messages(name: &str, value: &str) {
    if value.is_empty() || value.parse::<f64>().is_ok() {
        return;
    }
    let is_replaced_anywhere = value.len() >= MIN_LENGTH_ANYWHERE && may_be_secret(name, value);
    let quoted = Json::from(value).to_string();
    // The value as it is, as JSON escapes it, and without a line break at its end.
    let forms = [value, quoted.trim_matches('"'), value.trim_end()];
    let Ok(mut hidden) = OUT_OF_MESSAGES.lock() else { return };
    for form in forms {
        if hidden.len() < MAX_HIDDEN && hidden.iter().all(|known| known.value != form) {
            hidden.push(Hidden { value: form.into(), written: format!("${{oc.env:{name}}}"), is_replaced_anywhere });
        }
    }
    hidden.sort_by_key(|known| std::cmp::Reverse(known.value.len()));
}

/// Whether the value of an interpolated variable may be a secret. Names of files and of experiments are not, because a
/// message with the path of a file, or with the command that resumes a run, is of use only as it is.
fn may_be_secret(name: &str, value: &str) -> bool {
    let name = name.to_uppercase();
    let has_secret_name = SECRET_PARTS.iter().chain(&MORE_SECRET_PARTS).any(|part| name.contains(part))
        || name.split('_').any(|word| SECRET_WORDS.contains(&word));
    let looks_like_name =
        value.len() <= MAX_NAME_LENGTH && value.chars().all(|c| c.is_alphanumeric() || "._-/".contains(c));
    !std::path::Path::new(value).exists() && (has_secret_name || !looks_like_name)
}

/// The text with `written` in the place of `value`, also where only the beginning of `value` is left of it (see
/// [`HEAD_LENGTH`]).
fn replaced(text: &str, value: &str, written: &str) -> String {
    let head = value.char_indices().nth(HEAD_LENGTH).map_or(value, |(end, _)| &value[..end]);
    let (mut result, mut rest) = (String::new(), text);
    while let Some(start) = rest.find(head) {
        // Everything after the start that continues as the value does.
        let common = rest[start..].chars().zip(value.chars()).take_while(|(found, expected)| found == expected);
        let length: usize = common.map(|(c, _)| c.len_utf8()).sum();
        result += &rest[..start];
        result += written;
        rest = &rest[start + length.max(1)..];
    }
    result + rest
}

/// A message in which `${oc.env:NAME}` replaces the values of variables that configurations of this process
/// interpolated.
pub fn without_secrets(message: &str) -> String {
    let mut text = message.to_string();
    let Ok(hidden) = OUT_OF_MESSAGES.lock() else { return text };
    for Hidden { value, written, is_replaced_anywhere } in hidden.iter() {
        if *is_replaced_anywhere {
            text = replaced(&text, value, written);
        }
        for quote in ['`', '"'] {
            text = text.replace(&format!("{quote}{value}{quote}"), &format!("{quote}{written}{quote}"));
        }
    }
    text
}

/// Replaces texts that came from the environment in the configuration `value`. Reading the result yields the same
/// configuration if the variables have the same values.
///
/// Values that files interpolated become the texts of the files. In all other texts, `${oc.env:NAME}` takes the place
/// of every secret among `variables`, the whole environment. A text that looks like an interpolation already is
/// escaped. Numbers stay, because they are no secrets, and a run can then continue without the variable.
pub(super) fn hide(
    value: &mut Json,
    provenance: &Provenance,
    interpolated: &[AsWritten],
    variables: impl IntoIterator<Item = (String, String)>,
) {
    let has_secret_name = |name: &str| SECRET_PARTS.iter().any(|part| name.to_uppercase().contains(part));
    let is_interpolated = |name: &str| interpolated.iter().any(|value| value.interpolates(name));
    let mut secrets: Vec<(String, String)> = variables
        .into_iter()
        .filter(|(_, value)| value.len() >= MIN_SECRET_LENGTH)
        .filter(|(name, value)| has_secret_name(name) || (is_interpolated(name) && may_be_secret(name, value)))
        // The text of an interpolated number would be read as a number.
        .filter(|(_, value)| value.parse::<f64>().is_err())
        .collect();
    // Longest first, because a secret may contain another one.
    secrets.sort_by_key(|(name, value)| (std::cmp::Reverse(value.len()), name.clone()));
    Hiding { provenance, interpolated, secrets }.hide("", value);
}

/// The values that [`hide`] replaces.
struct Hiding<'a> {
    provenance: &'a Provenance,
    interpolated: &'a [AsWritten],
    /// Names and values of variables.
    secrets: Vec<(String, String)>,
}

impl Hiding<'_> {
    /// Replaces secrets in the value of `key`.
    fn hide(&self, key: &str, value: &mut Json) {
        let is_here = |one: &&AsWritten| one.value == *value && self.provenance.is_from(key, &one.origin);
        let interpolated = self.interpolated.iter().find(is_here);
        let may_be_text = matches!(value, Json::String(_) | Json::Array(_) | Json::Object(_));
        if may_be_text && let Some(interpolated) = interpolated {
            *value = interpolated.text.clone().into();
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
