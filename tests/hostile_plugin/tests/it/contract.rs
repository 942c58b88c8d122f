//! The contract of the boundary, P1 to P9 of `roll_plugin::abi`: what holds for components that keep it. `rules` has
//! what happens to those that do not.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use hostile_plugin::{Fault, toy};
use roll_core::plan::{PlanInput, Planner, Speed};
use roll_core::{
    Adapter, Algorithm, BuildContext, ClipAlgorithm, ConditionInput, Environment, Error, EvaluationContext,
    Fault as Whose, Grad, GradientSink, Model, Noise, Observation, OnMissing, OptimizerConfig, Options, Progress,
    Result, RewardScorer, Sample, Samples, Sampling, Score, Silent, Split, StepContext, StepReport, Strategy, Tensor,
    ThreadRanks, Timestep, VideoUnit, WeightPlacement,
};
use roll_plugin::load;
use roll_testing::{Bigram, sample};

use super::{context, hostile, library, names, options, plugin, registry, video};

/// What every error of the plugin names.
pub(super) const WHOSE: [&str; 2] = ["`hostile_plugin`", "libhostile_plugin.so"];

/// A fault such as `velocity:panic`; an empty text means no fault.
fn fault(text: &str) -> (Fault, Options) {
    let (at, how) = text.split_once(':').unwrap_or((text, ""));
    (Fault { at: at.into(), how: how.into(), after: 0 }, options(&[("at", at), ("how", how)]))
}

/// A function that makes a component linked in, or of the library.
macro_rules! makers {
    ($( $kind:ident: $trait:ident $name:literal )*) => {$(
        pub(super) fn $kind(loaded: bool, faulty: &str) -> Box<dyn $trait> {
            let (own, options) = fault(faulty);
            match loaded {
                true => registry(&plugin("hostile_plugin")).$kind($name, &options, &context()).unwrap(),
                false => Box::new(toy::$kind(own, &context()).unwrap()),
            }
        }
    )*};
}
makers! {
    model: Model "toy"
    reward: RewardScorer "hostile"
    strategy: Strategy "toy"
    algorithm: Algorithm "toy"
    environment: Environment "toy"
}

fn samples() -> Vec<Sample> {
    let image = Some(Tensor::full([3, 4, 4], 0.5));
    vec![sample(1, "a prompt"), Sample { image, path: Some("clip.mp4".into()), ..sample(2, "another") }]
}

/// Model, reward, strategy, algorithm.
pub(super) struct World {
    pub(super) model: Box<dyn Model>,
    pub(super) reward: Box<dyn RewardScorer>,
    pub(super) strategy: Box<dyn Strategy>,
    pub(super) algorithm: Box<dyn ClipAlgorithm>,
}

impl World {
    /// From the library where a bit is set.
    pub(super) fn new(bits: u32, faulty: &str) -> Self {
        let bit = |n: u32| bits & (1 << n) != 0;
        let (model, reward) = (model(bit(0), faulty), reward(bit(1), faulty));
        let Samples::Clips(algorithm) = algorithm(bit(3), faulty).samples() else { panic!("expected one on clips") };
        Self { model, reward, strategy: strategy(bit(2), faulty), algorithm }
    }

    pub(super) fn step(&mut self, step: u64, progress: &dyn Progress) -> Result<StepReport> {
        self.algorithm.step(&mut StepContext {
            step,
            samples: &samples(),
            model: self.model.as_mut(),
            reward: Some(self.reward.as_mut()),
            strategy: self.strategy.as_mut(),
            learning_rate: 0.1,
            noise: &Noise::new(7),
            progress,
            want_videos: step == 1,
        })
    }

