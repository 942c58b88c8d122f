//! The whole algorithm on a model that can be differentiated by hand.

#![allow(clippy::unwrap_used)]
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering};
use std::time::Duration;

use roll_backends::strategy::{Zero, ZeroOptions};
use roll_core::{
    Algorithm, Environment, Error, Model, Noise, Observation, OptimizerConfig, OwnDataAlgorithm, Progress, Result,
    Silent, StateDict, StepContext, StepReport, Strategy, Tensor, ThreadRanks, Transition,
};
use roll_testing::Bigram;

use super::config::Estimator;
use super::loss::RatioType;
use super::test_support::{Likes, algorithm_that_likes_x, short_config, step, step_watched};
use super::{AgenticPpo, AgenticPpoConfig};

#[test]
fn an_agent_learns_what_is_rewarded() {
    for (estimator, ratio) in [
        (Estimator::Grpo, RatioType::Token),
        (Estimator::Grpo, RatioType::Segment),
        (Estimator::Reinforce, RatioType::Token),
        (Estimator::AgenticReinforce, RatioType::Segment),
        (Estimator::StepReinforce, RatioType::Token),
        (Estimator::Gigpo, RatioType::Token),
        (Estimator::Gae, RatioType::Token),
    ] {
        let mut config = AgenticPpoConfig { adv_estimator: estimator, ..short_config() };
        config.loss.ratio_type = ratio;
        let mut algorithm = algorithm_that_likes_x(config, true);
        let mut model = Bigram::of("xyz");
        let success = |report: &StepReport| report.metrics["env/success"];
        let first = step(&mut algorithm, &mut model, 0, 5.0).unwrap();
        assert!(first.applied && first.metrics["actor/loss"].is_finite(), "{:?}", first.metrics);
        let mut last = first.clone();
        for i in 1..40 {
            last = step(&mut algorithm, &mut model, i, 5.0).unwrap();
        }
        assert!(success(&first) < 0.6 && success(&last) > 0.9, "{estimator:?} {ratio:?}: {}", success(&last));
        let validation = algorithm.validate(7, &mut model, &Noise::new(1), &Silent).unwrap().unwrap();
        assert_eq!((validation.metrics["val/env/success"], validation.records.len()), (1.0, 5));
        assert_eq!(validation.records[0]["turns"][0]["observation"], "o");
        // One record has the text that the model read and wrote.
        let text = &validation.records[0]["text"];
        assert!(text[0]["read"].as_str().unwrap().ends_with("$a:"), "{text}");
        assert_eq!(text[1]["wrote"], validation.records[0]["turns"][0]["response"]);
        assert!(validation.records[1]["text"].is_null() && last.records[0]["text"].is_array());
    }
}

#[test]
fn agentic_reinforce_normalises_and_clips_scores() {
    let mut config = AgenticPpoConfig { adv_estimator: Estimator::AgenticReinforce, ..short_config() };
    let spread = |config: &AgenticPpoConfig| {
        let report = step(&mut algorithm_that_likes_x(config.clone(), true), &mut Bigram::of("xyz"), 0, 5.0).unwrap();
        let metric = |name: &str| report.metrics.get(&format!("critic/{name}")).copied();
        (metric("advantages/min").unwrap(), metric("advantages/max").unwrap(), metric("reward_clip_frac"))
    };
    let (low, high, _) = spread(&config);
    assert!(low < 0.0 && high > 0.0, "scores of 0 and 1: {low}, {high}");
    config.reward_clip = Some(0.5);
    assert!(matches!(spread(&config), (-0.5, 0.5, Some(0.1..))), "{:?}", spread(&config));
}

#[test]
fn training_differs_between_steps_and_repeats_with_the_seed() {
    let run = |at: u64| {
        let mut model = Bigram::of("xyz");
        step(&mut algorithm_that_likes_x(short_config(), true), &mut model, at, 1.0).unwrap();
        model.logits
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3), run(4));
}

