//! Cleaning prompts before they are tokenized, as the reference does with ftfy and `html.unescape`.
//!
//! Done here: HTML entities (twice), terminal escapes, ligatures, full-width characters, curly quotes, line breaks,
//! control characters, composition (NFC), runs of white space. Not done: ftfy's repair of text that was decoded with
//! the wrong character set, which guesses.

use tokenizers::NormalizedString;

/// `text` cleaned: one line, without entities or surrounding white space.
pub fn clean(text: &str) -> String {
    // ftfy takes entities as such only where there is no markup; the reference then unescapes twice whatever it is.
    let fixed = fix(&if text.contains('<') { text.to_string() } else { unescape(text) });
    let plain = unescape(&unescape(&fixed));
    plain.split(is_space).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

/// White space as in Python's `\s`: beyond Unicode's it takes the four information separators.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn fix(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            '\u{1b}' if rest.peek() == Some(&'[') => skip_terminal_escape(&mut rest),
            '\u{fb00}' => out.push_str("ff"),
            '\u{fb01}' => out.push_str("fi"),
            '\u{fb02}' => out.push_str("fl"),
            '\u{fb03}' => out.push_str("ffi"),
            '\u{fb04}' => out.push_str("ffl"),
            '\u{fb05}' => out.push('\u{17f}'),
            '\u{fb06}' => out.push_str("st"),
            '\u{132}' => out.push_str("IJ"),
            '\u{133}' => out.push_str("ij"),
            '\u{149}' => out.push_str("'n"),
            '\u{1f1}' => out.push_str("DZ"),
            '\u{1f2}' => out.push_str("Dz"),
            '\u{1f3}' => out.push_str("dz"),
            '\u{3000}' => out.push(' '),
            '\u{ff01}'..='\u{ff5e}' => out.extend(char::from_u32(c as u32 - 0xfee0)),
            '\u{2bc}' | '\u{2018}'..='\u{201b}' => out.push('\''),
            '\u{201c}'..='\u{201f}' => out.push('"'),
            '\r' if rest.peek() == Some(&'\n') => {}
            '\r' | '\u{2028}' | '\u{2029}' | '\u{85}' => out.push('\n'),
            '\0'..='\u{8}' | '\u{b}' | '\u{e}'..='\u{1f}' | '\u{7f}' => {}
            '\u{206a}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffc}' => {}
            c => out.push(c),
        }
    }
    let mut composed = NormalizedString::from(out);
    composed.nfc();
    composed.get().to_string()
}

/// Skips `[ parameters letter`.
fn skip_terminal_escape(rest: &mut std::iter::Peekable<std::str::Chars<'_>>) {
    rest.next();
    while let Some(c) = rest.next() {
        if !matches!(c, '0'..='9' | ';') {
            break;
        }
    }
}

/// Replaces HTML entities: numeric ones, and the names below. A name nobody knows stays as it is.
fn unescape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('&') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        match entity(rest) {
            Some((c, length)) => {
                out.push(c);
                rest = &rest[length..];
            }
            None => {
                out.push('&');
                rest = &rest[1..];
            }
        }
    }
    out.push_str(rest);
    out
}

/// The character of the entity that `text` begins with, and its length in bytes.
fn entity(text: &str) -> Option<(char, usize)> {
    let body = &text[1..];
    if let Some(number) = body.strip_prefix('#') {
        let (digits, radix, skipped) = match number.strip_prefix(['x', 'X']) {
            Some(hex) => (hex, 16, 3),
            None => (number, 10, 2),
        };
        let length = digits.bytes().take_while(|b| (*b as char).is_digit(radix)).count();
        let end = skipped + length;
        let end = end + usize::from(text[end..].starts_with(';'));
        let code = match length {
            0 => return None,
            // Beyond every code point however it goes on.
            8.. if digits[..length].trim_start_matches('0').len() > 7 => u32::MAX,
            _ => u32::from_str_radix(&digits[..length], radix).unwrap_or(u32::MAX),
        };
        let c = char::from_u32(code).filter(|c| *c != '\0').unwrap_or(char::REPLACEMENT_CHARACTER);
        return Some((c, end));
    }
    let name = &body[..body.bytes().take_while(u8::is_ascii_alphanumeric).count()];
    let terminated = body[name.len()..].starts_with(';');
    let (_, c) = ENTITIES.iter().find(|(known, _)| *known == name)?;
    // Without a semicolon only the oldest names count.
    (terminated || matches!(name, "amp" | "lt" | "gt" | "quot" | "nbsp" | "copy" | "reg"))
        .then_some((*c, 1 + name.len() + usize::from(terminated)))
}

