//! Keys of a configuration: the meaning of each, the values that it takes, and its default.
//!
//! The types that a configuration is read into are the only source, through their JSON schema. Their documentation
//! comments are the meanings of keys, their types and attributes (`#[schemars(range(min = 1))]` and others) describe
//! the values, and [`Default`] has the defaults. [`of`] lists the keys of a type; [`check`] fails on values outside the
//! schema.

use serde_json::Value as Json;

use crate::Options;

/// One key of a section, or of the options of a component.
#[derive(Clone, Debug, PartialEq)]
pub struct Key {
    /// Its name below the section, with dots. An entry of a list is `N`: `reward.N.weight`.
    pub name: String,
    /// Its meaning; an empty line separates paragraphs. Empty if it is not known.
    pub about: String,
    /// The values that it takes, in words: "a whole number of at least 1".
    pub values: String,
    /// Values that are documented one by one (the variants of an enum): value and meaning.
    pub choices: Vec<(String, String)>,
    /// The default. `None`: the key must be given if its section is.
    pub default: Option<Json>,
    /// The JSON schema of its values; `null` if it is not known.
    pub schema: Json,
}

impl Key {
    /// Whether the component needs another value than the default: the name of a file, the address of a service. The
    /// field of such a key has the attribute `#[schemars(extend("x-required" = true))]`.
    pub fn is_required(&self) -> bool {
        self.schema.get("x-required").and_then(Json::as_bool).unwrap_or(false)
    }
}

/// Returns the keys of `T`, without meanings: for a type without a JSON schema, only its defaults are known.
pub fn of_defaults<T: serde::Serialize + Default>() -> Vec<Key> {
    undescribed(crate::default_options::<T>())
}

fn undescribed(defaults: Options) -> Vec<Key> {
    let key = |(name, default): (String, Json)| Key {
        name,
        about: String::new(),
        values: crate::OptionKind::of(&default).words().into(),
        choices: Vec::new(),
        default: Some(default),
        schema: Json::Null,
    };
    defaults.into_iter().map(key).collect()
}

#[cfg(feature = "schema")]
pub use schema::{about, check, check_ranges, of, schema_of, suggest, unknown};

#[cfg(feature = "schema")]
mod schema {
    use schemars::JsonSchema;
    use schemars::generate::SchemaSettings;
    use serde::Serialize;
    use serde_json::{Map, Value as Json};

    use super::Key;
    use crate::error::{nearest, shortened};
    use crate::{Error, Result};

    /// The keys of `T` in the order of its fields, with the keys of the maps that it contains.
    pub fn of<T: JsonSchema + Serialize + Default>() -> Vec<Key> {
        let defaults = Json::Object(crate::default_options::<T>());
        let mut keys = Vec::new();
        add_keys("", &schema_of::<T>(), Some(&defaults), &mut keys);
        keys
    }

    /// The documentation of `T` itself.
    pub fn about<T: JsonSchema>() -> String {
        text(&schema_of::<T>())
    }

    /// Fails if the options `value` are outside the schema of their type; the error names the key below `section`,
    /// which is empty at the top level.
    pub fn check_ranges<T: JsonSchema + Serialize>(section: &str, value: &T) -> Result<()> {
        let mut value = serde_json::to_value(value).map_err(|e| Error::config(section, e.to_string()))?;
        check_value(&[], section, &schema_of::<T>(), &mut value)
    }

    /// Fails if the map `value` is outside `schema`: on the first value of another type, number outside its range,
    /// unknown word, list of another length, or unknown key, for which `keys` are the suggestions. Replaces floats by
    /// integers where the schema has integers: `5e8` becomes 500000000.
    pub fn check(keys: &[Key], schema: &Json, value: &mut Json) -> Result<()> {
        check_value(keys, "", schema, value)
    }

    /// The JSON schema of `T`, in which the schemas of its fields are written out.
    pub fn schema_of<T: JsonSchema>() -> Json {
        let settings = SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
        settings.into_generator().into_root_schema_for::<T>().to_value()
    }

    impl Key {
        /// Checks a value of this key, as [`check`] does. `null` always passes. Errors name the key by `path`.
        pub fn check(&self, path: &str, value: &mut Json) -> Result<()> {
            match value {
                Json::Null => Ok(()),
                value => check_value(&[], path, &self.schema, value),
            }
        }

