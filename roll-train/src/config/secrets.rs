//! Secrets of the environment in a configuration: `config.yaml` and the report name the variable instead of its value.

use serde_json::Value as Json;

/// Parts of the names of variables that hold secrets.
const NAMES: [&str; 8] =
    ["TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "ACCESS_KEY", "PRIVATE_KEY", "CREDENTIAL"];
/// Shorter values are left alone: they occur by chance.
const SHORTEST: usize = 8;

/// Puts `${oc.env:NAME}` in the place of every secret among `variables` that occurs in a text of `value`; reading it
/// again yields the same configuration if the variable is the same. What looks like an interpolation already is
/// escaped.
pub(super) fn hide(value: &mut Json, variables: impl IntoIterator<Item = (String, String)>) {
    let mut secrets: Vec<(String, String)> = variables
        .into_iter()
        .filter(|(name, value)| value.len() >= SHORTEST && NAMES.iter().any(|part| name.to_uppercase().contains(part)))
        // Read again it would be a number.
        .filter(|(_, value)| value.parse::<f64>().is_err())
        .collect();
    // A secret may contain another.
    secrets.sort_by_key(|(name, value)| (std::cmp::Reverse(value.len()), name.clone()));
    hide_in(value, &secrets);
}

fn hide_in(value: &mut Json, secrets: &[(String, String)]) {
    match value {
        Json::String(text) => {
            *text = text.replace("${", "\\${");
            for (name, secret) in secrets {
                *text = text.replace(secret, &format!("${{oc.env:{name}}}"));
            }
        }
        Json::Array(items) => items.iter_mut().for_each(|item| hide_in(item, secrets)),
        Json::Object(map) => map.values_mut().for_each(|item| hide_in(item, secrets)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

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
        hide(&mut value, variables.map(|(name, value)| (name.to_string(), value.to_string())));
        let expected = json!({
            "reward": [{"name": "http", "options": {"key": "${oc.env:HF_TOKEN}", "n": 3}}],
            "on_finish": [
                "curl", "-H", "Authorization: ${oc.env:HF_TOKEN} ${oc.env:My_Password}", "\\${n} abcdefgh",
            ],
        });
        assert_eq!(value, expected);
    }
}
