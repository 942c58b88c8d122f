//! Sizes of the autoencoder, from the `config.json` of its directory, and the list of its blocks.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use roll_core::{Error, Noise, Purpose, Result, StateDict, Tensor};
use serde::{Deserialize, Serialize};

use super::block::{Block, BlockKind};

/// Values in f32 that the pullback of a decoder block holds, per value of the block's input: on the CPU, as
/// `tests/decoder_memory.rs` counts them at the published widths, and on a GPU, an estimate from the tensors of a group
/// norm's pullback.
pub const DECODER_WORDS: [usize; 2] = [2, 7];

/// Sizes and scaling of an `AutoencoderKL`, in the form of diffusers' `config.json`. Missing entries have the values of
/// Z-Image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct VaeConfig {
    /// Channels of each stage, from the pixels inwards. Every stage but the last halves height and width.
    pub block_out_channels: Vec<usize>,
    /// Residual blocks of an encoder stage. A decoder stage has one more.
    pub layers_per_block: usize,
    /// Channels of the latents.
    pub latent_channels: usize,
    /// Groups of a group norm.
    pub norm_num_groups: usize,
    /// Factor of the latents, after the shift.
    pub scaling_factor: f64,
    /// Subtracted from the encoder's mean.
    pub shift_factor: f64,
}

impl Default for VaeConfig {
    fn default() -> Self {
        Self {
            block_out_channels: vec![128, 256, 512, 512],
            layers_per_block: 2,
            latent_channels: 16,
            norm_num_groups: 32,
            scaling_factor: 0.3611,
            shift_factor: 0.1159,
        }
    }
}

/// The input of a block of the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecoderInput {
    /// Number of values.
    pub elements: usize,
    /// Whether a recorded pass keeps them.
    pub is_kept: bool,
}

/// Largest number of stages and of blocks per stage that is accepted.
const MAX_DEPTH: usize = 16;
/// Largest number of channels that is accepted.
const MAX_CHANNELS: usize = 1 << 16;

impl VaeConfig {
    /// Parses the text of a `config.json`; `file` names it in errors. Fails on sizes that do not make a network.
    pub fn parse(json: &str, file: &Path) -> Result<Self> {
        let config: Self = serde_json::from_str(json).map_err(|e| Error::bad_file(file, e.to_string()))?;
        config.check().map_err(|problem| Error::bad_file(file, problem))?;
        Ok(config)
    }

    /// Fails with the reason if the sizes do not make a network.
    fn check(&self) -> std::result::Result<(), String> {
        let stages = self.block_out_channels.len();
        if !(1..=MAX_DEPTH).contains(&stages) || !(1..=MAX_DEPTH).contains(&self.layers_per_block) {
            return Err(format!(
                "expected 1 to {MAX_DEPTH} `block_out_channels` and `layers_per_block`, found {stages} and {}",
                self.layers_per_block
            ));
        }
        let groups = self.norm_num_groups;
        let is_divisible = |&channels: &usize| {
            groups > 0 && channels > 0 && channels <= MAX_CHANNELS && channels.is_multiple_of(groups)
        };
        if let Some(bad) = self.block_out_channels.iter().find(|channels| !is_divisible(channels)) {
            return Err(format!(
                "`block_out_channels`: expected multiples of the {groups} `norm_num_groups` up to {MAX_CHANNELS}, found \
                 {bad}"
            ));
        }
        if !(1..=MAX_CHANNELS).contains(&self.latent_channels) {
            return Err(format!("`latent_channels`: expected 1 to {MAX_CHANNELS}, found {}", self.latent_channels));
        }
        if !self.scaling_factor.is_finite() || self.scaling_factor <= 0.0 || !self.shift_factor.is_finite() {
            return Err(format!(
                "expected a positive `scaling_factor` and a finite `shift_factor`, found {} and {}",
                self.scaling_factor, self.shift_factor
            ));
        }
        Ok(())
    }

    /// Pixels per latent pixel, along each axis.
    pub fn spatial_stride(&self) -> usize {
        1 << (self.block_out_channels.len() - 1)
    }

    /// Name (diffusers') and shape of every weight.
    pub fn weights(&self) -> Vec<(String, Vec<usize>)> {
        self.encoder_blocks().iter().chain(&self.decoder_blocks()).flat_map(Block::weights).collect()
    }

    /// Random weights, drawn from `seed` and scaled so that activations keep their magnitude.
    pub fn random_state(&self, seed: u64) -> Result<StateDict> {
        let noise = Noise::new(seed);
        let tensor = |(i, (key, shape)): (usize, (String, Vec<usize>))| {
            let mut uniform = noise.uniform(Purpose::Parameters, 0, i as u64);
            let fan_in: usize = shape.iter().skip(1).product();
            let is_gain = shape.len() == 1 && key.contains("norm") && key.ends_with("weight");
            // Uniform in `centre` plus or minus `half_width`. The variance of a matrix, `half_width^2 / 3`, is 1 /
            // fan_in.
            let (centre, half_width) = match shape.len() {
                1 if is_gain => (1.0, 0.1),
                1 => (0.0, 0.02),
                _ => (0.0, (3.0 / fan_in as f32).sqrt()),
            };
            let values = (0..shape.iter().product()).map(|_| centre + half_width * uniform()).collect::<Vec<f32>>();
            Ok((key, Tensor::new(values, shape)?))
        };
        self.weights().into_iter().enumerate().map(tensor).collect()
    }