        /// Whether every value of this key is text, or `null`.
        pub fn is_text(&self) -> bool {
            let is_text_schema = |schema: &Json| match types(schema) {
                Some(types) => types.iter().all(|name| ["string", "null"].contains(name)),
                None => false,
            };
            alternatives(&self.schema).into_iter().all(is_text_schema)
        }

        /// Whether the value at `path` is an enum whose variants are maps of one key, the variant's tag (`{value:
        /// 0.5}`), and both `words` are among its tags. Layers of a configuration are merged by this: a later layer's
        /// `{other: 1}` then replaces `{value: 0.5}` instead of merging with it.
        ///
        /// `path` is the name of this key, or of a value within it.
        pub fn are_tags_of_one_enum(&self, path: &str, words: [&str; 2]) -> bool {
            let mut parts = path.split('.');
            let is_within_key = self.name.split('.').all(|part| parts.next() == Some(part));
            if !is_within_key {
                return false;
            }
            // The parts after the key's name lead to the value within it.
            let schemas = parts.fold(vec![&self.schema], schemas_one_step_down);
            let tags: Vec<&String> = schemas.into_iter().flat_map(alternatives).filter_map(tag).collect();
            words.iter().all(|word| tags.iter().any(|tag| tag == word))
        }
    }

    /// The error on the key at `path`, which is not among `siblings`, the names at its level. The error suggests a
    /// known key if [`suggest`] finds one.
    pub fn unknown<'a>(path: &str, siblings: impl Iterator<Item = &'a str> + Clone, all: &[Key]) -> Error {
        let hint = match suggest(path, siblings.clone(), all) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("known keys: {}", siblings.collect::<Vec<_>>().join(", ")),
        };
        Error::config(path, format!("unknown key; {hint}"))
    }

    /// The known key that the user may have meant by `path`. This is the nearest of `siblings`, the names at its level.
    /// If none of them is near, it is the key of `all` with the nearest last name, at any level.
    pub fn suggest<'a>(path: &str, siblings: impl Iterator<Item = &'a str>, all: &[Key]) -> Option<String> {
        let (parent, name) = path.rsplit_once('.').unwrap_or(("", path));
        if let Some(near) = nearest(name, siblings) {
            return Some(joined(parent, near));
        }
        fn last_name(key: &Key) -> &str {
            key.name.rsplit('.').next().unwrap_or_default()
        }
        let near = nearest(name, all.iter().map(last_name))?;
        all.iter().find(|key| last_name(key) == near).map(|key| key.name.clone())
    }

    fn joined(parent: &str, name: &str) -> String {
        if parent.is_empty() { name.to_string() } else { format!("{parent}.{name}") }
    }

    /// Appends the keys of a map with this `schema` to `keys`, each with `prefix` before its name. The keys of a map
    /// within it follow the key that holds the map. `defaults` is the default of the whole map, if the type that
    /// contains it has one.
    fn add_keys(prefix: &str, schema: &Json, defaults: Option<&Json>, keys: &mut Vec<Key>) {
        for (name, field) in fields(schema).into_iter().flatten() {
            let default = defaults.and_then(|defaults| defaults.get(name)).or(field.get("default"));
            let key = Key {
                name: format!("{prefix}{name}"),
                about: text(field),
                values: values(field),
                choices: choices(field),
                default: default.cloned(),
                schema: field.clone(),
            };
            let nested = format!("{}.", key.name);
            let section = nesting(field);
            // A map whose default is a map is not listed itself: its keys are, each with its own default.
            let is_listed_by_its_keys = section.is_some() && default.is_some_and(Json::is_object);
            if !is_listed_by_its_keys {
                keys.push(key);
            }
            match section {
                Some(Nesting::Map(map)) => add_keys(&nested, map, default.filter(|map| map.is_object()), keys),
                Some(Nesting::Entries(entry)) => add_keys(&format!("{nested}N."), entry, None, keys),
                None => {}
            }
        }
    }

    /// One step down a path: the schemas that the entry `part` may have within a value with one of these `schemas`.
    fn schemas_one_step_down<'a>(schemas: Vec<&'a Json>, part: &str) -> Vec<&'a Json> {
        let schema_of_part = |schema: &'a Json| match part.parse::<usize>() {
            // A number is an entry of a list.
            Ok(_) => schema.get("items"),
            // Any other part is a field of a map.
            Err(_) => fields(schema)?.get(part),
        };
        schemas.into_iter().flat_map(alternatives).filter_map(schema_of_part).collect()
    }

    /// A map within a field, whose keys are listed after the field's own key.
    enum Nesting<'a> {
        /// The schema of the field, which is a map.
        Map(&'a Json),
        /// The schema of each entry of the field, which is a list of maps.
        Entries(&'a Json),
    }

    /// The map, or the maps of a list, that a field holds. `None` for a map that is one of several alternatives; a list
    /// of maps may be one of several.
    fn nesting(field: &Json) -> Option<Nesting<'_>> {
        let present: Vec<&Json> = alternatives(field).into_iter().filter(|a| !is_null(a)).collect();
        match present[..] {
            [only] if fields(only).is_some() => Some(Nesting::Map(only)),
            _ => {
                let mut entries = present.iter().filter_map(|list| list.get("items"));
                entries.find(|entry| fields(entry).is_some()).map(Nesting::Entries)
            }
        }
    }

    fn fields(schema: &Json) -> Option<&Map<String, Json>> {
        schema.get("properties").and_then(Json::as_object)
    }

    /// Whether a map has no other keys than its fields.
    fn is_closed(schema: &Json) -> bool {
        schema.get("additionalProperties") == Some(&Json::Bool(false))
    }

    fn is_null(schema: &Json) -> bool {
        schema.get("type").is_some_and(|of_type| of_type == "null")
    }

    /// The alternatives of a schema, or the schema alone where it has no alternatives.
    fn alternatives(schema: &Json) -> Vec<&Json> {
        match schema.get("anyOf").or(schema.get("oneOf")).and_then(Json::as_array) {
            Some(several) => several.iter().flat_map(alternatives).collect(),
            None => vec![schema],
        }
    }

    /// The documentation of a schema, each paragraph as one line, without the brackets of rustdoc's links.
    fn text(schema: &Json) -> String {
        let about = schema.get("description").and_then(Json::as_str).unwrap_or_default();
        let paragraphs = about.split("\n\n").map(|paragraph| paragraph.replace('\n', " "));
        paragraphs.collect::<Vec<_>>().join("\n\n").replace("[`", "`").replace("`]", "`")
    }

    /// The alternatives of a field, or of the entries of a list, that have a documentation of their own: value in words
    /// and documentation.
    fn choices(field: &Json) -> Vec<(String, String)> {
        let several = alternatives(field.get("items").unwrap_or(field));
        if several.len() < 2 {
            // The field's own documentation describes a single alternative.
            return Vec::new();
        }
        let documented = several.into_iter().filter(|a| a.get("const").is_some() || fields(a).is_some());
        documented.map(|a| (values(a), text(a))).filter(|(_, about)| !about.is_empty()).collect()
    }

    /// The values that a schema takes, in words: "a whole number of at least 1 or `null`".
    fn values(schema: &Json) -> String {
        let mut several: Vec<String> = alternatives(schema).into_iter().flat_map(values_of_one).collect();
        several.dedup();
        either(&several)
    }

    /// Joins alternatives: "a, b or c".
    fn either(several: &[String]) -> String {
        match several {
            [] => "any value".into(),
            [only] => only.clone(),
            [first @ .., last] => format!("{} or {last}", first.join(", ")),
        }
    }

    /// The values of a schema without alternatives, in words: one entry per word or type.
    fn values_of_one(schema: &Json) -> Vec<String> {
        if let Some(value) = schema.get("const") {
            return vec![quoted(value)];
        }
        if let Some(Json::Array(values)) = schema.get("enum") {
            return values.iter().map(quoted).collect();
        }
        let type_in_words = |name: &str| match name {
            "boolean" => "`true` or `false`".into(),
            "integer" => format!("a whole number{}", range(schema)),
            "number" => format!("a number{}", range(schema)),
            "string" => "a text".into(),
            "null" => "`null`".into(),
            "array" => list(schema),
            "object" => map(schema),
            other => format!("`{other}`"),
        };
        match schema.get("type") {
            Some(Json::String(name)) => vec![type_in_words(name)],
            Some(Json::Array(names)) => names.iter().filter_map(Json::as_str).map(type_in_words).collect(),
            _ => vec!["any value".into()],
        }
    }

    fn quoted(value: &Json) -> String {
        match value {
            Json::String(text) => format!("`{text}`"),
            other => format!("`{other}`"),
        }
    }

    /// A list in words: "2 entries, each a number".
    fn list(schema: &Json) -> String {
        let length = |keyword: &str| schema.get(keyword).and_then(Json::as_u64);
        let count = match (length("minItems"), length("maxItems")) {
            (Some(least), Some(most)) if least == most => format!("{least} entries"),
            (Some(least), None) => format!("at least {least} entries"),
            // Other ranges of lengths are not described.
            _ => "a list".into(),
        };
        let entry = schema.get("items").map(values).unwrap_or_else(|| "any value".into());
        format!("{count}, each {entry}")
    }

    /// A map in words. A map of one key only is shown as it is written: "`{value: ...}` with a number".
    fn map(schema: &Json) -> String {
        let single = fields(schema).filter(|map| is_closed(schema) && map.len() == 1);
        match single.and_then(|map| map.iter().next()) {
            Some((name, field)) => format!("`{{{name}: ...}}` with {}", values(field)),
            None => "a map".into(),
        }
    }

    /// The number of a keyword of JSON schema, such as `minimum`.
    fn keyword_number(schema: &Json, keyword: &str) -> Option<f64> {
        schema.get(keyword).and_then(Json::as_f64)
    }

    /// The range of a number in words, with a blank before it: " from 0 to 1", " above 0 and at most 8", " of at least
    /// 1". Empty if there is no limit.
    fn range(schema: &Json) -> String {
        let limit = |keyword| keyword_number(schema, keyword);
        if let (Some(least), Some(most)) = (limit("minimum"), limit("maximum")) {
            return format!(" from {least} to {most}");
        }
        let lower = limit("minimum").map(|n| format!("of at least {n}"));
        let lower = lower.or(limit("exclusiveMinimum").map(|n| format!("above {n}")));
        let upper = limit("maximum").map(|n| format!("at most {n}"));
        let upper = upper.or(limit("exclusiveMaximum").map(|n| format!("below {n}")));
        match (lower, upper) {
            (Some(lower), Some(upper)) => format!(" {lower} and {upper}"),
            (Some(bound), None) | (None, Some(bound)) => format!(" {bound}"),
            (None, None) => String::new(),
        }
    }

    /// The JSON types that a schema takes. `None`: the schema does not restrict the type.
    fn types(schema: &Json) -> Option<Vec<&str>> {
        match schema.get("type") {
            Some(Json::String(name)) => Some(vec![name]),
            Some(Json::Array(names)) => Some(names.iter().filter_map(Json::as_str).collect()),
            // The words of an enum.
            _ if schema.get("const").or(schema.get("enum")).is_some() => Some(vec!["string"]),
            _ => None,
        }
    }

    /// Whether a schema takes the JSON type of `value`.
    fn takes(schema: &Json, value: &Json) -> bool {
        let Some(types) = types(schema) else { return true };
        types.iter().any(|name| match *name {
            "boolean" => value.is_boolean(),
            // A whole number may be written as the float `5e8`.
            "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
            "number" => value.is_number(),
            "string" => value.is_string(),
            "null" => value.is_null(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            _ => true,
        })
    }

    /// Whether a map has the tag of `schema` as its only key, with a value other than `null`. True if the schema has no
    /// tag or `value` is not a map.
    fn is_tagged(schema: &Json, value: &Json) -> bool {
        match (tag(schema), value) {
            (Some(word), Json::Object(map)) => map.len() == 1 && map.get(word).is_some_and(|inner| !inner.is_null()),
            _ => true,
        }
    }

    /// The tag of an enum's variant that holds a value: the only key of its map, such as `value` in `{value: 0.5}`.
    fn tag(schema: &Json) -> Option<&String> {
        if !is_closed(schema) {
            return None;
        }
        let mut names = fields(schema)?.keys();
        let (Some(name), None) = (names.next(), names.next()) else { return None };
        let required = schema.get("required").and_then(Json::as_array)?;
        required.iter().any(|one| one == name).then_some(name)
    }

    /// Fails if the value at `path` is outside `schema`; `all` are the known keys, for suggestions.
    fn check_value(all: &[Key], path: &str, schema: &Json, value: &mut Json) -> Result<()> {
        let several = alternatives(schema);
        let fitting: Vec<&Json> = several.into_iter().filter(|a| takes(a, value) && is_tagged(a, value)).collect();
        match fitting[..] {
            // serde_json writes a number that is not finite as `null`.
            [] if value.is_null() && types(schema).is_some_and(|types| types == ["number"]) => {
                Err(Error::config(path, format!("expected {}, found one that is not finite", values(schema))))
            }
            // The schema does not say what `null` means; the type that is read from it decides.
            [] if value.is_null() => Ok(()),
            // One alternative has this type: its error is the most precise one.
            [only] => check_alternative(all, path, only, schema, value),
            // Several alternatives have this type: one must accept the value.
            _ if fitting.iter().any(|a| check_alternative(all, path, a, schema, &mut value.clone()).is_ok()) => Ok(()),
            // No alternative has this type, or none of several accepts the value.
            _ => Err(wrong(path, schema, value)),
        }
    }

    /// Checks the range, word, length, entries and fields of the value at `path` against `schema`, which takes its
    /// type. `schema` is one alternative of `declared`, whose values errors describe.
    fn check_alternative(all: &[Key], path: &str, schema: &Json, declared: &Json, value: &mut Json) -> Result<()> {
        /// A round number below 2^53 (9.007e15), up to which a float holds every whole number exactly.
        const MAX_EXACT_WHOLE_NUMBER: f64 = 9e15;
        if !is_within_limits(schema, value) {
            return Err(wrong(path, declared, value));
        }
        match value {
            Json::Number(number) if types(schema).is_some_and(|types| types.contains(&"integer")) => {
                let float = number.as_f64().filter(|float| number.is_f64() && float.abs() < MAX_EXACT_WHOLE_NUMBER);
                if let Some(float) = float {
                    *value = (float as i64).into();
                }
                Ok(())
            }
            Json::Array(items) => {
                let Some(entry) = schema.get("items") else { return Ok(()) };
                let mut items = items.iter_mut().enumerate();
                items.try_for_each(|(i, item)| check_value(all, &format!("{path}.{i}"), entry, item))
            }
            Json::Object(map) => {
                let Some(fields) = fields(schema) else { return Ok(()) };
                if let Some(name) = map.keys().find(|name| is_closed(schema) && !fields.contains_key(*name)) {
                    return Err(unknown(&joined(path, name), fields.keys().map(String::as_str), all));
                }
                fields.iter().try_for_each(|(name, field)| match map.get_mut(name) {
                    Some(value) => check_value(all, &joined(path, name), field, value),
                    None => Ok(()),
                })
            }
            _ => Ok(()),
        }
    }

    /// Whether the range of a number, the word of a text, or the length of a list is as `schema` says. The entries of a
    /// list and the fields of a map are not looked at.
    fn is_within_limits(schema: &Json, value: &Json) -> bool {
        let limit = |keyword| keyword_number(schema, keyword);
        match value {
            Json::Number(number) => {
                let number = number.as_f64().unwrap_or(f64::NAN);
                limit("minimum").is_none_or(|least| number >= least)
                    && limit("maximum").is_none_or(|most| number <= most)
                    && limit("exclusiveMinimum").is_none_or(|least| number > least)
                    && limit("exclusiveMaximum").is_none_or(|most| number < most)
            }
            Json::String(_) => {
                schema.get("const").is_none_or(|word| word == value)
                    && schema.get("enum").and_then(Json::as_array).is_none_or(|words| words.contains(value))
            }
            Json::Array(items) => {
                limit("minItems").is_none_or(|least| items.len() as f64 >= least)
                    && limit("maxItems").is_none_or(|most| items.len() as f64 <= most)
            }
            _ => true,
        }
    }

    fn wrong(path: &str, schema: &Json, value: &Json) -> Error {
        Error::config(path, format!("expected {}, found {}", values(schema), shown(value)))
    }

    /// A value that was found, for messages: text in backticks, so that it cannot be taken for a number, and at most 80
    /// characters.
    fn shown(value: &Json) -> String {
        let text = match value {
            Json::String(text) => format!("`{text}`"),
            other => other.to_string(),
        };
        shortened(text, 80)
    }
}

