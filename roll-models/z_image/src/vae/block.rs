//! The blocks of the autoencoder, forward and backward. A picture is `[C, 1, H, W]` on the device.
//!
//! A block is pulled back from its input alone ([`Block::pull`]): the block's inner values are computed again, so that
//! only those of one block exist at a time. Convolutions are linear and are not computed again.

use burn_tensor::ops::ConvOptions;
use burn_tensor::{DType, Tensor, module};
use roll_backends::{NdTensor, Tape, Weights, ops, vjp, weights};
use roll_core::Result;
use roll_network::precision::as_dtype;

use super::group_norm::GroupNorm;

/// The computation of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockKind {
    /// A 3 x 3 convolution.
    Conv { input: usize, output: usize },
    /// Twice norm, SiLU and 3 x 3 convolution, plus a shortcut, which is a 1 x 1 convolution if the channels differ.
    Residual { input: usize, output: usize, groups: usize },
    /// Norm and self-attention with one head among all pixels, added to the input.
    Attention { channels: usize, groups: usize },
    /// Halves height and width: 3 x 3 convolution with stride 2, padded below and right.
    Downsample { channels: usize },
    /// Doubles height and width by repetition, then a 3 x 3 convolution.
    Upsample { channels: usize },
    /// Norm, SiLU and 3 x 3 convolution: the end of a network.
    Head { input: usize, output: usize, groups: usize },
}

/// A block and the prefix of its weights' names.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub name: String,
    pub kind: BlockKind,
}

impl Block {
    pub fn new(name: impl Into<String>, kind: BlockKind) -> Self {
        Self { name: name.into(), kind }
    }

    /// Dtype of the block in a network of dtype `network`. Attention and the head stay f32.
    pub fn dtype(&self, network: DType) -> DType {
        match self.kind {
            BlockKind::Attention { .. } | BlockKind::Head { .. } => DType::F32,
            _ => network,
        }
    }

    /// Whether [`Block::pull`] reads the values of the block's input, not only its shape.
    pub fn reads_input(&self) -> bool {
        matches!(self.kind, BlockKind::Residual { .. } | BlockKind::Attention { .. } | BlockKind::Head { .. })
    }

    /// Number of channels of the block's input.
    pub fn input_channels(&self) -> usize {
        match self.kind {
            BlockKind::Conv { input, .. } | BlockKind::Residual { input, .. } | BlockKind::Head { input, .. } => input,
            BlockKind::Attention { channels, .. }
            | BlockKind::Downsample { channels }
            | BlockKind::Upsample { channels } => channels,
        }
    }

    /// Names and shapes of the block's weights.
    pub fn weights(&self) -> Vec<(String, Vec<usize>)> {
        let mut all = Vec::new();
        // A weight and its bias.
        let mut layer = |part: &str, shape: &[usize]| {
            all.push((format!("{}.{part}.weight", self.name), shape.to_vec()));
            all.push((format!("{}.{part}.bias", self.name), shape[..1].to_vec()));
        };
        match self.kind {
            BlockKind::Conv { input, output } => return self.own_weights(&[output, input, 3, 3]),
            BlockKind::Residual { input, output, .. } => {
                layer("norm1", &[input]);
                layer("conv1", &[output, input, 3, 3]);
                layer("norm2", &[output]);
                layer("conv2", &[output, output, 3, 3]);
                if input != output {
                    layer("conv_shortcut", &[output, input, 1, 1]);
                }
            }
            BlockKind::Attention { channels: c, .. } => {
                layer("group_norm", &[c]);
                for part in ["to_q", "to_k", "to_v", "to_out.0"] {
                    layer(part, &[c, c]);
                }
            }
            BlockKind::Downsample { channels: c } | BlockKind::Upsample { channels: c } => layer("conv", &[c, c, 3, 3]),
            BlockKind::Head { input, output, .. } => {
                layer("conv_norm_out", &[input]);
                layer("conv_out", &[output, input, 3, 3]);
            }
        }
        all
    }

    /// The weights of a block that is one layer.
    fn own_weights(&self, shape: &[usize]) -> Vec<(String, Vec<usize>)> {
        let name = &self.name;
        vec![(format!("{name}.weight"), shape.to_vec()), (format!("{name}.bias"), shape[..1].to_vec())]
    }

