//! Layers by name: a forward pass names a layer, and [`Scope`] finds its frozen weights, trainable parameters and LoRA
//! matrices and computes the layer from those that exist.

use std::sync::Arc;

use burn_tensor::{DType, Int, Tensor};
use roll_core::Result;

use crate::{BlockMatrix, EightBits, ParameterSegment, ScaledMatrix, Tape, Weights, ops, weights};

/// The weights of one segment during one forward pass.
///
/// A name is looked up among the trainable parameters first (full training), then among the frozen weights. A linear
/// layer adds its LoRA product if there is an adapter for the layer; LoRA is never merged into the weight.
pub struct Scope<'a> {
    /// Frozen weights.
    pub weights: &'a Weights,
    /// Trainable parameters; `None` runs the base model without them.
    pub trainable: Option<&'a ParameterSegment>,
    /// Factor of the LoRA product, alpha / rank.
    pub lora_scale: f64,
    /// Records the trainable parameters that are read.
    pub tape: &'a Tape,
    /// Dtype of matrix products: f32, or bf16 with f32 accumulation. Weights that are not matrices are f32.
    pub products: DType,
    /// Whether products with frozen weights in e4m3 are taken in fp8; see [`ops::linear_fp8`].
    pub fp8: bool,
}

impl Scope<'_> {
    /// The weight `name` as f32 of rank `D`. Fails if there is no such weight or its rank differs.
    pub fn weight<const D: usize>(&self, name: &str) -> Result<Tensor<D>> {
        match self.parameter(name) {
            Some(parameter) => Ok(parameter),
            None => weights::get(self.weights, name)?.f32(),
        }
    }

    /// The weight `name` as f32, or `None` if there is no such weight.
    pub fn optional<const D: usize>(&self, name: &str) -> Result<Option<Tensor<D>>> {
        let exists = self.weights.contains_key(name) || self.parameter::<D>(name).is_some();
        if exists { self.weight(name).map(Some) } else { Ok(None) }
    }

    /// The rows `ids` of the matrix `name`, as f32.
    pub fn rows(&self, name: &str, ids: Tensor<1, Int>) -> Result<Tensor<2>> {
        let rows = match self.parameter::<2>(name) {
            Some(parameter) => parameter.select(0, ids),
            None => weights::get(self.weights, name)?.select(ids)?,
        };
        Ok(if rows.dtype() == DType::F32 { rows } else { rows.cast(DType::F32) })
    }

    /// Returns `x W^T + b + scale * (x A^T) B^T` of the layer `name`, for `x` of `[L, in]` in f32 or bf16; the result
    /// is `[L, out]` in the dtype of `x`. Bias and LoRA are optional. Products with a block-quantised weight are f32;
    /// products with an eight-bit weight are in [`Scope::products`], or in fp8 by [`Scope::fp8`].
    pub fn linear(&self, x: Tensor<2>, name: &str) -> Result<Tensor<2>> {
        let dtype = x.dtype();
        let key = format!("{name}.weight");
        let bias = self.optional::<1>(&format!("{name}.bias"))?;
        let lora = self.lora(name);
        // A frozen block-quantised weight.
        if let Some(blocks) = self.blocks(&key) {
            let x = in_dtype(x, DType::F32);
            let base = ops::linear_blocks(x.clone(), blocks, bias);
            let y = match lora {
                Some((down, up)) => base + ops::linear(ops::linear(x, down, None), up, None) * self.lora_scale,
                None => base,
            };
            return Ok(in_dtype(y, dtype));
        }
        // A frozen eight-bit weight.
        if let Some(scaled) = self.scaled(&key) {
            let lora = lora.map(|(down, up)| (down, up, self.lora_scale));
            return Ok(if self.fp8 && scaled.kind == EightBits::E4m3 {
                ops::linear_fp8(x, scaled, bias, lora, self.products)
            } else {
                ops::linear_scaled(x, scaled, bias, lora, self.products)
            });
        }
        // A dense weight, frozen or trained.
        let weight = self.matrix(&key)?;
        Ok(match lora {
            Some((down, up)) => ops::linear_lora(x, weight, bias, down, up, self.lora_scale),
            None => ops::linear(x, weight, bias),
        })
    }

    /// The result of [`Scope::linear`] as f32, for passes that are not differentiated. On flex, the bits of a row do
    /// not depend on the other rows, so that decoding a sequence alone and in a batch agree ([`ops::linear_rows`]).
    pub fn linear_rows(&self, x: Tensor<2>, name: &str) -> Result<Tensor<2>> {
        let key = format!("{name}.weight");
        let bias = self.optional::<1>(&format!("{name}.bias"))?;
        let lora = self.lora(name);
        let blocks = self.blocks(&key);
        // The operator of block-quantised weights takes x in every dtype.
        let x = if blocks.is_some() { x } else { self.operand(x) };
        let base = if let Some(blocks) = blocks {
            ops::linear_blocks(x.clone(), blocks, bias)
        } else {
            let is_frozen = self.parameter::<2>(&key).is_none();
            // Both cases dequantise an eight-bit weight as a whole. A frozen weight for products in f32 keeps its
            // stored dtype, because the operator converts it piece by piece.
            let weight = if is_frozen && self.products == DType::F32 {
                weights::get(self.weights, &key)?.stored()?
            } else {
                self.matrix(&key)?
            };
            ops::linear_rows(x.clone(), weight, bias)
        };
        let Some((down, up)) = lora else { return Ok(base) };
        let dtype = x.dtype();
        let [down, up] = [down, up].map(|matrix| in_dtype(matrix, dtype));
        let without_bias = |x: Tensor<2>, matrix: Tensor<2>| ops::linear_rows(x, matrix, None);
        let inner = in_dtype(without_bias(x, down), dtype);
        Ok(base + without_bias(inner, up) * self.lora_scale)
    }

    /// The weight `name`, if it is frozen and block-quantised.
    fn blocks(&self, name: &str) -> Option<&Arc<BlockMatrix>> {
        if self.trains(name) { None } else { self.weights.get(name)?.blocks() }
    }

    /// The weight `name`, if it is frozen and in eight bits.
    fn scaled(&self, name: &str) -> Option<&ScaledMatrix> {
        if self.trains(name) { None } else { self.weights.get(name)?.scaled() }
    }

    /// Whether `name` is a trainable parameter.
    fn trains(&self, name: &str) -> bool {
        self.trainable.is_some_and(|all| all.get(name).is_some())
    }

    /// Casts `x` to the dtype of products.
    fn operand(&self, x: Tensor<2>) -> Tensor<2> {
        in_dtype(x, self.products)
    }

    /// The LoRA matrices A and B of the layer `name`.
    fn lora(&self, name: &str) -> Option<(Tensor<2>, Tensor<2>)> {
        self.parameter::<2>(&lora_a(name)).zip(self.parameter::<2>(&lora_b(name)))
    }

    /// The weight `name` in the dtype of products.
    fn matrix(&self, name: &str) -> Result<Tensor<2>> {
        let value = match self.parameter(name) {
            Some(parameter) => parameter,
            None => weights::get(self.weights, name)?.stored()?,
        };
        Ok(self.operand(value))
    }

    /// The trainable parameter `name`, recorded on the tape. `None` if there is no such parameter of rank `D`.
    fn parameter<const D: usize>(&self, name: &str) -> Option<Tensor<D>> {
        let (index, shape, value) = self.trainable?.get(name)?;
        let shape: [usize; D] = shape.try_into().ok()?;
        Some(self.tape.leaf(index, value).reshape(shape))
    }
}

fn in_dtype(x: Tensor<2>, dtype: DType) -> Tensor<2> {
    if x.dtype() == dtype { x } else { x.cast(dtype) }
}

/// The name of the LoRA matrix A (down projection, `[rank, in]`) of the layer `name`.
pub fn lora_a(name: &str) -> String {
    format!("{name}.lora_A.weight")
}

/// The name of the LoRA matrix B (up projection, `[out, rank]`) of the layer `name`.
pub fn lora_b(name: &str) -> String {
    format!("{name}.lora_B.weight")
}
