//! Numbers in a text, compared as decimals of any length.

use std::sync::LazyLock;

use regex::Regex;
use roll_external::json;
use serde_json::Value;

/// A number without a sign. Commas separate groups of exactly three digits.
#[allow(clippy::unwrap_used, clippy::disallowed_methods)] // the pattern is a constant
static NUMBER: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+").unwrap()
});

/// Symbols that may stand between a sign and its number.
const CURRENCIES: [char; 4] = ['$', '€', '£', '¥'];

/// A decimal number: `digits` (without zeros at either end) times ten to the power `exponent`. Equal numbers have equal
/// fields, so that 1,000, 1000.0 and 1e3 are the same. No digits: zero.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decimal {
    is_negative: bool,
    digits: String,
    exponent: i64,
}

impl Decimal {
    /// Reads digits with an optional point, commas between groups of three digits, and an optional exponent.
    fn of(unsigned: &str, is_negative: bool) -> Self {
        let (mantissa, exponent) = unsigned.split_once(['e', 'E']).unwrap_or((unsigned, "0"));
        // An exponent beyond 18 digits is bounded, because no number of an answer has one.
        const BOUND: i64 = i64::MAX / 4;
        let bound = if exponent.starts_with('-') { -BOUND } else { BOUND };
        let exponent = exponent.parse::<i64>().unwrap_or(bound).clamp(-BOUND, BOUND);
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let digits: String = [whole, fraction].concat().chars().filter(char::is_ascii_digit).collect();
        let without_end = digits.trim_end_matches('0');
        let zeros_at_end = (digits.len() - without_end.len()) as i64;
        let digits = without_end.trim_start_matches('0').to_string();
        if digits.is_empty() {
            return Self::default();
        }
        Self { is_negative, digits, exponent: exponent - fraction.len() as i64 + zeros_at_end }
    }

    /// The value of a JSON number.
    pub fn of_json(value: &Value) -> Option<Self> {
        let text = match json::integer(value) {
            Some(digits) => digits.to_string(),
            None => value.as_number()?.to_string(),
        };
        let unsigned = text.trim_start_matches('-');
        Some(Self::of(unsigned, unsigned.len() < text.len()))
    }

    /// Numerator and power of ten, of numbers of at most 15 digits on either side of the point.
    pub fn scaled(&self) -> Option<(i128, i64)> {
        let digits: i128 = if self.digits.is_empty() { 0 } else { self.digits.parse().ok()? };
        let is_short = self.digits.len() <= 15 && (-15..=15).contains(&self.exponent);
        is_short.then_some((if self.is_negative { -digits } else { digits }, self.exponent))
    }
}

/// The numbers of a text, in their order, each with its text. A minus is a sign unless it follows a letter, a digit or a
/// closing parenthesis.
pub fn numbers(text: &str) -> Vec<(String, Decimal)> {
    // LaTeX writes 1{,}000 and 1\,000.
    let text = text.replace("{,}", ",").replace(r"\,", ",");
    let found = NUMBER.find_iter(&text).map(|found| {
        let before = text[..found.start()].trim_end_matches(CURRENCIES).trim_end_matches('\\');
        let unsigned = before.strip_suffix(['-', '−']);
        let is_negative =
            unsigned.is_some_and(|before| !before.ends_with(|c: char| c.is_alphanumeric() || c == ')' || c == '}'));
        let sign = if is_negative { "-" } else { "" };
        (format!("{sign}{}", found.as_str()), Decimal::of(found.as_str(), is_negative))
    });
    found.collect()
}

/// The only number of a reference answer, or the only one after `####`, as GSM8K marks it.
pub fn reference(value: &Value) -> Result<Decimal, String> {
    if let Some(number) = Decimal::of_json(value) {
        return Ok(number);
    }
    let text = value.as_str().ok_or_else(|| format!("expected a number, found {value}"))?;
    let marked = text.rsplit_once("####").map_or(text, |(_, marked)| marked);
    match <[_; 1]>::try_from(numbers(marked)) {
        Ok([(_, number)]) => Ok(number),
        Err(found) => Err(format!("expected one number, found {} in `{}`", found.len(), super::shortened(marked))),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    fn last(text: &str) -> Option<Decimal> {
        numbers(text).pop().map(|(_, number)| number)
    }

    #[test]
    fn equal_numbers_are_equal_however_they_are_written() {
        for (text, same) in [
            ("1,000", "1000.0"),
            ("1e3", "1000"),
            ("1{,}000", "1000"),
            (r"1\,000", "1000"),
            ("0.50", ".5"),
            ("-0", "0.00"),
            ("00042", "42"),
            ("$1,234.50", "1234.5"),
            ("-$5", "(-5)"),
            ("−5", "-5"),
            ("42.", "42"),
            ("1.5E-2", "0.015"),
            ("123456789012345678901234567890", "123,456,789,012,345,678,901,234,567,890"),
        ] {
            assert_eq!(last(text).unwrap(), last(same).unwrap(), "{text} {same}");
        }
        for (text, other) in [
            ("9007199254740993", "9007199254740992"),
            ("-5", "5"),
            ("0.1", "0.10000000000000001"),
            ("1e999999999999999999999999", "1e9"),
            ("1e-99999999999999999999999", "0"),
            ("10,00", "1000"),
        ] {
            assert_ne!(last(text).unwrap(), last(other).unwrap(), "{text} {other}");
        }
    }

    #[test]
    fn the_last_number_of_a_text_is_found_with_its_sign() {
        for (text, expected) in [
            ("30 + 10 = 40.", "40"),
            ("40 and that is it, 41? no: -42!", "-42"),
            ("10-3", "3"),
            ("(2)-3", "3"),
            ("x = -3", "-3"),
            ("It is $-7.", "-7"),
            (r"\$-7", "-7"),
            ("1,2", "2"),
            ("3.4.5", ".5"),
            ("the 2nd", "2"),
        ] {
            assert_eq!(last(text), last(expected), "{text}");
        }
        for text in ["", "none", "forty-two", "½", "四十", "e"] {
            assert_eq!(last(text), None, "{text}");
        }
        let long = "9".repeat(100_000);
        assert_eq!(last(&long), last(&format!("{long}.0")));
    }

    #[test]
    fn a_reference_is_one_number() {
        for value in [json!(42), json!(42.0), json!("42"), json!("so 6 * 7 = 42\n#### 42"), json!("#### 42.00 ")] {
            assert_eq!(reference(&value), Ok(last("42").unwrap()), "{value}");
        }
        for (value, words) in [
            (json!("3/4"), "found 2"),
            (json!("none"), "found 0"),
            (json!("6 * 7 = 42"), "found 3"),
            (json!("7 #### "), "found 0"),
            (json!(null), "null"),
            (json!([42]), "[42]"),
        ] {
            let problem = reference(&value).unwrap_err();
            assert!(problem.contains(words), "{problem}");
        }
    }
}
