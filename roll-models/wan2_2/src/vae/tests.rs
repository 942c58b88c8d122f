//! Gradients, invariances and bad input, on networks with seeded random weights.

use roll_core::{Noise, Purpose};

use super::*;

/// A network that runs in milliseconds: two stages, one of which halves time, so the stride is 2 x 2 (times 2 in the
/// Wan2.2 VAE).
fn tiny(version: VaeVersion) -> VaeConfig {
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

fn load(config: &VaeConfig, seed: u64) -> Vae {
    let statistics = LatentStatistics { mean: vec![0.1, -0.2, 0.3, 0.0], std: vec![1.5, 0.5, 1.0, 2.0] };
    let device = roll_backends::device("flex").unwrap();
    Vae::load_with_statistics(&config.random_state(seed).unwrap(), &statistics, &device).unwrap()
}

fn normal(shape: &[usize], sample: u64) -> Tensor {
    Noise::new(3).normal(Purpose::Synthetic, 0, sample, shape).unwrap()
}

fn dot(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.shape(), b.shape());
    a.f32s().unwrap().iter().zip(b.f32s().unwrap()).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn moved(x: &Tensor, direction: &Tensor, by: f32) -> Tensor {
    let values = x.f32s().unwrap().iter().zip(direction.f32s().unwrap()).map(|(x, d)| x + by * d);
    Tensor::new(values.collect::<Vec<f32>>(), x.shape()).unwrap()
}

/// The L2 distance, relative to the norm of `expected`.
fn distance(found: &Tensor, expected: &Tensor) -> f64 {
    let length = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    let (found, expected) = (found.f32s().unwrap(), expected.f32s().unwrap());
    length(&mut found.iter().zip(expected).map(|(a, b)| a - b)) / length(&mut expected.iter().copied())
}

fn difference(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.shape(), b.shape());
    let pairs = || a.f32s().unwrap().iter().zip(b.f32s().unwrap());
    let scale = pairs().fold(0f32, |m, (_, b)| m.max(b.abs()));
    pairs().fold(0f32, |m, (a, b)| m.max((a - b).abs())) / scale
}

fn tiled(size: [usize; 2], stride: [usize; 2]) -> Chunking {
    Chunking { tiling: Some(Tiling { size, stride }), ..Chunking::default() }
}

/// Checks the gradient of `f` along a random direction against central differences.
fn check_gradient(x: &Tensor, f: impl Fn(&Tensor, Grad) -> (Tensor, Option<Pullback>)) {
    let (value, pullback) = f(x, Grad::Record);
    let cotangent = normal(value.shape(), 11);
    let gradient = pullback.unwrap().pull(&cotangent).unwrap();
    for sample in 20..23 {
        let direction = normal(x.shape(), sample);
        let h = 2e-3;
        let ahead = dot(&f(&moved(x, &direction, h), Grad::Skip).0, &cotangent);
        let behind = dot(&f(&moved(x, &direction, -h), Grad::Skip).0, &cotangent);
        let (measured, pulled) = ((ahead - behind) / f64::from(2.0 * h), dot(&gradient, &direction));
        let scale = dot(&gradient, &gradient).sqrt() * (x.len() as f64).sqrt();
        assert!((measured - pulled).abs() < 2e-3 * scale.max(pulled.abs()), "measured {measured}, pulled {pulled}");
    }
}

#[test]
fn decoder_gradients_match_central_differences() {
    for version in [VaeVersion::V2_1, VaeVersion::V2_2] {
        let vae = load(&tiny(version), 5);
        let latents = normal(&[4, 4, 3, 2], 1);
        check_gradient(&latents, |x, grad| vae.decode(x, &Chunking::default(), grad).unwrap());
        check_gradient(&latents, |x, grad| vae.decode(x, &tiled([2, 2], [1, 1]), grad).unwrap());
    }
}

#[test]
fn encoder_gradients_match_central_differences() {
    for version in [VaeVersion::V2_1, VaeVersion::V2_2] {
        let vae = load(&tiny(version), 6);
        let side = vae.config().spatial_stride();
        let video = normal(&[5, 3, 2 * side, side], 2);
        check_gradient(&video, |x, grad| vae.encode_with(x, &Chunking::default(), grad).unwrap());
        check_gradient(&video, |x, grad| vae.encode_with(x, &tiled([1, 1], [1, 1]), grad).unwrap());
    }
}

