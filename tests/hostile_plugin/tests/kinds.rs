//! Every kind from a library: the same numbers as linked in, in any mix, and errors that name the plugin.

#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use hostile_plugin::toy;
use roll_core::plugin::{Chain, load};
use roll_core::{
    Adapter, Algorithm, BuildContext, ConditionInput, Environment, Error, EvaluationContext, Grad, Model, Noise,
    OptimizerConfig, Options, Progress, Registry, Replaces, Result, RewardScorer, Sample, Sampling, Silent,
    StepContext, StepReport, Strategy, Tensor, Timestep, Video,
};

fn registry() -> Registry {
    let directory = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let library: PathBuf = directory.join(format!("{prefix}hostile_plugin{suffix}"));
    Registry::linked().unwrap().with_plugin(&load(library).unwrap(), Replaces::Nothing).unwrap()
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
            seen += &format!("{:?} {:?}\n", state["momentum"].f32s()?, self.algorithm.state());
            self.strategy.load_state(&state)?;
            self.algorithm.load_state(&self.algorithm.state())?;
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
        (1, "take_gradients", "take_gradients"),
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
    ];
    for how in ["panic", "error"] {
        for (bits, at, call) in cases {
            // All from the library, and only the failing one.
            for bits in [15, bits] {
                let error = World::new(bits, &format!("{at}:{how}")).run().unwrap_err();
                let told = Chain::line(&error);
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
    assert!(Chain::line(&error).contains("a panic in velocity"), "{}", Chain::line(&error));
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
        format!("{text} {made:?} {:?} {:?} {gradients:?}", stats.log_probs.f32s(), stats.entropy.f32s())
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
        format!("{:?} {:?} {:?} {:?}", diffusion.schedule(), c.latent_shape, c.channels.unwrap().f32s(), back.f32s())
    };
    assert_eq!(all(true), all(false));
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
        let told = Chain::line(&error);
        assert!(told.contains(&format!("`{at}`")) && told.contains("libhostile_plugin.so"), "{told}");
    }
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
    }
    for (at, call) in [("reset", "reset"), ("environment_step", "step")] {
        let mut environment = environment(true, &format!("{at}:panic"));
        let told = match environment.reset(1) {
            Err(error) => Chain::line(&error),
            Ok(_) => Chain::line(&environment.step("").unwrap_err()),
        };
        assert!(told.contains(&format!("`{call}`")) && told.contains("libhostile_plugin.so"), "{told}");
    }
}
