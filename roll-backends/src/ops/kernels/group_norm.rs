//! Group norm followed by SiLU over `[C, positions]`, and its pullback, on the CPU.
//!
//! A task takes whole channels. Sums run in f32 over blocks of [`BLOCK`] positions and in f64 over blocks, in one order
//! for any number of threads.

use rayon::prelude::*;

use super::norm::{RowMoments, sum_of_squares, total};
use super::parallel::{ELEMENT_COST, in_pool, min_items_per_task};
use super::simd::{LANES, sigmoid, sum_lanes, vectorised};

/// Positions per block: x, its cotangent and the result stay in the L1 cache.
const BLOCK: usize = 1 << 11;

/// The weights and sizes of a group norm.
#[derive(Clone, Copy, Debug)]
pub struct GroupNorm<'a> {
    /// Gain of each channel.
    pub gain: &'a [f32],
    /// Bias of each channel.
    pub bias: &'a [f32],
    /// Number of groups of channels.
    pub groups: usize,
    /// Added to the variance.
    pub eps: f64,
}

impl GroupNorm<'_> {
    /// Returns `silu(z)` with `z = (x - mean) * inverse * gain + bias`.
    pub fn forward(self, x: &[f32]) -> Vec<f32> {
        let mut y = vec![0.0; x.len()];
        let positions = self.positions(x);
        in_pool(2 * x.len() * ELEMENT_COST, || {
            let moments = self.moments(x);
            let channels = y.par_chunks_mut(positions).zip(x.par_chunks(positions)).enumerate();
            channels.with_min_len(min_items_per_task(2 * positions * ELEMENT_COST)).for_each(|(c, (y, x))| {
                normalise_silu(x, moments[c], self.affine(c), y);
            });
        });
        y
    }

    /// Returns the gradient of x, given the gradient `d_y` of [`GroupNorm::forward`]'s result.
    pub fn pull(self, x: &[f32], d_y: &[f32]) -> Vec<f32> {
        let mut d_x = vec![0.0; x.len()];
        let positions = self.positions(x);
        let min_channels = min_items_per_task(2 * positions * ELEMENT_COST);
        in_pool(4 * x.len() * ELEMENT_COST, || {
            let moments = self.moments(x);
            // `d_x` holds the cotangents of the normalised x; their sums, and the sums of their products with it.
            let channels = d_x.par_chunks_mut(positions).zip(x.par_chunks(positions)).zip(d_y.par_chunks(positions));
            let channels = channels.enumerate().with_min_len(min_channels);
            let sums: Vec<[f64; 2]> = channels
                .map(|(c, ((d_hat, x), d_y))| {
                    let blocks = d_hat.chunks_mut(BLOCK).zip(x.chunks(BLOCK)).zip(d_y.chunks(BLOCK));
                    blocks.fold([0.0; 2], |[sum, product], ((d_hat, x), d_y)| {
                        hat_cotangent(x, d_y, moments[c], self.affine(c), d_hat);
                        let (of_block, of_products) = (total(d_hat), hat_product(x, moments[c], d_hat));
                        [sum + f64::from(of_block), product + f64::from(of_products)]
                    })
                })
                .collect();
            let [means, mean_products] = [0, 1].map(|i| self.group_means(positions, sums.iter().map(|sums| sums[i])));
            let channels = d_x.par_chunks_mut(positions).zip(x.par_chunks(positions)).enumerate();
            channels.with_min_len(min_channels).for_each(|(c, (d_x, x))| {
                pull_hat(x, moments[c], [means[c] as f32, mean_products[c] as f32], d_x);
            });
        });
        d_x
    }

    /// Number of positions of a channel, at least 1.
    fn positions(&self, x: &[f32]) -> usize {
        (x.len() / self.gain.len().max(1)).max(1)
    }

    /// Gain and bias of a channel.
    fn affine(&self, channel: usize) -> [f32; 2] {
        [self.gain[channel], self.bias[channel]]
    }

    /// The moments of each channel's group.
    fn moments(&self, x: &[f32]) -> Vec<RowMoments> {
        let positions = self.positions(x);
        let sums = |of_block: &(dyn Fn(usize, &[f32]) -> f32 + Sync)| {
            let channels = x.par_chunks(positions).enumerate();
            let channels = channels.with_min_len(min_items_per_task(positions * ELEMENT_COST));
            let sums = channels.map(|(c, x)| x.chunks(BLOCK).map(|x| f64::from(of_block(c, x))).sum());
            self.group_means(positions, sums.collect::<Vec<f64>>())
        };
        let means = sums(&|_, x| total(x));
        let variances = sums(&|c, x| sum_of_squares(x, means[c] as f32));
        let moments = means.iter().zip(variances);
        moments
            .map(|(&mean, variance)| RowMoments {
                mean: mean as f32,
                inverse: (1.0 / (variance + self.eps).sqrt()) as f32,
            })
            .collect()
    }

    /// The mean of each channel's group, given the sum of each channel.
    fn group_means(&self, positions: usize, sums: impl IntoIterator<Item = f64>) -> Vec<f64> {
        let sums: Vec<f64> = sums.into_iter().collect();
        let members = (self.gain.len() / self.groups.max(1)).max(1);
        let mean = |sums: &[f64]| sums.iter().sum::<f64>() / (members * positions) as f64;
        sums.chunks(members).flat_map(|sums| std::iter::repeat_n(mean(sums), sums.len())).collect()
    }
}

