//! The sinusoidal embedding of diffusion timesteps.

use burn_tensor::{DType, Device, Tensor, TensorData};
use roll_core::Timestep;

/// Ratio of the highest to the lowest frequency of the sinusoidal embedding, nearly.
const FREQUENCY_BASE: f64 = 10_000.0;

/// Sinusoidal embedding, f32 `[timesteps, width]`: cosines, then sines. Angles are computed in f64, as in the official
/// model.
pub fn sinusoid(timesteps: &[Timestep], width: usize, device: &Device) -> Tensor<2> {
    let half = width / 2;
    let frequency = |i: usize| FREQUENCY_BASE.powf(-(i as f64) / half as f64);
    let values: Vec<f32> = timesteps
        .iter()
        .flat_map(|t| {
            let cosines = (0..half).map(|i| (t.0 * frequency(i)).cos() as f32);
            let sines = (0..half).map(|i| (t.0 * frequency(i)).sin() as f32);
            cosines.chain(sines).collect::<Vec<_>>()
        })
        .collect();
    Tensor::from_data(TensorData::new(values, [timesteps.len(), 2 * half]), (device, DType::F32))
}