    /// Two steps, a save and a load between them, and an evaluation; everything that can be seen as text.
    pub(super) fn run(&mut self) -> Result<String> {
        self.algorithm.check(self.model.as_mut(), Some(self.reward.as_ref()))?;
        self.strategy.attach(self.model.as_mut(), &OptimizerConfig::default())?;
        let mut seen = String::new();
        for step in 0..2 {
            let report = self.step(step, &Silent)?;
            let videos: Vec<_> = report.videos.iter().map(|(n, v)| (n, v.frames().to_f32_vec(), v.fps())).collect();
            seen += &format!("{:?} {:?} {videos:?} {}\n", report.metrics, report.skipped, report.applied);
            let state = self.strategy.state()?;
            let deliveries = state["deliveries"].f32s()?;
            seen += &format!("{:?} {deliveries:?} {:?}\n", state["gradient"].f32s()?, self.algorithm.state());
            self.strategy.load_state(&state)?;
            self.algorithm.load_state(&self.algorithm.state())?;
            let tensors = self.algorithm.tensors()?;
            seen += &format!("sum {:?}\n", tensors["sum"].f32s()?);
            self.algorithm.load_tensors(&tensors)?;
        }
        let adapter = self.model.export_adapter()?;
        self.model.import_adapter(&adapter)?;
        let adapter: Vec<_> = adapter["adapter"].iter().map(|(k, t)| (k, t.shape().to_vec(), t.to_f32_vec())).collect();
        let evaluated = self.algorithm.evaluate(&mut EvaluationContext {
            samples: &samples(),
            upcoming: &[],
            model: self.model.as_mut(),
            rewards: vec![self.reward.as_mut()],
            noise: &Noise::new(7),
            progress: &Silent,
        })?;
        let evaluated = evaluated.unwrap().into_iter().map(|e| (e.origin, e.scores, e.kl, e.video.map(|v| v.dims())));
        Ok(format!("{seen}{adapter:?} {:?}", evaluated.collect::<Vec<_>>()))
    }
}

/// The error of making a reward, preparing, scoring and pulling.
pub(super) fn scored(at: &str, how: &str) -> Result<Tensor> {
    let mut scorer = hostile(at, how)?;
    let target = scorer.prepare(&video())?;
    let (score, pullback) = scorer.score(&video(), "a prompt", &target, Grad::Record)?;
    match (score, pullback) {
        (Score::Value { .. }, Some(pullback)) => pullback.pull(&Tensor::scalar(2.0)),
        (other, _) => panic!("no pullback of {other:?}"),
    }
}

#[test]
fn p1_arguments_keep_their_bits_in_all_mixes_of_linked_and_loaded_components() {
    let linked = World::new(0, "").run().unwrap();
    assert!(linked.contains("sample-2") && linked.contains("row 1"), "{linked}");
    // Two parameters of two samples in each step came while the pull went on.
    assert!(linked.contains(" [4.0] ") && linked.contains(" [8.0] "), "{linked}");
    for bits in 1..16 {
        assert_eq!(World::new(bits, "").run().unwrap(), linked, "mix {bits:04b}");
    }
}

/// Everything that a language model answers, as text.
fn language(loaded: bool) -> String {
    let mut model: Box<dyn Model> = match loaded {
        true => registry(&plugin("hostile_plugin")).model("bigram", &Options::new(), &context()).unwrap(),
        false => Box::new(Bigram::of("xyz")),
    };
    let language = model.as_language().unwrap();
    let tokens = language.tokenize("green").unwrap();
    let text = language.detokenize(&tokens).unwrap();
    let (stop, numbers, limits) = (vec!["\n".into(), "end".into()], vec![4, 5, 9], vec![2, 3, 1]);
    let sampling = Sampling { temperature: 0.5, limits, stop, seed: 3, numbers, ..Sampling::greedy(3) };
    let made = language.generate(&[tokens, vec![120], vec![121]], &sampling).unwrap();
    let given = Tensor::new(vec![120i64, 121, 122, 121, 120, 36], [2, 3]).unwrap();
    let mask = Tensor::new(vec![1u8, 1, 1, 1, 1, 0], [2, 3]).unwrap();
    let (stats, pullback) = language.evaluate(&given, &mask, &mask, Adapter::On, Grad::Record).unwrap();
    assert_eq!(pullback.unwrap().pull(&Tensor::full([2, 2, 2], 0.5)).unwrap().shape(), [0]);
    let mut gradients = vec![0.0; model.parameter_count()];
    model.take_gradients(&mut gradients).unwrap();
    assert!(gradients.iter().any(|g| *g != 0.0));
    let states = model.as_language().unwrap().hidden_states(&given, &mask, Adapter::Off).unwrap();
    let stats = [&stats.log_probs, &stats.entropy, &states].map(|x| (x.shape().to_vec(), x.to_f32_vec()));
    format!("{text} {made:?} {stats:?} {gradients:?}")
}

