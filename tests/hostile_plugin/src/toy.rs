//! The doubles of `roll-testing` with faults, and an algorithm and an environment: small components of every kind, to
//! be used linked in and from the library. The numbers must be the same.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use roll_plugin::plan::{Division, Needs, Passes};
use roll_plugin::{
    Adapter, Algorithm, BuildContext, ClipAlgorithm, ConditionInput, Conditioning, DiffusionModel, Distribution,
    Environment, Error, Evaluated, EvaluationContext, Grad, GradientSink, Headline, HeadlineFormat, Measure, Model,
    Observation, OnMissing, OptimizerConfig, ParameterParts, ParameterSpec, Picture, Planner, Pullback, Result,
    RewardScorer, Samples, ScheduleFacts, Score, Sigma, SigmaRange, Split, StateDict, StepContext, StepReport,
    Strategy, StrategyRanks, StrategyReport, Target, Tensor, Timestep, Transition, Video, VideoUnit, WeightPlacement,
    flat, parse_options, serde_json,
};
use roll_testing::{Bigram, Descent, MockDiffusion, Sines};

use crate::Fault;

/// A [`MockDiffusion`] whose adapter is two parameters.
pub struct ToyModel {
    fault: Fault,
    mock: MockDiffusion,
    specs: Vec<ParameterSpec>,
    sink: Arc<Mutex<Option<Arc<dyn GradientSink>>>>,
    placement: Option<WeightPlacement>,
}

/// Makes the model.
pub fn model(fault: Fault, context: &BuildContext) -> Result<ToyModel> {
    fault.at("make")?;
    let spec = |name: &str, rows: usize| ParameterSpec { name: name.into(), shape: vec![rows, 8] };
    let trained = SigmaRange { low: Sigma(0.25), high: Sigma(0.75) };
    let mut mock = MockDiffusion::new();
    (mock.boundary, mock.trained, mock.frame_rate) = (Some(0.9), trained, Some(12.0));
    mock.adapter[0] += context.seed as f32;
    let (specs, placement) = (vec![spec("first", 1), spec("rest", 7)], context.placement);
    Ok(ToyModel { fault, mock, specs, sink: Arc::default(), placement })
}

impl ToyModel {
    /// The sink that receives gradients now.
    pub fn sink(&self) -> Option<Arc<dyn GradientSink>> {
        lock(&self.sink).clone()
    }
}

/// Makes a language model without faults.
pub fn bigram(_: Fault, _: &BuildContext) -> Result<Bigram> {
    Ok(Bigram::of("xyz"))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where the parameters at these positions are in the flat layout.
fn values(which: Range<usize>) -> Range<usize> {
    let at = |position: usize| [0, 8, 64][position];
    at(which.start)..at(which.end)
}

/// Hands over the accumulated gradients, each parameter on a thread of its own.
fn deliver(sink: &dyn GradientSink, gradients: &mut [f32]) {
    let (first, rest) = gradients.split_at_mut(values(0..1).end);
    let deliver = |position: usize, gradient: &mut [f32]| {
        if sink.deliver(position, gradient) {
            gradient.fill(0.0);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| deliver(1, rest));
        deliver(0, first);
    });
}

impl Model for ToyModel {
    fn parameters(&self) -> &[ParameterSpec] {
        &self.specs
    }
    fn read_parameters(&self, out: &mut [f32]) -> Result<()> {
        self.fault.at("read_parameters")?;
        self.mock.read_parameters(out)
    }
    fn write_parameters(&mut self, values: &[f32]) -> Result<()> {
        self.fault.at("write_parameters")?;
        self.mock.write_parameters(values)
    }
    fn take_gradients(&mut self, add_into: &mut [f32]) -> Result<()> {
        self.fault.at("take_gradients")?;
        self.mock.take_gradients(add_into)
    }
    fn parts(&mut self) -> Option<&mut dyn ParameterParts> {
        Some(self)
    }
    fn distribution(&self) -> Distribution {
        Distribution { weights: self.placement, ..Distribution::default() }
    }
    fn as_diffusion(&mut self) -> Option<&mut dyn DiffusionModel> {
        Some(self)
    }
    fn export_adapter(&self) -> Result<BTreeMap<String, StateDict>> {
        self.fault.at("export_adapter")?;
        Ok([("adapter".to_string(), flat::to_state(&self.specs, &self.mock.adapter)?)].into())
    }
    fn import_adapter(&mut self, files: &BTreeMap<String, StateDict>) -> Result<()> {
        self.fault.at("import_adapter")?;
        let state = files.get("adapter").ok_or_else(|| no("file `adapter`"))?;
        self.mock.write_parameters(&flat::from_state(&self.specs, state)?)
    }
}

