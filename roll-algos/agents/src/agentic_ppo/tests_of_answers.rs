//! Answers that are cut off, punished or asked again, on a model that can be differentiated by hand.

#![allow(clippy::unwrap_used)]
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use roll_core::{
    Algorithm, Environment, Error, Noise, Observation, OwnDataAlgorithm, Result, Silent, Split, StepContext,
    StepReport, ThreadRanks, Transition,
};
use roll_testing::Bigram;

use super::config::{GroupFilter, TruncatedAnswers};
use super::test_support::{short_config, step};
use super::{AgenticPpo, AgenticPpoConfig};

/// Numbers of groups that began, in their order.
type Asked = Arc<Mutex<Vec<u64>>>;

/// Rewards an answer that begins with `x`, except in groups of an odd number, whose answers are all right.
struct Rows {
    number: u64,
    split: Split,
    asked: Asked,
}

impl Environment for Rows {
    fn enter(&mut self, split: Split, number: u64) -> Result<()> {
        (self.split, self.number) = (split, number);
        Ok(())
    }

    fn reset(&mut self, _seed: u64) -> Result<Observation> {
        if self.split == Split::Train {
            self.asked.lock().unwrap().push(self.number);
        }
        Ok(Observation::text("o"))
    }

    fn step(&mut self, action: &str) -> Result<Transition> {
        let right = action.starts_with('x') || (self.number % 2 == 1 && self.split == Split::Train);
        let observation = Observation::default();
        Ok(Transition {
            observation,
            reward: f64::from(u8::from(right)),
            terminated: true,
            truncated: false,
            valid: true,
        })
    }
}

fn config() -> AgenticPpoConfig {
    AgenticPpoConfig { saved_trajectories: 1000, ..short_config() }
}

fn algorithm(config: &AgenticPpoConfig) -> (AgenticPpo, Asked) {
    let (mut algorithm, asked) = (AgenticPpo::new(config.clone()).unwrap(), Asked::default());
    let row = || Rows { number: 0, split: Split::Train, asked: asked.clone() };
    algorithm.open_environments(&mut || Ok(Box::new(row()))).unwrap();
    (algorithm, asked)
}

/// Whether each answer of the records was cut off, by its text.
fn truncated(report: &StepReport) -> Vec<(String, bool)> {
    let turns = report.records.iter().flat_map(|record| record["turns"].as_array().unwrap());
    turns.map(|turn| (turn["response"].as_str().unwrap().into(), turn["truncated"] == true)).collect()
}

#[test]
fn an_answer_without_its_end_is_cut_off() {
    let (mut algorithm, _) = algorithm(&config());
    let report = step(&mut algorithm, &mut Bigram::of("xyz"), 0, 1.0).unwrap();
    let answers = truncated(&report);
    assert!(answers.iter().any(|(text, _)| text.len() == 3 && text.ends_with('$')));
    for (text, truncated) in &answers {
        assert_eq!(*truncated, text.len() == 3 && !text.ends_with('$'), "{text}");
    }
    let count = answers.iter().filter(|(_, truncated)| *truncated).count();
    assert!(count > 0 && count < answers.len());
    assert_eq!(report.metrics["env/answer_truncated"], count as f64 / answers.len() as f64);
    assert!(!report.metrics.contains_key("env/length_penalty"));
    // A text that ends answers ends them too.
    let stops = AgenticPpoConfig { stop: vec!["y".into()], ..config() };
    let report = step(&mut self::algorithm(&stops).0, &mut Bigram::of("xyz"), 0, 1.0).unwrap();
    for (text, truncated) in truncated(&report) {
        assert_eq!(truncated, text.len() == 3 && !text.ends_with('$') && !text.contains('y'), "{text}");
    }
}

#[test]
fn masked_answers_are_not_trained_on_but_compared_with() {
    let masks = AgenticPpoConfig { truncated_answers: TruncatedAnswers::Mask, ..config() };
    let trained = |config: &AgenticPpoConfig, alphabet: &str| {
        let mut model = Bigram::of(alphabet);
        let before = model.logits.clone();
        let report = step(&mut algorithm(config).0, &mut model, 0, 1.0).unwrap();
        let changed: Vec<usize> = (0..before.len()).filter(|i| model.logits[*i] != before[*i]).collect();
        (report, changed)
    };
    let (kept, (masked, _)) = (trained(&config(), "xyz").0, trained(&masks, "xyz"));
    assert_eq!(kept.records, masked.records);
    assert_eq!(kept.metrics["critic/rewards/max"].to_bits(), kept.metrics["critic/rewards/max"].to_bits());
    let lengths = |report: &StepReport| report.metrics["tokens/response_length/min"];
    assert_eq!((lengths(&masked), lengths(&kept) > 0.0), (0.0, true));
    assert_ne!(kept.metrics["actor/grad_norm"], masked.metrics["actor/grad_norm"]);
    // A model that never ends is not trained at all, and the report says why.
    let mut endless = Bigram::of("xyz");
    endless.logits.iter_mut().skip('$' as usize).step_by(128).for_each(|logit| *logit = -1000.0);
    let before = endless.logits.clone();
    let report = step(&mut algorithm(&masks).0, &mut endless, 0, 1.0).unwrap();
    assert!(!report.applied && endless.logits == before);
    let (_, reason) = report.skipped.last().unwrap();
    assert!(reason.contains("algo.max_tokens_per_step"), "{reason}");
}

