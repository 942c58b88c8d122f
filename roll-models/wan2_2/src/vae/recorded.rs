//! Encoding and decoding inside the caller's autodiff graph, to train a VAE. Videos and latents are tensors on the
//! device, `[C, T, H, W]`.
//!
//! Every operation on weights is recorded, so memory grows with the video: these functions suit small networks and
//! short clips.

use burn_tensor::Tensor as Burn;
use roll_core::{Error, Result};

use super::chain::CausalChain;
use super::frames::chunk_frames;
use super::{Vae, VaeVersion};

impl Vae {
    /// Encodes a video like [`Vae::encode`], from `[3, T', H, W]` to normalised latents `[C, T, H, W]`, both on the
    /// device. Gradients reach the video and, if the weights are leaves (see [`roll_backends::Resident::tracked`]), the
    /// weights.
    pub fn encode_recorded(&self, video: Burn<4>) -> Result<Burn<4>> {
        let frames = self.check_video(&video)?;
        let chunks = self.config.latent_frames(frames)?;
        run(&self.encoder, video, chunks, self.config.temporal_stride())
    }

    /// Decodes latents like [`Vae::decode`], from normalised latents `[C, T, H, W]` to frames `[3, T', H, W]`, not
    /// clamped, both on the device.
    pub fn decode_recorded(&self, latents: Burn<4>) -> Result<Burn<4>> {
        let [frames, ..] = self.check_latents(&latents.dims())?;
        run(&self.decoder, latents, frames, 1)
    }

    /// Encodes `N` videos of one frame each in one pass: `[3, N, H, W]` to `[C, N, H, W]`. See
    /// [`Vae::encode_recorded`].
    pub fn encode_stills(&self, pictures: Burn<4>) -> Result<Burn<4>> {
        self.check_video(&pictures)?;
        self.run_stills(&self.encoder, pictures)
    }

    /// Decodes the latents of `N` videos of one frame each: `[C, N, H, W]` to `[3, N, H, W]`. See
    /// [`Vae::decode_recorded`].
    pub fn decode_stills(&self, latents: Burn<4>) -> Result<Burn<4>> {
        self.check_latents(&latents.dims())?;
        self.run_stills(&self.decoder, latents)
    }

    /// Runs videos of one frame each, `[C, N, H, W]`. The frames of a first chunk are independent of one another,
    /// because its convolutions apply only the tap of the newest frame (see `Layer::convolve`). The shortcuts of the
    /// Wan2.2 VAE treat the frames as consecutive frames of one video, so each frame passes alone there.
    fn run_stills(&self, chain: &CausalChain, x: Burn<4>) -> Result<Burn<4>> {
        let frames_per_pass = match self.config.version {
            VaeVersion::V2_1 => x.dims()[1],
            VaeVersion::V2_2 => 1,
        };
        let start = chain.start();
        let mut results = Vec::new();
        for stills in x.split(frames_per_pass, 1) {
            let (y, _) = chain.advance(stills, &start)?;
            results.push(y);
        }
        Ok(Burn::cat(results, 1))
    }

    /// Returns the number of frames. Fails unless the video is `[3, T, H, W]` of a size that the encoder takes.
    fn check_video(&self, video: &Burn<4>) -> Result<usize> {
        let [channels, frames, h, w] = video.dims();
        self.config.latent_size([h, w])?;
        if channels != 3 || frames == 0 {
            return Err(Error::shape("video to encode", "[3, T, H, W], T above 0", &video.dims()));
        }
        Ok(frames)
    }
}