    /// Computes the block's output. `x` is in the dtype of the block; so is the result.
    pub fn forward(&self, x: Tensor<4>, weights: &Weights) -> Result<Tensor<4>> {
        let layers = Layers { block: &self.name, weights };
        match self.kind {
            BlockKind::Conv { .. } => layers.conv(x, ""),
            BlockKind::Residual { input, output, groups } => {
                let h = layers.norm("norm1", groups)?.apply_silu(x.clone());
                let h = layers.norm("norm2", groups)?.apply_silu(layers.conv(h, "conv1")?);
                let shortcut = if input == output { x } else { layers.pointwise(x, "conv_shortcut")? };
                Ok(shortcut + layers.conv(h, "conv2")?)
            }
            BlockKind::Attention { groups, .. } => layers.attend(x, groups),
            BlockKind::Downsample { .. } => layers.downsample(x),
            BlockKind::Upsample { .. } => layers.conv(double(x), "conv"),
            BlockKind::Head { groups, .. } => {
                layers.conv(layers.norm("conv_norm_out", groups)?.apply_silu(x), "conv_out")
            }
        }
    }

    /// The cotangent of the block's input, given the cotangent of its output. `x` is the input if
    /// [`Block::reads_input`]; `shape` is the input's. All are in the dtype of the block.
    pub fn pull(
        &self,
        x: Option<Tensor<4>>,
        shape: [usize; 4],
        cotangent: Tensor<4>,
        weights: &Weights,
    ) -> Result<Tensor<4>> {
        let layers = Layers { block: &self.name, weights };
        match (self.kind, x) {
            (BlockKind::Conv { .. }, _) => layers.pull_conv(cotangent, ""),
            (BlockKind::Upsample { .. }, _) => Ok(pull_double(layers.pull_conv(cotangent, "conv")?)),
            (BlockKind::Downsample { .. }, _) => {
                // The convolution is linear: its pullback is the same at every input.
                let x = Tensor::zeros(shape, (&cotangent.device(), cotangent.dtype()));
                pull_recorded(x, cotangent, |x| layers.downsample(x))
            }
            (BlockKind::Residual { input, output, groups }, Some(x)) => {
                let (first, second) = (layers.norm("norm1", groups)?, layers.norm("norm2", groups)?);
                let inner = layers.conv(first.clone().apply_silu(x.clone()), "conv1")?;
                let d_inner = second.pull_silu(inner, layers.pull_conv(cotangent.clone(), "conv2")?);
                let d_x = first.pull_silu(x, layers.pull_conv(d_inner, "conv1")?);
                let of_shortcut =
                    if input == output { cotangent } else { layers.pull_pointwise(cotangent, "conv_shortcut")? };
                Ok(d_x + of_shortcut)
            }
            (BlockKind::Attention { groups, .. }, Some(x)) => pull_recorded(x, cotangent, |x| layers.attend(x, groups)),
            (BlockKind::Head { groups, .. }, Some(x)) => {
                Ok(layers.norm("conv_norm_out", groups)?.pull_silu(x, layers.pull_conv(cotangent, "conv_out")?))
            }
            (_, None) => Err(roll_core::Error::Misuse(format!("the input of `{}` was not kept", self.name))),
        }
    }
}

/// Pulls `cotangent` back through `f` at x by autodiff.
fn pull_recorded(
    x: Tensor<4>,
    cotangent: Tensor<4>,
    f: impl FnOnce(Tensor<4>) -> Result<Tensor<4>>,
) -> Result<Tensor<4>> {
    let zeros = x.zeros_like();
    let (_, recorded) = vjp(&[x.into()], Tape::off(), |leaves, _| Ok(vec![f(leaves[0].rank()?)?.into()]))?;
    match recorded.pull(vec![Some(NdTensor::from(cotangent))], None).pop().flatten() {
        Some(d_x) => d_x.rank(),
        None => Ok(zeros),
    }
}

/// The layers of a block.
struct Layers<'a> {
    /// Prefix of the names.
    block: &'a str,
    weights: &'a Weights,
}