/// The names that occur in captions: the predefined ones, punctuation, and Latin letters with accents.
const ENTITIES: &[(&str, char)] = &[
    ("amp", '&'),
    ("lt", '<'),
    ("gt", '>'),
    ("quot", '"'),
    ("apos", '\''),
    ("nbsp", '\u{a0}'),
    ("copy", '©'),
    ("reg", '®'),
    ("trade", '™'),
    ("deg", '°'),
    ("plusmn", '±'),
    ("times", '×'),
    ("divide", '÷'),
    ("middot", '·'),
    ("bull", '•'),
    ("hellip", '…'),
    ("ndash", '–'),
    ("mdash", '—'),
    ("lsquo", '‘'),
    ("rsquo", '’'),
    ("sbquo", '‚'),
    ("ldquo", '“'),
    ("rdquo", '”'),
    ("bdquo", '„'),
    ("laquo", '«'),
    ("raquo", '»'),
    ("iexcl", '¡'),
    ("iquest", '¿'),
    ("cent", '¢'),
    ("pound", '£'),
    ("yen", '¥'),
    ("euro", '€'),
    ("sect", '§'),
    ("para", '¶'),
    ("shy", '\u{ad}'),
    ("ensp", '\u{2002}'),
    ("emsp", '\u{2003}'),
    ("thinsp", '\u{2009}'),
    ("frac12", '½'),
    ("frac14", '¼'),
    ("frac34", '¾'),
    ("sup2", '²'),
    ("sup3", '³'),
    ("micro", 'µ'),
    ("Agrave", 'À'),
    ("Aacute", 'Á'),
    ("Acirc", 'Â'),
    ("Atilde", 'Ã'),
    ("Auml", 'Ä'),
    ("Aring", 'Å'),
    ("AElig", 'Æ'),
    ("Ccedil", 'Ç'),
    ("Egrave", 'È'),
    ("Eacute", 'É'),
    ("Ecirc", 'Ê'),
    ("Euml", 'Ë'),
    ("Igrave", 'Ì'),
    ("Iacute", 'Í'),
    ("Icirc", 'Î'),
    ("Iuml", 'Ï'),
    ("Ntilde", 'Ñ'),
    ("Ograve", 'Ò'),
    ("Oacute", 'Ó'),
    ("Ocirc", 'Ô'),
    ("Otilde", 'Õ'),
    ("Ouml", 'Ö'),
    ("Oslash", 'Ø'),
    ("Ugrave", 'Ù'),
    ("Uacute", 'Ú'),
    ("Ucirc", 'Û'),
    ("Uuml", 'Ü'),
    ("Yacute", 'Ý'),
    ("szlig", 'ß'),
    ("agrave", 'à'),
    ("aacute", 'á'),
    ("acirc", 'â'),
    ("atilde", 'ã'),
    ("auml", 'ä'),
    ("aring", 'å'),
    ("aelig", 'æ'),
    ("ccedil", 'ç'),
    ("egrave", 'è'),
    ("eacute", 'é'),
    ("ecirc", 'ê'),
    ("euml", 'ë'),
    ("igrave", 'ì'),
    ("iacute", 'í'),
    ("icirc", 'î'),
    ("iuml", 'ï'),
    ("ntilde", 'ñ'),
    ("ograve", 'ò'),
    ("oacute", 'ó'),
    ("ocirc", 'ô'),
    ("otilde", 'õ'),
    ("ouml", 'ö'),
    ("oslash", 'ø'),
    ("ugrave", 'ù'),
    ("uacute", 'ú'),
    ("ucirc", 'û'),
    ("uuml", 'ü'),
    ("yacute", 'ý'),
    ("yuml", 'ÿ'),
    ("OElig", 'Œ'),
    ("oelig", 'œ'),
    ("Scaron", 'Š'),
    ("scaron", 'š'),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn white_space_is_collapsed_and_entities_are_resolved_twice() {
        assert_eq!(clean("  a\t man \r\n\n walks\u{3000}home\u{a0}. "), "a man walks home .");
        assert_eq!(clean("cats &amp; dogs"), "cats & dogs");
        assert_eq!(clean("a &amp;lt; b <i>"), "a < b <i>");
        assert_eq!(clean("caf&eacute; &#233; &#xE9; &nosuch; &"), "café é é &nosuch; &");
        assert_eq!(clean("&#99999999999999; &#xD800;"), "\u{fffd} \u{fffd}");
    }

    #[test]
    fn typography_becomes_plain() {
        assert_eq!(clean("“it’s” ﬁne"), "\"it's\" fine");
        assert_eq!(clean("ＬＯＵＤ！"), "LOUD!");
        assert_eq!(clean("e\u{301}"), "é");
        assert_eq!(clean("\u{1b}[31;1mred\u{1b}[0m\u{0}\u{feff}"), "red");
    }

    #[test]
    fn any_text_is_cleaned_without_panic() {
        for text in ["", "&", "&#", "&#x", "&#;", "&é", "\u{1b}", "\u{1b}[", "&amp", "&&&&amp;;"] {
            clean(text);
        }
        assert_eq!(clean("你好，世界"), "你好,世界");
    }
}
