//! The output layer: log-probabilities and entropies of tokens, computed in chunks of logits.
//!
//! Only the logits of a few hundred rows and a few thousand ids exist at a time. The forward pass keeps two numbers per
//! row (the logarithm of the sum of exponentials and the entropy); the backward pass computes the logits again.
//!
//! Products are taken in the dtype of the blocks' products. In bf16, hidden states, weight and gradients of logits are
//! rounded to it; sums, logits, exponentials and gradients are f32.

use burn_tensor::{DType, Int, Tensor, TensorData};
use roll_backends::{Parameters, Weight, ops};
use roll_core::Result;
use roll_network::precision::as_dtype;

use super::integers;

/// Number of logits in one chunk: 16 MiB in f32.
pub(super) const CHUNK_LOGITS: usize = 1 << 22;
/// Number of token ids in one chunk.
pub(super) const CHUNK_IDS: usize = 1 << 13;

/// The output layer.
#[derive(Clone)]
pub struct Head {
    /// The weight.
    pub weight: HeadWeight,
    /// Bound of the logits: `l` becomes `softcap * tanh(l / softcap)`.
    pub softcap: Option<f32>,
    /// Dtype of the products: f32, or bf16 with f32 sums.
    pub products: DType,
}

/// The weight of the output layer, `[V, D]`.
#[derive(Clone)]
pub enum HeadWeight {
    /// Frozen, in its stored dtype. Each chunk is converted to the dtype of products for its use.
    Frozen(Weight),
    /// Trained: value and index among the parameters.
    Trained(Tensor<2>, usize),
}

/// Statistics of each of N predictions.
pub struct HeadStatistics {
    /// Log-probability of the target.
    pub log_probs: Vec<f32>,
    /// Entropy of the predicted distribution.
    pub entropy: Vec<f32>,
}

/// What the backward pass needs of N predictions. Nothing has the size of the logits.
pub struct HeadRecord {
    hidden: Tensor<2>,
    head: Head,
    targets: Tensor<1, Int>,
    /// Logarithm of the sum of exponentials of the logits, `[N, 1]`.
    log_sum: Tensor<2>,
    /// Entropy of the predicted distribution, `[N, 1]`.
    entropy: Tensor<2>,
}

impl HeadWeight {
    fn shape(&self) -> [usize; 2] {
        match self {
            Self::Frozen(weight) => [weight.shape()[0], weight.shape()[1]],
            Self::Trained(weight, _) => weight.dims(),
        }
    }

    /// Returns the rows of consecutive ids.
    fn chunk(&self, start: usize, len: usize) -> Result<Tensor<2>> {
        match self {
            Self::Frozen(weight) => weight.rows(start, len),
            Self::Trained(weight, _) => Ok(weight.clone().narrow(0, start, len)),
        }
    }

    /// Returns the rows of single ids.
    fn rows(&self, ids: &Tensor<1, Int>) -> Result<Tensor<2>> {
        match self {
            Self::Frozen(weight) => weight.select(ids.clone()),
            Self::Trained(weight, _) => Ok(weight.clone().select(0, ids.clone())),
        }
    }
}

impl Head {
    /// Computes the logits of all ids, `[N, V]`, for few rows.
    pub fn logits(&self, hidden: Tensor<2>) -> Result<Tensor<2>> {
        let [vocab, _] = self.weight.shape();
        let mut logits = Vec::new();
        for (first_id, id_count) in chunks(vocab, CHUNK_IDS) {
            logits.push(self.logits_of(hidden.clone(), self.chunk(first_id, id_count)?));
        }
        Ok(Tensor::cat(logits, 1))
    }

    /// Like [`Head::logits`], for generation: a row's logits do not depend on the other rows; see [`ops::linear_rows`].
    pub fn next_logits(&self, hidden: Tensor<2>) -> Result<Tensor<2>> {
        let x = as_dtype(hidden.clone(), self.products);
        Ok(self.softcapped(match &self.weight {
            HeadWeight::Trained(weight, _) => ops::linear_rows(x, weight.clone(), None),
            HeadWeight::Frozen(weight) => match weight.blocks() {
                Some(blocks) => ops::linear_blocks(hidden, blocks, None),
                None => ops::linear_rows(x, weight.stored::<2>()?, None),
            },
        }))
    }

    /// Returns the rows of consecutive ids in the dtype of products.
    fn chunk(&self, start: usize, len: usize) -> Result<Tensor<2>> {
        Ok(as_dtype(self.weight.chunk(start, len)?, self.products))
    }

