//! The predicted memory of a run with a language model, item by item.
//!
//! Weights, gradients, optimizer state, keys and values are computed exactly from the shapes. The activations of a
//! backward pass follow formulas whose factors were measured on the CPU in f32 (example `lm_memory` of commit ac7d28a,
//! and peaks of the process with networks of one to three blocks of different widths). Sequences have the maximal
//! length that the options allow.

use std::collections::BTreeMap;

use burn_tensor::DType;
use roll_backends::{Backend, Memory};
use roll_core::{
    BuildContext, Error, Kind, Noise, Options, ParameterSpec, Result, ResultExt, parse_options,
    plan::{MemoryItem, Needs, PlanInput, TextPass},
};
use roll_network::headers::check_tensors;
use roll_network::hub::Hub;
use roll_network::precision::DeviceTraits;
use roll_network::trainable::Trainable;
use roll_network::weights::stored_dtype;

use super::config::LmConfig;
use super::head::{CHUNK_IDS, CHUNK_LOGITS};
use super::loading::{CausalLmOptions, initial_adapter};
use super::memory::RolloutShape;
use super::{gguf, network, source};

/// Bytes of the process itself.
const PROCESS: usize = 60 << 20;
/// Bytes of the tokenizer per token of its vocabulary, measured with SmolLM2.
const TOKEN_BYTES: usize = 600;
/// Bytes of CUDA's context and of fragmented memory. An estimate.
const RESERVE: usize = 2_000_000_000;
/// f32 values per token of a recorded block, in multiples of the widths of the residual stream, of the queries, and of
/// the feed-forward layer. The backward pass needs one more of the last.
const BLOCK_WORDS: [usize; 3] = [4, 5, 4];
/// f32 values per token of the output layer and its backward pass, in multiples of the width of the residual stream.
const HEAD_WORDS: usize = 7;
/// Number of chunks of logits that exist at once.
const LOGITS: usize = 3;

/// Predicts the memory of each rank of a run with these options. Only the headers of the model's files are read.
pub fn needs(options: &Options, input: &PlanInput, context: &BuildContext) -> Result<Needs> {
    let options: CausalLmOptions = parse_options(Kind::Model.section(), options)?;
    check(input, "causal_lm")?;
    needs_of(&options, headers(&options, context)?, input, context)
}

/// As `needs`, of the model `name` whose files have these `headers`.
pub fn planned(
    name: &str,
    options: &CausalLmOptions,
    (config, stored): (LmConfig, DType),
    input: &PlanInput,
    context: &BuildContext,
) -> Result<Needs> {
    check(input, name)?;
    needs_of(options, (config, stored, None), input, context)
}

/// Architecture, dtype of dense weights, and the bytes of each quantised matrix by name.
type Headers = (LmConfig, DType, Option<BTreeMap<String, usize>>);

fn needs_of(options: &CausalLmOptions, headers: Headers, input: &PlanInput, context: &BuildContext) -> Result<Needs> {
    let plan = MemoryPlan::new(options, headers, input, context)?;
    let (n, length) = (plan.trained(), input.passes.texts.iter().map(|pass| plan.tokens(pass)).max().unwrap_or(0));
    let weights: usize = plan.config.weights().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
    let facts = [("tokens", length), ("parameters", weights), ("trained_parameters", n), ("frozen_bytes", plan.frozen)];
    Ok(Needs {
        work: format!("{:.1} M weights, sequences of up to {length} tokens", weights as f64 / 1e6),
        facts: facts.map(|(name, value)| (name.to_string(), value as f64)).into(),
        memory: plan.memory(),
        hints: plan.hints(),
        ..Needs::default()
    })
}

/// Fails on an input that the model `name`, a language model, does not serve.
fn check(input: &PlanInput, name: &str) -> Result<()> {
    if input.network.is_some() {
        let problem = "it has no networks that are known by name: `model.model_path` is a directory, a GGUF file, or a \
                       published model that was downloaded";
        return Err(Error::Unsupported(format!("--network and the model `{name}`: {problem}")));
    }
    if input.division.token_ranks > 1 {
        let found = input.division.token_ranks;
        let problem = format!("the model `{name}` cannot divide the tokens of a pass among {found} ranks: expected 1");
        return Err(Error::config("strategy.sequence_parallel_size", problem));
    }
    if input.passes.texts.is_empty() {
        let problem = "the algorithm does not say what it does with a language model, such as `causal_lm`: expected \
                       `agentic_ppo`, `sft` or `dpo`; those that make videos train `wan2_2`";
        return Err(Error::config("algo.name", problem));
    }
    Ok(())
}