impl ParameterParts for ToyModel {
    fn read_part(&self, which: Range<usize>, out: &mut [f32]) -> Result<()> {
        self.fault.at("read_part")?;
        out.copy_from_slice(&self.mock.adapter[values(which)]);
        Ok(())
    }
    fn write_part(&mut self, which: Range<usize>, part: &[f32]) -> Result<()> {
        self.fault.at("write_part")?;
        self.mock.adapter[values(which)].copy_from_slice(part);
        Ok(())
    }
    fn take_gradients_part(&mut self, which: Range<usize>, add_into: &mut [f32]) -> Result<()> {
        self.fault.at("take_gradients_part")?;
        let gradients = &mut lock(&self.mock.gradients)[values(which)];
        add_into.iter_mut().zip(gradients).for_each(|(a, g)| *a += std::mem::take(g));
        Ok(())
    }
    fn deliver_gradients(&mut self, sink: Option<Arc<dyn GradientSink>>) -> bool {
        *lock(&self.sink) = sink;
        true
    }
}

impl DiffusionModel for ToyModel {
    fn encoding_key(&self) -> Result<Option<String>> {
        self.fault.at("encoding_key")?;
        Ok((self.fault.how != "no key").then(|| "toy model".to_string()))
    }
    fn schedule(&self) -> ScheduleFacts {
        self.mock.schedule()
    }
    fn frame_rate(&self) -> Option<f64> {
        self.mock.frame_rate()
    }
    fn video_unit(&self) -> VideoUnit {
        let width = if self.fault.how == "no unit" { 0 } else { 24 };
        VideoUnit { height: 8, width, frames: 2, most_frames: None }
    }
    fn encode(&mut self, input: &ConditionInput) -> Result<Conditioning> {
        self.fault.at("encode")?;
        let (channels, image_tokens) = (input.image.clone(), input.end_image.clone());
        Ok(Conditioning { channels, image_tokens, ..self.mock.encode(input)? })
    }
    fn velocity(
        &mut self,
        latents: &Tensor,
        timestep: Timestep,
        conditioning: &Conditioning,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        self.fault.at("velocity")?;
        let (v, pullback) = self.mock.velocity(latents, timestep, conditioning, adapter, grad)?;
        let (fault, gradients, sink) = (self.fault.clone(), self.mock.gradients.clone(), self.sink.clone());
        let delivering = |pullback: Pullback| {
            Pullback::new(move |d: &Tensor| {
                fault.at("velocity_pull")?;
                let pulled = pullback.pull(d)?;
                let sink = lock(&sink).clone();
                sink.iter().for_each(|sink| deliver(sink.as_ref(), &mut lock(&gradients)));
                Ok(pulled)
            })
        };
        Ok((v, pullback.map(delivering)))
    }
    fn decode(&mut self, latents: &Tensor, grad: Grad) -> Result<(Tensor, Option<Pullback>)> {
        self.fault.at("decode")?;
        self.mock.decode(latents, grad)
    }
    fn encode_video(&mut self, frames: &Tensor) -> Result<Tensor> {
        self.fault.at("encode_video")?;
        self.mock.encode_video(frames)
    }
}

/// [`Sines`] with faults of its own.
pub struct ToyReward {
    fault: Fault,
    sines: Sines,
    scored: u64,
}

/// Makes the reward.
pub fn reward(fault: Fault, _: &BuildContext) -> Result<ToyReward> {
    fault.at("make")?;
    Ok(ToyReward { fault, sines: Sines::new(), scored: 0 })
}

impl Drop for ToyReward {
    fn drop(&mut self) {
        assert!(!self.fault.is("drop", "panic"), "a panic in drop");
    }
}

/// Part of a pullback; panics when it is dropped if it holds true.
struct Trap(bool);

impl Drop for Trap {
    fn drop(&mut self) {
        assert!(!self.0, "a panic in the drop of a pullback");
    }
}

