//! Sections of a configuration that tasks declare, each by a type whose fields are its keys.

use std::sync::LazyLock;

use roll_core::{Error, Key, Kind, Result, inventory, keys};
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value as Json;

/// The keys of a declared section. The section is part of every configuration of a program in which its [`SectionType`]
/// is submitted with `inventory::submit!`.
pub trait DeclaredSection: Serialize + DeserializeOwned + Default + JsonSchema + 'static {
    /// Name of the section in the configuration.
    const NAME: &'static str;

    /// Keys of the section that hold lists of components, each with the kind of the components.
    const COMPONENTS: &'static [(&'static str, Kind)] = &[];

    /// Replaces abbreviated values of the section by their full form.
    fn normalize(_section: &mut Json) {}

    /// Fails if values exclude one another, which types cannot express. The error names the key.
    fn check_values(&self) -> Result<()> {
        Ok(())
    }
}

/// A declared section without its type.
pub struct SectionType {
    /// Name of the section in the configuration.
    pub(super) name: &'static str,
    /// As [`DeclaredSection::COMPONENTS`].
    pub(super) components: &'static [(&'static str, Kind)],
    /// Meaning of the section.
    pub(super) about: fn() -> String,
    /// Keys of the section, without its name.
    pub(super) keys: fn() -> Vec<Key>,
    /// The JSON schema of the section.
    pub(super) schema: fn() -> Json,
    /// The defaults of all keys.
    pub(super) default: fn() -> Json,
    /// As [`DeclaredSection::normalize`].
    pub(super) normalize: fn(&mut Json),
    /// Reads and checks a value of the section, and returns it with the defaults of keys that it does not have.
    pub(super) read: fn(&Json) -> Result<Json>,
}

inventory::collect!(SectionType);

/// All declared sections, by name.
pub(super) static DECLARED: LazyLock<Vec<&'static SectionType>> = LazyLock::new(|| {
    let mut sections: Vec<&SectionType> = inventory::iter::<SectionType>.into_iter().collect();
    sections.sort_by_key(|section| section.name);
    sections
});

impl SectionType {
    /// The section of a type.
    pub const fn of<S: DeclaredSection>() -> Self {
        Self {
            name: S::NAME,
            components: S::COMPONENTS,
            about: keys::about::<S>,
            keys: keys::of::<S>,
            schema: keys::schema_of::<S>,
            default: default::<S>,
            normalize: S::normalize,
            read: read_json::<S>,
        }
    }

    /// The keys of the section with their full names.
    pub(super) fn full_keys(&self) -> impl Iterator<Item = Key> + use<> {
        let name = self.name;
        (self.keys)().into_iter().map(move |key| Key { name: format!("{name}.{}", key.name), ..key })
    }
}

fn default<S: DeclaredSection>() -> Json {
    serde_json::to_value(S::default()).unwrap_or_default()
}

/// As [`SectionType::read`].
fn read_json<S: DeclaredSection>(value: &Json) -> Result<Json> {
    let section: S = read(value)?;
    section.check_values()?;
    serde_json::to_value(section).map_err(|e| Error::config(S::NAME, e.to_string()))
}

/// Reads a section. The error names the key.
pub(super) fn read<S: DeclaredSection>(value: &Json) -> Result<S> {
    serde_path_to_error::deserialize(value).map_err(|e| {
        let key = e.path().to_string().replace('[', ".").replace(']', "");
        let key = if key == "." { S::NAME.to_string() } else { format!("{}.{key}", S::NAME) };
        Error::config(key, e.inner().to_string())
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(default)]
    struct Extra {
        list: Vec<u64>,
        limit: u64,
    }

    impl DeclaredSection for Extra {
        const NAME: &'static str = "extra";

        fn check_values(&self) -> Result<()> {
            match self.list.iter().find(|value| **value > self.limit) {
                Some(value) => Err(Error::config("extra.list", format!("{value} is above `extra.limit`"))),
                None => Ok(()),
            }
        }
    }

    #[test]
    fn a_section_is_read_with_its_defaults_and_errors_name_the_full_key() {
        let section = SectionType::of::<Extra>();
        assert_eq!((section.read)(&json!({"limit": 3})).unwrap(), json!({"list": [], "limit": 3}));
        assert_eq!(section.full_keys().map(|key| key.name).collect::<Vec<_>>(), ["extra.list", "extra.limit"]);
        let message = |value: Json| (section.read)(&value).unwrap_err().to_string();
        assert!(message(json!({"list": [1, "a"]})).contains("`extra.list.1`"));
        assert!(message(json!(7)).contains("`extra`"));
        assert!(message(json!({"list": [5], "limit": 3})).contains("5 is above `extra.limit`"));
    }

    #[test]
    fn sections_are_sorted_by_name() {
        assert_eq!(DECLARED.iter().map(|section| section.name).collect::<Vec<_>>(), ["data", "evaluation"]);
    }
}
