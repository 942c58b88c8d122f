//! Supervised fine-tuning of language models on conversations.
//!
//! loss = - sum over trained tokens of log p(token) / number of trained tokens of the step. Trained tokens are the
//! tokens of the assistant's messages, or all tokens ([`TrainOn`]).

#[cfg(test)]
mod tests;
mod validation;

use std::path::PathBuf;
use std::sync::Arc;

use roll_core::{
    Adapter, Algorithm, BuildContext, Communicator, Error, Grad, Headline, HeadlineFormat, LanguageModel, Model, Noise,
    Options, OwnDataAlgorithm, Progress, Result, RewardScorer, Samples, SingleRank, StepContext, StepReport,
    TokenStats, Validation,
    keys::check_ranges,
    parse_options,
    plan::{Passes, TextPass},
};
use roll_step::stopwatch::Stopwatch;
use roll_step::update::{self, OnNonfinite, language};

use crate::conversations::{Conversations, Tokens, TrainOn, TrainedOn, answers, batch, order};

const NAME: &str = "sft";

const TOKENIZE: &str = "time/tokenize";
const TRAIN: &str = "time/step_train";

/// Options of the algorithm `sft`.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SftConfig {
    /// File with conversations: JSON lines or a JSON list, each entry `{"messages": [{"role": "user", "content":
    /// "..."}, {"role": "assistant", "content": "..."}]}`. An entry may have `tools` next to `messages`, and a message
    /// further fields such as `tool_calls` and `reasoning_content`, if the chat template writes them. Answers of
    /// `weight: 0` are not trained on.
    pub data: Option<PathBuf>,
    /// File with conversations that are not trained on, in the form of `data`. Their loss is measured before and after
    /// training, and every `evaluation.every` steps; the model answers the first three of them for the report. `null`:
    /// none.
    pub val_data: Option<PathBuf>,
    /// Conversations of one update, over all ranks.
    #[schemars(range(min = 1))]
    pub batch_size: usize,
    /// Conversations whose gradient is computed at once.
    #[schemars(range(min = 1))]
    pub micro_batch_size: usize,
    /// Maximum number of tokens of a conversation; longer ones are left out and counted. `null`: the model's context
    /// length.
    pub sequence_length: Option<usize>,
    /// Which tokens are trained on.
    pub train_on: TrainOn,
    /// Whether each pass over the conversations has another order, drawn with `seed`.
    pub shuffle: bool,
    /// Reaction to a loss or gradient that is not finite.
    pub on_nonfinite: OnNonfinite,
}

impl Default for SftConfig {
    fn default() -> Self {
        Self {
            data: None,
            val_data: None,
            batch_size: 32,
            micro_batch_size: 8,
            sequence_length: None,
            train_on: TrainOn::Responses,
            shuffle: true,
            on_nonfinite: OnNonfinite::Skip,
        }
    }
}

impl SftConfig {
    /// Maximum number of tokens of a conversation.
    fn limit(&self, model: &dyn LanguageModel) -> usize {
        self.sequence_length.unwrap_or(usize::MAX).min(model.context_length())
    }
}

/// The algorithm `sft`.
pub struct Sft {
    config: SftConfig,
    conversations: Conversations,
    held_out: Option<Conversations>,
    /// Number of held-out conversations that are also trained on, by mistake of the user.
    seen: usize,
    ranks: Arc<dyn Communicator>,
}

impl Sft {
    /// Makes the algorithm from its options and conversations.
    pub fn new(config: SftConfig, conversations: Conversations) -> Result<Self> {
        check_ranges("algo", &config)?;
        Ok(Self { config, conversations, held_out: None, seen: 0, ranks: Arc::new(SingleRank) })
    }

