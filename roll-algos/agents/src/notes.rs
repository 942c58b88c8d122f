//! Notes on configuration keys without effect, for algorithms that bring their own data instead of clips.

use roll_core::{ConfiguredOptions, Error, IdleKeys, Kind, OptionNotes, Result, When};

const OWN_DATA: &str = "the algorithm brings its own data, and makes no videos";

/// The section `data` of an algorithm that brings its own data.
pub const DATA: IdleKeys = IdleKeys { keys: &["data.*"], when: When::Always, because: OWN_DATA };

/// `sample_steps`, unless it is 0: an algorithm that brings its own data makes no sample videos.
pub const VIDEOS: IdleKeys =
    IdleKeys { keys: &["sample_steps"], when: When::IsNot("sample_steps", &["0"]), because: OWN_DATA };

/// Fails if the configuration has clips to train on (`data.metadata`) or to evaluate (`evaluation.metadata`). `reasons`
/// has a sentence for each of the two keys: where the algorithm's own data come from.
pub fn refuse_clips(config: &ConfiguredOptions<'_>, reasons: [&str; 2]) -> Result<()> {
    for (key, reason) in ["data.metadata", "evaluation.metadata"].into_iter().zip(reasons) {
        if let Some(value) = config.value(key) {
            let found = value.as_str().map_or_else(|| value.to_string(), String::from);
            return Err(Error::config(key, format!("`{found}` would not be read: {reason}; leave this key out")));
        }
    }
    Ok(())
}

/// Refuses clips for `sft`.
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