struct MemoryPlan<'a> {
    input: &'a PlanInput,
    options: &'a CausalLmOptions,
    config: LmConfig,
    /// Names and shapes of the trained parameters.
    specs: Vec<ParameterSpec>,
    /// Whether every weight is trained.
    full: bool,
    /// Bytes of the frozen weights; 0 if every weight is trained and no reference policy is needed.
    frozen: usize,
    /// Bytes of the frozen weights that stay quantised in blocks.
    quantised: usize,
    /// Bytes on the host of a GGUF file whose weights are copied to a GPU, and of what is decoded before.
    opened: usize,
    /// Dtype of the other frozen weights.
    weights_dtype: DType,
    /// Dtype of matrix products, keys and values.
    compute_dtype: DType,
    ranks: usize,
    gpu: bool,
}

impl<'a> MemoryPlan<'a> {
    /// Makes the same choices as [`super::loading::open`]. A GPU is assumed to support bf16.
    fn new(
        options: &'a CausalLmOptions,
        (config, stored, in_blocks): Headers,
        input: &'a PlanInput,
        context: &BuildContext,
    ) -> Result<Self> {
        let config = options.checked(config)?;
        // Only a GPU has a memory of its own.
        let gpu = input.memory.is_some();
        let initial_adapter = initial_adapter(options, context, &config)?;
        let trainable =
            initial_adapter.as_ref().map_or_else(|| options.trainable(&config), |initial| initial.trainable.clone());
        let full = trainable == Trainable::Full;
        let weights = config.weights();
        let specs = match &trainable {
            Trainable::Frozen => Vec::new(),
            Trainable::Full => weights.iter().cloned().map(|(name, shape)| ParameterSpec { name, shape }).collect(),
            // Names and shapes do not depend on the initial values.
            _ => network::adapters(&config, &trainable, &Noise::new(0)).in_section("model")?.0,
        };
        let device = DeviceTraits::planned(gpu);
        let weights_dtype = options.weights_dtype.of(stored, device)?;
        let compute_dtype = options.compute_dtype.of(weights_dtype, device)?;
        let keeps_quantised = !gpu && options.keeps_quantised(Backend::of(&context.backend)?);
        let (mut frozen, mut quantised, mut opened) = (0, 0, 0);
        for (name, shape) in &weights {
            let elements: usize = shape.iter().product();
            let block_bytes = in_blocks.as_ref().and_then(|blocks| blocks.get(name).copied());
            let kept_bytes = if keeps_quantised { block_bytes } else { None };
            if !full || input.passes.needs_reference() {
                frozen += kept_bytes.unwrap_or(elements * weights_dtype.size());
                quantised += kept_bytes.unwrap_or(0);
            }
            let is_copied = gpu && in_blocks.is_some();
            opened += match block_bytes {
                // Files of other formats are mapped.
                _ if !is_copied => 0,
                // Full training decodes all matrices, a LoRA one at a time.
                Some(bytes) => bytes + if full { 4 * elements } else { 0 },
                // Dense tensors are read as f32.
                None => 4 * elements,
            };
        }
        let ranks = input.ranks();
        Ok(Self {
            input,
            options,
            config,
            specs,
            full,
            frozen,
            quantised,
            opened,
            weights_dtype,
            compute_dtype,
            ranks,
            gpu,
        })
    }

    fn trained(&self) -> usize {
        self.specs.iter().map(ParameterSpec::len).sum()
    }

    /// Returns the number of elements of the blocks' trained matrices.
    fn trained_in_blocks(&self) -> usize {
        let matrices = self.specs.iter().filter(|spec| spec.shape.len() == 2 && spec.name.starts_with("model.layers."));
        matrices.map(ParameterSpec::len).sum()
    }

    /// Returns the number of tokens of the longest sequence.
    fn tokens(&self, pass: &TextPass) -> usize {
        pass.tokens.unwrap_or(usize::MAX).min(self.config.context)
    }

    /// Returns the number of sequences of a rank.
    fn rows(&self, pass: &TextPass) -> usize {
        // The bound avoids overflow of the number of bytes.
        let (rows, group) = (pass.rows.min(1 << 24), pass.group.clamp(1, 1 << 24));
        rows.div_ceil(group).div_ceil(self.ranks) * group
    }

