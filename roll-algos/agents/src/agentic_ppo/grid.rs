//! Matrices of per-token values and masks: a row per sample, a column per token.
//!
//! All statistics of this algorithm are computed in f64 on the host. They are only a few thousand numbers per step, and
//! the differences of log-probabilities that they consist of would lose too many digits in f32.

use roll_core::{Error, Result, Tensor};

/// Values of tokens, f64 `[B, T]`, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Grid {
    columns: usize,
    values: Vec<f64>,
}

impl Grid {
    /// Makes a grid of row-major values. Fails if they are not a whole number of rows.
    pub fn new(columns: usize, values: Vec<f64>) -> Result<Self> {
        if columns == 0 || values.len() % columns != 0 {
            return Err(Error::shape("values per token", format!("rows of {columns}"), &[values.len()]));
        }
        Ok(Self { columns, values })
    }

    /// A grid of `rows` x `columns` in which every value is `value`.
    pub fn filled(rows: usize, columns: usize, value: f64) -> Self {
        Self { columns, values: vec![value; rows * columns] }
    }

    /// Makes a grid of a tensor `[B, T]`. Error messages call the tensor `what`.
    pub fn from_tensor(what: &str, tensor: &Tensor) -> Result<Self> {
        match *tensor.shape() {
            [_, columns] if columns > 0 => {
                Ok(Self { columns, values: tensor.to_f32_vec().into_iter().map(f64::from).collect() })
            }
            _ => Err(Error::shape(what, "[B, T]", tensor.shape())),
        }
    }

    /// The values as a tensor, f32 `[B, T]`.
    pub fn to_tensor(&self) -> Result<Tensor> {
        Tensor::new(self.values.iter().map(|v| *v as f32).collect::<Vec<_>>(), [self.rows(), self.columns])
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.values.len() / self.columns
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// All values, row-major.
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// One row.
    pub fn row(&self, b: usize) -> &[f64] {
        &self.values[b * self.columns..(b + 1) * self.columns]
    }

    /// One row, mutable.
    pub fn row_mut(&mut self, b: usize) -> &mut [f64] {
        &mut self.values[b * self.columns..(b + 1) * self.columns]
    }

    /// Applies `f` to each value.
    pub fn map(&self, f: impl Fn(f64) -> f64) -> Self {
        Self { columns: self.columns, values: self.values.iter().map(|v| f(*v)).collect() }
    }

    /// Combines two grids of the same shape, value by value.
    ///
    /// # Panics
    /// If the shapes differ. The functions that callers of this crate use check shapes before.
    pub fn zip(&self, other: &Grid, f: impl Fn(f64, f64) -> f64) -> Self {
        assert_eq!((self.columns, self.values.len()), (other.columns, other.values.len()), "grids of one shape");
        let values = self.values.iter().zip(&other.values).map(|(a, b)| f(*a, *b)).collect();
        Self { columns: self.columns, values }
    }

    /// The values where `mask` holds, and 0 elsewhere, even if a value there is infinite or NaN.
    pub fn masked(&self, mask: &Mask) -> Self {
        let values = self.values.iter().zip(mask.kept()).map(|(v, kept)| if *kept { *v } else { 0.0 }).collect();
        Self { columns: self.columns, values }
    }

    /// A grid of `columns` columns in which row b is filled with `rows[b]`.
    pub fn spread(columns: usize, rows: &[f64]) -> Self {
        Self { columns, values: rows.iter().flat_map(|v| std::iter::repeat_n(*v, columns)).collect() }
    }

    /// Multiplies `other` by this grid of weights, value by value. A weight of 0 makes the result 0, even if the value
    /// is infinite or NaN.
    ///
    /// # Panics
    /// If the shapes differ, as [`Grid::zip`].
    pub fn weigh(&self, other: &Grid) -> Self {
        self.zip(other, |w, v| if w == 0.0 { 0.0 } else { w * v })
    }

    /// The sum of `other` weighted by this grid, which is the sum of all values of [`Grid::weigh`].
    pub fn dot(&self, other: &Grid) -> f64 {
        self.weigh(other).values.iter().sum()
    }

    /// Fails unless the grid has the shape of `mask`. The error calls the grid `what`.
    pub fn expect_shape_of(&self, mask: &Mask, what: &str) -> Result<()> {
        if (self.rows(), self.columns) != (mask.rows(), mask.columns) {
            let wanted = format!("[{}, {}]", mask.rows(), mask.columns);
            return Err(Error::shape(what, wanted, &[self.rows(), self.columns]));
        }
        Ok(())
    }
}

/// The tokens that count, `[B, T]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask {
    columns: usize,
    kept: Vec<bool>,
}