#[test]
fn number_and_location_of_checkpoints_change_no_bit() {
    for version in [VaeVersion::V2_1, VaeVersion::V2_2] {
        let vae = load(&tiny(version), 7);
        let latents = normal(&[4, 7, 2, 2], 3);
        let pull = |checkpoints, offload, tiling| {
            let chunking = Chunking { checkpoints, tiling, offload };
            let (frames, pullback) = vae.decode(&latents, &chunking, Grad::Record).unwrap();
            let cotangent = normal(frames.shape(), 4);
            (frames, pullback.unwrap().pull(&cotangent).unwrap())
        };
        for tiling in [None, Some(Tiling { size: [2, 1], stride: [1, 1] })] {
            let (frames, gradient) = pull(100, false, tiling);
            for (checkpoints, offload) in [0, 1, 2, 4, 100].into_iter().flat_map(|n| [(n, false), (n, true)]) {
                let (others, other) = pull(checkpoints, offload, tiling);
                assert_eq!(others.f32s().unwrap(), frames.f32s().unwrap());
                assert_eq!(other.f32s().unwrap(), gradient.f32s().unwrap());
            }
        }
    }
}

/// Frames and gradient of a decoder, with whole frames and in tiles.
fn decoded(vae: &Vae) -> [Tensor; 4] {
    let latents = normal(&[4, 4, 3, 2], 3);
    let run = |chunking: &Chunking| {
        let (frames, pullback) = vae.decode(&latents, chunking, Grad::Record).unwrap();
        let gradient = pullback.unwrap().pull(&normal(frames.shape(), 4)).unwrap();
        [frames, gradient]
    };
    let ([a, b], [c, d]) = (run(&Chunking::default()), run(&tiled([2, 2], [1, 1])));
    [a, b, c, d]
}

/// The code path of libtorch on GPUs, run on every CPU backend: pullbacks and everything that moves frames.
#[test]
fn layouts_agree_up_to_the_order_of_sums() {
    for version in [VaeVersion::V2_1, VaeVersion::V2_2] {
        let vae = load(&tiny(version), 7);
        let expected = decoded(&vae);
        let found = decoded(&vae.with_decoder(|decoder| decoder.layout = ChunkLayout::ChannelsLast));
        for (found, expected) in found.iter().zip(&expected) {
            assert!(difference(found, expected) < 2e-5, "{version:?}: {:e}", difference(found, expected));
        }
    }
}

/// The bounds are measured with these weights; the published VAE has twice the number of layers.
#[test]
fn decoding_in_bf16_differs_by_the_rounding_of_bf16() {
    for backend in roll_backends::Backend::ALL.into_iter().filter(|b| b.check_usable(0).is_ok()) {
        let device = roll_backends::device(backend.name()).unwrap();
        for version in [VaeVersion::V2_1, VaeVersion::V2_2] {
            let state = tiny(version).random_state(7).unwrap();
            let vae = Vae::load_with_statistics(&state, &LatentStatistics::identity(4), &device).unwrap();
            if !device.supports_dtype(DType::BF16) {
                assert!(vae.with_decoder_dtype(DType::BF16).is_err());
                continue;
            }
            let exact = decoded(&vae);
            for layout in [ChunkLayout::ChannelsFirst, ChunkLayout::ChannelsLast] {
                let narrow = vae.clone().with_decoder_dtype(DType::BF16).unwrap().with_decoder(|d| d.layout = layout);
                let [frames, gradient, tiled_frames, tiled_gradient] = decoded(&narrow);
                for (found, exact) in [(frames, &exact[0]), (tiled_frames, &exact[2])] {
                    let off = difference(&found, exact);
                    println!("{backend} {version:?} {layout:?}: frames {off:.1e} of the largest value");
                    assert!(0.0 < off && off < 12.0 / 256.0, "{backend} {version:?} {layout:?}: {off:e}");
                }
                // If rounding moves a pixel across a bound of the clamp, single numbers of the gradient change by more.
                for (found, exact) in [(gradient, &exact[1]), (tiled_gradient, &exact[3])] {
                    let off = distance(&found, exact);
                    println!("{backend} {version:?} {layout:?}: gradient {off:.1e} of its length");
                    assert!(0.0 < off && off < 0.15, "{backend} {version:?} {layout:?}: {off:e}");
                }
            }
            assert_eq!(decoded(&vae.with_decoder_dtype(DType::F32).unwrap())[0].as_bytes(), exact[0].as_bytes());
        }
    }
}

