//! Tables of the rotary position embedding over frame, row and column.

use roll_core::{Result, Tensor};

use roll_network::patch::Grid;

/// Base of the frequencies.
const THETA: f64 = 10_000.0;

/// Computes the cosines and sines of each token's rotation angles, f32 `[tokens, head_dim / 2]` each. As in the
/// official model, the pairs of elements of a head are divided between frames, rows and columns, in this order. Rows
/// and columns have a third of the pairs each (rounded down), frames have the rest.
pub fn rotary_tables(grid: &Grid, head_dim: usize) -> Result<(Tensor, Tensor)> {
    let spatial_width = 2 * (head_dim / 6);
    // Elements of a head for frame, row and column.
    let widths = [head_dim - 2 * spatial_width, spatial_width, spatial_width];
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
