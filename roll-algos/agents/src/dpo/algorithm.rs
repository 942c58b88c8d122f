//! The algorithm: reference and loss of the pairs of a step, update, validation, and the state in checkpoints.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use roll_core::{
    Algorithm, BuildContext, Communicator, Error, Grad, Headline, HeadlineFormat, Model, Noise, Options,
    OwnDataAlgorithm, Progress, Result, RewardScorer, Samples, SingleRank, StateDict, StepContext, StepReport,
    Validation, communicator, parse_options,
    plan::{Passes, TextPass},
};
use roll_step::ranks::{Bits, share};
use roll_step::stopwatch::{REFERENCE, Stopwatch};
use roll_step::update::{self, language};

use super::NAME;
use super::config::DpoConfig;
use super::preferences::{Pair, Preferences};
use super::reference::Reference;
use super::report::metrics;
use super::step::{by_length, losses, pull, refer};
use crate::conversations::{TrainedOn, answers, order};

const TOKENIZE: &str = "time/tokenize";
const TRAIN: &str = "time/step_train";

/// The algorithm `dpo`.
pub struct Dpo {
    config: DpoConfig,
    preferences: Preferences,
    /// Fingerprint of `preferences`, by whose positions checkpoints have the reference.
    fingerprint: String,
    pub(super) reference: Reference,
    /// Whether the checkpoint that is resumed has the reference of other pairs.
    is_of_other_pairs: bool,
    held_out: Option<HeldOut>,
    ranks: Arc<dyn Communicator>,
}

/// Pairs that are not trained on.
struct HeldOut {
    preferences: Preferences,
    /// The reference of this rank's share. A validation always evaluates the same batches, so that it is in no
    /// checkpoint.
    reference: Reference,
    /// Number of these pairs that are also trained on, by mistake of the user.
    seen: usize,
}

impl Dpo {
    /// Makes the algorithm from its options and preferences.
    pub fn new(config: DpoConfig, preferences: Preferences) -> Result<Self> {
        config.check()?;
        let reference = Reference::new(preferences.len());
        let fingerprint = preferences.fingerprint();
        Ok(Self {
            config,
            preferences,
            fingerprint,
            reference,
            is_of_other_pairs: false,
            held_out: None,
            ranks: Arc::new(SingleRank),
        })
    }

    /// The same with pairs that are not trained on.
    pub fn validating(self, preferences: Preferences) -> Self {
        let (reference, seen) = (Reference::new(preferences.len()), preferences.count_in(&self.preferences));
        Self { held_out: Some(HeldOut { preferences, reference, seen }), ..self }
    }

    /// Makes this one of several `ranks`, which share the pairs.
    pub fn on(self, ranks: Arc<dyn Communicator>) -> Self {
        Self { ranks, ..self }
    }

    /// Makes the algorithm from its options, and reads the files that they name.
    pub(super) fn open(config: DpoConfig, context: &BuildContext) -> Result<Self> {
        let Some(path) = &config.data else {
            let problem = "no data are named: give a file of JSON lines, each with `prompt`, `chosen` and `rejected`";
            return Err(Error::config("algo.data", problem));
        };
        let preferences = Preferences::read(&context.resolve(path))?;
        let held_out = config.val_data.as_ref().map(|path| Preferences::read(&context.resolve(path))).transpose()?;
        let mut dpo = Self::new(config, preferences)?.on(context.ranks.clone());
        if let Some(held_out) = held_out {
            dpo = dpo.validating(held_out);
        }
        if let Some(HeldOut { preferences, seen: seen @ 1.., .. }) = &dpo.held_out
            && context.ranks.rank().0 == 0
        {
            let of = preferences.len();
            tracing::warn!("{seen} of {of} pairs of `algo.val_data` are trained on, too: they say nothing of others");
        }
        Ok(dpo)
    }
}

impl OwnDataAlgorithm for Dpo {
    fn steps_per_epoch(&self) -> Option<u64> {
        Some(self.preferences.len().div_ceil(self.config.batch_size) as u64)
    }
}

impl Algorithm for Dpo {
    fn samples(self: Box<Self>) -> Samples {
        Samples::Own(self)
    }

    fn check(&mut self, model: &mut dyn Model, reward: Option<&dyn RewardScorer>) -> Result<()> {
        let trained_on = TrainedOn { algorithm: NAME, data: "preferences", entries: "pairs" };
        trained_on.check(model, reward, self.config.batch_size, self.ranks.as_ref())?;
        let model = language(model, NAME)?;
        let limit = self.config.limit(model);
        self.preferences.check("algo.data", limit, model)?;
        match &mut self.held_out {
            Some(held_out) => held_out.preferences.check("algo.val_data", limit, model),
            None => Ok(()),
        }
    }

