//! Rewards from libraries: good ones, and the outcome of each misbehaviour.

#![allow(clippy::unwrap_used)]

mod common;

use common::library;
use roll_core::{
    BuildContext, Fault, Grad, OnMissing, Options, Registry, Replaces, RewardScorer, Score, Tensor, Video,
};
use roll_core::{Verdict, check_reward};
use roll_plugin::{Plugin, load};

fn plugin(name: &str) -> Plugin {
    load(library(name)).unwrap()
}

fn context() -> BuildContext {
    BuildContext { backend: "flex".into(), seed: 0, base_dir: ".".into(), placement: None }
}

fn registry(name: &str) -> Registry {
    Registry::linked().unwrap().with_components(&plugin(name).registrations(), Replaces::Nothing).unwrap()
}

fn options(pairs: &[(&str, &str)]) -> Options {
    pairs.iter().map(|(k, v)| (k.to_string(), (*v).into())).collect()
}

fn hostile(at: &str, how: &str) -> roll_core::Result<Box<dyn RewardScorer>> {
    registry("hostile_plugin").reward("hostile", &options(&[("at", at), ("how", how)]), &context())
}

fn video() -> Video {
    let values = (0..2 * 3 * 8 * 8).map(|i| ((i * 37 % 101) as f32) / 101.0 - 0.5).collect();
    Video::new(Tensor::new(values, [2, 3, 8, 8]).unwrap(), 8.0).unwrap()
}

/// The error of making, preparing, scoring and pulling.
fn go(at: &str, how: &str) -> roll_core::Result<Tensor> {
    let mut scorer = hostile(at, how)?;
    let target = scorer.prepare(&video())?;
    let (score, pullback) = scorer.score(&video(), "a prompt", &target, Grad::Record)?;
    match (score, pullback) {
        (Score::Value { .. }, Some(pullback)) => pullback.pull(&Tensor::scalar(2.0)),
        (other, _) => panic!("no pullback of {other:?}"),
    }
}

fn told(error: &roll_core::Error) -> String {
    roll_core::one_line(error)
}

#[test]
fn a_reward_of_a_library_scores_and_pulls_back_as_one_that_is_linked_in() {
    let linked = |grad| {
        let mut own = sharpness_reward::Sharpness { scale: 0.1 };
        own.score(&video(), "", &Default::default(), grad).unwrap()
    };
    let scale = [("scale".to_string(), 0.1.into())].into_iter().collect();
    let mut loaded = registry("sharpness_reward").reward("edges", &scale, &context()).unwrap();
    assert_eq!((loaded.name(), loaded.differentiable(), loaded.on_missing()), ("edges", true, OnMissing::Skip));
    let target = loaded.prepare(&video()).unwrap();
    let (score, pullback) = loaded.score(&video(), "", &target, Grad::Record).unwrap();
    let (expected, own) = linked(Grad::Record);
    assert_eq!(score, expected);
    let cotangent = Tensor::scalar(-0.7);
    let (theirs, ours) = (pullback.unwrap().pull(&cotangent).unwrap(), own.unwrap().pull(&cotangent).unwrap());
    assert_eq!(theirs.as_bytes(), ours.as_bytes());
    assert!(loaded.score(&video(), "", &target, Grad::Skip).unwrap().1.is_none());
}

#[test]
fn targets_details_and_missing_scores_cross() {
    let mut scorer = hostile("", "").unwrap();
    let target = scorer.prepare(&video()).unwrap();
    assert_eq!(target.tensors["weights"].f32s().unwrap(), [0.25; 4]);
    let (score, _) = scorer.score(&video(), "", &target, Grad::Skip).unwrap();
    let Score::Value { details, .. } = score else { panic!("{score:?}") };
    assert_eq!(details["pixels"], 384.0);
    assert_eq!(scorer.on_missing(), OnMissing::Value(-1.0));
    let (score, _) = hostile("score", "missing").unwrap().score(&video(), "a cat", &target, Grad::Skip).unwrap();
    assert_eq!(score, Score::Missing { reason: "nothing in a cat".into() });
}

#[test]
fn results_outlive_the_object_that_made_them() {
    let (target, pullback) = {
        let mut scorer = hostile("", "").unwrap();
        let target = scorer.prepare(&video()).unwrap();
        let pullback = scorer.score(&video(), "", &target, Grad::Record).unwrap().1.unwrap();
        (target, pullback)
    };
    let gradient = pullback.pull(&Tensor::scalar(384.0)).unwrap();
    assert!(gradient.f32s().unwrap().iter().all(|g| *g == 1.0));
    drop(target);
    assert_eq!(gradient.shape(), [2, 3, 8, 8]);
}

#[test]
fn a_panic_in_each_entry_point_is_an_error_that_names_plugin_file_method_and_place() {
    let cases = [
        ("make", "make"),
        ("name", "name"),
        ("differentiable", "name"),
        ("on_missing", "name"),
        ("prepare", "prepare"),
        ("score", "score"),
        ("pull", "pull"),
    ];
    for (at, call) in cases {
        let error = told(&go(at, "panic").unwrap_err());
        for part in
            ["`hostile_plugin`", "libhostile_plugin.so", &format!("`{call}`"), &format!("a panic in {at}"), "lib.rs:"]
        {
            assert!(error.contains(part), "{at}: no {part} in: {error}");
        }
    }
}

