//! The needs of a run with a language model, before it is started: memory by item.
//!
//! Weights, gradients, optimizer state, keys and values are counted exactly, from the shapes. What a pull holds beyond
//! them is a formula whose factors were measured on the CPU in f32. Lengths are the most that the options allow: texts
//! that end before take less.

mod items;
mod stored;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use burn::tensor::DType;
use roll_backends::{Backend, Memory};
use roll_core::{
    BuildContext, Error, Kind, Noise, Options, ParameterSpec, Result, ResultExt, parse_options,
    plan::{Division, LanguageWork, Needs, PlanInput, RolloutWork},
};

use super::config::LmConfig;
use super::generate::TOKENS_OF_A_PASS;
use super::loading::{CausalLmOptions, start};
use super::memory::Rollout;
use super::network;
use crate::lora::Start;
use crate::trainable::Trainable;
use stored::Stored;

/// Conversations of a step beyond which bytes could not be counted.
const MOST: usize = 1 << 24;

/// Bytes of a rank of a run with these options. Of the model's files only the headers are read.
pub fn needs(options: &Options, input: &PlanInput, context: &BuildContext) -> Result<Needs> {
    let options: CausalLmOptions = parse_options(Kind::Model.section(), options)?;
    let Some(work) = input.passes.language.clone() else {
        let problem = "the algorithm does not say what it does with a language model, such as `causal_lm`: expected \
                       `agentic_ppo` or `sft`; those that make videos train `wan2_2`";
        return Err(Error::config("algo.name", problem));
    };
    if input.network.is_some() {
        let problem = "it has no networks that are known by name: `model.model_path` is a directory, a GGUF file, or a \
                       published model that was downloaded";
        return Err(Error::Unsupported(format!("--network and the model `causal_lm`: {problem}")));
    }
    let ranks = input.division.token_ranks;
    if ranks > 1 {
        let problem =
            format!("the model `causal_lm` cannot divide the tokens of a pass among {ranks} ranks: expected 1");
        return Err(Error::config("strategy.sequence_parallel_size", problem));
    }
    let written = work.rollout.as_ref().map_or(0, |rollout| rollout.groups.saturating_mul(rollout.group_size));
    let most = work.samples.max(written);
    if most > MOST {
        return Err(Error::Unsupported(format!("a plan counts up to {MOST} conversations of a step, found {most}")));
    }
    let plan = Plan::new(&options, work, input, context)?;
    let (samples, ranks) = (plan.work.samples, plan.ranks);
    if plan.work.rollout.is_none() && samples % ranks != 0 {
        let problem = format!("{samples} conversations cannot be shared out among {ranks} ranks");
        return Err(Error::config("algo.batch_size", problem));
    }
    let (n, length) = (plan.trained(), plan.length());
    let weights: usize = plan.config.weights().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
    Ok(Needs {
        work: format!("{:.1} M weights, sequences of up to {length} tokens", weights as f64 / 1e6),
        facts: [
            ("tokens".to_string(), length as f64),
            ("trained_parameters".to_string(), n as f64),
            ("frozen_bytes".to_string(), plan.frozen as f64),
        ]
        .into(),
        memory: plan.memory(),
        // How many turns an agent takes, and how long its answers are, nobody knows before.
        time: Vec::new(),
        hints: plan.hints(),
    })
}

/// What was asked for, in full.
struct Plan {
    config: LmConfig,
    /// What the algorithm does.
    work: LanguageWork,
    /// Names and shapes of what is trained.
    specs: Vec<ParameterSpec>,
    /// Every weight is trained.
    full: bool,
    /// Bytes of the frozen weights, and of those among them that are in blocks.
    frozen: usize,
    blocks: usize,
    /// Dtype of those that are plain numbers.
    dtype: DType,
    /// What products are taken in, and keys and values kept in.
    products: DType,
    /// Bytes in host memory while the weights are read.
    loading: usize,
    /// What a recorded pass keeps.
    kept: Memory,
    rows_at_once: usize,
    division: Division,
    ranks: usize,
    /// The device has memory of its own.
    gpu: bool,
}

impl Plan {
    /// Chooses as [`super::loading::open`] does. A GPU is taken to have bf16.
    fn new(options: &CausalLmOptions, work: LanguageWork, input: &PlanInput, context: &BuildContext) -> Result<Self> {
        let Stored { config, dtype, blocks, file } = Stored::of(options, context)?;
        let config = options.checked(config)?;
        let gpu = input.memory.is_some();
        let trainable =
            start(options, context, &config)?.as_ref().map_or_else(|| options.trainable(&config), Start::trainable);
        let full = trainable == Trainable::Full;
        let specs = specs(&config, &trainable).in_section("model")?;
        let dtype = options.weights_dtype.on(dtype, gpu);
        let stay = !gpu && options.keeps_blocks(Backend::of(&context.backend)?);
        let in_blocks = if stay { blocks.clone() } else { BTreeMap::new() };
        let dense = |(name, shape): &(String, Vec<usize>)| match in_blocks.contains_key(name) {
            true => 0,
            false => shape.iter().product::<usize>() * dtype.size(),
        };
        let weights = config.weights();
        let in_blocks_bytes = in_blocks.values().sum();
        let frozen = in_blocks_bytes + weights.iter().map(dense).sum::<usize>();
        // Blocks that do not stay, or that full training starts from, are decoded whole.
        let decoded = |(name, shape): &(String, Vec<usize>)| match blocks.contains_key(name) && (!stay || full) {
            true => 4 * shape.iter().product::<usize>(),
            false => 0,
        };
        let loading = file + weights.iter().map(decoded).sum::<usize>();
        let ranks = if input.division.all_ranks { input.ranks.max(1) } else { 1 };
        Ok(Self {
            work,
            specs,
            full,
            frozen,
            blocks: in_blocks_bytes,
            dtype,
            products: options.compute_dtype.on(dtype, gpu),
            loading,
            kept: options.memory(),
            rows_at_once: options.rows_at_once,
            division: input.division,
            ranks,
            gpu,
            config,
        })
    }

