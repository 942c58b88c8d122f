//! How the passes of a transformer compute, and what a recorded pass keeps ([`PassSettings`]).

use burn_tensor::{DType, Device};
use roll_backends::{Memory, activation_dtype};
use roll_core::{Pullback, Result, Tensor};

/// The settings of a transformer's passes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassSettings {
    /// Dtype of the matrix products in blocks: f32 (the default), or bf16 accumulated in f32.
    pub products: DType,
    /// Whether products with frozen fp8 weights are taken in fp8 ([`roll_backends::ops::linear_fp8`]).
    pub fp8_products: bool,
    /// Dtype of values between the operators of a block: f32 or bf16. `None` is
    /// [`roll_backends::activation_dtype`] of device and products. The residual stream and its modulation are always
    /// f32.
    pub activations: Option<DType>,
    /// What a recorded pass keeps until its pullback.
    pub kept: PassMemory,
}

impl Default for PassSettings {
    fn default() -> Self {
        Self { products: DType::F32, fp8_products: false, activations: None, kept: PassMemory::default() }
    }
}

impl PassSettings {
    /// Dtype of values between the operators of a block on `device`.
    pub fn activations_on(&self, device: &Device) -> DType {
        self.activations.unwrap_or_else(|| activation_dtype(device, self.products))
    }
}

/// The values that a recorded pass keeps until its pullback.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassMemory {
    /// Whether the inputs of blocks, or everything, are kept, and where.
    pub memory: Memory,
    /// Whether the results of self-attention stay on the device. The pullback then recomputes everything else. Per
    /// block, they are `[tokens, dim]` in the dtype of products, and a number per token and head.
    pub keeps_attention: bool,
}

/// The result of a batch of one, `[1, ...]`, and its pullback, in the shape of that one.
///
/// # Errors
/// Fails if the result has not as many values as `shape`.
pub fn of_one(batch: Tensor, pullback: Option<Pullback>, shape: &[usize]) -> Result<(Tensor, Option<Pullback>)> {
    let (shape, batch_shape) = (shape.to_vec(), batch.shape().to_vec());
    let one = batch.reshape(shape.clone())?;
    let pullback = pullback.map(|pullback| {
        Pullback::new(move |cotangent: &Tensor| pullback.pull(&cotangent.reshape(batch_shape)?)?.reshape(shape))
    });
    Ok((one, pullback))
}
