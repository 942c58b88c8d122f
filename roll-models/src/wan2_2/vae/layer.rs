//! One layer of the encoder's or decoder's chain: its weights and its forward pass on a chunk of frames.

use burn::tensor::{DType, Tensor};
use roll_backends::{Weights, ops, weights};
use roll_core::{Error, Result};

use super::conv::{conv, conv_pull};
use super::layout::Layout;
use super::rearrange::{Factors, average_down, duplicate_up, pad_bottom_right, patchify, unpatchify};

/// Frames of the previous chunk that a causal convolution over three frames reads.
pub(super) const CONTEXT: usize = 2;

/// The operation of a layer. Every layer is causal: its caches contain what it needs of the frames before the chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
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
    /// Norm, SiLU and causal 3x3x3 convolution. `parts` are the numbers of norm and convolution in the checkpoint's
    /// keys.
    Activated { input: usize, output: usize, parts: [usize; 2] },
    /// Single-head self-attention within each frame, with a residual connection.
    Attention { channels: usize },
    /// Doubles height and width, and time if `temporal`.
    Upsample { input: usize, output: usize, temporal: bool },
    /// Halves height and width, and time if `temporal`.
    Downsample { channels: usize, temporal: bool },
    /// Stores its input for the shortcut at the end of the block.
    Branch,
    /// Adds the stored input, after a 1x1x1 convolution if the channels differ.
    AddResidual { input: usize, output: usize },
    /// Adds the stored input, averaged over blocks.
    AddAverage { input: usize, factors: Factors },
    /// Adds the stored input, duplicated into blocks.
    AddDuplicate { input: usize, factors: Factors },
}

/// Mean and standard deviation of each latent channel, `[C]` on the device.
#[derive(Clone, Debug)]
pub(super) struct Statistics {
    pub mean: Tensor<1>,
    pub std: Tensor<1>,
}

/// A layer and the prefix of its weights' keys.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    name: String,
    kind: Kind,
}

/// The operands of a layer besides its input.
pub(super) struct Surroundings<'a> {
    pub weights: &'a Weights,
    pub statistics: &'a Statistics,
    /// Whether this is the first chunk of a video: one frame without predecessors. It may also be several such frames
    /// of different videos.
    pub first: bool,
    /// Memory order of a chunk's axes.
    pub layout: Layout,
}

/// A layer's caches: frames of previous chunks, or `None` before the first.
pub(super) type Caches = Vec<Option<Tensor<4>>>;

