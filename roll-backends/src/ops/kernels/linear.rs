//! `x W^T + b + scale * (x A^T) B^T` and its gradients on the CPU, as products that accumulate into one result.

use half::bf16;
use rayon::prelude::*;

use super::matrix::{Threads, UNSCALED, Update, View, ViewMut};
use super::norm::sum_of_rows;
use super::panel_products::{RightMatrix, depth_and_columns};
use super::parallel::{ELEMENT_COST, min_items_per_task};
use super::tile;

/// Sizes of one layer.
#[derive(Clone, Copy, Debug)]
pub struct LinearShape {
    pub rows: usize,
    pub inputs: usize,
    pub outputs: usize,
    /// Rank of the LoRA matrices, if there are any.
    pub rank: usize,
}

/// A weight `[outputs, inputs]`, row-major, in its storage dtype.
#[derive(Clone, Copy, Debug)]
pub enum Weight<'a> {
    /// f32, multiplied directly.
    F32(&'a [f32]),
    /// bf16, converted to f32 panel by panel, never as a whole.
    Bf16(&'a [bf16]),
}

type Lora<'a> = crate::ops::Lora<&'a [f32]>;

impl LinearShape {
    /// Number of multiply-adds of the product with the weight.
    pub fn products(&self) -> usize {
        self.rows * self.inputs * self.outputs
    }

    /// x, `[rows, inputs]`.
    fn x<'a>(&self, x: &'a [f32]) -> View<'a> {
        View::new(x, self.rows, self.inputs)
    }

    /// The result or its cotangent, `[rows, outputs]`.
    fn y<'a>(&self, y: &'a [f32]) -> View<'a> {
        View::new(y, self.rows, self.outputs)
    }

    /// Adds the product of `a` and the weight, transposed if `transpose_weight`, to `out`.
    fn add_product(&self, a: &[f32], weight: Weight, transpose_weight: bool, out: &mut [f32]) {
        let &Self { rows, inputs, outputs, .. } = self;
        match weight {
            // [`RightMatrix`] packs the weight into panels, which does not pay for a single row, or without SIMD.
            Weight::F32(values) if rows == 1 || !tile::has_intrinsics() => {
                let weight = View::new(values, outputs, inputs);
                let weight = if transpose_weight { weight.t() } else { weight };
                let [depth, columns] = depth_and_columns(outputs, inputs, transpose_weight);
                ViewMut::new(out, rows, columns).product(
                    View::new(a, rows, depth),
                    weight,
                    UNSCALED,
                    Update::Add,
                    Threads::All,
                );
            }
            Weight::F32(values) => RightMatrix { values, outputs, inputs }.add_product(a, transpose_weight, out),
            Weight::Bf16(values) => RightMatrix { values, outputs, inputs }.add_product(a, transpose_weight, out),
        }
    }

    /// The down projection A, `[rank, inputs]`.
    fn a<'a>(&self, lora: Lora<'a>) -> View<'a> {
        View::new(lora.down, self.rank, self.inputs)
    }

    /// The up projection B, `[outputs, rank]`.
    fn b<'a>(&self, lora: Lora<'a>) -> View<'a> {
        View::new(lora.up, self.outputs, self.rank)
    }
}

/// Values of the argument `transpose_weight` of [`LinearShape::add_product`].
const TRANSPOSED: bool = true;
const AS_STORED: bool = false;

/// Returns the result `[rows, outputs]` and, with LoRA, `x A^T` (`[rows, rank]`; else empty).
pub fn forward(
    shape: LinearShape,
    x: &[f32],
    weight: Weight,
    bias: &[f32],
    lora: Option<Lora>,
) -> (Vec<f32>, Vec<f32>) {
    let mut y = vec![0.0; shape.rows * shape.outputs];
    if !y.is_empty() {
        let rows = y.par_chunks_mut(shape.outputs).with_min_len(min_items_per_task(shape.outputs * ELEMENT_COST));
        rows.for_each(|row| row.copy_from_slice(bias));
    }
    shape.add_product(x, weight, TRANSPOSED, &mut y);
    let Some(lora) = lora else { return (y, Vec::new()) };
    let mut out = ViewMut::new(&mut y, shape.rows, shape.outputs);
    let inner = product(shape.rows, shape.rank, shape.x(x), shape.a(lora).t(), UNSCALED);
    out.product(View::new(&inner, shape.rows, shape.rank), shape.b(lora).t(), lora.scale, Update::Add, Threads::All);
    (y, inner)
}

/// Returns the gradients of x, weight, bias, A and B that are `wanted`. `lora` holds the matrices and the `x A^T` that
/// [`forward`] returned.
pub fn backward(
    shape: LinearShape,
    x: &[f32],
    weight: Weight,
    lora: Option<(Lora, &[f32])>,
    d_y: &[f32],
    wanted: [bool; 5],
) -> [Option<Vec<f32>>; 5] {
    let LinearShape { rows, inputs, outputs, rank } = shape;
    let [x_wanted, weight_wanted, bias_wanted, a_wanted, b_wanted] = wanted;
    let d = shape.y(d_y);
    // LoRA's matrices and the cotangent of `x A^T`, which the gradients of x and A both need.
    let d_inner = match lora {
        Some((lora, _)) if x_wanted || a_wanted => Some((lora, product(rows, rank, d, shape.b(lora), lora.scale))),
        _ => None,
    };
    let d_x = x_wanted.then(|| {
        let mut d_x = vec![0.0; rows * inputs];
        shape.add_product(d_y, weight, AS_STORED, &mut d_x);
        if let Some((lora, d_inner)) = &d_inner {
            let d_inner = View::new(d_inner, rows, rank);
            ViewMut::new(&mut d_x, rows, inputs).product(d_inner, shape.a(*lora), UNSCALED, Update::Add, Threads::All);
        }
        d_x
    });
    let d_weight = weight_wanted.then(|| product(outputs, inputs, d.t(), shape.x(x), UNSCALED));
    let d_bias = bias_wanted.then(|| match rows {
        0 => vec![0.0; outputs],
        _ => sum_of_rows(rows, d_y),
    });
    let d_a = match &d_inner {
        Some((_, d_inner)) if a_wanted => {
            Some(product(rank, inputs, View::new(d_inner, rows, rank).t(), shape.x(x), UNSCALED))
        }
        _ => None,
    };
    let d_b = match lora {
        Some((lora, inner)) if b_wanted => {
            Some(product(outputs, rank, d.t(), View::new(inner, rows, rank), lora.scale))
        }
        _ => None,
    };
    [d_x, d_weight, d_bias, d_a, d_b]
}

/// Returns `factor * a b`, `[rows, columns]`.
fn product(rows: usize, columns: usize, a: View, b: View, factor: f32) -> Vec<f32> {
    let mut out = vec![0.0; rows * columns];
    ViewMut::new(&mut out, rows, columns).product(a, b, factor, Update::Overwrite, Threads::All);
    out
}