#[test]
fn long_answers_are_punished_in_training_alone() {
    let punishes = |length_penalty_tokens| AgenticPpoConfig { length_penalty: 0.5, length_penalty_tokens, ..config() };
    for (tokens, expected) in
        [(0, [0.0, 0.0, 0.0, 0.5]), (2, [0.0, 0.25, 0.5, 0.5]), (3, [1.0 / 6.0, 1.0 / 3.0, 0.5, 0.5])]
    {
        let config = punishes(tokens);
        let found =
            [config.penalty(1, false), config.penalty(2, false), config.penalty(3, false), config.penalty(3, true)];
        assert!(found.iter().zip(expected).all(|(a, b): (&f64, f64)| (a - b).abs() < 1e-12), "{tokens}: {found:?}");
    }
    let (mut algorithm, _) = algorithm(&punishes(2));
    let mut model = Bigram::of("xyz");
    let report = step(&mut algorithm, &mut model, 0, 1.0).unwrap();
    let mut sum = 0.0;
    for record in &report.records {
        let turn = &record["turns"][0];
        let text = turn["response"].as_str().unwrap();
        let penalty = [0.0, 0.0, 0.25, 0.5][text.len()];
        assert_eq!(turn["penalty"].as_f64().unwrap_or(0.0), penalty, "{text}");
        let right = text.starts_with('x') || record["group"].as_u64().unwrap() % 2 == 1;
        assert_eq!(turn["reward"].as_f64().unwrap(), f64::from(u8::from(right)) - penalty);
        // The penalty does not make a right answer wrong.
        assert_eq!(record["solved"], right);
        sum += penalty;
    }
    assert!((report.metrics["env/length_penalty"] - sum / report.records.len() as f64).abs() < 1e-12);
    let validation = algorithm.validate(1, &mut model, &Noise::new(1), &Silent).unwrap().unwrap();
    assert!(validation.records.iter().all(|record| record["turns"][0]["penalty"].is_null()));
    let refused = AgenticPpo::new(punishes(4)).err().unwrap().to_string();
    assert!(refused.contains("algo.length_penalty_tokens") && refused.contains("found 4"), "{refused}");
}

fn refills(refill_rounds: usize) -> AgenticPpoConfig {
    AgenticPpoConfig { group_filter: GroupFilter::Varied, refill_rounds, ..config() }
}

#[test]
fn groups_of_equal_scores_are_refilled_with_the_next_rows() {
    let (mut algorithm, asked) = algorithm(&refills(3));
    let mut model = Bigram::of("xyz");
    let mut next = 0;
    for i in 0..3 {
        let report = step(&mut algorithm, &mut model, i, 1.0).unwrap();
        let numbers: BTreeSet<u64> = std::mem::take(&mut *asked.lock().unwrap()).into_iter().collect();
        let drawn = report.metrics["env/groups_drawn"] as u64;
        // No row is left out, and none is asked twice.
        assert_eq!(numbers, (next..next + drawn).collect());
        next += drawn;
        // All groups of odd numbers are left out, and their places filled.
        let odd = numbers.iter().filter(|number| *number % 2 == 1).count() as f64;
        assert!(drawn > 4 && report.metrics["env/groups_filtered"] >= odd, "{:?}", report.metrics);
        let groups: BTreeSet<u64> = report.records.iter().map(|record| record["group"].as_u64().unwrap()).collect();
        assert_eq!(groups.len() as u64, drawn, "each group is one of its own");
    }
    // Without rounds the step trains on fewer groups, and nothing is counted.
    let (mut algorithm, _) = self::algorithm(&refills(0));
    let report = step(&mut algorithm, &mut Bigram::of("xyz"), 0, 1.0).unwrap();
    assert!(report.metrics["env/groups_filtered"] >= 2.0 && !report.metrics.contains_key("env/groups_drawn"));
    assert!(!algorithm.state().as_object().unwrap().contains_key("refilled"), "checkpoints stay as they were");
}

#[test]
fn the_rounds_of_a_step_are_bounded() {
    let (mut algorithm, asked) = algorithm(&refills(2));
    // All answers are right.
    let mut model = Bigram::of("x");
    model.logits.iter_mut().skip('$' as usize).step_by(128).for_each(|logit| *logit = -1000.0);
    let report = step(&mut algorithm, &mut model, 0, 1.0).unwrap();
    assert_eq!((report.metrics["env/groups_drawn"], report.metrics["env/groups_filtered"]), (12.0, 12.0));
    assert_eq!((report.skipped.len(), report.applied), (4, false));
    assert_eq!(asked.lock().unwrap().len(), 12 * 8);
}

