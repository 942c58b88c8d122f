//! Interpolation in configuration values, as in Hydra: `${a.b}`, `${oc.env:NAME,default}`, and `???` for values that
//! must be given.
//!
//! Supported: keys, relative keys (`${.a}`), nested interpolation, the resolvers `oc.env`, `oc.select` and `now`.
//! Any other resolver is an error that names it. The number of values and the size of the text are bounded, so that a
//! small file cannot unfold into much memory.

use std::path::Path;
use std::sync::LazyLock;
use std::time::{SystemTime, UNIX_EPOCH};

use config::{Value, ValueKind};

use super::secrets::{self, AsWritten};
use super::yaml::{Map, child, find, parse_value, place};
use roll_core::{Error, Result};

/// Most values after interpolation.
const MAX_VALUES: usize = 20_000;
/// Most bytes of text after interpolation.
const MAX_TEXT: usize = 4 << 20;
/// Largest depth of values and of interpolations.
const MAX_DEPTH: usize = 32;
/// The characters that begin an interpolation. `}` ends it.
const START: &str = "${";

/// Resolves every interpolation in the mapping `root` of the file at `path`. Also returns the values that come from
/// environment variables, each with its text as the file has it. Fails if a value is `???`.
pub(super) fn interpolate(path: &Path, root: &Value) -> Result<(Map, Vec<AsWritten>)> {
    let mut resolver = Resolver {
        root,
        following: Vec::new(),
        values_left: MAX_VALUES,
        text_left: MAX_TEXT,
        from_environment: Vec::new(),
    };
    let resolved = resolver.resolve(root, &mut Vec::new());
    let resolved = resolved.map_err(|problem| Error::bad_file(path, problem))?;
    let mut missing = Vec::new();
    find_missing(&resolved, "", &mut missing);
    if !missing.is_empty() {
        let problem = format!("values that must be given (`???`): {}", missing.join(", "));
        return Err(Error::bad_file(path, problem));
    }
    match resolved.kind {
        ValueKind::Table(map) => Ok((map, resolver.from_environment)),
        _ => Ok((Map::new(), Vec::new())),
    }
}

/// Whether a text in the value has an interpolation.
pub(super) fn has_interpolation(value: &Value) -> bool {
    match &value.kind {
        ValueKind::String(text) => text.contains(START),
        ValueKind::Array(items) => items.iter().any(has_interpolation),
        ValueKind::Table(map) => map.values().any(has_interpolation),
        _ => false,
    }
}

/// Adds the keys of all values `???` in `value`, each with its place in the file, to `missing`. The key of `value` is
/// `key`.
fn find_missing(value: &Value, key: &str, missing: &mut Vec<String>) {
    match &value.kind {
        ValueKind::String(text) if text == "???" => missing.push(format!("{key}{}", place(value))),
        ValueKind::Array(items) => {
            items.iter().enumerate().for_each(|(i, item)| find_missing(item, &child(key, i), missing));
        }
        ValueKind::Table(map) => {
            let mut names: Vec<&String> = map.keys().collect();
            names.sort();
            names.iter().for_each(|name| find_missing(&map[*name], &child(key, name), missing));
        }
        _ => {}
    }
}

/// Resolves the interpolations in one mapping.
struct Resolver<'a> {
    /// The mapping, in which keys are looked up.
    root: &'a Value,
    /// The keys whose values are being resolved, outermost first.
    following: Vec<String>,
    /// Number of further values that may be resolved, to stay within [`MAX_VALUES`].
    values_left: usize,
    /// Bytes of further text that may be resolved, to stay within [`MAX_TEXT`].
    text_left: usize,
    /// The resolved values so far that come from the environment.
    from_environment: Vec<AsWritten>,
}

/// The message of a problem. The caller adds the file.
type Problem = String;

/// A resolved value. If it has values of environment variables, also its text with `${oc.env:NAME}` in place of these
/// values.
type Resolved = (Value, Option<String>);

