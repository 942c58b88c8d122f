//! The policy that a KL compares the policy in training with (`algo.kl_reference`).

use roll_core::{Adapter, IdleKeys, When};

/// The policy that a KL compares with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlReference {
    /// The policy that training starts from: the KL of the first step is 0.
    #[default]
    Start,
    /// The model without `model.lora_checkpoint`.
    Base,
}

impl KlReference {
    /// The adapter of the passes that compute this policy.
    pub fn adapter(self) -> Adapter {
        match self {
            Self::Start => Adapter::Start,
            Self::Base => Adapter::Off,
        }
    }
}

/// `algo.kl_reference` in a run that starts from its base model, where both values mean the same policy.
pub(crate) const KL_REFERENCE: IdleKeys = IdleKeys {
    keys: &["algo.kl_reference"],
    when: When::Is("model.lora_checkpoint", &["null"]),
    because: "without `model.lora_checkpoint` training starts from the base",
};

/// `algo.kl_reference` in a run that computes no KL, because it trains without one and evaluates no clip.
pub(crate) const NO_KL: IdleKeys = IdleKeys {
    keys: &["algo.kl_reference"],
    when: When::Is("algo.kl_weight", &["0"]),
    because: "`algo.kl_weight` is 0 and no clip is evaluated",
};

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::{BuildContext, EvaluationContext, Noise, Options, Registry, Samples, Silent};
    use roll_testing::diffusion::{MockDiffusion, Sines, sample};
    use serde_json::json;

    const ALGORITHMS: [&str; 3] = ["reward_fl", "diffusion_nft", "flow_grpo"];

    fn options(name: &str, reference: &str, kl_weight: f64) -> Options {
        let mut options = json!({"kl_reference": reference, "kl_weight": kl_weight, "num_inference_steps": 8});
        if name != "reward_fl" {
            options["group_size"] = 2.into();
        }
        options.as_object().unwrap().clone()
    }

    #[test]
    fn evaluations_of_every_algorithm_compare_with_the_configured_policy() {
        for name in ALGORITHMS {
            for kl_weight in [0.0, 0.1] {
                let kl = |reference: &str| {
                    let mut model = MockDiffusion::new();
                    model.start = Some(model.adapter.clone());
                    let (mut reward, samples) = (Sines::new(), [sample(0, "a")]);
                    let (options, context) = (options(name, reference, kl_weight), BuildContext::new("flex"));
                    let algorithm = Registry::linked().unwrap().algorithm(name, &options, &context).unwrap();
                    let Samples::Clips(mut algorithm) = algorithm.samples() else { panic!("`{name}` is on clips") };
                    algorithm.check(&mut model, Some(&reward)).unwrap();
                    let mut context = EvaluationContext {
                        samples: &samples,
                        upcoming: &[],
                        model: &mut model,
                        rewards: vec![&mut reward],
                        noise: &Noise::new(11),
                        progress: &Silent,
                    };
                    algorithm.evaluate(&mut context).unwrap().unwrap()[0].kl
                };
                let [start, base] = [kl("start"), kl("base")];
                assert!(
                    start == 0.0 && base > 0.01,
                    "{name} {kl_weight}: {start} from the start, {base} from the base"
                );
            }
        }
    }

    /// Evaluations compute the KL whatever its weight.
    #[test]
    fn the_plan_counts_the_policy_at_the_start_if_it_is_the_reference() {
        for name in ALGORITHMS {
            for kl_weight in [0.0, 0.1] {
                let passes = |reference: &str| {
                    let registry = Registry::linked().unwrap();
                    registry.passes(name, &options(name, reference, kl_weight)).unwrap().reference_is_start
                };
                assert!(passes("start") && !passes("base"), "{name} {kl_weight}");
            }
        }
    }
}
