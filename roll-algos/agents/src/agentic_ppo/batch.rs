//! Episodes as a batch of samples: whole episodes, or each turn by itself.

use std::collections::HashMap;
use std::ops::Range;

use roll_core::{Result, Tensor};

use super::config::TruncatedAnswers;
use super::episode::{Episode, Step};
use super::grid::{Grid, Mask};
use super::rewards::groups;

/// One sample: tokens and the values that belong to them.
#[derive(Clone, Debug)]
pub struct TextSample {
    /// Position of the sample's episode among the episodes of the step.
    pub episode: usize,
    /// Turn of the sample, if each turn is a sample; 0 otherwise.
    pub turn: usize,
    /// Position in the episode's tokens at which the sample begins. Of two samples of an episode that begin at the same
    /// position, the shorter is a prefix of the longer.
    pub begins: usize,
    /// All tokens.
    pub tokens: Vec<u32>,
    /// Whether each token is trained on: the agent wrote it, in the sample's own turn.
    pub response: Vec<bool>,
    /// Log-probabilities that generation reported, under the distribution it drew from.
    pub log_probs: Vec<f32>,
    /// Log-probabilities at temperature 1 over all tokens.
    pub raw_log_probs: Vec<f32>,
}

/// The samples of `episodes`: one per text or, if `stepwise`, one per turn. An episode is one text unless its program
/// began another. The sample of a turn ends with the answer of that turn, and only the answer is trained on. Nothing is
/// trained on of a sample with an answer that was cut off, if `truncated` says so.
pub fn text_samples(episodes: &[Episode], stepwise: bool, truncated: TruncatedAnswers) -> Vec<TextSample> {
    let masks = |steps: &[Step]| truncated == TruncatedAnswers::Mask && steps.iter().any(|step| step.truncated);
    let mut samples = Vec::new();
    for (index, episode) in episodes.iter().enumerate() {
        let sample = |turn, begins: usize, trained: Range<usize>, masked: bool| TextSample {
            episode: index,
            turn,
            begins,
            tokens: episode.tokens[begins..trained.end].to_vec(),
            response: (begins..trained.end).map(|t| !masked && trained.contains(&t) && episode.response[t]).collect(),
            log_probs: episode.log_probs[begins..trained.end].to_vec(),
            raw_log_probs: episode.raw_log_probs[begins..trained.end].to_vec(),
        };
        if stepwise {
            let turns = episode.steps.chunks(1).enumerate();
            samples.extend(
                turns.map(|(turn, steps)| sample(turn, steps[0].begins, steps[0].tokens.clone(), masks(steps))),
            );
        } else {
            let texts = episode.steps.chunk_by(|one, next| one.begins == next.begins);
            samples.extend(texts.map(|turns| {
                let (begins, end) = (turns[0].begins, turns[turns.len() - 1].tokens.end);
                sample(0, begins, begins..end, masks(turns))
            }));
        }
    }
    samples
}

/// A batch in which the turns of one conversation share a row, so that the model evaluates their common tokens once.
///
/// The row is the longest turn, of which the other turns are prefixes. Because no token depends on later ones, the
/// log-probabilities of the row are also the log-probabilities of every turn, and the gradient of the row is the sum of
/// the turns' gradients.
pub struct ConversationBatch {
    /// The model's input.
    pub batch: Batch,
    /// u8 `[rows, L]`: the tokens that any sample of a row is trained on.
    pub wanted: Tensor,
    /// The row of each sample in the batch.
    pub row_of: Vec<usize>,
}