    /// Returns all memory of a rank. Each phase frees its memory before the next begins.
    fn memory(&self) -> Vec<MemoryItem> {
        let (n, division, dtype) = (self.trained(), &self.input.division, self.weights_dtype);
        let process = PROCESS + self.config.vocab * TOKEN_BYTES;
        let plain = times((self.frozen - self.quantised) / dtype.size(), dtype.size());
        let frozen = match self.quantised {
            0 => plain,
            bytes => format!("{bytes} B in blocks, as in the file, and {plain}"),
        };
        let mut items = vec![
            item("", "process", [0, process], format!("60 MiB, and {}", times(self.config.vocab, TOKEN_BYTES))),
            item("", "context", [if self.gpu { RESERVE } else { 0 }, 0], "CUDA's context; an estimate".into()),
            item("", "frozen weights", [self.frozen, 0], frozen),
            item("", "trained parameters", [4 * n, 0], times(n, 4)),
        ];
        if self.input.passes.reference_is_start && self.options.lora_checkpoint.is_some() {
            // Read from the file, and on the device.
            items.push(item("", "adapter at the start", [4 * n, 4 * n], times(n, 4)));
        }
        items.extend(division.memory(n, self.ranks, self.gpu));
        for pass in &self.input.passes.texts {
            match pass {
                TextPass { generated: 1.., .. } => items.extend(self.rollout(pass)),
                TextPass { grad: true, .. } => items.extend(self.update(pass)),
                _ => items.push(self.hidden_states(pass)),
            }
        }
        items.push(item(
            "opening",
            "weights of the file",
            [0, self.opened],
            "quantised as they are, others in f32".into(),
        ));
        let state = [0, 8 * n];
        items.push(item("checkpoint", "optimizer state, whole", state, times(n, 8)));
        items.push(item("checkpoint", "parameters, twice", [0, 8 * n], times(n, 8)));
        items.retain(|item| item.bytes() > 0);
        items
    }

    fn hidden_states(&self, pass: &TextPass) -> MemoryItem {
        let [rows, tokens, values] = [self.rows(pass), self.tokens(pass), pass.hidden_states * self.config.dim];
        let formula = format!("{rows} x {tokens} tokens x {}", times(values, 4));
        item(&pass.phase, "hidden states", [0, 4 * rows * tokens * values], formula)
    }

    /// Returns the memory of the last turn, in which every sequence has its maximal length.
    fn rollout(&self, pass: &TextPass) -> Vec<MemoryItem> {
        let (config, width, length, rows) =
            (&self.config, self.compute_dtype.size(), self.tokens(pass), self.rows(pass));
        let called = rows.min(pass.at_once).max(1);
        let new_tokens = pass.generated.min(length.saturating_sub(1));
        let prompt_tokens = length - new_tokens;
        let prompts = if pass.shared_prompt { called.min(rows.div_ceil(pass.group.max(1))) } else { called };
        let at_once = called.min(self.options.rows_at_once);
        // In the last turn, each sequence has all its tokens but the last in its slot. A single answer leaves the prompt,
        // which a group may share, where it was read, and frees its slot; a call frees its prompts.
        let (slots, slot_tokens, packed_tokens) = match pass.continues {
            true => (rows, length.saturating_sub(1), 0),
            false => (at_once, new_tokens.saturating_sub(1), prompts * prompt_tokens),
        };
        let turn = RolloutShape { slots, slot_tokens, packed_tokens, rows: at_once, prompts, prompt_tokens };
        let bytes = turn.bytes(config, width);
        let token_bytes = config.layers * 2 * config.kv_heads * config.head_dim * width;
        let formula = format!("{slots} x {slot_tokens} tokens, {packed_tokens} of prompts, {token_bytes} B each");
        let phase = if pass.ahead { "" } else { &pass.phase };
        let largest = [bytes.pass, bytes.logits, bytes.growth].into_iter().max().unwrap_or(0);
        let copy = if pass.ahead { 4 * self.trained() } else { 0 };
        let converted = if self.compute_dtype == DType::F32 { 0 } else { self.trained_in_blocks() };
        // Several ranks wait for their rollouts before a checkpoint, and keep no policy.
        let kept = if self.ranks == 1 { copy } else { 0 };
        vec![
            item(phase, "keys and values", [bytes.keys_values, 0], formula),
            item(phase, "largest pass", [largest, 0], "prompts, logits, or a layer's cache that grows".into()),
            item(
                phase,
                "matrices for generation",
                [converted * self.compute_dtype.size(), 0],
                format!("trained ones in the dtype of products, {}", times(converted, self.compute_dtype.size())),
            ),
            item(phase, "copy of the policy", [copy, 0], "the trained parameters, which generate meanwhile".into()),
            item(
                phase,
                "policy for checkpoints",
                [0, kept],
                "the same, for a resume that plays the rollout again".into(),
            ),
        ]
    }

