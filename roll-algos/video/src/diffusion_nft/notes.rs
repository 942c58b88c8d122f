//! Options of DiffusionNFT that have no effect in combination with others.

use roll_core::{ConfiguredOptions, IdleKeys, Kind, OptionNotes, Result, When};

use crate::kl_reference::KL_REFERENCE;
use crate::notes::{GUIDANCE, SHIFT, policy_gradient};
use crate::policy_gradient::round::same_videos;

use super::NAME;

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Algorithm, name: NAME, idle: IDLE, more: Some(notes) }
}

/// Keys without effect under a condition on one key.
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
        keys: &["algo.clip_range", "algo.matching"],
        when: When::IsNot("algo.loss", &["awm"]),
        because: "`algo.loss` is not `awm`",
    },
    IdleKeys {
        keys: &["algo.reward_gradient.max_timestep_boundary"],
        when: When::Is("algo.reward_gradient.weight", &["0"]),
        because: "`algo.reward_gradient.weight` is 0",
    },
];

/// Keys without effect where the policy in training equals the old policy.
const SAME_POLICY: IdleKeys = IdleKeys {
    keys: &["algo.beta", "algo.old_kl_weight", "algo.clip_range"],
    when: When::Always,
    because: "with `algo.old_policy: follow` and one update a step the policy in training is the old one",
};

/// The notes that depend on several keys. Fails if `noise_seed` is set.
fn notes(config: &ConfiguredOptions<'_>) -> Result<Vec<String>> {
    if config.value("noise_seed").is_some() {
        return Err(same_videos(NAME));
    }
    let mut notes = policy_gradient(config)?;
    let follows = config.value("algo.old_policy").and_then(|value| value.as_str()) == Some("follow");
    let updates = config.value("algo.updates_per_step").and_then(|count| count.as_u64());
    if follows && updates == Some(1) {
        notes.extend(config.idle(&[SAME_POLICY]));
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
            "model": {"lora_checkpoint": "lora.safetensors"},
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
        let awm =
            [("/algo/loss", json!("awm")), ("/algo/clip_range", json!(0.1)), ("/algo/old_policy", json!("follow"))];
        assert_eq!(noted(&awm[..2]).unwrap(), "");
        assert!(noted(&awm).unwrap().contains("`algo.clip_range: 0.1"));
        let reference = [("/algo/kl_weight", json!(0.0)), ("/algo/kl_reference", json!("base"))];
        assert!(noted(&reference).unwrap().contains("`algo.kl_weight` is 0"));
        let [weight, base] = reference;
        assert_eq!(
            noted(&[weight, base, ("/evaluation/train_samples", 2.into())]).unwrap(),
            "",
            "evaluations have a KL"
        );
        let beta = [awm[0].clone(), ("/algo/beta", json!(0.3))];
        assert!(noted(&beta).unwrap().contains("`algo.loss` is not `nft`"));
    }
}
