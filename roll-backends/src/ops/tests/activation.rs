//! Tests of activations.

use burn_tensor::Device;

use super::{Exact, check, devices, download, noise};
use crate::ops::{gelu, gelu_tanh, silu};

fn gelu_tanh_in_f64(x: f64) -> f64 {
    x * 0.5 * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

/// The error function: up to 4.5 by its series, with an error below 3e-9; beyond, it is 1 to nine digits.
fn erf(x: f64) -> f64 {
    let mut term = x;
    let mut sum = x;
    for n in 1..100 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    if x.abs() > 4.5 { x.signum() } else { sum * 2.0 / std::f64::consts::PI.sqrt() }
}

fn gelu_in_f64(x: f64) -> f64 {
    x * 0.5 * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2))
}

pub fn silu_in_f64(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

#[test]
fn activations_and_their_derivatives_match_f64() {
    let x = noise(7, 11, 1);
    let each = |x: &[Exact], f: fn(f64) -> f64| x[0].values.iter().map(|&v| f(v)).collect();
    check("gelu_tanh", std::slice::from_ref(&x), 1e-6, |x| gelu_tanh(x[0].clone()), |x| each(x, gelu_tanh_in_f64));
    check("gelu", std::slice::from_ref(&x), 1e-6, |x| gelu(x[0].clone()), |x| each(x, gelu_in_f64));
    check("silu", &[x], 1e-6, |x| silu(x[0].clone()), |x| each(x, silu_in_f64));
}

#[test]
fn flex_activations_match_f64_over_a_dense_range() {
    let values: Vec<f64> = (-6000..6000).map(|i| f64::from(i as f32 * 1e-3)).collect();
    let x = Exact { rows: 1, columns: values.len(), values };
    let on = x.upload(&Device::flex());
    for (name, y, f) in
        [("gelu_tanh", gelu_tanh(on.clone()), gelu_tanh_in_f64 as fn(f64) -> f64), ("silu", silu(on), silu_in_f64)]
    {
        for (&x, y) in x.values.iter().zip(download(y)) {
            // `gelu_tanh(x)` is `x sigmoid(u)` with `u = 1.6 x + 0.072 x^3`. Far below zero, `sigmoid(u)` is `exp(u)`,
            // which multiplies the relative error of u by |u|. For `silu` u is x: the bound is then loose.
            let u = 1.6 * x.abs() + 0.072 * x.abs().powi(3);
            let allowed = 1e-12 + f(x).abs() * 2e-7 * (1.0 + u);
            assert!((f64::from(y) - f(x)).abs() <= allowed, "{name}({x}) = {y}, expected {}", f(x));
        }
    }
}

#[test]
fn gelu_matches_f64() {
    let values: Vec<f64> = (-6000..6000).map(|i| f64::from(i as f32 * 1e-3)).collect();
    let x = Exact { rows: 1, columns: values.len(), values };
    for device in devices() {
        for (&x, y) in x.values.iter().zip(download(gelu(x.upload(&device)))) {
            let (y, expected) = (f64::from(y), gelu_in_f64(x));
            assert!((y - expected).abs() <= 3e-7 * (1.0 + x.abs()), "gelu({x}) = {y}, expected {expected}");
        }
    }
}

/// Whether the device is flex, whose activations are tested with larger arguments.
fn is_flex(device: &Device) -> bool {
    *device == Device::flex()
}

#[test]
fn activations_and_derivatives_of_huge_arguments_are_their_limits() {
    let huge = [100.0, 1e4, 1e20, 3e38, -100.0, -1e4, -1e20, -3e38];
    for (device, f) in
        devices().iter().flat_map(|d| [(d, gelu_tanh::<2> as fn(_) -> _), (d, gelu::<2>), (d, silu::<2>)])
    {
        // On libtorch, ATen's derivative of GELU is NaN if the square of its argument overflows.
        let huge = if is_flex(device) { huge.as_slice() } else { &[100.0, 1e4, -100.0, -1e4] };
        let x = Exact { rows: 1, columns: huge.len(), values: huge.to_vec() };
        let leaf = x.upload(device).autodiff().require_grad();
        let y = f(leaf.clone());
        for (&x, y) in huge.iter().zip(download(y.clone())) {
            let expected = if x > 0.0 { x as f32 } else { 0.0 };
            assert!((y - expected).abs() <= 1e-30, "{x}: {y}");
        }
        let mut g = y.sum().backward();
        for (&x, d) in huge.iter().zip(download(leaf.grad_remove(&mut g).unwrap())) {
            let expected = if x > 0.0 { 1.0 } else { 0.0 };
            assert!((d - expected).abs() <= 1e-6, "derivative at {x}: {d}");
        }
    }
}
