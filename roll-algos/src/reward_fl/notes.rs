//! Options of Reward-FL that have no effect in combination with others.

use roll_core::{ConfiguredOptions, Kind, OptionNotes, Result};

use crate::notes::{buckets, shift};

use super::NAME;

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Algorithm, name: NAME, notes }
}

fn notes(said: &ConfiguredOptions<'_>) -> Result<Vec<String>> {
    let number = |key: &str| said.value(key).and_then(|value| value.as_u64());
    let listed = said.value("algo.timesteps").and_then(|list| list.as_array()).map(|list| list.len() as u64);
    let steps = listed.or_else(|| number("algo.num_inference_steps"));
    let to_the_end = match (number("algo.final_timestep"), steps) {
        (Some(last), Some(steps)) => last + 1 >= steps,
        _ => false,
    };
    let early_stop = match to_the_end {
        true => said.idle(&["algo.early_stop"], "`algo.final_timestep` is the last step"),
        false => None,
    };
    let renoised = match said.value("algo.trained_steps").is_some_and(|steps| steps.get("renoised").is_some()) {
        true if early_stop.is_none() => {
            said.idle(&["algo.early_stop"], "`algo.trained_steps` noises finished latents, and goes on to the data")
        }
        _ => None,
    };
    let unguided = ["algo.negative_prompt", "algo.guidance_gradient"];
    let guidance = match said.value("algo.guidance_scale").and_then(|scale| scale.as_f64()) {
        Some(1.0) => said.idle(&unguided, "`algo.guidance_scale` is 1, no guidance"),
        _ => None,
    };
    Ok([shift(said), buckets(said, NAME), early_stop, renoised, guidance].into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::Options;
    use serde_json::json;

    use super::*;
    use crate::reward_fl::RewardFlConfig;

    #[test]
    fn two_shifts_buckets_and_an_early_stop_that_never_comes_are_told() {
        let defaults: Options = json!({
            "algo": RewardFlConfig::default(), "model": {"shift": 5.0}, "data": {"bucket_ratios": []},
        })
        .as_object()
        .unwrap()
        .clone();
        let told = |change: &dyn Fn(&mut Options)| {
            let mut config = defaults.clone();
            change(&mut config);
            notes(&ConfiguredOptions::new(&config, &defaults)).unwrap().join("; ")
        };
        assert_eq!(told(&|_| ()), "");
        assert_eq!(told(&|c| c["algo"]["shift"] = 3.into()), "", "one shift is one");
        let both = told(&|c| (c["algo"]["shift"], c["model"]["shift"]) = (3.into(), 4.into()));
        assert_eq!(both, "`model.shift: 4` has no effect: `algo.shift` takes its place");
        assert!(told(&|c| c["data"]["bucket_ratios"] = json!([1.0])).contains("one sample at a time"));
        let early = told(&|c| c["algo"]["early_stop"] = "predict_x0".into());
        assert!(early.contains("`algo.early_stop: predict_x0` has no effect"), "{early}");
        let stops = told(&|c| {
            (c["algo"]["early_stop"], c["algo"]["final_timestep"]) = ("predict_x0".into(), 6.into());
        });
        assert_eq!(stops, "");
        let renoised = told(&|c| {
            (c["algo"]["early_stop"], c["algo"]["final_timestep"]) = ("predict_x0".into(), 6.into());
            c["algo"]["trained_steps"] = json!({"renoised": 2});
        });
        assert!(renoised.contains("`algo.early_stop: predict_x0` has no effect"), "{renoised}");
    }

    #[test]
    fn guidance_that_is_off_leaves_its_options_without_effect() {
        let defaults: Options = json!({"algo": RewardFlConfig::default()}).as_object().unwrap().clone();
        let told = |scale: serde_json::Value| {
            let mut config = defaults.clone();
            (config["algo"]["negative_prompt"], config["algo"]["guidance_scale"]) = ("blurred".into(), scale);
            notes(&ConfiguredOptions::new(&config, &defaults)).unwrap().join("; ")
        };
        let off = told(1.0.into());
        assert!(off.contains("`algo.negative_prompt: blurred` has no effect") && off.contains("is 1"), "{off}");
        assert_eq!(told(3.5.into()) + &told(json!([4.0, 3.0])), "");
    }
}
