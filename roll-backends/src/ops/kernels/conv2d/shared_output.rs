//! An uninitialised tensor that several threads fill, each its own part.

use std::marker::PhantomData;

/// Numbers per copy of a fixed size.
const SHORT: usize = 8;
/// Greatest number of values that are copied in such parts.
const MAX_SHORT_COPY: usize = 16 * SHORT;

/// The elements of a new tensor, each written once and never read before.
pub struct SharedOutput<'a> {
    start: *mut f32,
    length: usize,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: elements are only written, by the functions below, whose callers ensure that threads write disjoint parts.
unsafe impl Sync for SharedOutput<'_> {}

impl SharedOutput<'_> {
    /// Writes `values` from element `at` on.
    ///
    /// # Safety
    ///
    /// No other thread may write these elements at the same time.
    #[inline(always)]
    pub unsafe fn write(&self, at: usize, values: &[f32]) {
        assert!(at <= self.length && values.len() <= self.length - at, "a part outside of its tensor");
        // SAFETY: in bounds of the allocation (asserted), and no other thread writes these elements (the caller's
        // promise).
        unsafe {
            let to = self.start.add(at);
            if !(SHORT..=MAX_SHORT_COPY).contains(&values.len()) {
                std::ptr::copy_nonoverlapping(values.as_ptr(), to, values.len());
                return;
            }
            // Rows are often short, and a call of `memcpy` would cost more than copies of `SHORT` numbers each. The
            // last one may overlap the one before it.
            let last = values.len() - SHORT;
            let mut i = 0;
            while i < last {
                std::ptr::copy_nonoverlapping(values.as_ptr().add(i), to.add(i), SHORT);
                i += SHORT;
            }
            std::ptr::copy_nonoverlapping(values.as_ptr().add(last), to.add(last), SHORT);
        }
    }

    /// Writes `values` to every `step`-th element from `at` on.
    ///
    /// # Safety
    ///
    /// No other thread may write these elements at the same time.
    #[inline(always)]
    pub unsafe fn write_every(&self, at: usize, step: usize, values: &[f32]) {
        let reach = values.len().saturating_sub(1).checked_mul(step);
        assert!(
            reach.is_some_and(|reach| at < self.length && reach < self.length - at),
            "a part outside of its tensor"
        );
        for (i, value) in values.iter().enumerate() {
            // SAFETY: as above.
            unsafe { self.start.add(at + i * step).write(*value) }
        }
    }
}

/// Allocates a tensor of `count` elements and fills it by `write`, without a pass that writes zeros first.
///
/// # Safety
///
/// `write` must write every element.
pub unsafe fn filled(count: usize, write: impl FnOnce(&SharedOutput)) -> Vec<f32> {
    let mut values: Vec<f32> = Vec::with_capacity(count);
    write(&SharedOutput { start: values.as_mut_ptr(), length: count, owner: PhantomData });
    // SAFETY: `count` elements were allocated, and `write` wrote them (the caller's promise).
    unsafe { values.set_len(count) };
    values
}
