//! Sizes of the transformer, read from its checkpoint.

use std::collections::{BTreeMap, BTreeSet};

use roll_core::{Error, Result};

use roll_network::shapes::WeightShapes;

/// Width of an attention head in every published Wan model. The weights do not contain it.
const OFFICIAL_HEAD_DIM: usize = 128;
/// Modulation vectors of a block: shift, scale and gate, of self-attention and of the feed-forward layer.
const MODULATIONS: usize = 6;

/// The sizes of a Wan transformer, read from its weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DitConfig {
    /// Width of the residual stream.
    pub dim: usize,
    /// Channels of the input: the latents and the channels concatenated to them.
    pub in_channels: usize,
    /// Channels of the latents and of the velocity.
    pub out_channels: usize,
    /// Size of the patch of one token, `[t, h, w]`.
    pub patch: [usize; 3],
    /// Width of the text embedding.
    pub text_dim: usize,
    /// Width of the sinusoidal timestep embedding.
    pub freq_dim: usize,
    /// Width of the feed-forward layer.
    pub ffn_dim: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Number of attention heads.
    pub heads: usize,
    /// Width of the CLIP image tokens, for models with an image branch (Wan2.1 I2V).
    pub image_dim: Option<usize>,
}

/// Whether a tensor is a counter or an optimizer state of a training, which some files have next to the weights.
fn is_training_state(key: &str, shape: &[usize]) -> bool {
    // A counter is a scalar.
    shape.is_empty() || key.starts_with("optimizer")
}

impl DitConfig {
    /// Number of segments of a pass: the patch embedding, the blocks and the head.
    pub fn segments(&self) -> usize {
        self.layers + 2
    }

