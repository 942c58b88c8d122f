//! Parallel loops over the rows of a matrix, and operands with a single row or one row per row of the matrix.

use rayon::prelude::*;

use super::parallel::{ELEMENT_COST, min_items_per_task};

/// Approximate number of elements per task.
const ELEMENTS_PER_TASK: usize = 1 << 14;
/// Maximal number of partial sums of [`sum_rows`].
const MAX_PARTS: usize = 64;

/// Rows per task.
pub fn rows_per_task(width: usize) -> usize {
    (ELEMENTS_PER_TASK / width.max(1)).max(1)
}

/// A row operand: `[1, D]`, shared by all rows, or `[L, D]`.
#[derive(Clone, Copy, Debug)]
pub struct RowOperand<'a> {
    data: &'a [f32],
    width: usize,
}

impl<'a> RowOperand<'a> {
    /// Wraps `data`, `[1, width]` or `[rows, width]`. Panics on another size.
    pub fn new(data: &'a [f32], rows: usize, width: usize) -> Self {
        assert!(data.len() == width || data.len() == rows * width, "a row of {width} or one for each of {rows} rows");
        Self { data, width }
    }

    pub fn is_shared(&self) -> bool {
        self.data.len() == self.width
    }

    pub fn row(&self, i: usize) -> &'a [f32] {
        if self.is_shared() { self.data } else { &self.data[i * self.width..][..self.width] }
    }
}

/// Calls `run(i, row)` for each of the `rows` rows of `data`, in parallel.
pub fn for_rows(data: &mut [f32], rows: usize, run: impl Fn(usize, &mut [f32]) + Sync) {
    let width = data.len() / rows.max(1);
    if width == 0 {
        return;
    }
    let step = rows_per_task(width);
    let tasks = data.par_chunks_mut(step * width).enumerate();
    tasks.with_min_len(min_items_per_task(step * width * ELEMENT_COST)).for_each(|(task, data)| {
        data.chunks_exact_mut(width).enumerate().for_each(|(i, row)| run(task * step + i, row));
    });
}

/// Returns the sum over all rows, where `add(i, sum)` adds row `i` to `sum`. Tasks have a fixed number of rows and a
/// partial sum each: the result does not depend on the number of threads.
pub fn sum_rows(rows: usize, width: usize, add: impl Fn(usize, &mut [f32]) + Sync) -> Vec<f32> {
    let step = rows.div_ceil(MAX_PARTS).max(rows_per_task(width));
    let parts: Vec<Vec<f32>> = (0..rows)
        .into_par_iter()
        .step_by(step)
        .with_min_len(min_items_per_task(step * width * ELEMENT_COST))
        .map(|first| {
            let mut sum = vec![0.0; width];
            (first..(first + step).min(rows)).for_each(|i| add(i, &mut sum));
            sum
        })
        .collect();
    let mut total = vec![0.0; width];
    for part in &parts {
        total.iter_mut().zip(part).for_each(|(t, p)| *t += p);
    }
    total
}
