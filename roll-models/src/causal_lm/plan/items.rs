//! Memory of a rank, item by item. What is not there all the time belongs to a phase of a step: one phase lets go of
//! what it holds before the next begins, but for rollouts that go on while a step trains.

use burn::tensor::DType;
use roll_backends::Memory;
use roll_core::ParameterSpec;
use roll_core::plan::{LanguageWork, MemoryItem, RolloutWork};

use super::super::generate::TOKENS_OF_A_PASS;
use super::super::head::{CHUNK_IDS, CHUNK_LOGITS};
use super::Plan;

/// The process itself.
const PROCESS: usize = 60 << 20;
/// Bytes of a token of the vocabulary, in the tokenizer. Measured with that of SmolLM2, of 49,152 tokens.
const TOKEN_BYTES: usize = 600;
/// CUDA's context, and what an allocator cannot use.
const RESERVE: usize = 2_000_000_000;
/// Words of a token that a recorded block holds, in units of the width of the residual stream, of all heads of queries,
/// and of the feed-forward layer. Measured on the CPU, in f32, with networks of one to three blocks that differ in
/// these widths: peaks of the process with 2048 and 6144 tokens.
const BLOCK_WORDS: [usize; 3] = [4, 5, 4];
/// What its pull holds beside, in units of the width of the feed-forward layer.
const PULL_WORDS: usize = 1;
/// Words of a token that the output layer and its pull hold, in units of the width of the residual stream: hidden states
/// of predictions, weights of their targets, cotangents, and the parts of these. Measured, as the next
/// (`roll-models/examples/lm_memory.rs`): 42 MiB with 512 tokens of width 128, and 54 MiB with 4096.
const HEAD_WORDS: usize = 7;
/// Chunks of logits that exist at once.
const LOGITS: usize = 3;
/// Bytes of a token of a step's samples in host memory: of the conversation, of the sample, of the batch, and of eight
/// grids in f64.
const SAMPLE_BYTES: usize = 96;

const LOADING: &str = "loading";
const ROLLOUT: &str = "rollout";
const UPDATE: &str = "update";
const CHECKPOINT: &str = "checkpoint";

/// Where an item is, and what it is called.
struct Item {
    name: &'static str,
    device: usize,
    host: usize,
    formula: String,
}

impl Item {
    fn on_device(name: &'static str, bytes: usize, formula: String) -> Self {
        Self { name, device: bytes, host: 0, formula }
    }

    fn on_host(name: &'static str, bytes: usize, formula: String) -> Self {
        Self { name, device: 0, host: bytes, formula }
    }

    fn during(self, phase: Option<&str>) -> MemoryItem {
        let Self { name, device, host, formula } = self;
        MemoryItem { name: name.into(), device, host, formula, phase: phase.map(Into::into) }
    }
}

impl Plan {
    /// Everything that a rank holds.
    pub(super) fn memory(&self) -> Vec<MemoryItem> {
        let always = |items: Vec<Item>| items.into_iter().map(|item| item.during(None));
        let mut memory: Vec<MemoryItem> = always(self.process_and_weights()).collect();
        let later = self.optimizer();
        let bytes: usize = later.iter().map(|item| item.device + item.host).sum();
        memory.extend(always(later));
        // At loading these are not there yet.
        memory.extend(self.files(bytes).map(|item| item.during(Some(LOADING))));
        if let Some(rollout) = &self.work.rollout {
            let phase = (!rollout.ahead).then_some(ROLLOUT);
            memory.extend(self.written(rollout).into_iter().map(|item| item.during(phase)));
        }
        memory.extend(self.update().into_iter().map(|item| item.during(Some(UPDATE))));
        memory.extend(self.checkpoint().into_iter().map(|item| item.during(Some(CHECKPOINT))));
        memory
    }

