//! The inputs of a pass: checked, cut into tokens, with the positions of all tokens.

use burn_tensor::{Device, Tensor as Burn};
use roll_backends::to_device;
use roll_core::{Error, Result, Tensor, Timestep, VelocityInput};
use roll_network::patch::{Grid, Order};

use super::config::{DitConfig, PATCH};

/// Base of the rotary frequencies.
const THETA: f64 = 256.0;
/// The timestep at which a sample is noise. The network counts from noise to clean, roll from clean to noise.
const NOISE: f64 = 1000.0;

/// Sequences of tokens, one after the other in the rows of a matrix. Tokens attend within their sequence.
pub struct Sequences {
    /// Number of tokens of each sequence.
    pub lengths: Vec<usize>,
    /// Cosines and sines of the rotation angles, f32 `[tokens, head_dim / 2]` each.
    pub rope: [Burn<2>; 2],
}

impl Sequences {
    /// First row and length of each sequence.
    pub fn spans(&self) -> Vec<(usize, usize)> {
        let mut end = 0;
        let span = |length: &usize| {
            end += length;
            (end - length, *length)
        };
        self.lengths.iter().map(span).collect()
    }

    /// Expands one row per sequence to one row per token.
    pub fn expanded(&self, rows: Burn<2>) -> Burn<2> {
        let width = rows.dims()[1];
        let expand = |(i, length): (usize, &usize)| rows.clone().narrow(0, i, 1).expand([*length, width]);
        Burn::cat(self.lengths.iter().enumerate().map(expand).collect(), 0)
    }
}

/// The checked inputs of a pass.
pub struct Batch {
    pub shape: BatchShape,
    /// Patches of the latents, f32 `[B * patches, 4 * channels]`, on the host.
    pub patches: Tensor,
    /// Times of the network, 1000 * (1 - sigma), one per sample.
    pub times: Vec<Timestep>,
    /// Caption features of all samples, f32 `[captions, text_dim]`, on the host.
    pub captions: Tensor,
    /// Number of caption features of each sample.
    pub caption_lengths: Vec<usize>,
    /// The filled pictures.
    pub picture: Sequences,
    /// The filled captions.
    pub caption: Sequences,
    /// Picture, then caption, of each sample.
    pub joint: Sequences,
}

/// Number of samples, and the grid of patches that all of them have.
#[derive(Clone, Copy)]
pub struct BatchShape {
    pub samples: usize,
    pub grid: Grid,
}

impl Batch {
    /// Fails unless the inputs fit the network, and the latents each other.
    pub fn new(inputs: &[VelocityInput<'_>], config: &DitConfig, device: &Device) -> Result<Self> {
        let Some(first) = inputs.first() else {
            return Err(Error::Misuse("velocities of no inputs were requested".into()));
        };
        match *first.latents.shape() {
            [channels, 1, _, _] if channels == config.channels => {}
            ref found => {
                let expected = format!("[{}, 1, H, W]: a picture is a video of one frame", config.channels);
                return Err(Error::shape("latents", expected, found));
            }
        }
        let latents: Vec<Tensor> = inputs.iter().map(|input| input.latents.clone()).collect();
        let shape = BatchShape { samples: inputs.len(), grid: Grid::new(first.latents.shape(), PATCH)? };
        let (mut features, mut caption_lengths) = (Vec::new(), Vec::new());
        for input in inputs {
            let context = &input.conditioning.context;
            match *context.shape() {
                [length, width] if length > 0 && width == config.text_dim => caption_lengths.push(length),
                ref found => {
                    return Err(Error::shape("caption features", format!("[L, {}]", config.text_dim), found));
                }
            }
            features.extend_from_slice(context.f32s()?);
        }
        let captions = Tensor::new(features, [caption_lengths.iter().sum(), config.text_dim])?;

        let (mut picture, mut caption, mut joint) = (Positions::default(), Positions::default(), Positions::default());
        for length in &caption_lengths {
            let of_caption = caption_positions(DitConfig::filled(*length));
            let of_picture = picture_positions(&shape.grid, DitConfig::filled(*length));
            joint.add(&[of_picture.clone(), of_caption.clone()].concat());
            picture.add(&of_picture);
            caption.add(&of_caption);
        }
        let sequences = |positions: Positions| positions.sequences(config, device);
        Ok(Self {
            shape,
            patches: shape.to_tokens(&Tensor::stack(&latents)?)?,
            times: inputs.iter().map(|input| Timestep(NOISE - input.timestep.0)).collect(),
            captions,
            caption_lengths,
            picture: sequences(picture)?,
            caption: sequences(caption)?,
            joint: sequences(joint)?,
        })
    }
}

impl BatchShape {
    /// Cuts `[B, C, 1, H, W]` into patches `[B * patches, 4 * C]`, whose channels are innermost.
    pub fn to_tokens(self, stack: &Tensor) -> Result<Tensor> {
        let parts: Result<Vec<Tensor>> =
            stack.unstack()?.iter().map(|latents| self.grid.to_tokens(latents, Order::ChannelLast)).collect();
        let tokens = Tensor::stack(&parts?)?;
        let width = tokens.len() / (self.samples * self.grid.tokens());
        tokens.reshape([self.samples * self.grid.tokens(), width])
    }

