//! Linear layers on flex, with and without LoRA.

use burn_tensor::DType;
use half::bf16;

use super::{Values, cast, tensor};
use crate::backend::{Flex, TensorMetadata, flex::FlexTensor};
use crate::ops::kernels::linear::{self as kernels, LinearShape, Weight};
use crate::ops::kernels::parallel::in_pool;
use crate::ops::kernels::row_products::{self, Stored};
use crate::ops::{Cotangents, LinearKernel, Lora, SavedLinear};

fn shape_of(x: &FlexTensor, weight: &FlexTensor, lora: Option<&Lora<FlexTensor>>) -> LinearShape {
    let ([rows, inputs], [outputs, _]) = (x.shape().dims::<2>(), weight.shape().dims::<2>());
    let rank = lora.map_or(0, |lora| lora.down.shape().dims::<2>()[0]);
    LinearShape { rows, inputs, outputs, rank }
}

/// A contiguous weight, f32 or bf16.
struct ContiguousWeight(FlexTensor);

impl ContiguousWeight {
    /// Converts a weight; bf16 stays bf16, and other dtypes become f32.
    fn of(weight: FlexTensor) -> Self {
        match weight.dtype() {
            DType::BF16 => Self(weight.to_contiguous()),
            _ => Self(Values::of(weight).0),
        }
    }

    /// The elements, row-major.
    fn elements(&self) -> Weight<'_> {
        let range = self.0.layout().start_offset()..self.0.layout().start_offset() + self.0.layout().num_elements();
        match self.0.dtype() {
            DType::BF16 => Weight::Bf16(&self.0.storage::<bf16>()[range]),
            _ => Weight::F32(&self.0.storage::<f32>()[range]),
        }
    }
}

impl LinearKernel for Flex {
    fn linear_forward(
        x: FlexTensor,
        weight: FlexTensor,
        bias: FlexTensor,
        lora: Option<Lora<FlexTensor>>,
    ) -> (FlexTensor, Option<FlexTensor>) {
        let shape = shape_of(&x, &weight, lora.as_ref());
        let (x, weight, bias) = (Values::of(x), ContiguousWeight::of(weight), Values::of(bias));
        let lora = lora.map(|lora| lora.map(Values::of));
        let lora_slices = lora.as_ref().map(|lora| lora.as_ref().map(Values::slice));
        let (x, weight, bias) = (x.slice(), weight.elements(), bias.slice());
        let (y, inner) = in_pool(shape.products(), || kernels::forward(shape, x, weight, bias, lora_slices));
        let inner = lora.is_some().then(|| tensor(inner, [shape.rows, shape.rank]));
        (tensor(y, [shape.rows, shape.outputs]), inner)
    }

    fn rows_forward(x: FlexTensor, weight: FlexTensor, bias: Option<FlexTensor>) -> FlexTensor {
        let no_lora = None;
        let LinearShape { rows, inputs, outputs, .. } = shape_of(&x, &weight, no_lora);
        let bias = Values::of(bias.unwrap_or_else(|| tensor(vec![0.0; outputs], [outputs])));
        let (x, weight) = (Values::of(x), ContiguousWeight::of(weight));
        let stored = match weight.elements() {
            Weight::F32(values) => Stored::F32(values),
            Weight::Bf16(values) => Stored::Bf16(values),
        };
        let y = row_products::forward(rows, inputs, x.slice(), stored, bias.slice());
        tensor(y, [rows, outputs])
    }

    fn linear_backward(saved: SavedLinear<FlexTensor>, d_y: FlexTensor, wanted: [bool; 5]) -> Cotangents<Self, 5> {
        let lora = saved.lora.as_ref().map(|(lora, _)| lora);
        let (shape, dtype) = (shape_of(&saved.x, &saved.weight, lora), saved.x.dtype());
        let (x, weight, d_y) = (Values::of(saved.x), ContiguousWeight::of(saved.weight), Values::of(d_y));
        let lora = saved.lora.map(|(lora, inner)| (lora.map(Values::of), Values::of(inner)));
        let lora_slices = lora.as_ref().map(|(lora, inner)| (lora.as_ref().map(Values::slice), inner.slice()));
        let (weight_elements, x_values, d_y) = (weight.elements(), x.slice(), d_y.slice());
        let pull = || kernels::backward(shape, x_values, weight_elements, lora_slices, d_y, wanted);
        let [d_x, d_weight, d_bias, d_down, d_up] = in_pool(shape.products(), pull);
        // A gradient as a tensor in the shape of the LoRA matrix that `matrix_of` selects.
        let like_lora = |d: Option<Vec<f32>>, matrix_of: fn(&Lora<Values>) -> &Values| {
            d.zip(lora.as_ref()).map(|(d, (lora, _))| matrix_of(lora).like(d))
        };
        [
            d_x.map(|d| cast(x.like(d), dtype)),
            d_weight.map(|d| cast(tensor(d, [shape.outputs, shape.inputs]), dtype)),
            d_bias.map(|d| tensor(d, [shape.outputs])),
            like_lora(d_down, |lora| &lora.down),
            like_lora(d_up, |lora| &lora.up),
        ]
    }
}