impl Layer {
    pub fn new(name: impl Into<String>, kind: Kind) -> Self {
        Self { name: name.into(), kind }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The dtype of the layer's computation in a network of `dtype`. Latents, frames and attention (whose products are
    /// small) stay f32: rounding a frame to bf16 would change it by up to half a step of eight bits.
    pub fn dtype(&self, dtype: DType) -> DType {
        match self.kind {
            Kind::FromLatents { .. } | Kind::ToLatents { .. } | Kind::Attention { .. } => DType::F32,
            Kind::Patchify | Kind::Unpatchify => DType::F32,
            Kind::Activated { .. } if self.name.ends_with(".head") => DType::F32,
            _ => dtype,
        }
    }

    /// Number of caches.
    pub fn slots(&self) -> usize {
        match self.kind {
            Kind::Conv { .. } | Kind::Activated { .. } => 1,
            Kind::Upsample { temporal, .. } | Kind::Downsample { temporal, .. } => temporal.into(),
            _ => 0,
        }
    }

    /// Keys and shapes of the layer's weights.
    pub fn weights(&self) -> Vec<(String, Vec<usize>)> {
        let mut all = Vec::new();
        let mut add = |part: &str, shape: &[usize]| all.push((self.key(part), shape.to_vec()));
        let mut conv = |part: &str, shape: &[usize]| {
            add(&join(part, "weight"), shape);
            add(&join(part, "bias"), &shape[..1]);
        };
        match self.kind {
            Kind::FromLatents { channels: c } => conv("", &[c, c, 1, 1, 1]),
            Kind::ToLatents { channels: c } => conv("", &[2 * c, 2 * c, 1, 1, 1]),
            Kind::Conv { input, output } => conv("", &[output, input, 3, 3, 3]),
            Kind::Activated { input, output, parts: [norm, convolution] } => {
                conv(&convolution.to_string(), &[output, input, 3, 3, 3]);
                add(&format!("{norm}.gamma"), &[input, 1, 1, 1]);
            }
            Kind::AddResidual { input, output } if input != output => {
                conv("shortcut", &[output, input, 1, 1, 1]);
            }
            Kind::Attention { channels: c } => {
                conv("to_qkv", &[3 * c, c, 1, 1]);
                conv("proj", &[c, c, 1, 1]);
                add("norm.gamma", &[c, 1, 1]);
            }
            Kind::Upsample { input, output, temporal } => {
                conv("resample.1", &[output, input, 3, 3]);
                if temporal {
                    conv("time_conv", &[2 * input, input, 3, 1, 1]);
                }
            }
            Kind::Downsample { channels: c, temporal } => {
                conv("resample.1", &[c, c, 3, 3]);
                if temporal {
                    conv("time_conv", &[c, c, 3, 1, 1]);
                }
            }
            Kind::Patchify
            | Kind::Unpatchify
            | Kind::Branch
            | Kind::AddResidual { .. }
            | Kind::AddAverage { .. }
            | Kind::AddDuplicate { .. } => {}
        }
        all
    }

    /// Fails unless the channels of a shortcut without weights divide evenly.
    pub fn check(&self) -> Result<()> {
        let (from, to) = match self.kind {
            Kind::AddAverage { input, factors: f } => (input * f.time * f.space * f.space, f.channels),
            Kind::AddDuplicate { input, factors: f } => (f.channels * f.time * f.space * f.space, input),
            _ => return Ok(()),
        };
        match to > 0 && from.is_multiple_of(to) {
            true => Ok(()),
            false => Err(Error::Unsupported(format!(
                "the shortcut of `{}` cannot turn {from} block values into {to} channels evenly",
                self.name
            ))),
        }
    }

    /// Computes the layer's output on a chunk `[C, T, H, W]`, and its caches for the next chunk. The chain itself
    /// handles [`Kind::Branch`] and the shortcuts.
    pub fn forward(&self, x: Tensor<4>, caches: Caches, around: &Surroundings<'_>) -> Result<(Tensor<4>, Caches)> {
        let mut caches = caches.into_iter();
        let mut cache = || caches.next().flatten();
        match self.kind {
            Kind::Patchify => Ok((patchify(x), vec![])),
            Kind::Unpatchify => Ok((unpatchify(x), vec![])),
            Kind::FromLatents { channels } => {
                let Statistics { mean, std } = around.statistics;
                let x = x * std.clone().reshape([channels, 1, 1, 1]) + mean.clone().reshape([channels, 1, 1, 1]);
                Ok((self.conv(x, "", around, 0)?, vec![]))
            }
            Kind::ToLatents { channels } => {
                let matrix = self.weight::<5>("weight", around)?.narrow(0, 0, channels).flatten::<2>(1, 4);
                let bias = self.weight::<1>("bias", around)?.narrow(0, 0, channels);
                let Statistics { mean, std } = around.statistics;
                let y = around.layout.pointwise(x, matrix, bias) - mean.clone().reshape([channels, 1, 1, 1]);
                Ok((y / std.clone().reshape([channels, 1, 1, 1]), vec![]))
            }
            Kind::Conv { .. } => self.convolve(x, cache(), "", around),
            Kind::Activated { parts, .. } if around.layout == Layout::Innermost && !around.first => {
                let past = past(cache(), &x, CONTEXT);
                let seen = ops::channel_norm_silu_after(past, x, self.gamma(&parts[0].to_string(), around)?);
                self.convolve_seen(seen, &parts[1].to_string(), around)
            }
            Kind::Activated { parts, .. } => {
                self.convolve(self.activate(x, around)?, cache(), &parts[1].to_string(), around)
            }
            Kind::Attention { channels } => Ok((self.attend(x, channels, around)?, vec![])),
            Kind::Upsample { temporal, .. } => self.upsample(x, temporal, cache(), around),
            Kind::Downsample { temporal, .. } => self.downsample(x, temporal, cache(), around),
            Kind::Branch | Kind::AddResidual { .. } | Kind::AddAverage { .. } | Kind::AddDuplicate { .. } => {
                Ok((x, vec![]))
            }
        }
    }

    /// Computes the term that a shortcut adds, from the stored input.
    pub fn shortcut(&self, branched: Tensor<4>, around: &Surroundings<'_>) -> Result<Tensor<4>> {
        match self.kind {
            Kind::AddAverage { factors, .. } => Ok(average_down(branched, factors)),
            Kind::AddDuplicate { factors, .. } => Ok(duplicate_up(branched, factors, around.first)),
            Kind::AddResidual { input, output } if input != output => self.conv(branched, "shortcut", around, 0),
            _ => Ok(branched),
        }
    }

    /// The pullback of [`Kind::Conv`] and [`Kind::Activated`], which does not run the convolution again. `next` is the
    /// cotangent of the cache for the next chunk. Returns the cotangent of the cache (`None` in the first chunk) and
    /// that of the convolution's input (for `Activated`, after norm and SiLU).
    pub fn pull_convolution(
        &self,
        cotangent: Tensor<4>,
        next: Option<Tensor<4>>,
        around: &Surroundings<'_>,
    ) -> Result<(Option<Tensor<4>>, Tensor<4>)> {
        let part = match self.kind {
            Kind::Activated { parts, .. } => parts[1].to_string(),
            _ => String::new(),
        };
        let kernel = self.kernel(&part, around)?;
        let frames = cotangent.dims()[1];
        if around.first {
            let seen = conv_pull(cotangent, last_tap(kernel), [1, 1]);
            let newest = next.map(|next| next.narrow(1, CONTEXT - 1, 1));
            return Ok((None, around.layout.add_to_end(seen, newest)));
        }
        let seen = around.layout.add_to_end(conv_pull(cotangent, kernel, [1, 1]), next);
        Ok((Some(seen.clone().narrow(1, 0, CONTEXT)), seen.narrow(1, CONTEXT, frames)))
    }

    /// The pullback of [`Kind::Activated`]'s norm and SiLU at the layer's input `x`.
    pub fn pull_activation(
        &self,
        x: Tensor<4>,
        cotangent: Tensor<4>,
        parts: [usize; 2],
        around: &Surroundings<'_>,
    ) -> Result<Tensor<4>> {
        Ok(ops::channel_norm_silu_pull(x, self.gamma(&parts[0].to_string(), around)?, cotangent))
    }

    /// The pullback of [`Kind::Upsample`], which is linear as a whole. Arguments and result are those of
    /// [`Layer::pull_convolution`].
    pub fn pull_upsample(
        &self,
        cotangent: Tensor<4>,
        next: Option<Tensor<4>>,
        around: &Surroundings<'_>,
    ) -> Result<(Option<Tensor<4>>, Tensor<4>)> {
        let doubled = conv_pull(cotangent, self.kernel("resample.1", around)?, [1, 1]);
        let x = around.layout.double_pull(doubled);
        if around.first || self.slots() == 0 {
            return Ok((None, x));
        }
        let pairs = around.layout.interleave_pull(x);
        let frames = pairs.dims()[1];
        let seen = conv_pull(pairs, self.kernel("time_conv", around)?, [0, 0]);
        let seen = around.layout.add_to_end(seen, next);
        Ok((Some(seen.clone().narrow(1, 0, CONTEXT)), seen.narrow(1, CONTEXT, frames)))
    }

    /// The causal convolution over three frames, and the cache for the next chunk. Frames before the first chunk are
    /// zero, so only the kernel's last tap contributes there. Hence several frames of a first chunk are independent
    /// stills.
    fn convolve(
        &self,
        x: Tensor<4>,
        cache: Option<Tensor<4>>,
        part: &str,
        around: &Surroundings<'_>,
    ) -> Result<(Tensor<4>, Caches)> {
        let [c, t, h, w] = x.dims();
        if around.first {
            let bias = self.weight::<1>(&join(part, "bias"), around)?;
            let kernel = self.kernel(part, around)?;
            let zeros = Tensor::zeros([c, CONTEXT - 1, h, w], (&x.device(), x.dtype()));
            let next = around.layout.join(vec![zeros, x.clone().narrow(1, t - 1, 1)]);
            return Ok((conv(x, last_tap(kernel), bias, [1, 1, 1], [1, 1], around.layout), vec![Some(next)]));
        }
        self.convolve_seen(around.layout.join(vec![past(cache, &x, CONTEXT), x]), part, around)
    }

    /// Like [`Layer::convolve`]; `seen` are the cached frames followed by the chunk.
    fn convolve_seen(&self, seen: Tensor<4>, part: &str, around: &Surroundings<'_>) -> Result<(Tensor<4>, Caches)> {
        let bias = self.weight::<1>(&join(part, "bias"), around)?;
        let next = seen.clone().narrow(1, seen.dims()[1] - CONTEXT, CONTEXT);
        let y = conv(seen, self.kernel(part, around)?, bias, [1, 1, 1], [1, 1], around.layout);
        Ok((y, vec![Some(next)]))
    }

    /// Applies norm and SiLU of [`Kind::Activated`]; returns the input of any other kind unchanged.
    pub fn activate(&self, x: Tensor<4>, around: &Surroundings<'_>) -> Result<Tensor<4>> {
        match self.kind {
            Kind::Activated { parts, .. } => Ok(ops::channel_norm_silu(x, self.gamma(&parts[0].to_string(), around)?)),
            _ => Ok(x),
        }
    }

    /// Whether probes see the layer's output. Outputs inside a residual block are excluded.
    pub fn shown(&self) -> bool {
        self.kind != Kind::Branch && !self.name.ends_with(".residual")
    }

    /// Upsampling. The time axis of the first chunk, a single frame, is not doubled. The second chunk has zeros before
    /// it instead of the first chunk, as in training.
    fn upsample(
        &self,
        x: Tensor<4>,
        temporal: bool,
        cache: Option<Tensor<4>>,
        around: &Surroundings<'_>,
    ) -> Result<(Tensor<4>, Caches)> {
        let (x, next) = match temporal {
            true if around.first => (x, vec![None]),
            true => {
                let (x, next) = after(cache, x, CONTEXT, around.layout);
                (around.layout.interleave(self.conv(x, "time_conv", around, 0)?), vec![Some(next)])
            }
            false => (x, vec![]),
        };
        Ok((self.conv(around.layout.double(x), "resample.1", around, 1)?, next))
    }

    /// Downsampling. The time axis of the first chunk, a single frame, is not halved.
    fn downsample(
        &self,
        x: Tensor<4>,
        temporal: bool,
        cache: Option<Tensor<4>>,
        around: &Surroundings<'_>,
    ) -> Result<(Tensor<4>, Caches)> {
        let x = self.conv_strided(pad_bottom_right(x), "resample.1", around, [1, 2, 2])?;
        if !temporal {
            return Ok((x, vec![]));
        }
        if around.first {
            return Ok((x.clone(), vec![Some(x)]));
        }
        let (x, next) = after(cache, x, 1, around.layout);
        Ok((self.conv_strided(x, "time_conv", around, [2, 1, 1])?, vec![Some(next)]))
    }

    fn attend(&self, x: Tensor<4>, channels: usize, around: &Surroundings<'_>) -> Result<Tensor<4>> {
        let [c, t, h, w] = x.dims();
        let normed = ops::channel_norm(x.clone(), self.gamma("norm", around)?);
        let matrix = self.weight::<4>("to_qkv.weight", around)?.flatten::<2>(1, 3);
        let qkv = around.layout.pointwise(normed, matrix, self.weight::<1>("to_qkv.bias", around)?);
        let frames = (0..t).map(|frame| {
            let part = |i: usize| {
                let part = qkv.clone().narrow(0, i * channels, channels).narrow(1, frame, 1);
                part.reshape([channels, h * w]).transpose()
            };
            ops::attention(part(0), part(1), part(2), 1).transpose().reshape([c, 1, h, w])
        });
        let attended = Tensor::cat(frames.collect(), 1);
        let matrix = self.weight::<4>("proj.weight", around)?.flatten::<2>(1, 3);
        Ok(x + around.layout.pointwise(attended, matrix, self.weight::<1>("proj.bias", around)?))
    }

    fn conv(&self, x: Tensor<4>, part: &str, around: &Surroundings<'_>, padding: usize) -> Result<Tensor<4>> {
        let bias = self.weight::<1>(&join(part, "bias"), around)?;
        Ok(conv(x, self.kernel(part, around)?, bias, [1, 1, 1], [padding, padding], around.layout))
    }

    fn conv_strided(
        &self,
        x: Tensor<4>,
        part: &str,
        around: &Surroundings<'_>,
        stride: [usize; 3],
    ) -> Result<Tensor<4>> {
        let bias = self.weight::<1>(&join(part, "bias"), around)?;
        Ok(conv(x, self.kernel(part, around)?, bias, stride, [0, 0], around.layout))
    }

    /// A kernel `[O, C, kt, kh, kw]`. Kernels without a time axis have `kt` 1.
    fn kernel(&self, part: &str, around: &Surroundings<'_>) -> Result<Tensor<5>> {
        let key = self.key(&join(part, "weight"));
        let weight = weights::get(around.weights, &key)?;
        match weight.shape().len() {
            4 => Ok(weight.f32::<4>()?.unsqueeze_dim(2)),
            _ => weight.f32::<5>(),
        }
    }

    fn gamma(&self, part: &str, around: &Surroundings<'_>) -> Result<Tensor<1>> {
        let weight = weights::get(around.weights, &self.key(&join(part, "gamma")))?;
        match weight.shape().len() {
            3 => Ok(weight.f32::<3>()?.flatten(0, 2)),
            _ => Ok(weight.f32::<4>()?.flatten(0, 3)),
        }
    }

    fn weight<const D: usize>(&self, part: &str, around: &Surroundings<'_>) -> Result<Tensor<D>> {
        weights::get(around.weights, &self.key(part))?.f32()
    }

    fn key(&self, part: &str) -> String {
        format!("{}.{part}", self.name)
    }
}

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

/// Appends `x` to the cached frames (zeros before the first chunk). Returns both, and their last `context` frames.
fn after(cache: Option<Tensor<4>>, x: Tensor<4>, context: usize, layout: Layout) -> (Tensor<4>, Tensor<4>) {
    let frames = x.dims()[1];
    let joined = layout.join(vec![past(cache, &x, context), x]);
    let next = joined.clone().narrow(1, frames, context);
    (joined, next)
}

/// The cached frames, or zeros before the first chunk.
fn past(cache: Option<Tensor<4>>, x: &Tensor<4>, context: usize) -> Tensor<4> {
    let [c, _, h, w] = x.dims();
    cache.unwrap_or_else(|| Tensor::zeros([c, context, h, w], (&x.device(), x.dtype())))
}
