//! Cleans prompts before they are tokenized, as the reference implementation does with ftfy and `html.unescape`.
//!
//! The result equals `fix_text` of ftfy 6.3.1 with its defaults, followed by `html.unescape` twice: entities, terminal
//! escapes, ligatures, full-width characters, curly quotes, line breaks, control characters, composition (NFC), runs of
//! white space. Two cases that captions rarely have are different:
//! - ftfy repairs text that was decoded with the wrong character set (`schÃ¶n`), by guesses. Here, such text is not
//!   changed.
//! - ftfy resolves entities in capitals (`&EACUTE;`) and entities that are nested more than three deep. Here, only
//!   HTML's entities are resolved, up to three times.

use tokenizers::NormalizedString;

use crate::html::unescape;

/// Distance of a full-width character from the same character in ASCII.
const FULL_WIDTH_OFFSET: u32 = 0xfee0;

/// Returns `text` as one line without entities and surrounding white space.
pub fn clean(text: &str) -> String {
    // ftfy resolves entities only in text without markup; the reference then resolves them twice in any text.
    let fixed = fix(&if text.contains('<') { text.into() } else { unescape(text) });
    let plain = unescape(&unescape(&fixed));
    plain.split(is_space).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

/// White space as in Python's `\s`, which includes the four information separators besides Unicode's white space.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// The part of ftfy's `fix_text` that works on single characters, and composition (NFC).
fn fix(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            '\u{1b}' if rest.peek() == Some(&'[') => skip_terminal_escape(&mut rest),
            // Ligatures.
            '\u{fb00}' => out.push_str("ff"),
            '\u{fb01}' => out.push_str("fi"),
            '\u{fb02}' => out.push_str("fl"),
            '\u{fb03}' => out.push_str("ffi"),
            '\u{fb04}' => out.push_str("ffl"),
            '\u{fb05}' => out.push_str("\u{17f}t"),
            '\u{fb06}' => out.push_str("st"),
            '\u{132}' => out.push_str("IJ"),
            '\u{133}' => out.push_str("ij"),
            '\u{149}' => out.push_str("'n"),
            '\u{1f1}' => out.push_str("DZ"),
            '\u{1f2}' => out.push_str("Dz"),
            '\u{1f3}' => out.push_str("dz"),
            // Full-width characters.
            '\u{3000}' => out.push(' '),
            '\u{ff01}'..='\u{ff5e}' => out.extend(char::from_u32(c as u32 - FULL_WIDTH_OFFSET)),
            // Curly quotes.
            '\u{2bc}' | '\u{2018}'..='\u{201b}' => out.push('\''),
            '\u{201c}'..='\u{201f}' => out.push('"'),
            // Line breaks.
            '\r' if rest.peek() == Some(&'\n') => {}
            '\r' | '\u{2028}' | '\u{2029}' | '\u{85}' => out.push('\n'),
            // Control characters.
            '\0'..='\u{8}' | '\u{b}' | '\u{e}'..='\u{1f}' | '\u{7f}' => {}
            '\u{206a}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffc}' => {}
            c => out.push(c),
        }
    }
    let mut composed = NormalizedString::from(out);
    composed.nfc();
    composed.get().to_string()
}

/// Skips the rest of a terminal escape: `[`, parameters, a letter.
fn skip_terminal_escape(rest: &mut std::iter::Peekable<std::str::Chars<'_>>) {
    rest.next();
    rest.find(|c| !matches!(c, '0'..='9' | ';'));
}

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
    fn resolves_all_html_entities_with_and_without_semicolon() {
        // Expected values are from ftfy 6.3.1 and Python's `html.unescape`.
        assert_eq!(clean("&ampfoo &notit; &times2 &alpha; &#128; &#x80; &hellip;"), "&foo ¬it; ×2 α € € …");
        assert_eq!(clean("&&&&amp;;"), "&&&&;");
        assert_eq!(clean("&ngE;"), "≧\u{338}");
        assert_eq!(clean("<i> &#1;a&#x1fffe;b"), "<i> ab");
    }

    #[test]
    fn replaces_typographic_characters() {
        assert_eq!(clean("“it’s” ﬁne"), "\"it's\" fine");
        assert_eq!(clean("\u{fb05}e \u{fb06}e"), "\u{17f}te ste");
        assert_eq!(clean("ＬＯＵＤ！"), "LOUD!");
        assert_eq!(clean("e\u{301}"), "é");
        assert_eq!(clean("\u{1b}[31;1mred\u{1b}[0m\u{0}\u{feff}"), "red");
    }

    #[test]
    fn cleaning_never_panics() {
        for text in ["", "&", "&#", "&#x", "&#;", "&é", "\u{1b}", "\u{1b}[", "&amp", "&&&&amp;;"] {
            clean(text);
        }
        assert_eq!(clean("你好，世界"), "你好,世界");
    }
}
