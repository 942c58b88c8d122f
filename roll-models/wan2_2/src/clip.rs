//! The CLIP image encoder of Wan2.1 I2V (ViT-H/14 of open-clip's xlm-roberta model): a picture to image tokens, without
//! gradient.
//!
//! Wan uses the output of the second-to-last block, including the class token: `[257, 1280]`.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_tensor::{DType, Device, Tensor as Burn, activation};
use roll_backends::{Scope, Tape, WeightStore, ops, to_device, to_host};
use roll_core::{Error, Result, Tensor};
use roll_network::weights::{Checkpoint, Streamed};

use super::resize::bicubic;
use roll_network::shapes::WeightShapes;

/// Epsilon of every norm.
const EPS: f64 = 1e-5;
/// Prefix of the weights that [`Clip::embed`] reads: `visual.patch_embedding`, `visual.pos_embedding` and
/// `visual.pre_norm`.
const EMBEDDING_PREFIX: &str = "visual.p";

// Mean and standard deviation per colour channel, in [0, 1], of the pictures that CLIP was trained on.
const MEAN: [f32; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
const STD: [f32; 3] = [0.268_629_54, 0.261_302_58, 0.275_777_11];

/// Width of an attention head of ViT-H, which the weights do not contain.
const OFFICIAL_HEAD_DIM: usize = 80;

/// The sizes of the encoder, read from its weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClipConfig {
    /// Width of the tokens.
    pub dim: usize,
    /// Side of a square patch in pixels.
    pub patch: usize,
    /// Number of patches along one side of the picture.
    pub grid: usize,
    /// Width of the feed-forward layer.
    pub ffn_dim: usize,
    /// Number of blocks in the checkpoint. The last block is not run.
    pub layers: usize,
    /// Number of attention heads.
    pub heads: usize,
}

impl ClipConfig {
    /// Reads the sizes from the shapes of the weights (official key names, `visual.*`) and checks the shape of every
    /// weight in use. Without `heads`, heads are 80 wide, as in the published model.
    pub fn from_shapes(shapes: &BTreeMap<String, Vec<usize>>, heads: Option<usize>) -> Result<Self> {
        let weights = WeightShapes { network: "CLIP image encoder", shapes };
        let [dim, _, _, patch] = weights.get("visual.patch_embedding.weight")?;
        let [_, tokens, _] = weights.get("visual.pos_embedding")?;
        let grid = tokens.saturating_sub(1).isqrt();
        if grid * grid + 1 != tokens {
            return Err(Error::shape("the weight `visual.pos_embedding`", "[1, 1 + n * n, dim]", &[1, tokens, dim]));
        }
        let heads = match heads {
            Some(heads) => heads,
            None if dim.is_multiple_of(OFFICIAL_HEAD_DIM) => dim / OFFICIAL_HEAD_DIM,
            // Refused below.
            None => 0,
        };
        if heads == 0 || !dim.is_multiple_of(heads) {
            return Err(Error::Unsupported(format!(
                "CLIP image encoder: expected a width that is a multiple of {OFFICIAL_HEAD_DIM}, found {dim}; the \
                 weights do not contain the number of heads"
            )));
        }
        let [ffn_dim, _] = weights.get("visual.transformer.0.mlp.0.weight")?;
        let layers = weights.blocks(|i| format!("visual.transformer.{i}.norm1.weight"));
        let config = Self { dim, patch, grid, ffn_dim, layers, heads };
        weights.check(&config.weights())?;
        Ok(config)
    }

    /// Number of output tokens: one per patch, and the class token.
    pub fn tokens(&self) -> usize {
        self.grid * self.grid + 1
    }

    /// Name (official) and shape of every weight in use.
    pub fn weights(&self) -> Vec<(String, Vec<usize>)> {
        let &Self { dim, patch, ffn_dim, .. } = self;
        let mut all = vec![
            ("visual.patch_embedding.weight".to_string(), vec![dim, 3, patch, patch]),
            ("visual.cls_embedding".to_string(), vec![1, 1, dim]),
            ("visual.pos_embedding".to_string(), vec![1, self.tokens(), dim]),
        ];
        let mut add = |name: String, shape: &[usize]| {
            all.push((format!("{name}.weight"), shape.to_vec()));
            all.push((format!("{name}.bias"), shape[..1].to_vec()));
        };
        add("visual.pre_norm".into(), &[dim]);
        for i in 0..self.layers {
            let name = |part: &str| format!("visual.transformer.{i}.{part}");
            add(name("norm1"), &[dim]);
            add(name("attn.to_qkv"), &[3 * dim, dim]);
            add(name("attn.proj"), &[dim, dim]);
            add(name("norm2"), &[dim]);
            add(name("mlp.0"), &[ffn_dim, dim]);
            add(name("mlp.2"), &[dim, ffn_dim]);
        }
        all
    }
}

/// The CLIP image encoder.
pub struct Clip {
    config: ClipConfig,
    store: Arc<dyn WeightStore>,
}

