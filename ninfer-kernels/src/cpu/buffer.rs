//! Device memory of the CPU backend and the checked access of operations to it.

use std::cell::{RefCell, UnsafeCell};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};

use ninfer_core::backend::DeviceBuffer;
use ninfer_core::{DType, Error, Result, View};

use super::Cpu;

/// Alignment unit of a buffer.
#[repr(C, align(64))]
struct Line(UnsafeCell<[u8; 64]>);

struct Memory {
    lines: Box<[Line]>,
    len: usize,
    /// Number of readers, or −1 while an operation may write.
    users: AtomicIsize,
}

// SAFETY: the bytes are reached only through `Access`, which registers in `users` as a reader or as the single writer
// before it hands out references, and leaves after the last of them is gone.
unsafe impl Sync for Memory {}

/// Bytes of the CPU backend, aligned to 64; clones share them.
///
/// An operation holds a buffer for reading or for writing while it runs. Two queues that use one buffer at the same time,
/// at least one of them writing, get [`Error::BufferBusy`] instead of a race.
#[derive(Clone)]
pub struct CpuBuffer(Arc<Memory>);

impl CpuBuffer {
    pub(super) fn new(what: &str, len: usize) -> Result<Self> {
        let count = len.div_ceil(64);
        let mut lines = Vec::new();
        lines.try_reserve_exact(count).map_err(|_| Error::OutOfMemory {
            what: what.to_owned(),
            requested: len as u64,
            available: 0,
        })?;
        lines.extend((0..count).map(|_| Line(UnsafeCell::new([0; 64]))));
        Ok(Self(Arc::new(Memory { lines: lines.into_boxed_slice(), len, users: AtomicIsize::new(0) })))
    }

    fn pointer(&self) -> *mut u8 {
        UnsafeCell::raw_get(self.0.lines.as_ptr().cast::<UnsafeCell<u8>>())
    }
}

impl DeviceBuffer for CpuBuffer {
    fn len(&self) -> usize {
        self.0.len
    }

    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for CpuBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuBuffer({} bytes)", self.0.len)
    }
}

/// Element types that may stand in a buffer: any bit pattern is a value.
pub(super) trait Element: bytemuck::Pod {
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for u32 {
    const DTYPE: DType = DType::U32;
}
impl Element for i32 {
    const DTYPE: DType = DType::I32;
}
impl Element for half::bf16 {
    const DTYPE: DType = DType::Bf16;
}

/// Most views of one operation.
const MAX_VIEWS: usize = 32;

struct Span {
    buffer: CpuBuffer,
    start: usize,
    end: usize,
    write: bool,
}

/// The views that one operation works on.
///
/// References live as long as the access. A buffer is held for writing if any of its views is written; a written range may
/// not overlap any other range. The range of a view goes from its first to its last element, gaps between rows included, so
/// two views that interleave in one buffer count as overlapping. Views without elements take no part in this.
pub(super) struct Access {
    op: &'static str,
    spans: RefCell<Spans>,
}

/// A list kept inline, since a decode step allocates nothing.
struct Spans {
    list: [Option<Span>; MAX_VIEWS],
    len: usize,
}

impl Spans {
    fn of<'a>(&'a self, buffer: &'a CpuBuffer) -> impl Iterator<Item = &'a Span> {
        self.list[..self.len].iter().flatten().filter(move |s| s.buffer.is_same(buffer))
    }
}

impl Access {
    /// Registers all views of an operation: those read and those written.
    pub(super) fn new(op: &'static str) -> Self {
        Self { op, spans: RefCell::new(Spans { list: [const { None }; MAX_VIEWS], len: 0 }) }
    }

    /// Elements of a view for reading; its rows are `view.stride()` apart.
    pub(super) fn read<'a, T: Element>(&'a self, what: &'static str, view: &View<Cpu>) -> Result<&'a [T]> {
        let (at, count) = self.enter::<T>(what, view, false)?;
        // SAFETY: `enter` checked dtype, bounds and alignment, registered as a reader of the buffer, and made sure that no
        // written range of this access overlaps. The buffer lives as long as `self`, which keeps a handle.
        Ok(unsafe { std::slice::from_raw_parts(at, count) })
    }

    /// Elements of a view for reading and writing; its rows are `view.stride()` apart.
    #[allow(clippy::mut_from_ref)]
    pub(super) fn write<'a, T: Element>(&'a self, what: &'static str, view: &View<Cpu>) -> Result<&'a mut [T]> {
        let (at, count) = self.enter::<T>(what, view, true)?;
        // SAFETY: as in `read`, and registered as the only user of the buffer besides this access, in which no other range
        // overlaps this one.
        Ok(unsafe { std::slice::from_raw_parts_mut(at, count) })
    }

    /// As [`Access::read`], for a view whose rows follow each other without a gap.
    pub(super) fn read_dense<'a, T: Element>(&'a self, what: &'static str, view: &View<Cpu>) -> Result<&'a [T]> {
        self.dense(what, view)?;
        self.read(what, view)
    }

    /// As [`Access::write`], for a view whose rows follow each other without a gap.
    #[allow(clippy::mut_from_ref)]
    pub(super) fn write_dense<'a, T: Element>(&'a self, what: &'static str, view: &View<Cpu>) -> Result<&'a mut [T]> {
        self.dense(what, view)?;
        self.write(what, view)
    }