    /// The published model with these channels and image branch, or `unknown`.
    pub fn kind(&self) -> &'static str {
        match (self.in_channels, self.out_channels, self.image_dim) {
            (36, 16, None) => "image to video, Wan2.2-A14B",
            (36, 16, Some(_)) => "image to video, Wan2.1",
            (16, 16, _) => "text to video",
            (48, 48, _) => "text and image to video, Wan2.2-TI2V-5B",
            _ => "unknown",
        }
    }

    /// Reads the sizes from the shapes of the weights (official key names), and checks that every weight is present in
    /// its shape. Fails on a weight that the network does not have, because a variant of the network would compute
    /// something else without it.
    ///
    /// `heads` comes from the checkpoint's `config.json` or from the user. Without it, heads are 128 wide, as in every
    /// published model.
    pub fn from_shapes(shapes: &BTreeMap<String, Vec<usize>>, heads: Option<usize>) -> Result<Self> {
        let weights = WeightShapes { network: "Wan transformer", shapes };
        let [dim, in_channels, pt, ph, pw] = weights.get("patch_embedding.weight")?;
        let patch = [pt, ph, pw];
        let heads = match heads {
            Some(heads) => heads,
            None if dim.is_multiple_of(OFFICIAL_HEAD_DIM) => dim / OFFICIAL_HEAD_DIM,
            None => {
                return Err(Error::Unsupported(format!(
                    "the number of attention heads is unknown: the weights do not contain it, and the width {dim} is not a \
                     multiple of {OFFICIAL_HEAD_DIM}; put a config.json with `num_heads` beside the weights or set \
                     `model.num_heads`"
                )));
            }
        };
        if heads == 0 || !dim.is_multiple_of(2 * heads) {
            return Err(Error::config("num_heads", format!("{heads} heads do not divide the width {dim} into pairs")));
        }
        let volume = pt * ph * pw;
        let [out, _] = weights.get("head.head.weight")?;
        let [_, text_dim] = weights.get("text_embedding.0.weight")?;
        let [_, freq_dim] = weights.get("time_embedding.0.weight")?;
        let [ffn_dim, _] = weights.get("blocks.0.ffn.0.weight")?;
        let config = Self {
            dim,
            in_channels,
            out_channels: out / volume.max(1),
            patch,
            text_dim,
            freq_dim,
            ffn_dim,
            layers: weights.blocks(|i| format!("blocks.{i}.modulation")),
            heads,
            image_dim: if shapes.contains_key("img_emb.proj.1.weight") {
                Some(weights.get::<2>("img_emb.proj.1.weight")?[1])
            } else {
                None
            },
        };
        let expected = config.weights();
        weights.check(&expected)?;
        let expected_keys: BTreeSet<&str> = expected.iter().map(|(key, _)| key.as_str()).collect();
        let is_unknown = |(key, shape): &(&String, &Vec<usize>)| {
            !expected_keys.contains(key.as_str()) && !is_training_state(key, shape)
        };
        if let Some((key, _)) = shapes.iter().find(is_unknown) {
            return Err(Error::Unsupported(format!(
                "the weight `{key}` is not one of a plain Wan transformer: the file is damaged, or of a variant with \
                 further inputs (first-last-frame, VACE, Fun-Control, camera, Animate, speech), which is not supported; \
                 use the T2V, I2V or TI2V checkpoint"
            )));
        }
        Ok(config)
    }

    /// Width of one head.
    pub fn head_dim(&self) -> usize {
        self.dim / self.heads
    }

    /// Number of elements of an input token.
    pub fn patch_in(&self) -> usize {
        self.in_channels * self.patch.iter().product::<usize>()
    }

    /// Number of elements of an output token.
    pub fn patch_out(&self) -> usize {
        self.out_channels * self.patch.iter().product::<usize>()
    }

    /// Name (official) and shape of every weight of the network.
    pub fn weights(&self) -> Vec<(String, Vec<usize>)> {
        let d = self.dim;
        let mut all = Vec::new();
        let mut add = |name: String, shape: &[usize]| all.push((name, shape.to_vec()));
        let mut linear = |name: String, out: usize, input: usize| {
            add(format!("{name}.weight"), &[out, input]);
            add(format!("{name}.bias"), &[out]);
        };
        linear("text_embedding.0".into(), d, self.text_dim);
        linear("text_embedding.2".into(), d, d);
        linear("time_embedding.0".into(), d, self.freq_dim);
        linear("time_embedding.2".into(), d, d);
        linear("time_projection.1".into(), MODULATIONS * d, d);
        linear("head.head".into(), self.patch_out(), d);
        for i in 0..self.layers {
            for attention in ["self_attn", "cross_attn"] {
                for part in ["q", "k", "v", "o"] {
                    linear(format!("blocks.{i}.{attention}.{part}"), d, d);
                }
            }
            linear(format!("blocks.{i}.ffn.0"), self.ffn_dim, d);
            linear(format!("blocks.{i}.ffn.2"), d, self.ffn_dim);
            if self.image_dim.is_some() {
                linear(format!("blocks.{i}.cross_attn.k_img"), d, d);
                linear(format!("blocks.{i}.cross_attn.v_img"), d, d);
            }
        }
        if let Some(image_dim) = self.image_dim {
            linear("img_emb.proj.1".into(), image_dim, image_dim);
            linear("img_emb.proj.3".into(), d, image_dim);
        }
        let [pt, ph, pw] = self.patch;
        add("patch_embedding.weight".into(), &[d, self.in_channels, pt, ph, pw]);
        add("patch_embedding.bias".into(), &[d]);
        add("head.modulation".into(), &[1, 2, d]);
        for i in 0..self.layers {
            add(format!("blocks.{i}.modulation"), &[1, MODULATIONS, d]);
            for norm in ["self_attn.norm_q", "self_attn.norm_k", "cross_attn.norm_q", "cross_attn.norm_k"] {
                add(format!("blocks.{i}.{norm}.weight"), &[d]);
            }
            add(format!("blocks.{i}.norm3.weight"), &[d]);
            add(format!("blocks.{i}.norm3.bias"), &[d]);
            if self.image_dim.is_some() {
                add(format!("blocks.{i}.cross_attn.norm_k_img.weight"), &[d]);
            }
        }
        if let Some(image_dim) = self.image_dim {
            for part in ["weight", "bias"] {
                add(format!("img_emb.proj.0.{part}"), &[image_dim]);
                add(format!("img_emb.proj.4.{part}"), &[d]);
            }
        }
        all
    }
}
