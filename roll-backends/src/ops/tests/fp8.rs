//! Tests of products in fp8, compared with f64 products of rounded operands and of the operands before rounding.

use burn_tensor::{DType, Device, Tensor};

use super::linear::product_in_f64;
use super::scaled::{transposed, vector, with_bytes};
use super::{BF16, Exact, assert_near, bf16_devices, devices, download, noise, to_bf16};
use crate::device::{is_flex, is_host};
use crate::ops::operator::{Primitives, with_backend};
use crate::ops::{Fp8Kernel, Fp8Products, linear_fp8, seed};
use crate::{EightBits, ScaledMatrix, ScaledRows};

const ROWS: usize = 6;
const RANK: usize = 3;
/// Inputs and outputs: of a shape for tensor cores, which take multiples of 16, and of another.
const SHAPES: [[usize; 2]; 2] = [[48, 32], [40, 24]];
const MAX: f64 = 448.0;

/// The numbers of e4m3 with their codes.
fn numbers() -> Vec<(u8, f64)> {
    let numbers = (0..=255).map(|code| (code, f64::from(EightBits::E4m3.value(code))));
    numbers.filter(|(_, number)| !number.is_nan()).collect()
}

/// The nearest number of e4m3; of two, that of the even code; the largest for values beyond it.
fn nearest(value: f64) -> f64 {
    let value = value.clamp(-MAX, MAX);
    let distance = |(code, number): &(u8, f64)| ((number - value).abs(), code & 1);
    let nearer = |a: &(u8, f64), b: &(u8, f64)| distance(a).partial_cmp(&distance(b)).unwrap();
    numbers().into_iter().min_by(nearer).unwrap().1
}

fn to_e4m3(x: Tensor<2>) -> Tensor<2> {
    let x = x.into_dispatch();
    with_backend!(x, B => B::tensor(<B as Fp8Kernel>::to_e4m3(B::constant(x))))
}

#[test]
fn numbers_are_rounded_to_the_nearest_of_e4m3_with_ties_to_even() {
    let mut ordered: Vec<f64> = numbers().into_iter().map(|(_, number)| number).collect();
    assert_eq!(ordered.len(), 254);
    ordered.sort_by(f64::total_cmp);
    // f32 has the middles exactly.
    let between = |pair: &[f64]| [0.25, 0.49, 0.5, 0.51, 0.75].map(|part| pair[0] + (pair[1] - pair[0]) * part);
    let beyond = [456.0, 464.0, 480.0, 1e6, 3e38, 2f64.powi(-10), 2f64.powi(-11), 1e-30, 0.0];
    let mut values: Vec<f64> = ordered.windows(2).flat_map(between).chain(ordered.clone()).collect();
    values.extend(beyond.iter().flat_map(|v| [*v, -v]));
    let values: Vec<f64> = values.into_iter().map(|v| f64::from(v as f32)).collect();
    let x = Exact { rows: 1, columns: values.len(), values };
    for device in devices() {
        let found = download(to_e4m3(x.upload(&device)));
        for (found, value) in found.iter().zip(&x.values) {
            assert_eq!(f64::from(*found), nearest(*value), "{value:e} on {device:?}");
        }
        let nan = Exact { rows: 1, columns: 2, values: vec![f64::NAN, 1.0] };
        let found = download(to_e4m3(nan.upload(&device)));
        assert!(found[0].is_nan() && found[1] == 1.0, "{found:?} on {device:?}");
    }
}

/// The rows in e4m3 times their scales, `amax / 448` as f32 has it.
fn rounded_rows(x: &Exact) -> Exact {
    let row = |row: &[f64]| -> Vec<f64> {
        let scale = f64::from((amax(row) / MAX) as f32);
        row.iter().map(|v| nearest(f64::from((v / scale) as f32)) * scale).collect()
    };
    Exact { values: x.values.chunks(x.columns).flat_map(row).collect(), ..x.clone() }
}

fn amax(row: &[f64]) -> f64 {
    row.iter().fold(0.0, |most, v| most.max(v.abs()))
}

/// What rounding the rows of `a` to e4m3 may change in each number of the product with the rows of `b`: a number moves
/// by at most half the spacing of e4m3, 2^-4 of itself, or 2^-10 of its row's scale where e4m3 is subnormal. So the
/// product moves by at most the sum of `max(2^-4 |a_k|, 2^-10 amax / 448) |b_k|`.
fn bound(a: &Exact, b: &Exact) -> Vec<f64> {
    let moved = |row: &[f64]| -> Vec<f64> {
        let least = amax(row) / MAX * 2f64.powi(-10);
        row.iter().map(|v| (v.abs() / 16.0).max(least)).collect()
    };
    let moved = Exact { values: a.values.chunks(a.columns).flat_map(moved).collect(), ..a.clone() };
    let sizes = Exact { values: b.values.iter().map(|v| v.abs()).collect(), ..b.clone() };
    product_in_f64(&moved, &sizes).values
}

