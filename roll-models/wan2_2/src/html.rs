//! Character references of HTML, resolved as by Python's `html.unescape`.

use std::collections::HashMap;
use std::sync::LazyLock;

use entities::ENTITIES;

/// Characters that browsers read in references to C1 control characters, from 0x80 on.
const C1: &str = "\u{20ac}\u{81}\u{201a}\u{192}\u{201e}\u{2026}\u{2020}\u{2021}\u{2c6}\u{2030}\u{160}\u{2039}\u{152}\
    \u{8d}\u{17d}\u{8f}\u{90}\u{2018}\u{2019}\u{201c}\u{201d}\u{2022}\u{2013}\u{2014}\u{2dc}\u{2122}\u{161}\u{203a}\
    \u{153}\u{9d}\u{17e}\u{178}";

/// Characters that end a name.
const NAME_ENDS: &str = "\t\n\u{c} <&#";

/// Maximum length of a name in characters, without its semicolon.
const MAX_NAME: usize = 32;

/// Characters by the names of their references. A name includes its semicolon; some older names have none.
static NAMED: LazyLock<HashMap<&str, &str>> =
    LazyLock::new(|| ENTITIES.iter().map(|known| (&known.entity[1..], known.characters)).collect());

/// Replaces the references in `text` by their characters. A name without semicolon ends where the longest known name
/// does. Unknown names stay; references to characters that are invalid in HTML are removed.
pub fn unescape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('&') {
        out.push_str(before);
        let length = match after.strip_prefix('#') {
            Some(number) => push_numeric(number, &mut out).map(|length| 1 + length),
            None => push_named(after, &mut out),
        };
        if length.is_none() {
            out.push('&');
        }
        rest = &after[length.unwrap_or(0)..];
    }
    out.push_str(rest);
    out
}

/// Appends the character of a reference like `233;` or `xE9;`. Returns the length of the reference.
fn push_numeric(text: &str, out: &mut String) -> Option<usize> {
    let (digits, radix) = match text.strip_prefix(['x', 'X']) {
        Some(digits) => (digits, 16),
        None => (text, 10),
    };
    let count = digits.find(|c: char| !c.is_digit(radix)).unwrap_or(digits.len());
    if count == 0 {
        return None;
    }
    let code = u32::from_str_radix(&digits[..count], radix).unwrap_or(u32::MAX);
    out.extend(match code {
        0 => Some(char::REPLACEMENT_CHARACTER),
        0x80..=0x9f => C1.chars().nth(code as usize - 0x80),
        // Control characters and noncharacters, which are invalid in HTML.
        1..=8 | 0xb | 0xe..=0x1f | 0x7f | 0xfdd0..=0xfdef => None,
        code if code <= 0x10_ffff && code & 0xfffe == 0xfffe => None,
        code => Some(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)),
    });
    Some(text.len() - digits.len() + count + usize::from(digits[count..].starts_with(';')))
}

/// Appends the characters of the longest name at the beginning of `text`. Returns the length of the name.
fn push_named(text: &str, out: &mut String) -> Option<usize> {
    // One more character for the semicolon.
    let beginning = text.char_indices().take(MAX_NAME + 1);
    let ends = beginning.take_while(|(_, c)| !NAME_ENDS.contains(*c)).map(|(at, c)| at + c.len_utf8());
    let found = ends.filter_map(|end| NAMED.get(&text[..end]).map(|characters| (end, characters))).last();
    found.map(|(end, characters)| {
        out.push_str(characters);
        end
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `''.join(f'{name}={html5[name]}\n' for name in sorted(html5))` of Python's `html.entities` has this SHA-256.
    #[test]
    fn the_names_are_those_of_html5() {
        let mut names: Vec<_> = NAMED.iter().collect();
        names.sort();
        let text: String = names.iter().map(|(name, characters)| format!("{name}={characters}\n")).collect();
        let (hash, _) = roll_external::sha256(text.as_bytes()).unwrap();
        assert_eq!(names.len(), 2231);
        assert_eq!(hash, "3d6451507e2331f4f4de67370de6df66900b91431b3c0fcb365e4fd2c8448bc3");
        for (name, characters) in names {
            assert_eq!(unescape(&format!("a&{name} b")), format!("a{characters} b"));
        }
    }

    /// Expected values are from Python's `html.unescape`.
    #[test]
    fn references_are_resolved_as_in_python() {
        for (text, expected) in [
            ("&notit; &ampx &am", "\u{ac}it; &x &am"),
            ("&#x80; &#128 &#0; &#13;x &#xD800; &#99999999999;", "\u{20ac} \u{20ac} \u{fffd} \rx \u{fffd} \u{fffd}"),
            ("&#1;a &#x7f;b &#xfdd0;c &#x1fffe;d &#X41", "a b c d A"),
            ("&#; &#x; &;& &&lt;&lt", "&#; &#x; &;& &<<"),
            ("&CounterClockwiseContourIntegral;&NotEqualTilde;", "\u{2233}\u{2242}\u{338}"),
            ("&Aacutexxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx;", "\u{c1}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx;"),
            ("&eacute\u{e9};&\u{e9}amp;", "\u{e9}\u{e9};&\u{e9}amp;"),
        ] {
            assert_eq!(unescape(text), expected, "{text}");
        }
    }
}