impl ConversationBatch {
    /// Makes a batch of `samples`, padded to `width`.
    pub fn new(samples: &[&TextSample], width: usize) -> Result<Self> {
        let mut longest: Vec<&TextSample> = Vec::new();
        let (mut row_of_conversation, mut row_of) = (HashMap::new(), Vec::new());
        for sample in samples {
            let row = *row_of_conversation.entry((sample.episode, sample.begins)).or_insert(longest.len());
            match longest.get_mut(row) {
                Some(turn) if turn.tokens.len() < sample.tokens.len() => *turn = sample,
                Some(_) => {}
                None => longest.push(sample),
            }
            row_of.push(row);
        }
        let mut wanted = vec![0u8; longest.len() * width];
        for (sample, row) in samples.iter().zip(&row_of) {
            let tokens = wanted[row * width..].iter_mut().zip(&sample.response);
            tokens.for_each(|(wanted, response)| *wanted |= u8::from(*response));
        }
        let wanted = Tensor::new(wanted, [longest.len(), width])?;
        Ok(Self { batch: Batch::new(&longest, width)?, wanted, row_of })
    }

    /// The model's `values`, given row by row, sample by sample. Beside the tokens that a sample is trained on, its row
    /// has values of other turns, or 0.
    pub fn by_sample(&self, values: &Grid) -> Result<Grid> {
        Grid::new(values.columns(), self.row_of.iter().flat_map(|row| values.row(*row)).copied().collect())
    }

    /// The gradient of each row: the sum of the `gradients` of its samples.
    pub fn by_row(&self, gradients: &Grid) -> Grid {
        let mut sums = Grid::filled(self.batch.response.rows(), gradients.columns(), 0.0);
        for (sample, row) in self.row_of.iter().enumerate() {
            sums.row_mut(*row).iter_mut().zip(gradients.row(sample)).for_each(|(sum, d)| *sum += d);
        }
        sums
    }
}

/// Splits `rows`, positions in `samples`, into micro-batches of `episodes` conversations each. The turns of a
/// conversation stay together, because [`ConversationBatch`] evaluates them in one row. A turn with a prompt of its own
/// is a conversation.
pub fn by_episodes(samples: &[TextSample], rows: &[usize], episodes: usize) -> Vec<Vec<usize>> {
    let conversations = groups(rows.iter().map(|row| (samples[*row].episode, samples[*row].begins)));
    let rows_of = |conversations: &[Vec<usize>]| conversations.concat().into_iter().map(|i| rows[i]).collect();
    conversations.chunks(episodes).map(rows_of).collect()
}

/// A batch of samples, padded on the right to one width.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Tokens, i64 `[B, L]`.
    pub tokens: Tensor,
    /// u8 `[B, L]`: 1 for tokens, 0 for padding.
    pub attention: Tensor,
    /// `attention` as a mask.
    pub attention_mask: Mask,
    /// Predictions of response tokens, `[B, L - 1]`: column t is the prediction of token t + 1.
    pub response: Mask,
    /// Log-probabilities that generation reported, under the distribution it drew from, `[B, L - 1]`.
    pub infer_log_probs: Grid,
    /// Log-probabilities at temperature 1 over all tokens, `[B, L - 1]`.
    pub raw_log_probs: Grid,
}

impl Batch {
    /// Pads `samples` to `width` tokens, which must be at least 2 and hold the longest.
    pub fn new(samples: &[&TextSample], width: usize) -> Result<Self> {
        let (mut tokens, mut attention, mut response) = (Vec::new(), Vec::new(), Vec::new());
        let (mut log_probs, mut raw_log_probs) = (Vec::new(), Vec::new());
        for sample in samples {
            let padding = width.saturating_sub(sample.tokens.len());
            tokens.extend(sample.tokens.iter().map(|t| i64::from(*t)).chain(std::iter::repeat_n(0, padding)));
            attention.extend(sample.tokens.iter().map(|_| 1u8).chain(std::iter::repeat_n(0, padding)));
            response.extend(sample.response.iter().copied().chain(std::iter::repeat_n(false, padding)));
            for (grid, values) in [(&mut log_probs, &sample.log_probs), (&mut raw_log_probs, &sample.raw_log_probs)] {
                let padded = values.iter().map(|l| f64::from(*l)).chain(std::iter::repeat_n(0.0, padding));
                grid.extend(padded.skip(1));
            }
        }
        let is_token = attention.iter().map(|a| *a != 0).collect();
        Ok(Self {
            tokens: Tensor::new(tokens, [samples.len(), width])?,
            attention: Tensor::new(attention, [samples.len(), width])?,
            attention_mask: Mask::new(width, is_token)?,
            response: Mask::new(width, response)?.of_predictions()?,
            infer_log_probs: Grid::new(width - 1, log_probs)?,
            raw_log_probs: Grid::new(width - 1, raw_log_probs)?,
        })
    }
}

