//! Random values by key. Generators and permutation are written out: the same key yields the same numbers in every
//! release.

use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

use super::{Noise, Purpose};
use crate::{Result, Tensor};

impl Noise {
    /// A generator for one purpose.
    pub fn generator(&self, purpose: Purpose, step: u64, sample: u64) -> ChaCha8Rng {
        let mut key = [0; 32];
        for (slot, word) in key.chunks_exact_mut(8).zip([self.seed, step, sample, purpose as u64]) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        ChaCha8Rng::from_seed(key)
    }

    /// A source of values uniform in [-1, 1).
    pub fn uniform(&self, purpose: Purpose, step: u64, sample: u64) -> impl FnMut() -> f32 + use<> {
        let mut rng = self.generator(purpose, step, sample);
        // 24 bits, which f32 holds exactly, as a number in [0, 2).
        move || (rng.next_u32() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Standard normal values.
    pub fn normal(&self, purpose: Purpose, step: u64, sample: u64, shape: &[usize]) -> Result<Tensor> {
        let mut rng = self.generator(purpose, step, sample);
        let values = (0..shape.iter().product()).map(|_| StandardNormal.sample(&mut rng)).collect::<Vec<f32>>();
        Tensor::new(values, shape)
    }

    /// The latents that a sample's trajectory starts from: with fixed latents the same for all samples and steps, as in
    /// the reference implementation.
    pub fn latents(&self, step: u64, sample: u64, shape: &[usize]) -> Result<Tensor> {
        match self.fixed_latents_seed {
            Some(seed) => Tensor::new(torch_randn(seed, shape.iter().product()), shape),
            None => self.normal(Purpose::Latents, step, sample, shape),
        }
    }

    /// The latents that the evaluation of a sample starts from: the same at every step.
    pub fn evaluation_latents(&self, sample: u64, shape: &[usize]) -> Result<Tensor> {
        match self.fixed_latents_seed {
            Some(_) => self.latents(0, sample, shape),
            None => self.normal(Purpose::Evaluation, 0, sample, shape),
        }
    }

    /// A permutation of `0..n`.
    pub fn permutation(&self, epoch: u64, n: usize) -> Vec<usize> {
        let mut rng = self.generator(Purpose::Shuffle, epoch, 0);
        let mut order: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            // Lemire's multiply-shift; its bias at 64 bits is negligible.
            let j = ((u128::from(rng.next_u64()) * (i as u128 + 1)) >> 64) as usize;
            order.swap(i, j);
        }
        order
    }
}

/// Number of values that torch transforms together.
const BLOCK: usize = 16;

/// `torch.randn(n)` of the CPU generator seeded with `seed`: 24-bit uniforms of MT19937, then [`box_muller`] on blocks.
/// Torch draws fewer values than a block by another method; this function returns the first values of a block instead.
fn torch_randn(seed: u32, n: usize) -> Vec<f32> {
    let mut mersenne_twister = rand_mt::Mt::new(seed);
    let mut uniform = || (mersenne_twister.next_u32() & 0xff_ffff) as f32 / (1 << 24) as f32;
    let mut values: Vec<f32> = (0..n.max(BLOCK)).map(|_| uniform()).collect();
    let in_full_blocks = values.len() / BLOCK * BLOCK;
    values[..in_full_blocks].chunks_exact_mut(BLOCK).for_each(box_muller);
    // If the last block is not full, torch draws the last sixteen values again, with some of the block before.
    if in_full_blocks != values.len() {
        let tail = values.len() - BLOCK;
        values[tail..].iter_mut().for_each(|v| *v = uniform());
        box_muller(&mut values[tail..]);
    }
    values.truncate(n);
    values
}

/// Replaces the uniform values of a block by normal values: the Box-Muller transform, which pairs each value of the
/// first half with one of the second half.
fn box_muller(block: &mut [f32]) {
    const HALF: usize = BLOCK / 2;
    for j in 0..HALF {
        let (u1, u2) = (1.0 - block[j], block[j + HALF]);
        let radius = (-2.0 * u1.ln()).sqrt();
        let (sin, cos) = (std::f32::consts::TAU * u2).sin_cos();
        block[j] = radius * cos;
        block[j + HALF] = radius * sin;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draw_depends_on_its_key_alone() {
        let noise = Noise::new(7);
        let a = noise.normal(Purpose::Latents, 3, 5, &[4]).unwrap();
        noise.normal(Purpose::Latents, 0, 0, &[100]).unwrap();
        assert_eq!(a.f32s().unwrap(), noise.normal(Purpose::Latents, 3, 5, &[4]).unwrap().f32s().unwrap());
        for (purpose, step, sample) in [(Purpose::Latents, 4, 5), (Purpose::Latents, 3, 6), (Purpose::Parameters, 3, 5)]
        {
            assert_ne!(a.f32s().unwrap(), noise.normal(purpose, step, sample, &[4]).unwrap().f32s().unwrap());
        }
    }

    #[test]
    fn permutation_contains_each_index_once() {
        let order = Noise::new(1).permutation(0, 100);
        let mut sorted = order.clone();
        sorted.sort();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
        assert_ne!(order, sorted);
        assert_ne!(order, Noise::new(1).permutation(1, 100));
    }
}
