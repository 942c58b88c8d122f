//! Options of Reward-FL that do nothing beside others.

use roll_core::{Kind, OptionNotes, Result, Said};

use crate::notes::{buckets, shift};

use super::NAME;

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Algorithm, name: NAME, notes }
}

fn notes(said: &Said<'_>) -> Result<Vec<String>> {
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
    Ok([shift(said), buckets(said, NAME), early_stop].into_iter().flatten().collect())
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
            notes(&Said::new(&config, &defaults)).unwrap().join("; ")
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
    }
}