/// Runs a chain over a whole video or its latents: a first chunk of one frame, then chunks of `frames_per_chunk`
/// frames.
fn run(chain: &CausalChain, x: Burn<4>, chunks: usize, frames_per_chunk: usize) -> Result<Burn<4>> {
    let mut state = chain.start();
    let mut results = Vec::with_capacity(chunks);
    for chunk in 0..chunks {
        let frames = chunk_frames(chunk, frames_per_chunk);
        let (y, next) = chain.advance(x.clone().narrow(1, frames.start, frames.len()), &state)?;
        results.push(y);
        state = next;
    }
    Ok(Burn::cat(results, 1))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use roll_backends::{NdTensor, Parameters, Resident, Tape, to_device, to_host, vjp};
    use roll_core::{Grad, Noise, ParameterSpec, Purpose, Tensor};

    use super::super::{Chunking, LatentStatistics, VaeConfig};
    use super::*;

    fn config(version: VaeVersion) -> VaeConfig {
        VaeConfig {
            version,
            encoder_dim: 4,
            decoder_dim: 4,
            z_dim: 4,
            dim_mult: vec![1, 2, 2],
            num_res_blocks: 1,
            temporal_downsample: vec![false, true],
        }
    }

    fn parameters(config: &VaeConfig) -> Parameters {
        let state = config.random_state(21).unwrap();
        let specs = state.iter().map(|(k, t)| ParameterSpec { name: k.clone(), shape: t.shape().to_vec() }).collect();
        let values = state.values().map(Tensor::to_f32_vec).collect();
        Parameters::new(specs, values, &roll_backends::device("flex").unwrap())
    }

    fn vae(config: &VaeConfig, parameters: &Parameters, tape: &Tape) -> Vae {
        let statistics = LatentStatistics { mean: vec![0.1, -0.2, 0.3, 0.0], std: vec![1.5, 0.5, 1.0, 2.0] };
        let store = Resident::tracked(&parameters.snapshot().segment("").unwrap(), tape);
        Vae::with_store(config.clone(), &statistics, Arc::new(store)).unwrap()
    }

    fn normal(shape: &[usize], sample: u64) -> Tensor {
        Noise::new(8).normal(Purpose::Synthetic, 0, sample, shape).unwrap()
    }

    fn dot(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    }

    fn device_tensor(tensor: &Tensor) -> Burn<4> {
        to_device(tensor, &roll_backends::device("flex").unwrap()).unwrap()
    }

    fn swapped(tensor: &Tensor) -> Tensor {
        to_host(device_tensor(tensor).swap_dims(0, 1)).unwrap()
    }

    fn assert_close(a: &Tensor, b: &Tensor) {
        assert_eq!(a.shape(), b.shape());
        for (a, b) in a.f32s().unwrap().iter().zip(b.f32s().unwrap()) {
            assert!((a - b).abs() < 1e-5 * b.abs().max(1.0), "{a} {b}");
        }
    }

    #[test]
    fn recorded_passes_and_stills_equal_unrecorded_passes() {
        for version in [VaeVersion::V2_1, VaeVersion::V2_2] {
            let config = config(version);
            let vae = vae(&config, &parameters(&config), &Tape::off());
            let side = 2 * vae.config().spatial_stride();
            let video = normal(&[5, 3, side, side], 1);
            let latents = vae.encode(&video).unwrap();
            assert_close(&to_host(vae.encode_recorded(device_tensor(&swapped(&video))).unwrap()).unwrap(), &latents);
            let frames = vae.decode(&latents, &Chunking::default(), Grad::Skip).unwrap().0;
            assert_close(&swapped(&to_host(vae.decode_recorded(device_tensor(&latents)).unwrap()).unwrap()), &frames);
            let stills = vae.encode_stills(device_tensor(&swapped(&video))).unwrap();
            let decoded = swapped(&to_host(vae.decode_stills(stills.clone()).unwrap()).unwrap());
            for frame in 0..5 {
                let picture = Tensor::new(
                    video.f32s().unwrap()[frame * 3 * side * side..][..3 * side * side].to_vec(),
                    [1, 3, side, side],
                )
                .unwrap();
                let latent = vae.encode(&picture).unwrap();
                assert_close(&to_host(stills.clone().narrow(1, frame, 1)).unwrap(), &latent);
                let alone = vae.decode(&latent, &Chunking::default(), Grad::Skip).unwrap().0;
                let together = decoded.f32s().unwrap()[frame * alone.len()..][..alone.len()].to_vec();
                assert_close(&Tensor::new(together, alone.shape()).unwrap(), &alone);
            }
        }
    }

    /// Checks that the gradient of `f` with respect to every weight whose name begins with one of `part` equals central
    /// differences and is not zero.
    fn check_weight_gradients(config: &VaeConfig, part: [&str; 2], f: impl Fn(&Vae) -> Burn<4>) {
        let parameters = parameters(config);
        let size: usize = parameters.specs().iter().map(ParameterSpec::len).sum();
        let mut values = vec![0.0; size];
        parameters.read(&mut values).unwrap();
        let (outputs, recorded) =
            vjp(&[], Tape::on(), |_, tape| Ok(vec![f(&vae(config, &parameters, tape)).into()])).unwrap();
        let cotangent = normal(outputs[0].shape(), 30);
        recorded.pull(vec![Some(NdTensor::from(device_tensor(&cotangent)))], Some(&parameters));
        let mut gradient = vec![0.0; size];
        parameters.take_gradients(&mut gradient).unwrap();
        let value_at = |moved: &[f32]| {
            parameters.write(moved).unwrap();
            let value = to_host(f(&vae(config, &parameters, &Tape::off()))).unwrap();
            dot(value.f32s().unwrap(), cotangent.f32s().unwrap())
        };
        let mut start = 0;
        for (index, spec) in parameters.specs().iter().enumerate() {
            let range = start..start + spec.len();
            start = range.end;
            if !part.iter().any(|prefix| spec.name.starts_with(prefix)) {
                continue;
            }
            let direction = normal(&[spec.len()], 100 + index as u64);
            let along = |h: f32| {
                let mut moved = values.clone();
                moved[range.clone()].iter_mut().zip(direction.f32s().unwrap()).for_each(|(v, d)| *v += h * d);
                value_at(&moved)
            };
            // Fourth order, so that the step can be large compared with rounding errors.
            let slope = |h: f32| (along(h) - along(-h)) / f64::from(2.0 * h);
            let measured = (4.0 * slope(5e-4) - slope(1e-3)) / 3.0;
            let own = &gradient[range.clone()];
            let scale = dot(own, own).sqrt() * (spec.len() as f64).sqrt();
            assert!(scale > 0.0, "{} got no gradient", spec.name);
            let pulled = dot(own, direction.f32s().unwrap());
            let off = (measured - pulled).abs();
            assert!(off < 5e-3 * scale.max(pulled.abs()), "{}: measured {measured}, pulled {pulled}", spec.name);
        }
    }

    #[test]
    fn gradients_of_all_weights_match_central_differences() {
        for version in [VaeVersion::V2_1, VaeVersion::V2_2] {
            let config = config(version);
            let side = 2 * config.spatial_stride();
            // Encoder and decoder separately: their composition is too nonlinear for differences in f32.
            let video = device_tensor(&normal(&[3, 5, side, side], 2));
            check_weight_gradients(&config, ["encoder.", "conv1."], |vae| vae.encode_recorded(video.clone()).unwrap());
            let latents = device_tensor(&normal(&[config.z_dim, 2, 2, 2], 3));
            check_weight_gradients(&config, ["decoder.", "conv2."], |vae| {
                vae.decode_recorded(latents.clone()).unwrap()
            });
        }
    }
}