    /// Returns the rows of single ids in f32, rounded like those of [`Head::chunk`].
    fn rows(&self, ids: &Tensor<1, Int>) -> Result<Tensor<2>> {
        Ok(self.rounded(self.weight.rows(ids)?))
    }

    /// Rounds `x` to the dtype of products. The result is f32.
    fn rounded(&self, x: Tensor<2>) -> Tensor<2> {
        as_dtype(as_dtype(x, self.products), DType::F32)
    }

    /// The logits of rows that have the dtype of products; f32, as `x`.
    fn logits_of(&self, x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
        self.softcapped(ops::linear(x, weight, None))
    }

    fn softcapped(&self, logits: Tensor<2>) -> Tensor<2> {
        match self.softcap {
            Some(cap) => (logits / cap).tanh() * cap,
            None => logits,
        }
    }

    /// Returns the derivative of the softcap, computed from its results `logits`; `None` without a softcap.
    fn softcap_slope(&self, logits: Tensor<2>) -> Option<Tensor<2>> {
        let tanh = logits / self.softcap?;
        Some(-(tanh.clone() * tanh) + 1.0)
    }
}

/// Returns the start and length of each chunk of `0..total`.
fn chunks(total: usize, size: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..total).step_by(size.max(1)).map(move |start| (start, size.min(total - start)))
}

/// Number of rows whose logits are computed at a time.
fn rows_per_chunk(vocab: usize) -> usize {
    (CHUNK_LOGITS / vocab.min(CHUNK_IDS)).max(1)
}

/// Sums over the logits of the chunks so far, per row, `[rows, 1]` each. They are relative to the largest logit, so
/// that exponentials do not overflow.
struct RunningSums {
    /// The largest logit.
    max: Tensor<2>,
    /// Sum of `exp(l - max)`.
    sum: Tensor<2>,
    /// Sum of `exp(l - max) * (l - max)`.
    weighted: Tensor<2>,
}

impl RunningSums {
    /// The sums over the logits of one chunk and of the chunks before.
    fn with_chunk(before: Option<Self>, logits: Tensor<2>) -> Self {
        let chunk_max = logits.clone().max_dim(1);
        let (max, rescaled) = match before {
            None => (chunk_max, None),
            Some(Self { max: old_max, sum, weighted }) => {
                let max = old_max.clone().max_pair(chunk_max);
                let shift = old_max - max.clone();
                let scale = shift.clone().exp();
                // Sums over (l - old max) become sums over (l - max).
                let weighted = (weighted + sum.clone() * shift) * scale.clone();
                (max, Some((sum * scale, weighted)))
            }
        };
        let centred = logits - max.clone();
        let exponentials = centred.clone().exp();
        let mut sum = exponentials.clone().sum_dim(1);
        let mut weighted = (exponentials * centred).sum_dim(1);
        if let Some((sum_before, weighted_before)) = rescaled {
            sum = sum + sum_before;
            weighted = weighted + weighted_before;
        }
        Self { max, sum, weighted }
    }
}

/// Computes the statistics of `targets` under the distributions that `hidden` (`[N, D]`) predicts, and the record for
/// the backward pass.
pub fn evaluate(hidden: Tensor<2>, head: Head, targets: &[i64]) -> Result<(HeadStatistics, HeadRecord)> {
    let device = hidden.device();
    let hidden = head.rounded(hidden);
    let [vocab, _] = head.weight.shape();
    let rows = targets.len();
    let targets = integers(targets.to_vec(), &device);
    if rows == 0 {
        let empty = Tensor::zeros([0, 1], &device);
        let record = HeadRecord { hidden, head, targets, log_sum: empty.clone(), entropy: empty };
        return Ok((HeadStatistics { log_probs: Vec::new(), entropy: Vec::new() }, record));
    }
    let (mut log_sums, mut entropies) = (Vec::new(), Vec::new());
    for (first_row, row_count) in chunks(rows, rows_per_chunk(vocab)) {
        let h = hidden.clone().narrow(0, first_row, row_count);
        let mut running: Option<RunningSums> = None;
        for (first_id, id_count) in chunks(vocab, CHUNK_IDS) {
            let logits = head.logits_of(h.clone(), head.chunk(first_id, id_count)?);
            running = Some(RunningSums::with_chunk(running, logits));
        }
        if let Some(RunningSums { max, sum, weighted }) = running {
            let log = sum.clone().log();
            log_sums.push(max + log.clone());
            entropies.push(log - weighted / sum);
        }
    }
    let (log_sum, entropy) = (Tensor::cat(log_sums, 0), Tensor::cat(entropies, 0));
    let logits = head.softcapped((head.rows(&targets)? * hidden.clone()).sum_dim(1));
    let statistics = HeadStatistics {
        log_probs: roll_backends::to_host(logits - log_sum.clone())?.to_f32_vec(),
        entropy: roll_backends::to_host(entropy.clone())?.to_f32_vec(),
    };
    Ok((statistics, HeadRecord { hidden, head, targets, log_sum, entropy }))
}

