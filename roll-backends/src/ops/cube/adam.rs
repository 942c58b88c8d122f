//! The AdamW update: every number is read and written once.

use burn::backend::Cube;
use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use roll_core::AdamUpdate;

use super::{elementwise_launch, empty_like, values};
use crate::ops::AdamKernel;

impl AdamKernel for Cube {
    fn adam_update(operands: [CubeTensor; 4], update: &AdamUpdate) -> [CubeTensor; 3] {
        let [p, g, m, v] = operands.map(values);
        let new = [empty_like(&p), empty_like(&p), empty_like(&p)];
        let count = p.shape().num_elements();
        if count > 0 {
            let (cubes, dim) = elementwise_launch(&p, count);
            let (client, address) = (p.client.clone(), p.required_address_type());
            let [p_to, m_to, v_to] = new.clone().map(|new| new.into_buffer_arg());
            let AdamUpdate { scale, beta_2, rest, eps, step_size, root_correction, keep } = *update;
            forward::launch(
                &client,
                cubes,
                dim,
                address,
                p.into_buffer_arg(),
                g.into_buffer_arg(),
                m.into_buffer_arg(),
                v.into_buffer_arg(),
                p_to,
                m_to,
                v_to,
                count,
                scale[0],
                scale[1],
                beta_2,
                rest[0],
                rest[1],
                eps,
                step_size,
                root_correction,
                keep,
            );
        }
        new
    }
}

/// The update, in the order of operations of [`AdamUpdate`].
#[cube(launch, address_type = "dynamic")]
#[allow(clippy::too_many_arguments, reason = "a kernel takes its numbers one by one")]
fn forward(
    p: &[f32],
    g: &[f32],
    m: &[f32],
    v: &[f32],
    p_to: &mut [f32],
    m_to: &mut [f32],
    v_to: &mut [f32],
    count: usize,
    scale: f32,
    clipping: f32,
    beta_2: f32,
    rest_1: f32,
    rest_2: f32,
    eps: f32,
    step_size: f32,
    root_correction: f32,
    keep: f32,
) {
    let i = ABSOLUTE_POS;
    if i >= count {
        terminate!();
    }
    let gradient = g[i] * scale * clipping;
    let first = m[i] + rest_1 * (gradient - m[i]);
    let second = v[i] * beta_2 + rest_2 * gradient * gradient;
    p_to[i] = p[i] * keep - step_size * (first / (second.sqrt() / root_correction + eps));
    m_to[i] = first;
    v_to[i] = second;
}
