//! Keys without effect that several algorithms know of.

use roll_core::{ConfiguredOptions, Kind, OptionNotes, Result};

/// Of an algorithm that brings its own data: the section `data`, and sample videos.
pub fn own_data(said: &ConfiguredOptions<'_>) -> Vec<String> {
    let because = "the algorithm brings its own data, and makes no videos";
    let mut keys = said.changed_below("data");
    // 0 asks for no videos, and there are none.
    if said.changed("sample_steps") && said.value("sample_steps").is_some_and(|n| n.as_u64() != Some(0)) {
        keys.push("sample_steps".into());
    }
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    said.idle(&keys, because).into_iter().collect()
}

/// Of an algorithm on diffusion models: two keys for one shift.
pub fn shift(said: &ConfiguredOptions<'_>) -> Option<String> {
    said.value("algo.shift")?;
    said.idle(&["model.shift"], "`algo.shift` takes its place")
}

/// Of an algorithm whose samples are computed one by one: clips of a bucket are cut and ordered, and not put together.
pub fn buckets(said: &ConfiguredOptions<'_>, algorithm: &str) -> Option<String> {
    let named = said.named(&["data.bucket_ratios", "data.bucket_frames"])?;
    Some(format!(
        "{named} an effect on the size, length and order of clips alone: `{algorithm}` computes one sample at a time"
    ))
}

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Algorithm, name: "sft", notes: |said| Ok(own_data(said)) }
}

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Algorithm, name: "flow_matching", notes: flow_matching }
}

fn flow_matching(said: &ConfiguredOptions<'_>) -> Result<Vec<String>> {
    let logit = match said.is("algo.timestep_sampling", "logit_normal") {
        true => None,
        false => said.idle(&["algo.logit_mean", "algo.logit_std"], "`algo.timestep_sampling` is not `logit_normal`"),
    };
    Ok([shift(said), logit].into_iter().flatten().collect())
}