    fn headlines(&self) -> Vec<Headline> {
        let held_out = match &self.held_out {
            Some(HeldOut { preferences, seen: seen @ 1.., .. }) => {
                format!("pairs, {seen} of {} of which are trained on, too", preferences.len())
            }
            _ => "pairs that were not trained on".into(),
        };
        vec![
            Headline::new("rewards/accuracy", "accuracy", "Pairs whose chosen answer has the larger reward")
                .written(HeadlineFormat::Percent)
                .validated_by("val/rewards/accuracy", "accuracy", &held_out)
                .enabled_by("algo.val_data"),
            Headline::new("actor/loss", "loss", "Loss")
                .validated_by("val/loss", "loss", &held_out)
                .enabled_by("algo.val_data"),
            Headline::new("rewards/margin", "margin", "Reward of the chosen answer over that of the rejected one"),
            Headline::new("logps/chosen", "", "Log-probability of chosen answers"),
            Headline::new("actor/grad_norm", "grad norm", "Gradient norm").written(HeadlineFormat::Scientific),
        ]
    }

    fn validate(
        &mut self,
        step: u64,
        model: &mut dyn Model,
        _noise: &Noise,
        progress: &dyn Progress,
    ) -> Result<Option<Validation>> {
        let (config, ranks) = (&self.config, self.ranks.as_ref());
        let Some(held_out) = &mut self.held_out else { return Ok(None) };
        let model = language(model, NAME)?;
        let mut records = Vec::new();
        // Rank 0 answers first. The other ranks evaluate their part of the pairs meanwhile, and wait for its part.
        if ranks.rank().0 == 0 {
            records = answers::answers(held_out.preferences.chosen(), config.limit(model), step, model, progress)?;
        }
        let mut pairs = Vec::new();
        for row in share(ranks, held_out.preferences.len()) {
            pairs.extend(held_out.preferences.pair(row, config.limit(model), model)?.ok());
        }
        let mut outcomes = Vec::new();
        for (i, chunk) in by_length(pairs).chunks(config.micro_batch_size).enumerate() {
            if progress.interrupted() {
                return Err(Error::Interrupted);
            }
            progress.phase(&format!("validating, batch {}", i + 1));
            if !config.reference_free && chunk.iter().any(|pair| held_out.reference.get(pair.row).is_none()) {
                refer(model, chunk, &mut held_out.reference)?;
            }
            let reference = (!config.reference_free).then_some(&held_out.reference);
            outcomes.extend(losses(config, model, chunk, reference, Grad::Skip)?.1);
        }
        let Some(metrics) = metrics("loss", &outcomes, ranks)? else {
            let problem = "no pair of it can be evaluated within `algo.sequence_length`";
            return Err(Error::config("algo.val_data", problem));
        };
        let metrics = metrics.into_iter().map(|(name, value)| (format!("val/{name}"), value)).collect();
        Ok(Some(Validation { metrics, records, losses: Vec::new() }))
    }

    fn step(&mut self, context: &mut StepContext<'_>) -> Result<StepReport> {
        update::discard_on_error(context, |context| self.update(context))
    }

    fn state(&self) -> serde_json::Value {
        serde_json::json!({ "pairs": self.fingerprint })
    }

    fn load_state(&mut self, state: &serde_json::Value) -> Result<()> {
        self.is_of_other_pairs = state["pairs"] != self.fingerprint.as_str();
        if self.is_of_other_pairs {
            tracing::warn!(
                "`algo.data` has other pairs than when the run was begun: the reference evaluates them again"
            );
        }
        Ok(())
    }

    fn tensors(&self) -> Result<StateDict> {
        if self.config.reference_free { Ok(StateDict::new()) } else { self.reference.tensors() }
    }

    fn load_tensors(&mut self, tensors: &StateDict) -> Result<()> {
        if self.is_of_other_pairs { Ok(()) } else { self.reference.load(tensors) }
    }
}

