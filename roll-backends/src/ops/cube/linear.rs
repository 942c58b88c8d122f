//! Linear layers: cubek's products, and one epilogue kernel for bias and LoRA.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{elementwise_launch, values};
use crate::backend::{Cube, TensorMetadata};
use crate::ops::expression::Expression;
use crate::ops::{LinearKernel, Lora};

impl LinearKernel for Cube {
    fn linear_forward(
        x: CubeTensor,
        weight: CubeTensor,
        bias: CubeTensor,
        lora: Option<Lora<CubeTensor>>,
    ) -> (CubeTensor, Option<CubeTensor>) {
        let (x, weight) = (Expression::<Self>(x), Expression(weight));
        let dtype = weight.dtype();
        // Newly allocated; the epilogue kernel updates it in place.
        let y = values(x.clone().matmul(weight.t()).0);
        let bias = values(bias);
        let (lora_product, inner, scale) = match lora {
            Some(Lora { down, up, scale }) => {
                let inner = x.matmul(Expression(down).cast(dtype).t()).cast(dtype);
                let lora_product = inner.clone().matmul(Expression(up).cast(dtype).t());
                (values(lora_product.0), Some(inner.0), scale)
            }
            // A kernel launch needs all operands. Without LoRA, this one is not read.
            None => (bias.clone(), None, 0.0),
        };
        let [rows, outputs] = y.shape().dims::<2>();
        let count = rows * outputs;
        if count > 0 {
            let (cubes, dim) = elementwise_launch(&y, count);
            let (client, address, has_lora) = (y.client.clone(), y.required_address_type(), inner.is_some());
            let (out, lora_product, bias) =
                (y.clone().into_buffer_arg(), lora_product.into_buffer_arg(), bias.into_buffer_arg());
            add_bias_and_lora::launch(
                &client,
                cubes,
                dim,
                address,
                out,
                lora_product,
                bias,
                count,
                outputs,
                scale,
                has_lora,
            );
        }
        (y, inner)
    }
}

/// Adds `bias + scale * lora_product` to y, where `lora_product` is `(x A^T) B^T`; without LoRA (`has_lora` is false),
/// the bias only.
#[cube(launch, address_type = "dynamic")]
fn add_bias_and_lora(
    y: &mut [f32],
    lora_product: &[f32],
    bias: &[f32],
    count: usize,
    outputs: usize,
    scale: f32,
    #[comptime] has_lora: bool,
) {
    let i = ABSOLUTE_POS;
    if i >= count {
        terminate!();
    }
    let mut value = y[i] + bias[i % outputs];
    if comptime!(has_lora) {
        value += scale * lora_product[i];
    }
    y[i] = value;
}
