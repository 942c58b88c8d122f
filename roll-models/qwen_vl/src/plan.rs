//! Memory and time of reading texts with media, by the shapes in the headers of the files.
//!
//! Weights and block inputs are counted exactly. The work on a block follows formulas whose factors are those that the
//! allocator counts on the CPU in f32; `tests/memory.rs` compares them.

use roll_backends::Memory;
use roll_backends::weights::HostStore;
use roll_core::plan::{MemoryItem, Needs, PhaseCost, PlanInput};
use roll_core::{BuildContext, PlannedReads, Result};
use roll_media::PixelLimits;
use roll_network::precision::DeviceTraits;

use super::config::{Family, QwenVlConfig};
use super::loading::{NetworkFiles, Precision, QwenVlOptions, WeightLocation, is_block_matrix, is_of_tower};
use super::output_layer::HEAD;

/// Bytes per second from host memory to a GPU.
const HOST_RATE: f64 = 10e9;
/// Bytes of an f32 number.
const F32_SIZE: usize = size_of::<f32>();
/// f32 values per token of a block, in multiples of the widths of the residual stream, of the queries, and of the
/// feed-forward layer.
type Words = [usize; 3];

/// The values of a block's tokens while it is worked on.
struct BlockWords {
    /// Without a record: during attention, and during the feed-forward layer.
    read: [Words; 2],
    /// What a record holds until its pullback.
    held: Words,
    /// The record and the pullback's own values.
    pulled: Words,
}

/// A block of the vision tower.
const TOWER_BLOCK: BlockWords = BlockWords { read: [[3, 6, 0], [3, 0, 2]], held: [5, 6, 2], pulled: [6, 7, 3] };
/// A block of the language model, whose feed-forward layer is gated.
const LANGUAGE_BLOCK: BlockWords = BlockWords { read: [[3, 5, 0], [3, 0, 3]], held: [3, 5, 4], pulled: [4, 5, 5] };
/// Passes over the weights of a recorded read whose blocks are recomputed: forward, and recomputation with pullback.
const RECORDED_PASSES: usize = 2;

/// Memory and time of `reads` on a device with the memory and speed of `input`.
pub fn needs(
    section: &str,
    options: &QwenVlOptions,
    reads: &PlannedReads,
    input: &PlanInput,
    context: &BuildContext,
) -> Result<Needs> {
    let files = NetworkFiles::open(section, options, context)?;
    let precision = Precision::of(section, options, files.stored, DeviceTraits::planned(input.memory.is_some()))?;
    let work = Work::of(&files.config, reads)?;
    // Rows of the output layer come from the file.
    let in_memory: Vec<_> = files.wanted.iter().filter(|(name, _)| name != HEAD).cloned().collect();
    let weights = WeightBytes::of(&in_memory, &precision);
    let mut memory = vec![weights.item(options.weight_store)];
    memory.extend(work.memory(&files.config, options.memory(), reads.count[1] > 0));
    let [without, with] = reads.count.map(|count| count as f64);
    // What a pass moves to the device.
    let moved = match options.weight_store {
        WeightLocation::Resident => 0.0,
        WeightLocation::Host => weights.large as f64,
    };
    let phase = |name: &str, flops: f64, moved: f64| {
        let seconds = (flops / input.speed.flops).max(moved / HOST_RATE);
        PhaseCost { name: name.into(), flops, moved, seconds }
    };
    let recomputed = if options.memory() == Memory::Hold { 0.0 } else { work.forward() };
    let mut time = vec![phase("time/score", (without + with) * work.forward(), (without + with) * moved)];
    if with > 0.0 {
        let passes = (RECORDED_PASSES - 1) as f64;
        time.push(phase("time/pull (reward)", with * (recomputed + work.pull()), with * passes * moved));
    }
    time.retain(|phase| phase.flops > 0.0);
    let elements: usize = files.wanted.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
    Ok(Needs {
        work: format!(
            "{:.2} billion weights, texts of {} tokens with {} patches",
            elements as f64 / 1e9,
            work.tokens,
            work.patches
        ),
        facts: [("tokens", work.tokens), ("patches", work.patches), ("parameters", elements)]
            .map(|(name, value)| (name.to_string(), value as f64))
            .into(),
        memory,
        time,
        ..Needs::default()
    })
}