vectorised! {
    fn normalise_silu<M>(x: &[f32], moments: RowMoments, affine: [f32; 2], y: &mut [f32]) {
        let [gain, bias] = affine;
        for (y, &x) in y.iter_mut().zip(x) {
            let z = M::mul_add((x - moments.mean) * moments.inverse, gain, bias);
            *y = z * sigmoid::<M>(z);
        }
    }

    /// Writes the cotangents of the normalised x.
    fn hat_cotangent<M>(x: &[f32], d_y: &[f32], moments: RowMoments, affine: [f32; 2], d_hat: &mut [f32]) {
        let [gain, bias] = affine;
        for ((d_hat, &x), &d_y) in d_hat.iter_mut().zip(x).zip(d_y) {
            let z = M::mul_add((x - moments.mean) * moments.inverse, gain, bias);
            let (s, one_minus_s) = (sigmoid::<M>(z), sigmoid::<M>(-z));
            *d_hat = d_y * M::mul_add(z, s * one_minus_s, s) * gain;
        }
    }

    /// The sum of the products of `d_hat` and the normalised x.
    fn hat_product<M>(x: &[f32], moments: RowMoments, d_hat: &[f32]) -> f32 {
        let mut lanes = [0.0; LANES];
        let ((x, x_rest), (d_hat, d_rest)) = (x.as_chunks::<LANES>(), d_hat.as_chunks::<LANES>());
        for (x, d_hat) in x.iter().zip(d_hat) {
            for i in 0..LANES {
                lanes[i] = M::mul_add(d_hat[i], (x[i] - moments.mean) * moments.inverse, lanes[i]);
            }
        }
        let rest = x_rest.iter().zip(d_rest).map(|(x, d_hat)| d_hat * ((x - moments.mean) * moments.inverse));
        sum_lanes(lanes) + rest.sum::<f32>()
    }

    /// Replaces the cotangents of the normalised x by those of x. `means` are the means, over the group, of the former
    /// and of their products with the normalised x.
    fn pull_hat<M>(x: &[f32], moments: RowMoments, means: [f32; 2], d_x: &mut [f32]) {
        let [mean, mean_product] = means;
        for (d_x, &x) in d_x.iter_mut().zip(x) {
            let hat = (x - moments.mean) * moments.inverse;
            *d_x = M::mul_add(-hat, mean_product, *d_x - mean) * moments.inverse;
        }
    }
}
