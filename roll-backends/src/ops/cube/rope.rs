//! Rotary position embedding: each unit (thread) rotates one pair of values.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{elementwise_launch, empty_like, values};
use crate::backend::{Cube, TensorMetadata};
use crate::ops::{Direction, RopeKernel};

impl RopeKernel for Cube {
    fn rotate(x: CubeTensor, [cos, sin]: [CubeTensor; 2], heads: usize, direction: Direction) -> CubeTensor {
        let (x, cos, sin) = (values(x), values(cos), values(sin));
        let y = empty_like(&x);
        let [rows, channels] = x.shape().dims::<2>();
        let pairs = rows * channels / 2;
        if pairs > 0 {
            let (cubes, dim) = elementwise_launch(&x, pairs);
            let (client, address) = (x.client.clone(), x.required_address_type());
            let (x, cos, sin, out) =
                (x.into_buffer_arg(), cos.into_buffer_arg(), sin.into_buffer_arg(), y.clone().into_buffer_arg());
            let per_row = channels / 2;
            let per_head = per_row / heads;
            let is_backward = direction == Direction::Back;
            rotate_pairs::launch(&client, cubes, dim, address, x, cos, sin, out, pairs, per_row, per_head, is_backward);
        }
        y
    }
}

/// Rotates each pair of adjacent values by the angle of its row and its place in the head, or by the negative angle if
/// `is_backward` (for the gradient). `cos` and `sin` are `[rows, per_head]`. There are `per_head` pairs in a head,
/// `per_row` in a row and `pairs` in the tensor.
#[cube(launch, address_type = "dynamic")]
fn rotate_pairs(
    x: &[f32],
    cos: &[f32],
    sin: &[f32],
    y: &mut [f32],
    pairs: usize,
    per_row: usize,
    per_head: usize,
    #[comptime] is_backward: bool,
) {
    let pair = ABSOLUTE_POS;
    if pair >= pairs {
        terminate!();
    }
    // All heads of a row share its angles. `per_row` is a multiple of `per_head`.
    let row = pair / per_row;
    let pair_in_head = pair % per_head;
    let index = row * per_head + pair_in_head;
    let (even, odd) = (x[2 * pair], x[2 * pair + 1]);
    let (c, s) = (cos[index], if comptime!(is_backward) { -sin[index] } else { sin[index] });
    y[2 * pair] = even * c - odd * s;
    y[2 * pair + 1] = even * s + odd * c;
}
