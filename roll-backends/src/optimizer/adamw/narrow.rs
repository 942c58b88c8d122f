//! The update with moments in bf16.

use half::bf16;

use roll_core::AdamUpdate;

use super::updated;

/// Random bits for every parameter of an update, from its place in the flat layout.
#[derive(Clone, Copy)]
pub(super) struct Draws {
    key: u32,
    place: u32,
}

impl Draws {
    /// Those of update `step`; the first parameter stands at `place`.
    pub(super) fn new(step: u64, place: usize) -> Self {
        // SplitMix64's finaliser.
        let mut z = step.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Self { key: (z ^ (z >> 31)) as u32, place: place as u32 }
    }

    /// Those from `offset` on. Places that are 2^32 apart share their bits, which does no harm.
    pub(super) fn from(self, offset: usize) -> Self {
        Self { place: self.place.wrapping_add(offset as u32), ..self }
    }

    /// 32 bits for the parameter at `offset`: a permutation of places, keyed by the update.
    #[inline(always)]
    fn bits(self, offset: u32) -> u32 {
        // The finaliser of MurmurHash3.
        let mut h = self.place.wrapping_add(offset) ^ self.key;
        h = (h ^ (h >> 16)).wrapping_mul(0x85eb_ca6b);
        h = (h ^ (h >> 13)).wrapping_mul(0xc2b2_ae35);
        h ^ (h >> 16)
    }
}

/// Rounds to one of the two neighbours, to the one further from zero with the probability that makes the mean right.
/// `draw` has 16 bits.
#[inline(always)]
fn rounded(value: f32, draw: u32) -> bf16 {
    let bits = value.to_bits();
    let up = bits.wrapping_add(draw);
    // A finite value does not become infinite, and infinity stays infinite.
    let kept = if up & 0x7f80_0000 == 0x7f80_0000 { bits } else { up };
    bf16::from_bits((kept >> 16) as u16)
}

/// The loop, compiled for the widest registers that the processor has.
pub(super) fn widest<const DEEPSPEED: bool>(
    c: &AdamUpdate,
    p: &mut [f32],
    g: &[f32],
    m: &mut [bf16],
    v: &mut [bf16],
    draws: Draws,
) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn avx2<const DEEPSPEED: bool>(
            c: &AdamUpdate,
            p: &mut [f32],
            g: &[f32],
            m: &mut [bf16],
            v: &mut [bf16],
            draws: Draws,
        ) {
            block::<DEEPSPEED>(c, p, g, m, v, draws);
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the feature was detected just now.
            return unsafe { avx2::<DEEPSPEED>(c, p, g, m, v, draws) };
        }
    }
    block::<DEEPSPEED>(c, p, g, m, v, draws);
}

