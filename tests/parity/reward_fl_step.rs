//! A whole Reward-FL step: the algorithm's own code on real networks, with every inner value, the gradients of score
//! and KL apart, and updates through the strategy `single`.

#[path = "reward_fl_step/networks.rs"]
mod networks;
#[path = "reward_fl_step/scorer.rs"]
mod scorer;

use std::sync::Arc;

use roll_backends::optimizer::norm;
use roll_backends::strategy::{SingleOptions, single};
use roll_core::{
    Algorithm, Conditioning, Grad, Model, Noise, OptimizerConfig, RewardScorer, Sample, SampleVideo, Score, Silent,
    StateDict, StepContext, StepReport, Strategy, Target, Tensor, Video, flat,
};
use roll_video::{
    reward_fl::{Loss, Observer, RewardFl, RewardFlConfig as Options, RolloutPlan, Trajectory, Unobserved, rollout},
    sampling::Conditions,
};
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};
use crate::dit::{Lora, Model as Shape, peft_name, unbatched};
use networks::Conditioned;
use scorer::ConvScorer;

#[derive(Deserialize)]
pub struct Config {
    model: Shape,
    lora: Lora,
    shift: f64,
    steps: usize,
    mid: usize,
    #[serde(rename = "final")]
    last: usize,
    lr: f64,
    betas: [f64; 2],
    weight_decay: f64,
    max_grad_norm: f64,
    noise_call: NoiseCall,
}

#[derive(Deserialize)]
struct NoiseCall {
    seed: u32,
}

/// The gradients of an objective.
pub struct Pulled {
    /// With respect to the decoded latents; `None` if the score has no slope.
    pub d_latents: Option<Tensor>,
    /// With respect to the parameters, flat.
    pub gradient: Vec<f32>,
}

/// Frames a second; has no effect here.
const FPS: f64 = 8.0;

/// How far our MT19937 normals may be from PyTorch's, whose vector code rounds logarithm and sine otherwise.
const NOISE_ERROR: f32 = 2e-6;

pub fn run(case: &Case) -> Outcome<Report> {
    let mut report = case.expected("outputs.safetensors")?;
    let mut bench = Bench::open(case)?;
    schedule(&mut report, &mut bench)?;
    let loss = forward(&mut report, &mut bench)?;
    gradients(&mut report, &mut bench, loss)?;
    training(&mut report, &mut bench, &case.config()?, case.tolerance(1e-3))?;
    Ok(report)
}

/// Everything a rollout of the case needs.
pub struct Bench {
    pub model: Conditioned,
    scorer: ConvScorer,
    target: Target,
    pub options: Options,
    pub noise: Tensor,
}

impl Bench {
    /// The networks, inputs and settings of the case.
    pub fn open(case: &Case) -> Outcome<Self> {
        Self::with_high_lora(case, None)
    }

    /// As [`Bench::open`], with an adapter on the high-noise expert.
    pub fn with_high_lora(case: &Case, high_lora: Option<&StateDict>) -> Outcome<Self> {
        let config: Config = case.config()?;
        let inputs = case.tensors("inputs.safetensors")?;
        let noise = unbatched(&inputs["noise"])?;
        let &[c, t, h, w] = noise.shape() else { return Err("noise is not [1, C, T, H, W]".into()) };
        let conditioning = Conditioning {
            context: unbatched(&inputs["context"])?,
            channels: inputs.get("y").map(unbatched).transpose()?,
            image_tokens: None,
            first_frame: None,
            latent_shape: [c, t, h, w],
        };
        let options = Options {
            num_inference_steps: config.steps,
            mid_timestep: config.mid,
            final_timestep: config.last,
            shift: Some(config.shift),
            gradient_split_every: Some(1),
            ..Options::default()
        };
        Ok(Self {
            model: Conditioned::new(networks::load(case, &config.model, &config.lora, high_lora)?, conditioning)?,
            scorer: ConvScorer::new(&case.tensors("scorer.safetensors")?, case.device())?,
            target: scorer::target(&inputs)?,
            options,
            noise,
        })
    }

