//! Batches without padding, in which the tokens of all sequences are concatenated: made from rectangular tensors with
//! padding, and results spread to such tensors again.

use std::ops::Range;

use roll_core::{Error, Result, Tensor};

use super::pictures::is_picture;

/// Concatenated tokens of several sequences. Linear layers process all of them at once, attention each sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Packed {
    pub ids: Vec<i64>,
    /// Position of each token in its sequence.
    pub positions: Vec<usize>,
    /// Rotary position (time, row, column) of each token, in models that read pictures; otherwise empty.
    pub places: Vec<[usize; 3]>,
    /// Range of each sequence; an empty sequence has an empty range.
    pub spans: Vec<Range<usize>>,
}

impl Packed {
    /// Adds a sequence, or a part of a sequence. `first_position` is the position of the first id in its sequence.
    pub fn push(&mut self, ids: impl Iterator<Item = i64>, first_position: usize) {
        let start = self.ids.len();
        self.ids.extend(ids);
        let end = self.ids.len();
        self.positions.extend(first_position..first_position + end - start);
        self.spans.push(start..end);
    }

    pub fn len(&self) -> usize {
        self.ids.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }
}

/// A rectangular batch `[B, L]`, packed.
#[derive(Clone, Debug)]
pub struct Batch {
    pub packed: Packed,
    /// Index of each token in `[B, L]`, row-major.
    places: Vec<usize>,
    /// Number of rows, B.
    pub rows: usize,
    /// Number of columns, L, including padding.
    pub columns: usize,
}

impl Batch {
    /// Packs `tokens` (integers, `[B, L]`) where `mask` (`[B, L]`) is not 0. Positions begin at 0 in each row, wherever
    /// the padding is.
    pub fn new(tokens: &Tensor, mask: &Tensor) -> Result<Self> {
        let [rows, columns] = *tokens.shape() else {
            return Err(Error::shape("tokens", "[B, L]", tokens.shape()));
        };
        if mask.shape() != tokens.shape() {
            return Err(Error::shape("mask of tokens", format!("[{rows}, {columns}]"), mask.shape()));
        }
        let ids = integers("tokens", tokens)?;
        let mask = mask.to_f32_vec();
        let (mut packed, mut places) = (Packed::default(), Vec::new());
        for row in 0..rows {
            let unmasked = (row * columns..(row + 1) * columns).filter(|i| mask[*i] != 0.0);
            places.extend(unmasked.clone());
            let first_position = 0;
            packed.push(unmasked.map(|i| ids[i]), first_position);
        }
        Ok(Self { packed, places, rows, columns })
    }

    /// Returns the predictions of the tokens at which `wanted` (`[B, L]`) is not 0. The first token of a sequence is
    /// not predicted, and neither are padding and the squares of pictures.
    pub fn predictions(&self, wanted: &Tensor) -> Result<Predictions> {
        if wanted.shape() != [self.rows, self.columns] {
            let expected = format!("[{}, {}]", self.rows, self.columns);
            return Err(Error::shape("wanted tokens", expected, wanted.shape()));
        }
        let wanted = wanted.to_f32_vec();
        let mut predictions = Predictions::default();
        let width = self.columns.saturating_sub(1);
        for span in &self.packed.spans {
            for token in span.start..span.end.saturating_sub(1) {
                let target = token + 1;
                let place = self.places[target];
                if wanted[place] == 0.0 || is_picture(self.packed.ids[target]) {
                    continue;
                }
                // In `[B, L - 1]`, a prediction is in the column before its target.
                predictions.rows.push(token as i64);
                predictions.targets.push(self.packed.ids[target]);
                predictions.places.push(place / self.columns * width + place % self.columns - 1);
            }
        }
        Ok(predictions)
    }

    /// Spreads one value per prediction to `[B, L - 1]`, with 0 elsewhere.
    pub fn spread(&self, values: &[f32], predictions: &Predictions) -> Result<Tensor> {
        let width = self.columns.saturating_sub(1);
        let mut out = vec![0.0f32; self.rows * width];
        for (value, place) in values.iter().zip(&predictions.places) {
            out[*place] = *value;
        }
        Tensor::new(out, [self.rows, width])
    }

