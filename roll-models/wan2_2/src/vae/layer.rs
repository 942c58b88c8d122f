//! One layer of the encoder's or decoder's chain: its weights and its forward pass on a chunk of frames.

use burn_tensor::{DType, Tensor};
use roll_backends::{Weights, ops, weights};
use roll_core::{Error, Result};

use super::conv::{conv, conv_pull};
use super::layout::ChunkLayout;
use super::rearrange::{Factors, average_down, duplicate_up, pad_bottom_right, patchify, unpatchify};

/// Frames before the chunk that a causal convolution over three frames reads.
pub(super) const PAST_FRAMES: usize = 2;

/// The operation of a layer. Every layer is causal: its caches contain what it needs of the frames before the chunk.
/// `input` and `output` are numbers of channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LayerKind {
    /// Pixel-unshuffle by 2.
    Patchify,
    /// Pixel-shuffle by 2.
    Unpatchify,
    /// Undoes the normalisation of the latents, then a 1x1x1 convolution.
    FromLatents { channels: usize },
    /// The mean half of a 1x1x1 convolution, then the normalisation of the latents.
    ToLatents { channels: usize },
    /// Causal 3x3x3 convolution.
    Conv { input: usize, output: usize },
    /// Norm, SiLU and causal 3x3x3 convolution. `norm` and `conv` are the numbers of the norm and of the convolution in
    /// the checkpoint's keys.
    NormSiluConv { input: usize, output: usize, norm: &'static str, conv: &'static str },
    /// Single-head self-attention within each frame, with a residual connection.
    Attention { channels: usize },
    /// Doubles height and width, and time if `doubles_time`.
    Upsample { input: usize, output: usize, doubles_time: bool },
    /// Halves height and width, and time if `halves_time`.
    Downsample { channels: usize, halves_time: bool },
    /// Stores its input for the shortcut at the end of the block.
    Branch,
    /// Adds the stored input, after a 1x1x1 convolution if the channels differ.
    AddResidual { input: usize, output: usize },
    /// Adds the stored input, averaged over blocks.
    AddAverage { input: usize, factors: Factors },
    /// Adds the stored input, duplicated into blocks.
    AddDuplicate { input: usize, factors: Factors },
}

/// Mean and standard deviation of each latent channel, `[C, 1, 1, 1]` on the device.
#[derive(Clone, Debug)]
pub(super) struct Statistics {
    pub mean: Tensor<4>,
    pub std: Tensor<4>,
}

/// A layer and the prefix of its weights' keys.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    pub name: String,
    pub kind: LayerKind,
}

/// The operands of a layer besides its input and its caches.
pub(super) struct LayerContext<'a> {
    pub weights: &'a Weights,
    pub statistics: &'a Statistics,
    /// Whether this is the first chunk of a video: one frame without predecessors. The chunk may also consist of
    /// several such frames, each of another video.
    pub is_first_chunk: bool,
    /// Memory order of a chunk's axes.
    pub layout: ChunkLayout,
}

/// A layer's caches: the last frames that the layer (`time_conv`, if the layer has several convolutions) read in
/// previous chunks. `None` means frames of zeros.
pub(super) type Caches = Vec<Option<Tensor<4>>>;

impl Layer {
    pub fn new(name: impl Into<String>, kind: LayerKind) -> Self {
        Self { name: name.into(), kind }
    }

    /// The dtype of the layer's computation in a network of the dtype `network`. Latents, frames and
    /// attention (whose products are small) stay f32. Rounding a frame to bf16 would change it by up to half a step of
    /// eight bits.
    pub fn dtype(&self, network: DType) -> DType {
        match self.kind {
            LayerKind::FromLatents { .. } | LayerKind::ToLatents { .. } | LayerKind::Attention { .. } => DType::F32,
            LayerKind::Patchify | LayerKind::Unpatchify => DType::F32,
            LayerKind::NormSiluConv { .. } if self.name.ends_with(".head") => DType::F32,
            _ => network,
        }
    }

    /// Number of caches.
    pub fn cache_count(&self) -> usize {
        match self.kind {
            LayerKind::Conv { .. } | LayerKind::NormSiluConv { .. } => 1,
            LayerKind::Upsample { doubles_time, .. } => doubles_time.into(),
            LayerKind::Downsample { halves_time, .. } => halves_time.into(),
            _ => 0,
        }
    }