impl RewardScorer for ToyReward {
    fn name(&self) -> &str {
        self.fault.at("name").map_or("broken", |()| "hostile")
    }
    fn differentiable(&self) -> bool {
        self.fault.at("differentiable").is_ok()
    }
    fn on_missing(&self) -> OnMissing {
        self.fault.at("on_missing").map_or(OnMissing::Error, |()| OnMissing::Value(-1.0))
    }
    fn target_key(&self) -> Result<Option<String>> {
        self.fault.at("target_key")?;
        Ok((self.fault.how != "no key").then(|| "toy reward".to_string()))
    }
    fn measures(&self) -> Measure {
        Measure { label: "toyness".into(), alias: Some("actor/toy_score".into()) }
    }
    // Not in the order of the alphabet.
    fn terms(&self) -> Vec<(String, f64)> {
        vec![("sine".into(), 2.0), ("prompt".into(), 0.0)]
    }
    fn prepare(&mut self, reference: &Video) -> Result<Target> {
        self.fault.at("prepare")?;
        self.sines.prepare(reference)
    }
    fn score(&mut self, video: &Video, prompt: &str, target: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        self.scored += 1;
        if self.scored > self.fault.after {
            self.fault.at("score")?;
        }
        if self.fault.is("score", "missing") {
            return Ok((Score::Missing { reason: format!("nothing in {prompt}") }, None));
        }
        let prompt = if self.fault.is("score", "nan") { "nan" } else { prompt };
        let (score, pullback) = self.sines.score(video, prompt, target, grad)?;
        let (fault, shape) = (self.fault.clone(), video.frames().shape().to_vec());
        let trap = Trap(self.fault.at == "drop_pullback");
        let faulty = |pullback: Pullback| {
            Pullback::new(move |d: &Tensor| {
                let _trap = trap;
                fault.at("pull")?;
                match fault.how.as_str() {
                    "shape" => Ok(Tensor::full([1, 2, 3], 1.0)),
                    "dtype" => Tensor::new(vec![1i64; shape.iter().product()], shape),
                    "nan" => Ok(Tensor::full(shape, f32::NAN)),
                    _ => pullback.pull(d),
                }
            })
        };
        Ok((score, pullback.filter(|_| !self.fault.is("score", "no_pullback")).map(faulty)))
    }
}

/// [`Descent`] that reads gradients part by part, and takes those that come during a pull.
pub struct ToyStrategy {
    fault: Fault,
    descent: Descent,
    ranks: StrategyRanks,
    /// Gradients that were taken, for the descent.
    taken: Vec<f32>,
    arrived: Arc<Arrived>,
}

/// Gradients that came during a pull: the sums, and how often.
struct Arrived {
    fault: Fault,
    sums: Mutex<(Vec<f32>, u64)>,
}

impl GradientSink for Arrived {
    fn deliver(&self, position: usize, gradient: &[f32]) -> bool {
        self.fault.at("deliver").is_ok() && {
            let mut sums = lock(&self.sums);
            sums.0[values(position..position + 1)].iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
            sums.1 += 1;
            true
        }
    }
}

/// Makes the strategy.
pub fn strategy(fault: Fault, context: &BuildContext) -> Result<ToyStrategy> {
    let arrived = Arc::new(Arrived { fault: fault.clone(), sums: Mutex::new((vec![0.0; 64], 0)) });
    let (ranks, descent) = (StrategyRanks::new(context.ranks.clone()), Descent::default());
    Ok(ToyStrategy { fault, descent, ranks, taken: vec![0.0; 64], arrived })
}

impl Strategy for ToyStrategy {
    fn attach(&mut self, model: &mut dyn Model, optimizer: &OptimizerConfig) -> Result<()> {
        self.fault.at("attach")?;
        assert_eq!(optimizer.betas, OptimizerConfig::default().betas);
        self.descent.attach(model, optimizer)
    }
    fn weight_placement(&self) -> Option<WeightPlacement> {
        Some(WeightPlacement::Streamed)
    }
    fn before_last_pull(&mut self, model: &mut dyn Model) -> Result<()> {
        self.fault.at("before_last_pull")?;
        if let Some(parts) = model.parts() {
            parts.deliver_gradients(Some(self.arrived.clone()));
        }
        Ok(())
    }
    fn accumulate(&mut self, model: &mut dyn Model) -> Result<()> {
        self.fault.at("accumulate")?;
        if let Some(parts) = model.parts() {
            parts.deliver_gradients(None);
            let (first, rest) = self.taken.split_at_mut(values(0..1).end);
            parts.take_gradients_part(1..2, rest)?;
            parts.take_gradients_part(0..1, first)?;
        }
        let arrived = &mut lock(&self.arrived.sums).0;
        self.taken.iter_mut().zip(arrived).for_each(|(sum, g)| *sum += std::mem::take(g));
        Ok(())
    }
    fn discard(&mut self) {
        self.taken.fill(0.0);
    }
    fn step(&mut self, model: &mut dyn Model, learning_rate: f64, scale: f64) -> Result<StrategyReport> {
        self.fault.at("step")?;
        self.descent.sum = std::mem::replace(&mut self.taken, vec![0.0; 64]);
        self.descent.step(model, learning_rate, scale)
    }
    fn ranks(&self) -> &StrategyRanks {
        &self.ranks
    }
    fn state(&self) -> Result<StateDict> {
        self.fault.at("state")?;
        let came = Tensor::scalar(lock(&self.arrived.sums).1 as f32);
        let gradient = Tensor::new(self.descent.gradient.clone(), [self.descent.gradient.len()])?;
        Ok([("gradient".to_string(), gradient), ("deliveries".to_string(), came)].into())
    }
    fn load_state(&mut self, state: &StateDict) -> Result<()> {
        self.fault.at("load_state")?;
        self.descent.gradient = state["gradient"].f32s()?.to_vec();
        Ok(())
    }
}