    /// Makes the algorithm from its options, and reads the files that they name.
    fn open(config: SftConfig, context: &BuildContext) -> Result<Self> {
        let Some(path) = &config.data else {
            let problem = "no data are named: give a file of JSON lines, each with a list of `messages`";
            return Err(Error::config("algo.data", problem));
        };
        let conversations = Conversations::read(&context.resolve(path))?;
        let held_out = config.val_data.as_ref().map(|path| Conversations::read(&context.resolve(path))).transpose()?;
        let seen = held_out.as_ref().map_or(0, |held_out| held_out.count_in(&conversations));
        if let Some(held_out) = &held_out
            && seen > 0
            && context.ranks.rank().0 == 0
        {
            let of = held_out.len();
            tracing::warn!(
                "{seen} of {of} conversations of `algo.val_data` are trained on, too: `val/loss` says nothing of others"
            );
        }
        Ok(Self { held_out, seen, ranks: context.ranks.clone(), ..Self::new(config, conversations)? })
    }
}

impl OwnDataAlgorithm for Sft {
    fn steps_per_epoch(&self) -> Option<u64> {
        Some(self.conversations.len().div_ceil(self.config.batch_size) as u64)
    }
}

impl Algorithm for Sft {
    fn samples(self: Box<Self>) -> Samples {
        Samples::Own(self)
    }

    fn check(&mut self, model: &mut dyn Model, reward: Option<&dyn RewardScorer>) -> Result<()> {
        let trained_on = TrainedOn { algorithm: NAME, data: "conversations", entries: "conversations" };
        trained_on.check(model, reward, self.config.batch_size, self.ranks.as_ref())?;
        let model = language(model, NAME)?;
        let (train_on, limit) = (self.config.train_on, self.config.limit(model));
        self.conversations.check("algo.data", train_on, limit, model)?;
        match &mut self.held_out {
            Some(held_out) => held_out.check("algo.val_data", train_on, limit, model),
            None => Ok(()),
        }
    }