    /// Keys and shapes of the layer's weights.
    pub fn weights(&self) -> Vec<(String, Vec<usize>)> {
        let mut all = Vec::new();
        let mut add = |part: &str, shape: &[usize]| all.push((self.key(part), shape.to_vec()));
        let mut convolution = |part: &str, shape: &[usize]| {
            add(&join(part, "weight"), shape);
            add(&join(part, "bias"), &shape[..1]);
        };
        match self.kind {
            LayerKind::FromLatents { channels: c } => convolution("", &[c, c, 1, 1, 1]),
            LayerKind::ToLatents { channels: c } => convolution("", &[2 * c, 2 * c, 1, 1, 1]),
            LayerKind::Conv { input, output } => convolution("", &[output, input, 3, 3, 3]),
            LayerKind::NormSiluConv { input, output, norm, conv } => {
                convolution(conv, &[output, input, 3, 3, 3]);
                add(&format!("{norm}.gamma"), &[input, 1, 1, 1]);
            }
            LayerKind::AddResidual { input, output } if input != output => {
                convolution("shortcut", &[output, input, 1, 1, 1]);
            }
            LayerKind::Attention { channels: c } => {
                convolution("to_qkv", &[3 * c, c, 1, 1]);
                convolution("proj", &[c, c, 1, 1]);
                add("norm.gamma", &[c, 1, 1]);
            }
            LayerKind::Upsample { input, output, doubles_time } => {
                convolution("resample.1", &[output, input, 3, 3]);
                if doubles_time {
                    convolution("time_conv", &[2 * input, input, 3, 1, 1]);
                }
            }
            LayerKind::Downsample { channels: c, halves_time } => {
                convolution("resample.1", &[c, c, 3, 3]);
                if halves_time {
                    convolution("time_conv", &[c, c, 3, 1, 1]);
                }
            }
            LayerKind::Patchify
            | LayerKind::Unpatchify
            | LayerKind::Branch
            | LayerKind::AddResidual { .. }
            | LayerKind::AddAverage { .. }
            | LayerKind::AddDuplicate { .. } => {}
        }
        all
    }

    /// Fails unless the channels of a shortcut without weights divide evenly.
    pub fn check(&self) -> Result<()> {
        let (from, to) = match self.kind {
            LayerKind::AddAverage { input, factors: f } => (input * f.time * f.space * f.space, f.channels),
            LayerKind::AddDuplicate { input, factors: f } => (f.channels * f.time * f.space * f.space, input),
            _ => return Ok(()),
        };
        if to == 0 || !from.is_multiple_of(to) {
            return Err(Error::Unsupported(format!(
                "the shortcut of `{}` cannot turn {from} block values into {to} channels evenly",
                self.name
            )));
        }
        Ok(())
    }

    /// Computes the layer's output on a chunk `[C, T, H, W]`, and its caches for the next chunk. The chain itself
    /// handles [`LayerKind::Branch`] and the shortcuts.
    pub fn forward(&self, x: Tensor<4>, caches: Caches, context: &LayerContext<'_>) -> Result<(Tensor<4>, Caches)> {
        // No layer has more than one cache.
        let cache = caches.into_iter().next().flatten();
        match self.kind {
            LayerKind::Patchify => Ok((patchify(x), vec![])),
            LayerKind::Unpatchify => Ok((unpatchify(x), vec![])),
            LayerKind::FromLatents { .. } => {
                let Statistics { mean, std } = context.statistics;
                Ok((self.conv(x * std.clone() + mean.clone(), "", [1, 1, 1], 0, context)?, vec![]))
            }
            LayerKind::ToLatents { channels } => {
                let matrix = self.weight::<5>("weight", context)?.narrow(0, 0, channels).flatten::<2>(1, 4);
                let bias = self.weight::<1>("bias", context)?.narrow(0, 0, channels);
                let Statistics { mean, std } = context.statistics;
                Ok(((context.layout.pointwise(x, matrix, bias) - mean.clone()) / std.clone(), vec![]))
            }
            LayerKind::Conv { .. } => self.convolve(x, cache, "", context),
            LayerKind::NormSiluConv { norm, conv, .. } => {
                let gamma = self.gamma(norm, context)?;
                if context.layout == ChunkLayout::ChannelsLast && !context.is_first_chunk {
                    // One operator computes norm and SiLU and writes the result after the cached frames.
                    let extended = ops::channel_norm_silu_after(past(cache, &x, PAST_FRAMES), x, gamma);
                    return self.convolve_extended(extended, conv, context);
                }
                self.convolve(ops::channel_norm_silu(x, gamma), cache, conv, context)
            }
            LayerKind::Attention { channels } => Ok((self.attend(x, channels, context)?, vec![])),
            LayerKind::Upsample { doubles_time, .. } => self.upsample(x, doubles_time, cache, context),
            LayerKind::Downsample { halves_time, .. } => self.downsample(x, halves_time, cache, context),
            LayerKind::Branch
            | LayerKind::AddResidual { .. }
            | LayerKind::AddAverage { .. }
            | LayerKind::AddDuplicate { .. } => Ok((x, vec![])),
        }
    }

