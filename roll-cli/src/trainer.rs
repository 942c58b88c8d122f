//! The training loop: batches in, metrics, samples and checkpoints out.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use roll_backends::optimizer::{LrSchedule, LrSchedulerType};
use roll_core::checkpoint::{self, Checkpoint, CheckpointWriter};
use roll_core::config::Loaded;
use roll_core::metrics::MetricsWriter;
use roll_core::run_dir::RunDir;
use roll_core::{
    Algorithm, BuildContext, DataSource, Error, Model, Noise, Registry, Result, ResultExt, RewardScorer, StateDict,
    StepContext, StepReport, Strategy, Validation, communicator,
};
use roll_data::{Batch, Batches, Dataset, encode_gif, write_mp4};
use roll_models::weights::{self, save_safetensors};
use roll_rewards::WeightedSum;

use crate::evaluation::{Evaluator, Results};
use crate::outcome::Outcome;
use crate::progress::Bar;
use crate::trajectories::Trajectories;
use crate::{placement, ranks};

/// Longer side of the pictures in TensorBoard, in pixels.
const GIF_SIDE: usize = 256;
/// The optimizer's state in a checkpoint.
const OPTIMIZER_FILE: &str = "trainer/optimizer.safetensors";

/// Everything a run consists of, checked before anything is written.
pub struct Trainer {
    loaded: Loaded,
    model: Box<dyn Model>,
    reward: Option<Box<dyn RewardScorer>>,
    algorithm: Box<dyn Algorithm>,
    strategy: Box<dyn Strategy>,
    /// `None`: the algorithm brings its own.
    data: Option<Batches>,
    evaluator: Option<Evaluator>,
    schedule: LrSchedule,
    noise: Noise,
    steps: u64,
    /// Steps that were done before this process.
    done: u64,
}

/// How a run ended; written to `summary.json`.
#[derive(Debug, serde::Serialize)]
pub struct Summary {
    /// Steps taken.
    pub steps: u64,
    /// Wall-clock seconds of the loop.
    pub seconds: f64,
    /// Trainable parameters.
    pub parameters: usize,
    /// Metrics of the first step.
    pub first: BTreeMap<String, f64>,
    /// Metrics of the last step.
    pub last: BTreeMap<String, f64>,
    /// Samples that were left out.
    pub skipped_samples: u64,
    /// Updates that were left out because a value was not finite.
    pub skipped_updates: u64,
    /// The trained adapters, or the experts when all their weights are trained.
    pub adapter: Vec<PathBuf>,
    /// Evaluations before and after: `unseen_before`, `unseen_after`, `unseen_gain`, ..., `kl`; of an agent
    /// `success_before`, `success_after`.
    #[serde(flatten)]
    pub figures: BTreeMap<String, serde_json::Value>,
    /// The same for people.
    #[serde(skip)]
    pub lines: Vec<(String, String)>,
    /// What a person would open: name and path.
    #[serde(skip)]
    pub written: Vec<(&'static str, PathBuf)>,
}

impl Trainer {
    /// Opens data and networks.
    pub fn new(loaded: Loaded, registry: &Registry, context: &BuildContext) -> Result<Self> {
        let config = &loaded.config;
        let reward = reward(&loaded, registry, context)?;
        let mut algorithm = registry.algorithm(&config.algo.name, &config.algo.options, context)?;
        let source = algorithm.data_source();
        let dataset = match source {
            DataSource::Clips => Some(Arc::new(Dataset::open(&config.data)?)),
            DataSource::Own { .. } => None,
        };
        if let Some(env) = &config.env {
            algorithm.open_environments(&mut || registry.environment(&env.name, &env.options, context))?;
        }
        let mut strategy = registry.strategy(&config.strategy.name, &config.strategy.options, context)?;
        ranks::check_strategy(&config.strategy.name, strategy.as_ref())?;
        let options = placement::model_options(config, registry)?;
        let mut model = registry.model(&config.model.name, &options, context)?;
        algorithm.check(model.as_mut(), reward.as_deref())?;
        strategy.attach(model.as_mut(), &config.training.optimizer())?;

        let t = &config.training;
        let per_step = t.per_device_train_batch_size * t.gradient_accumulation_steps;
        let communicator = strategy.communicator();
        let noise = config.noise();
        let evaluator = match &dataset {
            Some(dataset) => Evaluator::open(&loaded, dataset, registry, context)?,
            None => None,
        };
        let data = dataset.map(|dataset| {
            Batches::new(dataset, noise.clone(), per_step, communicator.rank(), communicator.world_size())
        });
        let most = config.max_steps.unwrap_or(u64::MAX);
        let steps = match (config.steps, &data, source) {
            (Some(steps), ..) => steps,
            (None, Some(data), _) => data.steps(t.num_train_epochs).min(most),
            (None, None, DataSource::Own { steps_per_epoch: Some(n) }) => {
                n.saturating_mul(t.num_train_epochs).min(most)
            }
            (None, None, _) => {
                let problem = format!("`{}` makes its data as it goes: say how many steps it takes", config.algo.name);
                return Err(Error::config("steps", problem));
            }
        };
        if steps == 0 {
            return Err(Error::config("steps", "there is nothing to do: 0 steps"));
        }
        let schedule = LrSchedule::new(schedule_type(&t.lr_scheduler_type)?, t.learning_rate, t.warmup_steps, steps);
        Ok(Self { loaded, model, reward, algorithm, strategy, data, evaluator, schedule, noise, steps, done: 0 })
    }

