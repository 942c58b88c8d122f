//! Episodes as a batch of samples: whole episodes, or each turn by itself.

use roll_core::{Result, Tensor};

use super::grid::{Grid, Mask};
use super::rollout::Episode;

/// One sample: tokens with what is known of them.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Place of its episode.
    pub episode: usize,
    /// Its turn, when each turn is a sample.
    pub turn: usize,
    /// All tokens.
    pub tokens: Vec<u32>,
    /// Which of them the agent wrote, and are trained on.
    pub response: Vec<bool>,
    /// Log-probabilities that generation reported.
    pub log_probs: Vec<f32>,
}

/// The samples of `episodes`: one each, or one per turn that ends with the turn's answer and trains on it alone.
pub fn samples(episodes: &[Episode], stepwise: bool) -> Vec<Sample> {
    let mut samples = Vec::new();
    for (place, episode) in episodes.iter().enumerate() {
        if !stepwise {
            samples.push(Sample {
                episode: place,
                turn: 0,
                tokens: episode.tokens.clone(),
                response: episode.response.clone(),
                log_probs: episode.log_probs.clone(),
            });
            continue;
        }
        for (turn, step) in episode.steps.iter().enumerate() {
            let end = step.tokens.end;
            samples.push(Sample {
                episode: place,
                turn,
                tokens: episode.tokens[..end].to_vec(),
                response: (0..end).map(|t| step.tokens.contains(&t)).collect(),
                log_probs: episode.log_probs[..end].to_vec(),
            });
        }
    }
    samples
}

/// Samples side by side, padded on the right to the longest.
#[derive(Clone, Debug)]
pub struct Batch {
    /// i64 `[B, L]`.
    pub tokens: Tensor,
    /// u8 `[B, L]`, 1 where there is a token.
    pub attention: Tensor,
    /// The same as a mask.
    pub attention_mask: Mask,
    /// Predictions of response tokens, `[B, L - 1]`.
    pub response: Mask,
    /// Log-probabilities that generation reported, `[B, L - 1]`.
    pub infer_log_probs: Grid,
}

impl Batch {
    /// Pads `samples` to `width` tokens, which must be at least 2 and hold the longest.
    pub fn new(samples: &[&Sample], width: usize) -> Result<Self> {
        let (mut tokens, mut attention, mut response) = (Vec::new(), Vec::new(), Vec::new());
        let mut log_probs = Vec::new();
        for sample in samples {
            let padding = width.saturating_sub(sample.tokens.len());
            tokens.extend(sample.tokens.iter().map(|t| i64::from(*t)).chain(std::iter::repeat_n(0, padding)));
            attention.extend(sample.tokens.iter().map(|_| 1u8).chain(std::iter::repeat_n(0, padding)));
            response.extend(sample.response.iter().copied().chain(std::iter::repeat_n(false, padding)));
            let padded = sample.log_probs.iter().map(|l| f64::from(*l)).chain(std::iter::repeat_n(0.0, padding));
            log_probs.extend(padded.skip(1));
        }
        let kept = attention.iter().map(|a| *a != 0).collect();
        Ok(Self {
            tokens: Tensor::new(tokens, [samples.len(), width])?,
            attention: Tensor::new(attention, [samples.len(), width])?,
            attention_mask: Mask::new(width, kept)?,
            response: Mask::new(width, response)?.of_predictions()?,
            infer_log_probs: Grid::new(width - 1, log_probs)?,
        })
    }
}

/// Width that holds all samples; at least 2, so that there is a prediction.
pub fn width(samples: &[Sample]) -> usize {
    samples.iter().map(|s| s.tokens.len()).max().unwrap_or(0).max(2)
}
