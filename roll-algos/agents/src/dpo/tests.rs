//! The whole algorithm on a model that can be differentiated by hand.

#![allow(clippy::unwrap_used)]
use std::time::Duration;

use roll_backends::strategy::{Zero, ZeroOptions};
use roll_core::{
    Algorithm, BuildContext, Error, LanguageModel, Model, Noise, OptimizerConfig, OwnDataAlgorithm, Result, Silent,
    StepContext, StepReport, Strategy, ThreadRanks,
};
use roll_step::update::OnNonfinite;
use roll_testing::training::{Run, agreed, assert_same_runs};
use roll_testing::{Bigram, Descent};
use serde_json::{Value, json};

use super::preferences::Pair;
use super::*;

fn file(rows: &[Value]) -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data.jsonl");
    std::fs::write(&path, rows.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
    (dir, path)
}

/// The preferences of a file with `rows`, or the error of reading and checking them.
fn checked(rows: &[Value], model: &Bigram) -> Result<Preferences, String> {
    let (_dir, path) = file(rows);
    let mut data = Preferences::read(&path).map_err(|e| e.chain())?;
    data.check("algo.data", model.context_length(), model).map_err(|e| e.chain())?;
    Ok(data)
}

fn turn(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

fn row(prompt: &str, chosen: &str, rejected: &str) -> Value {
    json!({"prompt": prompt, "chosen": chosen, "rejected": rejected})
}

/// The samples of the answers as text, each with the text that counts.
fn texts(pair: &Pair, model: &Bigram) -> [Vec<[String; 2]>; 2] {
    [0, 1].map(|side| {
        let texts = pair.answers[side].iter().map(|tokens| {
            let whole = model.detokenize(&tokens.ids).unwrap();
            let counts = whole.chars().zip(&tokens.train).filter(|(_, train)| **train).map(|(c, _)| c).collect();
            [whole, counts]
        });
        texts.collect()
    })
}

fn pair(rows: &[Value], model: &Bigram) -> [Vec<[String; 2]>; 2] {
    let data = checked(rows, model).unwrap();
    texts(&data.pair(0, usize::MAX, model).unwrap().unwrap(), model)
}

#[test]
fn only_answers_after_the_common_messages_count() {
    let begin = [turn("user", "ab"), turn("assistant", "c"), turn("user", "d")];
    let side = |answer: &[Value]| [&begin[..], answer].concat();
    let data = json!({
        "chosen": side(&[turn("assistant", "ef")]),
        "rejected": side(&[turn("assistant", "g"), turn("user", "h"), turn("assistant", "i")]),
    });
    let expected = [
        vec![["u:ab$a:c$u:d$a:ef$".to_string(), "ef$".to_string()]],
        vec![["u:ab$a:c$u:d$a:g$u:h$a:i$".to_string(), "g$i$".to_string()]],
    ];
    assert_eq!(pair(std::slice::from_ref(&data), &Bigram::new()), expected);
    // What the template writes after the end of a turn, and the blank of a tokenizer, do not count.
    let model = {
        let mut model = Bigram::new();
        (model.after_end, model.adds_blank) = ("\n", true);
        model
    };
    let [chosen, rejected] = pair(std::slice::from_ref(&data), &model);
    assert_eq!((chosen[0][1].as_str(), rejected[0][1].as_str()), ("ef$", "g$i$"));
    // A template that rewrites earlier answers: each answer after the text that asks for it.
    let model = {
        let mut model = Bigram::new();
        model.forgets = true;
        model
    };
    let expected = [["u:ab$a:$u:d$a:g$", "g$"], ["u:ab$a:$u:d$a:$u:h$a:i$", "i$"]];
    assert_eq!(pair(&[data], &model)[1], expected.map(|sample| sample.map(String::from)));
}

#[test]
fn a_common_beginning_of_answers_counts() {
    let [chosen, rejected] = pair(&[row("q", "same x", "same y")], &Bigram::new());
    assert_eq!((chosen[0][1].as_str(), rejected[0][1].as_str()), ("same x$", "same y$"));
}

#[test]
fn rows_that_are_no_pairs_are_named_by_their_line() {
    let good = row("a", "b", "c");
    let talk = |role: &str| json!([turn("user", "a"), turn(role, "b")]);
    let weighted = json!([turn("user", "a"), {"role": "assistant", "content": "x", "weight": 0}]);
    for (row, words) in [
        (json!({"prompt": "a", "chosen": "b"}), "line 2: expected `rejected`"),
        (
            json!({"chosen": talk("robot"), "rejected": talk("assistant")}),
            "line 2: `chosen`: message 2: the role `robot`",
        ),
        (json!({"chosen": talk("assistant"), "rejected": talk("user")}), "line 2: `rejected`: message 2: the first"),
        (
            json!({"chosen": talk("assistant"), "rejected": [turn("user", "a")]}),
            "line 2: `rejected`: expected an answer",
        ),
        (json!({"chosen": talk("assistant"), "rejected": weighted}), "line 2: `rejected`: expected an answer"),
        (
            json!({"prompt": "a", "chosen": [{"role": "assistant", "content": "b", "name": "x"}], "rejected": "c"}),
            "line 2, `chosen`: message 2: the model's chat template does not write `name`",
        ),
    ] {
        let problem = checked(&[good.clone(), row.clone()], &Bigram::new()).map(drop).unwrap_err();
        assert!(problem.contains("data.jsonl") && problem.contains(words), "{row}: {problem}");
    }
}

#[test]
fn pairs_without_a_difference_are_left_out() {
    let same = row("a", "b", "b");
    let data = checked(&[same.clone(), row("a", "b", "c"), same.clone()], &Bigram::new()).unwrap();
    assert_eq!((data.len(), data.origin(0).ends_with("line 2")), (1, true));
    let problem = checked(&[same], &Bigram::new()).map(drop).unwrap_err();
    assert!(problem.contains("expected pairs of different answers"), "{problem}");
}

#[test]
fn a_file_of_pairs_that_are_too_long_is_refused() {
    let model = {
        let mut model = Bigram::new();
        model.context = 8;
        model
    };
    let problem = checked(&[row("long prompt", "b", "c")], &model).map(drop).unwrap_err();
    assert!(problem.contains("within 8 tokens") && problem.contains("18 tokens are more"), "{problem}");
}

/// Eight pairs of different lengths, all of whose chosen answers end with `y`.
fn rows() -> Vec<Value> {
    (0..8).map(|i| row(&"pq"[..1 + i % 2], &format!("{}y", "x".repeat(i % 3)), &"zx".repeat(1 + i % 2))).collect()
}

fn preferences_of(rows: &[Value]) -> Preferences {
    let (_dir, path) = file(rows);
    Preferences::read(&path).unwrap()
}

/// A model whose logits and reference are not constant.
fn model() -> Bigram {
    let mut model = Bigram::new();
    let wave = |scale: f32| (0..model.logits.len()).map(|i| (i as f32 * scale).sin()).collect::<Vec<f32>>();
    let (logits, reference) = (wave(0.7), wave(1.3));
    (model.logits, model.reference) = (logits, Some(reference));
    model
}

fn step(dpo: &mut Dpo, number: u64, model: &mut Bigram, strategy: &mut dyn Strategy, rate: f64) -> Result<StepReport> {
    dpo.step(&mut StepContext {
        step: number,
        samples: &[],
        model,
        reward: None,
        strategy,
        learning_rate: rate,
        noise: &Noise::new(1),
        progress: &Silent,
        want_videos: false,
    })
}

fn forms() -> Vec<DpoConfig> {
    let config = DpoConfig { batch_size: 8, micro_batch_size: 3, beta: 0.5, ..DpoConfig::default() };
    vec![
        config.clone(),
        DpoConfig { label_smoothing: 0.1, ..config.clone() },
        DpoConfig { ipo: true, ..config.clone() },
        DpoConfig { length_normalised: true, ..config.clone() },
        DpoConfig { length_normalised: true, reference_free: true, beta: 2.0, margin: 1.0, ..config },
    ]
}

#[test]
fn the_gradient_of_a_step_matches_differences_of_its_loss() {
    let data = preferences_of(&rows());
    for config in forms() {
        let loss_and_gradient = |model: &mut Bigram| {
            let (mut dpo, mut strategy) = (Dpo::new(config.clone(), data.clone()).unwrap(), Descent::default());
            let report = step(&mut dpo, 0, model, &mut strategy, 0.0).unwrap();
            (report.metrics["actor/loss"], strategy.gradient)
        };
        let (_, gradient) = loss_and_gradient(&mut model());
        for [last, next] in ["xy", ":y", ":z", "zx", "y$", "x$"].map(|pair| [pair.as_bytes()[0], pair.as_bytes()[1]]) {
            let at = usize::from(last) * 128 + usize::from(next);
            let moved = |by: f32| {
                let mut model = model();
                model.logits[at] += by;
                loss_and_gradient(&mut model).0
            };
            let quotient = (moved(1e-2) - moved(-1e-2)) / 2e-2;
            let expected = f64::from(gradient[at]);
            assert!((quotient - expected).abs() < 1e-3 * expected.abs().max(0.1), "{config:?}: {quotient} {expected}");
        }
    }
}

/// Trains for two passes on several ranks, and returns parameters and metrics.
fn train(config: &DpoConfig, ranks: usize) -> Run {
    let data = preferences_of(&rows());
    let results = ThreadRanks::run(ranks, Duration::from_secs(60), |ranks| {
        let mut strategy = Zero::new(ZeroOptions::default(), ranks.clone())?;
        let mut dpo = Dpo::new(config.clone(), data.clone())?.on(ranks);
        let mut model = model();
        dpo.check(&mut model, None)?;
        // AdamW would otherwise scale the rounding of gradients that cancel up to whole updates.
        strategy.attach(&mut model, &OptimizerConfig { eps: 1e-2, ..OptimizerConfig::default() })?;
        let mut metrics = Vec::new();
        for number in 0..4 {
            let report = step(&mut dpo, number, &mut model, &mut strategy, 0.05)?;
            metrics.push(report.metrics.into_iter().filter(|(name, _)| !name.starts_with("time/")).collect());
        }
        Ok(Run { parameters: model.logits, metrics })
    });
    agreed(results)
}

#[test]
fn results_do_not_depend_on_ranks_or_micro_batches() {
    for config in forms() {
        let config = DpoConfig { batch_size: 4, ..config };
        let expected = train(&config, 1);
        for (ranks, micro_batch_size) in [(1, 1), (1, 4), (2, 3), (4, 1)] {
            let found = train(&DpoConfig { micro_batch_size, ..config.clone() }, ranks);
            assert_same_runs(&found, &expected, 1e-5, 1e-5);
        }
    }
}

#[test]
fn the_reference_evaluates_each_pair_once() {
    let data = preferences_of(&rows());
    for (config, evaluated) in forms().into_iter().zip([16, 16, 16, 16, 0]) {
        let mut dpo = Dpo::new(DpoConfig { batch_size: 3, ..config }, data.clone()).unwrap();
        let (mut model, mut strategy) = (model(), Descent::default());
        for number in 0..9 {
            step(&mut dpo, number, &mut model, &mut strategy, 0.1).unwrap();
        }
        assert_eq!(model.referred, evaluated, "two answers of each pair");
    }
}

#[test]
fn a_resumed_run_has_the_bits_of_an_uninterrupted_one() {
    let data = preferences_of(&rows());
    let config = DpoConfig { batch_size: 3, micro_batch_size: 2, ..DpoConfig::default() };
    let begin = || (Dpo::new(config.clone(), data.clone()).unwrap(), model());
    let run = |dpo: &mut Dpo, model: &mut Bigram, steps: std::ops::Range<u64>| {
        let mut strategy = Descent::default();
        let losses = steps.map(|n| step(dpo, n, model, &mut strategy, 0.1).unwrap().metrics["actor/loss"]);
        losses.collect::<Vec<f64>>()
    };
    let (mut dpo, mut model) = begin();
    let losses = run(&mut dpo, &mut model, 0..8);
    let (mut first, mut interrupted) = begin();
    let mut resumed_losses = run(&mut first, &mut interrupted, 0..4);
    let (mut second, mut resumed) = begin();
    second.load_state(&first.state()).unwrap();
    second.load_tensors(&first.tensors().unwrap()).unwrap();
    resumed.write_parameters(&interrupted.logits).unwrap();
    resumed_losses.extend(run(&mut second, &mut resumed, 4..8));
    assert_eq!((losses, model.logits), (resumed_losses, resumed.logits));
}

#[test]
fn the_reference_of_other_pairs_is_not_taken_from_a_checkpoint() {
    let (mut model, mut strategy) = (model(), Descent::default());
    let mut first = Dpo::new(DpoConfig::default(), preferences_of(&rows())).unwrap();
    step(&mut first, 0, &mut model, &mut strategy, 0.1).unwrap();
    let mut other_rows = rows();
    other_rows.swap(0, 1);
    for (rows, are_known) in [(rows(), true), (other_rows, false)] {
        let mut second = Dpo::new(DpoConfig::default(), preferences_of(&rows)).unwrap();
        second.load_state(&first.state()).unwrap();
        second.load_tensors(&first.tensors().unwrap()).unwrap();
        assert_eq!((0..rows.len()).any(|row| second.reference.get(row).is_some()), are_known);
    }
}

#[test]
fn pairs_that_are_too_long_are_left_out_and_counted() {
    let long = row(&"p".repeat(20), "y", "z");
    let gradient_of = |rows: &[Value], batch_size: usize| {
        let config = DpoConfig { batch_size, sequence_length: Some(16), shuffle: false, ..DpoConfig::default() };
        let mut dpo = Dpo::new(config, preferences_of(rows)).unwrap();
        let (mut model, mut strategy) = (model(), Descent::default());
        dpo.check(&mut model, None).unwrap();
        let report = step(&mut dpo, 0, &mut model, &mut strategy, 0.1).unwrap();
        (report.skipped, strategy.gradient)
    };
    let (skipped, with_long) = gradient_of(&[&rows()[..], &[long]].concat(), 9);
    assert!(skipped.len() == 1 && skipped[0].0.ends_with("line 9"), "{skipped:?}");
    assert!(skipped[0].1.contains("27 tokens are more than the 16 allowed"), "{skipped:?}");
    let (_, without) = gradient_of(&rows(), 8);
    assert_eq!(with_long, without);
}

#[test]
fn a_loss_that_is_not_finite_changes_nothing() {
    let (mut model, mut strategy) = (model(), Descent::default());
    model.logits['x' as usize * 128 + 'y' as usize] = f32::NEG_INFINITY;
    let before = model.logits.clone();
    let mut report = |on_nonfinite| {
        let config = DpoConfig { batch_size: 8, on_nonfinite, ..DpoConfig::default() };
        step(&mut Dpo::new(config, preferences_of(&rows())).unwrap(), 0, &mut model, &mut strategy, 0.1)
    };
    assert!(!report(OnNonfinite::Skip).unwrap().applied);
    let error = report(OnNonfinite::Stop).unwrap_err();
    assert!(matches!(error, Error::NonFinite { .. }), "{error}");
    assert_eq!(model.logits, before);
}

#[test]
fn a_preference_is_learnt_and_holds_for_prompts_that_were_not_trained_on() {
    // Answers with `y` are preferred to answers with `z`, whatever the prompt.
    let rows = |prompts: &str| -> Vec<Value> { prompts.chars().map(|p| row(&p.to_string(), "xy", "xz")).collect() };
    for config in forms() {
        let config = DpoConfig { batch_size: 2, ..config };
        // A policy that is the reference has equal rewards.
        let accuracy = if config.reference_free { 0.0 } else { 0.5 };
        let mut dpo =
            Dpo::new(config, preferences_of(&rows("abcdef"))).unwrap().validating(preferences_of(&rows("gh")));
        // At first the model prefers the other answer, and so does its reference.
        let mut model = Bigram::new();
        model.logits['x' as usize * 128 + 'z' as usize] = 1.0;
        model.reference = Some(model.logits.clone());
        dpo.check(&mut model, None).unwrap();
        let validate =
            |dpo: &mut Dpo, model: &mut Bigram| dpo.validate(0, model, &Noise::new(1), &Silent).unwrap().unwrap();
        let before = validate(&mut dpo, &mut model);
        assert_eq!(before.metrics["val/rewards/accuracy"], accuracy);
        assert_eq!((before.records.len(), &before.records[0]["wanted"]), (2, &json!("xy$")));
        let mut strategy = Descent::default();
        for number in 0..30 {
            step(&mut dpo, number, &mut model, &mut strategy, 1.0).unwrap();
        }
        let after = validate(&mut dpo, &mut model);
        assert_eq!(after.metrics["val/rewards/accuracy"], 1.0, "{after:?}");
        assert!(after.metrics["val/loss"] < before.metrics["val/loss"], "{before:?} {after:?}");
        assert!(after.metrics["val/rewards/margin"] > before.metrics["val/rewards/margin"]);
    }
}

#[test]
fn a_validation_is_the_same_on_any_number_of_ranks() {
    let data = preferences_of(&rows());
    let validate = |ranks: usize| {
        let results = ThreadRanks::run(ranks, Duration::from_secs(60), |ranks| {
            let config = DpoConfig { batch_size: 6, micro_batch_size: 2, ..DpoConfig::default() };
            let mut dpo = Dpo::new(config, data.clone())?.validating(data.clone()).on(ranks);
            Ok(dpo.validate(0, &mut model(), &Noise::new(1), &Silent)?.unwrap().metrics)
        });
        results.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    };
    let expected = validate(1).remove(0);
    for metrics in [2, 3].into_iter().flat_map(validate) {
        for (name, value) in &expected {
            assert!((metrics[name] - value).abs() < 1e-9, "{name}: {value} {}", metrics[name]);
        }
    }
}

#[test]
fn invalid_options_and_missing_data_are_refused() {
    for (config, key) in [
        (DpoConfig { beta: 0.0, ..DpoConfig::default() }, "algo.beta"),
        (DpoConfig { label_smoothing: 0.5, ..DpoConfig::default() }, "algo.label_smoothing"),
        (DpoConfig { margin: -1.0, ..DpoConfig::default() }, "algo.margin"),
        (DpoConfig { batch_size: 0, ..DpoConfig::default() }, "algo.batch_size"),
    ] {
        let problem = Dpo::new(config, Preferences::default()).err().unwrap().to_string();
        assert!(problem.contains(key), "{problem}");
    }
    let problem = Dpo::open(DpoConfig::default(), &BuildContext::new("flex")).err().unwrap().to_string();
    assert!(problem.contains("algo.data"), "{problem}");
    let dpo = Dpo::new(DpoConfig { batch_size: 3, ..DpoConfig::default() }, preferences_of(&rows())).unwrap();
    assert_eq!(dpo.steps_per_epoch(), Some(3));
}
