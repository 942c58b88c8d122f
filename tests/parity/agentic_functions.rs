//! Statistics, KL estimates, aggregation, advantages and rewards of agentic PPO.

use roll_agents::agentic_ppo::advantages;
use roll_agents::agentic_ppo::config::Estimator;
use roll_agents::agentic_ppo::kl::{KlController, KlEstimate};
use roll_agents::agentic_ppo::rewards::{
    self, Grouping, NormalizationMethod, Normalize, RewardNormalization, StatisticScope,
};
use roll_agents::agentic_ppo::statistics;
use roll_agents::agentic_ppo::{AgenticPpoConfig, Aggregation, Grid, Mask, Totals};
use roll_core::{StateDict, Tensor};
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};
use crate::logits::FromLogits;

/// Relative error of scalar metrics, which were computed in f32.
const METRIC_ERROR: f64 = 2e-6;

#[derive(Deserialize)]
struct Config {
    gamma: f64,
    lambd: f64,
    num_tokens: f64,
    num_samples: f64,
    kl_coef: f64,
    step_gamma: f64,
    traj_group_id: Vec<String>,
    tags: Vec<String>,
    traj_id: Vec<String>,
    step: Vec<usize>,
    step_scores: Vec<f64>,
    state_hash: Vec<String>,
    episode_scores: Vec<f64>,
}

/// Functions of the reference that no algorithm of roll uses.
fn is_unused(name: &str) -> bool {
    let names = [
        "masked_sum",
        "masked_whiten.keep_mean",
        "masked_normalize",
        "approx_kl.full",
        "running_moments",
        "position_ids",
    ];
    let is_weighted = name.starts_with("agg.") && name.ends_with(".weights");
    names.contains(&name) || is_weighted || name.starts_with("reward_norm.") || name.starts_with("group_reward_norm.")
}

struct Context {
    config: Config,
    inputs: StateDict,
    mask: Mask,
    metrics: serde_json::Value,
    report: Report,
}

pub fn run(case: &Case) -> Outcome<Report> {
    let inputs = case.tensors("inputs.safetensors")?;
    let mut context = Context {
        config: case.config()?,
        mask: Mask::from_tensor("mask", &inputs["mask"])?,
        inputs,
        metrics: serde_json::from_slice(&std::fs::read(case.dir.join("metrics.json"))?)?,
        report: case.expected("outputs.safetensors")?,
    };
    for name in context.report.names().iter().filter(|name| is_unused(name)) {
        context.report.leave_out(name, "no algorithm uses it");
    }
    context.masked_statistics()?;
    context.distributions()?;
    context.kl_estimates()?;
    context.aggregation()?;
    context.advantages()?;
    context.reward_normalization()?;
    context.token_rewards()?;
    context.response_rewards()?;
    Ok(context.report)
}

impl Context {
    fn grid(&self, name: &str) -> Outcome<Grid> {
        Ok(Grid::from_tensor(name, &self.inputs[name])?)
    }

    fn vector(&self, name: &str) -> Outcome<Vec<f64>> {
        Ok(self.inputs[name].f32s()?.iter().map(|v| f64::from(*v)).collect())
    }

    fn see(&mut self, name: &str, grid: &Grid) -> Outcome {
        self.report.compare(name, &grid.to_tensor()?);
        Ok(())
    }

    fn see_vector(&mut self, name: &str, values: &[f64]) -> Outcome {
        let values: Vec<f32> = values.iter().map(|v| *v as f32).collect();
        self.report.compare(name, &Tensor::new(values.clone(), [values.len()])?);
        Ok(())
    }

    /// Compares with a number of `metrics.json`, under `name` or under `name` and `key`.
    fn see_metric(&mut self, name: &str, key: Option<&str>, found: Option<f64>) {
        let expected = match key {
            Some(key) => &self.metrics[name][key],
            None => &self.metrics[name],
        };
        let close = match (expected.as_f64(), found) {
            (Some(expected), Some(found)) => (found - expected).abs() <= METRIC_ERROR * expected.abs().max(1e-3),
            (None, None) => true,
            _ => false,
        };
        let expected = expected.clone();
        self.report.check(close, || format!("{name} {key:?} is {found:?}, expected {expected}"));
    }

    fn masked_statistics(&mut self) -> Outcome {
        let (values, mask) = (self.grid("values")?, self.mask.clone());
        self.see("segment_masked_mean", &statistics::segment_means(&values, &mask))?;
        // The map is its own transpose.
        let d = statistics::segment_means(&self.grid("g")?, &mask);
        self.see("segment_masked_mean.grad", &d)?;
        let report = &mut self.report;
        report.compare_value("masked_mean", statistics::masked_mean(&values, &mask));
        report.compare_value("masked_var", statistics::masked_variance(&values, &mask, true));
        report.compare_value("masked_var.biased", statistics::masked_variance(&values, &mask, false));
        self.see_vector("masked_mean.rows", &statistics::row_means(&values, &mask))?;
        self.see_vector("masked_sum.rows", &statistics::row_sums(&values, &mask))?;
        self.see("masked_whiten", &statistics::masked_whiten(&values, &mask))
    }

