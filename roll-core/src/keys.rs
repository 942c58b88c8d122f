//! Keys of a configuration: the meaning of each, the values that it takes, and the one that it has by default.
//!
//! The types that a configuration is read into tell all of it: documentation comments the meanings, types and
//! `#[schemars(range(min = 1))]` the values, [`Default`] the defaults. Nothing of it is written twice: [`check_ranges`]
//! holds values to the same ranges.

use serde_json::Value as Json;

use crate::Options;

/// One key of a section, or of the options of a component.
#[derive(Clone, Debug, PartialEq)]
pub struct Key {
    /// Its name below the section, with dots. An entry of a list is `N`: `reward.N.weight`.
    pub name: String,
    /// Its meaning; paragraphs are apart by an empty line. Empty where nothing is known.
    pub about: String,
    /// The values that it takes, in words: "a whole number of at least 1".
    pub values: String,
    /// Of values with a meaning of their own the value and the meaning.
    pub choices: Vec<(String, String)>,
    /// The value by default; `None` for a key that has to be given where its section is.
    pub default: Option<Json>,
    /// The JSON schema of its values; `null` where nothing is known.
    pub schema: Json,
}

/// The keys of `T` by its defaults alone, without meanings: for types that do not describe themselves.
pub fn of_defaults<T: serde::Serialize + Default>() -> Vec<Key> {
    undescribed(crate::registry::default_options::<T>())
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
pub use schema::{about, check_ranges, expectation, of};

#[cfg(feature = "schema")]
mod schema {
    use schemars::JsonSchema;
    use schemars::generate::SchemaSettings;
    use serde::Serialize;
    use serde_json::{Map, Value as Json};

    use super::Key;
    use crate::{Error, Result};

    /// The keys of `T`, those of maps within it too, in the order of its fields.
    pub fn of<T: JsonSchema + Serialize + Default>() -> Vec<Key> {
        let defaults = Json::Object(crate::registry::default_options::<T>());
        let mut keys = Vec::new();
        below("", &of_type::<T>(), Some(&defaults), &mut keys);
        keys
    }

    /// The documentation of `T` itself.
    pub fn about<T: JsonSchema>() -> String {
        text(&of_type::<T>())
    }

    /// Fails on the first number outside the range that stands at its field; the error names the key below
    /// `section`, which is empty at the top level.
    pub fn check_ranges<T: JsonSchema + Serialize>(section: &str, value: &T) -> Result<()> {
        let value = serde_json::to_value(value).map_err(|e| Error::config(section, e.to_string()))?;
        check(section, &of_type::<T>(), &value)
    }

    impl Key {
        /// Fails on a value of another type than this key takes, on a number outside its range, a word that is none of
        /// its words, a list of another length, and a key that a map of it does not know; `place` is its full name.
        /// Other faults of a value are told by the type that reads it.
        pub fn check(&self, place: &str, value: &Json) -> Result<()> {
            match value {
                Json::Null => Ok(()),
                value => check(place, &self.schema, value),
            }
        }
    }

    fn of_type<T: JsonSchema>() -> Json {
        let settings = SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
        settings.into_generator().into_root_schema_for::<T>().to_value()
    }

    /// The fields of a map; `defaults` are those of the type around it, where that has any.
    fn below(prefix: &str, schema: &Json, defaults: Option<&Json>, keys: &mut Vec<Key>) {
        for (name, field) in fields(schema).into_iter().flatten() {
            let own = defaults.and_then(|defaults| defaults.get(name)).or(field.get("default"));
            let key = Key {
                name: format!("{prefix}{name}"),
                about: text(field),
                values: values(field),
                choices: choices(field),
                default: own.cloned(),
                schema: field.clone(),
            };
            let nested = format!("{}.", key.name);
            let section = nesting(field);
            // A map of keys that are told one by one says no more than they do.
            if section.is_none() || !own.is_some_and(Json::is_object) {
                keys.push(key);
            }
            match section {
                Some(Nesting::Map(map)) => below(&nested, map, own.filter(|own| own.is_object()), keys),
                Some(Nesting::Entries(entry)) => below(&format!("{nested}N."), entry, None, keys),
                None => {}
            }
        }
    }

    enum Nesting<'a> {
        Map(&'a Json),
        Entries(&'a Json),
    }

    /// The map, or the maps of a list, that a field holds. One that is a choice beside words is none.
    fn nesting(field: &Json) -> Option<Nesting<'_>> {
        let present: Vec<&Json> = alternatives(field).into_iter().filter(|a| !is_null(a)).collect();
        match present[..] {
            [only] if fields(only).is_some() => Some(Nesting::Map(only)),
            [only] => only.get("items").filter(|items| fields(items).is_some()).map(Nesting::Entries),
            _ => None,
        }
    }

    fn fields(schema: &Json) -> Option<&Map<String, Json>> {
        schema.get("properties").and_then(Json::as_object)
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

    /// Documentation as one line a paragraph, without the links that only rustdoc follows.
    fn text(schema: &Json) -> String {
        let about = schema.get("description").and_then(Json::as_str).unwrap_or_default();
        let paragraphs = about.split("\n\n").map(|paragraph| paragraph.replace('\n', " "));
        paragraphs.collect::<Vec<_>>().join("\n\n").replace("[`", "`").replace("`]", "`")
    }

    /// Values with a documentation of their own.
    fn choices(field: &Json) -> Vec<(String, String)> {
        let several = alternatives(field.get("items").unwrap_or(field));
        if several.len() < 2 {
            // Of one alternative the field's own documentation speaks.
            return Vec::new();
        }
        let documented = several.into_iter().filter(|a| a.get("const").is_some() || fields(a).is_some());
        documented.map(|a| (values(a), text(a))).filter(|(_, about)| !about.is_empty()).collect()
    }

    /// Values in words.
    fn values(schema: &Json) -> String {
        let mut several: Vec<String> = alternatives(schema).into_iter().flat_map(of_one).collect();
        several.dedup();
        either(&several)
    }

    /// "a, b or c".
    fn either(several: &[String]) -> String {
        match several {
            [] => "any value".into(),
            [only] => only.clone(),
            [first @ .., last] => format!("{} or {last}", first.join(", ")),
        }
    }

    fn of_one(schema: &Json) -> Vec<String> {
        if let Some(value) = schema.get("const") {
            return vec![quoted(value)];
        }
        if let Some(Json::Array(values)) = schema.get("enum") {
            return values.iter().map(quoted).collect();
        }
        let one = |name: &str| match name {
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
            Some(Json::String(name)) => vec![one(name)],
            Some(Json::Array(names)) => names.iter().filter_map(Json::as_str).map(one).collect(),
            _ => vec!["any value".into()],
        }
    }

    fn quoted(value: &Json) -> String {
        match value {
            Json::String(text) => format!("`{text}`"),
            other => format!("`{other}`"),
        }
    }

    fn list(schema: &Json) -> String {
        let bound = |key: &str| schema.get(key).and_then(Json::as_u64);
        let count = match (bound("minItems"), bound("maxItems")) {
            (Some(least), Some(most)) if least == most => format!("{least} entries"),
            (Some(least), None) => format!("at least {least} entries"),
            _ => "a list".into(),
        };
        let entry = schema.get("items").map(values).unwrap_or_else(|| "any value".into());
        format!("{count}, each {entry}")
    }

    /// A map that is a word with a value is shown as it is written.
    fn map(schema: &Json) -> String {
        let closed = schema.get("additionalProperties") == Some(&Json::Bool(false));
        match fields(schema).filter(|_| closed).map(|map| map.iter().collect::<Vec<_>>()).as_deref() {
            Some([(name, field)]) => format!("`{{{name}: ...}}` with {}", values(field)),
            _ => "a map".into(),
        }
    }

    fn limit(schema: &Json, key: &str) -> Option<f64> {
        schema.get(key).and_then(Json::as_f64)
    }

    fn range(schema: &Json) -> String {
        let limit = |key| limit(schema, key);
        let least = limit("minimum").map(|n| format!("of at least {n}"));
        let least = least.or(limit("exclusiveMinimum").map(|n| format!("above {n}")));
        let most = limit("maximum").map(|n| format!("at most {n}"));
        let most = most.or(limit("exclusiveMaximum").map(|n| format!("below {n}")));
        match (limit("minimum").zip(limit("maximum")), least, most) {
            (Some((least, most)), ..) => format!(" from {least} to {most}"),
            (_, Some(least), Some(most)) => format!(" {least} and {most}"),
            (_, Some(one), None) | (_, None, Some(one)) => format!(" {one}"),
            (_, None, None) => String::new(),
        }
    }

    /// The JSON types that a schema takes; `None` where it does not say.
    fn types(schema: &Json) -> Option<Vec<&str>> {
        match (schema.get("const").or(schema.get("enum")), schema.get("type")) {
            (_, Some(Json::String(name))) => Some(vec![name]),
            (_, Some(Json::Array(names))) => Some(names.iter().filter_map(Json::as_str).collect()),
            (Some(_), _) => Some(vec!["string"]),
            (None, _) => None,
        }
    }

    /// Whether a schema takes values of this one's type. A reader of numbers takes whole ones for any.
    fn takes(schema: &Json, value: &Json) -> bool {
        let Some(types) = types(schema) else { return true };
        types.iter().any(|name| match *name {
            "boolean" => value.is_boolean(),
            // Some are written as `5e8`.
            "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
            "number" => value.is_number(),
            "string" => value.is_string(),
            "null" => value.is_null(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            _ => true,
        })
    }

    fn check(key: &str, schema: &Json, value: &Json) -> Result<()> {
        let several = alternatives(schema);
        let fitting: Vec<&Json> = several.into_iter().filter(|a| takes(a, value) && is_tagged(a, value)).collect();
        let wrong = || Err(Error::config(key, format!("expected {}, found {}", values(schema), shown(value))));
        match fitting[..] {
            // Numbers that are not finite have no JSON.
            [] if value.is_null() && of_one(schema).iter().all(|one| one.starts_with("a number")) => {
                Err(Error::config(key, format!("expected {}, found one that is not finite", values(schema))))
            }
            // The type that reads `null` knows its meaning.
            [] if value.is_null() => Ok(()),
            [] => wrong(),
            [only] => check_one(key, only, value, &wrong),
            _ if fitting.iter().any(|a| check_one(key, a, value, &wrong).is_ok()) => Ok(()),
            _ => wrong(),
        }
    }

    /// Whether a map has the word that tells this choice from the others beside it, where it is one.
    fn is_tagged(schema: &Json, value: &Json) -> bool {
        match (tag(schema), value) {
            (Some(word), Json::Object(map)) => map.len() == 1 && map.get(word).is_some_and(|inner| !inner.is_null()),
            _ => true,
        }
    }

    /// The word of a choice that is written as a map of a word and its value.
    fn tag(schema: &Json) -> Option<&String> {
        let closed = schema.get("additionalProperties") == Some(&Json::Bool(false));
        let mut names = fields(schema).filter(|_| closed)?.keys();
        let required = schema.get("required").and_then(Json::as_array)?;
        names.next().filter(|name| names.next().is_none() && required.iter().any(|one| one == *name))
    }

    /// As [`check`], of a schema that is no choice and takes values of this type.
    fn check_one(key: &str, schema: &Json, value: &Json, wrong: &dyn Fn() -> Result<()>) -> Result<()> {
        match value {
            Json::Number(number) => {
                let number = number.as_f64().unwrap_or(f64::NAN);
                let limit = |key| limit(schema, key);
                let fits = limit("minimum").is_none_or(|least| number >= least)
                    && limit("maximum").is_none_or(|most| number <= most)
                    && limit("exclusiveMinimum").is_none_or(|least| number > least)
                    && limit("exclusiveMaximum").is_none_or(|most| number < most);
                if fits { Ok(()) } else { wrong() }
            }
            Json::String(_) => {
                let fits = schema.get("const").is_none_or(|word| word == value)
                    && schema.get("enum").and_then(Json::as_array).is_none_or(|words| words.contains(value));
                if fits { Ok(()) } else { wrong() }
            }
            Json::Array(items) => {
                let count = |key: &str| schema.get(key).and_then(Json::as_u64);
                let fits = count("minItems").is_none_or(|least| items.len() as u64 >= least)
                    && count("maxItems").is_none_or(|most| items.len() as u64 <= most);
                if !fits {
                    return wrong();
                }
                let entry = schema.get("items");
                let entries = entry.map(|entry| items.iter().enumerate().map(move |(i, item)| (i, entry, item)));
                entries.into_iter().flatten().try_for_each(|(i, entry, item)| check(&format!("{key}.{i}"), entry, item))
            }
            Json::Object(map) => {
                let Some(fields) = fields(schema) else { return Ok(()) };
                let below = |name: &str| if key.is_empty() { name.to_string() } else { format!("{key}.{name}") };
                if schema.get("additionalProperties") == Some(&Json::Bool(false))
                    && let Some(name) = map.keys().find(|name| !fields.contains_key(*name))
                {
                    let known = fields.keys().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
                    return Err(Error::config(below(name), format!("unknown key; known keys: {known}")));
                }
                fields.iter().try_for_each(|(name, field)| match map.get(name) {
                    Some(value) => check(&below(name), field, value),
                    None => Ok(()),
                })
            }
            Json::Null | Json::Bool(_) => Ok(()),
        }
    }

    /// A value that was found, for messages: texts apart from numbers, and not longer than a line.
    fn shown(value: &Json) -> String {
        let text = match value {
            Json::String(text) => format!("`{text}`"),
            other => other.to_string(),
        };
        match text.char_indices().nth(80) {
            Some((end, _)) => format!("{}...", &text[..end]),
            None => text,
        }
    }

    /// The problem of the value at `key`, a dotted path below `T`, in the words of its documentation; `None` where
    /// nothing is known of it. For the words of a parser that knows types but no configuration.
    pub fn expectation<T: JsonSchema + Serialize + Default>(key: &str, tree: &Json) -> Option<String> {
        let parts: Vec<&str> = key.split('.').collect();
        let general: Vec<&str> =
            parts.iter().map(|part| if part.parse::<usize>().is_ok() { "N" } else { part }).collect();
        let keys = of::<T>();
        // The entries of a plain list are told with the list.
        let end = (1..=parts.len()).rev().find(|end| keys.iter().any(|key| key.name == general[..*end].join(".")))?;
        let values = &keys.iter().find(|key| key.name == general[..end].join("."))?.values;
        let found = parts[..end].iter().try_fold(tree, |tree, part| match part.parse::<usize>() {
            Ok(index) if tree.is_array() => tree.get(index),
            _ => tree.get(part),
        })?;
        Some(format!("expected {values}, found {}", shown(found)))
    }
}

#[cfg(all(test, feature = "schema"))]
#[allow(clippy::unwrap_used)]
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
    }

    #[derive(Clone, Default, serde::Serialize, schemars::JsonSchema)]
    #[serde(default)]
    struct Inner {
        /// From within.
        #[schemars(range(max = 4))]
        depth: u64,
    }

    /// A whole.
    #[derive(Clone, serde::Serialize, schemars::JsonSchema)]
    #[serde(default)]
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
        /// Of few digits.
        short: f32,
        /// What is missing.
        missing: Missing,
        inner: Inner,
        /// Filters.
        filters: Vec<Inner>,
        maybe: Option<Inner>,
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
            }
        }
    }

    fn key(name: &str) -> Key {
        of::<Outer>().into_iter().find(|key| key.name == name).unwrap_or_else(|| panic!("no {name}"))
    }

    #[test]
    fn types_tell_meanings_values_and_defaults() {
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
        assert_eq!(missing.values, "`skip` or `{value: ...}` with a number");
        assert_eq!(missing.choices[0], ("`skip`".into(), "Leave it out.".into()));
        assert_eq!(missing.choices[1].1, "Take this.");
        assert_eq!(serde_json::json!(Missing::Value(1.0)), serde_json::json!({"value": 1.0}));
    }

    #[test]
    fn maps_are_told_by_their_keys() {
        let names: Vec<String> = of::<Outer>().into_iter().map(|key| key.name).collect();
        assert!(names.contains(&"filters.N.depth".into()) && names.contains(&"maybe".into()), "{names:?}");
        assert!(!names.contains(&"inner".into()), "{names:?}");
        assert_eq!(key("inner.depth").default, Some(2.into()));
        assert_eq!(key("inner.depth").values, "a whole number from 0 to 4");
        assert_eq!(key("maybe.depth").about, "From within.");
    }

    #[test]
    fn values_are_held_to_the_same_ranges() {
        let told = |change: fn(&mut Outer)| {
            let mut outer = Outer::default();
            change(&mut outer);
            check_ranges("section", &outer).err().map(|e| e.to_string()).unwrap_or_default()
        };
        assert_eq!(told(|_| {}), "");
        let count = told(|o| o.count = 0);
        assert!(count.contains("section.count") && count.contains("at least 1, found 0"), "{count}");
        assert!(told(|o| o.share = 1.0).contains("section.share"));
        assert!(told(|o| o.share = f64::NAN).contains("not finite"));
        assert!(told(|o| o.rates[1] = -1.0).contains("section.rates"));
        assert!(told(|o| o.bound = Some(0.0)).contains("section.bound"));
        assert!(told(|o| o.inner.depth = 5).contains("section.inner.depth"));
        assert!(told(|o| o.filters.push(Inner { depth: 9 })).contains("section.filters"));
        assert!(told(|o| o.maybe = Some(Inner { depth: 9 })).contains("section.maybe.depth"));
    }

    #[test]
    fn a_value_is_checked_before_its_type_reads_it() {
        let told =
            |name: &str, value: Json| key(name).check(name, &value).err().map(|e| e.to_string()).unwrap_or_default();
        assert_eq!(told("missing", "skip".into()) + &told("missing", serde_json::json!({"value": 1})), "");
        let word = told("missing", "leave".into());
        assert!(word.contains("expected `skip` or `{value: ...}` with a number, found `leave`"), "{word}");
        assert!(told("count", "many".into()).contains("a whole number of at least 1, found `many`"));
        assert!(told("inner.depth", 5.into()).contains("`inner.depth`"));
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
            let told = told(name, value);
            assert!(told.contains(part), "no {part} in: {told}");
        }
        assert_eq!(told("share", 0.into()) + &told("rates", serde_json::json!([0, 1])), "");
        assert_eq!(told("filters", serde_json::json!([{"depth": 3}, {}])), "");
        assert!(told("share", "9".repeat(300).into()).len() < 200);
        assert_eq!(told("bound", Json::Null), "");
    }

    #[test]
    fn what_a_parser_refuses_is_told_in_the_words_of_the_key() {
        let tree = serde_json::json!({"count": "many", "rates": [1, "x"], "filters": [{"depth": -1}], "more": 1});
        let told = |key: &str| expectation::<Outer>(key, &tree);
        assert_eq!(told("count").unwrap(), "expected a whole number of at least 1, found `many`");
        assert_eq!(told("rates.1").unwrap(), "expected 2 entries, each a number of at least 0, found [1,\"x\"]");
        assert_eq!(told("filters.0.depth").unwrap(), "expected a whole number from 0 to 4, found -1");
        assert_eq!(told("more"), None);
    }

    #[test]
    fn of_defaults_alone_types_are_told() {
        let defaults = serde_json::json!({"gain": 1.5, "on": true}).as_object().unwrap().clone();
        let keys = undescribed(defaults);
        assert_eq!((keys[0].name.as_str(), keys[0].values.as_str()), ("gain", "a number"));
        assert_eq!(keys[1].default, Some(true.into()));
    }
}