#[test]
fn parameters_and_metrics_do_not_depend_on_the_number_of_ranks() {
    let train = |ranks: usize, estimator: Estimator, ahead: usize| -> (Vec<f32>, Vec<BTreeMap<String, f64>>) {
        let results = ThreadRanks::run(ranks, Duration::from_secs(60), |ranks| {
            let mut strategy = Zero::new(ZeroOptions::default(), ranks)?;
            // Uneven shares, several updates per step, statistics over everything.
            let config = AgenticPpoConfig {
                num_env_groups: 5,
                group_size: 3,
                mini_batch_size: 7,
                micro_batch_size: 2,
                ppo_epochs: 2,
                whiten_advantages: true,
                add_token_level_kl: true,
                adv_estimator: estimator,
                async_generation_ratio: ahead,
                value_clip: Some(0.2),
                ..short_config()
            };
            let mut algorithm = algorithm_that_likes_x(config, true);
            let mut model = Bigram::of("xyz");
            strategy.attach(&mut model, &OptimizerConfig::default())?;
            let mut metrics = Vec::new();
            for step in 0..4 {
                let report = algorithm.step(&mut StepContext {
                    step,
                    samples: &[],
                    model: &mut model,
                    reward: None,
                    strategy: &mut strategy,
                    learning_rate: 0.1,
                    noise: &Noise::new(1),
                    progress: &Silent,
                    want_videos: false,
                })?;
                metrics.push(report.metrics.into_iter().filter(|(name, _)| !name.starts_with("time/")).collect());
            }
            Ok((model.logits, metrics))
        });
        let mut results = results.into_iter().map(Result::unwrap);
        let first = results.next().unwrap();
        assert!(results.all(|other| other == first), "the ranks disagree");
        first
    };
    for (estimator, ranks, ahead) in [
        (Estimator::Grpo, 2, 0),
        (Estimator::Grpo, 4, 0),
        (Estimator::Gae, 2, 0),
        (Estimator::Gae, 4, 0),
        (Estimator::Grpo, 2, 1),
        (Estimator::Gae, 4, 1),
    ] {
        let (parameters, metrics) = train(1, estimator, ahead);
        let (theirs, their_metrics) = train(ranks, estimator, ahead);
        assert!(parameters.iter().zip(&theirs).all(|(a, b)| (a - b).abs() <= 2e-6 * 20.0));
        for (ours, theirs) in metrics.iter().zip(&their_metrics) {
            assert!(ours.keys().eq(theirs.keys()));
            for (name, value) in ours {
                assert!(
                    (value - theirs[name]).abs() <= 1e-5 * value.abs().max(1.0),
                    "{name}: {value}, {}",
                    theirs[name]
                );
            }
        }
    }
}

fn with_critic(warmup: u64) -> AgenticPpoConfig {
    AgenticPpoConfig {
        adv_estimator: Estimator::Gae,
        critic_warmup: warmup,
        critic_learning_rate: 0.05,
        ..short_config()
    }
}

#[test]
fn critic_warm_up_leaves_the_policy_unchanged() {
    let mut algorithm = algorithm_that_likes_x(with_critic(6), true);
    let mut model = Bigram::of("xyz");
    let before = model.logits.clone();
    let mut explained = Vec::new();
    for i in 0..6 {
        let report = step(&mut algorithm, &mut model, i, 1.0).unwrap();
        assert!(report.applied && !report.metrics.contains_key("actor/loss"), "{:?}", report.metrics);
        explained.push(report.metrics["critic/explained_variance"]);
    }
    assert_eq!(model.logits, before, "the policy waits");
    // The first prediction is of a head that knows nothing.
    assert!(explained[0].abs() < 1e-9 && explained[5] > 0.1, "{explained:?}");
    let report = step(&mut algorithm, &mut model, 6, 1.0).unwrap();
    assert!(report.metrics.contains_key("actor/loss") && model.logits != before);
}

