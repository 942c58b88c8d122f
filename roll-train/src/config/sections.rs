//! Every key of a configuration, section by section.

use roll_core::{Key, Kind, Registry, keys};

use super::declared::DECLARED;
use super::schema::{KEYS, general};
use super::{RunConfig, TrainingConfig};
use roll_core::nearest;

/// The keys of a section, or the options of one component.
#[derive(Clone, Debug, PartialEq)]
pub struct Section {
    /// The section in a configuration: `training`, `reward`; empty for the top level.
    pub name: String,
    /// The component, if the keys are the options of one.
    pub component: Option<(Kind, &'static str)>,
    /// Meaning of the section.
    pub about: String,
    /// Keys of the section, with their full names: `training.betas`, `reward.N.align`.
    pub keys: Vec<Key>,
}

impl Section {
    /// Title of the section on a page: `training`, "reward `insightface`".
    pub fn title(&self) -> String {
        match self.component {
            Some((kind, name)) => format!("{kind} `{name}`"),
            None if self.name.is_empty() => "top level".into(),
            None => format!("section `{}`", self.name),
        }
    }
}

/// All sections: the top level, the typed sections, and the options of every component of `registry`, by kind and
/// name.
pub fn sections(registry: &Registry) -> Vec<Section> {
    // The sections that are structs, with their meaning.
    let mut typed = vec![("training", keys::about::<TrainingConfig>())];
    typed.extend(DECLARED.iter().map(|section| (section.name, (section.about)())));
    let is_below = |key: &Key, section: &str| key.name.split('.').next() == Some(section);
    let is_top_level = |key: &Key| typed.iter().all(|(section, _)| !is_below(key, section));
    let mut sections = vec![Section {
        name: String::new(),
        component: None,
        about: keys::about::<RunConfig>(),
        keys: KEYS.iter().filter(|key| is_top_level(key)).cloned().collect(),
    }];
    for (name, about) in typed {
        let keys = KEYS.iter().filter(|key| is_below(key, name)).cloned().collect();
        sections.push(Section { name: name.into(), component: None, about, keys });
    }
    for registration in registry.entries() {
        let kind = registration.factory.kind();
        let prefix = prefix(kind);
        let with_full_name = |key: Key| Key { name: format!("{prefix}{}", key.name), ..key };
        sections.push(Section {
            name: kind.section().into(),
            component: Some((kind, registration.name)),
            about: format!("{}.", registration.summary),
            keys: registration.keys().into_iter().map(with_full_name).collect(),
        });
    }
    sections
}

/// Prefix of the options of a component. Rewards are a list.
fn prefix(kind: Kind) -> String {
    match kind {
        Kind::Reward => format!("{}.N.", kind.section()),
        _ => format!("{}.", kind.section()),
    }
}

/// The part of `sections` that `name` selects: a section (`training`, `reward`), a component (`insightface`), a key and
/// the keys below it (`training.betas`, `reward.0.align`), or the last part of keys (`lora_rank`). The error is
/// the nearest known name, for a name that selects nothing.
pub fn select_sections(sections: Vec<Section>, name: &str) -> Result<Vec<Section>, Option<String>> {
    let name = general(name);
    let is_component = |section: &Section| section.component.is_some_and(|(_, component)| component == name);
    let is_section = |section: &Section| !name.is_empty() && section.name == name;
    let section_conditions: [&dyn Fn(&Section) -> bool; 2] = [&is_component, &is_section];
    for is_selected in section_conditions {
        if sections.iter().any(is_selected) {
            return Ok(sections.into_iter().filter(is_selected).collect());
        }
    }
    let prefix = format!("{name}.");
    let suffix = format!(".{name}");
    let is_key_or_below = |key: &Key| key.name == name || key.name.starts_with(&prefix);
    // A single reward needs no index.
    let is_without_index = |key: &Key| key.name.replacen("reward.N.", "reward.", 1) == name;
    let has_last_name = |key: &Key| key.name.ends_with(&suffix);
    let key_conditions: [&dyn Fn(&Key) -> bool; 3] = [&is_key_or_below, &is_without_index, &has_last_name];
    for is_selected in key_conditions {
        let mut selected = Vec::new();
        for section in &sections {
            let keys: Vec<Key> = section.keys.iter().filter(|key| is_selected(key)).cloned().collect();
            if !keys.is_empty() {
                selected.push(Section { keys, ..section.clone() });
            }
        }
        if !selected.is_empty() {
            return Ok(selected);
        }
    }
    let components = sections.iter().filter_map(|section| section.component.map(|(_, name)| name));
    let names = sections.iter().map(|section| section.name.as_str()).filter(|name| !name.is_empty());
    let keys = sections.iter().flat_map(|section| &section.keys).map(|key| key.name.as_str());
    let last_names = keys.clone().filter_map(|key| key.rsplit('.').next());
    Err(nearest(&name, components.chain(names).chain(keys).chain(last_names)).map(String::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(name: &str) -> Vec<String> {
        let sections = sections(&Registry::linked().unwrap());
        select_sections(sections, name).unwrap().into_iter().flat_map(|s| s.keys).map(|key| key.name).collect()
    }

    #[test]
    fn finds_sections_components_keys_and_last_parts_of_keys() {
        assert!(found("training").contains(&"training.lr_scheduler_kwargs.power".to_string()));
        assert_eq!(found("training.betas"), ["training.betas"]);
        assert_eq!(found("betas"), ["training.betas"]);
        assert!(found("insightface").contains(&"reward.N.align".to_string()));
        for key in ["reward.0.align", "reward[1].align", "reward.align"] {
            assert_eq!(found(key), ["reward.N.align"]);
        }
        for key in ["lora_rank", "model.lora_rank"] {
            let found = found(key);
            assert!(!found.is_empty() && found.iter().all(|key| key == "model.lora_rank"), "{found:?}");
        }
        let found = found("env");
        assert!(!found.is_empty() && found.iter().all(|key| key.starts_with("env.")), "{found:?}");
    }

    #[test]
    fn suggests_the_nearest_name() {
        let near = |name| select_sections(sections(&Registry::linked().unwrap()), name).unwrap_err();
        assert_eq!(near("training.learnin_rate").as_deref(), Some("training.learning_rate"));
        assert_eq!(near("insigthface").as_deref(), Some("insightface"));
        assert_eq!(near("qqqqqqqqqqqqqqq"), None);
    }

    #[test]
    fn typed_sections_list_every_key_of_the_defaults() {
        let sections = sections(&Registry::linked().unwrap());
        let keys: Vec<&str> = sections.iter().flat_map(|s| &s.keys).map(|key| key.name.as_str()).collect();
        let mut leaves = Vec::new();
        below("", &super::super::schema::DEFAULTS, &mut leaves);
        for leaf in leaves {
            assert!(keys.contains(&leaf.as_str()), "{leaf} is in no section: {keys:?}");
        }
    }

    fn below(prefix: &str, value: &serde_json::Value, leaves: &mut Vec<String>) {
        for (name, value) in value.as_object().into_iter().flatten() {
            match value.as_object() {
                Some(map) if !map.is_empty() => below(&format!("{prefix}{name}."), value, leaves),
                _ => leaves.push(format!("{prefix}{name}")),
            }
        }
    }
}
