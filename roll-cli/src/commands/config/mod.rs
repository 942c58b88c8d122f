//! `roll config`: the resolved configuration, the reference of every key, and a configuration to begin with.
//!
//! `reference` and `template` are generated from the doc comments of the options, so neither is written by hand.

mod reference;
mod template;

use roll_core::{Error, Result};
use roll_train::config::{sections, select_sections};

pub use reference::{print_section, wrapped};
pub use template::inline;

use crate::args::{Config, KeyValue, ReferenceFormat};
use crate::configuration::Configuration;

/// Prints the reference, a template, or the resolved configuration.
pub fn config(args: Config) -> Result<()> {
    let steps = args.steps.map(|n| KeyValue { key: "steps", value: n.to_string(), origin: "--steps" });
    let configuration = Configuration::read(&args.config, steps.as_slice())?;
    let registry = configuration.registry()?;
    if let Some(key) = &args.reference {
        let all = sections(&registry);
        let wanted = match key.as_str() {
            "" => all,
            key => select_sections(all, key).map_err(|near| unknown(key, near))?,
        };
        match args.format {
            ReferenceFormat::Text => reference::print(&wanted),
            ReferenceFormat::Markdown => reference::print_markdown(&wanted),
        }
        return Ok(());
    }
    let loaded = configuration.or_demo()?.load(&registry)?;
    if args.template {
        println!("{}", template::template(&loaded, &sections(&registry))?.trim_end());
        return Ok(());
    }
    // One line per value, which together are a configuration that `--config` takes.
    for entry in loaded.listing()? {
        println!("{:<40} {:<14} # {}", entry.key + ":", entry.value, entry.origin);
    }
    Ok(())
}

/// The error about a `key` that the reference does not have. `near` is a similar one.
fn unknown(key: &str, near: Option<String>) -> Error {
    let hint = match near {
        Some(near) => format!("did you mean `{near}`?"),
        None => "`roll config --reference` has all of them".into(),
    };
    Error::config(key, format!("neither a key, nor a section, nor a component; {hint}"))
}
