//! One small component of every kind, to be used linked in and from the library: the numbers must be the same.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use roll_plugin::plan::{Division, Needs, Passes};
use roll_plugin::serde::{Deserialize, Serialize};
use roll_plugin::{
    Adapter, Algorithm, BuildContext, Communicator, ConditionInput, Conditioning, DiffusionModel, Environment, Error,
    Evaluated, EvaluationContext, Generation, Grad, GradientSink, Headline, HeadlineFormat, LanguageModel, Measure,
    Model, Observation, OptimizerConfig, ParameterParts, ParameterSpec, Planner, Pullback, Result, RewardScorer,
    Sampling, ScheduleFacts, Score, Sigma, SigmaRange, StateDict, StepContext, StepReport, Strategy, StrategyReport,
    Target, Tensor, Timestep, TokenStats, Transition, Video, VideoUnit, WeightPlacement, serde_json,
};

/// Options of each component.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(crate = "roll_plugin::serde", default)]
pub struct Options {
    /// The method that fails, and `panic` or `error` after a colon: `velocity:panic`.
    pub fail: String,
}

impl Options {
    fn at(&self, method: &str) -> Result<()> {
        match self.fail.split_once(':') {
            Some((at, "panic")) if at == method => panic!("a panic in {method}"),
            Some((at, _)) if at == method => Err(Error::Misuse(format!("an error in {method}"))),
            _ => Ok(()),
        }
    }
}

/// Weights of the velocity, their gradient, and who wants that at once.
struct Weights {
    values: Vec<f32>,
    gradients: Vec<f32>,
    sink: Option<Arc<dyn GradientSink>>,
}

