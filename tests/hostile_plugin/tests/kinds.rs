//! Every kind from a library: the same numbers as linked in, in any mix, and errors that name the plugin.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::library;
use hostile_plugin::toy;
use roll_core::one_line;
use roll_core::plan::{PlanInput, Planner, Speed};
use roll_core::{
    Adapter, Algorithm, BuildContext, Communicator, ConditionInput, Environment, Error, EvaluationContext, Grad,
    GradientSink, Model, Noise, OptimizerConfig, Options, ParameterSpec, Progress, Registry, Replaces, Result,
    RewardScorer, Sample, Sampling, Silent, StateDict, StepContext, StepReport, Strategy, Tensor, ThreadRanks,
    Timestep, Video, VideoUnit, WeightPlacement, communicator,
};
use roll_plugin::load;

fn registry() -> Registry {
    Registry::linked()
        .unwrap()
        .with_components(&load(library("hostile_plugin")).unwrap().registrations(), Replaces::Nothing)
        .unwrap()
}

fn context() -> BuildContext {
    BuildContext { backend: "flex".into(), seed: 1, base_dir: ".".into(), placement: None }
}

fn failing(at: &str) -> (toy::Options, Options) {
    (toy::Options { fail: at.into() }, [("fail".to_string(), at.into())].into_iter().collect())
}

fn model(loaded: bool, fail: &str) -> Box<dyn Model> {
    let (own, options) = failing(fail);
    match loaded {
        true => registry().model("toy", &options, &context()).unwrap(),
        false => Box::new(toy::model(own, &context()).unwrap()),
    }
}

fn reward(loaded: bool, fail: &str) -> Box<dyn RewardScorer> {
    let (own, options) = failing(fail);
    match loaded {
        true => registry().reward("toy", &options, &context()).unwrap(),
        false => Box::new(toy::reward(own, &context()).unwrap()),
    }
}

fn strategy(loaded: bool, fail: &str) -> Box<dyn Strategy> {
    let (own, options) = failing(fail);
    match loaded {
        true => registry().strategy("toy", &options, &context()).unwrap(),
        false => Box::new(toy::strategy(own, &context()).unwrap()),
    }
}

fn algorithm(loaded: bool, fail: &str) -> Box<dyn Algorithm> {
    let (own, options) = failing(fail);
    match loaded {
        true => registry().algorithm("toy", &options, &context()).unwrap(),
        false => Box::new(toy::algorithm(own, &context()).unwrap()),
    }
}

fn environment(loaded: bool, fail: &str) -> Box<dyn Environment> {
    let (own, options) = failing(fail);
    match loaded {
        true => registry().environment("toy", &options, &context()).unwrap(),
        false => Box::new(toy::environment(own, &context()).unwrap()),
    }
}

fn samples() -> Vec<Sample> {
    let video = |scale: f32| {
        let values = (0..2 * 3 * 4 * 4).map(|i| scale * ((i * 37 % 101) as f32 / 101.0 - 0.5)).collect();
        Arc::new(Video::new(Tensor::new(values, [2, 3, 4, 4]).unwrap(), 8.0).unwrap())
    };
    let sample = |index: u64, image: Option<Tensor>, path: Option<PathBuf>| Sample {
        index,
        origin: format!("row {index}"),
        prompt: "a prompt".repeat(index as usize),
        video: video(index as f32),
        image,
        end_image: None,
        path,
    };
    vec![sample(1, None, None), sample(2, Some(Tensor::full([3, 4, 4], 0.5)), Some("clip.mp4".into()))]
}

/// Model, reward, strategy, algorithm.
struct World {
    model: Box<dyn Model>,
    reward: Box<dyn RewardScorer>,
    strategy: Box<dyn Strategy>,
    algorithm: Box<dyn Algorithm>,
}

impl World {
    /// From the library where a bit is set.
    fn new(bits: u32, fail: &str) -> Self {
        let bit = |n: u32| bits & (1 << n) != 0;
        let (model, reward) = (model(bit(0), fail), reward(bit(1), fail));
        Self { model, reward, strategy: strategy(bit(2), fail), algorithm: algorithm(bit(3), fail) }
    }