impl Resolver<'_> {
    /// Resolves every interpolation in `value`, whose key consists of the names `key_path`.
    fn resolve(&mut self, value: &Value, key_path: &mut Vec<String>) -> std::result::Result<Value, Problem> {
        let (resolved, as_written) = self.resolve_as_written(value, key_path)?;
        if let Some(text) = as_written {
            self.from_environment.push(AsWritten::new(&resolved, text));
        }
        Ok(resolved)
    }

    /// As [`Resolver::resolve`], but also returns the text with the names of variables, instead of recording it.
    fn resolve_as_written(
        &mut self,
        value: &Value,
        key_path: &mut Vec<String>,
    ) -> std::result::Result<Resolved, Problem> {
        self.values_left = self
            .values_left
            .checked_sub(1)
            .ok_or_else(|| format!("more than {MAX_VALUES} values after interpolation"))?;
        if key_path.len() > MAX_DEPTH {
            return Err(format!("nested more than {MAX_DEPTH} deep after interpolation"));
        }
        let origin = value.origin().map(String::from);
        let kind = match &value.kind {
            ValueKind::String(text) if text.contains(START) => {
                return self.resolve_text(text, key_path, origin.as_ref()).map_err(|problem| match &origin {
                    // A problem that has a place already keeps it: the innermost place is the one to look at.
                    Some(place) if !problem.contains(" (at ") => format!("{problem} (at {place})"),
                    _ => problem,
                });
            }
            ValueKind::Array(items) => {
                let mut resolved = Vec::with_capacity(items.len());
                for (i, item) in items.iter().enumerate() {
                    key_path.push(i.to_string());
                    resolved.push(self.resolve(item, key_path)?);
                    key_path.pop();
                }
                ValueKind::Array(resolved)
            }
            ValueKind::Table(map) => {
                let mut resolved = Map::with_capacity(map.len());
                for (name, item) in map {
                    key_path.push(name.clone());
                    resolved.insert(name.clone(), self.resolve(item, key_path)?);
                    key_path.pop();
                }
                ValueKind::Table(resolved)
            }
            other => other.clone(),
        };
        Ok((Value::new(origin.as_ref(), kind), None))
    }

    /// Resolves a text with interpolations. If the whole text is one interpolation, the result is the value of that
    /// interpolation, of any type. Otherwise the result is a text.
    fn resolve_text(
        &mut self,
        text: &str,
        key_path: &mut Vec<String>,
        origin: Option<&String>,
    ) -> std::result::Result<Resolved, Problem> {
        // `result` has the values of variables, `as_written` their names.
        let (mut result, mut as_written, mut has_variables) = (String::new(), String::new(), false);
        let mut rest = text;
        while let Some(start) = rest.find(START) {
            let after_start = &rest[start + START.len()..];
            // `\${` is a `${` that begins no interpolation.
            if let Some(before) = rest[..start].strip_suffix('\\') {
                result += before;
                result += START;
                as_written += &rest[..start + START.len()];
                rest = after_start;
                continue;
            }
            let end = closing_brace(after_start).ok_or_else(|| format!("`{text}`: a `${{` without its `}}`"))?;
            let (inner, after) = (&after_start[..end], &after_start[end + 1..]);
            let (value, value_as_written) = self.resolve_expression(inner, key_path)?;
            let is_whole_text = start == 0 && after.is_empty() && result.is_empty();
            if is_whole_text {
                // The origin is the place of the interpolation. If the value is a map, its entries keep their own
                // origins.
                return Ok((Value::new(origin, value.kind), value_as_written));
            }
            let piece = value.into_string().map_err(|_| format!("`${{{inner}}}` is no text within `{text}`"))?;
            has_variables |= value_as_written.is_some();
            as_written += &rest[..start];
            as_written += &value_as_written.unwrap_or_else(|| secrets::escaped(&piece));
            result += &rest[..start];
            result += &piece;
            self.text_left = self
                .text_left
                .checked_sub(result.len().max(as_written.len()))
                .ok_or_else(|| format!("more than {MAX_TEXT} bytes of text after interpolation"))?;
            rest = after;
        }
        result += rest;
        as_written += rest;
        Ok((Value::new(origin, result), has_variables.then_some(as_written)))
    }

    /// The value of the text `inner` between `${` and `}`.
    fn resolve_expression(
        &mut self,
        inner: &str,
        key_path: &mut Vec<String>,
    ) -> std::result::Result<Resolved, Problem> {
        // The values that contain this interpolation may be `MAX_DEPTH` deep, and the interpolations too.
        if key_path.len() + self.following.len() > 2 * MAX_DEPTH {
            return Err(format!("`${{{inner}}}`: interpolations more than {MAX_DEPTH} deep"));
        }
        let inner = self.resolve_within(inner, key_path)?;
        let inner = inner.trim();
        let Some((resolver, arguments)) = inner.split_once(':') else {
            let key = absolute_key(inner, key_path)?;
            return self.look_up(&key)?.ok_or_else(|| format!("`${{{inner}}}`: there is no `{key}`"));
        };
        let (argument, default) = match arguments.split_once(',') {
            Some((argument, default)) => (argument.trim(), Some(default.trim())),
            None => (arguments.trim(), None),
        };
        match resolver.trim() {
            "oc.env" | "env" => variable(argument, default)
                .unwrap_or_else(|| Err(format!("`${{{inner}}}`: the environment variable {argument} is not set"))),
            "oc.select" => match self.look_up(&absolute_key(argument, key_path)?)? {
                Some(resolved) => Ok(resolved),
                None => default_value(default.unwrap_or("null")),
            },
            "now" => {
                let date = start_date(arguments).map_err(|problem| format!("`${{{inner}}}`: {problem}"))?;
                Ok((Value::new(None, date), None))
            }
            other => {
                Err(format!("`${{{inner}}}`: the resolver `{other}` is not known; there are oc.env, oc.select, now"))
            }
        }
    }

    /// The text of an interpolation after the interpolations within it are resolved: `${oc.env:${name}}`.
    fn resolve_within(&mut self, inner: &str, key_path: &mut Vec<String>) -> std::result::Result<String, Problem> {
        if !inner.contains(START) {
            return Ok(inner.to_string());
        }
        // No key, but a level of depth.
        self.following.push("${}".into());
        let resolved = self.resolve_text(inner, key_path, None);
        self.following.pop();
        let (text, _) = resolved?;
        text.into_string().map_err(|e| format!("`${{{inner}}}`: {e}"))
    }

    /// The resolved value of a dotted key; `None` if the key does not exist. Fails if the key is being resolved
    /// already.
    fn look_up(&mut self, key: &str) -> std::result::Result<Option<Resolved>, Problem> {
        if self.following.iter().any(|followed| followed == key) {
            return Err(format!("`{key}` is defined by itself: {} -> {key}", self.following.join(" -> ")));
        }
        let Some(value) = find(self.root, key) else { return Ok(None) };
        self.following.push(key.to_string());
        let resolved = self.resolve_as_written(value, &mut key.split('.').map(String::from).collect());
        self.following.pop();
        resolved.map(Some)
    }
}