    pub fn plan(&mut self) -> Outcome<RolloutPlan> {
        Ok(self.options.plan(self.model.diffusion()?.schedule())?)
    }

    pub fn rollout(&mut self, observer: &mut dyn Observer) -> Outcome<Trajectory> {
        let plan = self.plan()?;
        self.rollout_of(&plan, observer)
    }

    /// The rollout of another plan.
    pub fn rollout_of(&mut self, plan: &RolloutPlan, observer: &mut dyn Observer) -> Outcome<Trajectory> {
        let conditions = Conditions::new(&self.model.conditioning, None);
        Ok(rollout(self.model.diffusion()?, &conditions, &self.noise, plan, Grad::Record, observer)?)
    }

    /// Scores the mean over `frames` frames of the products with texts, each with its factor, from now on.
    pub fn score_by(&mut self, texts: &[(&Tensor, f64)], frames: usize) -> Outcome {
        let width = texts.iter().map(|(text, _)| text.len()).max().unwrap_or(0);
        let references = texts.iter().flat_map(|(text, _)| text.to_f32_vec()).collect::<Vec<f32>>();
        let weights = (0..frames).flat_map(|_| texts.iter().map(|(_, factor)| (factor / frames as f64) as f32));
        let weights = Tensor::new(weights.collect::<Vec<_>>(), [frames, texts.len()])?;
        let references = Tensor::new(references, [texts.len(), width])?;
        let tensors = [("references", references), ("weights", weights)];
        self.target = Target::of(tensors.map(|(name, tensor)| (name.to_string(), tensor)).into());
        Ok(())
    }

    /// The gradient of `score_slope * score + kl_slope * kl`, flat.
    pub fn gradient(&mut self, score_slope: f64, kl_slope: f64) -> Outcome<Vec<f32>> {
        self.step(|_, _| (score_slope, kl_slope))
    }

    /// One rollout, decoded and scored; `slopes` gives those of the objective, told score and KL. The flat gradient.
    pub fn step(&mut self, slopes: impl FnOnce(f64, f64) -> (f64, f64)) -> Outcome<Vec<f32>> {
        let trajectory = self.rollout(&mut Unobserved)?;
        Ok(self.pull(trajectory, |score, trajectory| slopes(score, trajectory.kl))?.gradient)
    }

    /// Decodes and scores a rollout, and pulls the objective back, whose slopes in score and KL `slopes` returns.
    pub fn pull(
        &mut self,
        trajectory: Trajectory,
        slopes: impl FnOnce(f64, &Trajectory) -> (f64, f64),
    ) -> Outcome<Pulled> {
        let (frames, decode) = self.model.diffusion()?.decode(&trajectory.latents, Grad::Record)?;
        let (score, pull_score) = self.scorer.score(&Video::new(frames, FPS)?, "", &self.target, Grad::Record)?;
        let (score_slope, kl_slope) = slopes(value(score)?, &trajectory);
        let d_latents = match score_slope {
            0.0 => None,
            slope => {
                let d_frames = pull_score.ok_or("no pullback")?.pull(&Tensor::scalar(slope as f32))?;
                Some(decode.ok_or("no pullback")?.pull(&d_frames)?)
            }
        };
        trajectory.pull(d_latents.as_ref(), kl_slope, &mut Unobserved)?;
        let mut flat = vec![0.0; self.model.parameter_count()];
        self.model.take_gradients(&mut flat)?;
        Ok(Pulled { d_latents, gradient: flat })
    }

    /// The score of decoded latents.
    pub fn score(&mut self, latents: &Tensor) -> Outcome<f64> {
        let (frames, _) = self.model.diffusion()?.decode(latents, Grad::Skip)?;
        value(self.scorer.score(&Video::new(frames, FPS)?, "", &self.target, Grad::Skip)?.0)
    }

