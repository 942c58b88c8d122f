//! Muon: momentum whose update of every matrix is made orthogonal (Jordan et al. 2024, "Muon: an optimizer for hidden
//! layers in neural networks"). Directions that are rare in gradients then move as fast as common ones. The fine
//! details of a small autoencoder depend on such directions.

use burn_tensor::{Device, Tensor};
use roll_core::{ParameterSpec, Result};

use super::upload;

/// Decay of the momentum per update.
const MOMENTUM: f32 = 0.95;
/// Coefficients of the quintic Newton-Schulz iteration, which brings singular values near 1.
const QUINTIC: [f32; 3] = [3.4445, -4.7750, 2.0315];
const ITERATIONS: usize = 5;
/// A tensor with fewer rows is not treated as a matrix.
const LEAST_ROWS: usize = 8;

/// Momentum of all parameters, concatenated.
#[derive(Debug)]
pub struct Muon {
    momentum: Vec<f32>,
}

impl Muon {
    /// Creates the optimizer with zero momentum.
    pub fn new(count: usize) -> Self {
        Self { momentum: vec![0.0; count] }
    }

    /// Updates the convolution kernels among `specs` and sets their gradients to zero. The other parameters are left to
    /// another optimizer.
    pub fn update(
        &mut self,
        specs: &[ParameterSpec],
        values: &mut [f32],
        gradients: &mut [f32],
        rate: f32,
        device: &Device,
    ) -> Result<()> {
        let mut start = 0;
        for spec in specs {
            let range = start..start + spec.len();
            start = range.end;
            let rows = spec.shape[0];
            if spec.shape.len() < 4 || rows < LEAST_ROWS || !spec.name.ends_with("weight") {
                continue;
            }
            let columns = spec.len() / rows;
            let (gradient, momentum) = (&mut gradients[range.clone()], &mut self.momentum[range.clone()]);
            // Nesterov momentum.
            let ahead = momentum.iter_mut().zip(gradient.iter()).map(|(m, g)| {
                *m = MOMENTUM * *m + g;
                g + MOMENTUM * *m
            });
            let step = orthogonal(ahead.collect(), [rows, columns], device)?;
            gradient.fill(0.0);
            // This scale changes outputs by similar amounts for matrices of all shapes.
            let scale = rate * (rows as f32 / columns as f32).max(1.0).sqrt();
            values[range].iter_mut().zip(step).for_each(|(value, d)| *value -= scale * d);
        }
        Ok(())
    }
}

/// Returns the matrix with its singular values brought near 1.
///
/// Columns of zeros are skipped and remain zero. They occur in causal kernels that see single pictures: two of three
/// temporal taps.
///
/// The iteration `x <- (a + b s + c s^2) x` with `s = x x^T` multiplies by polynomials of the initial `s`. So it runs
/// on the smaller of the two Gram matrices alone: the factors are accumulated, and the matrix is multiplied once.
fn orthogonal(mut values: Vec<f32>, [rows, columns]: [usize; 2], device: &Device) -> Result<Vec<f32>> {
    let size = values.iter().map(|v| v * v).sum::<f32>().sqrt();
    if size == 0.0 {
        return Ok(values);
    }
    let used: Vec<usize> = (0..columns).filter(|c| (0..rows).any(|r| values[r * columns + c] != 0.0)).collect();
    let packed = (0..rows).flat_map(|r| used.iter().map(move |c| r * columns + c)).map(|i| values[i] / size).collect();
    let wide = rows <= used.len();
    let turn = |x: Tensor<2>| if wide { x } else { x.transpose() };
    let x = turn(upload(packed, [rows, used.len()], device));
    let mut square = x.clone().matmul(x.clone().transpose());
    let identity = Tensor::<2>::eye(rows.min(used.len()), device);
    let mut factors = identity.clone();
    let [a, b, c] = QUINTIC;
    for _ in 0..ITERATIONS {
        let factor = identity.clone() * a + square.clone() * b + square.clone().matmul(square.clone()) * c;
        square = factor.clone().matmul(square).matmul(factor.clone());
        factors = factor.matmul(factors);
    }
    let result = roll_backends::to_host(turn(factors.matmul(x)))?.to_f32_vec();
    for (row, result) in values.chunks_exact_mut(columns).zip(result.chunks_exact(used.len())) {
        used.iter().zip(result).for_each(|(c, v)| row[*c] = *v);
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use roll_core::{Noise, Purpose};

    use super::*;

    #[test]
    fn rows_become_nearly_orthonormal() -> Result<()> {
        let mut uniform = Noise::new(1).uniform(Purpose::Synthetic, 0, 0);
        let values: Vec<f32> = (0..96).map(|_| uniform()).collect();
        for shape in [[8, 12], [12, 8]] {
            let q = orthogonal(values.clone(), shape, &Device::flex())?;
            let energy: f32 = q.iter().map(|v| v * v).sum();
            // There are eight singular values, each between about 0.6 and 1.2.
            assert!((8.0 * 0.36..8.0 * 1.44).contains(&energy), "{energy}");
        }
        Ok(())
    }

    #[test]
    fn columns_of_zeros_change_nothing() -> Result<()> {
        let mut uniform = Noise::new(1).uniform(Purpose::Synthetic, 0, 0);
        let values: Vec<f32> = (0..96).map(|_| uniform()).collect();
        let spread: Vec<f32> = values.iter().flat_map(|v| [0.0, *v, 0.0]).collect();
        let (q, wide) = (orthogonal(values, [8, 12], &Device::flex())?, orthogonal(spread, [8, 36], &Device::flex())?);
        assert!(q.iter().zip(wide.chunks_exact(3)).all(|(q, w)| w == [0.0, *q, 0.0]));
        Ok(())
    }
}