/// The value of the environment variable `name`, or else the value of `default`; `None` if there is neither.
fn variable(name: &str, default: Option<&str>) -> Option<std::result::Result<Resolved, Problem>> {
    let Ok(text) = std::env::var(name) else { return default.map(default_value) };
    secrets::keep_out_of_messages(name, &text);
    let default = default.map(|default| format!(",{default}")).unwrap_or_default();
    let as_written = format!("${{oc.env:{name}{default}}}");
    Some(Ok((value_of_variable(text), Some(as_written))))
}

/// The value of a default within an interpolation: YAML.
fn default_value(text: &str) -> std::result::Result<Resolved, Problem> {
    Ok((parse_value(text, "default of an interpolation")?, None))
}

/// The value of an environment variable: a number, `true` or `null`, or YAML in brackets or quotes. Any other text is
/// taken as it is, also if YAML would read more into it, such as a map into `a: b`.
fn value_of_variable(text: String) -> Value {
    let is_bracketed = text.trim_start().starts_with(['[', '{', '"', '\'']) && !text.contains('\n');
    match parse_value(&text, "the environment").map(|value| value.kind) {
        Ok(ValueKind::String(_) | ValueKind::Table(_) | ValueKind::Array(_)) if !is_bracketed => Value::new(None, text),
        Ok(kind) => Value::new(None, kind),
        Err(_) => Value::new(None, text),
    }
}