    /// Goes on from a checkpoint: of this configuration, on any number of ranks.
    pub fn resume(&mut self, from: &Checkpoint) -> Result<()> {
        let read = |name: &str| -> Result<StateDict> { Ok(weights::Checkpoint::open(from.file(name)?)?.all()?) };
        let mut adapters = BTreeMap::new();
        for name in from.manifest().files.keys().filter(|name| !name.contains('/')) {
            if let Some(stem) = name.strip_suffix(".safetensors") {
                adapters.insert(stem.to_string(), read(name)?);
            }
        }
        self.model.import_adapter(&adapters)?;
        self.strategy.load_state(&read(OPTIMIZER_FILE)?)?;
        self.algorithm.load_state(from.manifest().info.get("algorithm").unwrap_or(&serde_json::Value::Null))?;
        self.done = from.step();
        let before = from.manifest().info["global_batch"].as_u64();
        let now = self.data.as_ref().map(|data| data.global_batch() as u64);
        if let (Some(before), Some(now)) = (before, now)
            && before != now
        {
            tracing::warn!(
                "a step had {before} samples over all ranks and now has {now}: the order of the data is not continued; \
                 `training.gradient_accumulation_steps` keeps the number"
            );
        }
        match self.done < self.steps {
            true => Ok(()),
            false => {
                let problem = format!("the run has done {} steps already; ask for more than that", self.done);
                Err(Error::config("steps", problem))
            }
        }
    }

