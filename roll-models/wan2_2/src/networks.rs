//! The networks of a model, and the bytes of their weights.

use burn_tensor::DType;
use roll_backends::EightBits;
use roll_backends::weights::HostStore;
use roll_core::{Result, ResultExt};

use super::components;
use super::dit::DitConfig;

use super::options::WanOptions;
use super::paths::{ComponentFiles, reading};
use super::vae::VaeConfig;

/// The networks of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Networks {
    /// Sizes of each transformer.
    pub dit: DitConfig,
    /// Number of transformers.
    pub experts: usize,
    /// Dtype of dense weights in the files of the transformers.
    pub stored_dtype: DType,
    /// The format of the matrices of the blocks, if the files have them in eight bits.
    pub eight_bits: Option<EightBits>,
    /// Sizes of the VAE, which is resident in f32.
    pub vae: VaeConfig,
}

/// A weight's name and shape.
type NamedShape = (String, Vec<usize>);

impl Networks {
    /// Reads the sizes of the networks in a model's files.
    pub(super) fn of(files: &ComponentFiles, options: &WanOptions) -> Result<Self> {
        let dit = components::dit_config(&files.dit, options.num_heads).in_section("model");
        let vae = VaeConfig::from_shapes(&files.vae.shapes());
        Ok(Self {
            dit: dit.while_doing(|| reading(&files.dit))?,
            experts: files.experts().count(),
            stored_dtype: components::dit_dtype(&files.dit),
            eight_bits: components::eight_bits(&files.dit),
            vae: vae.while_doing(|| reading(&files.vae))?,
        })
    }

    /// Number of elements of one expert.
    pub fn dit_elements(&self) -> usize {
        elements(&self.dit.weights())
    }

    /// Names and shapes of the weights of one block.
    pub(super) fn block_weights(&self) -> Vec<NamedShape> {
        self.dit.weights().into_iter().filter(|(name, _)| name.starts_with("blocks.0.")).collect()
    }

    /// Number of elements of one block.
    pub(super) fn block_elements(&self) -> usize {
        elements(&self.block_weights())
    }

    /// Number of elements of the VAE.
    pub fn vae_elements(&self) -> usize {
        elements(&self.vae.weights())
    }
}

/// Number of elements of all `weights`.
fn elements(weights: &[NamedShape]) -> usize {
    weights.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
}

/// Bytes of weights by their location in a [`HostStore`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WeightBytes {
    /// Bytes that are always on the device: weights smaller than [`HostStore::SMALL`], and scales.
    pub small: usize,
    /// Bytes in host memory: all other weights.
    pub large: usize,
}

impl WeightBytes {
    /// Counts weights of a transformer with `element_bytes` bytes per element. With `has_eight_bits`, the
    /// matrices of its blocks have one byte per element and four for the scale of each row.
    pub fn of(weights: &[NamedShape], element_bytes: usize, has_eight_bits: bool) -> Self {
        let mut sum = Self::default();
        for (name, shape) in weights {
            let [scales, values] = match shape.as_slice() {
                [rows, columns] if has_eight_bits && name.starts_with("blocks.") => [4 * rows, rows * columns],
                shape => [0, element_bytes * shape.iter().product::<usize>()],
            };
            let is_small = scales + values < HostStore::SMALL;
            sum.small += scales + if is_small { values } else { 0 };
            sum.large += if is_small { 0 } else { values };
        }
        sum
    }

    /// All bytes.
    pub fn all(self) -> usize {
        self.small + self.large
    }
}
