//! Notes on keys without effect that several algorithms on videos share, and the notes of `flow_matching`.

use roll_core::{ConfiguredOptions, IdleKeys, Kind, OptionNotes, Result, When};

use crate::kl_reference::NO_KL;

/// `model.shift` where `algo.shift` is set too.
pub const SHIFT: IdleKeys = IdleKeys {
    keys: &["model.shift"],
    when: When::IsNot("algo.shift", &["null"]),
    because: "`algo.shift` takes its place",
};

/// Options of guidance where guidance is off.
pub const GUIDANCE: IdleKeys = IdleKeys {
    keys: &["algo.negative_prompt", "algo.guidance_gradient"],
    when: When::Is("algo.guidance_scale", &["1"]),
    because: "`algo.guidance_scale` is 1, no guidance",
};

/// The notes of the policy gradients: on buckets, on the KL's reference, on evaluations and on the number of rewards.
pub fn policy_gradient(config: &ConfiguredOptions<'_>) -> Result<Vec<String>> {
    let mut notes = buckets(config)?;
    notes.extend(kl_reference(config));
    let mut note_idle = |keys, because| notes.extend(config.idle(&[IdleKeys { keys, when: When::Always, because }]));
    if evaluates_nothing(config) {
        let because = "no clip is evaluated; `evaluation.metadata` and `evaluation.train_samples` name some";
        note_idle(&["algo.evaluation_sampler"], because);
    }
    if config.value("reward").and_then(|list| list.as_array()).is_some_and(|list| list.len() == 1) {
        note_idle(&["algo.several_rewards"], "there is one reward");
    }
    Ok(notes)
}

/// The note on `algo.kl_reference` in a run that starts from a LoRA and computes no KL.
pub fn kl_reference(config: &ConfiguredOptions<'_>) -> Vec<String> {
    // Without an initial LoRA, the table of the algorithm notes the key already.
    let starts_from_lora = config.value("model.lora_checkpoint").is_some();
    if starts_from_lora && evaluates_nothing(config) { config.idle(&[NO_KL]) } else { Vec::new() }
}

/// Whether neither clips nor prompts are evaluated.
fn evaluates_nothing(config: &ConfiguredOptions<'_>) -> bool {
    let samples = config.value("evaluation.train_samples").and_then(|value| value.as_f64()).unwrap_or(0.0);
    let prompts = config.value("evaluation.prompts").and_then(|list| list.as_array()).map_or(0, Vec::len);
    config.value("evaluation.metadata").is_none() && samples == 0.0 && prompts == 0
}

/// The note on buckets under an algorithm that computes one sample at a time. Under such an algorithm, buckets decide
/// size, length and order of the clips, but no batches.
pub fn buckets(config: &ConfiguredOptions<'_>) -> Result<Vec<String>> {
    let algorithm = config.value("algo.name").and_then(|name| name.as_str()).unwrap_or("the algorithm");
    // Subject and verb of the sentence: "`data.bucket_frames: [33]` has".
    let beginning = config.named(&["data.bucket_ratios", "data.bucket_frames"]);
    let note = |beginning| {
        format!(
            "{beginning} an effect on the size, length and order of clips alone: `{algorithm}` computes one sample at \
             a time"
        )
    };
    Ok(beginning.map(note).into_iter().collect())
}

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Algorithm, name: "flow_matching", idle: FLOW_MATCHING, more: None }
}

/// Keys without effect under a condition on one key, for `flow_matching`.
const FLOW_MATCHING: &[IdleKeys] = &[
    SHIFT,
    GUIDANCE,
    IdleKeys {
        keys: &["algo.logit_mean", "algo.logit_std"],
        when: When::IsNot("algo.timestep_sampling", &["logit_normal"]),
        because: "`algo.timestep_sampling` is not `logit_normal`",
    },
];
