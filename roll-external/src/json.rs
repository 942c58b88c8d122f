//! JSON with integers of any size, as Python reads and writes it.
//!
//! `serde_json` turns an integer beyond 64 bits into a float. Its feature `arbitrary_precision` was rejected: it
//! changes how every number of every configuration is deserialized. Here such an integer becomes an object with one
//! key, which passes through [`Value`] and `serde_json` unchanged and is written as digits again.

use std::borrow::Cow;

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// The only key of an object that represents an integer beyond 64 bits.
const INTEGER: &str = "$roll::integer";

/// Deserializes JSON. Values of the type [`Value`] keep integers of any size, which [`integer`] returns.
pub fn parse<T: DeserializeOwned>(text: &str) -> serde_json::Result<T> {
    serde_json::from_str(&with_integers(text))
}

/// Returns `text` with objects in place of its integers beyond 64 bits, and 0 in place of -0, as Python reads it.
pub fn with_integers(text: &str) -> Cow<'_, str> {
    let bytes = text.as_bytes();
    // `written` replaces `text[..copied]`; the byte at `at` is looked at next.
    let (mut written, mut copied, mut at, mut is_in_string) = (String::new(), 0, 0, false);
    while at < bytes.len() {
        match bytes[at] {
            // Skips the escaped character, which may be a quote.
            b'\\' if is_in_string => at += 1,
            b'"' => is_in_string = !is_in_string,
            b'-' | b'0'..=b'9' if !is_in_string => {
                let is_of_number = |byte: &u8| matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E');
                let length = bytes[at..].iter().take_while(|byte| is_of_number(byte)).count();
                let number = &text[at..at + length];
                let replacement = match number {
                    "-0" => Some("0".to_string()),
                    _ => is_wide(number).then(|| json!({ INTEGER: number }).to_string()),
                };
                if let Some(replacement) = replacement {
                    written += &text[copied..at];
                    written += &replacement;
                    copied = at + length;
                }
                at += length;
                continue;
            }
            _ => {}
        }
        at += 1;
    }
    if copied == 0 { Cow::Borrowed(text) } else { Cow::Owned(written + &text[copied..]) }
}

/// Whether `text` is an integer of JSON beyond 64 bits.
fn is_wide(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    // Eighteen digits always fit 64 bits.
    digits.len() > 18
        && !digits.starts_with('0')
        && digits.bytes().all(|byte| byte.is_ascii_digit())
        && text.parse::<i64>().is_err()
        && text.parse::<u64>().is_err()
}

/// Returns the digits, with the sign, of an integer beyond 64 bits; `None` if `value` is something else.
pub fn integer(value: &Value) -> Option<&str> {
    let fields = value.as_object().filter(|fields| fields.len() == 1)?;
    fields.get(INTEGER)?.as_str().filter(|digits| is_wide(digits))
}

/// Returns `value` with texts in place of integers beyond 64 bits, for readers that have no such integers.
pub fn with_texts(value: Value) -> Value {
    match (integer(&value).map(Value::from), value) {
        (Some(digits), _) => digits,
        (None, Value::Array(items)) => items.into_iter().map(with_texts).collect(),
        (None, Value::Object(fields)) => fields.into_iter().map(|(key, field)| (key, with_texts(field))).collect(),
        (None, scalar) => scalar,
    }
}

/// Returns `value` as JSON without blanks.
pub fn compact(value: &Value) -> String {
    let mut out = String::new();
    write(value, [",", ":"], &Value::to_string, &mut out);
    out
}

/// Returns `value` as Python's `json.dumps` writes it with `ensure_ascii=False`.
pub fn dumps(value: &Value) -> String {
    let scalar = |scalar: &Value| match scalar.as_f64().filter(|_| scalar.is_f64()) {
        Some(x) => float(x),
        None => scalar.to_string(),
    };
    let mut out = String::new();
    write(value, [", ", ": "], &scalar, &mut out);
    out
}

/// Appends `value` to `out`, with `scalar` for values that are neither lists nor maps. `separators` are the texts
/// between entries, and between key and value.
fn write(value: &Value, separators: [&str; 2], scalar: &impl Fn(&Value) -> String, out: &mut String) {
    let [comma, colon] = separators;
    match value {
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i == 0 { "" } else { comma });
                write(item, separators, scalar, out);
            }
            out.push(']');
        }
        Value::Object(fields) => match integer(value) {
            Some(digits) => out.push_str(digits),
            None => {
                out.push('{');
                for (i, (key, field)) in fields.iter().enumerate() {
                    out.push_str(if i == 0 { "" } else { comma });
                    out.push_str(&Value::from(key.as_str()).to_string());
                    out.push_str(colon);
                    write(field, separators, scalar, out);
                }
                out.push('}');
            }
        },
        value => out.push_str(&scalar(value)),
    }
}

/// Returns Python's `repr` of a float: the shortest digits, with an exponent below 1e-4 and from 1e16.
pub fn float(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf" } else { "-inf" }.into();
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        -4..=15 => {
            let plain = x.to_string();
            if plain.contains('.') { plain } else { plain + ".0" }
        }
        exponent => format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn numbers_are_those_of_python() {
        // `python -c 'import json, sys; print(json.dumps(json.loads(sys.argv[1]), ensure_ascii=False))' TEXT`
        for (text, expected) in [
            ("1000000000000000000000", "1000000000000000000000"),
            ("-9223372036854775809", "-9223372036854775809"),
            ("-9223372036854775808", "-9223372036854775808"),
            ("18446744073709551615", "18446744073709551615"),
            ("18446744073709551616", "18446744073709551616"),
            (r#"{"a":[-0,-0.0,0,1e21,1e-7,100000000000000000000.0]}"#, r#"{"a": [0, -0.0, 0, 1e+21, 1e-07, 1e+20]}"#),
            (r#"{"é\"100000000000000000000":"\\"}"#, r#"{"é\"100000000000000000000": "\\"}"#),
            (
                "[115792089237316195423570985008687907853269984665640564039457584007913129639935, 2]",
                "[115792089237316195423570985008687907853269984665640564039457584007913129639935, 2]",
            ),
        ] {
            assert_eq!(dumps(&parse(text).unwrap()), expected, "{text}");
        }
        let text = r#"{"wei":1000000000000000000000,"x":[1e-7,"é"]}"#;
        let value: Value = parse(text).unwrap();
        assert_eq!(compact(&value), text);
        assert_eq!(integer(&value["wei"]), Some("1000000000000000000000"));
        assert_eq!(with_texts(value), json!({"wei": "1000000000000000000000", "x": [1e-7, "é"]}));
    }

    #[test]
    fn texts_without_wide_integers_are_unchanged() {
        for text in [r#"{"a": "-0", "b": "\"1000000000000000000000"}"#, "[1.5e300, -1]", "not JSON \"", "\\"] {
            assert!(matches!(with_integers(text), Cow::Borrowed(same) if same == text), "{text}");
        }
        for text in ["0000000000000000000000001", "1000000000000000000000x", "--0", "[1 1000000000000000000000]"] {
            assert!(parse::<Value>(text).is_err(), "{text}");
        }
        let other = json!({"$roll::integer": "12"});
        assert_eq!((integer(&other), dumps(&other)), (None, r#"{"$roll::integer": "12"}"#.to_string()));
    }
}
