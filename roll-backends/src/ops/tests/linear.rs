//! Tests of linear layers and matrix products.

use burn_tensor::{DType, Tensor};

use super::{BF16, Exact, assert_near, bf16_devices, check, download, noise, to_bf16};
use crate::ops::{linear, linear_lora, product, seed};

pub fn product_in_f64(a: &Exact, b: &Exact) -> Exact {
    let values = (0..a.rows)
        .flat_map(|i| (0..b.rows).map(move |j| (0..a.columns).map(|k| a.at(i, k) * b.at(j, k)).sum()))
        .collect();
    Exact { rows: a.rows, columns: b.rows, values }
}

#[test]
fn linear_layers_and_their_gradients_match_f64() {
    let (l, inputs, outputs, rank) = (5, 9, 6, 2);
    let plain = [noise(l, inputs, 1), noise(outputs, inputs, 2), noise(1, outputs, 3)];
    let base = |x: &[Exact]| -> Vec<f64> {
        let y = product_in_f64(&x[0], &x[1]);
        y.values.iter().enumerate().map(|(i, v)| v + x[2].values[i % outputs]).collect()
    };
    check("linear", &plain, 1e-6, |x| linear(x[0].clone(), x[1].clone(), Some(x[2].clone().reshape([outputs]))), base);
    check(
        "linear without bias",
        &plain[..2],
        1e-6,
        |x| linear(x[0].clone(), x[1].clone(), None),
        |x| product_in_f64(&x[0], &x[1]).values,
    );
    let with_lora = [plain.as_slice(), &[noise(rank, inputs, 4), noise(outputs, rank, 5)]].concat();
    check(
        "linear with a low-rank part",
        &with_lora,
        1e-6,
        |x| {
            let bias = x[2].clone().reshape([outputs]);
            linear_lora(x[0].clone(), x[1].clone(), Some(bias), x[3].clone(), x[4].clone(), 0.75)
        },
        |x| {
            let low = product_in_f64(&product_in_f64(&x[0], &x[3]), &x[4]);
            base(x).iter().zip(&low.values).map(|(y, low)| y + 0.75 * low).collect()
        },
    );
}

#[test]
fn products_and_their_gradients_match_f64() {
    check(
        "product",
        &[noise(5, 9, 1), noise(6, 9, 2)],
        1e-6,
        |x| product(x[0].clone(), x[1].clone().transpose()),
        |x| product_in_f64(&x[0], &x[1]).values,
    );
}

#[test]
fn products_in_bf16_match_f64() {
    let (l, inputs, outputs, rank) = (6, 40, 24, 4);
    let x = [noise(l, inputs, 1), noise(outputs, inputs, 2), noise(rank, inputs, 4), noise(outputs, rank, 5)];
    let x: Vec<Exact> = x.iter().map(to_bf16).collect();
    let weights = to_bf16(&noise(l, outputs, 9));
    let base = product_in_f64(&x[0], &x[1]);
    let low = product_in_f64(&product_in_f64(&x[0], &x[2]), &x[3]);
    let expected: Vec<f64> = base.values.iter().zip(&low.values).map(|(y, low)| y + 0.5 * low).collect();
    // d x = g (W + s B A), d A = s (g B)^T x, d B = s g^T (x A^T).
    let t = |x: &Exact| Exact {
        rows: x.columns,
        columns: x.rows,
        values: (0..x.columns).flat_map(|j| (0..x.rows).map(move |i| x.at(i, j))).collect(),
    };
    let d_inner = product_in_f64(&weights, &t(&x[3]));
    let low = product_in_f64(&d_inner, &t(&x[2]));
    let d_x: Vec<f64> =
        product_in_f64(&weights, &t(&x[1])).values.iter().zip(&low.values).map(|(a, b)| a + 0.5 * b).collect();
    let half = |x: Exact| x.values.iter().map(|v| 0.5 * v).collect::<Vec<_>>();
    let d_down = half(product_in_f64(&t(&d_inner), &t(&x[0])));
    let d_up = half(product_in_f64(&t(&weights), &t(&product_in_f64(&x[0], &x[2]))));
    for device in bf16_devices() {
        let [h, down, up] = [0, 2, 3].map(|i| x[i].upload(&device).autodiff().require_grad());
        let weight = x[1].upload(&device).cast(DType::BF16);
        let y = linear_lora(h.clone(), weight, None, down.clone(), up.clone(), 0.5);
        assert_eq!(y.dtype(), DType::F32);
        assert_near("value", &download(y.clone()), &expected, BF16);
        let mut g = seed(y, weights.upload(&device)).backward();
        for (what, leaf, expected) in [("x", h, &d_x), ("down", down, &d_down), ("up", up, &d_up)] {
            let d = leaf.grad_remove(&mut g).unwrap();
            assert_eq!(d.dtype(), DType::F32, "{what}");
            assert_near(&format!("d {what} on {device:?}"), &download(d), expected, BF16);
        }
    }
}

#[test]
fn small_lora_contributions_survive_bf16() {
    for device in bf16_devices() {
        let ones = |rows: usize, columns: usize, value: f32| Tensor::<2>::full([rows, columns], value, &device);
        let (x, weight) = (ones(2, 8, 1.0), ones(3, 8, 125.0).cast(DType::BF16));
        let (down, up) = (ones(2, 8, 0.125), ones(3, 2, 0.5));
        let base = download(linear(x.clone(), weight.clone(), None));
        assert_eq!(base, [1000.0; 6], "{device:?}");
        assert_eq!(download(linear_lora(x, weight, None, down, up, 1.0)), [1001.0; 6], "{device:?}");
    }
}