/// Widths at which flex mixes its own convolutions with Burn's.
#[test]
fn few_positions_are_pulled_back_in_bf16() {
    let config = VaeConfig { decoder_dim: 32, ..tiny(VaeVersion::V2_1) };
    let latents = normal(&[4, 3, 1, 2], 3);
    let gradient = |vae: &Vae| {
        let (frames, pullback) = vae.decode(&latents, &Chunking::default(), Grad::Record).unwrap();
        pullback.unwrap().pull(&normal(frames.shape(), 4)).unwrap()
    };
    let vae = load(&config, 7);
    let exact = gradient(&vae);
    let off = distance(&gradient(&vae.with_decoder_dtype(DType::BF16).unwrap()), &exact);
    assert!(0.0 < off && off < 0.15, "{off:e}");
}

#[test]
fn a_tile_that_covers_the_plane_changes_no_bit() {
    let vae = load(&tiny(VaeVersion::V2_1), 8);
    let latents = normal(&[4, 3, 3, 4], 5);
    let whole = vae.decode(&latents, &Chunking::default(), Grad::Skip).unwrap().0;
    for (size, stride) in [([3, 4], [3, 4]), ([34, 34], [18, 16]), ([usize::MAX, usize::MAX], [1, 1])] {
        let one = vae.decode(&latents, &tiled(size, stride), Grad::Skip).unwrap().0;
        assert_eq!(one.f32s().unwrap(), whole.f32s().unwrap());
    }
}

#[test]
fn tiles_without_overlap_are_decoded_independently() {
    let vae = load(&tiny(VaeVersion::V2_1), 9);
    let latents = normal(&[4, 2, 2, 4], 6);
    let frames = vae.decode(&latents, &tiled([2, 2], [2, 2]), Grad::Skip).unwrap().0;
    let values = latents.f32s().unwrap();
    let left: Vec<f32> = values.chunks_exact(4).flat_map(|row| row[..2].to_vec()).collect();
    let left = Tensor::new(left, [4, 2, 2, 2]).unwrap();
    let left = vae.decode(&left, &Chunking::default(), Grad::Skip).unwrap().0;
    let side = left.shape()[3];
    let rows = frames.f32s().unwrap().chunks_exact(2 * side).flat_map(|row| row[..side].to_vec());
    assert_eq!(rows.collect::<Vec<f32>>(), left.f32s().unwrap());
}

#[test]
fn a_later_latent_frame_changes_no_earlier_frame() {
    for version in [VaeVersion::V2_1, VaeVersion::V2_2] {
        let vae = load(&tiny(version), 10);
        let latents = normal(&[4, 3, 2, 2], 7);
        let mut changed = latents.f32s().unwrap().to_vec();
        changed.chunks_exact_mut(4).skip(2).step_by(3).for_each(|frame| frame.fill(9.0));
        let changed = Tensor::new(changed, latents.shape()).unwrap();
        let decode = |latents: &Tensor| vae.decode(latents, &Chunking::default(), Grad::Skip).unwrap().0;
        let (a, b) = (decode(&latents), decode(&changed));
        let frame = a.len() / a.shape()[0];
        let same = 3 * frame;
        assert_eq!(a.f32s().unwrap()[..same], b.f32s().unwrap()[..same]);
        assert_ne!(a.f32s().unwrap()[same..], b.f32s().unwrap()[same..]);
    }
}

#[test]
fn one_latent_frame_decodes_to_one_frame() {
    for version in [VaeVersion::V2_1, VaeVersion::V2_2] {
        let vae = load(&tiny(version), 11);
        let (frames, pullback) = vae.decode(&normal(&[4, 1, 2, 2], 8), &Chunking::default(), Grad::Record).unwrap();
        assert_eq!(frames.shape()[0], 1);
        assert_eq!(pullback.unwrap().pull(&frames).unwrap().shape(), [4, 1, 2, 2]);
    }
}

