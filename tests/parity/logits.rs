//! Log-probabilities and entropies of tokens from given logits, through the output layer of the language models: the
//! logits are passed as hidden states, and the weight of the output layer is the identity.

use burn_tensor::DType;
use roll_backends::{Weight, to_device, to_host};
use roll_causal_lm::head::{self, Head, HeadRecord, HeadWeight};
use roll_core::Tensor;

use crate::case::Outcome;

/// Log-probabilities and entropies, and their pullback to the logits.
pub struct FromLogits {
    pub log_probs: Vec<f32>,
    pub entropy: Vec<f32>,
    record: HeadRecord,
}

impl FromLogits {
    /// Log-probabilities of `targets` under rows of `logits` (`[..., V]`).
    pub fn new(logits: &Tensor, targets: &[i64]) -> Outcome<Self> {
        let vocab = *logits.shape().last().ok_or("logits without axes")?;
        let device = roll_backends::device("flex")?;
        let mut identity = vec![0.0f32; vocab * vocab];
        (0..vocab).for_each(|i| identity[i * vocab + i] = 1.0);
        let weight = Weight::new(&Tensor::new(identity, [vocab, vocab])?, DType::F32, &device);
        let hidden = to_device::<2>(&logits.reshape([logits.len() / vocab, vocab])?, &device)?;
        let head = Head { weight: HeadWeight::Frozen(weight), softcap: None, products: DType::F32 };
        let (statistics, record) = head::evaluate(hidden, head, targets)?;
        Ok(Self { log_probs: statistics.log_probs, entropy: statistics.entropy, record })
    }

    /// Returns the cotangent of the logits.
    pub fn pull(self, d_log_probs: &[f32], d_entropy: &[f32]) -> Outcome<Vec<f32>> {
        Ok(to_host(self.record.pull(d_log_probs, d_entropy, None)?)?.to_f32_vec())
    }
}