    fn step(&mut self, step: u64, progress: &dyn Progress) -> Result<StepReport> {
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
    fn run(&mut self) -> Result<String> {
        self.algorithm.check(self.model.as_mut(), Some(self.reward.as_ref()))?;
        self.strategy.attach(self.model.as_mut(), &OptimizerConfig::default())?;
        let mut seen = String::new();
        for step in 0..2 {
            let report = self.step(step, &Silent)?;
            let videos: Vec<_> = report.videos.iter().map(|(n, v)| (n, v.frames().to_f32_vec(), v.fps())).collect();
            seen += &format!("{:?} {:?} {videos:?} {}\n", report.metrics, report.skipped, report.applied);
            let state = self.strategy.state()?;
            let deliveries = state["deliveries"].f32s()?;
            seen += &format!("{:?} {deliveries:?} {:?}\n", state["momentum"].f32s()?, self.algorithm.state());
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
            model: self.model.as_mut(),
            rewards: vec![self.reward.as_mut()],
            noise: &Noise::new(7),
            progress: &Silent,
        })?;
        let evaluated = evaluated.unwrap().into_iter().map(|e| (e.origin, e.scores, e.kl, e.video.map(|v| v.dims())));
        Ok(format!("{seen}{adapter:?} {:?}", evaluated.collect::<Vec<_>>()))
    }
}

#[test]
fn all_sixteen_mixes_of_linked_in_and_loaded_components_give_the_same_bits() {
    let linked = World::new(0, "").run().unwrap();
    assert!(linked.contains("sample-2") && linked.contains("row 1"), "{linked}");
    // Two parameters of two samples in each step came while the pull went on.
    assert!(linked.contains(" [4.0] ") && linked.contains(" [8.0] "), "{linked}");
    for bits in 1..16 {
        assert_eq!(World::new(bits, "").run().unwrap(), linked, "mix {bits:04b}");
    }
}

#[test]
fn a_panic_or_error_in_any_method_of_any_kind_is_an_error_that_names_the_plugin_and_the_method() {
    let cases = [
        (1, "encode", "encode"),
        (1, "velocity", "velocity"),
        (1, "pull", "pull"),
        (1, "decode", "decode"),
        (1, "take_gradients_part", "take_gradients_part"),
        (4, "before_last_pull", "before_last_pull"),
        (1, "read_parameters", "read_parameters"),
        (1, "write_parameters", "write_parameters"),
        (1, "export_adapter", "export_adapter"),
        (1, "import_adapter", "import_adapter"),
        (2, "score", "score"),
        (4, "attach", "attach"),
        (4, "accumulate", "accumulate"),
        (4, "step", "step"),
        (4, "state", "state"),
        (4, "load_state", "load_state"),
        (8, "check", "check"),
        (8, "algorithm_step", "step"),
        (8, "algorithm_evaluate", "evaluate"),
        (8, "algorithm_load_state", "load_state"),
        (8, "algorithm_tensors", "tensors"),
        (8, "algorithm_load_tensors", "load_tensors"),
    ];
    for how in ["panic", "error"] {
        for (bits, at, call) in cases {
            // All from the library, and only the failing one.
            for bits in [15, bits] {
                let error = World::new(bits, &format!("{at}:{how}")).run().unwrap_err();
                let told = one_line(&error);
                for part in
                    ["`hostile_plugin`", "libhostile_plugin.so", &format!("`{call}`"), &format!("{how} in {at}")]
                {
                    assert!(told.contains(part), "{at} {how} {bits}: no {part} in: {told}");
                }
            }
        }
    }
}

#[test]
fn a_host_object_that_panics_inside_a_plugins_step_is_an_error_too() {
    // The algorithm is the library's, the model is ours and panics: caught where it happens, told by the algorithm.
    let error = World::new(8, "velocity:panic").run().unwrap_err();
    assert!(one_line(&error).contains("a panic in velocity"), "{}", one_line(&error));
}