    /// Trains, writing to `dir`, which only rank 0 has. Nothing is written before the first step is done.
    pub fn run(mut self, dir: Option<&RunDir>) -> Result<Summary> {
        let config = self.loaded.config.clone();
        let mut metrics = None;
        let mut trajectories = Trajectories::new(dir);
        let bar = Bar::new(self.steps, "steps", dir.is_some());
        bar.skip(self.done);
        let start = Instant::now();
        let mut summary = Summary {
            steps: 0,
            seconds: 0.0,
            parameters: self.model.parameter_count(),
            first: BTreeMap::new(),
            last: BTreeMap::new(),
            skipped_samples: 0,
            skipped_updates: 0,
            adapter: Vec::new(),
            figures: BTreeMap::new(),
            lines: Vec::new(),
            written: Vec::new(),
        };
        let mut outcome = Outcome::default();
        let identity = config.reward.iter().any(|r| r.name == "insightface");
        if let Some(dir) = dir {
            tracing::info!(
                "{} trainable parameters, {} steps, writing to {}",
                summary.parameters,
                self.steps - self.done,
                dir.path().display()
            );
        }
        let mut before = if self.done == 0 { self.evaluate("before training")? } else { None };
        let mut validated = if self.done == 0 { self.validate(0, &bar)? } else { None };
        for step in self.done..self.steps {
            let last = step + 1 == self.steps;
            let due = |every: u64| every > 0 && (step + 1).is_multiple_of(every);
            let sampling = config.sample_steps > 0 && (due(config.sample_steps) || last || step == 0);
            let want_videos = sampling && dir.is_some();
            let begun = Instant::now();
            let stepped = self.step(step, want_videos, &bar);
            let saved = step == self.done || (config.save_steps > 0 && step.is_multiple_of(config.save_steps));
            if stepped.is_err() && !saved {
                self.rescue(dir, step);
            }
            let (mut report, learning_rate) = stepped?;
            if let (Some(dir), None) = (dir, &metrics) {
                dir.write_config(&self.loaded.resolved_yaml()?)?;
                let first = if step == 0 { 0 } else { step + 1 };
                metrics = Some(MetricsWriter::create(dir.path(), first)?);
            }
            if let Some(results) = before.take() {
                if let Some(metrics) = &mut metrics {
                    metrics.log(0, &Outcome::metrics(&results, identity))?;
                }
                outcome.evaluated(0, results);
            }
            if let Some(validation) = validated.take() {
                if let Some(metrics) = &mut metrics {
                    metrics.log(0, &validation.metrics)?;
                }
                trajectories.write(&validation.records)?;
                outcome.validated(0, validation.metrics);
            }
            trajectories.write(&report.records)?;
            report.metrics.insert("lr".into(), learning_rate);
            report.metrics.insert("time/total".into(), begun.elapsed().as_secs_f64());
            if (due(config.evaluation.every) || last)
                && let Some(results) = self.evaluate(&format!("after step {}", step + 1))?
            {
                report.metrics.extend(Outcome::metrics(&results, identity));
                outcome.evaluated(step + 1, results);
            }
            if (due(config.evaluation.every) || last)
                && let Some(validation) = self.validate(step + 1, &bar)?
            {
                report.metrics.extend(validation.metrics.clone());
                trajectories.write(&validation.records)?;
                outcome.validated(step + 1, validation.metrics);
            }
            outcome.step(step + 1, &report.metrics);

            summary.skipped_samples += report.skipped.len() as u64;
            summary.skipped_updates += u64::from(!report.applied);
            if let (Some(dir), Some(metrics)) = (dir, &mut metrics) {
                for (sample, reason) in &report.skipped {
                    tracing::warn!("step {}: {sample} was left out: {reason}", step + 1);
                }
                if !report.applied {
                    tracing::warn!("step {}: nothing was updated", step + 1);
                }
                if due(config.logging_steps) || last {
                    metrics.log(step + 1, &report.metrics)?;
                    tracing::info!("{}", line(step + 1, self.steps, &report.metrics));
                }
                for (name, video) in &report.videos {
                    write_mp4(dir.samples(step + 1)?.join(format!("{name}.mp4")), video)?;
                    let gif = encode_gif(video, GIF_SIDE)?;
                    let [_, height, width] = video.dims();
                    metrics.image(step + 1, &format!("samples/{name}"), &gif, [height, width])?;
                }
            }
            if due(config.save_steps) || last {
                summary.adapter = self.save(dir, step + 1)?;
            }
            if summary.first.is_empty() {
                summary.first = report.metrics.clone();
            }
            summary.last = report.metrics;
            summary.steps = step + 1;
            bar.advance();
        }
        bar.finish();
        summary.seconds = start.elapsed().as_secs_f64();
        let Some(dir) = dir else { return Ok(summary) };
        let yaml = self.loaded.resolved_yaml()?;
        summary.written = outcome.write(dir, config.experiment(), &yaml, self.evaluator.as_ref(), identity)?;
        summary.written.extend(trajectories.path().map(|path| ("trajectories", path)));
        summary.lines = outcome.lines(identity);
        summary.figures = outcome.figures(identity);
        let json = serde_json::to_value(&summary).map_err(|e| Error::Misuse(format!("writing the summary: {e}")))?;
        dir.write_summary(&json)?;
        Ok(summary)
    }

    /// Generates and scores the clips of `evaluation`, if there are any.
    fn evaluate(&mut self, when: &str) -> Result<Option<Results>> {
        let Some(evaluator) = &mut self.evaluator else { return Ok(None) };
        tracing::info!("evaluating {} clips {when}", evaluator.clips());
        let bar = Bar::new(evaluator.clips() as u64, "clips", self.strategy.communicator().rank().0 == 0);
        let reward = self.reward.as_deref_mut();
        let results = evaluator.run(self.algorithm.as_mut(), self.model.as_mut(), reward, &self.noise, &bar)?;
        bar.finish();
        Ok(results)
    }

    /// Lets the model do what it is trained for, if the algorithm has such a notion.
    fn validate(&mut self, step: u64, bar: &Bar) -> Result<Option<Validation>> {
        self.algorithm.validate(step, self.model.as_mut(), &self.noise, bar)
    }