    /// Whether a pull delivers gradients block by block to the strategy's sums in host memory.
    fn delivers_gradients(&self) -> bool {
        let division = &self.input.division;
        if self.ranks > 1 { division.overlap_comm } else { !division.sums_are_on_gpu(self.trained(), 1, self.gpu) }
    }

    /// Returns the memory of an update at its peak. During a backward pass gradients are allocated while block inputs
    /// are freed, so the peak is at one of its ends, unless gradients are delivered as they are computed.
    fn update(&self, pass: &TextPass) -> Vec<MemoryItem> {
        let (config, n, bucket) = (&self.config, self.trained(), self.input.division.bucket);
        let tokens = self.tokens(pass) * pass.at_once.min(pass.rows.div_ceil(self.ranks)).max(1);
        let row = |name, bytes, formula| item(&pass.phase, name, bytes, formula);
        let gradients = |elements| row("gradients in the model", [4 * elements, 0], times(elements, 4));
        let inputs = |blocks: usize| match self.options.memory() {
            Memory::Hold => {
                let bytes = (blocks - 1) * self.block(tokens, 0);
                row("activations", [bytes, 0], format!("{} blocks of {tokens} tokens", blocks - 1))
            }
            memory => {
                let (one, all) = (4 * tokens * config.dim, 4 * tokens * config.dim * (blocks + 1));
                let bytes = if memory == Memory::Offload { [2 * one, all] } else { [all, 0] };
                row("block inputs", bytes, format!("{} x {tokens} tokens x {}", blocks + 1, times(config.dim, 4)))
            }
        };
        let block_backward = || row("backward of one block", [self.block(tokens, 1), 0], format!("{tokens} tokens"));
        let embedding = config.vocab * config.dim;
        let trained_embedding = if self.full { embedding } else { 0 };
        let specs_of_block = self.specs.iter().filter(|spec| in_first_block(&spec.name));
        let trained_in_block: usize = specs_of_block.map(ParameterSpec::len).sum();
        // The gradients in the model while its first block is pulled back, and at the end. Those of a tied embedding,
        // which are of the output layer too, are never delivered.
        let [first_gradients, last_gradients] = match self.delivers_gradients() {
            true if config.tied => [trained_in_block + trained_embedding; 2],
            true => [trained_in_block; 2],
            false => [trained_in_block + trained_embedding, n],
        };
        let held = if self.delivers_gradients() { last_gradients - trained_in_block } else { n };
        let head =
            row("output layer", [self.output_layer(tokens), 0], format!("{tokens} tokens, {LOGITS} chunks of logits"));
        let mut moments = vec![
            // The start of the backward pass.
            vec![inputs(config.layers), head],
            // Its first block, which is the last of the network.
            vec![inputs(config.layers), gradients(first_gradients), block_backward()],
            // Its last block.
            vec![inputs(1), gradients(last_gradients), block_backward()],
        ];
        if self.full {
            let of_embedding = row("gradient of the embedding", [8 * embedding, 0], times(embedding, 8));
            moments.push(vec![gradients(held), of_embedding]);
        }
        if bucket > 0 {
            // The last bucket is reduced first, while all gradients exist. Later there are four copies of a tensor,
            // which is never split.
            let largest = self.specs.iter().map(ParameterSpec::len).max().unwrap_or(0).max(bucket.min(n));
            let messages = |elements: usize, copies: usize| {
                row("messages", [0, copies * 4 * elements], times(elements, 4 * copies))
            };
            moments.push(vec![gradients(held), messages(bucket.min(n), 3)]);
            moments.push(vec![messages(largest, 4)]);
        }
        moments.into_iter().max_by_key(|items| items.iter().map(MemoryItem::bytes).sum::<usize>()).unwrap_or_default()
    }

