//! Sizes of the transformer, read from its checkpoint.

use std::collections::{BTreeMap, BTreeSet};

use roll_core::{Error, Result};
use roll_network::shapes::WeightShapes;

/// Size of the patch of one token, `[t, h, w]`.
pub const PATCH: [usize; 3] = [1, 2, 2];
/// Key of the patch embedding: patches of 2 x 2 positions and 1 frame.
pub const PATCH_EMBEDDING: &str = "all_x_embedder.2-1";
/// Key of the final layer for the same patches.
pub const FINAL_LAYER: &str = "all_final_layer.2-1";
/// Modulation vectors of a block: scale and gate, of attention and of the feed-forward layer.
const MODULATIONS: usize = 4;

/// Sequences are filled to a multiple of this length. The fill tokens take part in attention.
const MULTIPLE: usize = 32;

/// The sizes of a Z-Image transformer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DitConfig {
    /// Width of the residual stream.
    pub dim: usize,
    /// Channels of the latents and of the velocity.
    pub channels: usize,
    /// Width of the caption features.
    pub text_dim: usize,
    /// Width of the sinusoidal timestep embedding.
    pub freq_dim: usize,
    /// Width of the hidden layer of the timestep embedding.
    pub time_dim: usize,
    /// Width of the embedded timestep, from which every modulation is projected.
    pub modulation_dim: usize,
    /// Width of the feed-forward layer.
    pub ffn_dim: usize,
    /// Number of blocks on the joint sequence.
    pub layers: usize,
    /// Number of noise refiners (blocks on the picture alone).
    pub noise_refiners: usize,
    /// Number of context refiners (blocks on the caption alone).
    pub context_refiners: usize,
    /// Number of attention heads.
    pub heads: usize,
    /// Elements of a head that are rotated by each of the three coordinates (caption position, row, column).
    pub axes: [usize; 3],
}

impl DitConfig {
    /// Reads the sizes from the shapes of the weights (diffusers names), and checks that every weight is present in its
    /// shape. `axes` comes from the checkpoint's `config.json` (`axes_dims`). Without it, a head is divided as in the
    /// published models: a quarter, three eighths, three eighths.
    ///
    /// # Errors
    /// Fails if a weight is missing, has another shape or is not one of the network, and if `axes` are odd or do not
    /// add up to the width of a head.
    pub fn from_shapes(shapes: &BTreeMap<String, Vec<usize>>, axes: Option<[usize; 3]>) -> Result<Self> {
        let weights = WeightShapes { network: "Z-Image transformer", shapes };
        let [dim, patch_width] = weights.get(&format!("{PATCH_EMBEDDING}.weight"))?;
        let [_, text_dim] = weights.get("cap_embedder.1.weight")?;
        let [time_dim, freq_dim] = weights.get("t_embedder.mlp.0.weight")?;
        let [modulation_dim, _] = weights.get("t_embedder.mlp.2.weight")?;
        let [ffn_dim, _] = weights.get("layers.0.feed_forward.w1.weight")?;
        let [head_dim] = weights.get("layers.0.attention.norm_q.weight")?;
        let axes = axes.unwrap_or([head_dim / 4, head_dim / 8 * 3, head_dim / 8 * 3]);
        if freq_dim % 2 == 1 {
            let expected = "[time width, an even number of frequencies]";
            return Err(Error::shape("t_embedder.mlp.0.weight", expected, &[time_dim, freq_dim]));
        }
        let total = axes.iter().try_fold(0_usize, |total, axis| total.checked_add(*axis));
        if head_dim == 0 || total != Some(head_dim) || axes.iter().any(|axis| axis % 2 == 1) {
            let problem =
                format!("expected three even numbers that add up to the head width {head_dim}, found {axes:?}");
            return Err(Error::config("axes_dims", problem));
        }
        if dim == 0 || dim % head_dim != 0 {
            return Err(Error::Unsupported(format!(
                "heads of {head_dim} (`layers.0.attention.norm_q.weight`) do not divide the width {dim} of the transformer"
            )));
        }
        let blocks = |group: &str| weights.blocks(|i| format!("{group}.{i}.attention.to_q.weight"));
        let config = Self {
            dim,
            channels: patch_width / PATCH.iter().product::<usize>(),
            text_dim,
            freq_dim,
            time_dim,
            modulation_dim,
            ffn_dim,
            layers: blocks("layers"),
            noise_refiners: blocks("noise_refiner"),
            context_refiners: blocks("context_refiner"),
            heads: dim / head_dim,
            axes,
        };
        let expected = config.weights();
        weights.check(&expected)?;
        let expected: BTreeSet<&str> = expected.iter().map(|(key, _)| key.as_str()).collect();
        match shapes.keys().find(|key| !expected.contains(key.as_str())) {
            Some(key) => Err(Error::Unsupported(format!(
                "the weight `{key}` is not one of a Z-Image transformer: the file is damaged, or of a variant (edit, \
                 control), which is not supported; use the Z-Image or Z-Image-Turbo checkpoint"
            ))),
            None => Ok(config),
        }
    }