#[cfg(feature = "schema")]
#[allow(clippy::unwrap_used)]
#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default, serde::Serialize, schemars::JsonSchema)]
    #[serde(rename_all = "snake_case")]
    enum Missing {
        /// Leave it out.
        #[default]
        Skip,
        /// Take this.
        Value(f64),
        /// Take another.
        Other(f64),
    }

    #[derive(Clone, Default, serde::Serialize, schemars::JsonSchema)]
    struct Entry {
        missing: Missing,
    }

    #[derive(Clone, Default, serde::Serialize, schemars::JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    struct Inner {
        /// From within.
        #[schemars(range(max = 4))]
        depth: u64,
    }

    /// A whole.
    #[derive(Clone, serde::Serialize, schemars::JsonSchema)]
    #[serde(default, deny_unknown_fields)]
    struct Outer {
        /// How many, of [`Inner`]
        /// things.
        #[schemars(range(min = 1))]
        count: u64,
        /// A share.
        #[schemars(range(min = 0.0), extend("exclusiveMaximum" = 1.0))]
        share: f64,
        /// Rates.
        #[schemars(inner(range(min = 0)))]
        rates: [f64; 2],
        /// A bound.
        #[schemars(extend("exclusiveMinimum" = 0))]
        bound: Option<f64>,
        /// A number of few digits.
        short: f32,
        /// What is missing.
        missing: Missing,
        inner: Inner,
        /// Filters.
        filters: Vec<Inner>,
        maybe: Option<Inner>,
        /// Entries.
        listed: Vec<Entry>,
        /// Text.
        label: Option<String>,
    }

    impl Default for Outer {
        fn default() -> Self {
            Self {
                count: 3,
                share: 0.5,
                rates: [0.0, 1.0],
                bound: None,
                short: 0.4,
                missing: Missing::Skip,
                inner: Inner { depth: 2 },
                filters: Vec::new(),
                maybe: None,
                listed: Vec::new(),
                label: None,
            }
        }
    }

    fn key(name: &str) -> Key {
        of::<Outer>().into_iter().find(|key| key.name == name).unwrap_or_else(|| panic!("no {name}"))
    }

    #[test]
    fn keys_describe_meaning_values_and_default() {
        assert_eq!(about::<Outer>(), "A whole.");
        let count = key("count");
        assert_eq!(
            (count.about.as_str(), count.values.as_str()),
            ("How many, of `Inner` things.", "a whole number of at least 1")
        );
        assert_eq!(count.default, Some(3.into()));
        assert_eq!(key("share").values, "a number of at least 0 and below 1");
        assert_eq!(key("rates").values, "2 entries, each a number of at least 0");
        assert_eq!(key("bound").values, "a number above 0 or `null`");
        assert_eq!(key("short").default, Some(0.4.into()));
        let missing = key("missing");
        assert_eq!(missing.values, "`skip`, `{value: ...}` with a number or `{other: ...}` with a number");
        assert_eq!(missing.choices[0], ("`skip`".into(), "Leave it out.".into()));
        assert_eq!(missing.choices[1].1, "Take this.");
        let both = [Missing::Value(1.0), Missing::Other(2.0)];
        assert_eq!(serde_json::json!(both), serde_json::json!([{"value": 1.0}, {"other": 2.0}]));
    }

    #[test]
    fn maps_are_described_by_their_keys() {
        let names: Vec<String> = of::<Outer>().into_iter().map(|key| key.name).collect();
        assert!(names.contains(&"filters.N.depth".into()) && names.contains(&"maybe".into()), "{names:?}");
        assert!(!names.contains(&"inner".into()), "{names:?}");
        assert_eq!(key("inner.depth").default, Some(2.into()));
        assert_eq!(key("inner.depth").values, "a whole number from 0 to 4");
        assert_eq!(key("maybe.depth").about, "From within.");
    }

    #[test]
    fn check_ranges_uses_the_schema() {
        let error = |change: fn(&mut Outer)| {
            let mut outer = Outer::default();
            change(&mut outer);
            check_ranges("section", &outer).err().map(|e| e.to_string()).unwrap_or_default()
        };
        assert_eq!(error(|_| {}), "");
        let count = error(|o| o.count = 0);
        assert!(count.contains("section.count") && count.contains("at least 1, found 0"), "{count}");
        assert!(error(|o| o.share = 1.0).contains("section.share"));
        assert!(error(|o| o.share = f64::NAN).contains("not finite"));
        assert!(error(|o| o.rates[1] = -1.0).contains("section.rates"));
        assert!(error(|o| o.bound = Some(0.0)).contains("section.bound"));
        assert!(error(|o| o.inner.depth = 5).contains("section.inner.depth"));
        assert!(error(|o| o.filters.push(Inner { depth: 9 })).contains("section.filters"));
        assert!(error(|o| o.maybe = Some(Inner { depth: 9 })).contains("section.maybe.depth"));
    }

    #[test]
    fn values_are_checked_against_the_schema() {
        let error = |name: &str, mut value: Json| {
            key(name).check(name, &mut value).err().map(|e| e.to_string()).unwrap_or_default()
        };
        assert_eq!(error("missing", "skip".into()) + &error("missing", serde_json::json!({"value": 1})), "");
        let word = error("missing", "leave".into());
        assert!(word.contains("`{other: ...}` with a number, found `leave`"), "{word}");
        assert!(error("count", "many".into()).contains("a whole number of at least 1, found `many`"));
        assert!(error("inner.depth", 5.into()).contains("`inner.depth`"));
        for (name, value, part) in [
            ("missing", serde_json::json!({"valu": 1}), "found {\"valu\":1}"),
            ("missing", serde_json::json!({"value": 1, "skip": 2}), "`{value: ...}` with a number"),
            ("missing", serde_json::json!({"value": null}), "found {\"value\":null}"),
            ("missing", serde_json::json!({"value": "much"}), "`missing.value`: expected a number, found `much`"),
            ("missing", serde_json::json!([1]), "found [1]"),
            ("count", serde_json::json!(1.5), "found 1.5"),
            ("count", serde_json::json!({"n": 1}), "a whole number of at least 1, found {\"n\":1}"),
            ("rates", serde_json::json!([0.5]), "2 entries, each a number of at least 0, found [0.5]"),
            ("rates", serde_json::json!([0.5, "x"]), "`rates.1`"),
            ("rates", 0.5.into(), "2 entries"),
            ("filters", serde_json::json!([{"depth": 9}]), "`filters.0.depth`"),
        ] {
            let message = error(name, value);
            assert!(message.contains(part), "no {part} in: {message}");
        }
        assert_eq!(error("share", 0.into()) + &error("rates", serde_json::json!([0, 1])), "");
        assert_eq!(error("filters", serde_json::json!([{"depth": 3}, {}])), "");
        assert!(error("share", "9".repeat(300).into()).len() < 200);
        assert_eq!(error("bound", Json::Null), "");
    }

    #[test]
    fn words_of_a_choice_are_known() {
        assert!(key("missing").are_tags_of_one_enum("missing", ["value", "other"]));
        assert!(!key("missing").are_tags_of_one_enum("missing", ["value", "skip"]), "`skip` is no map");
        assert!(!key("missing").are_tags_of_one_enum("count", ["value", "other"]));
        assert!(key("listed").are_tags_of_one_enum("listed.3.missing", ["value", "other"]));
        assert!(!key("listed").are_tags_of_one_enum("listed.3", ["missing", "missing"]), "a map of keys");
    }

    #[test]
    fn rejects_unknown_keys_with_the_nearest_known_key() {
        let error = |mut tree: Json| {
            check(&of::<Outer>(), &schema_of::<Outer>(), &mut tree).err().map(|e| e.to_string()).unwrap_or_default()
        };
        let whole = serde_json::json!({"count": 5e2, "filters": [{"depth": 1.0}], "share": 0.5});
        let mut read = whole.clone();
        check(&of::<Outer>(), &schema_of::<Outer>(), &mut read).unwrap();
        assert_eq!(read, serde_json::json!({"count": 500, "filters": [{"depth": 1}], "share": 0.5}));
        assert!(error(serde_json::json!({"rates": [1, "x"]})).contains("`rates.1`: expected a number of at least 0"));
        assert!(error(serde_json::json!({"coun": 1})).contains("`coun`: unknown key; did you mean `count`?"));
        assert!(error(serde_json::json!({"dept": 1})).contains("did you mean `inner.depth`?"));
        assert!(error(serde_json::json!({"inner": {"nothing": 1}})).contains("`inner.nothing`"));
        assert!(error(serde_json::json!({"inner": {"nothing": 1}})).contains("known keys: depth"));
        assert!(error(serde_json::json!({"inner": 3})).contains("`inner`: expected `{depth: ...}`"));
        assert!(key("label").is_text() && !key("missing").is_text() && !key("count").is_text());
    }

    #[test]
    fn types_without_schema_are_described_by_their_defaults() {
        let defaults = serde_json::json!({"gain": 1.5, "on": true}).as_object().unwrap().clone();
        let keys = undescribed(defaults);
        assert_eq!((keys[0].name.as_str(), keys[0].values.as_str()), ("gain", "a number"));
        assert_eq!(keys[1].default, Some(true.into()));
    }
}