    /// Fails unless `shapes`, by diffusers' names, has every weight in its shape, and no other weight of the encoder or
    /// the decoder.
    pub(super) fn check_weights(&self, shapes: &BTreeMap<&str, &[usize]>) -> Result<()> {
        let weights = self.weights();
        for (name, shape) in &weights {
            match shapes.get(name.as_str()) {
                None => {
                    let problem =
                        format!("the weight `{name}` of the VAE is missing (shape {shape:?}); does config.json fit?");
                    return Err(Error::Unsupported(problem));
                }
                Some(found) if *found != shape.as_slice() => {
                    return Err(Error::shape(format!("the VAE's weight `{name}`"), format!("{shape:?}"), found));
                }
                Some(_) => {}
            }
        }
        let expected: BTreeSet<_> = weights.iter().map(|(name, _)| name.as_str()).collect();
        let is_in_network = |name: &&&str| name.contains("coder.") || name.contains("quant_conv.");
        match shapes.keys().filter(is_in_network).find(|name| !expected.contains(**name)) {
            None => Ok(()),
            Some(name) => Err(Error::Unsupported(format!(
                "the weight `{name}` does not belong to a VAE with {} stages of {} residual blocks and without \
                 (post_)quant_conv",
                self.block_out_channels.len(),
                self.layers_per_block
            ))),
        }
    }

    /// The inputs of the decoder's blocks for latents of `[height, width]`, in their order.
    pub fn decoder_inputs(&self, [height, width]: [usize; 2]) -> Vec<DecoderInput> {
        let mut scale = 1;
        let input = |block: Block| {
            let channels = block.input_channels();
            let elements = channels * height * scale * width * scale;
            if matches!(block.kind, BlockKind::Upsample { .. }) {
                scale *= 2;
            }
            DecoderInput { elements, is_kept: block.reads_input() }
        };
        self.decoder_blocks().into_iter().map(input).collect()
    }

    /// Bytes that the decoder and its pullback hold besides weights, for latents of `[height, width]` and values of
    /// `element_size` bytes between two layers: the inputs of the blocks that a pullback reads, and the pullback of the
    /// block with the largest input, `words` of [`DECODER_WORDS`].
    pub fn decoder_bytes(&self, latents: [usize; 2], element_size: usize, words: usize) -> usize {
        let inputs = self.decoder_inputs(latents);
        let kept: usize = inputs.iter().filter(|input| input.is_kept).map(|input| input.elements).sum();
        let largest = inputs.iter().map(|input| input.elements).max().unwrap_or(0);
        element_size * kept + size_of::<f32>() * words * largest
    }

    /// Floating-point operations of the convolutions of the decoder for latents of `[height, width]`.
    pub fn decoder_flops(&self, [height, width]: [usize; 2]) -> f64 {
        let (mut scale, mut flops) = (1, 0.0);
        for block in self.decoder_blocks() {
            if matches!(block.kind, BlockKind::Upsample { .. }) {
                scale *= 2;
            }
            let kernels = block.weights().into_iter().filter(|(_, shape)| shape.len() > 1);
            let products: usize = kernels.map(|(_, shape)| shape.iter().product::<usize>()).sum();
            flops += 2.0 * (products * height * scale * width * scale) as f64;
        }
        flops
    }

    /// The blocks of the encoder, from pixels to mean and log-variance.
    pub(super) fn encoder_blocks(&self) -> Vec<Block> {
        let groups = self.norm_num_groups;
        let widths = &self.block_out_channels;
        let mut input = widths[0];
        let mut blocks = vec![Block::new("encoder.conv_in", BlockKind::Conv { input: 3, output: input })];
        for (stage, &output) in widths.iter().enumerate() {
            for i in 0..self.layers_per_block {
                let name = format!("encoder.down_blocks.{stage}.resnets.{i}");
                blocks.push(Block::new(name, BlockKind::Residual { input, output, groups }));
                input = output;
            }
            if stage + 1 < widths.len() {
                let name = format!("encoder.down_blocks.{stage}.downsamplers.0");
                blocks.push(Block::new(name, BlockKind::Downsample { channels: output }));
            }
        }
        self.push_middle(&mut blocks, "encoder", input);
        let output = 2 * self.latent_channels;
        blocks.push(Block::new("encoder", BlockKind::Head { input, output, groups }));
        blocks
    }

    /// The blocks of the decoder, from unscaled latents to pixels.
    pub(super) fn decoder_blocks(&self) -> Vec<Block> {
        let groups = self.norm_num_groups;
        let widths = &self.block_out_channels;
        let mut input = widths[widths.len() - 1];
        let first = BlockKind::Conv { input: self.latent_channels, output: input };
        let mut blocks = vec![Block::new("decoder.conv_in", first)];
        self.push_middle(&mut blocks, "decoder", input);
        for (stage, &output) in widths.iter().rev().enumerate() {
            // One block more than in the encoder.
            for i in 0..=self.layers_per_block {
                let name = format!("decoder.up_blocks.{stage}.resnets.{i}");
                blocks.push(Block::new(name, BlockKind::Residual { input, output, groups }));
                input = output;
            }
            if stage + 1 < widths.len() {
                let name = format!("decoder.up_blocks.{stage}.upsamplers.0");
                blocks.push(Block::new(name, BlockKind::Upsample { channels: output }));
            }
        }
        blocks.push(Block::new("decoder", BlockKind::Head { input, output: 3, groups }));
        blocks
    }

    /// Appends two residual blocks with an attention between them. `network` is `encoder` or `decoder`.
    fn push_middle(&self, blocks: &mut Vec<Block>, network: &str, channels: usize) {
        let groups = self.norm_num_groups;
        let residual = BlockKind::Residual { input: channels, output: channels, groups };
        blocks.push(Block::new(format!("{network}.mid_block.resnets.0"), residual));
        let attention = BlockKind::Attention { channels, groups };
        blocks.push(Block::new(format!("{network}.mid_block.attentions.0"), attention));
        blocks.push(Block::new(format!("{network}.mid_block.resnets.1"), residual));
    }
}
