//! Sequence parallelism by all-to-all: ranks hold tokens of all heads outside of attention and all tokens of some heads
//! inside it ("DeepSpeed Ulysses", arXiv 2309.14509).

use std::sync::{Arc, Mutex};

use burn_tensor::{DType, Tensor, TensorData, read_sync};
use roll_core::{Communicator, Error, Result};

use super::Kernels;
use super::operator::{Operator, Pullback, call};
use crate::backend::{TensorMetadata, tensor::FloatTensor as Floats};
use crate::sync::lock;

/// The ranks over which the tokens of a sequence are sharded, in equal parts, in the order of the ranks. All ranks must
/// run the same passes in the same order.
pub struct TokenRanks {
    communicator: Arc<dyn Communicator>,
    /// The first error of an all-to-all, because a backward pass cannot return it.
    first_error: Mutex<Option<Error>>,
}

impl TokenRanks {
    /// Uses all ranks of `communicator`.
    pub fn new(communicator: Arc<dyn Communicator>) -> Self {
        Self { communicator, first_error: Mutex::new(None) }
    }

    /// Number of ranks.
    pub fn count(&self) -> usize {
        self.communicator.world_size()
    }

    /// The index of this rank.
    pub fn rank(&self) -> usize {
        self.communicator.rank().0
    }

    /// All-gather: the values of all ranks, concatenated. Fails if `own` differs in length between ranks or a rank
    /// failed.
    pub fn all_gather(&self, own: &[f32]) -> Result<Vec<f32>> {
        let mut all = vec![0.0; own.len() * self.count()];
        self.communicator.all_gather(own, &mut all)?;
        Ok(all)
    }

    /// Fails if an all-to-all has failed since the last check. Results that depend on it are meaningless.
    pub fn check(&self) -> Result<()> {
        match lock(&self.first_error).take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Runs the all-to-all of x `[rows, columns]`. Returns zeros if it fails, and keeps the error for
    /// [`TokenRanks::check`].
    fn all_to_all(&self, x: &[f32], [rows, columns]: [usize; 2], transfer: AllToAll) -> Vec<f32> {
        let sent = match transfer.to {
            Sharding::Heads => split_by_heads(x, [rows, columns], transfer.parts, self.count()),
            Sharding::Tokens => x.to_vec(),
        };
        let mut received = vec![0.0; x.len()];
        if let Err(error) = self.communicator.all_to_all(&sent, &mut received) {
            lock(&self.first_error).get_or_insert(error);
            return vec![0.0; x.len()];
        }
        match transfer.to {
            Sharding::Heads => received,
            Sharding::Tokens => {
                merge_by_tokens(&received, [rows / self.count(), columns], transfer.parts, self.count())
            }
        }
    }
}

/// An all-to-all from one sharding to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllToAll {
    /// The sharding of the result.
    pub to: Sharding,
    /// Number of matrices that lie side by side in the columns, e.g. queries, keys and values; each is sharded.
    pub parts: usize,
}

/// The sharding of the result of an [`AllToAll`], which determines its direction. Each direction is the transpose of
/// the other, and therefore its pullback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharding {
    /// From `[L / N, parts * dim]`, this rank's tokens, to `[L, parts * dim / N]`, all tokens of this rank's heads.
    Heads,
    /// From all tokens of this rank's heads to this rank's tokens.
    Tokens,
}

impl AllToAll {
    /// The all-to-all in the opposite direction.
    fn back(self) -> Self {
        let to = match self.to {
            Sharding::Heads => Sharding::Tokens,
            Sharding::Tokens => Sharding::Heads,
        };
        Self { to, ..self }
    }

    /// The shape of the result among `count` ranks, for an operand `[rows, columns]`.
    fn shape(self, [rows, columns]: [usize; 2], count: usize) -> [usize; 2] {
        match self.to {
            Sharding::Heads => [rows * count, columns / count],
            Sharding::Tokens => [rows / count, columns * count],
        }
    }
}

/// Splits x `[rows, parts * dim]` into one matrix `[rows, parts * dim / count]` for each of `count` ranks, stacked
/// vertically.
fn split_by_heads(x: &[f32], [rows, columns]: [usize; 2], parts: usize, count: usize) -> Vec<f32> {
    let (dim, width) = (columns / parts, columns / parts / count);
    let mut out = Vec::with_capacity(x.len());
    for rank in 0..count {
        for row in 0..rows {
            for part in 0..parts {
                out.extend_from_slice(&x[row * columns + part * dim + rank * width..][..width]);
            }
        }
    }
    out
}

/// Merges one matrix `[rows, parts * width]` of each of `count` ranks, stacked vertically, to
/// `[rows, parts * count * width]`. `columns` is `parts * width`. Within each part, the columns of rank 0 come first,
/// then those of rank 1, and so on.
fn merge_by_tokens(x: &[f32], [rows, columns]: [usize; 2], parts: usize, count: usize) -> Vec<f32> {
    let width = columns / parts;
    let mut out = Vec::with_capacity(x.len());
    for row in 0..rows {
        for part in 0..parts {
            for rank in 0..count {
                out.extend_from_slice(&x[(rank * rows + row) * columns + part * width..][..width]);
            }
        }
    }
    out
}

