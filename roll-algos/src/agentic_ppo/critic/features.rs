//! Features of a token for the head: its hidden state, and the mean of those before.

use roll_core::{Communicator, Error, Result, Tensor};

use super::head::Features;
use crate::agentic_ppo::NAME;
use crate::agentic_ppo::batch::{Evaluated, Sample, by_episodes};
use crate::agentic_ppo::config::AgenticPpoConfig;
use crate::agentic_ppo::grid::Mask;
use crate::ranks::share;

/// Samples that the network reads at once.
pub(super) struct Part {
    /// Their numbers among all.
    samples: Vec<usize>,
    evaluated: Evaluated,
    /// Tokens of a row.
    width: usize,
}

/// This rank's share of `samples`, in parts.
pub(super) fn parts(config: &AgenticPpoConfig, ranks: &dyn Communicator, samples: &[Sample]) -> Result<Vec<Part>> {
    let own: Vec<usize> = share(ranks, samples.len()).collect();
    let part = |rows: Vec<usize>| {
        let chosen: Vec<&Sample> = rows.iter().map(|i| &samples[*i]).collect();
        let width = chosen.iter().map(|s| s.tokens.len()).max().unwrap_or(0).max(2);
        Ok(Part { evaluated: Evaluated::new(&chosen, width)?, samples: rows, width })
    };
    by_episodes(samples, &own, config.micro_batch_size).into_iter().map(part).collect()
}

impl Part {
    /// The network's input: tokens, and where there are any.
    pub(super) fn tokens(&self) -> [&Tensor; 2] {
        [&self.evaluated.batch.tokens, &self.evaluated.batch.attention]
    }

    /// Whether a sample is one of them.
    pub(super) fn has(&self, sample: usize) -> bool {
        self.samples.contains(&sample)
    }

    /// Adds to `features` those of `states` `[rows, width, D]` at the tokens `wanted`.
    pub(super) fn read(&self, states: &Tensor, wanted: &Mask, features: &mut Features) -> Result<()> {
        let [_, width, dim] = *states.shape() else {
            let expected = format!("[{}, {}, D]", self.samples.len(), self.width);
            return Err(Error::shape("hidden states", expected, states.shape()));
        };
        if width != self.width || (features.dim != 0 && features.dim != 2 * dim) {
            let expected = format!("[B, {}, {}]", self.width, features.dim / 2);
            return Err(Error::shape("hidden states", expected, states.shape()));
        }
        features.dim = 2 * dim;
        let (states, first) = (states.f32s()?, features.states.len());
        for (sample, row) in self.samples.iter().zip(self.evaluated.rows()) {
            let mut recent = RunningMean::new(dim);
            // The state after token t speaks of token t + 1, which column t has.
            for t in wanted.columns_of(*sample) {
                let state = &states[(row * width + t) * dim..][..dim];
                features.cells.push((*sample, t));
                features.states.extend_from_slice(state);
                features.states.extend(recent.with(state));
            }
        }
        match features.states[first..].iter().find(|v| !v.is_finite()) {
            Some(value) => {
                let what = format!("a hidden state that `{NAME}` reads");
                Err(Error::NonFinite { what, value: f64::from(*value) })
            }
            None => Ok(()),
        }
    }

