//! The options of a plugin's component: their description, and the check of configured values against it.

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

#[cfg(feature = "host")]
use crate::{Error, Result};
use crate::{Key, OptionKind, Options};

/// An option of a component, as the plugin describes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OptionSpec {
    /// Key of the option.
    pub name: String,
    /// Type of the value.
    pub kind: OptionKind,
    /// Default of the value.
    pub default: Json,
    /// Effect of the option; may be empty.
    #[serde(default)]
    pub about: String,
}

impl OptionSpec {
    /// The options of a component: one for each default, with the description in `keys` if there is one.
    pub(super) fn from_defaults(defaults: Options, keys: &[Key]) -> Vec<Self> {
        let about = |name: &str| keys.iter().find(|key| key.name == name).map(|key| key.about.clone());
        let spec = |(name, default): (String, Json)| Self {
            about: about(&name).unwrap_or_default(),
            name,
            kind: OptionKind::of(&default),
            default,
        };
        defaults.into_iter().map(spec).collect()
    }

    /// The option as a key of the configuration.
    #[cfg(feature = "host")]
    pub(super) fn key(&self) -> Key {
        Key {
            name: self.name.clone(),
            about: self.about.clone(),
            values: self.kind.words().into(),
            choices: Vec::new(),
            default: Some(self.default.clone()),
            schema: Json::Null,
        }
    }

    /// The defaults by name.
    #[cfg(feature = "host")]
    pub(super) fn defaults(specs: &[Self]) -> Options {
        specs.iter().map(|s| (s.name.clone(), s.default.clone())).collect()
    }
}

/// Adds the defaults of missing options to `options`. Fails on unknown options and on values of the wrong kind.
/// `section` is the section of the configuration, for error messages.
#[cfg(feature = "host")]
pub(super) fn complete(section: &str, specs: &[OptionSpec], options: &Options) -> Result<Options> {
    for (name, value) in options {
        let Some(spec) = specs.iter().find(|s| s.name == *name) else {
            let near = crate::nearest(name, specs.iter().map(|s| s.name.as_str()));
            let hint = near.map(|n| format!("; did you mean `{n}`?")).unwrap_or_default();
            return Err(Error::config(format!("{section}.{name}"), format!("unknown key{hint}")));
        };
        if !spec.kind.admits(value) {
            let problem = format!("expected {}, found {value}", spec.kind.words());
            return Err(Error::config(format!("{section}.{name}"), problem));
        }
    }
    let mut whole = OptionSpec::defaults(specs);
    whole.extend(options.clone());
    Ok(whole)
}
