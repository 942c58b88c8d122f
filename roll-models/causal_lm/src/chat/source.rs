//! Rewrites a template of transformers in the words of minijinja.

/// Variable that is true. In `x and ALWAYS and y` minijinja does not fold constants, for which its `and` returns false
/// and not, as Python's, the first false operand.
pub(super) const ALWAYS: &str = "__always";

/// Returns `source` with line feeds as its only line ends, as Jinja2 reads it, and without the tag `generation`, which
/// marks the assistant's words and writes nothing.
pub(super) fn rewrite(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(source.len());
    let mut rest = source.as_str();
    while let Some(at) = rest.find("{{").into_iter().chain(rest.find("{%")).chain(rest.find("{#")).min() {
        out += &rest[..at];
        rest = &rest[at..];
        let end = if rest.starts_with("{#") {
            rest.find("#}").map_or(rest.len(), |end| end + 2)
        } else {
            let (tag, length) = rewrite_tag(rest);
            out += &tag;
            rest = &rest[length..];
            if tag_name(&tag) == "raw" { rest.find("endraw").unwrap_or(rest.len()) } else { 0 }
        };
        out += &rest[..end];
        rest = &rest[end..];
        // The tag that ends raw text has lost its beginning.
        if rest.starts_with("endraw") {
            let end = rest.find("%}").map_or(rest.len(), |end| end + 2);
            out += &rest[..end];
            rest = &rest[end..];
        }
    }
    out + rest
}

fn tag_name(tag: &str) -> &str {
    let inner = tag.strip_prefix("{%").unwrap_or_default().trim_start_matches(['-', '+']).trim_start();
    &inner[..inner.find(|c: char| !is_word(c)).unwrap_or(inner.len())]
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Rewrites the tag or expression that `text` begins with. Also returns its length in `text`.
fn rewrite_tag(text: &str) -> (String, usize) {
    let close = if text.starts_with("{{") { "}}" } else { "%}" };
    let mut out = text[..2].to_string();
    let (mut at, mut depth, mut before) = (2, 0_usize, ' ');
    while let Some(c) = text[at..].chars().next() {
        if depth == 0 && text[at..].starts_with(close) {
            out += close;
            return (out, at + 2);
        }
        let length = match c {
            '"' | '\'' => {
                let mut escaped = false;
                let end = text[at + 1..].find(|d| {
                    let ends = d == c && !escaped;
                    escaped = d == '\\' && !escaped;
                    ends
                });
                end.map_or(text.len() - at, |end| end + 2)
            }
            c if is_word(c) => text[at..].find(|c| !is_word(c)).unwrap_or(text.len() - at),
            c => c.len_utf8(),
        };
        match c {
            '{' | '[' | '(' => depth += 1,
            '}' | ']' | ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        match &text[at..at + length] {
            "and" if before != '.' => out += &format!("and {ALWAYS} and"),
            // The words are a scope of their own, as in transformers.
            "generation" if tag_name(text) == "generation" => out += "with",
            "endgeneration" if tag_name(text) == "endgeneration" => out += "endwith",
            word => out += word,
        }
        if !c.is_whitespace() {
            before = c;
        }
        at += length;
    }
    (out, at)
}

#[cfg(test)]
mod tests {
    use super::rewrite;

    #[test]
    fn only_tags_are_rewritten() {
        for (source, expected) in [
            ("a and b\r\nc\rd", "a and b\nc\nd"),
            ("{{ a and 'x and }} y' }}", "{{ a and __always and 'x and }} y' }}"),
            ("{{ {'a': {'b': 1}} }} and", "{{ {'a': {'b': 1}} }} and"),
            ("{%- generation -%}x{%endgeneration%}", "{%- with -%}x{%endwith%}"),
            ("{# a and b #}{% raw %}{{ a and b }}{% endraw %}", "{# a and b #}{% raw %}{{ a and b }}{% endraw %}"),
            ("{{ m.and_ and \"\\\"\" }} {", "{{ m.and_ and __always and \"\\\"\" }} {"),
            ("{{ unclosed and", "{{ unclosed and __always and"),
        ] {
            assert_eq!(rewrite(source), expected);
        }
    }
}