impl Weights {
    /// Hands over the accumulated gradients, each parameter on a thread of its own.
    fn deliver(&mut self) {
        let Some(sink) = self.sink.clone() else { return };
        let (first, rest) = self.gradients.split_at_mut(1);
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
}

/// velocity = w * latents, w the first weight where the adapter is on and 1 elsewhere; frames = clamp-free copy.
pub struct ToyModel {
    options: Options,
    specs: Vec<ParameterSpec>,
    weights: Arc<Mutex<Weights>>,
    placement: Option<WeightPlacement>,
}

fn lock(weights: &Mutex<Weights>) -> MutexGuard<'_, Weights> {
    weights.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes the model.
pub fn model(options: Options, context: &BuildContext) -> Result<ToyModel> {
    options.at("make")?;
    let spec = |name: &str, shape: &[usize]| ParameterSpec { name: name.into(), shape: shape.to_vec() };
    let first = 0.5 + context.seed as f32;
    let weights = Weights { values: vec![first, 2.0, 3.0], gradients: vec![0.0; 3], sink: None };
    let (specs, weights) = (vec![spec("w", &[1]), spec("rest", &[2])], Arc::new(Mutex::new(weights)));
    Ok(ToyModel { options, specs, weights, placement: context.placement })
}

impl Model for ToyModel {
    fn parameters(&self) -> &[ParameterSpec] {
        &self.specs
    }
    fn read_parameters(&self, out: &mut [f32]) -> Result<()> {
        self.options.at("read_parameters")?;
        out.copy_from_slice(&lock(&self.weights).values);
        Ok(())
    }
    fn write_parameters(&mut self, values: &[f32]) -> Result<()> {
        self.options.at("write_parameters")?;
        lock(&self.weights).values.copy_from_slice(values);
        Ok(())
    }
    fn take_gradients(&mut self, add_into: &mut [f32]) -> Result<()> {
        self.options.at("take_gradients")?;
        let mut weights = lock(&self.weights);
        add_into.iter_mut().zip(&mut weights.gradients).for_each(|(a, g)| *a += std::mem::take(g));
        Ok(())
    }
    fn parts(&mut self) -> Option<&mut dyn ParameterParts> {
        Some(self)
    }
    fn deliver_gradients(&mut self, sink: Option<Arc<dyn GradientSink>>) -> bool {
        lock(&self.weights).sink = sink;
        true
    }
    fn weight_placement(&self) -> Option<WeightPlacement> {
        self.placement
    }
    fn as_diffusion(&mut self) -> Option<&mut dyn DiffusionModel> {
        Some(self)
    }
    fn as_language(&mut self) -> Option<&mut dyn LanguageModel> {
        Some(self)
    }
    fn export_adapter(&self) -> Result<BTreeMap<String, StateDict>> {
        self.options.at("export_adapter")?;
        let state = roll_plugin::model::flat::to_state(&self.specs, &lock(&self.weights).values)?;
        Ok([("adapter".to_string(), state)].into())
    }
    fn import_adapter(&mut self, files: &BTreeMap<String, StateDict>) -> Result<()> {
        self.options.at("import_adapter")?;
        let state = files.get("adapter").ok_or_else(|| Error::Misuse("no file `adapter`".into()))?;
        let values = roll_plugin::model::flat::from_state(&self.specs, state)?;
        self.write_parameters(&values)
    }
}

/// Where the parameters at these positions stand in the flat layout.
fn flat(which: Range<usize>) -> Range<usize> {
    let at = |position: usize| [0, 1, 3][position];
    at(which.start)..at(which.end)
}

impl ParameterParts for ToyModel {
    fn read_part(&self, which: Range<usize>, out: &mut [f32]) -> Result<()> {
        self.options.at("read_part")?;
        out.copy_from_slice(&lock(&self.weights).values[flat(which)]);
        Ok(())
    }
    fn write_part(&mut self, which: Range<usize>, values: &[f32]) -> Result<()> {
        self.options.at("write_part")?;
        lock(&self.weights).values[flat(which)].copy_from_slice(values);
        Ok(())
    }
    fn take_gradients_part(&mut self, which: Range<usize>, add_into: &mut [f32]) -> Result<()> {
        self.options.at("take_gradients_part")?;
        let mut weights = lock(&self.weights);
        let gradients = &mut weights.gradients[flat(which)];
        add_into.iter_mut().zip(gradients).for_each(|(a, g)| *a += std::mem::take(g));
        Ok(())
    }
}

impl DiffusionModel for ToyModel {
    fn encoding_key(&self) -> Result<Option<String>> {
        self.options.at("encoding_key")?;
        Ok((self.options.fail != "no key").then(|| "toy model".to_string()))
    }
    fn schedule(&self) -> ScheduleFacts {
        let trained = SigmaRange { low: Sigma(0.25), high: Sigma(0.75) };
        ScheduleFacts { shift: 5.0, boundary: Some(0.9), trained }
    }
    fn video_unit(&self) -> VideoUnit {
        match self.options.fail == "no unit" {
            true => VideoUnit { height: 8, width: 0, frames: 4 },
            false => VideoUnit { height: 8, width: 24, frames: 2 },
        }
    }
    fn encode(&mut self, input: &ConditionInput) -> Result<Conditioning> {
        self.options.at("encode")?;
        let [h, w] = input.size;
        Ok(Conditioning {
            context: Tensor::full([1, 2], input.prompt.len() as f32),
            channels: input.image.clone(),
            image_tokens: input.end_image.clone(),
            first_frame: None,
            latent_shape: [3, input.frames, h, w],
        })
    }
    fn velocity(
        &mut self,
        latents: &Tensor,
        timestep: Timestep,
        conditioning: &Conditioning,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        self.options.at("velocity")?;
        let weight = if adapter == Adapter::On { lock(&self.weights).values[0] } else { 1.0 };
        let bias = conditioning.context.f32s()?[0] * timestep.0 as f32 * 1e-5;
        let values: Vec<f32> = latents.f32s()?.iter().map(|x| weight * x + bias).collect();
        let (x, shared, fail) = (latents.clone(), Arc::clone(&self.weights), self.options.clone());
        let pullback = grad.is_on().then(|| {
            Pullback::new(move |d_v| {
                fail.at("pull")?;
                let d = d_v.f32s()?;
                if adapter == Adapter::On {
                    let mut weights = lock(&shared);
                    weights.gradients[0] += d.iter().zip(x.f32s()?).map(|(d, x)| d * x).sum::<f32>();
                    weights.gradients[1] += 0.25;
                    weights.deliver();
                }
                Tensor::new(d.iter().map(|d| d * weight).collect::<Vec<f32>>(), d_v.shape())
            })
        });
        Ok((Tensor::new(values, latents.shape())?, pullback))
    }
    fn decode(&mut self, latents: &Tensor, grad: Grad) -> Result<(Tensor, Option<Pullback>)> {
        self.options.at("decode")?;
        let [c, t, h, w] = *latents.shape() else {
            return Err(Error::shape("latents", "[3, T, H, W]", latents.shape()));
        };
        let frames = swap(latents, [c, t, h * w])?.reshape([t, c, h, w])?;
        let pullback =
            grad.is_on().then(|| Pullback::new(move |d: &Tensor| swap(d, [t, c, h * w])?.reshape([c, t, h, w])));
        Ok((frames, pullback))
    }
    fn encode_video(&mut self, frames: &Tensor) -> Result<Tensor> {
        self.options.at("encode_video")?;
        let [t, c, h, w] = *frames.shape() else { return Err(Error::shape("frames", "[T, 3, H, W]", frames.shape())) };
        swap(frames, [t, c, h * w])?.reshape([c, t, h, w])
    }
}

/// Swaps the first two axes.
fn swap(tensor: &Tensor, [a, b, n]: [usize; 3]) -> Result<Tensor> {
    let values = tensor.f32s()?;
    let moved = (0..b).flat_map(|j| (0..a).flat_map(move |i| values[(i * b + j) * n..][..n].iter().copied()));
    Tensor::new(moved.collect::<Vec<f32>>(), [b, a, n])
}

impl LanguageModel for ToyModel {
    fn tokenize(&self, text: &str) -> Result<Vec<u32>> {
        self.options.at("tokenize")?;
        Ok(text.chars().map(u32::from).collect())
    }
    fn detokenize(&self, tokens: &[u32]) -> Result<String> {
        self.options.at("detokenize")?;
        Ok(tokens.iter().filter_map(|t| char::from_u32(*t)).collect())
    }
    fn hidden_states(&mut self, tokens: &Tensor, mask: &Tensor, adapter: Adapter) -> Result<Tensor> {
        self.options.at("hidden_states")?;
        let on = f32::from(u8::from(adapter == Adapter::On));
        let states: Vec<f32> = tokens.to_f32_vec().iter().zip(mask.to_f32_vec()).map(|(t, m)| t * m + on).collect();
        Tensor::new(states, [tokens.shape()[0], tokens.shape()[1], 1])
    }
    fn generate(&mut self, prompts: &[Vec<u32>], sampling: &Sampling) -> Result<Vec<Generation>> {
        self.options.at("generate")?;
        let one = |(i, p): (usize, &Vec<u32>)| Generation {
            tokens: p.iter().rev().take(sampling.limit(i)).copied().collect(),
            log_probs: vec![sampling.temperature as f32 + sampling.stop.len() as f32; p.len().min(sampling.limit(i))],
            ..Generation::default()
        };
        Ok(prompts.iter().enumerate().map(one).collect())
    }
    fn evaluate(
        &mut self,
        tokens: &Tensor,
        mask: &Tensor,
        _: Adapter,
        grad: Grad,
    ) -> Result<(TokenStats, Option<Pullback>)> {
        self.options.at("evaluate")?;
        let [b, l] = *tokens.shape() else { return Err(Error::shape("tokens", "[B, L]", tokens.shape())) };
        let sum = tokens.as_slice::<i64>()?.iter().sum::<i64>() as f32 + mask.to_f32_vec().iter().sum::<f32>();
        let shared = Arc::clone(&self.weights);
        let pullback = grad.is_on().then(|| {
            Pullback::new(move |d: &Tensor| {
                lock(&shared).gradients[1] += d.f32s()?.iter().sum::<f32>();
                Ok(Tensor::zeros([0]))
            })
        });
        let stats = TokenStats { log_probs: Tensor::full([b, l - 1], -sum), entropy: Tensor::full([b, l - 1], sum) };
        Ok((stats, pullback))
    }
}

/// Minus the mean of squares.
pub struct ToyReward(Options);

/// Makes the reward.
pub fn reward(options: Options, _: &BuildContext) -> Result<ToyReward> {
    Ok(ToyReward(options))
}

impl RewardScorer for ToyReward {
    fn target_key(&self) -> Result<Option<String>> {
        self.0.at("target_key")?;
        Ok((self.0.fail != "no key").then(|| "toy reward".to_string()))
    }
    fn name(&self) -> &str {
        "toy"
    }
    fn measures(&self) -> Measure {
        Measure { label: "toyness".into(), alias: Some("actor/toy_score".into()) }
    }
    fn terms(&self) -> Vec<(String, f64)> {
        vec![("prompt".into(), 0.0), ("part".into(), 2.0)]
    }
    fn differentiable(&self) -> bool {
        true
    }
    fn prepare(&mut self, reference: &Video) -> Result<Target> {
        Ok(Target {
            tensors: [("first".to_string(), Tensor::new(reference.frame(0).to_vec(), [reference.frame(0).len()])?)]
                .into(),
        })
    }
    fn score(&mut self, video: &Video, prompt: &str, target: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        self.0.at("score")?;
        let (frames, goal) = (video.frames().clone(), target.tensors["first"].f32s()?[0]);
        let n = frames.len() as f64;
        let value = -frames.f32s()?.iter().map(|v| f64::from(v - goal).powi(2)).sum::<f64>() / n;
        let pullback = grad.is_on().then(|| {
            Pullback::new(move |d| {
                let d = d.item()?;
                let slope = |v: &f32| d * -2.0 * (v - goal) / n as f32;
                Tensor::new(frames.f32s()?.iter().map(slope).collect::<Vec<f32>>(), frames.shape())
            })
        });
        let details = [("prompt".to_string(), prompt.len() as f64)].into();
        Ok((Score::Value { value, details }, pullback))
    }
}

/// Gradient descent with momentum in the state.
pub struct ToyStrategy {
    options: Options,
    momentum: Vec<f32>,
    gradients: Vec<f32>,
    beta: f32,
    arrived: Arc<Arrived>,
    ranks: Arc<dyn Communicator>,
}

/// Gradients that came during a pull: the sums, and how often.
struct Arrived {
    options: Options,
    sums: Mutex<(Vec<f32>, u64)>,
}

impl GradientSink for Arrived {
    fn deliver(&self, position: usize, gradient: &[f32]) -> bool {
        self.options.at("deliver").is_ok() && {
            let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
            sums.0[flat(position..position + 1)].iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
            sums.1 += 1;
            true
        }
    }
}

/// Makes the strategy.
pub fn strategy(options: Options, _: &BuildContext) -> Result<ToyStrategy> {
    let arrived = Arc::new(Arrived { options: options.clone(), sums: Mutex::new((vec![0.0; 3], 0)) });
    let ranks = roll_plugin::communicator::current();
    Ok(ToyStrategy { options, momentum: Vec::new(), gradients: Vec::new(), beta: 0.0, arrived, ranks })
}

impl Strategy for ToyStrategy {
    fn attach(&mut self, model: &mut dyn Model, optimizer: &OptimizerConfig) -> Result<()> {
        self.options.at("attach")?;
        let n = model.parameter_count();
        self.beta = optimizer.betas[0] as f32;
        (self.momentum, self.gradients) = (vec![0.0; n], vec![0.0; n]);
        Ok(())
    }
    fn weight_placement(&self) -> Option<WeightPlacement> {
        Some(WeightPlacement::Streamed)
    }
    fn before_last_pull(&mut self, model: &mut dyn Model) -> Result<()> {
        self.options.at("before_last_pull")?;
        model.deliver_gradients(Some(self.arrived.clone()));
        Ok(())
    }
    fn accumulate(&mut self, model: &mut dyn Model) -> Result<()> {
        self.options.at("accumulate")?;
        model.deliver_gradients(None);
        let (arrived, _) = &mut *self.arrived.sums.lock().unwrap_or_else(PoisonError::into_inner);
        self.gradients.iter_mut().zip(arrived).for_each(|(sum, g)| *sum += std::mem::take(g));
        match model.parts() {
            Some(parts) => {
                let (first, rest) = self.gradients.split_at_mut(1);
                parts.take_gradients_part(1..2, rest)?;
                parts.take_gradients_part(0..1, first)
            }
            None => model.take_gradients(&mut self.gradients),
        }
    }
    fn discard(&mut self) {
        self.gradients.fill(0.0);
    }
    fn step(&mut self, model: &mut dyn Model, learning_rate: f64, scale: f64) -> Result<StrategyReport> {
        self.options.at("step")?;
        let mut values = vec![0.0; model.parameter_count()];
        model.read_parameters(&mut values)?;
        let norm = self.gradients.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        for ((v, m), g) in values.iter_mut().zip(&mut self.momentum).zip(&self.gradients) {
            *m = self.beta * *m + g * scale as f32;
            *v -= learning_rate as f32 * *m;
        }
        model.write_parameters(&values)?;
        self.discard();
        Ok(StrategyReport { grad_norm: norm, clipped: false, applied: true })
    }
    fn communicator(&self) -> &dyn Communicator {
        &*self.ranks
    }
    fn state(&self) -> Result<StateDict> {
        self.options.at("state")?;
        let came = self.arrived.sums.lock().unwrap_or_else(PoisonError::into_inner).1;
        let momentum = Tensor::new(self.momentum.clone(), [self.momentum.len()])?;
        Ok([("momentum".to_string(), momentum), ("deliveries".to_string(), Tensor::scalar(came as f32))].into())
    }
    fn load_state(&mut self, state: &StateDict) -> Result<()> {
        self.options.at("load_state")?;
        self.momentum = state["momentum"].f32s()?.to_vec();
        Ok(())
    }
}

/// One velocity, decoded and scored, pulled back.
pub struct ToyAlgorithm {
    options: Options,
    steps: u64,
    /// Sum of the parameters after each step; empty before [`Algorithm::check`].
    sum: Vec<f32>,
}

/// Makes the algorithm.
pub fn algorithm(options: Options, _: &BuildContext) -> Result<ToyAlgorithm> {
    Ok(ToyAlgorithm { options, steps: 0, sum: Vec::new() })
}

fn no(what: &str) -> Error {
    Error::Misuse(format!("there is no {what}"))
}

impl Algorithm for ToyAlgorithm {
    fn check(&mut self, model: &mut dyn Model, reward: Option<&dyn RewardScorer>) -> Result<()> {
        self.options.at("check")?;
        self.sum = vec![0.0; model.parameter_count()];
        model.as_diffusion().ok_or_else(|| no("diffusion model"))?;
        match reward {
            Some(reward) if reward.differentiable() && reward.name() == "toy" => Ok(()),
            _ => Err(no("differentiable toy")),
        }
    }
    fn step(&mut self, ctx: &mut StepContext<'_>) -> Result<StepReport> {
        self.options.at("algorithm_step")?;
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
            let timestep = Timestep(1000.0 * model.schedule().trained.high.0);
            let (v, pull_v) = model.velocity(&x, timestep, &conditioning, Adapter::On, Grad::Record)?;
            let (frames, pull_frames) = model.decode(&v, Grad::Record)?;
            let video = Video::new(frames, sample.video.fps())?;
            let reward = ctx.reward.as_deref_mut().ok_or_else(|| no("reward"))?;
            let target = reward.prepare(&sample.video)?;
            let (score, pull) = reward.score(&video, &sample.prompt, &target, Grad::Record)?;
            let Score::Value { value, details } = score else { return Err(no("score")) };
            let d = pull.ok_or_else(|| no("pullback"))?.pull(&Tensor::scalar(-1.0))?;
            ctx.strategy.before_last_pull(ctx.model)?;
            let d = pull_frames.ok_or_else(|| no("pullback"))?.pull(&d)?;
            let d_x = pull_v.ok_or_else(|| no("pullback"))?.pull(&d)?;
            ctx.strategy.accumulate(ctx.model)?;
            let mut total = [d_x.f32s()?.iter().sum::<f32>()];
            ctx.strategy.communicator().all_reduce(&mut total)?;
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
    fn evaluate(&mut self, ctx: &mut EvaluationContext<'_>) -> Result<Option<Vec<Evaluated>>> {
        self.options.at("algorithm_evaluate")?;
        let one = |sample: &roll_plugin::Sample, rewards: &mut [&mut dyn RewardScorer]| -> Result<Evaluated> {
            let mut scores = Vec::new();
            for reward in rewards {
                let target = reward.prepare(&sample.video)?;
                scores.push(match reward.score(&sample.video, "", &target, Grad::Skip)?.0 {
                    Score::Value { value, .. } => Some(value),
                    Score::Missing { .. } => None,
                });
            }
            let video = sample.index.is_multiple_of(2).then(|| (*sample.video).clone());
            Ok(Evaluated { origin: sample.origin.clone(), scores, kl: 0.5, video })
        };
        let rewards = &mut ctx.rewards;
        ctx.samples.iter().map(|s| one(s, rewards)).collect::<Result<_>>().map(Some)
    }
    fn state(&self) -> serde_json::Value {
        serde_json::json!({ "steps": self.steps })
    }
    fn load_state(&mut self, state: &serde_json::Value) -> Result<()> {
        self.options.at("algorithm_load_state")?;
        self.steps = state["steps"].as_u64().ok_or_else(|| no("number of steps"))?;
        Ok(())
    }
    fn tensors(&self) -> Result<StateDict> {
        self.options.at("algorithm_tensors")?;
        Ok([("sum".to_string(), Tensor::new(self.sum.clone(), [self.sum.len()])?)].into())
    }
    fn load_tensors(&mut self, tensors: &StateDict) -> Result<()> {
        self.options.at("algorithm_load_tensors")?;
        self.sum = tensors["sum"].f32s()?.to_vec();
        Ok(())
    }
}

/// The toys' words on a run; the same linked in and from the library.
pub const PLANNERS: [Planner; 3] = [
    Planner::Model(|options, input, context| {
        let fail = options.get("fail").and_then(|f| f.as_str()).unwrap_or_default();
        Options { fail: fail.into() }.at("plan")?;
        let work = format!("{} frames on {} for {:?}", input.frames, context.backend, context.placement);
        let facts = [("flops".to_string(), input.speed.flops / 3.0)].into();
        Ok(Needs { work, facts, ..Needs::default() })
    }),
    Planner::Strategy(|_| Ok(Division { stage: 2, placement: Some(WeightPlacement::Streamed), ..Division::default() })),
    Planner::Algorithm(|_| Ok(Passes { forward: 3, pulled: 1, ..Passes::default() })),
];

/// Counts down from the seed by the lengths of actions.
pub struct ToyEnvironment {
    options: Options,
    left: u64,
}

/// Makes the environment.
pub fn environment(options: Options, _: &BuildContext) -> Result<ToyEnvironment> {
    Ok(ToyEnvironment { options, left: 0 })
}

impl Environment for ToyEnvironment {
    fn reset(&mut self, seed: u64) -> Result<Observation> {
        self.options.at("reset")?;
        self.left = seed;
        Ok(Observation { text: format!("{seed} left") })
    }
    fn step(&mut self, action: &str) -> Result<Transition> {
        self.options.at("environment_step")?;
        self.left = self.left.saturating_sub(action.chars().count() as u64);
        let observation = Observation { text: format!("{} left", self.left) };
        let terminated = self.left == 0;
        Ok(Transition { observation, reward: 0.25, terminated, truncated: false, valid: !action.is_empty() })
    }
    fn kinds(&self) -> Vec<String> {
        vec!["even".into(), "ödd".into()]
    }
}