    /// Reassembles patches `[B * patches, 4 * C]` to `[B, C, 1, H, W]`.
    pub fn to_latents(self, tokens: &Tensor) -> Result<Tensor> {
        let by_sample = tokens.reshape([self.samples, self.grid.tokens(), tokens.shape()[1]])?;
        let latents: Result<Vec<Tensor>> =
            by_sample.unstack()?.iter().map(|patches| self.grid.to_latents(patches, Order::ChannelLast)).collect();
        Tensor::stack(&latents?)
    }
}

/// The coordinates of the tokens of a filled caption. The fill tokens are numbered like the others.
fn caption_positions(length: usize) -> Vec<[usize; 3]> {
    (1..=length).map(|k| [k, 0, 0]).collect()
}

/// The coordinates of the tokens of a filled picture next to a filled caption of `caption` tokens. The fill tokens are
/// at the origin.
fn picture_positions(grid: &Grid, caption: usize) -> Vec<[usize; 3]> {
    let [_, rows, columns] = grid.patches;
    let patches = (0..rows).flat_map(|row| (0..columns).map(move |column| [caption + 1, row, column]));
    let fill = DitConfig::filled(grid.tokens()) - grid.tokens();
    patches.chain(std::iter::repeat_n([0; 3], fill)).collect()
}

/// The coordinates of the tokens of several sequences.
#[derive(Default)]
struct Positions {
    lengths: Vec<usize>,
    coordinates: Vec<[usize; 3]>,
}

impl Positions {
    fn add(&mut self, sequence: &[[usize; 3]]) {
        self.lengths.push(sequence.len());
        self.coordinates.extend_from_slice(sequence);
    }

    fn sequences(self, config: &DitConfig, device: &Device) -> Result<Sequences> {
        let [cos, sin] = rotary_tables(&self.coordinates, config.axes)?;
        Ok(Sequences { lengths: self.lengths, rope: [to_device(&cos, device)?, to_device(&sin, device)?] })
    }
}

/// Computes cosines and sines of the rotation angles of tokens at `coordinates`, f32 `[tokens, head_dim / 2]` each. The
/// pairs of a head are divided between the three coordinates; pair i of an axis of d elements turns by `position *
/// 256^(-2i/d)`. Angles are computed in f64.
fn rotary_tables(coordinates: &[[usize; 3]], axes: [usize; 3]) -> Result<[Tensor; 2]> {
    let half = axes.iter().sum::<usize>() / 2;
    let frequencies: Vec<(usize, f64)> = (0..3)
        .flat_map(|axis| (0..axes[axis] / 2).map(move |pair| (axis, pair)))
        .map(|(axis, pair)| (axis, THETA.powf(-2.0 * pair as f64 / axes[axis] as f64)))
        .collect();
    let table = |f: fn(f64) -> f64| {
        let angles = coordinates.iter().flat_map(|at| frequencies.iter().map(|(axis, w)| at[*axis] as f64 * w));
        Tensor::new(angles.map(|angle| f(angle) as f32).collect::<Vec<_>>(), [coordinates.len(), half])
    };
    Ok([table(f64::cos)?, table(f64::sin)?])
}
