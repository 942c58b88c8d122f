//! Options of Reward-FL that have no effect in combination with others.

use roll_core::{ConfiguredOptions, IdleKeys, Kind, OptionNotes, Result, When};

use crate::kl_reference::KL_REFERENCE;
use crate::notes::{GUIDANCE, SHIFT, buckets, kl_reference};

use super::NAME;

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Algorithm, name: NAME, idle: IDLE, more: Some(notes) }
}

/// Keys without effect under a condition on one key.
const IDLE: &[IdleKeys] = &[
    SHIFT,
    no_early_stop(When::IsNot("algo.trained_steps.renoised", &["null"])),
    no_early_stop(When::IsNot("algo.trained_steps.direct", &["null"])),
    IdleKeys {
        keys: &["algo.gradient_split_every"],
        when: When::Is("algo.kl_weight", &["0"]),
        because: "`algo.kl_weight` is 0, so that there is one gradient",
    },
    GUIDANCE,
    KL_REFERENCE,
];

/// `algo.early_stop` where the trained steps begin at noised copies of the finished latents.
const fn no_early_stop(when: When) -> IdleKeys {
    let because = "`algo.trained_steps` noises finished latents, and goes on to the data";
    IdleKeys { keys: &["algo.early_stop"], when, because }
}

/// The notes that depend on several keys.
fn notes(config: &ConfiguredOptions<'_>) -> Result<Vec<String>> {
    let number = |key: &str| config.value(key).and_then(|value| value.as_u64());
    let listed = config.value("algo.timesteps").and_then(|list| list.as_array()).map(|list| list.len() as u64);
    let steps = listed.or_else(|| number("algo.num_inference_steps"));
    let mut notes = buckets(config)?;
    notes.extend(kl_reference(config));
    if let (Some(last), Some(steps)) = (number("algo.final_timestep"), steps)
        && last + 1 >= steps
    {
        let because = "`algo.final_timestep` is the last step";
        notes.extend(config.idle(&[IdleKeys { keys: &["algo.early_stop"], when: When::Always, because }]));
    }
    Ok(notes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::Options;
    use serde_json::json;

    use super::*;
    use crate::reward_fl::RewardFlConfig;

    #[test]
    fn idle_shift_buckets_and_early_stop_are_noted() {
        let defaults: Options = json!({
            "algo": RewardFlConfig::default(), "model": {"shift": 5.0}, "data": {"bucket_ratios": []},
        })
        .as_object()
        .unwrap()
        .clone();
        let noted = |change: &dyn Fn(&mut Options)| {
            let mut config = defaults.clone();
            change(&mut config);
            OptionNotes::of(Kind::Algorithm, NAME, &ConfiguredOptions::new(&config, &defaults)).unwrap().join("; ")
        };
        assert_eq!(noted(&|_| ()), "");
        assert_eq!(noted(&|c| c["algo"]["shift"] = 3.into()), "", "one shift is one");
        let both = noted(&|c| (c["algo"]["shift"], c["model"]["shift"]) = (3.into(), 4.into()));
        assert_eq!(both, "`model.shift: 4` has no effect: `algo.shift` takes its place");
        assert!(noted(&|c| c["data"]["bucket_ratios"] = json!([1.0])).contains("one sample at a time"));
        let early = noted(&|c| c["algo"]["early_stop"] = "predict_x0".into());
        assert!(early.contains("`algo.early_stop: predict_x0` has no effect"), "{early}");
        let stops = noted(&|c| {
            (c["algo"]["early_stop"], c["algo"]["final_timestep"]) = ("predict_x0".into(), 6.into());
        });
        assert_eq!(stops, "");
        let renoised = noted(&|c| {
            (c["algo"]["early_stop"], c["algo"]["final_timestep"]) = ("predict_x0".into(), 6.into());
            c["algo"]["trained_steps"] = json!({"renoised": 2});
        });
        assert!(renoised.contains("`algo.early_stop: predict_x0` has no effect"), "{renoised}");
        let direct = noted(&|c| {
            (c["algo"]["early_stop"], c["algo"]["final_timestep"]) = ("predict_x0".into(), 6.into());
            c["algo"]["trained_steps"] = json!({"direct": {}});
        });
        assert_eq!(direct, renoised);
    }

    #[test]
    fn the_kl_reference_has_no_effect_without_an_initial_lora() {
        let defaults: Options =
            json!({"algo": RewardFlConfig::default(), "model": {"lora_checkpoint": null}}).as_object().unwrap().clone();
        let noted = |reference: &str, checkpoint: serde_json::Value| {
            let mut config = defaults.clone();
            (config["algo"]["kl_reference"], config["model"]["lora_checkpoint"]) = (reference.into(), checkpoint);
            OptionNotes::of(Kind::Algorithm, NAME, &ConfiguredOptions::new(&config, &defaults)).unwrap().join("; ")
        };
        let note = noted("base", json!(null));
        assert!(note.contains("`algo.kl_reference: base` has no effect"), "{note}");
        assert_eq!(noted("base", "lora.safetensors".into()) + &noted("start", json!(null)), "");
        let without = |evaluation: serde_json::Value| {
            let mut config = defaults.clone();
            (config["algo"]["kl_reference"], config["algo"]["kl_weight"]) = ("base".into(), 0.0.into());
            config["model"]["lora_checkpoint"] = "lora.safetensors".into();
            config.insert("evaluation".into(), evaluation);
            OptionNotes::of(Kind::Algorithm, NAME, &ConfiguredOptions::new(&config, &defaults)).unwrap().join("; ")
        };
        let note = without(json!({"train_samples": 0}));
        assert!(note.contains("`algo.kl_weight` is 0 and no clip is evaluated"), "{note}");
        assert_eq!(without(json!({"train_samples": 2})) + &without(json!({"prompts": ["a cat"]})), "");
    }

    #[test]
    fn guidance_that_is_off_leaves_its_options_without_effect() {
        let defaults: Options = json!({"algo": RewardFlConfig::default()}).as_object().unwrap().clone();
        let noted = |scale: serde_json::Value| {
            let mut config = defaults.clone();
            (config["algo"]["negative_prompt"], config["algo"]["guidance_scale"]) = ("blurred".into(), scale);
            OptionNotes::of(Kind::Algorithm, NAME, &ConfiguredOptions::new(&config, &defaults)).unwrap().join("; ")
        };
        let off = noted(1.0.into());
        assert!(off.contains("`algo.negative_prompt: blurred` has no effect") && off.contains("is 1"), "{off}");
        assert_eq!(noted(3.5.into()) + &noted(json!([4.0, 3.0])), "");
    }
}
