//! Speed measurement of a device.

use std::time::Instant;

use burn_tensor::{Device, Tensor};

/// Measures the f32 matrix product throughput of `device`, in operations per second (a multiply-add counts two): the
/// best of a few products, each with the copy of its result to the host. An estimate: products of ones are faster on a
/// GPU than those of a network. Takes about a tenth of a second.
pub fn sustained_flops(device: &Device) -> f64 {
    const N: usize = 1024;
    const PRODUCTS: usize = 4;
    let a = Tensor::<2>::ones([N, N], device);
    let measure = || {
        let start = Instant::now();
        let _ = a.clone().matmul(a.clone()).into_data();
        2.0 * (N as f64).powi(3) / start.elapsed().as_secs_f64()
    };
    (0..PRODUCTS).map(|_| measure()).fold(0.0, f64::max)
}
