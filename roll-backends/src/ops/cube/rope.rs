//! Rotary position embedding: each unit rotates one pair.

use burn::backend::{Cube, TensorMetadata};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{elementwise, empty_like, values};
use crate::ops::RopeKernel;

impl RopeKernel for Cube {
    fn rotate(x: CubeTensor, [cos, sin]: [CubeTensor; 2], heads: usize, back: bool) -> CubeTensor {
        let (x, cos, sin) = (values(x), values(cos), values(sin));
        let y = empty_like(&x);
        let [rows, channels] = x.shape().dims::<2>();
        let pairs = rows * channels / 2;
        if pairs > 0 {
            let (cubes, dim) = elementwise(&x, pairs);
            let (client, address) = (x.client.clone(), x.required_address_type());
            let (x, cos, sin, out) =
                (x.into_buffer_arg(), cos.into_buffer_arg(), sin.into_buffer_arg(), y.clone().into_buffer_arg());
            let row = channels / 2;
            rotate_pairs::launch(&client, cubes, dim, address, x, cos, sin, out, pairs, row, row / heads, back);
        }
        y
    }
}

/// The two values of a pair are adjacent. `cos` and `sin` are `[rows, half]`. There are `half` pairs in a head, `row`
/// in a row and `pairs` in the tensor.
#[cube(launch, address_type = "dynamic")]
fn rotate_pairs(
    x: &[f32],
    cos: &[f32],
    sin: &[f32],
    y: &mut [f32],
    pairs: usize,
    row: usize,
    half: usize,
    #[comptime] back: bool,
) {
    let pair = ABSOLUTE_POS;
    if pair >= pairs {
        terminate!();
    }
    let angle = pair / row * half + pair % half;
    let (even, odd) = (x[2 * pair], x[2 * pair + 1]);
    let (c, s) = (cos[angle], if comptime!(back) { -sin[angle] } else { sin[angle] });
    y[2 * pair] = even * c - odd * s;
    y[2 * pair + 1] = even * s + odd * c;
}
