//! Strided views of matrices inside slices, and their product.

use std::marker::PhantomData;
use std::ops::Range;

/// A matrix that is read. Rows and columns may lie at any stride, so that heads, transposes and blocks are views.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> View<'a> {
    /// The whole of `data` as `[rows, columns]`, row-major.
    pub fn new(data: &'a [f32], rows: usize, columns: usize) -> Self {
        assert_eq!(data.len(), rows * columns, "a matrix of {rows} x {columns}");
        Self { data, rows, columns, row_stride: columns, column_stride: 1 }
    }

    /// Some of its columns.
    pub fn columns(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.columns);
        Self { data: self.tail(range.start * self.column_stride), columns: range.len(), ..self }
    }

    /// Some of its rows.
    pub fn rows(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.rows);
        Self { data: self.tail(range.start * self.row_stride), rows: range.len(), ..self }
    }

    /// Its transpose.
    pub fn t(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// A row, of a matrix whose columns are neighbours.
    pub fn row(&self, i: usize) -> &'a [f32] {
        assert!(self.column_stride == 1 && i < self.rows);
        &self.data[i * self.row_stride..][..self.columns]
    }

    fn tail(&self, start: usize) -> &'a [f32] {
        &self.data[start.min(self.data.len())..]
    }

    fn is_inside(&self) -> bool {
        self.rows == 0
            || self.columns == 0
            || (self.rows - 1) * self.row_stride + (self.columns - 1) * self.column_stride < self.data.len()
    }
}

/// A row-major matrix that is written: exclusive access to `columns` neighbours in each of `rows` rows. It can be
/// split by rows and by columns into parts that different threads write.
#[derive(Debug)]
pub struct ViewMut<'a> {
    start: *mut f32,
    rows: usize,
    columns: usize,
    row_stride: usize,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: a `ViewMut` is an exclusive borrow of the elements it covers, as `&mut [f32]` is of its own.
unsafe impl Send for ViewMut<'_> {}

impl<'a> ViewMut<'a> {
    /// The whole of `data` as `[rows, columns]`.
    pub fn new(data: &'a mut [f32], rows: usize, columns: usize) -> Self {
        assert_eq!(data.len(), rows * columns, "a matrix of {rows} x {columns}");
        Self { start: data.as_mut_ptr(), rows, columns, row_stride: columns, owner: PhantomData }
    }

    /// Parts of `width` columns each, of which there must be a whole number.
    pub fn split_columns(self, width: usize) -> Vec<ViewMut<'a>> {
        assert!(width > 0 && self.columns.is_multiple_of(width));
        self.stretches(width)
    }

    /// Parts of `height` rows each; the last may have fewer.
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

    /// Parts of `width` columns each; the last may have fewer.
    pub fn stretches(self, width: usize) -> Vec<ViewMut<'a>> {
        (0..self.columns)
            .step_by(width)
            .map(|first| ViewMut {
                start: self.start.wrapping_add(first),
                columns: width.min(self.columns - first),
                ..self
            })
            .collect()
    }

    /// Some of its columns, for as long as the borrow lives.
    pub fn part_of_columns(&mut self, columns: Range<usize>) -> ViewMut<'_> {
        assert!(columns.start <= columns.end && columns.end <= self.columns);
        let start = self.start.wrapping_add(columns.start);
        ViewMut { start, columns: columns.len(), owner: PhantomData, ..*self }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// One row.
    pub fn row(&mut self, i: usize) -> &mut [f32] {
        assert!(i < self.rows);
        // SAFETY: row `i` lies in the borrowed slice (`new` checked its size, the splits stay inside), nothing else
        // has access to these elements, and the borrow of `self` keeps it so.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(i * self.row_stride), self.columns) }
    }

    /// Some of its rows, for as long as the borrow lives.
    pub fn part(&mut self, rows: Range<usize>) -> ViewMut<'_> {
        assert!(rows.start <= rows.end && rows.end <= self.rows);
        let start = self.start.wrapping_add(rows.start * self.row_stride);
        ViewMut { start, rows: rows.len(), owner: PhantomData, ..*self }
    }

    /// `factor * a b`, added to the old values if `accumulate`. `threads` says whether the product itself may run on
    /// several threads.
    pub fn product(&mut self, a: View, b: View, factor: f32, accumulate: bool, threads: Threads) {
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
        assert!(a.is_inside() && b.is_inside());
        if self.rows == 0 || self.columns == 0 {
            return;
        }
        let parallelism = match threads {
            Threads::One => gemm::Parallelism::None,
            Threads::All => gemm::Parallelism::Rayon(0),
        };
        // SAFETY: the sizes fit each other and both operands lie in their slices (asserted above), `self` covers
        // exclusively the result, and with `read_dst` off nothing uninitialised is read.
        unsafe {
            gemm::gemm(
                self.rows,
                self.columns,
                a.columns,
                self.start,
                1,
                self.row_stride as isize,
                accumulate,
                a.data.as_ptr(),
                a.column_stride as isize,
                a.row_stride as isize,
                b.data.as_ptr(),
                b.column_stride as isize,
                b.row_stride as isize,
                1.0f32,
                factor,
                false,
                false,
                false,
                parallelism,
            );
        }
    }
}

/// How many threads run a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// The calling thread: for products inside parallel loops.
    One,
    /// The rayon pool.
    All,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_transposed_blocks_equal_loops() {
        let a: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let b: Vec<f32> = (0..20).map(|i| 1.0 - i as f32).collect();
        let mut c = vec![1.0; 3 * 8];
        let view_a = View::new(&a, 4, 3).t(); // 3 x 4
        let view_b = View::new(&b, 4, 5).columns(1..5); // 4 x 4
        let mut parts = ViewMut::new(&mut c, 3, 8).split_columns(4);
        parts[1].product(view_a, view_b, 2.0, true, Threads::One);
        for i in 0..3 {
            for j in 0..4 {
                let sum: f32 = (0..4).map(|k| a[k * 3 + i] * b[k * 5 + 1 + j]).sum();
                assert_eq!(c[i * 8 + 4 + j], 1.0 + 2.0 * sum);
                assert_eq!(c[i * 8 + j], 1.0);
            }
        }
    }
}