    /// The process, and every weight.
    fn process_and_weights(&self) -> Vec<Item> {
        let tokens = self.config.vocab;
        let formula = format!("60 MiB, and a tokenizer of {tokens} x {TOKEN_BYTES} B");
        let mut items = vec![Item::on_host("process", PROCESS + tokens * TOKEN_BYTES, formula)];
        if self.gpu {
            items.push(Item::on_device("context", RESERVE, "CUDA's context and its allocator; an estimate".into()));
        }
        let mut formula = match self.blocks {
            0 => format!("{} x {} B", self.frozen / self.dtype.size(), self.dtype.size()),
            blocks => {
                format!("{blocks} B in blocks, as in the file, and {} x {} B", self.plain_elements(), self.dtype.size())
            }
        };
        if self.ranks > 1 {
            formula.push_str(", whole on every rank at every stage");
        }
        match (self.full, self.work.reference) {
            (true, true) => formula.push_str("; as the reference"),
            (true, false) => formula.push_str("; as they were, beside the trained ones"),
            (false, true) => formula.push_str("; the reference is these alone"),
            (false, false) => {}
        }
        items.push(Item::on_device("frozen weights", self.frozen, formula));
        let n = self.trained();
        let what = if self.full { "all weights" } else { "adapters" };
        let whole = if self.ranks > 1 { ", whole on every rank" } else { "" };
        items.push(Item::on_device("trained parameters", 4 * n, format!("{n} x 4 B, {what}{whole}")));
        if let Some(critic) = &self.work.critic {
            // A hidden state and the mean of those before; parameters and moments in f64.
            let head = 3 * 8 * (2 * self.config.dim + 1);
            let formula = match critic.lora_rank {
                0 => format!("its head: 3 x (2 x {} + 1) x 8 B", self.config.dim),
                _ => format!("{} x (4 + 8) B, adapters and moments on every rank, and its head", self.critic),
            };
            let (device, host) = (4 * self.critic, 8 * self.critic + head);
            items.push(Item { name: "critic", device, host, formula });
        }
        items
    }

    /// Weights in plain numbers.
    fn plain_elements(&self) -> usize {
        (self.frozen - self.blocks) / self.dtype.size()
    }

    /// What the strategy keeps.
    fn optimizer(&self) -> Vec<Item> {
        let (n, division) = (self.trained(), &self.division);
        let part = |divided: bool| if divided { n.div_ceil(self.ranks) } else { n };
        let share = |divided: bool| match divided && self.ranks > 1 {
            true => format!("{n} / {}", self.ranks),
            false => n.to_string(),
        };
        // A GPU that updates the parameters itself has what belongs to that.
        let (gradients, state) = (division.stage >= 2, division.stage >= 1);
        let on_gpu = self.gpu && part(state) <= division.state_on_gpu;
        let placed = |on_gpu, name, bytes, formula| match on_gpu {
            true => Item::on_device(name, bytes, formula),
            false => Item::on_host(name, bytes, formula),
        };
        // Those of several ranks are summed in host memory.
        let sums = on_gpu && !division.all_ranks;
        let mut items = vec![
            placed(sums, "sums of gradients", 4 * part(gradients), format!("{} x 4 B", share(gradients))),
            placed(on_gpu, "optimizer state", 8 * part(state), format!("{} x 8 B", share(state))),
        ];
        if division.copies_parameters && !on_gpu {
            items.push(Item::on_host("copy of the parameters", 4 * n, format!("{n} x 4 B, where they are updated")));
        }
        items
    }

    /// What is in memory while weights are read, beside `later`, bytes that are not there yet.
    fn files(&self, later: usize) -> Option<Item> {
        let bytes = self.loading.saturating_sub(later);
        let formula = format!("{} B: pages of the files, and what is decoded of them", self.loading);
        (bytes > 0).then(|| Item::on_host("files", bytes, formula))
    }

    /// What a rollout holds.
    fn written(&self, rollout: &RolloutWork) -> Vec<Item> {
        let (config, width) = (&self.config, self.products.size());
        let turn = self.rollout(rollout);
        let bytes = turn.bytes(config, width);
        let of_token = format!("{} layers x 2 x {} x {} x {width} B", config.layers, config.kv_heads, config.head_dim);
        let formula = format!(
            "{} prompts of {} tokens, room for {} x {} written at once; {of_token}",
            turn.prompts, turn.prompt_tokens, turn.rows, turn.new_tokens
        );
        let mut items = vec![Item::on_device("keys and values", bytes.keys_values, formula)];
        let others = self.other_tokens(rollout);
        if others > 0 {
            let bytes = others * config.layers * 2 * config.kv_heads * config.head_dim * width;
            let conversations = self.conversations(rollout);
            let formula = format!("{others} tokens of the {conversations} conversations; {of_token}");
            items.push(Item::on_device("prompt caches", bytes, formula));
        }
        let at_once = [
            ("pass over prompts", bytes.pass, format!("up to {} tokens at once", TOKENS_OF_A_PASS)),
            ("logits", bytes.logits, format!("2 x {} x {} x 4 B", turn.rows.max(turn.prompts), config.vocab)),
            ("a layer that moves", bytes.moving, "its keys and values once more".into()),
        ];
        let largest = at_once.into_iter().max_by_key(|(_, bytes, _)| *bytes);
        items.extend(largest.map(|(name, bytes, formula)| Item::on_device(name, bytes, formula)));
        if rollout.ahead {
            let n = self.trained();
            items.push(Item::on_device("copy of the policy", 4 * n, format!("{n} x 4 B, which writes meanwhile")));
        }
        items
    }