fn assert_within(what: &str, found: &[f32], exact: &[f64], bounds: &[f64], rounding: f64) {
    let most = amax(exact) * rounding;
    for ((found, exact), bound) in found.iter().zip(exact).zip(bounds) {
        let off = (f64::from(*found) - exact).abs();
        assert!(off <= bound + most, "{what}: {found} for {exact}, off by {off:e} of {bound:e}");
    }
    // The test is of fp8: dense products are far nearer.
    let off = found.iter().zip(exact).map(|(f, e)| (f64::from(*f) - e).abs()).fold(0.0, f64::max);
    assert!(off > 1e-3 * amax(exact), "{what}: off by {off:e} alone");
}

struct Layer {
    rows: ScaledRows,
    /// The decoded weight, and its codes alone.
    weight: Exact,
    codes: Exact,
    /// The scale of each row, as a row.
    scales: Exact,
    bias: Exact,
    /// A and B.
    low: [Exact; 2],
}

fn layer([inputs, outputs]: [usize; 2]) -> Layer {
    let values = noise(outputs, inputs, 2).values.iter().map(|v| *v as f32).collect::<Vec<_>>();
    let tensor = roll_core::Tensor::new(values, [outputs, inputs]).unwrap();
    let rows = ScaledRows::quantised(&tensor, EightBits::E4m3).unwrap();
    let codes: Vec<f64> = rows.codes().iter().map(|code| f64::from(EightBits::E4m3.value(*code))).collect();
    let scales: Vec<f64> = rows.scales().iter().map(|scale| f64::from(*scale)).collect();
    let weight = codes.iter().enumerate().map(|(i, code)| code * scales[i / inputs]).collect();
    Layer {
        rows,
        weight: Exact { rows: outputs, columns: inputs, values: weight },
        codes: Exact { rows: outputs, columns: inputs, values: codes },
        scales: Exact { rows: 1, columns: outputs, values: scales },
        bias: noise(1, outputs, 3),
        low: [to_bf16(&noise(RANK, inputs, 5)), to_bf16(&noise(outputs, RANK, 6))],
    }
}

fn sum(a: &[f64], b: &[f64], factor: f64) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + factor * b).collect()
}

/// The result and the gradients of x, bias, down and up.
struct Found {
    y: Vec<f32>,
    d_x: Vec<f32>,
    d_bias: Vec<f32>,
    d_low: Option<[Vec<f32>; 2]>,
}

fn run(layer: &Layer, x: &Exact, g: &Exact, with_lora: bool, device: &Device, products: DType) -> Found {
    let matrix = ScaledMatrix::new(layer.rows.clone(), device);
    let leaf = |x: &Exact| x.upload(device).autodiff().require_grad();
    let (x, [down, up]) = (leaf(x), layer.low.each_ref().map(leaf));
    let bias = vector(&layer.bias, device).autodiff().require_grad();
    let lora = with_lora.then(|| (down.clone(), up.clone(), 0.5));
    let y = linear_fp8(x.clone(), &matrix, Some(bias.clone()), lora, products);
    assert_eq!(y.dtype(), DType::F32);
    let mut found = seed(y.clone(), g.upload(device)).backward();
    let d_x = download(x.grad_remove(&mut found).unwrap());
    let d_bias = download(bias.grad_remove(&mut found).unwrap());
    let d_low = [&down, &up].map(|leaf: &Tensor<2>| leaf.grad_remove(&mut found).map(download));
    let d_low = match d_low {
        [Some(d_down), Some(d_up)] => Some([d_down, d_up]),
        _ => None,
    };
    Found { y: download(y), d_x, d_bias, d_low }
}

fn on_all_devices(check: impl Fn(&Device, DType, f64)) {
    // Tensor cores round the product to bf16.
    for device in with_bytes(devices()) {
        check(&device, DType::F32, if is_host(&device) { 1e-5 } else { BF16 });
    }
    with_bytes(bf16_devices()).for_each(|device| check(&device, DType::BF16, BF16));
}