/// Conditions, velocity, frames, latents and facts of a diffusion model, as text.
fn diffusion(loaded: bool) -> String {
    let mut model = model(loaded, "");
    let diffusion = model.as_diffusion().unwrap();
    let image = Some(Tensor::full([3, 4, 4], 0.25));
    let input = ConditionInput { prompt: "p".into(), image, end_image: None, frames: 2, size: [1, 2] };
    let c = diffusion.encode(&input).unwrap();
    let x = Tensor::full(c.latent_shape, 0.5);
    let (v, none) = diffusion.velocity(&x, Timestep(500.0), &c, Adapter::Off, Grad::Skip).unwrap();
    assert!(none.is_none() && c.image_tokens.is_none() && c.channels.is_some());
    let frames = diffusion.decode(&v, Grad::Skip).unwrap().0;
    let back = diffusion.encode_video(&frames).unwrap();
    let facts = (diffusion.schedule(), diffusion.video_unit(), diffusion.frame_rate());
    format!("{facts:?} {:?} {:?} {:?}", c.latent_shape, c.channels.unwrap().f32s(), back.f32s())
}

/// Parameters by part, places and descriptions of all kinds, as text.
fn descriptions(loaded: bool) -> String {
    let mut model = model(loaded, "");
    let (mut first, mut all) = ([0.0; 8], [0.0; 64]);
    let parts = model.parts().unwrap();
    parts.write_part(1..2, &[9.0; 56]).unwrap();
    parts.read_part(0..1, &mut first).unwrap();
    model.read_parameters(&mut all).unwrap();
    assert!(all[..8] == first && all[8..] == [9.0; 56]);
    let (reward, strategy, algorithm) = (reward(loaded, ""), strategy(loaded, ""), algorithm(loaded, ""));
    let placements = (model.distribution(), strategy.weight_placement());
    let reward = (reward.measures(), reward.terms(), reward.on_missing(), reward.differentiable());
    format!("{first:?} {placements:?} {reward:?} {:?}", algorithm.headlines())
}

/// An episode, as text.
fn episode(loaded: bool) -> String {
    let mut environment = environment(loaded, "");
    environment.enter(Split::Validation, 1 << 40).unwrap();
    let Observation { text, pictures } = environment.reset(3).unwrap();
    let pixels: Vec<&[u8]> = pictures.iter().map(|picture| picture.pixels().as_bytes()).collect();
    let [next, last] = ["ün", "x"].map(|action| environment.step(action).unwrap());
    environment.leave().unwrap();
    format!("{text} {pixels:?} {next:?} {last:?} {} {:?}", environment.action(), environment.kinds())
}

/// A score, its details and its gradient, as text; and a video in which there is nothing to score.
fn score(loaded: bool) -> String {
    let target = reward(loaded, "").prepare(&video()).unwrap();
    let (score, pullback) = reward(loaded, "").score(&video(), "a cat", &target, Grad::Record).unwrap();
    let gradient = pullback.unwrap().pull(&Tensor::scalar(-0.7)).unwrap();
    let missing = reward(loaded, "score:missing").score(&video(), "a cat", &target, Grad::Skip).unwrap().0;
    format!("{:?} {score:?} {:?} {missing:?}", target.tensors, gradient.as_bytes())
}

