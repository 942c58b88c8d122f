//! AdamW on flat f32 slices in host memory.

mod narrow;

use half::bf16;
use rayon::prelude::*;
use roll_core::{AdamUpdate, OptimizerConfig};

use super::BLOCK;
use super::moments::{Moment, Moments};
use narrow::Draws;

/// How the update is written. The same to rounding; each reproduces its origin's bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AdamRule {
    /// `torch.optim.AdamW` of PyTorch 2.9: `p <- p (1 - lr wd)`, `p <- p - lr/bc1 * m / (sqrt(v)/sqrt(bc2) + eps)`.
    #[default]
    Torch,
    /// DeepSpeed's CPUAdam and FusedAdam: `p <- p - lr wd p`, moments as products and sums.
    DeepSpeed,
}

/// AdamW with decoupled weight decay and bias correction.
///
/// Moments in bf16 are widened, updated in f32 as always, and rounded *at random* to one of their two neighbours, so
/// that the mean is right. Rounding to the nearest would lose the second moment: an update moves it by `1 - beta_2 =
/// 0.1 %`, half a step of bf16 is 0.2 to 0.4 %, so that it would never fall again. The draw is a hash of the number of
/// the update and of the parameter's place in the flat layout: the same on any number of threads and ranks, and after a
/// resume.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamW {
    betas: [f64; 2],
    eps: f64,
    weight_decay: f64,
    rule: AdamRule,
}

impl AdamW {
    /// Takes decay rates, epsilon and weight decay from `config`.
    pub fn new(config: &OptimizerConfig, rule: AdamRule) -> Self {
        Self { betas: config.betas, eps: config.eps, weight_decay: config.weight_decay, rule }
    }

    /// Updates `parameters` and `moments` by `gradients`. All slices have one length; scalars are computed in f64 and
    /// rounded once.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn update(&self, parameters: &mut [f32], gradients: &[f32], moments: &mut Moments, learning_rate: f64) {
        assert_eq!(parameters.len(), moments.len());
        moments.step += 1;
        self.update_part(learning_rate, parameters, gradients, moments, 0, 0);
    }

    /// Update number `moments.step` of a part of the parameters, whose moments begin at `kept`, and which begins at
    /// `place` in the flat layout. A part is updated as it would be within the whole.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn update_part(
        &self,
        learning_rate: f64,
        parameters: &mut [f32],
        gradients: &[f32],
        moments: &mut Moments,
        kept: usize,
        place: usize,
    ) {
        let n = parameters.len();
        assert_eq!(gradients.len(), n);
        let kept = kept..kept + n;
        let c = self.coefficients(moments.step, learning_rate, [1.0; 2]);
        match (&mut moments.exp_avg, &mut moments.exp_avg_sq) {
            (Moment::F32(m), Moment::F32(v)) => {
                self.update_blocks(&c, parameters, gradients, &mut m[kept.clone()], &mut v[kept]);
            }
            (Moment::Bf16(m), Moment::Bf16(v)) => {
                let draws = Draws::new(moments.step, place);
                self.update_blocks_bf16(&c, parameters, gradients, &mut m[kept.clone()], &mut v[kept], draws);
            }
            _ => panic!("both moments have one dtype"),
        }
    }

    fn update_blocks(&self, c: &AdamUpdate, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
        let update = match self.rule {
            AdamRule::Torch => update_torch,
            AdamRule::DeepSpeed => update_deepspeed,
        };
        p.par_chunks_mut(BLOCK)
            .zip(g.par_chunks(BLOCK))
            .zip(m.par_chunks_mut(BLOCK).zip(v.par_chunks_mut(BLOCK)))
            .for_each(|((p, g), (m, v))| update(c, p, g, m, v));
    }

    fn update_blocks_bf16(
        &self,
        c: &AdamUpdate,
        p: &mut [f32],
        g: &[f32],
        m: &mut [bf16],
        v: &mut [bf16],
        draws: Draws,
    ) {
        let update = match self.rule {
            AdamRule::Torch => narrow::widest::<false>,
            AdamRule::DeepSpeed => narrow::widest::<true>,
        };
        p.par_chunks_mut(BLOCK)
            .zip(g.par_chunks(BLOCK))
            .zip(m.par_chunks_mut(BLOCK).zip(v.par_chunks_mut(BLOCK)))
            .enumerate()
            .for_each(|(i, ((p, g), (m, v)))| update(c, p, g, m, v, draws.from(i * BLOCK)));
    }

    /// The numbers of update number `step`, from 1 on, for an update elsewhere ([`roll_core::DeviceUpdates`]); `scale`
    /// are factors of the gradient, which the other methods take scaled.
    pub fn coefficients(&self, step: u64, learning_rate: f64, scale: [f64; 2]) -> AdamUpdate {
        let [b1, b2] = self.betas;
        let correction = |beta: f64| 1.0 - beta.powf(step as f64);
        AdamUpdate {
            products: self.rule == AdamRule::DeepSpeed,
            scale: scale.map(|factor| factor as f32),
            betas: self.betas.map(|beta| beta as f32),
            rest: self.betas.map(|beta| (1.0 - beta) as f32),
            eps: self.eps as f32,
            step_size: (learning_rate / correction(b1)) as f32,
            root_correction: correction(b2).sqrt() as f32,
            decay: (learning_rate * self.weight_decay) as f32,
            keep: (1.0 - learning_rate * self.weight_decay) as f32,
        }
    }
}