    /// What the update holds at its worst moment.
    fn update(&self) -> Vec<Item> {
        let worst = self.moments().into_iter().max_by_key(|moment| moment.bytes());
        let mut items: Vec<Item> = self.samples();
        items.extend(worst.into_iter().flat_map(|moment| moment.0));
        items
    }

    /// The samples of a step, in host memory.
    fn samples(&self) -> Vec<Item> {
        let LanguageWork { samples, rollout, critic, .. } = &self.work;
        let (length, mut items) = (self.length(), Vec::new());
        if rollout.is_some() {
            let formula = format!("{samples} of all ranks x {length} tokens x {SAMPLE_BYTES} B");
            items.push(Item::on_host("samples", samples * length * SAMPLE_BYTES, formula));
        }
        // Those of adapters of its own are computed again for each update.
        if let Some(critic) = critic.as_ref().filter(|critic| critic.lora_rank == 0) {
            let (own, tokens) = (samples.div_ceil(self.ranks), critic.tokens.min(length));
            let formula = format!("{own} samples x {tokens} tokens x 2 x {} x 4 B", self.config.dim);
            items.push(Item::on_host("critic's features", own * tokens * 2 * self.config.dim * 4, formula));
        }
        items
    }

    /// What an update holds, at the moments that can be the worst. Gradients come while block inputs go, so that the
    /// worst moment is at one end of a pull.
    fn moments(&self) -> Vec<Moment> {
        let (config, n) = (&self.config, self.trained());
        let (dim, layers) = (config.dim, config.layers);
        let head = if self.full { config.vocab * dim } else { 0 };
        let of_block: usize =
            self.specs.iter().filter(|spec| spec.name.starts_with("model.layers.0.")).map(|spec| spec.len()).sum();
        let gradients = |elements: usize, which: &str| {
            Item::on_device("gradients in the model", 4 * elements, format!("{elements} x 4 B, {which}"))
        };
        let until = "until they are reduced";
        let mut moments = vec![
            Moment(vec![self.kept_for_pull(layers), self.output_layer()]),
            Moment(vec![self.kept_for_pull(layers), gradients(head + of_block, "so far"), self.block_pull()]),
            Moment(vec![self.kept_for_pull(1), gradients(n, until), self.block_pull()]),
        ];
        if self.full {
            let formula = format!("2 x {} x {dim} x 4 B, where it is added", config.vocab);
            let embedding = Item::on_device("gradient of the embedding", 2 * 4 * config.vocab * dim, formula);
            moments.push(Moment(vec![gradients(n, until), embedding]));
        }
        if self.division.bucket > 0 {
            // The last bucket is reduced first, while the gradients of all others are there.
            let bucket = self.division.bucket.min(n);
            let formula = format!("3 x {bucket} x 4 B: one that is filled, one that waits, one that is reduced");
            let messages = Item::on_host("messages between ranks", 3 * 4 * bucket, formula);
            moments.push(Moment(vec![gradients(n, until), messages]));
            // A tensor is never cut.
            let largest = self.specs.iter().map(ParameterSpec::len).max().unwrap_or(0).max(bucket);
            let formula = format!("4 x {largest} x 4 B: read, updated, gathered and written");
            moments.push(Moment(vec![Item::on_host("messages between ranks", 4 * 4 * largest, formula)]));
        }
        moments
    }

    /// What is kept of the pass for the pull of its last `blocks` blocks.
    fn kept_for_pull(&self, blocks: usize) -> Item {
        let (config, tokens) = (&self.config, self.recorded());
        let inputs = 4 * tokens * config.dim * (blocks + 1);
        let sizes = format!("{} x {tokens} tokens x {} x 4 B", blocks + 1, config.dim);
        match self.kept {
            Memory::Recompute => Item::on_device("block inputs", inputs, sizes),
            Memory::Offload => {
                let device = 2 * 4 * tokens * config.dim;
                Item { name: "block inputs", device, host: inputs, formula: format!("{sizes}; two on the device") }
            }
            Memory::Hold => {
                let (words, each) = self.block_words(BLOCK_WORDS[2]);
                let blocks = blocks.saturating_sub(1);
                let mut formula = format!("{blocks} blocks x {tokens} tokens x {each} x 4 B");
                let mut bytes = 4 * blocks * tokens * words;
                if let Some((widened, of_weights)) = self.widened() {
                    bytes += blocks * widened;
                    formula.push_str(&format!(", and {blocks} x {of_weights}"));
                }
                Item::on_device("activations", bytes, formula)
            }
        }
    }