/// The time at which the process first asked for it (UTC), in the format of `strftime`. All uses in a process have the
/// same time, so that file names made of it agree.
fn start_date(format: &str) -> std::result::Result<String, Problem> {
    static TIME: LazyLock<SystemTime> = LazyLock::new(SystemTime::now);
    let seconds = TIME.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    date(seconds, format)
}

/// The time `seconds` after 1970 (UTC) in the format of `strftime`.
fn date(seconds: u64, format: &str) -> std::result::Result<String, Problem> {
    let (days, second_of_day) = (seconds / 86_400, seconds % 86_400);
    // The date in the Gregorian calendar (`civil_from_days` of Howard Hinnant's "chrono-Compatible Low-Level Date
    // Algorithms"): days are counted from 0000-03-01, in eras of 400 years, and a year begins in March.
    let (era, day_of_era) = ((days + 719_468) / 146_097, (days + 719_468) % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month < 3);
    let mut text = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        text += &match rest.next() {
            Some('Y') => year.to_string(),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{month:02}"),
            Some('d') => format!("{day:02}"),
            Some('H') => format!("{:02}", second_of_day / 3600),
            Some('M') => format!("{:02}", second_of_day / 60 % 60),
            Some('S') => format!("{:02}", second_of_day % 60),
            Some('%') => "%".into(),
            other => {
                let other = other.map(String::from).unwrap_or_default();
                return Err(format!("`%{other}` is not known; there are %Y, %y, %m, %d, %H, %M, %S and %%"));
            }
        };
    }
    Ok(text)
}

/// The absolute dotted key of a key in an interpolation: `a.b.0` for `a.b[0]`. A key that begins with a dot is relative
/// to the value with the names `key_path`: `.a` is a sibling of it, `..a` is one level up.
fn absolute_key(key: &str, key_path: &[String]) -> std::result::Result<String, Problem> {
    let dots = key.bytes().take_while(|b| *b == b'.').count();
    let names = key[dots..].replace('[', ".").replace(']', "");
    let is_valid = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "_-@/ ".contains(c));
    if names.is_empty() || !names.split('.').all(is_valid) {
        return Err(format!("`${{{key}}}` is no key"));
    }
    if dots == 0 {
        return Ok(names);
    }
    // One dot leads to the map that contains the value, and each further dot to the map above it.
    let map_depth =
        key_path.len().checked_sub(dots).ok_or_else(|| format!("`${{{key}}}` leads above the configuration"))?;
    let mut absolute = key_path[..map_depth].to_vec();
    absolute.push(names);
    Ok(absolute.join("."))
}