    /// Computes the term that a shortcut adds. `branched` is the input of the shortcut's block.
    pub fn shortcut(&self, branched: Tensor<4>, context: &LayerContext<'_>) -> Result<Tensor<4>> {
        match self.kind {
            LayerKind::AddAverage { factors, .. } => Ok(average_down(branched, factors)),
            LayerKind::AddDuplicate { factors, .. } => Ok(duplicate_up(branched, factors, context.is_first_chunk)),
            LayerKind::AddResidual { input, output } if input != output => {
                self.conv(branched, "shortcut", [1, 1, 1], 0, context)
            }
            _ => Ok(branched),
        }
    }

    /// The pullback of the convolution in [`LayerKind::Conv`] and [`LayerKind::NormSiluConv`]; the convolution does not
    /// run again. `after` is the cotangent of the cache that the layer leaves for the next chunk. Returns the cotangent
    /// of the cache that the layer read (`None` in the first chunk), and the cotangent of the convolution's input (for
    /// `NormSiluConv`, after norm and SiLU).
    pub fn pull_convolution(
        &self,
        cotangent: Tensor<4>,
        after: Option<Tensor<4>>,
        context: &LayerContext<'_>,
    ) -> Result<(Option<Tensor<4>>, Tensor<4>)> {
        let part = if let LayerKind::NormSiluConv { conv, .. } = self.kind { conv } else { "" };
        let kernel = self.kernel(part, context)?;
        let frames = cotangent.dims()[1];
        if context.is_first_chunk {
            let x = conv_pull(cotangent, last_tap(kernel), [1, 1]);
            // The cache is zeros and the chunk's last frame (see `convolve`).
            let after_last_frame = after.map(|after| after.narrow(1, PAST_FRAMES - 1, 1));
            return Ok((None, context.layout.add_to_end(x, after_last_frame)));
        }
        // The cotangent of the cached frames followed by the chunk.
        let extended = context.layout.add_to_end(conv_pull(cotangent, kernel, [1, 1]), after);
        Ok((Some(extended.clone().narrow(1, 0, PAST_FRAMES)), extended.narrow(1, PAST_FRAMES, frames)))
    }

    /// The pullback of [`LayerKind::Upsample`], which is linear as a whole. Arguments and result are like those of
    /// [`Layer::pull_convolution`].
    pub fn pull_upsample(
        &self,
        cotangent: Tensor<4>,
        after: Option<Tensor<4>>,
        context: &LayerContext<'_>,
    ) -> Result<(Option<Tensor<4>>, Tensor<4>)> {
        let doubled = conv_pull(cotangent, self.kernel("resample.1", context)?, [1, 1]);
        let x = context.layout.double_pull(doubled);
        // Time was not doubled.
        if context.is_first_chunk || self.cache_count() == 0 {
            return Ok((None, x));
        }
        let pairs = context.layout.interleave_pull(x);
        let frames = pairs.dims()[1];
        // The cotangent of the cached frames followed by the chunk.
        let extended = conv_pull(pairs, self.kernel("time_conv", context)?, [0, 0]);
        let extended = context.layout.add_to_end(extended, after);
        Ok((Some(extended.clone().narrow(1, 0, PAST_FRAMES)), extended.narrow(1, PAST_FRAMES, frames)))
    }

