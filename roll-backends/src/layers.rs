//! Layers as a forward pass sees them: frozen weights, trainable parameters and LoRA under one name.

use burn::tensor::{DType, Tensor};
use roll_core::Result;

use crate::{ParameterSegment, Tape, Weights, ops, weights};

/// The weights of one segment during one forward pass.
///
/// A name is looked up among the trainable parameters first (full training), then among the frozen weights. A linear
/// layer adds its LoRA product when the adapter is on and holds one for it; the two are never merged.
pub struct Scope<'a> {
    /// Frozen weights.
    pub weights: &'a Weights,
    /// Trainable parameters; `None` runs the base model alone.
    pub trainable: Option<&'a ParameterSegment>,
    /// alpha / rank.
    pub lora_scale: f64,
    /// Where trainable parameters that are read get recorded.
    pub tape: &'a Tape,
    /// Dtype of products with matrices: f32, or bf16 with sums in f32. Everything else is f32.
    pub products: DType,
}

impl Scope<'_> {
    /// The weight `name` at rank `D`, f32.
    pub fn weight<const D: usize>(&self, name: &str) -> Result<Tensor<D>> {
        match self.parameter(name) {
            Some(parameter) => Ok(parameter),
            None => weights::get(self.weights, name)?.f32(),
        }
    }

    /// The weight `name`, if there is one.
    pub fn optional<const D: usize>(&self, name: &str) -> Result<Option<Tensor<D>>> {
        match self.weights.contains_key(name) || self.parameter::<D>(name).is_some() {
            true => self.weight(name).map(Some),
            false => Ok(None),
        }
    }

    /// `x W^T + b + scale * (x A^T) B^T` for the layer `name`, on `[L, in]`. Bias and LoRA are optional.
    pub fn linear(&self, x: Tensor<2>, name: &str) -> Result<Tensor<2>> {
        let weight = self.matrix(&format!("{name}.weight"))?;
        let bias = self.optional::<1>(&format!("{name}.bias"))?;
        let (down, up) = (self.parameter::<2>(&lora_a(name)), self.parameter::<2>(&lora_b(name)));
        Ok(match (down, up) {
            (Some(down), Some(up)) => ops::linear_lora(x, weight, bias, down, up, self.lora_scale),
            _ => ops::linear(x, weight, bias),
        })
    }

    /// The weight `name` in the dtype that products are taken in.
    fn matrix(&self, name: &str) -> Result<Tensor<2>> {
        let value = match self.parameter(name) {
            Some(parameter) => parameter,
            None => weights::get(self.weights, name)?.stored()?,
        };
        Ok(if value.dtype() == self.products { value } else { value.cast(self.products) })
    }

    fn parameter<const D: usize>(&self, name: &str) -> Option<Tensor<D>> {
        let (index, shape, value) = self.trainable?.get(name)?;
        let shape: [usize; D] = shape.try_into().ok()?;
        Some(self.tape.leaf(index, value).reshape(shape))
    }
}

/// Name of the down projection, `[rank, in]`, of the layer `name`.
pub fn lora_a(name: &str) -> String {
    format!("{name}.lora_A.weight")
}

/// Name of the up projection, `[out, rank]`, of the layer `name`.
pub fn lora_b(name: &str) -> String {
    format!("{name}.lora_B.weight")
}