#[test]
fn fp8_products_and_their_pulls_are_those_of_rounded_operands() {
    for (shape, with_lora) in SHAPES.map(|shape| [(shape, false), (shape, true)]).concat() {
        let layer = layer(shape);
        let [inputs, outputs] = shape;
        let (x, g) = (to_bf16(&noise(ROWS, inputs, 1)), to_bf16(&noise(ROWS, outputs, 4)));
        let [down, up] = &layer.low;
        let inner = product_in_f64(&x, down);
        let low = product_in_f64(&inner, up);
        let d_inner = product_in_f64(&g, &transposed(up));
        let d_low = product_in_f64(&d_inner, &transposed(down));
        let factor = if with_lora { 0.5 } else { 0.0 };
        let with_bias = |y: Vec<f64>| -> Vec<f64> {
            y.iter().enumerate().map(|(i, y)| y + layer.bias.values[i % outputs]).collect()
        };
        // The cotangent takes the weight's scales before it is rounded, because the pull sums over them.
        let scaled: Vec<f64> = g
            .values
            .iter()
            .enumerate()
            .map(|(i, g)| f64::from((g * layer.scales.values[i % outputs]) as f32))
            .collect();
        let scaled = Exact { values: scaled, ..g.clone() };
        let codes = transposed(&layer.codes);
        let y = with_bias(sum(&product_in_f64(&rounded_rows(&x), &layer.weight).values, &low.values, factor));
        let d_x = sum(&product_in_f64(&rounded_rows(&scaled), &codes).values, &d_low.values, factor);
        let exact_y = with_bias(sum(&product_in_f64(&x, &layer.weight).values, &low.values, factor));
        let exact_d_x = sum(&product_in_f64(&scaled, &codes).values, &d_low.values, factor);
        let bounds = [bound(&x, &layer.weight), bound(&scaled, &codes)];
        on_all_devices(|device, products, rounding| {
            let what = |of: &str| format!("{of} of {shape:?} on {device:?} in {products:?}");
            let found = run(&layer, &x, &g, with_lora, device, products);
            assert_near(&what("result"), &found.y, &y, rounding);
            assert_near(&what("d x"), &found.d_x, &d_x, rounding);
            assert_within(&what("result"), &found.y, &exact_y, &bounds[0], rounding);
            assert_within(&what("d x"), &found.d_x, &exact_d_x, &bounds[1], rounding);
            let d_bias: Vec<f64> = (0..outputs).map(|j| (0..ROWS).map(|i| g.at(i, j)).sum()).collect();
            assert_near(&what("d bias"), &found.d_bias, &d_bias, 1e-5);
            assert_eq!(found.d_low.is_some(), with_lora);
            if let Some([d_down, d_up]) = found.d_low {
                // LoRA's gradients are of x and of the cotangent before they are rounded to fp8.
                let half = |x: Exact| x.values.iter().map(|v| 0.5 * v).collect::<Vec<_>>();
                let expected = half(product_in_f64(&transposed(&d_inner), &transposed(&x)));
                assert_near(&what("d down"), &d_down, &expected, rounding);
                let expected = half(product_in_f64(&transposed(&g), &transposed(&inner)));
                assert_near(&what("d up"), &d_up, &expected, rounding);
            }
        });
    }
}

#[test]
fn rows_of_zeros_stay_zero_and_rows_that_are_not_finite_become_nan() {
    let layer = layer(SHAPES[0]);
    let [inputs, outputs] = SHAPES[0];
    let mut x = noise(ROWS, inputs, 1);
    x.values[..inputs].fill(0.0);
    x.values[inputs] = f64::NAN;
    x.values[2 * inputs + 1] = f64::INFINITY;
    // Its scale is below the smallest normal number of f32.
    x.values[3 * inputs..4 * inputs].fill(1e-38);
    for device in with_bytes(devices()).filter(|device| is_host(device) || is_tensor_core(device)) {
        let matrix = ScaledMatrix::new(layer.rows.clone(), &device);
        let y = download(linear_fp8(x.upload(&device), &matrix, None, None, DType::F32));
        let row = |i: usize| &y[i * outputs..][..outputs];
        assert!(row(0).iter().all(|v| *v == 0.0), "{:?} on {device:?}", row(0));
        assert!(row(1).iter().chain(row(2)).all(|v| v.is_nan()), "{:?}, {:?} on {device:?}", row(1), row(2));
        assert!(row(3).iter().all(|v| v.abs() < 1e-35), "{:?} on {device:?}", row(3));
        assert!(row(4).iter().chain(row(5)).all(|v| v.is_finite()), "{device:?}");
    }
}

fn is_tensor_core(device: &Device) -> bool {
    Fp8Products::of(device) == Fp8Products::TensorCores
}

#[test]
fn devices_name_how_they_take_products_in_fp8() {
    for device in devices() {
        match Fp8Products::of(&device) {
            Fp8Products::Emulated => assert!(is_host(&device)),
            Fp8Products::TensorCores => assert!(!is_host(&device)),
            Fp8Products::Missing(reason) => assert!(!is_host(&device) && !reason.is_empty()),
        }
        assert!(!is_flex(&device) || Fp8Products::of(&device) == Fp8Products::Emulated);
    }
}
