//! AdamW on flat f32 slices in host memory.

use rayon::prelude::*;
use roll_core::{AdamUpdate, OptimizerConfig};

use super::BLOCK;

/// AdamW with decoupled weight decay and bias correction, with the bits of `torch.optim.AdamW` (PyTorch 2.9):
/// `p <- p (1 - lr wd)`, `p <- p - lr/bc1 * m / (sqrt(v)/sqrt(bc2) + eps)`.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamW {
    betas: [f64; 2],
    eps: f64,
    weight_decay: f64,
}

/// Moments of a flat slice of parameters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Moments {
    /// Running mean of the gradient.
    pub exp_avg: Vec<f32>,
    /// Running mean of its square.
    pub exp_avg_sq: Vec<f32>,
    /// Updates so far.
    pub step: u64,
}

impl Moments {
    /// Zero moments of `n` parameters.
    pub fn zeros(n: usize) -> Self {
        Self { exp_avg: vec![0.0; n], exp_avg_sq: vec![0.0; n], step: 0 }
    }
}

impl AdamW {
    /// Takes decay rates, epsilon and weight decay from `config`.
    pub fn new(config: &OptimizerConfig) -> Self {
        Self { betas: config.betas, eps: config.eps, weight_decay: config.weight_decay }
    }

    /// Updates `parameters` and `moments` by `gradients`. All slices have one length; scalars are computed in f64 and
    /// rounded once.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn update(&self, parameters: &mut [f32], gradients: &[f32], moments: &mut Moments, learning_rate: f64) {
        moments.step += 1;
        let Moments { exp_avg, exp_avg_sq, step } = moments;
        let unscaled = [1.0; 2];
        update(&self.coefficients(*step, learning_rate, unscaled), parameters, gradients, [exp_avg, exp_avg_sq]);
    }

    /// The coefficients of update number `step`, counted from 1. `scale` are the factors of [`AdamUpdate::scale`].
    pub fn coefficients(&self, step: u64, learning_rate: f64, scale: [f64; 2]) -> AdamUpdate {
        let [b1, b2] = self.betas;
        let correction = |beta: f64| 1.0 - beta.powf(step as f64);
        AdamUpdate {
            scale: scale.map(|factor| factor as f32),
            beta_2: b2 as f32,
            rest: self.betas.map(|beta| (1.0 - beta) as f32),
            eps: self.eps as f32,
            step_size: (learning_rate / correction(b1)) as f32,
            root_correction: correction(b2).sqrt() as f32,
            keep: (1.0 - learning_rate * self.weight_decay) as f32,
        }
    }
}

/// Applies an update to `parameters` and their first and second moment. `gradients` must be scaled already, because
/// [`AdamUpdate::scale`] is ignored here. Elements do not depend on each other, so that a part of the parameters can be
/// updated by itself, with the same bits.
///
/// # Panics
/// When the lengths differ.
pub fn update(update: &AdamUpdate, parameters: &mut [f32], gradients: &[f32], [first, second]: [&mut [f32]; 2]) {
    let lengths = [gradients.len(), first.len(), second.len()];
    assert_eq!(lengths, [parameters.len(); 3], "gradients and moments of {} parameters", parameters.len());
    parameters
        .par_chunks_mut(BLOCK)
        .zip(gradients.par_chunks(BLOCK))
        .zip(first.par_chunks_mut(BLOCK).zip(second.par_chunks_mut(BLOCK)))
        .for_each(|((p, g), (m, v))| update_block_on_this_processor(update, p, g, m, v));
}

/// [`update_block`], compiled for AVX2 if the processor has it. The bits are the same without it, because the compiler
/// fuses no product with a sum.
fn update_block_on_this_processor(c: &AdamUpdate, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn avx2(c: &AdamUpdate, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
            update_block(c, p, g, m, v);
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the feature was detected just now.
            return unsafe { avx2(c, p, g, m, v) };
        }
    }
    update_block(c, p, g, m, v);
}

/// Updates a block by the coefficients `c`: parameters `p`, gradients `g`, first moments `m` and second moments `v`.
/// The loop has no branches, so that the compiler vectorises it.
#[inline(always)]
fn update_block(c: &AdamUpdate, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
    for (((p, &g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
        *m += c.rest[0] * (g - *m);
        *v = *v * c.beta_2 + c.rest[1] * g * g;
        let denominator = v.sqrt() / c.root_correction + c.eps;
        *p = *p * c.keep - c.step_size * (*m / denominator);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn run(threads: usize) -> Vec<f32> {
        let n = 3 * BLOCK + 17;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let config = OptimizerConfig { weight_decay: 0.1, ..Default::default() };
        let mut p: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut moments = Moments::zeros(n);
        pool.install(|| {
            for t in 0..3 {
                let g: Vec<f32> = (0..n).map(|i| ((i + t) as f32 * 0.11).cos()).collect();
                AdamW::new(&config).update(&mut p, &g, &mut moments, 1e-2);
            }
        });
        p
    }

    #[test]
    fn updates_do_not_depend_on_the_number_of_threads() {
        assert_eq!(run(1), run(3));
    }

    #[test]
    fn shards_are_updated_like_the_whole() {
        let config = OptimizerConfig::default();
        let optimizer = AdamW::new(&config);
        let (mut whole, g) = (vec![1.0f32, -2.0, 3.0, 0.5], [0.1f32, 0.2, -0.3, 0.0]);
        let mut part = whole[1..3].to_vec();
        optimizer.update(&mut whole, &g, &mut Moments::zeros(4), 0.1);
        optimizer.update(&mut part, &g[1..3], &mut Moments::zeros(2), 0.1);
        assert_eq!(whole[1..3], part);
    }
}