#[test]
fn a_panic_poisons_the_object_and_no_other() {
    let mut scorer = hostile("prepare", "panic").unwrap();
    scorer.prepare(&video()).unwrap_err();
    let target = hostile("", "").unwrap().prepare(&video()).unwrap();
    let error = told(&scorer.score(&video(), "", &target, Grad::Skip).unwrap_err());
    assert!(error.contains("not called again") && error.contains("a panic in prepare"), "{error}");
    assert!(hostile("", "").unwrap().prepare(&video()).is_ok());
}

#[test]
fn panics_with_odd_payloads_in_other_threads_and_in_drops_end_nothing() {
    let error = told(&go("score", "panic_value").unwrap_err());
    assert!(error.contains("panicked"), "{error}");
    let error = told(&go("score", "panic_thread").unwrap_err());
    assert!(error.contains("the thread ended: true"), "{error}");
    drop(hostile("drop", "panic").unwrap());
    let mut scorer = hostile("drop_pullback", "").unwrap();
    let target = scorer.prepare(&video()).unwrap();
    drop(scorer.score(&video(), "", &target, Grad::Record).unwrap());
    assert!(go("", "").is_ok());
}

#[test]
fn errors_keep_their_causes_and_their_fault() {
    let error = go("prepare", "error").unwrap_err();
    assert_eq!(error.fault(), Fault::Failure);
    assert!(told(&error).contains("doing prepare: a failure of its own"), "{}", told(&error));
    let error = go("make", "user_error").unwrap_err();
    assert_eq!(error.fault(), Fault::User);
    assert!(told(&error).contains("`reward.how`"), "{}", told(&error));
    assert!(matches!(go("score", "interrupt").unwrap_err(), roll_core::Error::Interrupted));
}

#[test]
fn wrong_results_are_errors_that_name_the_plugin() {
    for (at, how, part) in [
        ("pull", "shape", "[2, 3, 8, 8]"),
        ("pull", "dtype", "f32"),
        ("score", "nan", "not finite"),
        ("score", "no_pullback", "no pullback"),
    ] {
        let error = told(&go(at, how).unwrap_err());
        assert!(error.contains(part) && error.contains("libhostile_plugin.so"), "{at} {how}: {error}");
    }
}

#[test]
fn options_are_checked_before_the_plugin_sees_them() {
    let make = |name: &str, value: roll_core::serde_json::Value| {
        let options = [(name.to_string(), value)].into_iter().collect();
        registry("sharpness_reward").reward("edges", &options, &context()).map(drop).unwrap_err()
    };
    let error = told(&make("scael", 1.0.into()));
    assert!(error.contains("`reward.scael`") && error.contains("did you mean `scale`"), "{error}");
    let error = told(&make("scale", "wide".into()));
    assert!(error.contains("`reward.scale`: expected a number, found \"wide\""), "{error}");
    let defaults = registry("color_reward").find(roll_core::Kind::Reward, "colors").unwrap().options();
    assert_eq!(defaults["bins"], 8);
}

#[test]
fn the_check_passes_good_rewards_and_finds_a_wrong_gradient() {
    for (name, reward) in [("sharpness_reward", "edges"), ("color_reward", "colors"), ("hostile_plugin", "hostile")] {
        let mut scorer = registry(name).reward(reward, &Options::new(), &context()).unwrap();
        let findings = check_reward(scorer.as_mut(), 1);
        assert!(findings.iter().all(|f| f.verdict != Verdict::Broken), "{name}: {findings:#?}");
    }
    struct Doubled(Box<dyn RewardScorer>);
    impl RewardScorer for Doubled {
        fn name(&self) -> &str {
            "doubled"
        }
        fn differentiable(&self) -> bool {
            true
        }
        fn prepare(&mut self, reference: &Video) -> roll_core::Result<roll_core::Target> {
            self.0.prepare(reference)
        }
        fn score(
            &mut self,
            video: &Video,
            prompt: &str,
            target: &roll_core::Target,
            grad: Grad,
        ) -> roll_core::Result<(Score, Option<roll_core::Pullback>)> {
            let (score, pullback) = self.0.score(video, prompt, target, grad)?;
            let wrong = pullback.map(|p| {
                roll_core::Pullback::new(move |c| {
                    let twice = p.pull(c)?.to_f32_vec().into_iter().map(|g| 1.1 * g).collect::<Vec<f32>>();
                    let shape = [twice.len()];
                    Tensor::new(twice, shape)
                })
            });
            let shape = video.frames().shape().to_vec();
            let shaped = wrong.map(|p| roll_core::Pullback::new(move |c| p.pull(c)?.reshape(shape)));
            Ok((score, shaped))
        }
    }
    let inner = registry("sharpness_reward").reward("edges", &Options::new(), &context()).unwrap();
    let findings = check_reward(&mut Doubled(inner), 1);
    assert!(
        findings.iter().any(|f| f.verdict == Verdict::Broken && f.promise.contains("differences")),
        "{findings:#?}"
    );
}

#[test]
fn events_of_a_plugin_reach_the_tracing_of_the_host() {
    use std::io::Write;
    use std::sync::{Arc, Mutex};
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);
    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    roll_core::tracing::subscriber::with_default(subscriber, || go("score", "log").unwrap());
    let said = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    assert!(said.contains("INFO plugin: hostile_plugin: a message from score answer=42"), "{said}");
}