#[test]
fn a_resumed_run_goes_on_with_the_same_rows() {
    let config = refills(2);
    let ((mut whole, _), (mut resumed, _)) = (algorithm(&config), algorithm(&config));
    let mut model = Bigram::of("xyz");
    (0..2).for_each(|i| drop(step(&mut whole, &mut model, i, 1.0).unwrap()));
    let state = whole.state().to_string();
    resumed.load_state(&serde_json::from_str(&state).unwrap()).unwrap();
    let mut copy = Bigram::of("xyz");
    copy.logits = model.logits.clone();
    for i in 2..4 {
        let [a, b] = [(&mut whole, &mut model), (&mut resumed, &mut copy)].map(|(algorithm, model)| {
            let StepReport { records, mut metrics, .. } = step(algorithm, model, i, 1.0).unwrap();
            metrics.retain(|name, _| !name.starts_with("time/"));
            (records, metrics, algorithm.state())
        });
        assert_eq!(a, b);
    }
    assert_eq!(model.logits, copy.logits);
    let ahead = AgenticPpoConfig { async_generation_ratio: 1, ..config };
    let refused = AgenticPpo::new(ahead).err().unwrap().to_string();
    assert!(refused.contains("algo.refill_rounds"), "{refused}");
}

#[test]
fn ranks_refill_the_same_groups() {
    let train = |ranks: usize| {
        let results = ThreadRanks::run(ranks, Duration::from_secs(60), |ranks| {
            let mut algorithm =
                AgenticPpo::new(AgenticPpoConfig { num_env_groups: 3, ..refills(3) })?.on(ranks.clone());
            let row = || Rows { number: 0, split: Split::Train, asked: Asked::default() };
            algorithm.open_environments(&mut || Ok(Box::new(row())))?;
            let mut strategy = roll_backends::strategy::Zero::new(Default::default(), ranks)?;
            let mut model = Bigram::of("xyz");
            roll_core::Strategy::attach(&mut strategy, &mut model, &Default::default())?;
            let mut reports = Vec::new();
            for step in 0..2 {
                let StepReport { records, mut metrics, .. } = algorithm.step(&mut StepContext {
                    step,
                    samples: &[],
                    model: &mut model,
                    reward: None,
                    strategy: &mut strategy,
                    learning_rate: 0.0,
                    noise: &Noise::new(1),
                    progress: &Silent,
                    want_videos: false,
                })?;
                metrics.retain(|name, _| name.starts_with("env/"));
                reports.push((records, metrics));
            }
            Ok::<_, Error>(reports)
        });
        let mut results = results.into_iter().map(Result::unwrap);
        let first = results.next().unwrap();
        assert!(results.all(|other| other == first), "the ranks disagree");
        first
    };
    let alone = train(1);
    for ranks in [2, 5] {
        assert_eq!(train(ranks), alone, "{ranks} ranks");
    }
}

#[test]
fn a_validation_with_several_episodes_of_a_start_has_pass_at_k() {
    let config = AgenticPpoConfig { val_group_size: 4, val_temperature: 1.0, val_batch_size: 20, ..config() };
    let validate = |ranks: usize| {
        let found = ThreadRanks::run(ranks, Duration::from_secs(60), |ranks| {
            let mut algorithm = AgenticPpo::new(config.clone())?.on(ranks);
            let row = || Rows { number: 0, split: Split::Train, asked: Asked::default() };
            algorithm.open_environments(&mut || Ok(Box::new(row())))?;
            algorithm.validate(7, &mut Bigram::of("xyz"), &Noise::new(1), &Silent)
        });
        found.into_iter().next().unwrap().unwrap().unwrap()
    };
    let alone = validate(1);
    let mut starts: BTreeMap<u64, Vec<bool>> = BTreeMap::new();
    for record in &alone.records {
        starts.entry(record["group"].as_u64().unwrap()).or_default().push(record["solved"] == true);
    }
    assert!(starts.len() == 20 && starts.values().all(|episodes| episodes.len() == 4));
    let any = starts.values().filter(|episodes| episodes.iter().any(|solved| *solved)).count() as f64 / 20.0;
    let metric = |name: &str| alone.metrics[&format!("val/env/{name}")];
    assert_eq!(metric("pass@4"), any);
    assert!((metric("pass@1") - metric("success")).abs() < 1e-12);
    assert!(metric("pass@1") < metric("pass@2") && metric("pass@2") < metric("pass@4"));
    assert_eq!(validate(3), alone);
    let greedy = AgenticPpoConfig { val_temperature: 0.0, ..config.clone() };
    assert!(AgenticPpo::new(greedy).err().unwrap().to_string().contains("algo.val_temperature"));
}