/// One velocity, decoded and scored, pulled back.
pub struct ToyAlgorithm {
    fault: Fault,
    steps: u64,
    /// Sum of the parameters after each step; empty before [`Algorithm::check`].
    sum: Vec<f32>,
}

/// Makes the algorithm.
pub fn algorithm(fault: Fault, _: &BuildContext) -> Result<ToyAlgorithm> {
    Ok(ToyAlgorithm { fault, steps: 0, sum: Vec::new() })
}

fn no(what: &str) -> Error {
    Error::Misuse(format!("there is no {what}"))
}

impl ClipAlgorithm for ToyAlgorithm {
    fn evaluate(&mut self, ctx: &mut EvaluationContext<'_>) -> Result<Option<Vec<Evaluated>>> {
        self.fault.at("algorithm_evaluate")?;
        let one = |sample: &roll_plugin::Sample, rewards: &mut [&mut dyn RewardScorer]| -> Result<Evaluated> {
            let (clip, mut scores) = (sample.clip()?, Vec::new());
            for reward in rewards {
                let target = reward.prepare(clip)?;
                scores.push(match reward.score(clip, "", &target, Grad::Skip)?.0 {
                    Score::Value { value, .. } => Some(value),
                    Score::Missing { .. } => None,
                });
            }
            let video = sample.index.is_multiple_of(2).then(|| (**clip).clone());
            Ok(Evaluated { origin: sample.origin.clone(), scores, kl: 0.5, video })
        };
        let rewards = &mut ctx.rewards;
        ctx.samples.iter().map(|s| one(s, rewards)).collect::<Result<_>>().map(Some)
    }
}