    /// Returns the bytes of a recorded block. `extra_ffn` is the number of additional widths of the feed-forward layer:
    /// 0 until the backward pass, 1 during it ([`BLOCK_WORDS`]). The bytes include the weights that are converted to
    /// the dtype of products. Quantised weights are decoded in parts.
    fn block(&self, tokens: usize, extra_ffn: usize) -> usize {
        let (config, [dim, queries, ffn]) = (&self.config, BLOCK_WORDS);
        let rank = |spec: &ParameterSpec| spec.shape[0] * usize::from(spec.name.ends_with(".lora_A.weight"));
        let ranks: usize = self.specs.iter().filter(|spec| in_first_block(&spec.name)).map(rank).sum();
        let words = dim * config.dim
            + queries * config.heads * config.head_dim
            + (ffn + extra_ffn) * config.ffn_dim
            + 2 * ranks;
        let converted = !self.full && self.quantised == 0 && self.weights_dtype != self.compute_dtype;
        let weights = config.weights().into_iter().filter(|(name, shape)| in_first_block(name) && shape.len() == 2);
        let elements: usize = weights.map(|(_, shape)| shape.iter().product::<usize>()).sum();
        4 * tokens * words + if converted { elements * self.compute_dtype.size() } else { 0 }
    }

    fn output_layer(&self, tokens: usize) -> usize {
        let (dim, vocab) = (self.config.dim, self.config.vocab);
        let is_converted = self.weights_dtype != DType::F32 || self.quantised > 0;
        let weight = match (self.full, is_converted) {
            // The chunks of the gradient, and their concatenation.
            (true, _) => 2 * vocab * dim,
            // A chunk of the weight in f32.
            (false, true) => CHUNK_IDS.min(vocab) * dim,
            (false, false) => 0,
        };
        4 * (HEAD_WORDS * tokens * dim + LOGITS * CHUNK_LOGITS.min(tokens * vocab) + weight)
    }

    fn hints(&self) -> Vec<String> {
        let (division, memory) = (&self.input.division, self.options.memory());
        let any = |of: fn(&TextPass) -> bool| self.input.passes.texts.iter().any(of);
        let hints = [
            (self.full, "model.lora_rank=32 trains adapters in place of every weight"),
            (
                memory == Memory::Hold,
                "model.use_gradient_checkpointing=true recomputes activations in the backward pass",
            ),
            (
                self.gpu && memory != Memory::Offload,
                "model.use_gradient_checkpointing_offload=true keeps block inputs on the host",
            ),
            (self.ranks > 1 && division.stage < 2, "strategy.stage=2 shards gradients and the optimizer's state"),
            (
                self.quantised == 0 && self.weights_dtype == DType::F32,
                "model.weights_dtype=bf16 halves the frozen weights",
            ),
            (any(|pass| pass.ahead), "algo.async_generation_ratio=0 generates without a copy of the policy"),
            (any(|pass| pass.generated > 0), "algo.num_env_groups: fewer groups, or more ranks"),
            (true, "algo.micro_batch_size, algo.sequence_length: fewer and shorter sequences at once"),
        ];
        hints.into_iter().filter(|(applies, _)| *applies).map(|(_, hint)| hint.to_string()).collect()
    }
}

fn in_first_block(name: &str) -> bool {
    name.starts_with("model.layers.0.")
}

fn times(count: usize, bytes: usize) -> String {
    format!("{count} x {bytes} B")
}

/// Creates an item of `phase`, or of all phases if `phase` is empty.
fn item(phase: &str, name: &str, bytes: [usize; 2], formula: String) -> MemoryItem {
    MemoryItem { phase: (!phase.is_empty()).then(|| phase.into()), ..MemoryItem::new(name, bytes, formula) }
}

/// Reads the headers of the files. Nothing is downloaded.
fn headers(options: &CausalLmOptions, context: &BuildContext) -> Result<Headers> {
    let Some(path) = &options.model_path else {
        let model = source::built_in()?;
        let dtype = model.state.get("model.norm.weight").map_or(DType::F32, stored_dtype);
        return Ok((model.config, dtype, None));
    };
    let location = source::locate(path, context.resolve(path), &Hub { remote: None, ..Hub::from_env() })?;
    if source::is_gguf(&location)? {
        let (config, blocks) = gguf::header(&location)?;
        // Dense tensors of such a file are read as f32.
        return Ok((config, DType::F32, Some(blocks)));
    }
    let config = LmConfig::read(&location.join("config.json"))?;
    let file = source::open_weights(&location)?;
    check_tensors(&file, &config.weights())?;
    let stored = file.info("model.norm.weight").and_then(|info| info.dtype);
    let dtype = if stored == Some(roll_core::DType::Bf16) { DType::BF16 } else { DType::F32 };
    Ok((config, dtype, None))
}
