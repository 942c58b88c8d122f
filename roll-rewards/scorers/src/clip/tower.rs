//! The layers of a tower as segments of a chain: the embedding of patches, transformer layers (which the text tower
//! also uses), and the pooling to an embedding. The backward pass recomputes one layer at a time.

use burn_tensor::{DType, Device, Tensor as Burn, activation};
use roll_backends::ops::{self, AttentionOptions};
use roll_backends::{NdTensor, Scope, Segment, Tape, Weights};
use roll_core::{Error, Result};

use super::config::{Activation, Family, VisionConfig};
use super::files::Tensors;

/// The sizes and options that all transformer layers of a tower have in common.
#[derive(Clone, Copy, Debug)]
pub struct TowerDims {
    /// Width of a token.
    pub width: usize,
    /// Width of the feed-forward layers.
    pub hidden: usize,
    /// Number of attention heads.
    pub heads: usize,
    /// Activation function of the feed-forward layers.
    pub activation: Activation,
    /// Epsilon of the layer norms.
    pub eps: f64,
    /// Whether attention is causal.
    pub is_causal: bool,
}

/// One transformer layer, on `[items * tokens, width]`.
pub struct Layer {
    weights: Weights,
    name: String,
    dims: TowerDims,
    /// Number of tokens per item.
    tokens: usize,
}

impl Layer {
    /// Loads the layer `name` for items of `tokens` tokens.
    pub fn load(tensors: &Tensors, name: String, dims: TowerDims, tokens: usize, device: &Device) -> Result<Self> {
        let TowerDims { width, hidden, .. } = dims;
        let mut wanted = Vec::new();
        for layer_norm in ["layer_norm1", "layer_norm2"] {
            wanted.extend(weight_and_bias(&format!("{name}.{layer_norm}"), &[width]));
        }
        for projection in ["q_proj", "k_proj", "v_proj", "out_proj"] {
            wanted.extend(weight_and_bias(&format!("{name}.self_attn.{projection}"), &[width, width]));
        }
        wanted.extend(weight_and_bias(&format!("{name}.mlp.fc1"), &[hidden, width]));
        wanted.extend(weight_and_bias(&format!("{name}.mlp.fc2"), &[width, hidden]));
        Ok(Self { weights: tensors.weights(&wanted, device)?, name, dims, tokens })
    }

    /// Computes the layer's output for `x`, `[items * tokens, width]`. Tokens attend to tokens of their own item.
    /// `tokens` may differ from the number that [`Layer::load`] received, because texts differ in length.
    pub fn run(&self, x: Burn<2>, tokens: usize, tape: &Tape) -> Result<Burn<2>> {
        let TowerDims { heads, is_causal, eps, .. } = self.dims;
        let scope = frozen_scope(&self.weights, tape);
        let full_name = |name: &str| format!("{}.{name}", self.name);
        let normed = norm(&scope, x.clone(), &full_name("layer_norm1"), eps)?;
        let project = |projection: &str| scope.linear(normed.clone(), &full_name(&format!("self_attn.{projection}")));
        let (q, k, v) = (project("q_proj")?, project("k_proj")?, project("v_proj")?);
        let items = x.dims()[0] / tokens;
        let attended = (0..items).map(|i| {
            let rows_of_item = |x: &Burn<2>| x.clone().narrow(0, i * tokens, tokens);
            let options = AttentionOptions { causal: is_causal, ..Default::default() };
            ops::attention_with(rows_of_item(&q), rows_of_item(&k), rows_of_item(&v), heads, options)
        });
        let x = x + scope.linear(Burn::cat(attended.collect(), 0), &full_name("self_attn.out_proj"))?;
        let hidden = scope.linear(norm(&scope, x.clone(), &full_name("layer_norm2"), eps)?, &full_name("mlp.fc1"))?;
        Ok(x + scope.linear(activated(hidden, self.dims.activation), &full_name("mlp.fc2"))?)
    }
}

impl Segment for Layer {
    fn forward(&self, state: &NdTensor, _: &[NdTensor], tape: &Tape) -> Result<NdTensor> {
        Ok(self.run(state.rank::<2>()?, self.tokens, tape)?.into())
    }
}

/// Factor in QuickGELU, `x * sigmoid(1.702 x)`.
const QUICK_GELU_SLOPE: f64 = 1.702;

