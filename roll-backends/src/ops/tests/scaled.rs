//! Tests of products with eight-bit matrices, compared with the same products in f64.

use burn_tensor::{DType, Device, Tensor};

use super::linear::product_in_f64;
use super::{BF16, Exact, assert_near, bf16_devices, devices, download, noise, to_bf16};
use crate::device::has_bytes;
use crate::ops::{linear, linear_lora, linear_scaled, seed};
use crate::{EightBits, ScaledMatrix, ScaledRows};

const ROWS: usize = 6;
const INPUTS: usize = 40;
const OUTPUTS: usize = 24;

/// A quantised matrix and its decoded numbers.
fn rounded(kind: EightBits) -> (ScaledRows, Exact) {
    let values = noise(OUTPUTS, INPUTS, 2).values.iter().map(|v| *v as f32).collect::<Vec<_>>();
    let rows = ScaledRows::quantised(&roll_core::Tensor::new(values, [OUTPUTS, INPUTS]).unwrap(), kind).unwrap();
    // Decoded in f64: f32 would round the product of scale and number.
    let number = |(i, code): (usize, &u8)| f64::from(kind.value(*code)) * f64::from(rows.scales()[i / INPUTS]);
    let values = rows.codes().iter().enumerate().map(number).collect();
    (rows, Exact { rows: OUTPUTS, columns: INPUTS, values })
}

pub fn transposed(x: &Exact) -> Exact {
    let values = (0..x.columns).flat_map(|j| (0..x.rows).map(move |i| x.at(i, j))).collect();
    Exact { rows: x.columns, columns: x.rows, values }
}

pub fn with_bytes(devices: Vec<Device>) -> impl Iterator<Item = Device> {
    devices.into_iter().filter(has_bytes)
}

pub fn vector(x: &Exact, device: &Device) -> Tensor<1> {
    x.upload(device).reshape([x.values.len()])
}

#[test]
fn eight_bit_products_and_gradients_match_f64() {
    for kind in [EightBits::Int8, EightBits::E4m3, EightBits::E5m2] {
        let (rows, weight) = rounded(kind);
        let (x, bias, g) = (noise(ROWS, INPUTS, 1), noise(1, OUTPUTS, 3), noise(ROWS, OUTPUTS, 4));
        let run = |device: &Device, products: DType, tolerance: f64, x: &Exact, g: &Exact| {
            let matrix = ScaledMatrix::new(rows.clone(), device);
            let leaf = x.upload(device).autodiff().require_grad();
            let shift = vector(&bias, device).autodiff().require_grad();
            let y = linear_scaled(leaf.clone(), &matrix, Some(shift.clone()), None, products);
            assert_eq!(y.dtype(), DType::F32);
            let product = product_in_f64(x, &weight).values;
            let expected: Vec<f64> = product.iter().enumerate().map(|(i, y)| y + bias.values[i % OUTPUTS]).collect();
            assert_near(&format!("{kind:?} on {device:?}"), &download(y.clone()), &expected, tolerance);
            let mut found = seed(y, g.upload(device)).backward();
            let d_x = product_in_f64(g, &transposed(&weight)).values;
            assert_near("d x", &download(leaf.grad_remove(&mut found).unwrap()), &d_x, tolerance);
            let d_bias: Vec<f64> = (0..OUTPUTS).map(|j| (0..ROWS).map(|i| g.at(i, j)).sum()).collect();
            assert_near("d bias", &download(shift.grad_remove(&mut found).unwrap()), &d_bias, 1e-5);
        };
        with_bytes(devices()).for_each(|device| run(&device, DType::F32, 1e-5, &x, &g));
        // The decoded matrix and the cotangent are rounded.
        let (x, g) = (to_bf16(&x), to_bf16(&g));
        with_bytes(bf16_devices()).for_each(|device| run(&device, DType::BF16, BF16, &x, &g));
    }
}

#[test]
fn eight_bit_layers_have_the_bits_of_dense_ones_with_the_decoded_matrix() {
    const RANK: usize = 3;
    let (x, g, bias) = (noise(ROWS, INPUTS, 1), noise(ROWS, OUTPUTS, 4), noise(1, OUTPUTS, 3));
    let low = [noise(RANK, INPUTS, 5), noise(OUTPUTS, RANK, 6)];
    let run = |device: Device, products: DType| {
        for (kind, with_lora) in
            [EightBits::Int8, EightBits::E4m3, EightBits::E5m2].map(|kind| [(kind, false), (kind, true)]).concat()
        {
            let matrix = ScaledMatrix::new(rounded(kind).0, &device);
            let dense = matrix.rows(0, OUTPUTS).cast(products);
            let results = [true, false].map(|in_eight_bits| {
                let leaf = |x: &Exact| x.upload(&device).autodiff().require_grad();
                let (x, [down, up]) = (leaf(&x), low.each_ref().map(leaf));
                let bias = vector(&bias, &device).autodiff().require_grad();
                let (b, lora) = (Some(bias.clone()), with_lora.then(|| (down.clone(), up.clone(), 0.5)));
                let y = match (in_eight_bits, lora) {
                    (true, lora) => linear_scaled(x.clone(), &matrix, b, lora, products),
                    (false, Some((down, up, scale))) => linear_lora(x.clone(), dense.clone(), b, down, up, scale),
                    (false, None) => linear(x.clone(), dense.clone(), b),
                };
                let mut found = seed(y.clone(), g.upload(&device)).backward();
                let mut gradient = |leaf: &Tensor<2>| leaf.grad_remove(&mut found).map(download);
                let gradients = [&x, &down, &up].map(&mut gradient);
                assert!(gradients[0].is_some() && gradients[1].is_some() == with_lora);
                let d_bias = bias.grad_remove(&mut found).map(download);
                (download(y), gradients, d_bias)
            });
            assert_eq!(results[0], results[1], "{kind:?} on {device:?} in {products:?}");
        }
    };
    with_bytes(devices()).for_each(|device| run(device, DType::F32));
    with_bytes(bf16_devices()).for_each(|device| run(device, DType::BF16));
}