impl Dpo {
    fn update(&mut self, ctx: &mut StepContext<'_>) -> Result<StepReport> {
        let mut watch = Stopwatch::new(ctx.progress, &[TOKENIZE, REFERENCE, TRAIN]);
        let mut report = StepReport::default();
        ctx.strategy.discard();

        watch.begin(TOKENIZE, None)?;
        let rows = order::rows_of_step(ctx, self.preferences.len(), self.config.batch_size, self.config.shuffle);
        let model = language(ctx.model, NAME)?;
        let limit = self.config.limit(model);
        let mut pairs = Vec::new();
        for row in rows {
            match self.preferences.pair(row, limit, model)? {
                Ok(pair) => pairs.push(pair),
                Err(reason) => report.skipped.push((self.preferences.origin(row), reason)),
            }
        }
        let pairs = by_length(pairs);

        watch.begin(REFERENCE, None)?;
        if !self.config.reference_free {
            self.refer(ctx, &pairs)?;
        }

        watch.begin(TRAIN, None)?;
        let mut sum = [pairs.len() as f32];
        ctx.strategy.ranks().all.all_reduce(&mut sum)?;
        let pairs_of_all_ranks = f64::from(sum[0]);
        let reference = (!self.config.reference_free).then_some(&self.reference);
        let (mut outcomes, mut nonfinite) = (Vec::new(), None);
        for chunk in pairs.chunks(self.config.micro_batch_size) {
            outcomes.extend(pull(&self.config, ctx, chunk, reference, pairs_of_all_ranks)?);
            nonfinite = outcomes.iter().map(|outcome| outcome.loss.value).find(|loss| !loss.is_finite());
            if nonfinite.is_some() {
                break;
            }
        }
        let mut nonfinite = nonfinite.map(|loss| ("the loss".to_string(), loss));
        // `pull` has divided the loss by the pairs of all ranks, and `finish` divides by the sum of `counted` over ranks.
        // So that sum must be 1: rank 0 counts one sample for the whole step.
        let counted = f64::from(u8::from(pairs_of_all_ranks > 0.0 && ctx.strategy.ranks().all.rank().0 == 0));
        let on_nonfinite = self.config.on_nonfinite;
        let update = update::finish(ctx, counted, &mut nonfinite, on_nonfinite, update::nothing_before_update)?;
        report.metrics = metrics("actor/loss", &outcomes, ctx.strategy.ranks().all.as_ref())?.unwrap_or_default();
        if let Some(update) = update {
            report.metrics.insert("actor/grad_norm".into(), update.grad_norm);
            report.metrics.insert("actor/grad_clipped".into(), f64::from(u8::from(update.clipped)));
            report.applied = update.applied;
        }
        report.metrics.extend(watch.seconds(&SingleRank)?);
        Ok(report)
    }

    /// Evaluates those of `pairs` under the reference policy that were not evaluated before. Every rank gets the
    /// log-probabilities of all ranks, which a later pass over the data may need on another rank.
    fn refer(&mut self, ctx: &mut StepContext<'_>, pairs: &[Pair]) -> Result<()> {
        // A step may have a pair twice, at the end of a pass and at the beginning of the next one.
        let mut seen = BTreeSet::new();
        let is_new = |pair: &&Pair| self.reference.get(pair.row).is_none() && seen.insert(pair.row);
        let new: Vec<Pair> = pairs.iter().filter(is_new).cloned().collect();
        let mut own = Reference::new(self.preferences.len());
        for chunk in new.chunks(self.config.micro_batch_size) {
            refer(language(ctx.model, NAME)?, chunk, &mut own)?;
        }
        let known = new.iter().filter_map(|pair| Some((pair.row, own.get(pair.row)?.map(Bits))));
        let known: BTreeMap<usize, [Bits; 2]> = known.collect();
        for of_a_rank in communicator::join(ctx.strategy.ranks().all.as_ref(), &known)? {
            for (row, log_probs) in of_a_rank {
                self.reference.insert(row, log_probs.map(|Bits(value)| value));
            }
        }
        Ok(())
    }
}

/// The pass of a step, for `roll plan`: both answers of each pair are evaluated at once.
fn passes(options: &Options) -> Result<Passes> {
    let config: DpoConfig = parse_options("algo", options)?;
    config.check()?;
    let update = TextPass {
        phase: "update".into(),
        rows: config.batch_size.saturating_mul(2),
        group: 2,
        at_once: config.micro_batch_size.saturating_mul(2),
        tokens: config.sequence_length,
        grad: true,
        reference: !config.reference_free,
        ..TextPass::default()
    };
    Ok(Passes { texts: vec![update], reference_is_start: !config.reference_free, ..Passes::default() })
}

roll_core::register! {
    Algorithm, NAME, DpoConfig,
    "Trains a language model on pairs of answers, of which one is preferred",
    Dpo::open,
    plan: passes,
}