impl Mask {
    /// Makes a mask of row-major flags. Fails if they are not a whole number of rows.
    pub fn new(columns: usize, kept: Vec<bool>) -> Result<Self> {
        if columns == 0 || kept.len() % columns != 0 {
            return Err(Error::shape("mask of tokens", format!("rows of {columns}"), &[kept.len()]));
        }
        Ok(Self { columns, kept })
    }

    /// Makes a mask of a tensor `[B, T]`, whose values other than 0 count. Error messages call the tensor `what`.
    pub fn from_tensor(what: &str, tensor: &Tensor) -> Result<Self> {
        let grid = Grid::from_tensor(what, tensor)?;
        Ok(Self { columns: grid.columns, kept: grid.values.iter().map(|v| *v != 0.0).collect() })
    }

    /// The mask of predictions that belongs to this mask of tokens: without the first column, because the first token
    /// is not predicted.
    pub fn of_predictions(&self) -> Result<Self> {
        let kept = self.kept.chunks(self.columns).flat_map(|row| row[1..].iter().copied()).collect();
        Self::new(self.columns - 1, kept)
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.kept.len() / self.columns
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// All flags, row-major.
    pub fn kept(&self) -> &[bool] {
        &self.kept
    }

    /// One row.
    pub fn row(&self, b: usize) -> &[bool] {
        &self.kept[b * self.columns..(b + 1) * self.columns]
    }

    /// Columns of row `b` that count.
    pub fn columns_of(&self, b: usize) -> impl Iterator<Item = usize> + '_ {
        self.row(b).iter().enumerate().filter_map(|(t, kept)| kept.then_some(t))
    }

    /// Number of tokens that count.
    pub fn count(&self) -> usize {
        self.kept.iter().filter(|k| **k).count()
    }

    /// Number of rows with at least one token that counts.
    pub fn rows_with_any(&self) -> usize {
        self.kept.chunks(self.columns).filter(|row| row.iter().any(|k| *k)).count()
    }

    /// Number of tokens that count, by row.
    pub fn row_counts(&self) -> Vec<usize> {
        self.kept.chunks(self.columns).map(|row| row.iter().filter(|k| **k).count()).collect()
    }

    /// The tokens of this mask whose values in `grid` meet `condition`.
    pub fn and(&self, grid: &Grid, condition: impl Fn(f64) -> bool) -> Self {
        let kept = self.kept.iter().zip(&grid.values).map(|(kept, v)| *kept && condition(*v)).collect();
        Self { columns: self.columns, kept }
    }

    /// The tokens of this mask in the rows that `keep` accepts.
    pub fn rows_where(&self, keep: impl Fn(usize) -> bool) -> Self {
        let kept = self.kept.iter().enumerate().map(|(i, kept)| *kept && keep(i / self.columns)).collect();
        Self { columns: self.columns, kept }
    }

    /// The runs of tokens that count in row `b`, as ranges of columns: the agent's turns.
    pub fn segments(&self, b: usize) -> Vec<std::ops::Range<usize>> {
        let row = self.row(b);
        let mut segments = Vec::new();
        let mut start = None;
        for (t, kept) in row.iter().enumerate() {
            match (kept, start) {
                (true, None) => start = Some(t),
                (false, Some(s)) => {
                    segments.push(s..t);
                    start = None;
                }
                _ => {}
            }
        }
        segments.extend(start.map(|s| s..row.len()));
        segments
    }

    /// A grid of 1 for tokens that count, and 0 elsewhere.
    pub fn to_grid(&self) -> Grid {
        Grid { columns: self.columns, values: self.kept.iter().map(|k| f64::from(u8::from(*k))).collect() }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn segments_are_the_runs_of_a_row() {
        let bits = |text: &str| text.bytes().map(|b| b == b'1').collect::<Vec<_>>();
        let mask = Mask::new(6, bits("011011000000111111")).unwrap();
        assert_eq!(mask.segments(0), [1..3, 4..6]);
        assert!(mask.segments(1).is_empty());
        assert!(matches!(mask.segments(2)[..], [std::ops::Range { start: 0, end: 6 }]));
        assert_eq!((mask.count(), mask.rows_with_any()), (10, 2));
    }

    #[test]
    fn masking_removes_what_is_not_finite() {
        let grid = Grid::new(2, vec![f64::NAN, 2.0]).unwrap();
        let mask = Mask::new(2, vec![false, true]).unwrap();
        assert_eq!(grid.masked(&mask).values(), [0.0, 2.0]);
    }

    #[test]
    fn a_ragged_grid_is_an_error() {
        assert!(Grid::new(3, vec![0.0; 7]).is_err());
        assert!(Mask::new(0, vec![]).is_err());
    }
}