#[test]
fn p1_answers_match_those_of_linked_components() {
    let cases: [(fn(bool) -> String, &[&str]); 5] = [
        (language, &["green", "tokens: ["]),
        (diffusion, &["shift: 5.0", "width: 24", "Some(12.0)"]),
        (
            descriptions,
            &["toyness", "[(\"sine\", 2.0), (\"prompt\", 0.0)]", "held out", "Some(Streamed)", "Value(-1.0)"],
        ),
        (episode, &["3 left", "[[0, 3, 6, ", "1 left", "0.25", "terminated: true", "ödd"]),
        (score, &["\"sine\": ", "nothing in a cat"]),
    ];
    for (all, parts) in cases {
        let linked = all(false);
        assert!(parts.iter().all(|part| linked.contains(part)), "{linked}");
        assert_eq!(all(true), linked);
    }
    for placement in [WeightPlacement::Resident, WeightPlacement::Streamed, WeightPlacement::Sharded] {
        let context = BuildContext { placement: Some(placement), ..context() };
        let model = registry(&plugin("hostile_plugin")).model("toy", &Options::new(), &context).unwrap();
        assert_eq!(model.distribution().weights, Some(placement));
    }
}

/// A strategy before its last pull, the model that has its sink, and the sink.
fn delivering(loaded: bool, faulty: &str) -> (toy::ToyModel, Box<dyn Strategy>, Arc<dyn GradientSink>) {
    let (mut model, mut strategy) = (toy::model(Fault::default(), &context()).unwrap(), strategy(loaded, faulty));
    strategy.attach(&mut model, &OptimizerConfig::default()).unwrap();
    strategy.before_last_pull(&mut model).unwrap();
    let sink = model.sink().unwrap();
    (model, strategy, sink)
}

#[test]
fn p2_answers_outlive_the_object_that_made_them() {
    let (target, pullback) = {
        let mut scorer = hostile("", "").unwrap();
        let target = scorer.prepare(&video()).unwrap();
        let pullback = scorer.score(&video(), "", &target, Grad::Record).unwrap().1.unwrap();
        (target, pullback)
    };
    let gradient = pullback.pull(&Tensor::scalar(1.0)).unwrap();
    assert_eq!(target.tensors["level"].item().unwrap(), video().frame(0)[0]);
    drop(target);
    assert_eq!(gradient.shape(), [2, 3, 8, 8]);
    for loaded in [false, true] {
        let (_, strategy, sink) = delivering(loaded, "");
        let ranks = strategy.ranks().all.clone();
        drop(strategy);
        assert!(sink.deliver(0, &[1.0; 8]) && ranks.world_size() == 1);
    }
}

#[test]
fn p3_a_library_is_loaded_once_and_stays() {
    let (first, again) = (plugin("sharpness_reward"), load(library("sharpness_reward")).unwrap());
    // The same component twice is no conflict.
    let registry = registry(&first).with_components(&again.registrations(), Default::default()).unwrap();
    assert!(std::ptr::eq(first.registrations()[0], again.registrations()[0]));
    drop((first, again));
    assert!(registry.reward("edges", &Options::new(), &context()).is_ok());
}

#[test]
fn p4_sinks_and_communicators_are_called_from_many_threads() {
    for loaded in [false, true] {
        let (mut model, mut strategy, sink) = delivering(loaded, "");
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| (0..100).for_each(|_| assert!(sink.deliver(0, &[1.0; 8]))));
            }
        });
        strategy.accumulate(&mut model).unwrap();
        let report = strategy.step(&mut model, 0.0, 1.0).unwrap();
        assert_eq!(report.grad_norm, (8.0 * 800.0f64.powi(2)).sqrt());
    }
    let sums = ThreadRanks::run(3, Duration::from_secs(60), |ranks| {
        let rank = ranks.rank().0 as f32;
        let context = BuildContext { ranks, ..context() };
        let strategy = registry(&plugin("hostile_plugin")).strategy("toy", &Options::new(), &context)?;
        let ranks = strategy.ranks().all.as_ref();
        assert_eq!(ranks.world_size(), 3);
        let mut values = [rank, 1.0];
        ranks.all_reduce(&mut values)?;
        let mut joined = values.to_vec();
        joined.extend(ranks.all_gather_f64(f64::from(rank) / 3.0)?.into_iter().map(|v| v as f32));
        ranks.barrier()?;
        Ok(joined)
    });
    assert!(sums.iter().all(|s| s.as_ref().unwrap()[..] == [3.0, 3.0, 0.0, 1.0 / 3.0, 2.0 / 3.0]), "{sums:?}");
}

