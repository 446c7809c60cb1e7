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

    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl DeviceBuffer for CpuBuffer {
    fn len(&self) -> usize {
        self.0.len
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
/// not overlap any other range.
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
        self.list[..self.len].iter().flatten().filter(move |s| s.buffer.is(buffer))
    }
}

impl Access {
    /// Registers all views of an operation: those read and those written.
    pub(super) fn new(op: &'static str) -> Self {
        Self { op, spans: RefCell::new(Spans { list: [const { None }; MAX_VIEWS], len: 0 }) }
    }

    /// Elements of a view for reading; its rows are `view.stride()` apart.
    pub(super) fn read<'a, T: Element>(&'a self, what: &'static str, view: &View<Cpu>) -> Result<&'a [T]> {
        let count = self.enter::<T>(what, view, false)?;
        // SAFETY: `enter` checked dtype, bounds and alignment, registered as a reader of the buffer, and made sure that no
        // written range of this access overlaps. The buffer lives as long as `self`, which keeps a handle.
        Ok(unsafe { std::slice::from_raw_parts(view.buffer().pointer().add(view.offset()).cast::<T>(), count) })
    }

    /// Elements of a view for reading and writing; its rows are `view.stride()` apart.
    #[allow(clippy::mut_from_ref)]
    pub(super) fn write<'a, T: Element>(&'a self, what: &'static str, view: &View<Cpu>) -> Result<&'a mut [T]> {
        let count = self.enter::<T>(what, view, true)?;
        // SAFETY: as in `read`, and registered as the only user of the buffer besides this access, in which no other range
        // overlaps this one.
        Ok(unsafe { std::slice::from_raw_parts_mut(view.buffer().pointer().add(view.offset()).cast::<T>(), count) })
    }

    /// Raw bytes of a contiguous view for writing, whatever its dtype.
    #[allow(clippy::mut_from_ref)]
    pub(super) fn write_bytes<'a>(&'a self, what: &'static str, view: &View<Cpu>) -> Result<&'a mut [u8]> {
        let count = self.register(what, view, true)?;
        // SAFETY: as in `write`; bytes need no alignment.
        Ok(unsafe { std::slice::from_raw_parts_mut(view.buffer().pointer().add(view.offset()), count) })
    }

    /// Raw bytes of a contiguous view, whatever its dtype.
    pub(super) fn read_bytes<'a>(&'a self, what: &'static str, view: &View<Cpu>) -> Result<&'a [u8]> {
        let count = self.register(what, view, false)?;
        // SAFETY: as in `read`; bytes need no alignment.
        Ok(unsafe { std::slice::from_raw_parts(view.buffer().pointer().add(view.offset()), count) })
    }

    fn enter<T: Element>(&self, what: &'static str, view: &View<Cpu>, write: bool) -> Result<usize> {
        if view.dtype() != T::DTYPE {
            return Err(Error::WrongDType { op: self.op, what, expected: T::DTYPE, got: view.dtype() });
        }
        Ok(self.register(what, view, write)? / size_of::<T>())
    }

    fn register(&self, what: &'static str, view: &View<Cpu>, write: bool) -> Result<usize> {
        let bytes = view.span_bytes();
        let (start, end) = (view.offset(), view.offset() + bytes);
        let buffer = view.buffer();
        debug_assert!(end <= buffer.len());
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
        Ok(bytes)
    }
}

impl Drop for Access {
    fn drop(&mut self) {
        let spans = self.spans.get_mut();
        for i in 0..spans.len {
            let Some(span) = &spans.list[i] else { continue };
            if spans.list[..i].iter().flatten().any(|s| s.buffer.is(&span.buffer)) {
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