#[test]
fn accepts_keys_with_the_prefix_model() {
    let config = tiny(VaeVersion::V2_2);
    let state = config.random_state(12).unwrap();
    let prefixed: StateDict = state.iter().map(|(k, t)| (format!("model.{k}"), t.clone())).collect();
    let device = roll_backends::device("flex").unwrap();
    let plain = LatentStatistics::identity(4);
    let decode = |state: &StateDict| {
        let vae = Vae::load_with_statistics(state, &plain, &device).unwrap();
        assert_eq!(vae.config(), &config);
        vae.decode(&normal(&[4, 2, 1, 1], 9), &Chunking::default(), Grad::Skip).unwrap().0
    };
    assert_eq!(difference(&decode(&prefixed), &decode(&state)), 0.0);
}

#[test]
fn the_pullback_can_be_sent_to_another_thread() {
    let vae = load(&tiny(VaeVersion::V2_1), 13);
    let (frames, pullback) = vae.decode(&normal(&[4, 2, 1, 1], 1), &Chunking::default(), Grad::Record).unwrap();
    drop(vae);
    let pulled = std::thread::spawn(move || pullback.unwrap().pull(&frames)).join().unwrap();
    assert!(pulled.is_ok());
}

#[test]
fn rejects_missing_and_misshapen_weights_by_key() {
    let device = roll_backends::device("flex").unwrap();
    for version in [VaeVersion::V2_1, VaeVersion::V2_2] {
        let config = tiny(version);
        let state = config.random_state(14).unwrap();
        let error = |state: &StateDict| {
            let loaded = Vae::load_with_statistics(state, &LatentStatistics::identity(4), &device);
            loaded.err().map(|e| e.to_string()).unwrap_or_default()
        };
        for key in state.keys() {
            let mut without = state.clone();
            without.remove(key);
            assert!(error(&without).contains('`'), "without {key}: {}", error(&without));
            for shape in [vec![], vec![0], vec![1, 1, 1, 1, 1, 1], vec![5]] {
                let mut misshapen = state.clone();
                misshapen.insert(key.clone(), Tensor::zeros(shape));
                assert!(error(&misshapen).contains('`'), "{key}: {}", error(&misshapen));
            }
        }
        let mut without = state.clone();
        without.remove("decoder.middle.1.proj.weight");
        assert!(error(&without).contains("decoder.middle.1.proj.weight"));
        let mut more = state.clone();
        more.insert("decoder.middle.3.residual.0.gamma".into(), Tensor::zeros([8, 1, 1, 1]));
        assert!(error(&more).contains("decoder.middle.3.residual.0.gamma"));
        assert!(Vae::load(&state, &device).is_err(), "no statistics are known for four channels");
    }
}

#[test]
fn rejects_invalid_videos_latents_tilings_and_cotangents() {
    let vae = load(&tiny(VaeVersion::V2_1), 15);
    for shape in [
        vec![1, 4, 8, 8],
        vec![0, 3, 8, 8],
        vec![2, 3, 8, 8],
        vec![1, 3, 9, 8],
        vec![1, 3, 8, 0],
        vec![3, 8, 8],
        vec![],
    ] {
        assert!(vae.encode(&Tensor::zeros(shape.clone())).is_err(), "{shape:?}");
    }
    let whole = Chunking::default();
    for shape in [vec![3, 1, 2, 2], vec![4, 0, 2, 2], vec![4, 1, 0, 2], vec![4, 2, 2], vec![1, 4, 1, 2, 2]] {
        assert!(vae.decode(&Tensor::zeros(shape.clone()), &whole, Grad::Skip).is_err(), "{shape:?}");
    }
    let latents = Tensor::zeros([4, 1, 2, 2]);
    assert!(vae.decode(&latents, &tiled([2, 2], [0, 1]), Grad::Skip).is_err());
    assert!(vae.decode(&latents, &tiled([2, 2], [3, 1]), Grad::Skip).is_err());
    assert!(vae.decode(&Tensor::new(vec![0i64; 16], [4, 1, 2, 2]).unwrap(), &whole, Grad::Skip).is_err());
    let pullback = vae.decode(&latents, &whole, Grad::Record).unwrap().1.unwrap();
    assert!(pullback.pull(&Tensor::zeros([1, 3, 8, 7])).is_err());
    let statistics = LatentStatistics { mean: vec![0.0; 4], std: vec![1.0, 1.0, 0.0, 1.0] };
    let state = tiny(VaeVersion::V2_1).random_state(15).unwrap();
    assert!(Vae::load_with_statistics(&state, &statistics, &roll_backends::device("flex").unwrap()).is_err());
}