    /// As [`Access::write`], for a view of the given shape; so rows never share an element.
    #[allow(clippy::mut_from_ref)]
    pub(super) fn write_matrix<'a, T: Element>(
        &'a self,
        what: &'static str,
        view: &View<Cpu>,
        rows: usize,
        cols: usize,
    ) -> Result<&'a mut [T]> {
        if (view.rows(), view.cols()) != (rows, cols) {
            let got = format!("[{}, {}]", view.rows(), view.cols());
            return Err(Error::Shape { op: self.op, what, expected: format!("[{rows}, {cols}]"), got });
        }
        self.write(what, view)
    }

    /// Raw bytes from the first to the last element of a view, for writing, whatever its dtype.
    #[allow(clippy::mut_from_ref)]
    pub(super) fn write_bytes<'a>(&'a self, what: &'static str, view: &View<Cpu>) -> Result<&'a mut [u8]> {
        let (at, count) = self.register(what, view, true)?;
        // SAFETY: as in `write`; bytes need no alignment.
        Ok(unsafe { std::slice::from_raw_parts_mut(at, count) })
    }

    /// Raw bytes from the first to the last element of a view, whatever its dtype.
    pub(super) fn read_bytes<'a>(&'a self, what: &'static str, view: &View<Cpu>) -> Result<&'a [u8]> {
        let (at, count) = self.register(what, view, false)?;
        // SAFETY: as in `read`; bytes need no alignment.
        Ok(unsafe { std::slice::from_raw_parts(at, count) })
    }

    fn dense(&self, what: &'static str, view: &View<Cpu>) -> Result<()> {
        if view.is_contiguous() {
            return Ok(());
        }
        Err(Error::Shape { op: self.op, what, expected: "rows without gaps".to_owned(), got: format!("{view:?}") })
    }

    /// First element and number of elements; the pointer is aligned and, for more than zero elements, valid for them.
    fn enter<T: Element>(&self, what: &'static str, view: &View<Cpu>, write: bool) -> Result<(*mut T, usize)> {
        if view.dtype() != T::DTYPE {
            return Err(Error::WrongDType { op: self.op, what, expected: T::DTYPE, got: view.dtype() });
        }
        let (at, bytes) = self.register(what, view, write)?;
        if bytes == 0 {
            return Ok((std::ptr::dangling_mut(), 0));
        }
        // A buffer begins at a multiple of 64 and the offset of a view is a multiple of its element size.
        Ok((at.cast(), bytes / size_of::<T>()))
    }

    fn register(&self, what: &'static str, view: &View<Cpu>, write: bool) -> Result<(*mut u8, usize)> {
        let bytes = view.span_bytes();
        if bytes == 0 {
            return Ok((std::ptr::dangling_mut(), 0));
        }
        let buffer = view.buffer();
        let start = view.offset();
        let end = start.saturating_add(bytes);
        if end > buffer.len() {
            return Err(Error::Shape {
                op: self.op,
                what,
                expected: format!("inside a buffer of {} bytes", buffer.len()),
                got: format!("{view:?}"),
            });
        }
        let mut spans = self.spans.borrow_mut();
        if spans.len == MAX_VIEWS {
            return Err(Error::Shape {
                op: self.op,
                what: "number of views",
                expected: format!("at most {MAX_VIEWS}"),
                got: "more".to_owned(),
            });
        }
        let mut held = 0; // 0 not at all, 1 for reading, −1 for writing
        for span in spans.of(buffer) {
            if (write || span.write) && start < span.end && span.start < end {
                return Err(Error::Aliased { op: self.op, what });
            }
            held = if span.write || held == -1 { -1 } else { 1 };
        }
        let users = &buffer.0.users;
        let taken = match (held, write) {
            (-1, _) | (1, false) => true,
            // This access holds one registration however many views it has, so upgrading means 1 → −1.
            (1, true) => users.compare_exchange(1, -1, Ordering::Acquire, Ordering::Relaxed).is_ok(),
            (_, true) => users.compare_exchange(0, -1, Ordering::Acquire, Ordering::Relaxed).is_ok(),
            (_, false) => {
                users.fetch_update(Ordering::Acquire, Ordering::Relaxed, |n| (n >= 0).then_some(n + 1)).is_ok()
            }
        };
        if !taken {
            return Err(Error::BufferBusy);
        }
        let at = spans.len;
        spans.list[at] = Some(Span { buffer: buffer.clone(), start, end, write });
        spans.len += 1;
        // SAFETY: `start` is inside the buffer, since `end` is.
        Ok((unsafe { buffer.pointer().add(start) }, bytes))
    }
}

impl Drop for Access {
    fn drop(&mut self) {
        let spans = self.spans.get_mut();
        for i in 0..spans.len {
            let Some(span) = &spans.list[i] else { continue };
            if spans.list[..i].iter().flatten().any(|s| s.buffer.is_same(&span.buffer)) {
                continue; // released with the first view of this buffer
            }
            let users = &span.buffer.0.users;
            if users.load(Ordering::Relaxed) == -1 {
                users.store(0, Ordering::Release);
            } else {
                users.fetch_sub(1, Ordering::Release);
            }
        }
    }
}

#[cfg(test)]
mod tests;