#[test]
fn progress_reaches_the_host_and_an_interrupt_the_plugin() {
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
fn a_language_model_from_a_library_does_what_it_does_linked_in() {
    let all = |loaded: bool| {
        let mut model = model(loaded, "");
        let language = model.as_language().unwrap();
        let tokens = language.tokenize("grün").unwrap();
        let text = language.detokenize(&tokens).unwrap();
        let sampling = Sampling {
            temperature: 0.5,
            top_p: 1.0,
            top_k: 0,
            max_new_tokens: 3,
            limits: vec![2, 3, 1],
            stop: vec!["\n".into(), "end".into()],
            seed: 3,
            numbers: vec![4, 5, 9],
        };
        let made = language.generate(&[tokens, vec![], vec![7]], &sampling).unwrap();
        let given = Tensor::new(vec![1i64, 2, 3, 4, 5, 6], [2, 3]).unwrap();
        let mask = Tensor::new(vec![1u8, 1, 1, 1, 1, 0], [2, 3]).unwrap();
        let (stats, pullback) = language.evaluate(&given, &mask, Adapter::On, Grad::Record).unwrap();
        assert_eq!(pullback.unwrap().pull(&Tensor::full([2, 2, 2], 0.5)).unwrap().shape(), [0]);
        let mut gradients = [0.0; 3];
        model.take_gradients(&mut gradients).unwrap();
        let states = model.as_language().unwrap().hidden_states(&given, &mask, Adapter::Off).unwrap();
        let stats = [&stats.log_probs, &stats.entropy, &states].map(|x| (x.shape().to_vec(), x.to_f32_vec()));
        format!("{text} {made:?} {stats:?} {gradients:?}")
    };
    assert_eq!(all(true), all(false));
}

#[test]
fn conditioning_pictures_and_schedules_cross() {
    let all = |loaded: bool| {
        let mut model = model(loaded, "");
        let diffusion = model.as_diffusion().unwrap();
        let image = Some(Tensor::full([3, 4, 4], 0.25));
        let input = ConditionInput { prompt: "p".into(), image, end_image: None, frames: 2, size: [4, 4] };
        let c = diffusion.encode(&input).unwrap();
        let x = Tensor::full(c.latent_shape, 0.5);
        let (v, none) = diffusion.velocity(&x, Timestep(500.0), &c, Adapter::Off, Grad::Skip).unwrap();
        assert!(none.is_none() && c.image_tokens.is_none() && c.channels.is_some());
        let frames = diffusion.decode(&v, Grad::Skip).unwrap().0;
        let back = diffusion.encode_video(&frames).unwrap();
        let facts = (diffusion.schedule(), diffusion.video_unit());
        format!("{facts:?} {:?} {:?} {:?}", c.latent_shape, c.channels.unwrap().f32s(), back.f32s())
    };
    assert_eq!(all(true), all(false));
}

#[test]
fn a_unit_of_videos_that_cannot_be_is_the_default_one() {
    let unit = |loaded: bool, fail: &str| model(loaded, fail).as_diffusion().unwrap().video_unit();
    assert_eq!(unit(true, ""), VideoUnit { height: 8, width: 24, frames: 2 });
    assert_eq!((unit(false, "no unit").width, unit(true, "no unit")), (0, VideoUnit::default()));
}

#[test]
fn keys_of_what_is_kept_cross_and_hold_the_library() {
    let keys = |loaded: bool, fail: &str| {
        let mut model = model(loaded, fail);
        [model.as_diffusion().unwrap().encoding_key(), reward(loaded, fail).target_key()]
    };
    assert_eq!(keys(false, "").map(|key| key.unwrap().unwrap()), ["toy model", "toy reward"]);
    let told = keys(true, "").map(|key| key.unwrap().unwrap());
    assert!(told.iter().all(|key| key.len() == 64), "{told:?}");
    assert_ne!(told[0], told[1]);
    assert_eq!(keys(true, "").map(|key| key.unwrap().unwrap()), told);
    for loaded in [false, true] {
        assert_eq!(keys(loaded, "no key").map(|key| key.unwrap()), [None, None]);
    }
    for (at, which) in [("encoding_key", 0), ("target_key", 1)] {
        let error = keys(true, &format!("{at}:panic")).into_iter().nth(which).unwrap().unwrap_err();
        let told = one_line(&error);
        assert!(told.contains(&format!("`{at}`")) && told.contains("libhostile_plugin.so"), "{told}");
    }
}

#[test]
fn what_components_say_of_themselves_crosses() {
    let said = |loaded: bool| {
        let mut model = model(loaded, "");
        let mut values = [0.0; 2];
        let parts = model.parts().unwrap();
        parts.write_part(1..2, &[8.0, 9.0]).unwrap();
        parts.read_part(1..2, &mut values).unwrap();
        let (reward, strategy, algorithm) = (reward(loaded, ""), strategy(loaded, ""), algorithm(loaded, ""));
        let placements = (model.weight_placement(), strategy.weight_placement());
        let said = (reward.measures(), reward.terms(), algorithm.headlines());
        format!("{values:?} {placements:?} {said:?}")
    };
    let linked = said(false);
    assert!(
        linked.contains("toyness")
            && linked.contains("(\"part\", 2.0)")
            && linked.contains("held out")
            && linked.contains("Some(Streamed)"),
        "{linked}"
    );
    assert_eq!(said(true), linked);
    for placement in [WeightPlacement::Resident, WeightPlacement::Streamed, WeightPlacement::Sharded] {
        let context = BuildContext { placement: Some(placement), ..context() };
        let model = registry().model("toy", &Options::new(), &context).unwrap();
        assert_eq!(model.weight_placement(), Some(placement));
    }
}

#[test]
fn a_library_plans_as_what_is_linked_in_and_a_wrong_plan_names_it() {
    let input = PlanInput {
        network: Some("toy".into()),
        frames: 9,
        size: Some([32, 48]),
        memory: None,
        samples: 2,
        ranks: 1,
        passes: registry().passes("toy", &Options::new()).unwrap(),
        division: registry().division("toy", &Options::new()).unwrap(),
        speed: Speed { flops: 1e13, link: 5e9, read: 2e9 },
    };
    let context = BuildContext { placement: Some(WeightPlacement::Sharded), ..context() };
    let [Planner::Model(needs), Planner::Strategy(division), Planner::Algorithm(passes)] = toy::PLANNERS else {
        panic!("the toys plan for three kinds")
    };
    assert_eq!(input.passes, passes(&Options::new()).unwrap());
    assert_eq!(input.division, division(&Options::new()).unwrap());
    let own = needs(&Options::new(), &input, &context).unwrap();
    assert_eq!(registry().needs("toy", &Options::new(), &input, &context).unwrap(), own);
    assert!(own.work.contains("9 frames on flex for Some(Sharded)"), "{}", own.work);
    for how in ["panic", "error"] {
        let error = registry().needs("toy", &failing(&format!("plan:{how}")).1, &input, &context).unwrap_err();
        let told = one_line(&error);
        assert!(told.contains("`plan`") && told.contains(&format!("{how} in plan")), "{told}");
    }
    // The reward says nothing, and no other kind is asked for.
    assert!(registry().division("nothing", &Options::new()).is_err());
}

/// A model that keeps every sink it gets.
struct Keeps(Box<dyn Model>, Vec<Arc<dyn GradientSink>>);

impl Model for Keeps {
    fn parameters(&self) -> &[ParameterSpec] {
        self.0.parameters()
    }
    fn read_parameters(&self, out: &mut [f32]) -> Result<()> {
        self.0.read_parameters(out)
    }
    fn write_parameters(&mut self, values: &[f32]) -> Result<()> {
        self.0.write_parameters(values)
    }
    fn take_gradients(&mut self, add_into: &mut [f32]) -> Result<()> {
        self.0.take_gradients(add_into)
    }
    fn deliver_gradients(&mut self, sink: Option<Arc<dyn GradientSink>>) -> bool {
        self.1.extend(sink);
        true
    }
    fn export_adapter(&self) -> Result<BTreeMap<String, StateDict>> {
        self.0.export_adapter()
    }
    fn import_adapter(&mut self, files: &BTreeMap<String, StateDict>) -> Result<()> {
        self.0.import_adapter(files)
    }
}

#[test]
fn a_sink_may_be_called_from_many_threads_and_after_its_strategy_is_gone() {
    for loaded in [false, true] {
        let mut model = Keeps(model(false, ""), Vec::new());
        let mut strategy = strategy(loaded, "");
        strategy.attach(&mut model, &OptimizerConfig::default()).unwrap();
        strategy.before_last_pull(&mut model).unwrap();
        let sink = model.1[0].clone();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| (0..100).for_each(|_| assert!(sink.deliver(1, &[1.0, 2.0]))));
            }
        });
        strategy.accumulate(&mut model).unwrap();
        let report = strategy.step(&mut model, 0.0, 1.0).unwrap();
        assert_eq!(report.grad_norm, (800.0f64.powi(2) + 1600.0f64.powi(2)).sqrt());
        drop(strategy);
        assert!(sink.deliver(0, &[1.0]));
    }
}