/// Trains for `done` steps and asserts that a run from the checkpoint after them takes the same next two. Returns the
/// run that was never stopped and the one that was.
fn resume(config: &AgenticPpoConfig, done: u64) -> [AgenticPpo; 2] {
    let begun = || {
        let (mut algorithm, mut model) = (algorithm_that_likes_x(config.clone(), true), Bigram::of("xyz"));
        algorithm.check(&mut model, None).unwrap();
        (algorithm, model)
    };
    let ((mut whole, mut model), (mut resumed, mut copy)) = (begun(), begun());
    for i in 0..done {
        step(&mut whole, &mut model, i, 1.0).unwrap();
    }
    let text = whole.state().to_string();
    resumed.load_state(&serde_json::from_str(&text).unwrap()).unwrap();
    resumed.load_tensors(&whole.tensors().unwrap()).unwrap();
    copy.logits = model.logits.clone();
    for i in done..done + 2 {
        let [a, b] = [(&mut whole, &mut model), (&mut resumed, &mut copy)].map(|(algorithm, model)| {
            let StepReport { records, mut metrics, .. } = step(algorithm, model, i, 1.0).unwrap();
            metrics.retain(|name, _| !name.starts_with("time/"));
            (records, metrics)
        });
        assert_eq!(a, b);
    }
    assert_eq!(model.logits, copy.logits);
    // The rollout ahead may be done in one of them, and under way in the other.
    let [learned, again] = [&whole, &resumed].map(|algorithm| {
        let mut state = algorithm.state();
        for key in ["ahead", "under_way"] {
            state.as_object_mut().unwrap().remove(key);
        }
        state
    });
    assert_eq!(learned, again);
    [whole, resumed]
}

#[test]
fn resume_with_a_critic_is_bit_exact() {
    let [whole, mut resumed] = resume(&with_critic(1), 3);
    // As versions without a critic wrote it.
    resumed.load_state(&serde_json::json!({"fixed": {"value": 0.2}})).unwrap();
    let torn = whole.state().to_string().replacen("\"parameters\":[", "\"parameters\":[1.0,", 1);
    assert!(resumed.load_state(&serde_json::from_str(&torn).unwrap()).unwrap_err().to_string().contains("critic"));
}

fn ahead() -> AgenticPpoConfig {
    AgenticPpoConfig { async_generation_ratio: 1, ..short_config() }
}

/// [`Likes`] that waits for the update beside it to take its time.
struct Slow(Likes);

impl Environment for Slow {
    fn reset(&mut self, seed: u64) -> Result<Observation> {
        self.0.reset(seed)
    }

    fn step(&mut self, action: &str) -> Result<Transition> {
        std::thread::sleep(Duration::from_millis(20));
        self.0.step(action)
    }
}

#[test]
fn prefetched_episodes_use_the_policy_before_the_update() {
    let run = |slow: bool| {
        let mut algorithm = AgenticPpo::new(ahead()).unwrap();
        let environment = || -> Box<dyn Environment> {
            if slow { Box::new(Slow(Likes { works: true })) } else { Box::new(Likes { works: true }) }
        };
        algorithm.open_environments(&mut || Ok(environment())).unwrap();
        let mut model = Bigram::of("xyz");
        algorithm.check(&mut model, None).unwrap();
        let reports: Vec<StepReport> = (0..3).map(|i| step(&mut algorithm, &mut model, i, 5.0).unwrap()).collect();
        (reports, model.logits)
    };
    let ((quick, logits), (slow, slow_logits)) = (run(false), run(true));
    assert_eq!(logits, slow_logits);
    let metric = |name: &str| quick.iter().map(|report| report.metrics[name]).collect::<Vec<_>>();
    assert_eq!(metric("env/policy_age"), [0.0, 1.0, 1.0]);
    // The first two steps were played by the policy that nothing had trained yet.
    let untrained = |at: u64| {
        step(&mut algorithm_that_likes_x(short_config(), true), &mut Bigram::of("xyz"), at, 5.0).unwrap().records
    };
    for (report, expected) in quick.iter().zip([untrained(0), untrained(1)]) {
        assert_eq!(report.records, expected);
    }
    assert_ne!(quick[2].records, untrained(2));
    assert_eq!(slow.len(), 3);
}

#[test]
fn the_ratio_of_episodes_played_ahead_is_to_the_policy_that_wrote_them() {
    let (mut algorithm, mut model) = (algorithm_that_likes_x(ahead(), true), Bigram::of("xyz"));
    // Log-probabilities of generation are f32, so a ratio of equal policies is 1 to their rounding.
    let ratio = |report: StepReport| (report.metrics["actor/ratio_mean"] - 1.0).abs();
    assert!(ratio(step(&mut algorithm, &mut model, 0, 5.0).unwrap()) < 1e-6);
    assert!(ratio(step(&mut algorithm, &mut model, 1, 5.0).unwrap()) > 1e-3);
}

