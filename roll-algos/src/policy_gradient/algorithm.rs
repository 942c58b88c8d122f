//! An algorithm around the rounds of a policy gradient: its checks, its evaluation, and its memory from round to round.

use roll_core::{
    Algorithm, Evaluated, EvaluationContext, Headline, Model, Result, RewardScorer, ScheduleFacts, StateDict,
    StepContext, StepReport,
};

use super::levels::generate_measured;
use super::options::Shared;
use super::round::{Group, Running};
use super::slow_copies::{SlowCopies, with_parameters};
use super::tally::{DATA_LOSS, headlines};
use crate::flow_matching::DataTerm;
use crate::scoring::{self, Generation, Prepared};
use crate::stopwatch::{DATA, OPTIMIZER};
use crate::update::diffusion;
use crate::{AlgorithmError, update};

/// The part in which policy gradients differ: how a round learns. It has their options.
pub trait Method: Send {
    /// Name of the algorithm.
    const NAME: &'static str;
    /// Whether another policy than the one in training generates, and follows it slowly.
    const HAS_OLD_POLICY: bool;

    /// The options that all of them have.
    fn shared(&self) -> Shared;

    /// Fails on options that contradict one another, the model or the reward, naming the key.
    fn check(&self, facts: ScheduleFacts, reward: &dyn RewardScorer) -> Result<()>;

    /// Generates, judges and trains.
    fn round(&self, kept: &mut Kept, ctx: &mut StepContext<'_>) -> Result<StepReport>;
}

/// A policy gradient as an algorithm.
pub struct PolicyGradient<M> {
    pub(crate) method: M,
    pub(crate) kept: Kept,
}

/// Memory from round to round.
pub struct Kept {
    pub(crate) prepared: Prepared,
    pub(crate) copies: SlowCopies,
    data: DataTerm,
    /// Updates that were made.
    updates: u64,
}

impl<M: Method> PolicyGradient<M> {
    /// Makes the algorithm from its options.
    pub fn new(options: M) -> Self {
        let shared = options.shared();
        let data = DataTerm::new(shared.data_weight, shared.sampling.shift);
        let kept = Kept { prepared: Prepared::default(), copies: SlowCopies::default(), data, updates: 0 };
        Self { method: options, kept }
    }
}

impl<M: Method> Algorithm for PolicyGradient<M> {
    fn check(&mut self, model: &mut dyn Model, reward: Option<&dyn RewardScorer>) -> Result<()> {
        let facts = diffusion(model, M::NAME)?.schedule();
        if model.parameter_count() == 0 {
            return Err(AlgorithmError::NothingToTrain.into());
        }
        let reward = reward.ok_or(AlgorithmError::NoReward { algorithm: M::NAME })?;
        self.method.check(facts, reward)?;
        self.kept.data.check(facts)?;
        self.kept.copies.begin(model, M::HAS_OLD_POLICY, self.method.shared().evaluation_average > 0.0)
    }

    fn headlines(&self) -> Vec<Headline> {
        headlines()
    }

    fn step(&mut self, context: &mut StepContext<'_>) -> Result<StepReport> {
        let report = self.method.round(&mut self.kept, context);
        if report.is_err() {
            // No half-summed gradient is left for the next step.
            update::forget(context)?;
        }
        report
    }

    fn evaluate(&mut self, context: &mut EvaluationContext<'_>) -> Result<Option<Vec<Evaluated>>> {
        let shared = self.method.shared();
        let sampling = shared.evaluation(diffusion(context.model, M::NAME)?.schedule())?;
        let generation = Generation {
            algorithm: M::NAME,
            negative_prompt: sampling.guidance.is_on().then_some(shared.sampling.negative_prompt.as_str()),
            reference: shared.reference,
            frame_rate: shared.frame_rate,
            generate: &|model, conditions, noise| generate_measured(model, M::NAME, &sampling, conditions, noise),
        };
        let prepared = &mut self.kept.prepared;
        let evaluated = match self.kept.copies.evaluated(context.model)? {
            None => scoring::evaluate(&generation, prepared, context),
            Some(average) => with_parameters(
                context,
                |c| &mut *c.model,
                average,
                |context| scoring::evaluate(&generation, prepared, context),
            ),
        };
        evaluated.map(Some)
    }

    fn state(&self) -> serde_json::Value {
        serde_json::json!({ "updates": self.kept.updates })
    }

    fn load_state(&mut self, state: &serde_json::Value) -> Result<()> {
        self.kept.updates = state["updates"].as_u64().unwrap_or(0);
        Ok(())
    }

    fn tensors(&self) -> Result<StateDict> {
        self.kept.copies.state()
    }

    fn load_tensors(&mut self, tensors: &StateDict) -> Result<()> {
        self.kept.copies.load(tensors)
    }
}

impl Kept {
    /// The updates of a round. In each, `learn` adds the gradients of one prompt's videos to the strategy. After a
    /// score that was not finite there is one update, which is left out.
    pub(crate) fn train<T>(
        &mut self,
        shared: &Shared,
        ctx: &mut StepContext<'_>,
        groups: &mut [Group<T>],
        is_finite: bool,
        run: &mut Running<'_>,
        mut learn: impl FnMut(&mut Prepared, &mut StepContext<'_>, &mut Group<T>, &mut Running<'_>) -> Result<()>,
    ) -> Result<()> {
        let updates = if is_finite { shared.updates_per_step } else { 1 };
        for number in 0..updates {
            run.update = number;
            for group in groups.iter_mut().filter(|_| is_finite) {
                learn(&mut self.prepared, ctx, group, run)?;
                self.add_clip(ctx, group, run)?;
            }
            self.update(shared, ctx, run)?;
        }
        Ok(())
    }

    /// Adds the gradient of the loss on the prompt's own clip to the strategy, once for each of its videos that are
    /// trained on: it is added to each video's loss.
    fn add_clip<T>(&mut self, ctx: &mut StepContext<'_>, group: &Group<T>, run: &mut Running<'_>) -> Result<()> {
        let videos = group.trained().count() as f64;
        if !self.data.is_on() || videos == 0.0 || run.tally.nonfinite.is_some() {
            return Ok(());
        }
        run.begin(DATA, "training on the clip")?;
        let sample = &ctx.samples[group.sample];
        if let Some(loss) = self.data.accumulate(ctx, sample, group.key_in(run.update), videos)? {
            match loss.is_finite() {
                true => run.tally.weigh(DATA_LOSS, loss, videos),
                false => run.tally.nonfinite = Some((format!("the loss on the clip of {}", sample.origin), loss)),
            }
        }
        Ok(())
    }

    /// One update of the optimizer, by the mean over the videos that are trained on.
    fn update(&mut self, shared: &Shared, ctx: &mut StepContext<'_>, run: &mut Running<'_>) -> Result<()> {
        run.watch.begin_after_update(OPTIMIZER, Some("updating parameters"));
        let (trained, mut nonfinite) = (run.tally.trained, run.tally.nonfinite.take());
        let update = update::finish(ctx, trained, &mut nonfinite, shared.on_nonfinite, |_, _| Ok(()))?;
        run.tally.nonfinite = nonfinite;
        self.updates += u64::from(update.as_ref().is_some_and(|update| update.applied));
        run.tally.updates.extend(update);
        self.copies.average(ctx.model, self.updates, shared.evaluation_average)
    }
}