/// Applies the activation function of a feed-forward layer.
pub fn activated(x: Burn<2>, activation: Activation) -> Burn<2> {
    match activation {
        Activation::QuickGelu => ops::silu(x * QUICK_GELU_SLOPE) / QUICK_GELU_SLOPE,
        Activation::Gelu => activation::gelu(x),
        Activation::GeluPytorchTanh => ops::gelu_tanh(x),
    }
}

/// The patch embedding of pictures `[N, 3, side, side]`, with CLIP's class token in front.
pub struct Embed {
    weights: Weights,
    family: Family,
    /// Width of a token.
    width: usize,
    /// Side of a patch in pixels.
    patch: usize,
    /// Number of patches along a side of the picture.
    grid: usize,
    /// Epsilon of CLIP's layer norm.
    eps: f64,
}

/// Prefix of the embedding's weights.
const EMBEDDINGS: &str = "vision_model.embeddings";
/// Name of the norm after the embedding, misspelled in `transformers`.
const PRE_NORM: &str = "vision_model.pre_layrnorm";

impl Embed {
    /// Loads the embedding for the pictures of `config`.
    pub fn load(tensors: &Tensors, family: Family, config: &VisionConfig, device: &Device) -> Result<Self> {
        let (width, patch) = (config.hidden_size, config.patch_size);
        let (grid, eps) = (config.image_size / patch, config.layer_norm_eps);
        let mut embed = Self { weights: Weights::default(), family, width, patch, grid, eps };
        let mut wanted = vec![
            (format!("{EMBEDDINGS}.patch_embedding.weight"), vec![width, 3, patch, patch]),
            (format!("{EMBEDDINGS}.position_embedding.weight"), vec![embed.tokens(), width]),
        ];
        match family {
            Family::Clip => {
                wanted.push((format!("{EMBEDDINGS}.class_embedding"), vec![width]));
                wanted.extend(weight_and_bias(PRE_NORM, &[width]));
            }
            Family::Siglip => wanted.push((format!("{EMBEDDINGS}.patch_embedding.bias"), vec![width])),
        }
        embed.weights = tensors.weights(&wanted, device)?;
        Ok(embed)
    }

    /// Number of tokens per picture.
    pub fn tokens(&self) -> usize {
        self.grid * self.grid + usize::from(self.family == Family::Clip)
    }
}

impl Segment for Embed {
    fn forward(&self, state: &NdTensor, _: &[NdTensor], tape: &Tape) -> Result<NdTensor> {
        let (g, p, width) = (self.grid, self.patch, self.width);
        let scope = frozen_scope(&self.weights, tape);
        let pixels = state.rank::<4>()?;
        let [items, ..] = pixels.dims();
        if pixels.dims() != [items, 3, g * p, g * p] {
            return Err(Error::shape("pictures for CLIP", format!("[N, 3, {0}, {0}]", g * p), state.shape()));
        }
        // The convolution's stride equals its kernel, so it is a product of patches (rows) with the kernel as a matrix.
        let rows =
            pixels.reshape([items, 3, g, p, g, p]).permute([0, 2, 4, 1, 3, 5]).reshape([items * g * g, 3 * p * p]);
        let kernel = scope.weight::<4>(&format!("{EMBEDDINGS}.patch_embedding.weight"))?.reshape([width, 3 * p * p]);
        let bias = scope.optional::<1>(&format!("{EMBEDDINGS}.patch_embedding.bias"))?;
        let patches = ops::linear(rows, kernel, bias).reshape([items, g * g, width]);
        let positions = scope.weight::<2>(&format!("{EMBEDDINGS}.position_embedding.weight"))?.unsqueeze::<3>();
        if self.family == Family::Siglip {
            return Ok((patches + positions).reshape([items * self.tokens(), width]).into());
        }
        let class = scope.weight::<1>(&format!("{EMBEDDINGS}.class_embedding"))?.reshape([1, 1, width]);
        let tokens = Burn::cat(vec![class.repeat_dim(0, items), patches], 1);
        let x = (tokens + positions).reshape([items * self.tokens(), width]);
        Ok(norm(&scope, x, PRE_NORM, self.eps)?.into())
    }
}

/// The end of CLIP's image tower: the projected class token, `[N, projection]`, or the output of a head on it.
pub struct Pool {
    weights: Weights,
    /// Number of tokens per item.
    tokens: usize,
    eps: f64,
    head: Option<Head>,
}

