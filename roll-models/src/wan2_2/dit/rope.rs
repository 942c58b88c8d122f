//! Rotary position embedding over frame, row and column.

use roll_core::{Result, Tensor};

use super::patch::Grid;

const THETA: f64 = 10_000.0;

/// Computes cosines and sines, f32 `[tokens, head_dim / 2]` each. As in the official model, a head's pairs are split
/// between the axes: a third (rounded down) each for rows and columns, the rest for frames.
pub fn rotary_tables(grid: &Grid, head_dim: usize) -> Result<(Tensor, Tensor)> {
    let spatial = 2 * (head_dim / 6);
    let widths = [head_dim - 2 * spatial, spatial, spatial];
    let [gt, gh, gw] = grid.patches;
    let half = head_dim / 2;
    let (mut cos, mut sin) = (Vec::with_capacity(gt * gh * gw * half), Vec::with_capacity(gt * gh * gw * half));
    for token in 0..gt * gh * gw {
        let coordinates = [token / (gh * gw), token / gw % gh, token % gw];
        for (position, width) in coordinates.into_iter().zip(widths) {
            for pair in 0..width / 2 {
                let angle = position as f64 / THETA.powf((2 * pair) as f64 / width as f64);
                cos.push(angle.cos() as f32);
                sin.push(angle.sin() as f32);
            }
        }
    }
    let shape = [gt * gh * gw, half];
    Ok((Tensor::new(cos, shape)?, Tensor::new(sin, shape)?))
}
