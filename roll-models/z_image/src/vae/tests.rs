//! Gradients, names and bad input, on networks with seeded random weights.

use std::collections::BTreeMap;
use std::path::Path;

use roll_core::{Noise, Purpose};

use super::*;

fn tiny() -> VaeConfig {
    VaeConfig {
        block_out_channels: vec![4, 8, 8],
        layers_per_block: 1,
        latent_channels: 3,
        norm_num_groups: 2,
        ..VaeConfig::default()
    }
}

fn load(state: &StateDict) -> Result<Vae> {
    Vae::new(tiny(), state, &roll_backends::device("flex").unwrap())
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

/// Checks the gradient of `f` along random directions against central differences.
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
fn gradients_match_central_differences() {
    let vae = load(&tiny().random_state(5).unwrap()).unwrap();
    check_gradient(&normal(&[3, 1, 4, 3], 1), |x, grad| vae.decode(x, grad).unwrap());
    check_gradient(&normal(&[1, 3, 12, 9], 2), |x, grad| vae.encode(x, grad).unwrap());
}

#[test]
fn clamped_pixels_have_no_gradient() {
    let vae = load(&tiny().random_state(5).unwrap()).unwrap();
    let latents = normal(&[3, 1, 4, 3], 1);
    let (plain, pullback) = vae.decode(&latents, Grad::Record).unwrap();
    let cotangent = normal(plain.shape(), 4);
    let is_inside = |v: &f32| v.abs() <= 1.0;
    assert!(plain.f32s().unwrap().iter().any(|v| !is_inside(v)) && plain.f32s().unwrap().iter().any(is_inside));
    let masked = plain.f32s().unwrap().iter().zip(cotangent.f32s().unwrap());
    let masked = masked.map(|(v, d)| if is_inside(v) { *d } else { 0.0 }).collect::<Vec<f32>>();
    let expected = pullback.unwrap().pull(&Tensor::new(masked, plain.shape()).unwrap()).unwrap();
    let (clamped, pullback) = vae.decode_clamped(&latents, Grad::Record).unwrap();
    assert!(clamped.f32s().unwrap().iter().zip(plain.f32s().unwrap()).all(|(c, v)| *c == v.clamp(-1.0, 1.0)));
    assert_eq!(pullback.unwrap().pull(&cotangent).unwrap().f32s().unwrap(), expected.f32s().unwrap());
}

#[test]
fn weights_by_their_original_names_make_the_same_network() {
    let config = tiny();
    let state = config.random_state(6).unwrap();
    let original: BTreeMap<_, _> = names::flux_names(&config).into_iter().map(|(flux, own)| (own, flux)).collect();
    for prefix in ["", "first_stage_model.", "vae."] {
        let renamed = state.iter().map(|(name, tensor)| {
            let is_matrix = tensor.shape().len() == 2;
            let kernel = [tensor.shape(), &[1, 1]].concat();
            let tensor = if is_matrix { tensor.reshape(kernel).unwrap() } else { tensor.clone() };
            (format!("{prefix}{}", original[name]), tensor)
        });
        let renamed: StateDict = renamed.collect();
        assert_eq!(renamed.len(), state.len());
        let latents = normal(&[3, 1, 2, 3], 1);
        let decode = |state| load(state).unwrap().decode(&latents, Grad::Skip).unwrap().0;
        assert_eq!(decode(&renamed).f32s().unwrap(), decode(&state).f32s().unwrap());
    }
    for (flux, own) in [
        ("decoder.up.2.block.1.conv1.weight", "decoder.up_blocks.0.resnets.1.conv1.weight"),
        ("decoder.up.1.upsample.conv.bias", "decoder.up_blocks.1.upsamplers.0.conv.bias"),
        ("encoder.down.1.block.0.nin_shortcut.weight", "encoder.down_blocks.1.resnets.0.conv_shortcut.weight"),
        ("encoder.mid.attn_1.proj_out.weight", "encoder.mid_block.attentions.0.to_out.0.weight"),
        ("decoder.norm_out.weight", "decoder.conv_norm_out.weight"),
    ] {
        assert_eq!(original.get(own).map(String::as_str), Some(flux));
    }
}

#[test]
fn errors_name_missing_misshapen_and_foreign_weights() {
    let state = tiny().random_state(7).unwrap();
    let error = |state: &StateDict| load(state).err().map(|e| e.to_string()).unwrap_or_default();
    for key in state.keys() {
        let mut without = state.clone();
        without.remove(key);
        assert!(error(&without).contains(key), "{key}: {}", error(&without));
        for shape in [vec![], vec![0], vec![1, 1, 1, 1, 1], vec![5]] {
            let mut misshapen = state.clone();
            misshapen.insert(key.clone(), Tensor::zeros(shape));
            assert!(error(&misshapen).contains(key), "{key}: {}", error(&misshapen));
        }
    }
    for key in ["decoder.up_blocks.9.resnets.0.conv1.weight", "post_quant_conv.weight"] {
        let mut more = state.clone();
        more.insert(key.into(), Tensor::zeros([8]));
        assert!(error(&more).contains(key), "{}", error(&more));
    }
}

#[test]
fn rejects_sizes_that_make_no_network() {
    let parse = |json: &str| VaeConfig::parse(json, Path::new("vae/config.json"));
    assert_eq!(parse("{}").unwrap(), VaeConfig::default());
    for json in [
        r#"{"block_out_channels": []}"#,
        r#"{"block_out_channels": [0]}"#,
        r#"{"block_out_channels": [33]}"#,
        r#"{"block_out_channels": [99999999999]}"#,
        r#"{"layers_per_block": 0}"#,
        r#"{"layers_per_block": 99999999999}"#,
        r#"{"norm_num_groups": 0}"#,
        r#"{"latent_channels": 0}"#,
        r#"{"scaling_factor": 0}"#,
        r#"{"shift_factor": "x"}"#,
        "[",
    ] {
        let error = parse(json).expect_err(json).to_string();
        assert!(error.contains("config.json"), "{error}");
    }
}

#[test]
fn rejects_other_shapes_of_pictures_latents_and_cotangents() {
    let vae = load(&tiny().random_state(8).unwrap()).unwrap();
    for shape in [vec![2, 3, 8, 8], vec![1, 4, 8, 8], vec![1, 3, 3, 8], vec![1, 3, 8, 0], vec![3, 8, 8], vec![]] {
        assert!(vae.encode(&Tensor::zeros(shape.clone()), Grad::Skip).is_err(), "{shape:?}");
    }
    for shape in [vec![3, 2, 2, 2], vec![4, 1, 2, 2], vec![3, 1, 0, 2], vec![3, 2, 2], vec![]] {
        assert!(vae.decode(&Tensor::zeros(shape.clone()), Grad::Skip).is_err(), "{shape:?}");
    }
    assert!(vae.decode(&Tensor::new(vec![0i64; 12], [3, 1, 2, 2]).unwrap(), Grad::Skip).is_err());
    let pullback = vae.decode(&Tensor::zeros([3, 1, 2, 2]), Grad::Record).unwrap().1.unwrap();
    assert!(pullback.pull(&Tensor::zeros([1, 3, 8, 7])).is_err());
}