#[test]
fn a_sink_that_panics_takes_nothing_and_its_strategy_says_so() {
    let mut model = Keeps(model(false, ""), Vec::new());
    let mut strategy = strategy(true, "deliver:panic");
    strategy.attach(&mut model, &OptimizerConfig::default()).unwrap();
    strategy.before_last_pull(&mut model).unwrap();
    assert!(!model.1[0].deliver(0, &[1.0]) && !model.1[0].deliver(0, &[1.0]));
    let told = one_line(&strategy.accumulate(&mut model).unwrap_err());
    for part in ["`hostile_plugin`", "`accumulate`", "not called again", "a panic in deliver"] {
        assert!(told.contains(part), "no {part} in: {told}");
    }
}

#[test]
fn a_strategy_of_a_library_works_on_the_ranks_of_the_job() {
    let sums: Vec<Vec<f32>> = std::thread::scope(|scope| {
        let one = |ranks: ThreadRanks| {
            let rank = ranks.rank().0 as f32;
            communicator::within(Arc::new(ranks), || {
                let strategy = strategy(true, "");
                let ranks = strategy.communicator();
                assert_eq!(ranks.world_size(), 3);
                let mut values = [rank, 1.0];
                ranks.all_reduce(&mut values).unwrap();
                let mut joined = values.to_vec();
                joined.extend(ranks.all_gather_f64(f64::from(rank) / 3.0).unwrap().into_iter().map(|v| v as f32));
                ranks.barrier().unwrap();
                joined
            })
        };
        let threads: Vec<_> =
            ThreadRanks::group(3, Duration::from_secs(60)).into_iter().map(|r| scope.spawn(move || one(r))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(sums.iter().all(|s| *s == [3.0, 3.0, 0.0, 1.0 / 3.0, 2.0 / 3.0]), "{sums:?}");
    assert_eq!(strategy(true, "").communicator().world_size(), 1);
}

#[test]
fn environments_cross() {
    for loaded in [false, true] {
        let mut environment = environment(loaded, "");
        assert_eq!(environment.reset(3).unwrap().text, "3 left");
        let next = environment.step("ün").unwrap();
        assert_eq!(
            (next.observation.text.as_str(), next.reward, next.terminated, next.valid),
            ("1 left", 0.25, false, true)
        );
        assert!(environment.step("x").unwrap().terminated);
        assert_eq!(environment.kinds(), ["even", "ödd"]);
    }
    for (at, call) in [("reset", "reset"), ("environment_step", "step")] {
        let mut environment = environment(true, &format!("{at}:panic"));
        let told = match environment.reset(1) {
            Err(error) => one_line(&error),
            Ok(_) => one_line(&environment.step("").unwrap_err()),
        };
        assert!(told.contains(&format!("`{call}`")) && told.contains("libhostile_plugin.so"), "{told}");
    }
}
