//! The features of a token that the head reads: its hidden state, and a running mean of the states so far.

use roll_core::{Adapter, Error, Result, StepContext, Tensor};
use roll_step::ranks::share;
use roll_step::update::language;

use crate::agentic_ppo::NAME;
use crate::agentic_ppo::batch::{ConversationBatch, TextSample, by_episodes, padded_width};
use crate::agentic_ppo::grid::Mask;

/// Features of tokens, and the positions of the tokens in a grid `[B, T]` of all samples.
#[derive(Default)]
pub(super) struct Features {
    /// Number of features of a token.
    pub(super) dim: usize,
    /// Row and column of each token.
    pub(super) cells: Vec<(usize, usize)>,
    /// Hidden states and their running means, `[cells, dim]` row-major.
    pub(super) values: Vec<f32>,
}

impl Features {
    /// Features of this rank's share of `samples` at the tokens `wanted`; the model reads `at_once` conversations at a
    /// time.
    pub(super) fn of(ctx: &mut StepContext<'_>, samples: &[TextSample], wanted: &Mask, at_once: usize) -> Result<Self> {
        let mut features = Self::default();
        let own_share: Vec<usize> = share(ctx.strategy.ranks().all.as_ref(), samples.len()).collect();
        for rows in by_episodes(samples, &own_share, at_once) {
            let chosen: Vec<&TextSample> = rows.iter().map(|i| &samples[*i]).collect();
            let width = padded_width(&chosen);
            let evaluated = ConversationBatch::new(&chosen, width)?;
            let (tokens, attention) = (&evaluated.batch.tokens, &evaluated.batch.attention);
            let states = language(ctx.model, NAME)?.hidden_states(tokens, attention, Adapter::On)?;
            features.add(&states, width, rows.iter().copied().zip(evaluated.row_of.iter().copied()), wanted)?;
        }
        Ok(features)
    }

    /// Adds the features of `samples`, pairs of a sample's position and its row in `states`, which is `[rows, width,
    /// D]`.
    fn add(
        &mut self,
        states: &Tensor,
        width: usize,
        samples: impl Iterator<Item = (usize, usize)>,
        wanted: &Mask,
    ) -> Result<()> {
        let dim = match *states.shape() {
            [_, columns, dim] if columns == width && [0, 2 * dim].contains(&self.dim) => dim,
            _ => {
                let expected = match self.dim {
                    0 => format!("[B, {width}, D]"),
                    dim => format!("[B, {width}, {}]", dim / 2),
                };
                return Err(Error::shape("hidden states", expected, states.shape()));
            }
        };
        self.dim = 2 * dim;
        let (states, count_before) = (states.f32s()?, self.values.len());
        for (sample, row) in samples {
            let mut recent = RunningMean::new(dim);
            // The state after token t predicts token t + 1, whose prediction is column t.
            for t in wanted.columns_of(sample) {
                let state = &states[(row * width + t) * dim..][..dim];
                self.cells.push((sample, t));
                self.values.extend_from_slice(state);
                self.values.extend(recent.after(state));
            }
        }
        match self.values[count_before..].iter().find(|v| !v.is_finite()) {
            Some(value) => {
                let what = format!("a hidden state that `{NAME}` reads");
                Err(Error::NonFinite { what, value: f64::from(*value) })
            }
            None => Ok(()),
        }
    }

    /// The features of each token.
    pub(super) fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.values.chunks_exact(self.dim.max(1))
    }
}

/// The mean of the states of a sample so far, with weights that decay exponentially towards earlier states.
struct RunningMean {
    sum: Vec<f32>,
    weight: f32,
}

impl RunningMean {
    /// Weight of a state relative to the next one. The mean reaches back over about 16 tokens, the words of about one
    /// turn.
    const DECAY: f32 = 15.0 / 16.0;

    fn new(dim: usize) -> Self {
        Self { sum: vec![0.0; dim], weight: 0.0 }
    }

    /// Adds a state and returns the mean after it.
    fn after(&mut self, state: &[f32]) -> impl Iterator<Item = f32> + '_ {
        self.weight = Self::DECAY * self.weight + 1.0;
        self.sum.iter_mut().zip(state).for_each(|(sum, value)| *sum = Self::DECAY * *sum + value);
        self.sum.iter().map(|sum| sum / self.weight)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn features_are_the_hidden_state_and_the_running_mean() {
        // Two samples are turns of one conversation, which is the first row.
        let states = Tensor::new((0..12u8).map(f32::from).collect::<Vec<_>>(), [2, 3, 2]).unwrap();
        let wanted = Mask::new(2, vec![true, true, false, true, true, false]).unwrap();
        let mut features = Features::default();
        features.add(&states, 3, [(0, 0), (1, 0), (2, 1)].into_iter(), &wanted).unwrap();
        assert_eq!((features.dim, &features.cells[..]), (4, &[(0, 0), (0, 1), (1, 1), (2, 0)][..]));
        let mean = |early: f32, late: f32| (RunningMean::DECAY * early + late) / (RunningMean::DECAY + 1.0);
        let expected = [
            [0.0, 1.0, 0.0, 1.0],
            [2.0, 3.0, mean(0.0, 2.0), mean(1.0, 3.0)],
            [2.0, 3.0, 2.0, 3.0],
            [6.0, 7.0, 6.0, 7.0],
        ];
        assert!(features.rows().eq(expected.iter().map(|row| &row[..])));
        let refused = features.add(&Tensor::full([1, 3, 3], 0.0), 3, std::iter::empty(), &wanted);
        assert!(refused.unwrap_err().to_string().contains("hidden states"));
    }
}
