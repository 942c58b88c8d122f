//! Initial weights of the VAE: a network that processes every frame separately and whose residual blocks are the
//! identity. The decoder then learns blurred pictures first, then details, then motion.

use roll_core::{Result, StateDict, Tensor};
use roll_wan::vae::VaeConfig;

/// Returns the weights of [`VaeConfig::random_state`] with these changes:
/// - causal kernels see only the present frame, with their variance scaled accordingly;
/// - the last layer of every residual and attention branch is zero;
/// - temporal downsampling keeps the later of two frames, temporal upsampling repeats the frame.
pub fn state(config: &VaeConfig, seed: u64) -> Result<StateDict> {
    let drawn = config.random_state(seed)?;
    drawn.into_iter().map(|(key, tensor)| Ok((key.clone(), initial(&key, tensor)?))).collect()
}

fn initial(key: &str, tensor: Tensor) -> Result<Tensor> {
    let shape = tensor.shape().to_vec();
    let mut values = tensor.to_f32_vec();
    if key.ends_with("bias") || key.ends_with("residual.6.weight") || key.ends_with("proj.weight") {
        values.fill(0.0);
    } else if key.ends_with("gamma") {
        values.fill(1.0);
    } else if key.ends_with("time_conv.weight") {
        let inputs = shape[1];
        for (pair, taps) in values.chunks_exact_mut(3).enumerate() {
            let (output, input) = (pair / inputs, pair % inputs);
            taps.copy_from_slice(&[0.0, 0.0, f32::from(u8::from(output % inputs == input))]);
        }
    } else if let [_, _, 3, 3, 3] = shape[..] {
        for taps in values.chunks_exact_mut(27) {
            taps[..18].fill(0.0);
            taps[18..].iter_mut().for_each(|v| *v *= 3f32.sqrt());
        }
    }
    Tensor::new(values, shape)
}

#[cfg(test)]
mod tests {
    use roll_core::{Noise, Purpose};
    use roll_wan::vae::{LatentStatistics, Vae};

    use super::*;

    #[test]
    fn a_still_clip_is_encoded_frame_by_frame() {
        let config = super::super::config();
        let device = roll_backends::device("flex").unwrap();
        let statistics = LatentStatistics::published(16).unwrap();
        let vae = Vae::load_with_statistics(&state(&config, 1).unwrap(), &statistics, &device).unwrap();
        let frame = Noise::new(2).normal(Purpose::Synthetic, 0, 0, &[1, 3, 16, 16]).unwrap();
        let still: Vec<f32> = (0..9).flat_map(|_| frame.f32s().unwrap().to_vec()).collect();
        let latents = vae.encode(&Tensor::new(still, [9, 3, 16, 16]).unwrap()).unwrap();
        let one = vae.encode(&frame).unwrap();
        for (clip, one) in latents.f32s().unwrap().chunks_exact(3 * 4).zip(one.f32s().unwrap().chunks_exact(4)) {
            for t in 0..3 {
                clip[4 * t..][..4].iter().zip(one).for_each(|(a, b)| assert!((a - b).abs() < 1e-4, "{a} {b}"));
            }
        }
    }
}