/// Memory of the vision tower of a policy that reads `input`'s texts, in addition to that of the language model. A
/// picture has at most `limits.max` pixels and fits into a sequence; `context` is `max_length`, if it is set.
pub fn of_policy(
    files: &NetworkFiles,
    precision: &Precision,
    limits: PixelLimits,
    context: Option<usize>,
    input: &PlanInput,
) -> Vec<MemoryItem> {
    let (vision, text) = (&files.config.vision, &files.config.text);
    let tower: Vec<(String, Vec<usize>)> = files.wanted.iter().filter(|(name, _)| is_of_tower(name)).cloned().collect();
    let weights = WeightBytes::of(&tower, precision).item(WeightLocation::Resident);
    let mut items = vec![MemoryItem { name: "vision tower".into(), ..weights }];
    let longest = context.unwrap_or(text.context).min(text.context);
    let prompts = input.passes.texts.iter().map(|pass| {
        let tokens = pass.tokens.unwrap_or(longest).min(longest).saturating_sub(pass.generated);
        // The bounds avoid overflow of the number of bytes.
        (tokens, pass.rows.min(1 << 24).div_ceil(input.ranks()))
    });
    let (tokens, rows) = prompts.max().unwrap_or_default();
    let patches = (limits.max / (vision.patch * vision.patch)).min(tokens * vision.merge * vision.merge);
    let read = TOWER_BLOCK.read.map(|words| bytes(patches, words, [vision.width, vision.width, vision.ffn_dim]));
    let read = read.into_iter().max().unwrap_or(0) + F32_SIZE * patches * vision.patch_values();
    items.push(MemoryItem::new("a picture in the tower", [read, 0], format!("at most {patches} patches")));
    let seen = F32_SIZE * rows * tokens * text.dim;
    let formula = format!("at most {rows} x {tokens} squares x {} x {F32_SIZE} B", text.dim);
    items.push(MemoryItem::new("pictures that were seen", [seen, 0], formula));
    items
}

/// Bytes of the weights in the dtypes of a device.
struct WeightBytes {
    /// Those that [`HostStore`] leaves on the device: small ones, and the scales of matrices in eight bits.
    small: usize,
    /// The others.
    large: usize,
    /// The largest two segments of the others: what a pass has on the device.
    two_segments: usize,
}

impl WeightBytes {
    fn of(wanted: &[(String, Vec<usize>)], precision: &Precision) -> Self {
        let (mut small, mut segments) = (0, std::collections::BTreeMap::<&str, usize>::new());
        for (name, shape) in wanted {
            let elements: usize = shape.iter().product();
            let (values, scales) = match precision.eight_bits {
                Some(_) if is_block_matrix(name, shape) => (elements, F32_SIZE * shape[0]),
                _ => (elements * precision.dtype.size(), 0),
            };
            if values + scales < HostStore::SMALL {
                small += values + scales;
            } else {
                small += scales;
                *segments.entry(segment_of(name)).or_default() += values;
            }
        }
        let large = segments.values().sum();
        let mut largest: Vec<usize> = segments.into_values().collect();
        largest.sort_unstable_by(|a, b| b.cmp(a));
        Self { small, large, two_segments: largest.iter().take(2).sum() }
    }

    fn item(&self, location: WeightLocation) -> MemoryItem {
        let all = self.small + self.large;
        let (bytes, formula) = match location {
            WeightLocation::Resident => ([all, 0], format!("{all} B, by the headers")),
            WeightLocation::Host => (
                [self.small + self.two_segments, self.large],
                format!("two segments, norms and scales; the rest of {all} B on the host"),
            ),
        };
        MemoryItem::new("weights", bytes, formula)
    }
}

/// The prefix of the weights that a pass takes at once: of a block, or of a layer outside of the blocks.
fn segment_of(name: &str) -> &str {
    let parts = if name.starts_with("visual.merger.") { 2 } else { 3 };
    let end = name.match_indices('.').nth(parts - 1).map_or(name.len(), |(at, _)| at);
    &name[..end]
}

/// Work of reading one text.
struct Work {
    tokens: usize,
    patches: usize,
    /// Products of both networks, in operations.
    products: f64,
    /// Attention of both networks, in operations.
    attention: f64,
}

