//! Compiles a loop for several instruction sets and selects one at run time.

/// The way `a * b + c` is computed. A loop that is generic over this trait compiles to good code with and without FMA:
/// `f32::mul_add` calls a slow library function if the instruction is missing.
pub trait MulAdd: Copy {
    fn mul_add(a: f32, b: f32, c: f32) -> f32;
}

/// FMA: one instruction, one rounding.
#[derive(Clone, Copy)]
pub struct Fused;

/// Multiplication and addition: two instructions, two roundings.
#[derive(Clone, Copy)]
pub struct Separate;

impl MulAdd for Fused {
    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

impl MulAdd for Separate {
    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

/// Whether the processor supports AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
pub fn has_avx2_fma() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// Whether the processor supports AVX-512F.
#[cfg(target_arch = "x86_64")]
pub fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
}

/// Starts to fetch `values` into the cache: for short runs that lie apart in memory, whose pattern the processor does not
/// see.
pub fn prefetch<T>(values: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in values.chunks((64 / size_of::<T>()).max(1)) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 processor has this instruction, which has no effect on values.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = values;
}

/// The [`MulAdd`] of code that is compiled for every processor of the architecture.
#[cfg(target_arch = "aarch64")]
pub type Portable = Fused;
/// The [`MulAdd`] of code that is compiled for every processor of the architecture.
#[cfg(not(target_arch = "aarch64"))]
pub type Portable = Separate;

/// Defines functions whose bodies are generic over a [`MulAdd`]: `fn name<M>(args) { body }` becomes `fn name(args)`,
/// compiled for AVX2 with FMA and portably, and selected at run time. Arguments must be plain identifiers.
macro_rules! vectorised {
    ($(
        $(#[$attribute:meta])*
        $visibility:vis fn $name:ident<$m:ident>($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block
    )*) => {$(
        $(#[$attribute])*
        $visibility fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body<$m: $crate::ops::kernels::simd::MulAdd>($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    body::<$crate::ops::kernels::simd::Fused>($($arg),*)
                }
                if $crate::ops::kernels::simd::has_avx2_fma() {
                    // SAFETY: the features that `avx2` is compiled for were detected just now.
                    return unsafe { avx2($($arg),*) };
                }
            }
            body::<$crate::ops::kernels::simd::Portable>($($arg),*)
        }
    )*};
}
pub(crate) use vectorised;

/// Accumulators of a reduction: two registers of eight hide the latency of an addition, and many short sums have a
/// smaller rounding error than one long sum.
pub const LANES: usize = 16;

/// Sums accumulators pairwise.
#[inline(always)]
pub fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut n = LANES / 2;
    while n > 0 {
        for i in 0..n {
            lanes[i] += lanes[i + n];
        }
        n /= 2;
    }
    lanes[0]
}

/// `e^x` to about one unit in the last place: `2^n * p(r)` with `x = n ln 2 + r` and the coefficients of Cephes'
/// `expf`. The result is 0 below `MIN`, where it would be subnormal, and constant above `MAX`. NaN stays NaN.
#[inline(always)]
pub fn exp<M: MulAdd>(x: f32) -> f32 {
    const MIN: f32 = -87.0;
    const MAX: f32 = 88.3;
    // Adding 1.5 * 2^23 rounds to an integer, in the low bits, without a rounding instruction.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts: `n * LN2_HIGH` is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let bounded = if x > MAX { MAX } else { x };
    let bounded = if bounded < MIN { MIN } else { bounded };
    let shifted = M::mul_add(bounded, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = M::mul_add(n, -LN2_LOW, M::mul_add(n, -LN2_HIGH, bounded));
    let p = M::mul_add(1.987_569_1e-4, r, 1.398_199_9e-3);
    let p = M::mul_add(p, r, 8.333_452e-3);
    let p = M::mul_add(p, r, 4.166_579_6e-2);
    let p = M::mul_add(p, r, 1.666_666_5e-1);
    let p = M::mul_add(p, r, 0.5);
    let mantissa = M::mul_add(p, r * r, r) + 1.0;
    // 2^n: the low bits of `shifted` hold n, and 127 is the bias of an f32's exponent.
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    let y = mantissa * power;
    if x < MIN { 0.0 } else { y }
}

/// `1 / (1 + e^-x)`; exactly 0 below `MIN`, so that its product with any finite number is 0.
#[inline(always)]
pub fn sigmoid<M: MulAdd>(x: f32) -> f32 {
    const MIN: f32 = -88.0;
    let y = 1.0 / (1.0 + exp::<M>(-x));
    if x < MIN { 0.0 } else { y }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exp_of<M: MulAdd>(x: &[f32], y: &mut [f32]) {
        x.iter().zip(y).for_each(|(&x, y)| *y = exp::<M>(x));
    }

    vectorised! {
        fn exp_all<M>(x: &[f32], y: &mut [f32]) {
            exp_of::<M>(x, y);
        }
    }

    #[test]
    fn exp_matches_f64() {
        let x: Vec<f32> = (0..1_000_000).map(|i| -87.0 + 175.0 * i as f32 / 1e6).collect();
        let mut wide = vec![0.0; x.len()];
        exp_all(&x, &mut wide);
        let mut separate = vec![0.0; x.len()];
        exp_of::<Separate>(&x, &mut separate);
        for (y, name) in [(wide, "wide"), (separate, "separate")] {
            let worst =
                x.iter().zip(&y).map(|(&x, &y)| (f64::from(y) / f64::from(x).exp() - 1.0).abs()).fold(0.0, f64::max);
            assert!(worst <= 2e-7, "{name}: {worst:e}");
        }
    }

    #[test]
    fn exp_of_extremes_is_finite_and_ordered() {
        for x in [-1e30f32, -1e4, -100.0, f32::NEG_INFINITY] {
            assert_eq!(exp::<Fused>(x), 0.0);
        }
        assert!(exp::<Fused>(1e30).is_finite());
        assert!(exp::<Fused>(f32::NAN).is_nan());
        assert_eq!(exp::<Fused>(0.0), 1.0);
    }
}