fn update_torch(c: &AdamUpdate, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
    widest::<false>(c, p, g, m, v);
}

fn update_deepspeed(c: &AdamUpdate, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
    widest::<true>(c, p, g, m, v);
}

/// Runs the loop compiled for the widest registers of the processor. All versions have the same bits, because the
/// compiler does not contract products and sums to FMA.
fn widest<const DEEPSPEED: bool>(c: &AdamUpdate, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn avx2<const DEEPSPEED: bool>(c: &AdamUpdate, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
            update_block::<DEEPSPEED>(c, p, g, m, v);
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the feature was detected just now.
            return unsafe { avx2::<DEEPSPEED>(c, p, g, m, v) };
        }
    }
    update_block::<DEEPSPEED>(c, p, g, m, v);
}

/// Branch-free over slices of one length, so that the compiler vectorises the loop.
#[inline(always)]
fn update_block<const DEEPSPEED: bool>(c: &AdamUpdate, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
    for (((p, &g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
        (*p, *m, *v) = updated::<DEEPSPEED>(c, *p, g, *m, *v);
    }
}

/// Returns parameter and moments of one element after an update.
#[inline(always)]
fn updated<const DEEPSPEED: bool>(c: &AdamUpdate, p: f32, g: f32, m: f32, v: f32) -> (f32, f32, f32) {
    let decayed = if DEEPSPEED { p - c.decay * p } else { p * c.keep };
    let m = if DEEPSPEED { c.betas[0] * m + c.rest[0] * g } else { m + c.rest[0] * (g - m) };
    let v = v * c.betas[1] + c.rest[1] * g * g;
    let denominator = v.sqrt() / c.root_correction + c.eps;
    (decayed - c.step_size * (m / denominator), m, v)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn run(threads: usize, rule: AdamRule) -> Vec<f32> {
        let n = 3 * BLOCK + 17;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let config = OptimizerConfig { weight_decay: 0.1, ..Default::default() };
        let mut p: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut moments = Moments::zeros(n);
        pool.install(|| {
            for t in 0..3 {
                let g: Vec<f32> = (0..n).map(|i| ((i + t) as f32 * 0.11).cos()).collect();
                AdamW::new(&config, rule).update(&mut p, &g, &mut moments, 1e-2);
            }
        });
        p
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        assert_eq!(run(1, AdamRule::Torch), run(3, AdamRule::Torch));
    }

    #[test]
    fn both_rules_agree_to_rounding() {
        let (a, b) = (run(2, AdamRule::Torch), run(2, AdamRule::DeepSpeed));
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-6));
    }

    #[test]
    fn a_shard_is_updated_as_its_part_of_the_whole() {
        let config = OptimizerConfig::default();
        let optimizer = AdamW::new(&config, AdamRule::Torch);
        let (mut whole, g) = (vec![1.0f32, -2.0, 3.0, 0.5], [0.1f32, 0.2, -0.3, 0.0]);
        let mut part = whole[1..3].to_vec();
        optimizer.update(&mut whole, &g, &mut Moments::zeros(4), 0.1);
        optimizer.update(&mut part, &g[1..3], &mut Moments::zeros(2), 0.1);
        assert_eq!(whole[1..3], part);
    }
}