impl Pool {
    /// Loads the layer for items of `tokens` tokens. `width` is the width of a token, `projection` the width of an
    /// embedding.
    pub fn load(
        tensors: &Tensors,
        [width, projection]: [usize; 2],
        tokens: usize,
        eps: f64,
        head: Option<Head>,
        device: &Device,
    ) -> Result<Self> {
        let mut wanted = vec![("visual_projection.weight".to_string(), vec![projection, width])];
        wanted.extend(weight_and_bias("vision_model.post_layernorm", &[width]));
        Ok(Self { weights: tensors.weights(&wanted, device)?, tokens, eps, head })
    }
}

impl Segment for Pool {
    fn forward(&self, state: &NdTensor, _: &[NdTensor], tape: &Tape) -> Result<NdTensor> {
        let scope = frozen_scope(&self.weights, tape);
        let x = state.rank::<2>()?;
        let [rows, width] = x.dims();
        let items = rows / self.tokens;
        let class = x.reshape([items, self.tokens, width]).narrow(1, 0, 1).reshape([items, width]);
        let embedding =
            scope.linear(norm(&scope, class, "vision_model.post_layernorm", self.eps)?, "visual_projection")?;
        match &self.head {
            Some(head) => Ok(head.run(embedding)?.into()),
            None => Ok(embedding.into()),
        }
    }
}

/// Linear layers on the normalised embedding: the head of an aesthetic predictor.
pub struct Head {
    /// Weight and bias of each layer.
    layers: Vec<(Burn<2>, Burn<1>)>,
}

impl Head {
    /// Loads the layers of a safetensors file: `weight` and `bias`, or `layers.N.weight` and `layers.N.bias` by
    /// ascending N. Fails unless they map `width` numbers to one.
    pub fn load(tensors: &Tensors, width: usize, device: &Device) -> Result<Self> {
        // The last number in a name is the number of the layer; 0 for a name without one.
        let number = |stem: &str| stem.split('.').filter_map(|part| part.parse().ok()).next_back().unwrap_or(0);
        let stems = tensors.names().filter_map(|name| name.strip_suffix("weight"));
        let mut names: Vec<(usize, &str)> = stems.map(|stem| (number(stem), stem)).collect();
        names.sort();
        let (mut layers, mut inputs) = (Vec::new(), width);
        for (_, stem) in names {
            let weight = format!("{stem}weight");
            let bias = format!("{stem}bias");
            let outputs = tensors.shape(&weight).and_then(|s| s.first().copied()).unwrap_or(0);
            let wanted = [(weight.clone(), vec![outputs, inputs]), (bias.clone(), vec![outputs])];
            let loaded = tensors.weights(&wanted, device)?;
            layers.push((loaded[&weight].f32()?, loaded[&bias].f32()?));
            inputs = outputs;
        }
        if layers.is_empty() || inputs != 1 {
            let expected = format!("layers from {width} to 1");
            return Err(Error::shape("the head of an aesthetic predictor", expected, &[inputs]));
        }
        Ok(Self { layers })
    }

    /// Maps embeddings `[N, width]`, which it normalises first, to scores `[N, 1]`.
    pub fn run(&self, x: Burn<2>) -> Result<Burn<2>> {
        let length = x.clone().powi_scalar(2).sum_dim(1).sqrt();
        let unit = x / length;
        Ok(self.layers.iter().fold(unit, |x, (weight, bias)| ops::linear(x, weight.clone(), Some(bias.clone()))))
    }
}

/// Names and shapes of a layer's weight and bias. The bias has the length of the weight's first axis.
pub fn weight_and_bias(name: &str, shape: &[usize]) -> [(String, Vec<usize>); 2] {
    [(format!("{name}.weight"), shape.to_vec()), (format!("{name}.bias"), shape[..1].to_vec())]
}

/// A scope over frozen f32 weights.
pub fn frozen_scope<'a>(weights: &'a Weights, tape: &'a Tape) -> Scope<'a> {
    Scope { weights, trainable: None, lora_scale: 1.0, tape, products: DType::F32, fp8: false }
}

/// Applies the layer norm `name`.
pub fn norm(scope: &Scope<'_>, x: Burn<2>, name: &str, eps: f64) -> Result<Burn<2>> {
    let gain = scope.weight::<1>(&format!("{name}.weight"))?.unsqueeze();
    let shift = scope.weight::<1>(&format!("{name}.bias"))?.unsqueeze();
    Ok(ops::layer_norm(x, gain, shift, eps))
}