    /// Elements that are trained.
    fn trained(&self) -> usize {
        self.specs.iter().map(ParameterSpec::len).sum()
    }

    /// Tokens of the longest sequence.
    fn length(&self) -> usize {
        self.work.sequence_length.unwrap_or(usize::MAX).min(self.config.context)
    }

    /// Tokens whose pass is recorded at once.
    fn recorded(&self) -> usize {
        self.micro_batch() * self.length()
    }

    /// Sequences whose pass is recorded at once.
    fn micro_batch(&self) -> usize {
        self.work.micro_batch.min(self.work.update.div_ceil(self.ranks)).max(1)
    }

    /// The turn of a rollout that holds most, the last one: every conversation is as long as it may be.
    fn rollout(&self, rollout: &RolloutWork) -> Rollout {
        let groups = rollout.groups.div_ceil(self.ranks);
        let prompts = self.called(rollout);
        let length = self.length();
        let new_tokens = rollout.new_tokens.min(length.saturating_sub(1));
        Rollout {
            rows: prompts.min(self.rows_at_once),
            prompts: if rollout.shared_prompts { groups.min(prompts) } else { prompts },
            prompt_tokens: length - new_tokens,
            new_tokens,
        }
    }

    /// Tokens whose keys and values are kept beside those of the call that is under way: of conversations that it does
    /// not continue, of those that ended and gave their slot to another, and of the turn before. That one's tensors
    /// hold all conversations of a call, so that they are there until the last prompts are read; a pass that reads all
    /// of them lets go of them layer by layer.
    fn other_tokens(&self, rollout: &RolloutWork) -> usize {
        let turn = self.rollout(rollout);
        let (conversations, called) = (self.conversations(rollout), self.called(rollout));
        let ended = called.saturating_sub(turn.rows) * (turn.prompt_tokens + turn.new_tokens);
        if rollout.answers <= 1 {
            return ended + conversations.saturating_sub(called) * self.length();
        }
        let of_a_pass = (TOKENS_OF_A_PASS / turn.prompt_tokens.max(1)).min(turn.rows).max(1);
        let last = (called - 1) % of_a_pass + 1;
        ended + conversations.saturating_sub(last) * turn.prompt_tokens
    }

    /// Conversations that one call continues.
    fn called(&self, rollout: &RolloutWork) -> usize {
        self.conversations(rollout).min(rollout.at_once).max(1)
    }

    /// Conversations of a rank.
    fn conversations(&self, rollout: &RolloutWork) -> usize {
        rollout.groups.div_ceil(self.ranks).saturating_mul(rollout.group_size)
    }

    /// Settings that would make the run smaller, of what is not done yet.
    fn hints(&self) -> Vec<String> {
        let mut hints = Vec::new();
        let mut hint = |does_not: bool, text: String| hints.extend(does_not.then_some(text));
        let (micro, length, stage) = (self.micro_batch(), self.length(), self.division.stage);
        hint(self.full, "model.lora_rank=32 trains adapters in place of every weight".into());
        hint(
            self.kept == Memory::Hold,
            "model.use_gradient_checkpointing=true recomputes the activations of a block when it is pulled back".into(),
        );
        hint(micro > 1, format!("algo.micro_batch_size={} records fewer sequences at once", micro.div_ceil(2)));
        hint(
            self.gpu && self.kept != Memory::Offload,
            "model.use_gradient_checkpointing_offload=true keeps block inputs in host memory".into(),
        );
        hint(
            self.ranks > 1 && stage < 2,
            "strategy.stage=2 divides gradients and the optimizer's state among the ranks".into(),
        );
        hint(
            self.full && self.division.state_bytes > 4,
            "strategy.bf16_optimizer_states=true halves the optimizer's state".into(),
        );
        let plain = self.blocks == 0 && self.dtype == DType::F32;
        hint(
            plain,
            "model.weights_dtype=bf16 halves the frozen weights; those of a quantised GGUF file are smaller".into(),
        );
        if let Some(rollout) = &self.work.rollout {
            hint(
                rollout.ahead,
                "algo.async_generation_ratio=0 writes between updates, without a copy of the policy".into(),
            );
            hint(
                rollout.groups.div_ceil(self.ranks) > 1,
                "more ranks, or fewer groups (algo.num_env_groups), divide the conversations".into(),
            );
        }
        hint(true, format!("shorter sequences: algo.sequence_length, {length} now"));
        hints
    }
}

/// Names and shapes of what `trainable` asks for.
fn specs(config: &LmConfig, trainable: &Trainable) -> Result<Vec<ParameterSpec>> {
    Ok(match trainable {
        Trainable::Frozen => Vec::new(),
        Trainable::Full => config.weights().into_iter().map(|(name, shape)| ParameterSpec { name, shape }).collect(),
        // Names and shapes do not depend on the draws.
        Trainable::Lora { .. } | Trainable::Layers { .. } => network::adapters(config, trainable, &Noise::new(0))?.0,
    })
}
