//! Options of DiffusionNFT that have no effect in combination with others.

use roll_core::{ConfiguredOptions, IdleKeys, Kind, OptionNotes, Result, When};

use crate::kl_reference::{KL_REFERENCE, NO_KL};
use crate::notes::{GUIDANCE, SHIFT, policy_gradient};
use crate::policy_gradient::round::same_videos;

use super::NAME;

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Algorithm, name: NAME, idle: IDLE, more: Some(notes) }
}

const IDLE: &[IdleKeys] = &[
    SHIFT,
    GUIDANCE,
    KL_REFERENCE,
    IdleKeys {
        keys: &["algo.beta", "algo.advantage_mode"],
        when: When::IsNot("algo.loss", &["nft"]),
        because: "`algo.loss` is not `nft`",
    },
    IdleKeys {
        keys: &["algo.clip_range"],
        when: When::IsNot("algo.loss", &["awm", "dgpo"]),
        because: "`algo.loss` is neither `awm` nor `dgpo`",
    },
    IdleKeys {
        keys: &["algo.matching"],
        when: When::IsNot("algo.loss", &["awm"]),
        because: "`algo.loss` is not `awm`",
    },
    IdleKeys {
        keys: &["algo.preference_scale", "algo.preference_reference"],
        when: When::IsNot("algo.loss", &["dgpo"]),
        because: "`algo.loss` is not `dgpo`",
    },
    IdleKeys {
        keys: &["algo.reward_gradient.max_timestep_boundary"],
        when: When::Is("algo.reward_gradient.weight", &["0"]),
        because: "`algo.reward_gradient.weight` is 0",
    },
];

fn notes(config: &ConfiguredOptions<'_>) -> Result<Vec<String>> {
    if config.value("noise_seed").is_some() {
        return Err(same_videos(NAME));
    }
    let mut notes = policy_gradient(config)?;
    let value = |key: &str| config.value(key);
    let is = |key: &str, name: &str| config.value(key).and_then(|value| value.as_str()) == Some(name);
    let compares_with_old = is("algo.preference_reference", "old");
    if !is("algo.loss", "dgpo") || compares_with_old {
        notes.extend(config.idle(&[NO_KL]));
    }
    if is("algo.old_policy", "follow") && value("algo.updates_per_step").and_then(|count| count.as_u64()) == Some(1) {
        let because = "with `algo.old_policy: follow` and one update a step the policy in training is the old one";
        let keys: &[&str] = match compares_with_old {
            true => &["algo.beta", "algo.old_kl_weight", "algo.clip_range", "algo.preference_scale"],
            false => &["algo.beta", "algo.old_kl_weight", "algo.clip_range"],
        };
        notes.extend(config.idle(&[IdleKeys { keys, when: When::Always, because }]));
    }
    Ok(notes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::Options;
    use serde_json::{Value, json};

    use super::*;
    use crate::diffusion_nft::DiffusionNftConfig;

    fn noted(changes: &[(&str, Value)]) -> Result<String> {
        let defaults: Options = json!({
            "algo": DiffusionNftConfig::default(), "noise_seed": null, "reward": [{"name": "a"}],
            "evaluation": {"metadata": null, "train_samples": 0, "prompts": []},
        })
        .as_object()
        .unwrap()
        .clone();
        let mut config = Value::from(defaults.clone());
        changes.iter().for_each(|(key, value)| *config.pointer_mut(key).unwrap() = value.clone());
        let config = config.as_object().unwrap();
        Ok(OptionNotes::of(Kind::Algorithm, NAME, &ConfiguredOptions::new(config, &defaults))?.join("; "))
    }

    #[test]
    fn a_noise_seed_is_refused_before_the_model_is_opened() {
        let message = noted(&[("/noise_seed", 3.into())]).unwrap_err().to_string();
        assert!(message.contains("`noise_seed`") && message.contains("all the same"), "{message}");
    }

    #[test]
    fn options_without_effect_are_noted() {
        assert_eq!(noted(&[]).unwrap(), "");
        for (key, value) in [
            ("/algo/negative_prompt", json!("blurred")),
            ("/algo/several_rewards", json!("sum")),
            ("/algo/evaluation_sampler", json!("unipc")),
            ("/algo/clip_range", json!(0.1)),
            ("/algo/preference_scale", json!(10.0)),
            ("/algo/preference_reference", json!("old")),
        ] {
            let (note, name) = (noted(&[(key, value)]).unwrap(), key[1..].replace('/', "."));
            assert!(note.contains(&format!("`{name}: ")) && note.contains("no effect"), "{key}: {note}");
        }
        let evaluated = [("/algo/evaluation_sampler", json!("unipc")), ("/evaluation/train_samples", 2.into())];
        assert_eq!(noted(&evaluated).unwrap(), "");
        let two = [("/algo/several_rewards", json!("sum")), ("/reward", json!([{"name": "a"}, {"name": "b"}]))];
        assert_eq!(noted(&two).unwrap(), "");
        let follow = [("/algo/beta", json!(0.3)), ("/algo/old_policy", json!("follow"))];
        assert!(noted(&follow).unwrap().contains("`algo.beta: 0.3` has no effect"));
        assert_eq!(noted(&follow[..1]).unwrap(), "");
        let dgpo = [
            ("/algo/loss", json!("dgpo")),
            ("/algo/clip_range", json!(0.1)),
            ("/algo/preference_scale", json!(3000.0)),
            ("/algo/preference_reference", json!("old")),
            ("/algo/old_policy", json!("follow")),
        ];
        assert_eq!(noted(&dgpo[..4]).unwrap(), "");
        let note = noted(&dgpo).unwrap();
        assert!(note.contains("`algo.clip_range: 0.1") && note.contains("`algo.preference_scale: 3000"), "{note}");
        // The preference has a use for the reference even where the KL has none.
        let reference = [("/algo/kl_weight", json!(0.0)), ("/algo/kl_reference", json!("base")), dgpo[0].clone()];
        assert!(noted(&reference[..2]).unwrap().contains("`algo.kl_weight` is 0"));
        assert!(!noted(&reference).unwrap().contains("`algo.kl_weight` is 0"));
        let beta = [dgpo[0].clone(), ("/algo/beta", json!(0.3))];
        assert!(noted(&beta).unwrap().contains("`algo.loss` is not `nft`"));
    }
}