/// Width that holds all samples; at least 2, so that there is a prediction.
pub fn padded_width(samples: &[&TextSample]) -> usize {
    samples.iter().map(|s| s.tokens.len()).max().unwrap_or(0).max(2)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn turn(episode: usize, turn: usize, length: usize) -> TextSample {
        let tokens: Vec<u32> = (0..length as u32).collect();
        let zeros = vec![0.0; length];
        let response = vec![true; length];
        TextSample { episode, turn, begins: 0, response, log_probs: zeros.clone(), raw_log_probs: zeros, tokens }
    }

    #[test]
    fn turns_of_an_episode_are_evaluated_once() {
        let samples = [turn(7, 0, 2), turn(7, 1, 4), turn(9, 0, 3), turn(7, 2, 3)];
        let evaluated = ConversationBatch::new(&samples.iter().collect::<Vec<_>>(), 4).unwrap();
        assert_eq!(evaluated.batch.tokens.shape(), [2, 4]);
        assert_eq!(evaluated.batch.attention.to_f32_vec(), [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]);
        let spread = evaluated.by_sample(&Grid::new(3, vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap()).unwrap();
        assert_eq!(spread.row(1), [1.0, 2.0, 3.0]);
        assert_eq!((spread.row(0), spread.row(2)), (spread.row(3), &[4.0, 5.0, 6.0][..]));
        assert_eq!(evaluated.by_row(&spread).values(), [3.0, 6.0, 9.0, 4.0, 5.0, 6.0]);
    }

    #[test]
    fn tokens_that_any_turn_is_trained_on_are_wanted() {
        let answers = |turn: TextSample, response: [bool; 4]| TextSample {
            response: response[..turn.tokens.len()].to_vec(),
            ..turn
        };
        let samples = [
            answers(turn(7, 1, 4), [false, false, false, true]),
            answers(turn(7, 0, 2), [false, true, false, false]),
            answers(turn(9, 0, 3), [false, false, true, false]),
        ];
        let evaluated = ConversationBatch::new(&samples.iter().collect::<Vec<_>>(), 4).unwrap();
        assert_eq!(evaluated.wanted.shape(), [2, 4]);
        assert_eq!(evaluated.wanted.to_f32_vec(), [0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]);
    }

    #[test]
    fn parts_hold_whole_episodes_in_order() {
        let samples = [turn(0, 0, 2), turn(0, 1, 3), turn(1, 0, 2), turn(2, 0, 2), turn(2, 1, 3)];
        assert_eq!(by_episodes(&samples, &[0, 1, 2, 3, 4], 2), [vec![0, 1, 2], vec![3, 4]]);
        assert_eq!(by_episodes(&samples, &[4, 2, 3], 1), [vec![4, 3], vec![2]]);
        assert!(by_episodes(&samples, &[], 2).is_empty());
        // Prompts of their own share nothing.
        let alone = [TextSample { begins: 0, ..turn(0, 0, 2) }, TextSample { begins: 2, ..turn(0, 1, 3) }];
        assert_eq!(by_episodes(&alone, &[0, 1], 1), [vec![0], vec![1]]);
        let evaluated = ConversationBatch::new(&alone.iter().collect::<Vec<_>>(), 3).unwrap();
        assert_eq!(evaluated.batch.tokens.shape(), [2, 3]);
    }
}
