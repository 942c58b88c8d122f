//! Rewrites the source of a template for transformers (Jinja2), so that minijinja renders the same text.

/// Name of a variable that is always true. `x and y` is rewritten to `x and __always and y`: Python's `and` returns its
/// first false operand, but minijinja computes an `and` of constants when it parses, and then returns `false`.
pub(super) const ALWAYS: &str = "__always";

/// Returns `source` with three changes: line feeds are the only line ends, as in Jinja2; the tag `generation`, which
/// marks the assistant's words and writes nothing, becomes `with`; and [`ALWAYS`] is added to each `and`.
pub(super) fn rewrite(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(source.len());
    let mut rest = source.as_str();
    while let Some(at) = rest.find("{{").into_iter().chain(rest.find("{%")).chain(rest.find("{#")).min() {
        out += &rest[..at];
        rest = &rest[at..];
        // The length of what follows and is copied unchanged: a comment, or raw text after its tag.
        let copied = if rest.starts_with("{#") {
            rest.find("#}").map_or(rest.len(), |end| end + 2)
        } else {
            let (tag, length) = rewrite_tag(rest);
            out += &tag;
            rest = &rest[length..];
            if tag_name(&tag) == "raw" { rest.find("endraw").unwrap_or(rest.len()) } else { 0 }
        };
        out += &rest[..copied];
        rest = &rest[copied..];
        // The beginning of the tag that ends raw text, `{%`, was copied with the raw text; now its rest.
        if rest.starts_with("endraw") {
            let end = rest.find("%}").map_or(rest.len(), |end| end + 2);
            out += &rest[..end];
            rest = &rest[end..];
        }
    }
    out + rest
}

/// The first word of a tag; empty for an expression.
fn tag_name(tag: &str) -> &str {
    let inner = tag.strip_prefix("{%").unwrap_or_default().trim_start_matches(['-', '+']).trim_start();
    &inner[..inner.find(|c: char| !is_word(c)).unwrap_or(inner.len())]
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Rewrites the tag or expression at the beginning of `text`. Also returns its length in `text`.
fn rewrite_tag(text: &str) -> (String, usize) {
    let close = if text.starts_with("{{") { "}}" } else { "%}" };
    let mut out = text[..2].to_string();
    // The position in `text`, the number of open brackets, and the first character of the token before, without blanks.
    let (mut at, mut depth, mut previous) = (2, 0_usize, ' ');
    while let Some(c) = text[at..].chars().next() {
        if depth == 0 && text[at..].starts_with(close) {
            out += close;
            return (out, at + 2);
        }
        let token_length = match c {
            // A text in quotes.
            '"' | '\'' => {
                let mut is_escaped = false;
                let end = text[at + 1..].find(|d| {
                    let is_end = d == c && !is_escaped;
                    is_escaped = d == '\\' && !is_escaped;
                    is_end
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
        match &text[at..at + token_length] {
            // The operator, not an attribute.
            "and" if previous != '.' => out += &format!("and {ALWAYS} and"),
            // The tag `with` opens a scope of variables, as `generation` does in transformers.
            "generation" if tag_name(text) == "generation" => out += "with",
            "endgeneration" if tag_name(text) == "endgeneration" => out += "endwith",
            token => out += token,
        }
        if !c.is_whitespace() {
            previous = c;
        }
        at += token_length;
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
