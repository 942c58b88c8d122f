//! Memory whose pages are populated by several threads, before it is page-locked.
//!
//! `cudaHostAlloc` requests and zeroes every page in a single thread of the driver. Here several threads do that
//! first, with huge pages if available, and the driver locks existing pages.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

/// Size of a huge page.
const HUGE_PAGE: usize = 1 << 21;
/// Size of the smallest page.
const PAGE: usize = 1 << 12;
/// Threads that populate pages: enough to saturate memory bandwidth.
const THREADS: usize = 8;
/// `MADV_HUGEPAGE` of `sys/mman.h` on Linux.
const MADV_HUGEPAGE: c_int = 14;

unsafe extern "C" {
    fn madvise(at: *mut c_void, bytes: usize, advice: c_int) -> c_int;
}

/// Owned memory, rounded up to huge pages.
pub(super) struct Pages {
    at: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the type owns the memory and exposes only its address.
unsafe impl Send for Pages {}

impl Pages {
    /// Allocates and populates memory; `None` if the allocation fails.
    pub(super) fn new(bytes: usize) -> Option<Self> {
        let layout = Layout::from_size_align(bytes.max(1).checked_next_multiple_of(HUGE_PAGE)?, HUGE_PAGE).ok()?;
        // SAFETY: the size is not 0.
        let pages = Self { at: NonNull::new(unsafe { alloc(layout) })?, layout };
        // SAFETY: the memory is owned. A failure to get huge pages does not matter.
        unsafe { madvise(pages.at.as_ptr().cast(), layout.size(), MADV_HUGEPAGE) };
        pages.populate();
        Some(pages)
    }

    fn populate(&self) {
        let part = self.layout.size().div_ceil(THREADS).next_multiple_of(HUGE_PAGE);
        let start = self.address();
        std::thread::scope(|scope| {
            for from in (0..self.layout.size()).step_by(part) {
                let to = (from + part).min(self.layout.size());
                let populate = move || {
                    for at in (from..to).step_by(PAGE) {
                        // SAFETY: in bounds, and each page is written by one thread.
                        unsafe { std::ptr::with_exposed_provenance_mut::<u8>(start + at).write_volatile(0) };
                    }
                };
                // A page that is not populated here is populated when it is locked.
                let _ = std::thread::Builder::new().name("roll-pages".into()).spawn_scoped(scope, populate);
            }
        });
    }

    /// The start address.
    pub(super) fn address(&self) -> usize {
        self.at.as_ptr().expose_provenance()
    }

    /// The size in bytes.
    pub(super) fn size(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.at.as_ptr(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_have_the_requested_size_and_are_writable() {
        for bytes in [0, 1, HUGE_PAGE, 5 * HUGE_PAGE + 1, 40 * HUGE_PAGE] {
            let pages = Pages::new(bytes).unwrap();
            assert!(pages.size() >= bytes && pages.size() < bytes + HUGE_PAGE + 1);
            assert_eq!(pages.address() % HUGE_PAGE, 0);
            let last = std::ptr::with_exposed_provenance_mut::<u8>(pages.address() + pages.size() - 1);
            // SAFETY: the last byte.
            unsafe { last.write(7) };
        }
        assert!(Pages::new(usize::MAX).is_none());
    }
}
