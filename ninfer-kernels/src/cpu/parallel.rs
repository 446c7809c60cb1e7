//! Splitting work over the threads of the pool.

use std::ops::Range;

/// Multiply-adds below which a loop is not worth handing to another thread.
const SERIAL_WORK: usize = 48 * 1024;

/// Runs `f` over `0..count` in contiguous ranges; `work` is the number of multiply-adds of the whole loop.
///
/// Ranges start at multiples of `grain`. How the range is cut never changes a result: every item is computed by itself.
pub(super) fn split(count: usize, grain: usize, work: usize, f: &(dyn Fn(Range<usize>) + Sync)) {
    let threads = rayon::current_num_threads();
    if threads == 1 || work < SERIAL_WORK {
        f(0..count);
        return;
    }
    // A few pieces a thread even out other load on the machine.
    let pieces = (work / SERIAL_WORK).clamp(2, 4 * threads);
    let size = count.div_ceil(pieces).next_multiple_of(grain.max(1));
    halve(0..count, size, f);
}

fn halve(range: Range<usize>, size: usize, f: &(dyn Fn(Range<usize>) + Sync)) {
    if range.len() <= size {
        if !range.is_empty() {
            f(range);
        }
        return;
    }
    let middle = range.start + range.len().div_ceil(2).next_multiple_of(size).min(range.len());
    rayon::join(|| halve(range.start..middle, size, f), || halve(middle..range.end, size, f));
}

/// A matrix whose elements are written by several threads, each its own ones.
#[derive(Clone, Copy)]
pub(super) struct Shared<T> {
    pointer: *mut T,
    len: usize,
}

// SAFETY: `Shared` is only a pointer; each use promises in `range` that no element is reached in two ways at a time.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub(super) fn new(slice: &mut [T]) -> Self {
        Self { pointer: slice.as_mut_ptr(), len: slice.len() }
    }

    /// The elements of a range, for writing.
    ///
    /// # Safety
    /// While the returned slice lives, nothing else may reach any of its elements: no other slice of this or another
    /// thread. The slice given to [`Shared::new`] must still be borrowed.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn range(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the slice by the assertion; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests;