#[test]
fn p4_progress_reaches_the_host_and_an_interrupt_the_plugin() {
    struct Stop(Mutex<Vec<String>>);
    impl Progress for Stop {
        fn phase(&self, phase: &str) {
            self.0.lock().unwrap().push(phase.into());
        }
        fn interrupted(&self) -> bool {
            true
        }
    }
    let stop = Stop(Mutex::new(Vec::new()));
    let error = World::new(15, "").step(0, &stop).unwrap_err();
    assert!(matches!(error, Error::Interrupted), "{error}");
    assert_eq!(*stop.0.lock().unwrap(), ["rollout"]);
}

#[test]
fn p5_a_panic_poisons_the_object_and_no_other() {
    let mut scorer = hostile("prepare", "panic").unwrap();
    scorer.prepare(&video()).unwrap_err();
    let target = hostile("", "").unwrap().prepare(&video()).unwrap();
    let error = scorer.score(&video(), "", &target, Grad::Skip).unwrap_err();
    names("poisoned", &error, &["not called again", "a panic in prepare"]);
    // A sink that panicked takes nothing, and is a part of its strategy.
    let (mut model, mut strategy, sink) = delivering(true, "deliver:panic");
    assert!(!sink.deliver(0, &[1.0; 8]) && !sink.deliver(0, &[1.0; 8]));
    let error = strategy.accumulate(&mut model).unwrap_err();
    names("sink", &error, &[WHOSE[0], "`accumulate`", "not called again", "a panic in deliver"]);
    // An object of the host panics in a plugin's step.
    names("host", &World::new(8, "velocity:panic").run().unwrap_err(), &["a panic in velocity"]);
}

#[test]
fn p5_panics_in_payloads_threads_and_drops_are_caught() {
    names("payload", &scored("score", "panic_value").unwrap_err(), &["panicked"]);
    names("thread", &scored("score", "panic_thread").unwrap_err(), &["the thread ended: true"]);
    drop(hostile("drop", "panic").unwrap());
    let mut scorer = hostile("drop_pullback", "").unwrap();
    let target = scorer.prepare(&video()).unwrap();
    drop(scorer.score(&video(), "", &target, Grad::Record).unwrap());
    assert!(scored("", "").is_ok());
}

#[test]
fn p7_errors_keep_their_causes_and_their_fault() {
    let error = scored("prepare", "error").unwrap_err();
    assert_eq!(error.fault(), Whose::Failure);
    names("error", &error, &["doing prepare: an error in prepare"]);
    let error = scored("make", "user_error").unwrap_err();
    assert_eq!(error.fault(), Whose::User);
    names("user", &error, &["`reward.how`"]);
    assert!(matches!(scored("score", "interrupt").unwrap_err(), Error::Interrupted));
}

#[test]
fn p7_invalid_answers_are_errors_that_name_the_plugin() {
    for (at, how, part) in
        [("pull", "shape", "[2, 3, 8, 8]"), ("pull", "dtype", "f32"), ("score", "no_pullback", "no pullback")]
    {
        names(how, &scored(at, how).unwrap_err(), &[part, WHOSE[1]]);
    }
    // It counts as nothing to score, and needs no pullback.
    let mut nan = hostile("score", "nan").unwrap();
    let target = nan.prepare(&video()).unwrap();
    let (score, pullback) = nan.score(&video(), "a prompt", &target, Grad::Record).unwrap();
    assert!(score.value().unwrap().is_nan() && pullback.is_none());
}

