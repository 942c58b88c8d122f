//! Answers in `\boxed{...}`, as mathematical data sets want them.

use serde_json::Value;

use super::number::{Decimal, numbers};

/// Commands whose argument is the answer.
const BOXES: [&str; 2] = [r"\boxed", r"\fbox"];

/// Pieces of LaTeX that change the look of a term and not its value, each with its replacement. A name that begins with
/// another one of the list comes before that one.
const REPLACED: [(&str, &str); 22] = [
    (r"\left", ""),
    (r"\right", ""),
    (r"\dfrac", r"\frac"),
    (r"\tfrac", r"\frac"),
    (r"\cfrac", r"\frac"),
    (r"\!", ""),
    (r"\,", ""),
    (r"\;", ""),
    (r"\:", ""),
    (r"\ ", ""),
    ("~", ""),
    (r"^{\circ}", ""),
    (r"^\circ", ""),
    (r"\degree", ""),
    (r"\%", ""),
    ("%", ""),
    (r"\$", ""),
    ("$", ""),
    ("{,}", ","),
    ("−", "-"),
    (r"\leq", r"\le"),
    (r"\geq", r"\ge"),
];
/// Commands for upright text, whose argument is the text.
const TEXTS: [&str; 4] = [r"\text", r"\textbf", r"\mathrm", r"\mathbf"];

/// A term that is compared with others: as a fraction of numbers if it is one, otherwise as text.
#[derive(Clone, Debug)]
pub struct Term {
    text: String,
    /// Numerator and denominator.
    fraction: Option<(i128, i128)>,
}

impl PartialEq for Term {
    fn eq(&self, other: &Self) -> bool {
        match (self.fraction, other.fraction) {
            (Some((a, b)), Some((c, d))) => {
                a.checked_mul(d).zip(c.checked_mul(b)).map_or(self.text == other.text, |(x, y)| x == y)
            }
            _ => self.text == other.text,
        }
    }
}

impl Term {
    /// The term of this text, normalised.
    pub fn of(text: &str) -> Self {
        let text = normalised(text);
        let fraction = fraction(&text);
        Self { text, fraction }
    }

    /// The normalised text.
    pub fn text(&self) -> &str {
        &self.text
    }
}

/// The contents of the last box of a text; `None` if there is no box, or if its braces are not balanced.
pub fn last_box(text: &str) -> Option<&str> {
    let (start, name) = BOXES.iter().filter_map(|name| Some((text.rfind(name)?, *name))).max()?;
    let rest = text[start + name.len()..].trim_start();
    match rest.strip_prefix('{') {
        Some(_) => group(rest),
        // `\boxed 5`
        None => rest.split([' ', '\n', '$', ',', '}']).next().filter(|word| !word.is_empty()),
    }
}

/// The term of a reference answer: of its last box, or of the whole text.
pub fn reference(value: &Value) -> Result<Term, String> {
    let text = match value {
        Value::String(text) => last_box(text).unwrap_or(text).to_string(),
        Value::Number(number) => number.to_string(),
        other => return Err(format!("expected a text or a number, found {other}")),
    };
    match Term::of(&text) {
        term if term.text.is_empty() => Err("expected an answer, found an empty text".into()),
        term => Ok(term),
    }
}

/// The text in the braces that `text` begins with.
fn group(text: &str) -> Option<&str> {
    let (mut depth, mut is_escaped) = (0usize, false);
    for (i, byte) in text.bytes().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'{' => depth += 1,
            b'}' => {
                depth = depth.checked_sub(1)?;
                if depth == 0 {
                    return Some(&text[1..i]);
                }
            }
            _ => {}
        }
    }
    None
}

fn normalised(text: &str) -> String {
    // Units after the value: `5\text{ cm}`.
    let without_units = text.split_once(r"\text{ ").map_or(text, |(value, _)| value);
    let mut text = if without_units.trim().is_empty() { text.to_string() } else { without_units.to_string() };
    for name in TEXTS {
        text = without_command(&text, name);
    }
    for (piece, replacement) in REPLACED {
        text = text.replace(piece, replacement);
    }
    text.retain(|c| !c.is_whitespace());
    let text = with_braces(&with_braces(&text, r"\frac", 2), r"\sqrt", 1);
    let text = text.trim_end_matches('.');
    // `x=5`
    match text.split_once('=') {
        Some((name, value)) if name.chars().count() == 1 && !value.contains('=') && !value.is_empty() => value.into(),
        _ => text.into(),
    }
}

/// `text` with `name{x}` replaced by `x`.
fn without_command(text: &str, name: &str) -> String {
    let (mut written, mut rest) = (String::new(), text);
    while let Some(at) = rest.find(name) {
        let after = &rest[at + name.len()..];
        written += &rest[..at];
        match after.starts_with('{').then(|| group(after)).flatten() {
            Some(inner) => {
                written += inner;
                rest = &after[inner.len() + 2..];
            }
            None => {
                written += name;
                rest = after;
            }
        }
    }
    written + rest
}