    /// Recomputation, where there is any, and pull of one block.
    fn block_pull(&self) -> Item {
        let tokens = self.recorded();
        let (words, each) = self.block_words(BLOCK_WORDS[2] + PULL_WORDS);
        let (mut bytes, mut formula) = (4 * tokens * words, format!("{tokens} tokens x {each} x 4 B"));
        if let Some((widened, of_weights)) = self.widened() {
            bytes += widened;
            formula.push_str(&format!(", and {of_weights}"));
        }
        Item::on_device("pull of one block", bytes, formula)
    }

    /// Bytes of the frozen weights of a block as products take them, where that is another dtype than they are stored
    /// in: a recorded block holds them too. Blocks of small integers are decoded piece by piece.
    fn widened(&self) -> Option<(usize, String)> {
        if self.full || self.blocks > 0 || self.dtype == self.products {
            return None;
        }
        let weights = self.config.weights().into_iter();
        let of_block = weights.filter(|(name, shape)| name.starts_with("model.layers.0.") && shape.len() == 2);
        let elements: usize = of_block.map(|(_, shape)| shape.iter().product::<usize>()).sum();
        let width = self.products.size();
        Some((elements * width, format!("{elements} x {width} B of weights")))
    }

    /// The output layer and its pull.
    fn output_layer(&self) -> Item {
        let (config, tokens) = (&self.config, self.recorded());
        let logits = CHUNK_LOGITS.min(tokens * config.vocab);
        let mut bytes = 4 * (HEAD_WORDS * tokens * config.dim + LOGITS * logits);
        let mut formula =
            format!("{tokens} tokens x {HEAD_WORDS} x {} x 4 B, {LOGITS} x {logits} x 4 B of logits", config.dim);
        if self.full {
            // Parts of the gradient, and these together.
            bytes += 2 * 4 * config.vocab * config.dim;
            formula.push_str(&format!(", 2 x {} x {} x 4 B of its gradient", config.vocab, config.dim));
        } else if self.dtype != DType::F32 || self.blocks > 0 {
            bytes += 4 * CHUNK_IDS.min(config.vocab) * config.dim;
        }
        Item::on_device("output layer", bytes, formula)
    }

    /// What the rank that writes a checkpoint holds. Ranks beside it hold less.
    fn checkpoint(&self) -> Vec<Item> {
        let n = self.trained();
        let whose = if self.ranks > 1 { ", on rank 0" } else { "" };
        vec![
            Item::on_host("optimizer state, whole", 8 * n, format!("{n} x 8 B{whose}")),
            Item::on_host("parameters, twice", 2 * 4 * n, format!("2 x {n} x 4 B{whose}")),
        ]
    }

    /// Width of all heads of queries.
    fn queries(&self) -> usize {
        self.config.heads * self.config.head_dim
    }

    /// Words of a token that a recorded block holds, and the formula of them.
    fn block_words(&self, feed_forward: usize) -> (usize, String) {
        let ([a, b, _], [dim, queries, ffn]) = (BLOCK_WORDS, [self.config.dim, self.queries(), self.config.ffn_dim]);
        // What the two matrices of a low-rank product have between them, and its gradient.
        let lora = 2 * self.lora_ranks();
        let adapters = if lora > 0 { format!(" + {lora}") } else { String::new() };
        let formula = format!("({a} x {dim} + {b} x {queries} + {feed_forward} x {ffn}{adapters})");
        (a * dim + b * queries + feed_forward * ffn + lora, formula)
    }

    /// Sum of the ranks of the adapters of a block.
    fn lora_ranks(&self) -> usize {
        let down = |name: &str| name.starts_with("model.layers.0.") && name.ends_with(".lora_A.weight");
        self.specs.iter().filter(|spec| down(&spec.name)).map(|spec| spec.shape[0]).sum()
    }
}

/// What is held at one moment.
struct Moment(Vec<Item>);

impl Moment {
    fn bytes(&self) -> usize {
        self.0.iter().map(|item| item.device + item.host).sum()
    }
}