impl Layers<'_> {
    /// The weight or bias (`which`) of the layer `part`, as f32; of the block itself if `part` is empty.
    fn get<const D: usize>(&self, part: &str, which: &str) -> Result<Tensor<D>> {
        let separator = if part.is_empty() { "" } else { "." };
        weights::get(self.weights, &format!("{}{separator}{part}.{which}", self.block))?.f32()
    }

    /// The norm `part`.
    fn norm(&self, part: &str, groups: usize) -> Result<GroupNorm> {
        Ok(GroupNorm { groups, gain: self.get(part, "weight")?, bias: self.get(part, "bias")? })
    }

    /// The kernel of a 3 x 3 convolution, `[O, C, 1, 3, 3]`, in `dtype`.
    fn kernel(&self, part: &str, dtype: DType) -> Result<Tensor<5>> {
        Ok(as_dtype(self.get::<4>(part, "weight")?, dtype).unsqueeze_dim(2))
    }

    /// A 3 x 3 convolution with zeros around the picture.
    fn conv(&self, x: Tensor<4>, part: &str) -> Result<Tensor<4>> {
        let (kernel, bias) = (self.kernel(part, x.dtype())?, as_dtype(self.get::<1>(part, "bias")?, x.dtype()));
        Ok(ops::conv3d(x, kernel, Some(bias), PADDING))
    }

    /// The pullback of [`Layers::conv`].
    fn pull_conv(&self, cotangent: Tensor<4>, part: &str) -> Result<Tensor<4>> {
        let kernel = self.kernel(part, cotangent.dtype())?;
        Ok(ops::conv3d_pull(cotangent, kernel, PADDING))
    }

    /// A 1 x 1 convolution.
    fn pointwise(&self, x: Tensor<4>, part: &str) -> Result<Tensor<4>> {
        let ([c, t, h, w], dtype) = (x.dims(), x.dtype());
        let matrix = as_dtype(self.get::<4>(part, "weight")?.flatten::<2>(1, 3), dtype);
        let [outputs, _] = matrix.dims();
        let y = ops::product(matrix, x.reshape([c, t * h * w])) + self.get::<1>(part, "bias")?.reshape([outputs, 1]);
        Ok(as_dtype(y, dtype).reshape([outputs, t, h, w]))
    }

    /// The pullback of [`Layers::pointwise`].
    fn pull_pointwise(&self, cotangent: Tensor<4>, part: &str) -> Result<Tensor<4>> {
        let ([c, t, h, w], dtype) = (cotangent.dims(), cotangent.dtype());
        let matrix = as_dtype(self.get::<4>(part, "weight")?.flatten::<2>(1, 3).transpose(), dtype);
        let [inputs, _] = matrix.dims();
        let d_x = ops::product(matrix, cotangent.reshape([c, t * h * w]));
        Ok(as_dtype(d_x, dtype).reshape([inputs, t, h, w]))
    }

    /// A 3 x 3 convolution with stride 2. Zeros are added below and right only, as in the reference.
    fn downsample(&self, x: Tensor<4>) -> Result<Tensor<4>> {
        let dtype = x.dtype();
        let (kernel, bias) = (as_dtype(self.get::<4>("conv", "weight")?, dtype), self.get::<1>("conv", "bias")?);
        let [c, _, h, w] = x.dims();
        let zeros = |shape: [usize; 4]| Tensor::zeros(shape, (&x.device().without_autodiff(), dtype));
        let (right, below) = (zeros([1, c, h, 1]), zeros([1, c, 1, w + 1]));
        let padded = Tensor::cat(vec![Tensor::cat(vec![x.swap_dims(0, 1), right], 3), below], 2);
        let (stride, padding, dilation, groups) = ([2, 2], [0, 0], [1, 1], 1);
        let options = ConvOptions::new(stride, padding, dilation, groups);
        Ok(module::conv2d(padded, kernel, Some(as_dtype(bias, dtype)), options).swap_dims(0, 1))
    }

    /// Norm, and self-attention with one head among all pixels, added to x.
    fn attend(&self, x: Tensor<4>, groups: usize) -> Result<Tensor<4>> {
        let [c, t, h, w] = x.dims();
        let x_lc = self.norm("group_norm", groups)?.apply(x.clone()).reshape([c, t * h * w]).transpose();
        let linear = |x_lc: Tensor<2>, part: &str| {
            Ok::<_, roll_core::Error>(ops::linear(x_lc, self.get(part, "weight")?, Some(self.get(part, "bias")?)))
        };
        let [q, k, v] = [linear(x_lc.clone(), "to_q")?, linear(x_lc.clone(), "to_k")?, linear(x_lc, "to_v")?];
        let heads = 1;
        let attended = linear(ops::attention(q, k, v, heads), "to_out.0")?;
        Ok(x + attended.transpose().reshape([c, t, h, w]))
    }
}

/// Zeros around a picture: `[time, rows, columns]`.
const PADDING: [usize; 3] = [0, 1, 1];

/// Repeats each pixel of `[C, 1, H, W]` along height and width.
fn double(x: Tensor<4>) -> Tensor<4> {
    let [c, _, h, w] = x.dims();
    let repeated: Tensor<5> = x.reshape([c, h, 1, w, 1]).expand([c, h, 2, w, 2]);
    repeated.reshape([c, 1, 2 * h, 2 * w])
}

/// The pullback of [`double`]: sums of four pixels.
fn pull_double(cotangent: Tensor<4>) -> Tensor<4> {
    let [c, _, h, w] = cotangent.dims();
    let quads: Tensor<5> = cotangent.reshape([c, h / 2, 2, w / 2, 2]);
    quads.sum_dim(4).sum_dim(2).reshape([c, 1, h / 2, w / 2])
}