    fn step(&mut self, step: u64, want_videos: bool, bar: &Bar) -> Result<(StepReport, f64)> {
        let learning_rate = self.schedule.at(step);
        let batch = match &mut self.data {
            Some(data) => data.batch(step)?,
            None => Batch::default(),
        };
        let mut context = StepContext {
            step,
            samples: &batch.samples,
            model: self.model.as_mut(),
            reward: match &mut self.reward {
                Some(reward) => Some(reward.as_mut()),
                None => None,
            },
            strategy: self.strategy.as_mut(),
            learning_rate,
            noise: &self.noise,
            progress: bar,
            want_videos,
        };
        let mut report = self.algorithm.step(&mut context).while_doing(|| format!("step {}", step + 1))?;
        let skipped = communicator::join(self.strategy.communicator(), &batch.skipped)?;
        report.skipped.extend(skipped.into_iter().flatten());
        Ok((report, learning_rate))
    }

    /// Writes a checkpoint of the steps that were done before one failed: a reward that breaks in the night must not
    /// cost what was trained until then. Several ranks cannot: where one fails, the others are gone.
    fn rescue(&mut self, dir: Option<&RunDir>, steps: u64) {
        let Some(dir) = dir.filter(|_| self.strategy.communicator().world_size() == 1) else { return };
        match self.save(Some(dir), steps) {
            Ok(_) => tracing::warn!("what was trained in {steps} steps is in {}", dir.checkpoints().display()),
            Err(error) => tracing::warn!("what was trained in {steps} steps could not be saved: {error}"),
        }
    }

    /// Writes a checkpoint; returns the adapter files in it. All ranks take part: each has some of the state.
    fn save(&mut self, dir: Option<&RunDir>, step: u64) -> Result<Vec<PathBuf>> {
        let optimizer = self.strategy.state()?;
        let exported = dir.map(|dir| Ok::<_, Error>((dir, self.model.export_adapter()?))).transpose()?;
        // Weights that are divided are gathered for it: the other ranks help until that is done.
        self.strategy.communicator().barrier()?;
        let Some((dir, adapters)) = exported else { return Ok(Vec::new()) };
        let mut writer = CheckpointWriter::begin(&dir.checkpoints(), step)?;
        let mut names = Vec::new();
        for (name, tensors) in &adapters {
            let file = format!("{name}.safetensors");
            writer.with(&file, |path| Ok(save_safetensors(path, tensors, &BTreeMap::new())?))?;
            names.push(file);
        }
        writer.with(OPTIMIZER_FILE, |path| Ok(save_safetensors(path, &optimizer, &BTreeMap::new())?))?;
        let info = serde_json::json!({
            "algorithm": self.algorithm.state(),
            "world_size": self.strategy.communicator().world_size(),
            "global_batch": self.data.as_ref().map(Batches::global_batch),
        });
        let checkpoint = writer.finish(info)?;
        if let Some(keep) = self.loaded.config.max_ckpt_to_keep {
            checkpoint::prune(&dir.checkpoints(), keep)?;
        }
        Ok(names.into_iter().map(|n| checkpoint.path().join(n)).collect())
    }
}

fn schedule_type(name: &str) -> Result<LrSchedulerType> {
    serde_json::from_value(name.into()).map_err(|e| Error::config("training.lr_scheduler_type", e.to_string()))
}

/// The configured rewards as one.
pub fn reward(loaded: &Loaded, registry: &Registry, context: &BuildContext) -> Result<Option<Box<dyn RewardScorer>>> {
    match loaded.config.reward.as_slice() {
        [] => Ok(None),
        rewards => WeightedSum::from_config(rewards, registry, context).map(Some),
    }
}

/// One line for people: of these metrics, those that the algorithm has.
fn line(step: u64, steps: u64, metrics: &BTreeMap<String, f64>) -> String {
    let mut line = format!("step {step}/{steps}");
    let mut add = |label: &str, name: &str, written: fn(f64) -> String| {
        if let Some(value) = metrics.get(name) {
            line.push_str(&format!("  {label}{}", written(*value)));
        }
    };
    add("loss ", "actor/loss", |v| format!("{v:.4}"));
    add("score ", "actor/face_score", |v| format!("{v:.4}"));
    add("success ", "env/success", |v| format!("{:.1} %", 100.0 * v));
    add("validation ", "val/env/success", |v| format!("{:.1} %", 100.0 * v));
    add("kl ", "actor/kl_loss", |v| format!("{v:.2e}"));
    add("grad norm ", "actor/grad_norm", |v| format!("{v:.3e}"));
    add("lr ", "lr", |v| format!("{v:.1e}"));
    add("", "time/total", |v| format!("{v:.1} s"));
    line
}