    /// A flat vector under the case's names.
    fn named(&self, values: &[f32]) -> Outcome<StateDict> {
        let state = flat::to_state(self.model.parameters(), values)?;
        Ok(state.into_iter().map(|(k, t)| (peft_name(k.trim_start_matches("dit2.")), t)).collect())
    }
}

fn value(score: Score) -> Outcome<f64> {
    match score {
        Score::Value { value, .. } => Ok(value),
        Score::Missing { reason } => Err(reason.into()),
    }
}

fn schedule(report: &mut Report, bench: &mut Bench) -> Outcome {
    let plan = bench.plan()?;
    let boundary = bench.model.diffusion()?.schedule().boundary.ok_or("two experts have a boundary")?;
    let rows = report.get("step_used_low_noise")?.len();
    let low = (0..rows).map(|i| i64::from(plan.schedule.timestep(i).uses_low_noise(boundary)));
    report.compare("step_used_low_noise", &Tensor::new(low.collect::<Vec<_>>(), [rows])?);
    for (name, values) in [("sigmas", plan.schedule.sigmas()), ("timesteps", plan.schedule.timesteps())] {
        report.compare(name, &Tensor::new(values.to_vec(), [values.len()])?);
    }
    Ok(())
}

#[derive(Default)]
struct Steps {
    velocities: Vec<f32>,
    references: Vec<f32>,
    latents: Vec<f32>,
}

impl Observer for Steps {
    fn velocity(&mut self, _step: usize, velocity: &Tensor) {
        self.velocities.extend(velocity.to_f32_vec());
    }
    fn reference(&mut self, _step: usize, velocity: &Tensor) {
        self.references.extend(velocity.to_f32_vec());
    }
    fn latents(&mut self, _step: usize, latents: &Tensor) {
        self.latents.extend(latents.to_f32_vec());
    }
}

fn forward(report: &mut Report, bench: &mut Bench) -> Outcome<Loss> {
    let mut steps = Steps::default();
    let trajectory = bench.rollout(&mut steps)?;
    for (name, values) in [
        ("velocity_per_step", steps.velocities),
        ("velocity_without_adapter", steps.references),
        ("latents_per_step", steps.latents),
    ] {
        let shape = report.get(name)?.shape().to_vec();
        report.compare(name, &Tensor::new(values, shape)?);
    }
    report.compare_value("kl_loss", trajectory.kl);
    let (frames, _) = bench.model.diffusion()?.decode(&trajectory.latents, Grad::Skip)?;
    report.compare("video_decoded", &channels_first(&frames)?);
    report.compare("embeddings", &bench.scorer.embeddings(&Video::new(frames, FPS)?, &bench.target)?);
    let score = bench.score(&trajectory.latents)?;
    let loss = Loss::at(score, trajectory.kl, 1.0, &bench.options);
    report.compare_value("score", score);
    report.compare_value("loss", loss.value);
    Ok(loss)
}

fn gradients(report: &mut Report, bench: &mut Bench, loss: Loss) -> Outcome {
    for (prefix, norm_name, slopes) in [
        ("grad_score", "grad_norm_of_score", (1.0, 0.0)),
        ("grad_kl", "grad_norm_of_kl", (0.0, 1.0)),
        ("grad", "grad_global_norm", (loss.d_score, loss.d_kl)),
    ] {
        let gradient = bench.gradient(slopes.0, slopes.1)?;
        report.compare_value(norm_name, norm(&gradient));
        for (name, tensor) in bench.named(&gradient)? {
            report.compare(&format!("{prefix}.{name}"), &tensor);
        }
    }
    Ok(())
}