impl Algorithm for ToyAlgorithm {
    fn samples(self: Box<Self>) -> Samples {
        Samples::Clips(self)
    }
    fn check(&mut self, model: &mut dyn Model, reward: Option<&dyn RewardScorer>) -> Result<()> {
        self.fault.at("check")?;
        self.sum = vec![0.0; model.parameter_count()];
        model.as_diffusion().ok_or_else(|| no("diffusion model"))?;
        match reward {
            Some(reward) if reward.differentiable() && reward.name() == "hostile" => Ok(()),
            _ => Err(no("differentiable reward")),
        }
    }
    fn step(&mut self, ctx: &mut StepContext<'_>) -> Result<StepReport> {
        self.fault.at("algorithm_step")?;
        let mut report = StepReport { applied: true, ..Default::default() };
        for sample in ctx.samples {
            ctx.progress.phase("rollout");
            if ctx.progress.interrupted() {
                return Err(Error::Interrupted);
            }
            let [frames, height, width] = sample.video.dims();
            let (prompt, image) = (sample.prompt.clone(), sample.image.clone());
            let input = ConditionInput { prompt, image, end_image: None, frames, size: [height, width] };
            let model = ctx.model.as_diffusion().ok_or_else(|| no("diffusion model"))?;
            let conditioning = model.encode(&input)?;
            let x = ctx.noise.latents(ctx.step, sample.index, &conditioning.latent_shape)?;
            // The middle of the trained range: its upper end is outside.
            let trained = model.schedule().trained;
            let timestep = Timestep(500.0 * (trained.low.0 + trained.high.0));
            let (v, pull_v) = model.velocity(&x, timestep, &conditioning, Adapter::On, Grad::Record)?;
            let (frames, pull_frames) = model.decode(&v, Grad::Record)?;
            let video = Video::new(frames, sample.clip()?.fps())?;
            let reward = ctx.reward.as_deref_mut().ok_or_else(|| no("reward"))?;
            let target = reward.prepare(sample.clip()?)?;
            let (score, pull) = reward.score(&video, &sample.prompt, &target, Grad::Record)?;
            let Score::Value { value, details } = score else { return Err(no("score")) };
            let d = pull.ok_or_else(|| no("pullback"))?.pull(&Tensor::scalar(-1.0))?;
            ctx.strategy.before_last_pull(ctx.model)?;
            let d = pull_frames.ok_or_else(|| no("pullback"))?.pull(&d)?;
            let d_x = pull_v.ok_or_else(|| no("pullback"))?.pull(&d)?;
            ctx.strategy.accumulate(ctx.model)?;
            let mut total = [d_x.f32s()?.iter().sum::<f32>()];
            ctx.strategy.ranks().all.all_reduce(&mut total)?;
            report.metrics.insert("score".into(), value);
            report.metrics.insert("d_x".into(), total[0].into());
            report.metrics.extend(details);
            report.skipped.push((sample.origin.clone(), "seen".into()));
            if ctx.want_videos {
                report.videos.push((format!("sample-{}", sample.index), video));
            }
        }
        let update = ctx.strategy.step(ctx.model, ctx.learning_rate, 1.0)?;
        report.metrics.insert("grad_norm".into(), update.grad_norm);
        self.steps += 1;
        let mut values = vec![0.0; self.sum.len()];
        ctx.model.read_parameters(&mut values)?;
        self.sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        Ok(report)
    }
    fn headlines(&self) -> Vec<Headline> {
        let score = Headline::new("score", "score", "Score").written(HeadlineFormat::Scientific).score();
        vec![score.validated_by("val/score", "held out", "samples that were not trained on")]
    }
    fn state(&self) -> serde_json::Value {
        serde_json::json!({ "steps": self.steps })
    }
    fn load_state(&mut self, state: &serde_json::Value) -> Result<()> {
        self.fault.at("algorithm_load_state")?;
        self.steps = state["steps"].as_u64().ok_or_else(|| no("number of steps"))?;
        Ok(())
    }
    fn tensors(&self) -> Result<StateDict> {
        self.fault.at("algorithm_tensors")?;
        Ok([("sum".to_string(), Tensor::new(self.sum.clone(), [self.sum.len()])?)].into())
    }
    fn load_tensors(&mut self, tensors: &StateDict) -> Result<()> {
        self.fault.at("algorithm_load_tensors")?;
        self.sum = tensors["sum"].f32s()?.to_vec();
        Ok(())
    }
}

/// The toys' words on a run; the same linked in and from the library.
pub const PLANNERS: [Planner; 3] = [
    Planner::Model(&|options, input, context| {
        let fault: Fault = parse_options("model", options)?;
        fault.at("plan")?;
        let work = format!("{} frames on {} for {:?}", input.frames, context.backend, context.placement);
        let facts = [("flops".to_string(), input.speed.flops / 3.0)].into();
        Ok(Needs { work, facts, ..Needs::default() })
    }),
    Planner::Strategy(&|_| {
        Ok(Division { stage: 2, placement: Some(WeightPlacement::Streamed), ..Division::default() })
    }),
    Planner::Algorithm(&|_| Ok(Passes { forward: 3, pulled: 1, ..Passes::default() })),
];

/// Counts down from the seed by the lengths of actions.
pub struct ToyEnvironment {
    fault: Fault,
    left: u64,
    split: Split,
    number: u64,
}

/// Makes the environment.
pub fn environment(fault: Fault, _: &BuildContext) -> Result<ToyEnvironment> {
    Ok(ToyEnvironment { fault, left: 0, split: Split::Train, number: 0 })
}

impl Environment for ToyEnvironment {
    fn reset(&mut self, seed: u64) -> Result<Observation> {
        self.fault.at("reset")?;
        self.left = seed;
        let pixels = Tensor::new((0..12).map(|i| i * seed as u8).collect::<Vec<u8>>(), [1, 4, 3])?;
        Ok(Observation::with_pictures(format!("{seed} left"), vec![Picture::new(pixels)?]))
    }
    fn step(&mut self, action: &str) -> Result<Transition> {
        self.fault.at("environment_step")?;
        self.left = self.left.saturating_sub(action.chars().count() as u64);
        let observation = Observation::text(format!("{} left", self.left));
        let terminated = self.left == 0;
        Ok(Transition { observation, reward: 0.25, terminated, truncated: false, valid: !action.is_empty() })
    }
    fn kinds(&self) -> Vec<String> {
        vec!["even".into(), "ödd".into()]
    }
    fn enter(&mut self, split: Split, number: u64) -> Result<()> {
        (self.split, self.number) = (split, number);
        Ok(())
    }
    fn action(&self) -> String {
        format!("{} of {} {}", self.left, self.split.name(), self.number)
    }
}