    /// The gradient of the states, of `shape`, given that of the features that [`Part::read`] made of them.
    pub(super) fn pull(&self, d_features: &[f32], wanted: &Mask, shape: &[usize]) -> Result<Tensor> {
        let [rows, width, dim] = *shape else { return Err(Error::shape("hidden states", "[B, L, D]", shape)) };
        let mut d_states = vec![0.0f32; rows * width * dim];
        let mut left = d_features;
        for (sample, row) in self.samples.iter().zip(self.evaluated.rows()) {
            let columns: Vec<usize> = wanted.columns_of(*sample).collect();
            let (own, rest) = left.split_at(2 * dim * columns.len());
            left = rest;
            // Each state is in the means of all tokens from its own on: from the last one back.
            let mut d_sum = vec![0.0f32; dim];
            let of_tokens = own.chunks_exact((2 * dim).max(1)).zip(RunningMean::weights(columns.len()));
            for (t, (d, weight)) in columns.into_iter().zip(of_tokens).rev() {
                let (d_last, d_mean) = d.split_at(dim);
                let d_state = &mut d_states[(row * width + t) * dim..][..dim];
                for (i, d_state) in d_state.iter_mut().enumerate() {
                    d_sum[i] = RunningMean::KEPT * d_sum[i] + d_mean[i] / weight;
                    *d_state += d_last[i] + d_sum[i];
                }
            }
        }
        Tensor::new(d_states, shape)
    }
}

/// The mean of the states of a sample so far, with more weight on the later ones.
struct RunningMean {
    sum: Vec<f32>,
    weight: f32,
}

impl RunningMean {
    /// Weight of a state after the next one: the mean reaches back over the words of about one turn.
    const KEPT: f32 = 15.0 / 16.0;

    fn new(dim: usize) -> Self {
        Self { sum: vec![0.0; dim], weight: 0.0 }
    }

    /// The mean with one more state.
    fn with(&mut self, state: &[f32]) -> impl Iterator<Item = f32> + '_ {
        self.weight = Self::KEPT * self.weight + 1.0;
        self.sum.iter_mut().zip(state).for_each(|(sum, value)| *sum = Self::KEPT * *sum + value);
        self.sum.iter().map(|sum| sum / self.weight)
    }

    /// The weights of the first `count` means.
    fn weights(count: usize) -> Vec<f32> {
        let mut weight = 0.0;
        (0..count)
            .map(|_| {
                weight = Self::KEPT * weight + 1.0;
                weight
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::SingleRank;

    use super::*;

    fn sample(episode: usize, length: u32) -> Sample {
        let (tokens, response): (Vec<u32>, _) = ((0..length).collect(), vec![true; length as usize]);
        let log_probs = vec![0.0; length as usize];
        Sample { episode, turn: 0, begins: 0, tokens, response, raw_log_probs: log_probs.clone(), log_probs }
    }

    #[test]
    fn the_gradient_of_the_states_is_that_of_differences() {
        // Two turns of one conversation, which one row of states has, and another conversation.
        let samples = [sample(0, 3), sample(0, 5), sample(1, 4)];
        let parts = parts(&AgenticPpoConfig::default(), &SingleRank, &samples).unwrap();
        let [part] = &parts[..] else { panic!("{} parts", parts.len()) };
        let wanted =
            Mask::new(4, [[1, 1, 0, 0], [0, 1, 1, 1], [1, 0, 1, 0]].concat().iter().map(|m| *m == 1).collect());
        let (wanted, shape) = (wanted.unwrap(), [2, 5, 2]);
        let mut states: Vec<f32> = (0..20u8).map(|i| f32::from(i * 7 % 11) - 5.0).collect();
        let read = |states: &[f32]| {
            let mut features = Features::none();
            part.read(&Tensor::new(states.to_vec(), shape).unwrap(), &wanted, &mut features).unwrap();
            features.states
        };
        let weights: Vec<f32> = (0..read(&states).len()).map(|i| (i as f32 * 1.7).sin()).collect();
        let pulled = part.pull(&weights, &wanted, &shape).unwrap();
        let sum =
            |states: &[f32]| read(states).iter().zip(&weights).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>();
        for i in 0..states.len() {
            let at = states[i];
            states[i] = at + 1.0;
            let above = sum(&states);
            states[i] = at - 1.0;
            let quotient = (above - sum(&states)) / 2.0;
            states[i] = at;
            let found = f64::from(pulled.f32s().unwrap()[i]);
            assert!((quotient - found).abs() < 1e-5, "{i}: {found}, {quotient}");
        }
    }
}
