//! Tests of products with eight-bit matrices, compared with the same products in f64.

use burn::tensor::{DType, Device, Tensor, TensorData};

use super::linear::product_in_f64;
use super::{BF16, Exact, assert_near, bf16_devices, devices, download, noise, to_bf16};
use crate::device::has_bytes;
use crate::ops::{linear_scaled, seed};
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

fn transposed(x: &Exact) -> Exact {
    let values = (0..x.columns).flat_map(|j| (0..x.rows).map(move |i| x.at(i, j))).collect();
    Exact { rows: x.columns, columns: x.rows, values }
}

fn with_bytes(devices: Vec<Device>) -> impl Iterator<Item = Device> {
    devices.into_iter().filter(has_bytes)
}

fn vector(x: &Exact, device: &Device) -> Tensor<1> {
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
            let operand = if products == DType::F32 { leaf.clone() } else { leaf.clone().cast(products) };
            let y = linear_scaled(operand, &matrix, Some(shift.clone()));
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
        // Codes are exact in bf16; the cotangent times the scales is rounded.
        let (x, g) = (to_bf16(&x), to_bf16(&g));
        with_bytes(bf16_devices()).for_each(|device| run(&device, DType::BF16, BF16, &x, &g));
    }
}

#[test]
#[cfg(feature = "flex")]
fn products_do_not_depend_on_panel_size() {
    use burn::backend::Flex;
    use burn::backend::ops::{FloatTensorOps, IntTensorOps};

    use crate::ops::scaled::{Scaled, backward_by_panels, forward_by_panels};

    let (rows, weight) = rounded(EightBits::E4m3);
    let (x, bias, g) = (noise(ROWS, INPUTS, 1), noise(1, OUTPUTS, 3), noise(ROWS, OUTPUTS, 4));
    let float = |values: &[f32], shape: &[usize]| {
        Flex::float_from_data(TensorData::new(values.to_vec(), shape.to_vec()), &Default::default())
    };
    let upload = |x: &Exact| {
        let values: Vec<f32> = x.values.iter().map(|v| *v as f32).collect();
        float(&values, &[x.rows, x.columns])
    };
    let codes = TensorData::new(rows.codes().to_vec(), [OUTPUTS, INPUTS]);
    let scaled = Scaled::<Flex> {
        codes: Flex::int_from_data(codes, &Default::default()),
        kind: rows.kind(),
        scales: float(rows.scales(), &[OUTPUTS]),
    };
    let product = product_in_f64(&x, &weight).values;
    let expected: Vec<f64> = product.iter().enumerate().map(|(i, y)| y + bias.values[i % OUTPUTS]).collect();
    let d_x = product_in_f64(&g, &transposed(&weight)).values;
    // One row at a time; a partial last panel; everything at once.
    for panel in [1, 7 * INPUTS, 1 << 20] {
        let shift = float(&bias.values.iter().map(|v| *v as f32).collect::<Vec<_>>(), &[OUTPUTS]);
        let y = forward_by_panels::<Flex>(upload(&x), shift, &scaled, panel);
        assert_near("by panels", y.to_contiguous().storage::<f32>(), &expected, 1e-5);
        let found = backward_by_panels::<Flex>(upload(&g), &scaled, DType::F32, panel);
        assert_near("d x by panels", found.to_contiguous().storage::<f32>(), &d_x, 1e-5);
    }
}