#[test]
fn the_correction_weighs_episodes_played_ahead_by_the_age_of_their_policy() {
    let mut config = ahead();
    config.infer_log_probs = super::config::InferLogProbs::Raw;
    let is_weight = &mut config.loss.train_infer_correction.is_weight;
    (is_weight.enabled, is_weight.upper_bound) = (true, Some(1.001));
    let (mut algorithm, mut model) = (algorithm_that_likes_x(config, true), Bigram::of("xyz"));
    let first = step(&mut algorithm, &mut model, 0, 5.0).unwrap();
    assert_eq!(first.metrics["actor/is_weight_clipfrac"], 0.0);
    let second = step(&mut algorithm, &mut model, 1, 5.0).unwrap();
    assert!(second.metrics["actor/is_weight_clipfrac"] > 0.1, "{:?}", second.metrics);
    assert!((second.metrics["actor/ratio_mean"] - 1.0).abs() < 1e-6);
}

#[test]
fn learns_from_prefetched_episodes() {
    let (mut algorithm, mut model) = (algorithm_that_likes_x(ahead(), true), Bigram::of("xyz"));
    let mut success = Vec::new();
    for i in 0..40 {
        success.push(step(&mut algorithm, &mut model, i, 5.0).unwrap().metrics["env/success"]);
    }
    assert!(success[0] < 0.6 && success[39] > 0.9, "{success:?}");
    let validation = algorithm.validate(7, &mut model, &Noise::new(1), &Silent).unwrap().unwrap();
    assert_eq!(validation.metrics["val/env/success"], 1.0);
}

#[test]
fn resume_with_prefetched_episodes_is_bit_exact() {
    resume(&ahead(), 2);
}

/// Asks to stop when it is asked for the n-th time, from 0, and from then on.
struct StopAt(AtomicIsize);

impl Progress for StopAt {
    fn phase(&self, _phase: &str) {}

    fn interrupted(&self) -> bool {
        self.0.fetch_sub(1, Ordering::Relaxed) <= 0
    }
}

#[test]
fn interrupted_step_is_repeated_with_its_prefetched_episodes() {
    // Before the rollout is taken, before the log-probabilities, before the update.
    for question in 0..3 {
        let run = |stopped: Option<isize>| {
            let (mut algorithm, mut model) = (algorithm_that_likes_x(ahead(), true), Bigram::of("xyz"));
            let reports: Vec<StepReport> = (0..4)
                .map(|i| {
                    if let Some(question) = stopped.filter(|_| i > 0) {
                        let progress = StopAt(AtomicIsize::new(question));
                        let result = step_watched(&mut algorithm, &mut model, i, 1.0, &progress);
                        assert!(matches!(result, Err(Error::Interrupted)), "question {question}");
                    }
                    step(&mut algorithm, &mut model, i, 1.0).unwrap()
                })
                .collect();
            let seen = reports.into_iter().map(|r| (r.records, r.metrics["env/policy_age"])).collect::<Vec<_>>();
            (seen, model.logits)
        };
        assert_eq!(run(Some(question)), run(None), "stopped at question {question}");
    }
}