impl Work {
    fn of(config: &QwenVlConfig, reads: &PlannedReads) -> Result<Self> {
        let (vision, text) = (&config.vision, &config.text);
        let (mut patches, mut pairs, mut window_pairs) = (0, 0.0, 0.0);
        for shape in &reads.media {
            config.facts.tokens_of(shape)?;
            let of_step = shape[2] * shape[3] / (vision.patch * vision.patch);
            let steps = shape[0] / vision.patch_frames;
            patches += steps * of_step;
            let side = vision.windows.as_ref().map_or(usize::MAX, |windows| windows.side * vision.merge);
            let window = side.saturating_mul(side).min(of_step);
            pairs += (steps * of_step * of_step) as f64;
            window_pairs += (steps * of_step * window) as f64;
        }
        let full_blocks = vision.windows.as_ref().map_or(vision.depth, |w| w.full.len().min(vision.depth));
        let matrices = if vision.family == Family::Qwen25Vl { 3 } else { 2 };
        let [width, ffn, depth] = [vision.width, vision.ffn_dim, vision.depth].map(|n| n as f64);
        let squares = (patches / (vision.merge * vision.merge)) as f64;
        let joined = width * (vision.merge * vision.merge) as f64;
        let [dim, hidden, layers, tokens] = [text.dim, text.ffn_dim, text.layers, reads.tokens].map(|n| n as f64);
        let [queries, keys] = [text.heads, text.kv_heads].map(|heads| (heads * text.head_dim) as f64);
        let tower = patches as f64
            * (width * vision.patch_values() as f64
                + depth * (4.0 * width * width + f64::from(matrices) * width * ffn))
            + squares * (joined * joined + joined * dim);
        let language = tokens * layers * (2.0 * dim * queries + 2.0 * dim * keys + 3.0 * dim * hidden);
        let tower_attention =
            4.0 * width * (full_blocks as f64 * pairs + (vision.depth - full_blocks) as f64 * window_pairs);
        // Attention is causal: half of the pairs.
        let language_attention = 4.0 * queries * layers * tokens * tokens / 2.0;
        Ok(Self {
            tokens: reads.tokens,
            patches,
            products: 2.0 * (tower + language),
            attention: tower_attention + language_attention,
        })
    }

    /// Operations of a read.
    fn forward(&self) -> f64 {
        self.products + self.attention
    }

    /// Operations of the pullback, without recomputation: one product for each weight, because only the pixels have a
    /// gradient. Attention stores no probabilities: five products where the forward pass has two.
    fn pull(&self) -> f64 {
        self.products + 2.5 * self.attention
    }

    /// Values that a read has on the device besides weights. Both networks are recorded before the language model is
    /// pulled back, and then the tower.
    fn memory(&self, config: &QwenVlConfig, memory: Memory, is_recorded: bool) -> Vec<MemoryItem> {
        let (vision, text) = (&config.vision, &config.text);
        let in_tower = |words: Words| bytes(self.patches, words, [vision.width, vision.width, vision.ffn_dim]);
        let in_language =
            |words: Words| bytes(self.tokens, words, [text.dim, text.heads * text.head_dim, text.ffn_dim]);
        let held = [in_tower(TOWER_BLOCK.held), in_language(LANGUAGE_BLOCK.held)];
        let pulled = [in_tower(TOWER_BLOCK.pulled), in_language(LANGUAGE_BLOCK.pulled)];
        let one_block = match (is_recorded, memory) {
            (false, _) => TOWER_BLOCK.read.map(in_tower).into_iter().chain(LANGUAGE_BLOCK.read.map(in_language)).max(),
            (true, Memory::Hold) => pulled.iter().zip(held).map(|(pulled, held)| pulled - held).max(),
            (true, _) => pulled.into_iter().max(),
        };
        let formula = format!("{} patches or {} tokens", self.patches, self.tokens);
        let mut items = vec![MemoryItem::new("one block", [one_block.unwrap_or(0), 0], formula)];
        if !is_recorded {
            return items;
        }
        // Patch embedding, blocks and merger; blocks and final norm.
        let (tower, language) =
            (self.patches * vision.width * (vision.depth + 1), self.tokens * text.dim * (text.layers + 1));
        let pixels = self.patches * vision.patch_values();
        let inputs = F32_SIZE * (pixels + tower + language);
        let formula = format!(
            "({} patches x ({} + {} x {}) + {} tokens x {} x {}) x {F32_SIZE} B",
            self.patches,
            vision.patch_values(),
            vision.depth + 1,
            vision.width,
            self.tokens,
            text.layers + 1,
            text.dim
        );
        items.push(match memory {
            Memory::Hold => {
                let held = vision.depth * held[0] + text.layers * held[1];
                MemoryItem::new("activations", [held, 0], format!("{} and {} blocks", vision.depth, text.layers))
            }
            // Two inputs at a time are on the device.
            Memory::Offload => {
                MemoryItem::new("block inputs", [2 * F32_SIZE * largest_input(self, config), inputs], formula)
            }
            _ => MemoryItem::new("block inputs", [inputs, 0], formula),
        });
        items
    }
}

/// Bytes of `words` for a number of tokens, in a block of these widths.
fn bytes(tokens: usize, words: Words, widths: [usize; 3]) -> usize {
    F32_SIZE * tokens * words.into_iter().zip(widths).map(|(words, width)| words * width).sum::<usize>()
}

/// Values of the larger of a block's inputs in the two networks.
fn largest_input(work: &Work, config: &QwenVlConfig) -> usize {
    (work.patches * config.vision.width).max(work.tokens * config.text.dim)
}