    /// Number of tokens of a sequence of `length` tokens that is filled: the next multiple of 32.
    pub fn filled(length: usize) -> usize {
        length.next_multiple_of(MULTIPLE)
    }

    /// Name of the network, for people.
    pub fn kind(&self) -> &'static str {
        "Z-Image"
    }

    /// Width of one head.
    pub fn head_dim(&self) -> usize {
        self.dim / self.heads
    }

    /// Number of elements of a patch.
    pub fn patch_width(&self) -> usize {
        self.channels * PATCH.iter().product::<usize>()
    }

    /// Number of segments of a pass: patch embedding, noise refiners, joining, blocks, final layer.
    pub fn segments(&self) -> usize {
        self.noise_refiners + self.layers + 3
    }

    /// Name (diffusers) and shape of every weight, in the order of the forward pass.
    pub fn weights(&self) -> Vec<(String, Vec<usize>)> {
        let mut all = Vec::new();
        let mut add = |name: &str, shape: &[usize]| all.push((name.to_string(), shape.to_vec()));
        let (dim, width) = (self.dim, self.patch_width());
        add("t_embedder.mlp.0.weight", &[self.time_dim, self.freq_dim]);
        add("t_embedder.mlp.0.bias", &[self.time_dim]);
        add("t_embedder.mlp.2.weight", &[self.modulation_dim, self.time_dim]);
        add("t_embedder.mlp.2.bias", &[self.modulation_dim]);
        add("cap_embedder.0.weight", &[self.text_dim]);
        add("cap_embedder.1.weight", &[dim, self.text_dim]);
        add("cap_embedder.1.bias", &[dim]);
        add("cap_pad_token", &[1, dim]);
        self.add_blocks("context_refiner", self.context_refiners, false, &mut add);
        add(&format!("{PATCH_EMBEDDING}.weight"), &[dim, width]);
        add(&format!("{PATCH_EMBEDDING}.bias"), &[dim]);
        add("x_pad_token", &[1, dim]);
        self.add_blocks("noise_refiner", self.noise_refiners, true, &mut add);
        self.add_blocks("layers", self.layers, true, &mut add);
        add(&format!("{FINAL_LAYER}.adaLN_modulation.1.weight"), &[dim, self.modulation_dim]);
        add(&format!("{FINAL_LAYER}.adaLN_modulation.1.bias"), &[dim]);
        add(&format!("{FINAL_LAYER}.linear.weight"), &[width, dim]);
        add(&format!("{FINAL_LAYER}.linear.bias"), &[width]);
        all
    }

    /// Adds the weights of `count` blocks called `group`.
    fn add_blocks(&self, group: &str, count: usize, is_modulated: bool, add: &mut impl FnMut(&str, &[usize])) {
        let (dim, ffn_dim) = (self.dim, self.ffn_dim);
        for i in 0..count {
            let mut add = |name: &str, shape: &[usize]| add(&format!("{group}.{i}.{name}"), shape);
            if is_modulated {
                add("adaLN_modulation.0.weight", &[MODULATIONS * dim, self.modulation_dim]);
                add("adaLN_modulation.0.bias", &[MODULATIONS * dim]);
            }
            add("attention_norm1.weight", &[dim]);
            for projection in ["to_q", "to_k", "to_v", "to_out.0"] {
                add(&format!("attention.{projection}.weight"), &[dim, dim]);
            }
            add("attention.norm_q.weight", &[self.head_dim()]);
            add("attention.norm_k.weight", &[self.head_dim()]);
            add("attention_norm2.weight", &[dim]);
            add("ffn_norm1.weight", &[dim]);
            add("feed_forward.w1.weight", &[ffn_dim, dim]);
            add("feed_forward.w3.weight", &[ffn_dim, dim]);
            add("feed_forward.w2.weight", &[dim, ffn_dim]);
            add("ffn_norm2.weight", &[dim]);
        }
    }
}