#[test]
fn a_checkpoint_does_not_wait_for_the_rollout_under_way_and_its_resume_is_bit_exact() {
    let begun = || {
        let mut algorithm = AgenticPpo::new(ahead()).unwrap();
        algorithm.open_environments(&mut || Ok(Box::new(Slow(Likes { works: true })))).unwrap();
        let mut model = Bigram::of("xyz");
        algorithm.check(&mut model, None).unwrap();
        (algorithm, model)
    };
    let ((mut whole, mut model), (mut resumed, mut copy)) = (begun(), begun());
    (0..2).for_each(|i| drop(step(&mut whole, &mut model, i, 5.0).unwrap()));
    let (state, tensors) = (whole.state(), whole.tensors().unwrap());
    assert_eq!(state["under_way"]["step"], 2, "{state}");
    resumed.load_state(&state).unwrap();
    let shapes =
        |tensors: StateDict| tensors.into_iter().map(|(name, t)| (name, t.shape().to_vec())).collect::<Vec<_>>();
    assert_eq!(shapes(resumed.tensors().unwrap()), shapes(tensors.clone()));
    resumed.load_tensors(&tensors).unwrap();
    copy.logits = model.logits.clone();
    // Stopped before it begins to play, and while it waits for its episodes.
    for question in 0..2 {
        let progress = StopAt(AtomicIsize::new(question));
        let stopped = step_watched(&mut resumed, &mut copy, 2, 5.0, &progress);
        assert!(matches!(stopped, Err(Error::Interrupted)), "question {question}");
        assert_eq!((resumed.state(), &copy.logits), (state.clone(), &model.logits));
        let values = |tensors: StateDict| tensors.values().map(Tensor::to_f32_vec).collect::<Vec<_>>();
        assert_eq!(values(resumed.tensors().unwrap()), values(tensors.clone()));
    }
    for i in 2..4 {
        let [a, b] = [(&mut whole, &mut model), (&mut resumed, &mut copy)].map(|(algorithm, model)| {
            let report = step(algorithm, model, i, 5.0).unwrap();
            (report.records, report.metrics["env/policy_age"])
        });
        assert_eq!(a, b);
        assert_eq!(model.logits, copy.logits);
    }
}

#[test]
fn episodes_ahead_of_another_writer_are_dropped_on_resume() {
    let state_of = |writer: Option<&str>| {
        let (mut whole, mut model) = (algorithm_that_likes_x(ahead(), true), Bigram::of("xyz"));
        step(&mut whole, &mut model, 0, 5.0).unwrap();
        // The state of a rollout that is done has its episodes.
        let mut state = whole.state();
        while state["ahead"].is_null() {
            std::thread::sleep(Duration::from_millis(5));
            state = whole.state();
        }
        assert!(state.get("writer").is_none(), "{state}");
        if let Some(writer) = writer {
            state["writer"] = writer.into();
        }
        (state, model)
    };
    for (writer, age) in [(None, 1.0), (Some("model"), 1.0), (Some("vllm"), 0.0)] {
        let (state, mut model) = state_of(writer);
        let mut resumed = algorithm_that_likes_x(ahead(), true);
        resumed.load_state(&state).unwrap();
        let report = step(&mut resumed, &mut model, 1, 5.0).unwrap();
        assert_eq!(report.metrics["env/policy_age"], age, "{writer:?}");
    }
}

#[test]
fn failed_prefetched_rollout_fails_its_step() {
    let (mut algorithm, mut model) = (algorithm_that_likes_x(ahead(), true), Bigram::of("xyz"));
    // The snapshot of the model cannot render the second step's prompts.
    model.fails = false;
    step(&mut algorithm, &mut model, 0, 1.0).unwrap();
    model.fails = true;
    step(&mut algorithm, &mut model, 1, 1.0).unwrap();
    let reason = step(&mut algorithm, &mut model, 2, 1.0).unwrap_err().to_string();
    assert!(reason.contains("chat template"), "{reason}");
}

#[test]
fn more_than_one_step_ahead_is_refused() {
    let refused = AgenticPpo::new(AgenticPpoConfig { async_generation_ratio: 2, ..short_config() }).err().unwrap();
    assert!(refused.to_string().contains("algo.async_generation_ratio"), "{refused}");
}

#[test]
fn the_names_of_metrics_have_no_suffix() {
    let report = step(&mut algorithm_that_likes_x(short_config(), true), &mut Bigram::of("xyz"), 0, 1.0).unwrap();
    assert!(report.metrics.contains_key("actor/ratio_max") && report.metrics.contains_key("actor/pg_loss"));
    let suffixed: Vec<&String> = report.metrics.keys().filter(|name| name.contains('@')).collect();
    assert!(suffixed.is_empty(), "{suffixed:?}");
}

/// [`Likes`] that counts its episodes.
struct Counted(Likes, Arc<AtomicUsize>);

impl Environment for Counted {
    fn reset(&mut self, seed: u64) -> Result<Observation> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.reset(seed)
    }

    fn step(&mut self, action: &str) -> Result<Transition> {
        self.0.step(action)
    }
}

