//! Answers in JSON.

use roll_external::json;
use serde_json::Value;

use super::number::Decimal;

/// The JSON of an answer: of its last fenced block, or of the whole text. `None` if that is not JSON.
pub fn answered(text: &str) -> Option<Value> {
    // Parts of odd index lie between fences; a block without an end is cut off.
    let parts: Vec<&str> = text.split("```").collect();
    let last_block = (parts.len() - 1) / 2;
    let source = match last_block {
        0 => text,
        block => parts[2 * block - 1].trim_start_matches(|c: char| c.is_ascii_alphanumeric() || c == '_'),
    };
    json::parse(source.trim()).ok()
}

/// The JSON of a reference answer, which may be a text with JSON.
pub fn reference(value: &Value) -> Value {
    value.as_str().and_then(|text| json::parse(text).ok()).unwrap_or_else(|| value.clone())
}

/// Whether two values are equal. Numbers are compared by value, so that 1 equals 1.0, and objects without the order of
/// their keys.
pub fn equal(one: &Value, other: &Value) -> bool {
    match (one, other) {
        _ if Decimal::of_json(one).is_some() => Decimal::of_json(one) == Decimal::of_json(other),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| equal(a, b)))
        }
        _ => one == other,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    #[test]
    fn the_answer_is_the_whole_text_or_its_last_block() {
        for text in [
            r#"{"a": [1, 2.0]}"#,
            " {\"a\":[1,2]}\n",
            "Sure:\n```json\n{\"a\": [1, 2]}\n```\nDone.",
            "```\n{\"a\": []}\n```\nno:\n```json\n{\"a\": [1, 2]}\n```",
            "```json\n{\"a\": [1, 2]}\n``` and ``` cut off",
        ] {
            assert!(equal(&answered(text).unwrap(), &json!({"a": [1, 2]})), "{text}");
        }
        for text in ["", "a", "{\"a\": [1, 2]", "{\"a\": [1, 2]} {}", "```json\n{\"a\": [1, 2]}", "NaN"] {
            assert_eq!(answered(text), None, "{text}");
        }
        assert_eq!(answered(&"[".repeat(100_000)), None);
        assert_eq!(answered("```3```"), None, "the number is read as the language of the block");
    }

    #[test]
    fn numbers_are_equal_by_value_and_objects_without_order() {
        let wide = "123456789012345678901234567890";
        for (one, other, expected) in [
            ("1", "1.0", true),
            ("1e2", "100", true),
            (r#"{"a": 1, "b": null}"#, r#"{"b": null, "a": 1}"#, true),
            (wide, wide, true),
            (wide, "123456789012345678901234567891", false),
            ("1", "\"1\"", false),
            ("[1, 2]", "[2, 1]", false),
            ("[1]", "[1, 1]", false),
            (r#"{"a": 1}"#, r#"{"a": 1, "b": 2}"#, false),
            ("true", "1", false),
            ("null", "0", false),
        ] {
            let [a, b] = [one, other].map(|text| json::parse(text).unwrap());
            assert_eq!((equal(&a, &b), equal(&b, &a)), (expected, expected), "{one} {other}");
        }
        assert_eq!(reference(&json!(r#"{"a": 1}"#)), json!({"a": 1}));
        assert_eq!(reference(&json!("yes")), json!("yes"));
    }
}