    fn headlines(&self) -> Vec<Headline> {
        let held_out = match &self.held_out {
            Some(held_out) if self.seen > 0 => {
                format!("conversations, {} of {} of which are trained on, too", self.seen, held_out.len())
            }
            _ => "conversations that were not trained on".into(),
        };
        vec![
            Headline::new("actor/loss", "loss", "Loss")
                .validated_by("val/loss", "loss", &held_out)
                .enabled_by("algo.val_data"),
            Headline::new("actor/entropy", "", "Entropy of tokens"),
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
        let Some(held_out) = &self.held_out else { return Ok(None) };
        let ranks = self.ranks.as_ref();
        // Rank 0 answers first. The other ranks compute their part of the loss meanwhile, and wait in its sum.
        let mut records = Vec::new();
        // If all tokens are trained on, nothing is a prompt.
        if ranks.rank().0 == 0 && self.config.train_on == TrainOn::Responses {
            let model = language(model, NAME)?;
            records = answers::answers(held_out, self.config.limit(model), step, model, progress)?;
        }
        let metrics = validation::loss(&self.config, held_out, ranks, model, progress)?;
        Ok(Some(Validation { metrics, records, losses: Vec::new() }))
    }

    fn step(&mut self, context: &mut StepContext<'_>) -> Result<StepReport> {
        update::discard_on_error(context, |context| self.update(context))
    }
}

/// Sums over the trained tokens of some samples.
#[derive(Default)]
struct Sums {
    negative_log_likelihood: f64,
    entropy: f64,
}

impl Sums {
    fn of(evaluated: &batch::Evaluated) -> Result<Self> {
        let TokenStats { log_probs, entropy } = &evaluated.stats;
        Ok(Self { negative_log_likelihood: -evaluated.sum(log_probs)?, entropy: evaluated.sum(entropy)? })
    }
}

impl Sft {
    fn update(&mut self, ctx: &mut StepContext<'_>) -> Result<StepReport> {
        let mut watch = Stopwatch::new(ctx.progress, &[TOKENIZE, TRAIN]);
        let mut report = StepReport::default();
        ctx.strategy.discard();

        watch.begin(TOKENIZE, None)?;
        let rows = order::rows_of_step(ctx, self.conversations.len(), self.config.batch_size, self.config.shuffle);
        let mut batch = Vec::new();
        let model = language(ctx.model, NAME)?;
        let limit = self.config.limit(model);
        for row in rows {
            let samples = self.conversations.samples(row, self.config.train_on, model)?;
            let mut left_out_because = None;
            if samples.iter().all(|sample| sample.trained() == 0) {
                left_out_because = Some("no token of it is trained on".to_string());
            }
            for sample in samples.into_iter().filter(|sample| sample.trained() > 0) {
                let length = sample.ids.len();
                if length > limit {
                    left_out_because = Some(format!("{length} tokens are more than the {limit} allowed"));
                } else {
                    batch.push(sample);
                }
            }
            if let Some(reason) = left_out_because {
                report.skipped.push((self.conversations.origin(row), reason));
            }
        }
        // Similar lengths share a micro-batch, so that little is padded.
        batch.sort_by_key(|t| t.ids.len());

        watch.begin(TRAIN, None)?;
        let tokens_of_this_rank: usize = batch.iter().map(Tokens::trained).sum();
        let mut sum = [tokens_of_this_rank as f32];
        ctx.strategy.ranks().all.all_reduce(&mut sum)?;
        let tokens_of_all_ranks = f64::from(sum[0]);
        let mut sums = Sums::default();
        let mut nonfinite = None;
        for chunk in batch.chunks(self.config.micro_batch_size) {
            let added = pull(ctx, chunk, tokens_of_all_ranks)?;
            sums.negative_log_likelihood += added.negative_log_likelihood;
            sums.entropy += added.entropy;
            if !added.negative_log_likelihood.is_finite() {
                nonfinite = Some(("the loss".to_string(), added.negative_log_likelihood));
                break;
            }
        }
        // `pull` has divided the loss by the tokens of all ranks, and `finish` divides by the sum of `counted` over
        // ranks. So that sum must be 1: rank 0 counts one sample for the whole step.
        let counted = f64::from(u8::from(tokens_of_all_ranks > 0.0 && ctx.strategy.ranks().all.rank().0 == 0));
        let on_nonfinite = self.config.on_nonfinite;
        let update = update::finish(ctx, counted, &mut nonfinite, on_nonfinite, update::nothing_before_update)?;
        let tokens = tokens_of_this_rank.max(1) as f64;
        report.metrics.insert("actor/loss".into(), sums.negative_log_likelihood / tokens);
        report.metrics.insert("actor/entropy".into(), sums.entropy / tokens);
        report.metrics.insert("tokens/trained".into(), tokens_of_this_rank as f64);
        if let Some(update) = update {
            report.metrics.insert("actor/grad_norm".into(), update.grad_norm);
            report.metrics.insert("actor/grad_clipped".into(), f64::from(u8::from(update.clipped)));
            report.applied = update.applied;
        }
        report.metrics.extend(watch.seconds(&SingleRank)?);
        Ok(report)
    }
}

/// Adds the gradient of some samples to the strategy, unless their loss is not finite. `total`: the number of trained
/// tokens of the step, over all ranks.
fn pull(ctx: &mut StepContext<'_>, chunk: &[Tokens], total: f64) -> Result<Sums> {
    let evaluated = batch::evaluate(language(ctx.model, NAME)?, chunk, Adapter::On, Grad::Record)?;
    let sums = Sums::of(&evaluated)?;
    if sums.negative_log_likelihood.is_finite() {
        evaluated.pull(ctx, &vec![-1.0 / total; chunk.len()])?;
    }
    Ok(sums)
}

/// The pass of a step, for `roll plan`.
fn passes(options: &Options) -> Result<Passes> {
    let config: SftConfig = parse_options("algo", options)?;
    check_ranges("algo", &config)?;
    let (rows, at_once, tokens) = (config.batch_size, config.micro_batch_size, config.sequence_length);
    let update = TextPass { phase: "update".into(), rows, at_once, tokens, grad: true, ..TextPass::default() };
    Ok(Passes { texts: vec![update], ..Passes::default() })
}

roll_core::register! {
    Algorithm, NAME, SftConfig,
    "Trains a language model on conversations",
    Sft::open,
    plan: passes,
    learning_rate: 1e-4,
}
