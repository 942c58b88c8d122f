//! Keys without effect on algorithms that bring their own data.

use roll_core::{ConfiguredOptions, Error, IdleKeys, Kind, OptionNotes, Result, When};

const OWN_DATA: &str = "the algorithm brings its own data, and makes no videos";

/// The section `data` of an algorithm that brings its own data.
pub const DATA: IdleKeys = IdleKeys { keys: &["data.*"], when: When::Always, because: OWN_DATA };

/// Sample videos of such an algorithm; 0 asks for none.
pub const VIDEOS: IdleKeys =
    IdleKeys { keys: &["sample_steps"], when: When::IsNot("sample_steps", &["0"]), because: OWN_DATA };

/// Fails if an algorithm that brings its own data is given clips to train on or to evaluate; the reasons say where its
/// data come from.
pub fn refuse_clips(config: &ConfiguredOptions<'_>, reasons: [&str; 2]) -> Result<()> {
    for (key, reason) in ["data.metadata", "evaluation.metadata"].into_iter().zip(reasons) {
        if let Some(value) = config.value(key) {
            let found = value.as_str().map_or_else(|| value.to_string(), String::from);
            return Err(Error::config(key, format!("`{found}` would not be read: {reason}; leave this key out")));
        }
    }
    Ok(())
}

fn conversations(config: &ConfiguredOptions<'_>) -> Result<Vec<String>> {
    let reasons = [
        "conversations to train on are named by `algo.data`",
        "conversations to validate on are named by `algo.val_data`",
    ];
    refuse_clips(config, reasons).map(|()| Vec::new())
}

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Algorithm, name: "sft", idle: &[DATA, VIDEOS], more: Some(conversations) }
}