#[test]
fn ranks_share_the_episodes_of_a_validation_and_open_only_the_environments_that_they_play() {
    let validate = |ranks: usize, groups: usize, wanted: usize| {
        let (opened, played) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
        let found = ThreadRanks::run(ranks, Duration::from_secs(60), |ranks| {
            let config =
                AgenticPpoConfig { num_env_groups: groups, group_size: 3, val_batch_size: wanted, ..short_config() };
            let config = AgenticPpoConfig { val_temperature: 1.0, saved_trajectories: 100, ..config };
            let mut algorithm = AgenticPpo::new(config)?.on(ranks.clone());
            algorithm.open_environments(&mut || {
                opened.fetch_add(1, Ordering::Relaxed);
                Ok(Box::new(Counted(Likes { works: true }, played.clone())))
            })?;
            let mut model = Bigram::of("xyz");
            algorithm.check(&mut model, None)?;
            // The check begins an episode on each rank.
            ranks.barrier()?;
            played.store(0, Ordering::Relaxed);
            ranks.barrier()?;
            algorithm.validate(7, &mut model, &Noise::new(1), &Silent)
        });
        let mut found = found.into_iter().map(|found| found.unwrap().unwrap());
        let first = found.next().unwrap();
        assert!(found.all(|other| other == first), "the ranks disagree");
        (first, opened.into_inner(), played.load(Ordering::Relaxed))
    };
    for wanted in [7, 40] {
        let (alone, opened, played) = validate(1, 5, wanted);
        assert_eq!((opened, played, alone.records.len()), (15, wanted, wanted));
        for ranks in [2, 4] {
            assert_eq!(validate(ranks, 5, wanted), (alone.clone(), 15, wanted), "{ranks} ranks");
        }
        // A rank without a group of its own plays a part of the validation all the same.
        assert_eq!(validate(4, 2, wanted).0.metrics, alone.metrics);
    }
}

#[test]
fn run_stops_with_the_reason_if_all_environments_fail() {
    let reason =
        step(&mut algorithm_that_likes_x(short_config(), false), &mut Bigram::of("x"), 0, 1.0).unwrap_err().to_string();
    assert!(reason.contains("gone"), "{reason}");
    let mut model = Bigram::of("x");
    model.context = 2;
    let reason = step(&mut algorithm_that_likes_x(short_config(), true), &mut model, 0, 1.0).unwrap_err().to_string();
    assert!(reason.contains("sequence_length"), "{reason}");
}

#[test]
fn the_order_of_checks_is_kept() {
    let mut without = AgenticPpo::new(short_config()).unwrap();
    let mut model = Bigram::new();
    assert!(without.check(&mut model, None).unwrap_err().to_string().contains("--env"));
    assert_eq!(model.parameter_count(), 128 * 128);
}

#[test]
fn warns_of_a_correction_with_other_sampling_options() {
    let warnings = |temperature: f64, top_k: usize, enabled: bool| {
        let mut config = AgenticPpoConfig { temperature, top_k, ..short_config() };
        config.loss.train_infer_correction.is_weight.enabled = enabled;
        config.warnings()
    };
    assert!(warnings(1.0, 0, true).is_empty() && warnings(0.7, 20, false).is_empty());
    let reason = warnings(0.7, 20, true).concat();
    assert!(reason.contains("`algo.temperature: 0.7`, `algo.top_k: 20`"), "{reason}");
}

#[test]
fn rejects_invalid_sampling_options_with_their_key() {
    let refused = |config: AgenticPpoConfig| AgenticPpo::new(config).err().unwrap().to_string();
    for (config, key) in [
        (AgenticPpoConfig { temperature: -1.0, ..short_config() }, "`algo.temperature`"),
        (AgenticPpoConfig { val_temperature: f64::NAN, ..short_config() }, "`algo.val_temperature`"),
        (AgenticPpoConfig { top_p: 0.0, ..short_config() }, "`algo.top_p`"),
        (AgenticPpoConfig { stop: vec![String::new()], ..short_config() }, "`algo.stop`"),
    ] {
        let message = refused(config);
        assert!(message.contains(key), "{message}");
    }
}