    /// Spreads `width` values per token to `[B, L, width]`, with 0 at padding.
    pub fn spread_rows(&self, values: &[f32], width: usize) -> Result<Tensor> {
        let mut out = vec![0.0f32; self.rows * self.columns * width];
        for (row, place) in values.chunks_exact(width.max(1)).zip(&self.places) {
            out[place * width..][..width].copy_from_slice(row);
        }
        Tensor::new(out, [self.rows, self.columns, width])
    }
}

/// The wanted predictions of a batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Predictions {
    /// Index of the packed token whose hidden state predicts each token.
    pub rows: Vec<i64>,
    /// Id of each predicted token.
    pub targets: Vec<i64>,
    /// Index of each prediction in `[B, L - 1]`, row-major.
    pub places: Vec<usize>,
}

/// The elements of an integer tensor, which errors call `what`.
fn integers(what: &str, tensor: &Tensor) -> Result<Vec<i64>> {
    use roll_core::DType;
    match tensor.dtype() {
        DType::I64 => Ok(tensor.as_slice::<i64>()?.to_vec()),
        DType::I32 => Ok(tensor.as_slice::<i32>()?.iter().map(|v| i64::from(*v)).collect()),
        other => Err(Error::DType { what: what.into(), expected: "i64 or i32".into(), found: format!("{other:?}") }),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn packing_does_not_depend_on_the_side_of_the_padding() {
        let mask = |m: [u8; 8]| Tensor::new(m.to_vec(), [2, 4]).unwrap();
        let left =
            Batch::new(&Tensor::new(vec![0i64, 7, 8, 9, 1, 2, 3, 4], [2, 4]).unwrap(), &mask([0, 1, 1, 1, 1, 1, 1, 1]))
                .unwrap();
        let right =
            Batch::new(&Tensor::new(vec![7i64, 8, 9, 0, 1, 2, 3, 4], [2, 4]).unwrap(), &mask([1, 1, 1, 0, 1, 1, 1, 1]))
                .unwrap();
        assert_eq!(left.packed, right.packed);
        assert_eq!(left.packed.positions, [0, 1, 2, 0, 1, 2, 3]);
        let all = mask([1; 8]);
        let (l, r) = (left.predictions(&all).unwrap(), right.predictions(&all).unwrap());
        assert_eq!((&l.rows, &l.targets), (&r.rows, &r.targets));
        assert_eq!(l.places, [1, 2, 3, 4, 5]);
        assert_eq!(r.places, [0, 1, 3, 4, 5]);
    }

    #[test]
    fn rows_with_fewer_than_two_tokens_have_no_predictions() {
        let tokens = Tensor::new(vec![5i64, 6, 7, 8], [2, 2]).unwrap();
        let mask = Tensor::new(vec![0u8, 0, 0, 1], [2, 2]).unwrap();
        let batch = Batch::new(&tokens, &mask).unwrap();
        let predictions = batch.predictions(&mask).unwrap();
        assert!(predictions.rows.is_empty());
        assert_eq!(batch.spread(&[], &predictions).unwrap().shape(), [2, 1]);
    }

    #[test]
    fn predictions_are_those_of_wanted_tokens() {
        let mask = |m: [u8; 8]| Tensor::new(m.to_vec(), [2, 4]).unwrap();
        let tokens = Tensor::new(vec![7i64, 8, 9, 0, 1, 2, 3, 4], [2, 4]).unwrap();
        let batch = Batch::new(&tokens, &mask([1, 1, 1, 0, 1, 1, 1, 1])).unwrap();
        // The first token of a row and padding have no prediction.
        let predictions = batch.predictions(&mask([1, 0, 1, 1, 1, 0, 0, 1])).unwrap();
        assert_eq!((&predictions.rows[..], &predictions.targets[..]), (&[1, 5][..], &[9, 4][..]));
        assert_eq!(predictions.places, [1, 5]);
        let problem = batch.predictions(&Tensor::new(vec![1u8; 6], [2, 3]).unwrap()).unwrap_err().to_string();
        assert!(problem.contains("wanted tokens") && problem.contains("[2, 4]"), "{problem}");
    }
}