    /// Returns the causal convolution over three frames, and the cache for the next chunk: the last two frames of the
    /// cached frames followed by the chunk. Frames before the first chunk are zero, so only the kernel's last tap
    /// contributes in the first chunk. Hence several frames of a first chunk are independent stills.
    fn convolve(
        &self,
        x: Tensor<4>,
        cache: Option<Tensor<4>>,
        part: &str,
        context: &LayerContext<'_>,
    ) -> Result<(Tensor<4>, Caches)> {
        let [c, t, h, w] = x.dims();
        if context.is_first_chunk {
            let bias = self.weight::<1>(&join(part, "bias"), context)?;
            let kernel = self.kernel(part, context)?;
            let zeros = Tensor::zeros([c, PAST_FRAMES - 1, h, w], (&x.device(), x.dtype()));
            let next = context.layout.concat(vec![zeros, x.clone().narrow(1, t - 1, 1)]);
            return Ok((conv(x, last_tap(kernel), bias, [1, 1, 1], [1, 1], context.layout), vec![Some(next)]));
        }
        self.convolve_extended(context.layout.concat(vec![past(cache, &x, PAST_FRAMES), x]), part, context)
    }

    /// Computes [`Layer::convolve`] after the first chunk. `extended` are the cached frames followed by the chunk.
    fn convolve_extended(
        &self,
        extended: Tensor<4>,
        part: &str,
        context: &LayerContext<'_>,
    ) -> Result<(Tensor<4>, Caches)> {
        let bias = self.weight::<1>(&join(part, "bias"), context)?;
        let next = extended.clone().narrow(1, extended.dims()[1] - PAST_FRAMES, PAST_FRAMES);
        let y = conv(extended, self.kernel(part, context)?, bias, [1, 1, 1], [1, 1], context.layout);
        Ok((y, vec![Some(next)]))
    }

    /// Whether probes see the layer's output. Outputs inside a residual block are excluded.
    pub fn is_probed(&self) -> bool {
        self.kind != LayerKind::Branch && !self.name.ends_with(".residual")
    }

    /// Upsampling. The time axis of the first chunk, a single frame, is not doubled. The second chunk has zeros before
    /// it instead of the first chunk, as in training: the first chunk leaves the cache `None`.
    fn upsample(
        &self,
        x: Tensor<4>,
        doubles_time: bool,
        cache: Option<Tensor<4>>,
        context: &LayerContext<'_>,
    ) -> Result<(Tensor<4>, Caches)> {
        let (x, caches) = if !doubles_time {
            (x, vec![])
        } else if context.is_first_chunk {
            (x, vec![None])
        } else {
            let (extended, next) = extend(cache, x, PAST_FRAMES, context.layout);
            let pairs = self.conv(extended, "time_conv", [1, 1, 1], 0, context)?;
            (context.layout.interleave(pairs), vec![Some(next)])
        };
        Ok((self.conv(context.layout.double(x), "resample.1", [1, 1, 1], 1, context)?, caches))
    }

    /// Downsampling. The time axis of the first chunk, a single frame, is not halved.
    fn downsample(
        &self,
        x: Tensor<4>,
        halves_time: bool,
        cache: Option<Tensor<4>>,
        context: &LayerContext<'_>,
    ) -> Result<(Tensor<4>, Caches)> {
        let x = self.conv(pad_bottom_right(x), "resample.1", [1, 2, 2], 0, context)?;
        if !halves_time {
            return Ok((x, vec![]));
        }
        if context.is_first_chunk {
            return Ok((x.clone(), vec![Some(x)]));
        }
        // The kernel has three frames and the stride is 2, so one earlier frame suffices.
        let (extended, next) = extend(cache, x, 1, context.layout);
        Ok((self.conv(extended, "time_conv", [2, 1, 1], 0, context)?, vec![Some(next)]))
    }