#[inline(always)]
fn block<const DEEPSPEED: bool>(
    c: &AdamUpdate,
    p: &mut [f32],
    g: &[f32],
    m: &mut [bf16],
    v: &mut [bf16],
    draws: Draws,
) {
    // By hand, because `bf16::to_f32` asks the processor for its features at every value.
    let wide = |x: bf16| f32::from_bits(u32::from(x.to_bits()) << 16);
    for (i, (((p, &g), m), v)) in p.iter_mut().zip(g).zip(m).zip(v).enumerate() {
        let (new, mean, square) = updated::<DEEPSPEED>(c, *p, g, wide(*m), wide(*v));
        let bits = draws.bits(i as u32);
        *p = new;
        *m = rounded(mean, bits & 0xffff);
        *v = rounded(square, bits >> 16);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use roll_core::OptimizerConfig;

    use super::*;
    use crate::optimizer::{AdamRule, AdamW, BLOCK, Moments};

    const N: usize = BLOCK + 300;

    /// Gradients with a mean, noise, and sizes that lie three orders of magnitude apart.
    fn gradients(step: usize, size: f32) -> Vec<f32> {
        let noise = |i: usize| (((i * 7919 + step * 104_729) % 10_007) as f32 / 5003.5) - 1.0;
        (0..N).map(|i| size * 10f32.powi(-((i % 4) as i32)) * (0.3 + noise(i))).collect()
    }

    #[test]
    fn rounding_at_random_keeps_the_mean_and_never_leaves_the_neighbours() {
        for value in [1.0f32, 1.003, -0.7512, 3.3e-30, 1.2e-41, 3.3e38] {
            let below = bf16::from_bits((value.to_bits() >> 16) as u16).to_f32();
            let above = bf16::from_bits((value.to_bits() >> 16) as u16 + 1).to_f32();
            let (mut sum, mut n) = (0.0, 0);
            for draw in 0..=0xffff {
                let found = rounded(value, draw).to_f32();
                assert!(found == below || found == above);
                sum += f64::from(found);
                n += 1;
            }
            let (mean, step) = (sum / f64::from(n), f64::from(above - below).abs());
            assert!((mean - f64::from(value)).abs() <= step / 60_000.0, "{value}: {mean}");
        }
        for special in [f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
            assert!(rounded(special, 0xffff).to_f32().is_infinite() == special.is_infinite());
        }
        assert!(rounded(f32::NAN, 0xffff).is_nan() && rounded(0.0, 0xffff).to_bits() == 0);
    }

    #[test]
    fn one_update_leaves_the_parameters_of_f32_and_moments_within_a_step_of_bf16() {
        let optimizer = AdamW::new(&OptimizerConfig::default(), AdamRule::Torch);
        let g = gradients(0, 1.0);
        let mut p = [vec![0.5f32; N], vec![0.5f32; N]];
        let (mut exact, mut narrow) = (Moments::zeros(N), Moments::zeros_bf16(N));
        optimizer.update(&mut p[0], &g, &mut exact, 1e-3);
        optimizer.update(&mut p[1], &g, &mut narrow, 1e-3);
        // The update itself is computed before anything is rounded.
        assert_eq!(p[0], p[1]);
        for (a, b) in [(&exact.exp_avg, &narrow.exp_avg), (&exact.exp_avg_sq, &narrow.exp_avg_sq)] {
            for (a, b) in a.f32s(0..N).iter().zip(b.f32s(0..N)) {
                assert!((a - b).abs() <= a.abs() / 128.0, "{a} {b}");
            }
        }
    }

    /// The second moment must also come down again: rounded to the nearest it would stay where it was.
    #[test]
    fn after_thousands_of_updates_moments_and_parameters_are_near_those_of_f32() {
        let optimizer = AdamW::new(&OptimizerConfig::default(), AdamRule::Torch);
        let mut p = [vec![0.5f32; N], vec![0.5f32; N]];
        let (mut exact, mut narrow) = (Moments::zeros(N), Moments::zeros_bf16(N));
        let (steps, rate) = (1500, 1e-3);
        for step in 0..2 * steps {
            let g = gradients(step, if step < steps { 1.0 } else { 0.1 });
            optimizer.update(&mut p[0], &g, &mut exact, rate);
            optimizer.update(&mut p[1], &g, &mut narrow, rate);
        }
        let (exact, narrow) = (exact.exp_avg_sq.f32s(0..N), narrow.exp_avg_sq.f32s(0..N));
        let ratios: Vec<f64> = exact.iter().zip(&narrow).map(|(a, b)| f64::from(b / a)).collect();
        let mean = ratios.iter().sum::<f64>() / N as f64;
        let spread = (ratios.iter().map(|r| (r - 1.0).powi(2)).sum::<f64>() / N as f64).sqrt();
        let [low, high] = [f64::min, f64::max].map(|f| ratios.iter().copied().fold(1.0, f));
        assert!((mean - 1.0).abs() < 0.01, "{mean}");
        // The errors of the last 1/(1 - beta_2) updates add up like steps of a random walk.
        assert!(spread < 0.1 && low > 0.6 && high < 1.6, "{spread} {low} {high}");
        // Both went the same way: 3000 steps of about 0.3 to 1 of the learning rate.
        let way = |p: &[f32]| p.iter().map(|p| f64::from(0.5 - p)).sum::<f64>() / N as f64;
        let apart = p[0].iter().zip(&p[1]).map(|(a, b)| f64::from((a - b).abs())).sum::<f64>() / N as f64;
        assert!(apart < 0.01 * way(&p[0]), "{apart} of {}", way(&p[0]));
    }

    #[test]
    fn neither_threads_nor_parts_change_a_bit() {
        let optimizer = AdamW::new(&OptimizerConfig::default(), AdamRule::DeepSpeed);
        let run = |threads: usize, cuts: &[usize]| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let (mut p, mut moments) = (vec![0.5f32; N], Moments::zeros_bf16(N));
            pool.install(|| {
                for step in 0..3 {
                    let g = gradients(step, 1.0);
                    moments.step += 1;
                    for cut in cuts.windows(2) {
                        let (start, part) = (cut[0], cut[0]..cut[1]);
                        let (p, g) = (&mut p[part.clone()], &g[part]);
                        optimizer.update_part(1e-3, p, g, &mut moments, start, start);
                    }
                }
            });
            (p, moments)
        };
        let whole = run(1, &[0, N]);
        assert!(whole == run(3, &[0, N]) && whole == run(2, &[0, 77, BLOCK + 1, N]));
    }
}
