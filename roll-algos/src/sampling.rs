//! Generating without training.

use roll_core::{Adapter, Conditioning, DiffusionModel, FlowSchedule, Grad, Progress, Result, Tensor};

/// Integrates the flow from `noise` (`[C, T, H, W]`) to data with Euler steps,
/// `x_{i+1} = x_i + (sigma_{i+1} - sigma_i) v_i`. The known first frame of TI2V models replaces the first frame before
/// every step and at the end.
pub fn euler(
    model: &mut dyn DiffusionModel,
    conditioning: &Conditioning,
    noise: &Tensor,
    schedule: &FlowSchedule,
    adapter: Adapter,
    progress: &dyn Progress,
) -> Result<Tensor> {
    let mut x = conditioning.with_first_frame(noise)?;
    for i in 0..schedule.steps() {
        progress.phase(&format!("denoising step {} of {}", i + 1, schedule.steps()));
        let (velocity, _) = model.velocity(&x, schedule.timestep(i), conditioning, adapter, Grad::Skip)?;
        let delta = schedule.delta(i);
        let values = x.f32s()?.iter().zip(velocity.f32s()?).map(|(x, v)| x + delta * v).collect::<Vec<f32>>();
        x = conditioning.with_first_frame(&Tensor::new(values, x.shape())?)?;
    }
    Ok(x)
}