    /// Self-attention with one head among the positions of each frame, added to `x`.
    fn attend(&self, x: Tensor<4>, channels: usize, context: &LayerContext<'_>) -> Result<Tensor<4>> {
        let [c, t, h, w] = x.dims();
        let normed = ops::channel_norm(x.clone(), self.gamma("norm", context)?);
        let matrix = self.weight::<4>("to_qkv.weight", context)?.flatten::<2>(1, 3);
        let qkv = context.layout.pointwise(normed, matrix, self.weight::<1>("to_qkv.bias", context)?);
        let frames = (0..t).map(|frame| {
            // One of queries, keys and values, `[positions, channels]`.
            let operand = |index: usize| {
                let operand = qkv.clone().narrow(0, index * channels, channels).narrow(1, frame, 1);
                operand.reshape([channels, h * w]).transpose()
            };
            let heads = 1;
            ops::attention(operand(0), operand(1), operand(2), heads).transpose().reshape([c, 1, h, w])
        });
        let attended = Tensor::cat(frames.collect(), 1);
        let matrix = self.weight::<4>("proj.weight", context)?.flatten::<2>(1, 3);
        Ok(x + context.layout.pointwise(attended, matrix, self.weight::<1>("proj.bias", context)?))
    }

    /// A convolution with the weights of `part`. The caller pads in time; `padding` is the zeros on each side of height
    /// and width.
    fn conv(
        &self,
        x: Tensor<4>,
        part: &str,
        stride: [usize; 3],
        padding: usize,
        context: &LayerContext<'_>,
    ) -> Result<Tensor<4>> {
        let bias = self.weight::<1>(&join(part, "bias"), context)?;
        Ok(conv(x, self.kernel(part, context)?, bias, stride, [padding, padding], context.layout))
    }

    /// A kernel `[O, C, kt, kh, kw]`. Kernels without a time axis have `kt` 1.
    fn kernel(&self, part: &str, context: &LayerContext<'_>) -> Result<Tensor<5>> {
        let key = self.key(&join(part, "weight"));
        let weight = weights::get(context.weights, &key)?;
        match weight.shape().len() {
            // Without a time axis.
            4 => Ok(weight.f32::<4>()?.unsqueeze_dim(2)),
            _ => weight.f32::<5>(),
        }
    }

    /// The scale of the norm `part`, `[C]`.
    pub fn gamma(&self, part: &str, context: &LayerContext<'_>) -> Result<Tensor<1>> {
        let weight = weights::get(context.weights, &self.key(&join(part, "gamma")))?;
        match weight.shape().len() {
            // The norm of an attention: `[C, 1, 1]`.
            3 => Ok(weight.f32::<3>()?.flatten(0, 2)),
            // Other norms: `[C, 1, 1, 1]`.
            _ => Ok(weight.f32::<4>()?.flatten(0, 3)),
        }
    }

    /// The weight with the key `{layer}.{part}`, in f32.
    fn weight<const D: usize>(&self, part: &str, context: &LayerContext<'_>) -> Result<Tensor<D>> {
        weights::get(context.weights, &self.key(part))?.f32()
    }

    /// The key of the weight `part`.
    fn key(&self, part: &str) -> String {
        format!("{}.{part}", self.name)
    }
}

/// `{part}.{last}`. The part is empty if the layer is a single convolution.
fn join(part: &str, last: &str) -> String {
    match part {
        "" => last.to_string(),
        _ => format!("{part}.{last}"),
    }
}

/// The part of a kernel `[O, C, kt, kh, kw]` that applies to the newest frame.
fn last_tap(kernel: Tensor<5>) -> Tensor<5> {
    let frames = kernel.dims()[2];
    kernel.narrow(2, frames - 1, 1)
}

/// Appends `x` to `count` cached frames, or to zeros if nothing is cached. Returns all frames, and the last `count`.
fn extend(cache: Option<Tensor<4>>, x: Tensor<4>, count: usize, layout: ChunkLayout) -> (Tensor<4>, Tensor<4>) {
    let frames = x.dims()[1];
    let extended = layout.concat(vec![past(cache, &x, count), x]);
    let next = extended.clone().narrow(1, frames, count);
    (extended, next)
}

/// The cached frames, or `count` frames of zeros if nothing is cached.
fn past(cache: Option<Tensor<4>>, x: &Tensor<4>, count: usize) -> Tensor<4> {
    let [c, _, h, w] = x.dims();
    cache.unwrap_or_else(|| Tensor::zeros([c, count, h, w], (&x.device(), x.dtype())))
}