#[test]
fn p7_loaded_components_plan_like_linked_ones() {
    let registry = registry(&plugin("hostile_plugin"));
    let input = PlanInput {
        network: Some("toy".into()),
        frames: 9,
        size: Some([32, 48]),
        memory: None,
        samples: 2,
        ranks: 1,
        passes: registry.passes("toy", &Options::new()).unwrap(),
        division: registry.division("toy", &Options::new()).unwrap(),
        speed: Speed { flops: 1e13, link: 5e9, read: 2e9 },
    };
    let context = BuildContext { placement: Some(WeightPlacement::Sharded), ..context() };
    let [Planner::Model(needs), Planner::Strategy(division), Planner::Algorithm(passes)] = toy::PLANNERS else {
        panic!("the toys plan for three kinds")
    };
    assert_eq!(input.passes, passes(&Options::new()).unwrap());
    assert_eq!(input.division, division(&Options::new()).unwrap());
    let own = needs(&Options::new(), &input, &context).unwrap();
    assert_eq!(registry.needs("toy", &Options::new(), &input, &context).unwrap(), own);
    assert!(own.work.contains("9 frames on flex for Some(Sharded)"), "{}", own.work);
    for how in ["panic", "error"] {
        let error = registry.needs("toy", &fault(&format!("plan:{how}")).1, &input, &context).unwrap_err();
        names(how, &error, &["`plan`", &format!("{how} in plan")]);
    }
    // The reward says nothing, and no other kind is asked for.
    assert!(registry.division("nothing", &Options::new()).is_err());
}

#[test]
fn p9_values_are_checked_where_they_arrive() {
    // Options, before the plugin sees them.
    let make = |name: &str, value: roll_core::serde_json::Value| {
        let options = [(name.to_string(), value)].into_iter().collect();
        registry(&plugin("sharpness_reward")).reward("edges", &options, &context()).map(drop).unwrap_err()
    };
    names("name", &make("scael", 1.0.into()), &["`reward.scael`", "did you mean `scale`"]);
    names("type", &make("scale", "wide".into()), &["`reward.scale`: expected a number, found \"wide\""]);
    let defaults = registry(&plugin("color_reward")).find(roll_core::Kind::Reward, "colors").unwrap().options();
    assert_eq!(defaults["bins"], 8);
    // A unit of videos that cannot be is the default one.
    let unit = |loaded: bool, how: &str| model(loaded, how).as_diffusion().unwrap().video_unit();
    assert_eq!(unit(true, ""), VideoUnit { height: 8, width: 24, frames: 2, most_frames: None });
    assert_eq!((unit(false, ":no unit").width, unit(true, ":no unit")), (0, VideoUnit::default()));
    assert_eq!(reward(true, "").on_missing(), OnMissing::Value(-1.0));
}

#[test]
fn p9_cache_keys_depend_on_the_library() {
    let keys = |loaded: bool, how: &str| {
        let mut model = model(loaded, how);
        [model.as_diffusion().unwrap().encoding_key(), reward(loaded, how).target_key()]
    };
    assert_eq!(keys(false, "").map(|key| key.unwrap().unwrap()), ["toy model", "toy reward"]);
    let found = keys(true, "").map(|key| key.unwrap().unwrap());
    assert!(found.iter().all(|key| key.len() == 64) && found[0] != found[1], "{found:?}");
    assert_eq!(keys(true, "").map(|key| key.unwrap().unwrap()), found);
    for loaded in [false, true] {
        assert_eq!(keys(loaded, ":no key").map(|key| key.unwrap()), [None, None]);
    }
    for (at, which) in [("encoding_key", 0), ("target_key", 1)] {
        let error = keys(true, &format!("{at}:panic")).into_iter().nth(which).unwrap().unwrap_err();
        names(at, &error, &[&format!("`{at}`"), WHOSE[1]]);
    }
}

#[test]
fn p9_events_of_a_plugin_are_logged_by_the_host() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let writer = Mutex::new(file.reopen().unwrap());
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(writer).finish();
    roll_core::tracing::subscriber::with_default(subscriber, || scored("score", "log").unwrap());
    let log = std::fs::read_to_string(file.path()).unwrap();
    assert!(log.contains("INFO plugin: hostile_plugin: a message from score answer=42"), "{log}");
}