    fn distributions(&mut self) -> Outcome {
        let labels = self.inputs["labels"].as_slice::<i64>()?.to_vec();
        let found = FromLogits::new(&self.inputs["logits"], &labels)?;
        let shape = self.inputs["labels"].shape().to_vec();
        self.report.compare("log_probs", &Tensor::new(found.log_probs, shape.clone())?);
        self.report.compare("entropy", &Tensor::new(found.entropy, shape)?);
        Ok(())
    }

    fn kl_estimates(&mut self) -> Outcome {
        let (p, q, mask) = (self.grid("lp")?, self.grid("lp_base")?, self.mask.clone());
        for (name, estimate) in ESTIMATES {
            self.see(&format!("approx_kl.{name}"), &estimate.of(&p, &q).masked(&mask))?;
            // The gradient of the sum.
            let d = estimate.slopes(&p, &q).masked(&mask);
            self.see(&format!("approx_kl.{name}.grad"), &d)?;
        }
        Ok(())
    }

    fn aggregation(&mut self) -> Outcome {
        let (values, mask) = (self.grid("values")?, self.mask.clone());
        let own = Totals::of_rows(&mask);
        let counts = Totals { tokens: self.config.num_tokens, samples: self.config.num_samples, ..own };
        for (name, mode) in [
            ("token-mean", Aggregation::TokenMeanUnmasked),
            ("seq-mean-token-sum", Aggregation::SeqMeanTokenSum),
            ("seq-mean-token-mean", Aggregation::SeqMeanTokenMean),
            ("seq-mean-token-sum-norm", Aggregation::SeqMeanTokenSumNorm),
        ] {
            self.report.compare_value(&format!("agg.{name}"), mode.of(&values, &mask, own));
            self.report.compare_value(&format!("agg.{name}.counts"), mode.of(&values, &mask, counts));
        }
        let corrected = Aggregation::TokenMean.of(&values, &mask, own);
        self.report.compare_value("agg.token-mean.masked_corrected", corrected);
        Ok(())
    }

    fn advantages(&mut self) -> Outcome {
        let (rewards, values, mask) = (self.grid("rewards")?, self.grid("values")?, self.mask.clone());
        let (gamma, lambda) = (self.config.gamma, self.config.lambd);
        let everything = Mask::new(mask.columns(), vec![true; mask.kept().len()])?;
        let (gae, returns) = advantages::gae(&rewards, &values, &everything, gamma, lambda);
        self.see("gae.advantages", &gae)?;
        self.see("gae.returns", &returns)?;
        self.see("reinforce.returns", &advantages::discounted_returns(&rewards, &everything, gamma))?;
        self.see("agentic_reinforce.returns", &advantages::segment_returns(&rewards, &mask, gamma))?;
        for (estimator, name) in [
            (Estimator::Gae, "gae"),
            (Estimator::Reinforce, "reinforce"),
            (Estimator::Grpo, "grpo"),
            (Estimator::Gigpo, "gigpo"),
            (Estimator::StepReinforce, "step_reinforce"),
            (Estimator::AgenticReinforce, "agentic_reinforce"),
        ] {
            for (whiten_advantages, whiten_rewards, clip) in
                [(false, false, None), (true, false, None), (false, true, None), (true, true, Some(0.8))]
            {
                let text = clip.map_or("None".to_string(), |c| c.to_string());
                let (a, r) = (u8::from(whiten_advantages), u8::from(whiten_rewards));
                let name = format!("advantage.{name}.whiten_adv{a}.whiten_rew{r}.clip{text}");
                let options = AgenticPpoConfig {
                    adv_estimator: estimator,
                    gamma,
                    lambd: lambda,
                    advantage_clip: clip,
                    whiten_advantages,
                    whiten_rewards,
                    ..AgenticPpoConfig::default()
                };
                let found = advantages::estimate(&rewards, Some(&values), &mask, &everything, &options);
                self.see(&format!("{name}.advantages"), &found.advantages)?;
                self.see(&format!("{name}.returns"), &found.returns)?;
                self.see_metric(&format!("{name}.clip_frac"), None, found.clip_fraction);
            }
        }
        Ok(())
    }

    fn reward_normalization(&mut self) -> Outcome {
        let scores = self.vector("scores")?;
        let Config { traj_group_id, tags, .. } = &self.config;
        let groupings = [
            ("batch", vec!["all".to_string(); scores.len()]),
            ("traj_group_id", traj_group_id.clone()),
            ("tags", tags.clone()),
        ];
        let over = [("None", None), ("batch", Some(StatisticScope::Batch)), ("group", Some(StatisticScope::Group))];
        for (grouping, keys) in groupings {
            for (mean_name, mean) in over {
                for (std_name, std) in over {
                    let found = rewards::normalize_grouped(&scores, &keys, Normalize { mean, std });
                    self.see_vector(
                        &format!("agentic_reward_norm.{grouping}.mean_{mean_name}.std_{std_name}"),
                        &found,
                    )?;
                }
            }
        }
        Ok(())
    }