impl HeadRecord {
    /// Returns the cotangent of the hidden states, given the cotangents of log-probabilities and entropies, `[N]` each.
    /// The gradient of a trained weight is added to `parameters`.
    pub fn pull(self, d_log_probs: &[f32], d_entropy: &[f32], parameters: Option<&Parameters>) -> Result<Tensor<2>> {
        let device = self.hidden.device();
        let [rows, _] = self.hidden.dims();
        if rows == 0 {
            return Ok(self.hidden);
        }
        let (head, [vocab, _]) = (&self.head, self.head.weight.shape());
        let column = |values: &[f32]| {
            Tensor::<2>::from_data(TensorData::new(values.to_vec(), [values.len(), 1]), (&device, DType::F32))
        };
        let (d_log, d_entropy) = (column(d_log_probs), column(d_entropy));
        // Where the gradient of the weight is added, if the weight is trained.
        let weight_gradient = match (&head.weight, parameters) {
            (HeadWeight::Trained(_, index), Some(parameters)) => Some((*index, parameters)),
            _ => None,
        };
        // d log p(target) / d l_v = [v = target] - p_v. The first term concerns only the targets' rows of the weight;
        // it comes first. The second term is computed below, in chunks.
        let target_rows = head.rows(&self.targets)?;
        let target_logits = head.softcapped((target_rows.clone() * self.hidden.clone()).sum_dim(1));
        let d_target = match head.softcap_slope(target_logits) {
            Some(slope) => slope * d_log.clone(),
            None => d_log.clone(),
        };
        let mut d_hidden = target_rows * d_target.clone();
        // The second term of the weight's gradient, per chunk of ids.
        let mut d_weight_chunks = Vec::new();
        for (first_id, id_count) in chunks(vocab, CHUNK_IDS) {
            let weight = head.chunk(first_id, id_count)?;
            let mut d_weight_chunk: Option<Tensor<2>> = None;
            let mut d_hidden_parts = Vec::new();
            for (first_row, row_count) in chunks(rows, rows_per_chunk(vocab)) {
                let part = |x: &Tensor<2>| x.clone().narrow(0, first_row, row_count);
                let h = part(&self.hidden);
                let logits = head.logits_of(h.clone(), weight.clone());
                let softcap_slope = head.softcap_slope(logits.clone());
                let log_p = logits - part(&self.log_sum);
                // d H / d l_v = -p_v (log p_v + H).
                let slope = (log_p.clone() + part(&self.entropy)) * part(&d_entropy) + part(&d_log);
                let mut d_logits = -(log_p.exp() * slope);
                if let Some(softcap_slope) = softcap_slope {
                    d_logits = d_logits * softcap_slope;
                }
                let d_logits = as_dtype(d_logits, head.products);
                d_hidden_parts.push(ops::product(d_logits.clone(), weight.clone()));
                if weight_gradient.is_some() {
                    let d_weight = ops::product(d_logits.transpose(), as_dtype(h, head.products));
                    d_weight_chunk = Some(match d_weight_chunk {
                        Some(sum) => sum + d_weight,
                        None => d_weight,
                    });
                }
            }
            d_hidden = d_hidden + Tensor::cat(d_hidden_parts, 0);
            d_weight_chunks.extend(d_weight_chunk);
        }
        if let Some((index, parameters)) = weight_gradient {
            let second_term = Tensor::cat(d_weight_chunks, 0);
            let first_term_rows = self.hidden * d_target;
            let add = burn_tensor::IndexingUpdateOp::Add;
            let d_weight = second_term.select_assign(0, self.targets, first_term_rows, add);
            let count = d_weight.shape().num_elements();
            parameters.add_gradient(index, d_weight.reshape([count]));
        }
        Ok(d_hidden)
    }
}