/// Steps of the algorithm itself.
fn training(report: &mut Report, bench: &mut Bench, config: &Config, tolerance: f64) -> Outcome {
    let updates = report.get("train.losses")?.len();
    let noise = Noise::new(0).with_fixed_latents(config.noise_call.seed);
    let drawn = noise.latents(0, 0, bench.noise.shape())?;
    let off = drawn.f32s()?.iter().zip(bench.noise.f32s()?).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
    report.check(off <= NOISE_ERROR, || {
        format!("noise: torch.randn with seed {} is off by {off:e}", config.noise_call.seed)
    });

    let optimizer = OptimizerConfig {
        betas: config.betas,
        weight_decay: config.weight_decay,
        max_grad_norm: config.max_grad_norm,
        ..OptimizerConfig::default()
    };
    let mut strategy = single(SingleOptions::default());
    strategy.attach(&mut bench.model, &optimizer)?;
    let mut algorithm = RewardFl::new(bench.options.clone());
    algorithm.check(&mut bench.model, Some(&bench.scorer))?;
    bench.scorer.prepared = Some(bench.target.clone());
    let samples = [sample(report.get("video_decoded")?)?];
    let mut reports: Vec<StepReport> = Vec::new();
    for step in 0..updates {
        reports.push(algorithm.step(&mut StepContext {
            step: step as u64,
            samples: &samples,
            model: &mut bench.model,
            reward: Some(&mut bench.scorer),
            strategy: &mut strategy,
            learning_rate: config.lr,
            noise: &noise,
            progress: &Silent,
            want_videos: false,
        })?);
        let prefix = format!("after{}.", step + 1);
        if report.names().iter().any(|n| n.starts_with(&prefix)) {
            let mut values = vec![0.0; bench.model.parameter_count()];
            bench.model.read_parameters(&mut values)?;
            for (name, tensor) in bench.named(&values)? {
                report.compare(&format!("{prefix}{name}"), &tensor);
            }
        }
    }
    for (name, metric) in [
        ("train.losses", "actor/loss"),
        ("train.scores", "actor/score"),
        ("train.kl", "actor/kl_loss"),
        ("train.grad_norms", "actor/grad_norm"),
    ] {
        let values: Vec<f32> = reports.iter().map(|r| r.metrics[metric] as f32).collect();
        report.compare(name, &Tensor::new(values, [updates])?);
    }
    // The case holds these apart, as the algorithm measures them.
    let slope = Loss::at(0.0, 0.0, 1.0, &bench.options).d_score.abs();
    for (metric, name, slope) in
        [("actor/grad_norm_reward", "grad_norm_of_score", slope), ("actor/grad_norm_kl", "grad_norm_of_kl", 1.0)]
    {
        let (found, expected) = (reports[0].metrics[metric], slope * f64::from(report.get(name)?.item()?));
        report.check((found / expected - 1.0).abs() < tolerance, || format!("{metric}: {found}, expected {expected}"));
    }
    Ok(())
}

/// A row of data whose clip has the size of `video`, `[1, 3, T, H, W]`; the scorer has its own target.
fn sample(video: &Tensor) -> Outcome<Sample> {
    let &[_, channels, t, h, w] = video.shape() else { return Err("video is not [1, 3, T, H, W]".into()) };
    let clip = Video::new(Tensor::zeros([t, channels, h, w]), FPS)?;
    Ok(Sample::new(0, "the case's sample", "", SampleVideo::Clip(Arc::new(clip))))
}

/// `[T, 3, H, W]` to `[3, T, H, W]`.
pub fn channels_first(frames: &Tensor) -> Outcome<Tensor> {
    let &[t, c, h, w] = frames.shape() else { return Err("frames are not [T, 3, H, W]".into()) };
    let values = frames.f32s()?;
    let planes = (0..c).flat_map(|c_i| (0..t).map(move |t_i| (t_i * c + c_i) * h * w));
    Ok(Tensor::new(planes.flat_map(|at| values[at..at + h * w].to_vec()).collect::<Vec<f32>>(), [c, t, h, w])?)
}