/// All-to-all: sends this rank's slices of `x` and receives those of the other ranks, in the direction `transfer`, in
/// the dtype of x. Its gradient is the opposite all-to-all. Data passes through host memory as f32. A failure is
/// reported by [`TokenRanks::check`]. Panics if the number of ranks does not divide the columns (to heads) or the rows
/// (to tokens).
pub fn all_to_all(x: Tensor<2>, ranks: &Arc<TokenRanks>, transfer: AllToAll) -> Tensor<2> {
    let ([rows, columns], count) = (x.dims(), ranks.count());
    let is_divisible = match transfer.to {
        Sharding::Heads => columns.is_multiple_of(transfer.parts * count),
        Sharding::Tokens => rows.is_multiple_of(count) && columns.is_multiple_of(transfer.parts),
    };
    assert!(is_divisible, "{count} ranks and {transfer:?} for a matrix of {rows} x {columns}");
    let dtype = x.dtype();
    call(Call { ranks: ranks.clone(), transfer }, [x.cast(DType::F32).into_dispatch()]).cast(dtype)
}

/// See [`all_to_all`]; the operand is x.
struct Call {
    ranks: Arc<TokenRanks>,
    transfer: AllToAll,
}

impl Operator<1> for Call {
    fn forward<B: Kernels>(self, [x]: [Floats<B>; 1]) -> Floats<B> {
        let Self { ranks, transfer } = self;
        let (shape, device) = (x.shape().dims::<2>(), x.device());
        let read = read_sync(B::float_into_data(x)).map_err(|error| error.to_string());
        let values = match read.and_then(|data| data.try_into_vec::<f32>().map_err(|error| format!("{error:?}"))) {
            Ok(values) => ranks.all_to_all(&values, shape, transfer),
            Err(problem) => {
                let error = Error::Misuse(format!("reading tokens for the other ranks: {problem}"));
                // The other ranks wait for this rank's slices.
                ranks.communicator.fail(&error.to_string());
                lock(&ranks.first_error).get_or_insert(error);
                vec![0.0; shape[0] * shape[1]]
            }
        };
        B::float_from_data(TensorData::new(values, transfer.shape(shape, ranks.count())), &device)
    }

    fn record<B: Kernels>(self, operands: [Floats<B>; 1], _: [bool; 1]) -> (Floats<B>, impl Pullback<B, 1>) {
        let back = Self { ranks: self.ranks.clone(), transfer: self.transfer.back() };
        (self.forward::<B>(operands), move |d_y| [Some(back.forward::<B>([d_y]))])
    }
}

#[cfg(feature = "flex")]
#[allow(clippy::unwrap_used)]
#[cfg(test)]
mod tests {
    use std::time::Duration;

    use roll_core::ThreadRanks;

    use super::*;
    use crate::ops::seed;

    /// Queries and keys of four heads of three channels, side by side; the number encodes token, matrix and channel.
    fn value(token: usize, part: usize, channel: usize) -> f32 {
        (1000 * token + 100 * part + channel) as f32
    }

    #[test]
    fn all_to_all_and_back_is_the_identity_with_its_gradient() {
        let (tokens, dim, parts) = (8, 12, 2);
        for count in [1, 2, 4] {
            let results = ThreadRanks::run(count, Duration::from_secs(60), |ranks| {
                let device = crate::device("flex")?;
                let group = Arc::new(TokenRanks::new(ranks));
                let (own, width) = (tokens / count, dim / count);
                let mine = group.rank() * own..(group.rank() + 1) * own;
                let row = |token: usize| (0..parts).flat_map(move |part| (0..dim).map(move |c| value(token, part, c)));
                let values: Vec<f32> = mine.clone().flat_map(row).collect();
                let x = Tensor::<2>::from_data(TensorData::new(values.clone(), [own, parts * dim]), &device);
                let leaf = x.autodiff().require_grad();
                let heads = all_to_all(leaf.clone(), &group, AllToAll { to: Sharding::Heads, parts });
                assert_eq!(heads.dims(), [tokens, parts * width]);
                let first = group.rank() * width;
                let row =
                    |token: usize| (0..parts).flat_map(move |p| (0..width).map(move |c| value(token, p, first + c)));
                let expected: Vec<f32> = (0..tokens).flat_map(row).collect();
                assert_eq!(heads.clone().inner().into_data().try_into_vec::<f32>().unwrap(), expected);
                let back = all_to_all(heads.clone() * 3.0, &group, AllToAll { to: Sharding::Tokens, parts });
                let tripled: Vec<f32> = values.iter().map(|v| 3.0 * v).collect();
                assert_eq!(back.clone().inner().into_data().try_into_vec::<f32>().unwrap(), tripled);
                // The forward pass multiplies by three, and so does the gradient.
                let cotangent = Tensor::<2>::from_data(TensorData::new(values, [own, parts * dim]), &device);
                let mut found = seed(back, cotangent).backward();
                let gradient = leaf.grad_remove(&mut found).unwrap().into_data().try_into_vec::<f32>().unwrap();
                assert_eq!(gradient, tripled);
                group.check()
            });
            results.into_iter().for_each(Result::unwrap);
        }
    }
}