/// Puts braces around the arguments of each command `name` that have none, one character each: `\frac12` becomes
/// `\frac{1}{2}`.
fn with_braces(text: &str, name: &str, arguments: usize) -> String {
    let (mut written, mut rest) = (String::new(), text);
    while let Some(at) = rest.find(name) {
        written += &rest[..at + name.len()];
        rest = &rest[at + name.len()..];
        for _ in 0..arguments {
            let Some(first) = rest.chars().next() else { break };
            if first == '{' {
                let Some(inner) = group(rest) else { break };
                written += &rest[..inner.len() + 2];
                rest = &rest[inner.len() + 2..];
            } else if first.is_alphanumeric() {
                written.extend(['{', first, '}']);
                rest = &rest[first.len_utf8()..];
            } else {
                break;
            }
        }
    }
    written + rest
}

/// Numerator and denominator of a number, of `a/b` or of `\frac{a}{b}`.
fn fraction(text: &str) -> Option<(i128, i128)> {
    let (is_negative, unsigned) = match text.strip_prefix('-') {
        Some(unsigned) => (true, unsigned),
        None => (false, text),
    };
    let (above, below) = match unsigned.strip_prefix(r"\frac") {
        Some(rest) => {
            let above = group(rest.starts_with('{').then_some(rest)?)?;
            let rest = &rest[above.len() + 2..];
            let below = group(rest.starts_with('{').then_some(rest)?)?;
            (rest.len() == below.len() + 2).then_some((above, below))?
        }
        None => unsigned.split_once('/').unwrap_or((unsigned, "1")),
    };
    let [(a, e), (b, f)] = [scaled(above)?, scaled(below)?];
    // a 10^e / (b 10^f)
    let power = |exponent: i64| 10i128.checked_pow(u32::try_from(exponent.max(0)).ok()?);
    let (above, below) = (a.checked_mul(power(e - f)?)?, b.checked_mul(power(f - e)?)?);
    (below != 0).then_some((if is_negative { -above } else { above }, below))
}

/// The pair (a, e) of the value a 10^e of a text that is a number and nothing else.
fn scaled(text: &str) -> Option<(i128, i64)> {
    let [(found, number)] = <[(String, Decimal); 1]>::try_from(numbers(text)).ok()?;
    if found == text { number.scaled() } else { None }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    #[test]
    fn the_last_box_is_found_with_its_braces() {
        for (text, expected) in [
            (r"so \boxed{1} no, $\boxed{\frac{1}{2}}$.", Some(r"\frac{1}{2}")),
            (r"\boxed {x}", Some("x")),
            (r"\boxed 5$", Some("5")),
            (r"\fbox{7}", Some("7")),
            (r"\boxed{\{1, 2\}}", Some(r"\{1, 2\}")),
            (r"\boxed{\boxed{3}}", Some("3")),
            (r"\boxed{1} and \boxed{2", None),
            (r"\boxed{\}", None),
            (r"\boxed", None),
            ("5", None),
        ] {
            assert_eq!(last_box(text), expected, "{text}");
        }
        assert_eq!(last_box(&format!(r"\boxed{}", "{".repeat(100_000))), None);
    }

    #[test]
    fn equal_terms_are_equal_however_they_are_written() {
        for (one, other) in [
            (r"\frac{1}{2}", "0.5"),
            (r"\dfrac12", r"\frac{1}{2}"),
            ("-3/6", r"-\tfrac{1}{2}"),
            ("1,000", "1000.0"),
            (r"50\%", "50"),
            (r"90^\circ", "90"),
            (r"5\text{ cm}", "5"),
            (r"\text{Evelyn}", "Evelyn"),
            (r"\left( 1, 2 \right)", "(1,2)"),
            (r"x = 5", "5"),
            (r"\sqrt3", r"\sqrt{3}"),
            ("42.", "42"),
        ] {
            assert_eq!(Term::of(one), Term::of(other), "{one} {other}");
        }
        for (one, other) in [
            ("1/2", "1/3"),
            ("-1/2", "1/2"),
            ("(1,2)", "(2,1)"),
            ("1/0", "2/0"),
            ("x", "X"),
            ("", "0"),
            (r"2\frac{1}{2}", "1"),
            ("99999999999999999999/3", "33333333333333333332"),
        ] {
            assert_ne!(Term::of(one), Term::of(other), "{one} {other}");
        }
    }

    #[test]
    fn a_reference_may_be_a_whole_solution() {
        assert_eq!(reference(&json!(r"Thus $x = \boxed{12}$.")).unwrap(), Term::of("12"));
        assert_eq!(reference(&json!("12")).unwrap(), reference(&json!(12.0)).unwrap());
        assert!(reference(&json!(" ")).is_err() && reference(&json!(["12"])).is_err());
    }
}