    fn token_rewards(&mut self) -> Outcome {
        let attention = Mask::from_tensor("attention_mask", &self.inputs["attention_mask"])?;
        let at_end = rewards::at_last_token(&self.vector("scores")?, &attention);
        self.see("expand_to_token_level", &at_end)?;

        let (p, q, mask) = (self.grid("lp")?, self.grid("lp_base")?, self.mask.clone());
        let coefficient = self.config.kl_coef;
        for (name, estimate) in ESTIMATES {
            for (added, clip) in [(true, None), (true, Some(0.5)), (false, None)] {
                let text = clip.map_or("None".to_string(), |c: f64| c.to_string());
                let name = format!("token_reward.{name}.add{}.clip{text}", u8::from(added));
                let mut controller = KlController::new(if added { coefficient } else { 0.0 }, None, 1.0)?;
                let found = rewards::with_kl(&at_end, (&p, &q), &mask, estimate, clip, &mut controller);
                self.see(&name, &found.rewards)?;
                for key in ["critic/kl", "critic/kl_coef", "critic/token_reward_clip_frac"] {
                    self.see_metric(&name, Some(key), found.metrics.get(key).copied());
                }
            }
        }
        let mut controller = KlController::new(coefficient, None, 1.0)?;
        let found = rewards::with_kl(&at_end, (&p, &q), &mask, KlEstimate::Kl, None, &mut controller);
        self.see("apply_kl_penalty", &found.rewards)?;
        for key in ["critic/kl", "critic/kl_coef"] {
            self.see_metric("apply_kl_penalty", Some(key), found.metrics.get(key).copied());
        }

        // The case does not record the inputs of its controller. These four updates are the simplest that give its
        // values: far above the target, far below, on it, and far above with twice the samples.
        let mut controller = KlController::new(coefficient, Some(1.0), 100.0)?;
        let updates = [(10.0, 16), (0.0, 16), (1.0, 16), (10.0, 32)];
        let values = updates.map(|(current, samples)| {
            controller.update(current, samples);
            controller.value()
        });
        self.see_vector("adaptive_kl_values", &values)
    }

    fn response_rewards(&mut self) -> Outcome {
        let Config { traj_group_id, traj_id, step, step_scores, state_hash, episode_scores, .. } = &self.config;
        let returns = rewards::step_returns(step_scores, traj_id, step, self.config.step_gamma);
        let (groups, states, episodes) = (traj_group_id.clone(), state_hash.clone(), episode_scores.clone());
        // GRPO normalises the sum of a response's token rewards.
        let totals = statistics::row_sums(&self.grid("rewards")?, &self.mask);
        self.see_vector("discounted_step_returns", &returns)?;
        // Weights and clip are not in the configuration; they follow from the numbers.
        let (weights, bound) = ([0.7, 1.3], 1.0);
        for (name, method) in [
            ("identity", NormalizationMethod::Identity),
            ("mean_std", NormalizationMethod::MeanStd),
            ("mean", NormalizationMethod::Mean),
        ] {
            let normalization =
                RewardNormalization { grouping: Grouping::TrajGroupId, method, ..RewardNormalization::default() };
            let key = format!("reward_normalization.{name}.traj_group_id");
            let resolved = normalization.resolved();
            for (field, found) in [("norm_mean_type", resolved.mean), ("norm_std_type", resolved.std)] {
                let expected = self.metrics[&key][field].clone();
                self.report.check(serde_json::to_value(found)? == expected, || format!("{key}.{field} is {found:?}"));
            }

            let gigpo = rewards::gigpo_rewards((&episodes, &groups), (&returns, &states), &normalization, weights);
            let key = format!("response_rewards.gigpo.{name}");
            let plain = |values: &[f64]| rewards::normalize_grouped(values, &groups, resolved);
            let of_steps =
                rewards::normalize_grouped(&returns, &states, Normalize::by_method(method, StatisticScope::Group));
            self.see_vector(&format!("{key}.episode_norm"), &plain(&episodes))?;
            self.see_vector(&format!("{key}.step_norm"), &of_steps)?;
            for (estimator, mut found) in
                [("gigpo", gigpo), ("step_reinforce", plain(&returns)), ("grpo", plain(&totals))]
            {
                let key = format!("response_rewards.{estimator}.{name}");
                let fraction = rewards::clip(&mut found, bound);
                self.see_vector(&key, &found)?;
                self.see_metric(&key, Some("critic/reward_clip_frac"), Some(fraction));
            }
        }
        Ok(())
    }
}

const ESTIMATES: [(&str, KlEstimate); 4] =
    [("kl", KlEstimate::Kl), ("abs", KlEstimate::Abs), ("mse", KlEstimate::Mse), ("k3", KlEstimate::K3)];
