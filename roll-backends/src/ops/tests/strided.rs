//! Tests of operands that are not contiguous.

use super::activation::silu_in_f64;
use super::{Exact, assert_near, devices, download, noise};
use crate::ops::{attention, silu};

#[test]
fn operators_read_strided_tensors() {
    let x = noise(6, 10, 1);
    let swapped = Exact { rows: 10, columns: 6, values: (0..60).map(|i| x.at(i % 6, i / 6)).collect() };
    let expected: Vec<f64> = x.values[20..50].iter().map(|&v| silu_in_f64(v)).collect();
    for device in devices() {
        let on = x.upload(&device);
        let (a, b) = (silu(on.clone().transpose()), silu(swapped.upload(&device)));
        let b: Vec<f64> = download(b).iter().map(|&v| f64::from(v)).collect();
        assert_near("transposed", &download(a), &b, 2e-7);
        assert_near("narrow", &download(silu(on.clone().narrow(0, 2, 3))), &expected, 1e-6);
        // Strided heads, as in the VAE.
        let q = x.upload(&device).transpose();
        let [mixed, copied] =
            [q.clone(), swapped.upload(&device)].map(|q| attention(q.clone(), q.clone(), q, 2)).map(download);
        let copied: Vec<f64> = copied.iter().map(|&v| f64::from(v)).collect();
        assert_near("attention", &mixed, &copied, 1e-6);
    }
}
