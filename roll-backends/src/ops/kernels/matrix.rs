//! Strided views of matrices inside slices, and their product.

use std::marker::PhantomData;
use std::ops::Range;

/// A read-only matrix with arbitrary row and column strides, so that heads, transposes and blocks are views.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> View<'a> {
    /// Views all of `data` as `[rows, columns]`, row-major.
    pub fn new(data: &'a [f32], rows: usize, columns: usize) -> Self {
        assert_eq!(data.len(), rows * columns, "a matrix of {rows} x {columns}");
        Self { data, rows, columns, row_stride: columns, column_stride: 1 }
    }

    pub fn columns(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.columns, "columns {range:?} of {}", self.columns);
        Self { data: self.tail(range.start * self.column_stride), columns: range.len(), ..self }
    }

    pub fn rows(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.rows, "rows {range:?} of {}", self.rows);
        Self { data: self.tail(range.start * self.row_stride), rows: range.len(), ..self }
    }

    /// Returns the transpose.
    pub fn t(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// Returns a row. Panics unless the elements of a row are contiguous.
    pub fn row(&self, i: usize) -> &'a [f32] {
        assert!(self.column_stride == 1 && i < self.rows);
        &self.data[i * self.row_stride..][..self.columns]
    }

    /// The data from element `start` on; empty beyond the end, where an empty view may begin.
    fn tail(&self, start: usize) -> &'a [f32] {
        &self.data[start.min(self.data.len())..]
    }

    /// Whether the last element lies inside the data.
    fn is_inside(&self) -> bool {
        self.rows == 0
            || self.columns == 0
            || (self.rows - 1) * self.row_stride + (self.columns - 1) * self.column_stride < self.data.len()
    }
}

/// A row-major matrix to write: exclusive access to `columns` contiguous elements in each of `rows` rows. It can be
/// split by rows and columns into parts for different threads.
#[derive(Debug)]
pub struct ViewMut<'a> {
    start: *mut f32,
    rows: usize,
    columns: usize,
    row_stride: usize,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: a `ViewMut` is an exclusive borrow of the elements it covers, like a `&mut [f32]`.
unsafe impl Send for ViewMut<'_> {}

impl<'a> ViewMut<'a> {
    /// Views all of `data` as `[rows, columns]`, row-major.
    pub fn new(data: &'a mut [f32], rows: usize, columns: usize) -> Self {
        assert_eq!(data.len(), rows * columns, "a matrix of {rows} x {columns}");
        Self { start: data.as_mut_ptr(), rows, columns, row_stride: columns, owner: PhantomData }
    }

    /// Splits into parts of `height` rows; the last may have fewer.
    pub fn split_rows(self, height: usize) -> Vec<ViewMut<'a>> {
        (0..self.rows)
            .step_by(height)
            .map(|first| ViewMut {
                start: self.start.wrapping_add(first * self.row_stride),
                rows: height.min(self.rows - first),
                ..self
            })
            .collect()
    }

    /// Splits into parts of `width` columns; the last may have fewer.
    pub fn split_columns(self, width: usize) -> Vec<ViewMut<'a>> {
        (0..self.columns)
            .step_by(width)
            .map(|first| ViewMut {
                start: self.start.wrapping_add(first),
                columns: width.min(self.columns - first),
                ..self
            })
            .collect()
    }

    pub fn columns_mut(&mut self, columns: Range<usize>) -> ViewMut<'_> {
        assert!(columns.start <= columns.end && columns.end <= self.columns, "columns {columns:?} of {}", self.columns);
        let start = self.start.wrapping_add(columns.start);
        ViewMut { start, columns: columns.len(), owner: PhantomData, ..*self }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn row(&mut self, i: usize) -> &mut [f32] {
        assert!(i < self.rows);
        // SAFETY: row `i` is inside the borrowed slice (`new` checks its size, splits stay inside it), and the borrow
        // of `self` excludes other access.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(i * self.row_stride), self.columns) }
    }

    pub fn rows_mut(&mut self, rows: Range<usize>) -> ViewMut<'_> {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let start = self.start.wrapping_add(rows.start * self.row_stride);
        ViewMut { start, rows: rows.len(), owner: PhantomData, ..*self }
    }

    /// Computes `factor * a b`, and writes or adds it to this matrix.
    pub fn product(&mut self, a: View, b: View, factor: f32, update: Update, threads: Threads) {
        /// The number with which gemm uses all of rayon's threads.
        const ALL_THREADS: usize = 0;
        /// Column stride of this matrix.
        const CONTIGUOUS: isize = 1;
        assert!(
            a.columns == b.rows && a.rows == self.rows && b.columns == self.columns,
            "product of {}x{} and {}x{} into {}x{}",
            a.rows,
            a.columns,
            b.rows,
            b.columns,
            self.rows,
            self.columns
        );
        assert!(a.is_inside() && b.is_inside(), "an operand beyond its data");
        if self.rows == 0 || self.columns == 0 {
            return;
        }
        let parallelism = match threads {
            Threads::One => gemm::Parallelism::None,
            Threads::All => gemm::Parallelism::Rayon(ALL_THREADS),
        };
        let (reads_destination, destination_factor) = (update == Update::Add, 1.0);
        let is_conjugated = false;
        // SAFETY: the sizes match and both operands are inside their slices (asserted above), `self` exclusively covers
        // the result, and nothing uninitialised is read.
        unsafe {
            gemm::gemm(
                self.rows,
                self.columns,
                a.columns,
                self.start,
                CONTIGUOUS,
                self.row_stride as isize,
                reads_destination,
                a.data.as_ptr(),
                a.column_stride as isize,
                a.row_stride as isize,
                b.data.as_ptr(),
                b.column_stride as isize,
                b.row_stride as isize,
                destination_factor,
                factor,
                is_conjugated,
                is_conjugated,
                is_conjugated,
                parallelism,
            );
        }
    }
}

/// The factor of a product that is not scaled.
pub const UNSCALED: f32 = 1.0;

/// What a product does with the old values of its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// Replaces them.
    Overwrite,
    /// Adds to them.
    Add,
}

/// The threads that run a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// The calling thread only: for products inside parallel loops.
    One,
    /// The rayon pool.
    All,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_transposed_blocks_match_loops() {
        let a: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let b: Vec<f32> = (0..20).map(|i| 1.0 - i as f32).collect();
        let mut c = vec![1.0; 3 * 8];
        let view_a = View::new(&a, 4, 3).t(); // 3 x 4
        let view_b = View::new(&b, 4, 5).columns(1..5); // 4 x 4
        let mut parts = ViewMut::new(&mut c, 3, 8).split_columns(4);
        parts[1].product(view_a, view_b, 2.0, Update::Add, Threads::One);
        for i in 0..3 {
            for j in 0..4 {
                let sum: f32 = (0..4).map(|k| a[k * 3 + i] * b[k * 5 + 1 + j]).sum();
                assert_eq!(c[i * 8 + 4 + j], 1.0 + 2.0 * sum);
                assert_eq!(c[i * 8 + j], 1.0);
            }
        }
    }
}