/// The position of the `}` that ends an interpolation. `text` begins after its `${`.
fn closing_brace(text: &str) -> Option<usize> {
    let mut depth = 0usize;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => return Some(at),
            '}' => depth -= 1,
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::yaml::Document;
    use super::*;

    fn read(text: &str) -> Result<Map> {
        let document = Document::parse(Path::new("main.yaml"), text.into())?;
        interpolate(&document.path, &Value::new(None, ValueKind::Table(document.map))).map(|(map, _)| map)
    }
    fn problem(text: &str) -> String {
        read(text).unwrap_err().to_string()
    }

    #[test]
    fn interpolation_keeps_types_and_resolves_relative_keys() {
        let map = read(
            "n: 3\nlist: [1, {x: '${n}'}]\nwhole: ${list}\ntext: a${n}b${list[0]}\nin:\n  here: ${.beside}\n  beside: ${..n}\n\
             which: n\nnested: ${${which}}\nenv: ${oc.env:ROLL_TEST_SURELY_UNSET,7}\nselect: ${oc.select:gone,null}\nliteral: \\${n}\n",
        )
        .unwrap();
        let root = Value::new(None, ValueKind::Table(map.clone()));
        let text = |key: &str| find(&root, key).unwrap().clone().into_string().unwrap();
        assert_eq!(map["nested"].kind, ValueKind::U64(3));
        assert_eq!(map["env"].kind, ValueKind::U64(7));
        assert_eq!(map["select"].kind, ValueKind::Nil);
        assert_eq!((text("whole.1.x"), text("text")), ("3".into(), "a3b1".into()));
        assert_eq!((text("in.here"), text("literal")), ("3".into(), "${n}".into()));
    }

    #[test]
    fn variables_are_no_yaml_but_numbers_words_and_lists() {
        let key = "-----BEGIN KEY-----\nMIIE\n-----END KEY-----\n";
        for text in [key, "-----BEGIN KEY-----\nMIIE: x\n", "a #b", "pass: word", "- x", "x", "a\n[1]"] {
            assert_eq!(value_of_variable(text.into()).kind, ValueKind::String(text.into()), "{text}");
        }
        assert_eq!(value_of_variable("7".into()).kind, ValueKind::U64(7));
        assert_eq!(value_of_variable("true".into()).kind, ValueKind::Boolean(true));
        assert_eq!(value_of_variable("\"007\"".into()).kind, ValueKind::String("007".into()));
        assert!(matches!(value_of_variable("[a, b]".into()).kind, ValueKind::Array(_)));
        assert_eq!(value_of_variable("[a, b".into()).kind, ValueKind::String("[a, b".into()));
    }

    #[test]
    fn now_is_the_time_of_the_start() {
        for (seconds, written) in [
            (0, "1970-01-01 00:00:00"),
            (951_782_399, "2000-02-28 23:59:59"),
            (951_782_400, "2000-02-29 00:00:00"),
            (1_798_761_599, "2026-12-31 23:59:59"),
            (4_107_542_400, "2100-03-01 00:00:00"),
        ] {
            assert_eq!(date(seconds, "%Y-%m-%d %H:%M:%S").unwrap(), written);
        }
        let map = read("name: agent-${now:%Y%m%d_%H%M%S}\nagain: ${name}\n").unwrap();
        let [name, again] = ["name", "again"].map(|key| map[key].clone().into_string().unwrap());
        assert!(name == again && name.len() == "agent-20261231_235959".len(), "{name}");
    }

    #[test]
    fn errors_name_the_expression_and_its_line() {
        for (main, named) in [
            ("a: ${b}\n", "`b`"),
            ("x: 1\na: ${b}\n", "main.yaml:2"),
            ("a: ${b}\nb: ${a}\n", "defined by itself"),
            ("a: ${a}\n", "defined by itself"),
            ("a: ${oc.env:ROLL_TEST_SURELY_UNSET}\n", "ROLL_TEST_SURELY_UNSET"),
            ("a: ${then:x}\n", "`then`"),
            ("a: ${now:%q}\n", "`%q`"),
            ("a: ${b\n", "without its"),
            ("a: ${}\n", "is no key"),
            ("a: ${....b}\n", "above"),
            ("a: x${b}\nb: [1]\n", "is no text"),
            ("a: ???\nb: {c: '???'}\n", "b.c"),
        ] {
            let message = problem(main);
            assert!(message.contains(named) && message.contains("main.yaml"), "{main}: {message}");
        }
    }

    #[test]
    fn rejects_interpolations_that_unfold_beyond_the_limits() {
        let mut doubling = "x0: [1]\nt0: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n".to_string();
        for i in 1..60 {
            doubling += &format!("x{i}: ['${{x{0}}}', '${{x{0}}}']\nt{i}: ${{t{0}}}${{t{0}}}\n", i - 1);
        }
        // 2^59 values: an error that came after they were made would never come.
        assert!(problem(&doubling).contains("interpolation"));
        let chain: String = (0..5000).map(|i| format!("k{i}: ${{k{}}}\n", i + 1)).collect();
        let message = problem(&(chain + "k5000: 1\n"));
        assert!(message.contains("deep"), "{message}");
        let message = problem(&format!("a: {}b{}\n", "${".repeat(20_000), "}".repeat(20_000)));
        assert!(message.contains("deep"), "{message}");
    }
}