impl Clip {
    /// Creates an encoder that streams the weights of `checkpoint` block by block at every [`Clip::encode`]. For
    /// `heads` see [`ClipConfig::from_shapes`].
    pub fn streamed(checkpoint: &Checkpoint, heads: Option<usize>, device: &Device) -> Result<Self> {
        let config = ClipConfig::from_shapes(&checkpoint.shapes(), heads)?;
        Ok(Self::with_store(config, Arc::new(Streamed::new(checkpoint.clone(), device))))
    }

    /// Creates an encoder with the weights of any store.
    pub fn with_store(config: ClipConfig, store: Arc<dyn WeightStore>) -> Self {
        Self { config, store }
    }

    /// The sizes of the network.
    pub fn config(&self) -> &ClipConfig {
        &self.config
    }

    /// Encodes a picture, f32 `[3, H, W]` in [-1, 1], as image tokens, f32 `[tokens, dim]` with the class token first.
    /// Like the reference implementation, it resizes the picture bicubically to a square without keeping the aspect
    /// ratio.
    pub fn encode(&self, picture: &Tensor) -> Result<Tensor> {
        let side = self.config.grid * self.config.patch;
        let mut pixels = bicubic(picture, [side, side])?;
        for (channel, values) in pixels.chunks_exact_mut(side * side).enumerate() {
            // From [-1, 1] to [0, 1], then to mean 0 and deviation 1.
            values.iter_mut().for_each(|v| *v = (*v * 0.5 + 0.5 - MEAN[channel]) / STD[channel]);
        }
        let tape = Tape::off();
        let mut x = self.scoped(EMBEDDING_PREFIX, &tape, |scope| self.embed(scope, &pixels))?;
        for i in 0..self.config.layers.saturating_sub(1) {
            x = self.scoped(&format!("visual.transformer.{i}."), &tape, |scope| self.block(scope, i, x))?;
        }
        to_host(x)
    }

    /// Runs `f` with the weights whose names begin with `prefix`.
    fn scoped<T>(&self, prefix: &str, tape: &Tape, f: impl FnOnce(&Scope<'_>) -> Result<T>) -> Result<T> {
        let weights = self.store.segment(prefix)?;
        f(&Scope { weights: &weights, trainable: None, lora_scale: 1.0, tape, products: DType::F32, fp8: false })
    }

    /// The class token and the patch embedding, plus positions. The convolution of the patch embedding has a stride
    /// equal to its kernel, so it is a product of patches (rows) with the kernel as a matrix.
    fn embed(&self, scope: &Scope<'_>, pixels: &[f32]) -> Result<Burn<2>> {
        let &ClipConfig { dim, patch, grid, .. } = &self.config;
        let side = grid * patch;
        let mut rows = Vec::with_capacity(grid * grid * 3 * patch * patch);
        for (grid_y, grid_x) in (0..grid).flat_map(|y| (0..grid).map(move |x| (y, x))) {
            for (channel, y) in (0..3).flat_map(|c| (0..patch).map(move |y| (c, y))) {
                let start = (channel * side + grid_y * patch + y) * side + grid_x * patch;
                rows.extend_from_slice(&pixels[start..start + patch]);
            }
        }
        let device = self.store.device();
        let rows = to_device::<2>(&Tensor::new(rows, [grid * grid, 3 * patch * patch])?, device)?;
        let kernel = scope.weight::<4>("visual.patch_embedding.weight")?.reshape([dim, 3 * patch * patch]);
        // The class token is outside [`EMBEDDING_PREFIX`].
        let class_segment = self.store.segment("visual.cls_embedding")?;
        let class = roll_backends::weights::get(&class_segment, "visual.cls_embedding")?.f32::<3>()?.reshape([1, dim]);
        let tokens = Burn::cat(vec![class, ops::linear(rows, kernel, None)], 0);
        let position = scope.weight::<3>("visual.pos_embedding")?.reshape([self.config.tokens(), dim]);
        norm(scope, tokens + position, "visual.pre_norm")
    }

    /// Transformer block `i`: self-attention and a feed-forward layer.
    fn block(&self, scope: &Scope<'_>, i: usize, x: Burn<2>) -> Result<Burn<2>> {
        let name = |part: &str| format!("visual.transformer.{i}.{part}");
        let dim = self.config.dim;
        let qkv = scope.linear(norm(scope, x.clone(), &name("norm1"))?, &name("attn.to_qkv"))?;
        let part = |n: usize| qkv.clone().narrow(1, n * dim, dim);
        let attended = ops::attention(part(0), part(1), part(2), self.config.heads);
        let x = x + scope.linear(attended, &name("attn.proj"))?;
        let hidden = activation::gelu(scope.linear(norm(scope, x.clone(), &name("norm2"))?, &name("mlp.0"))?);
        Ok(x + scope.linear(hidden, &name("mlp.2"))?)
    }
}

/// Layer norm with the gain and shift of the layer `name`.
fn norm(scope: &Scope<'_>, x: Burn<2>, name: &str) -> Result<Burn<2>> {
    let gain = scope.weight::<1>(&format!("{name}.weight"))?.unsqueeze();
    let shift = scope.weight::<1>(&format!("{name}.bias"))?.unsqueeze();
    Ok(ops::layer_norm(x, gain, shift, EPS))
}

#[cfg(test)]
#[path = "clip_tests.rs"]
mod tests;
