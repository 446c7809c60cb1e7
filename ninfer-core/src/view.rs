//! Typed rectangular views of device buffers.

use std::fmt;
use std::ops::Range;

use crate::backend::{Backend, DeviceBuffer};
use crate::{DType, Error, Result};

/// A `[rows, cols]` matrix of one element type inside a device buffer.
///
/// Rows are `stride` elements apart and columns are adjacent. A view owns a handle to its buffer, so whatever holds the
/// view (an operation, a recorded step) keeps the memory alive.
pub struct View<B: Backend> {
    buffer: B::Buffer,
    dtype: DType,
    offset: usize,
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<B: Backend> Clone for View<B> {
    fn clone(&self) -> Self {
        Self { buffer: self.buffer.clone(), ..*self }
    }
}

impl<B: Backend> fmt::Debug for View<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "View({} [{}, {}]/{} at {})", self.dtype, self.rows, self.cols, self.stride, self.offset)
    }
}

impl<B: Backend> View<B> {
    /// A contiguous view at a byte offset of a buffer.
    ///
    /// # Errors
    /// [`Error::Shape`] if it does not fit into the buffer or the offset is not a multiple of the element size.
    pub fn new(buffer: B::Buffer, dtype: DType, offset: usize, rows: usize, cols: usize) -> Result<Self> {
        let fits = rows
            .checked_mul(cols)
            .and_then(|n| n.checked_mul(dtype.size()))
            .and_then(|n| n.checked_add(offset))
            .is_some_and(|end| end <= buffer.len());
        if !fits {
            return Err(Error::Shape {
                op: "View::new",
                what: "end of the view",
                expected: format!("at most {} bytes", buffer.len()),
                got: format!("{dtype} [{rows}, {cols}] at byte {offset}"),
            });
        }
        if !offset.is_multiple_of(dtype.size()) {
            return Err(Error::Shape {
                op: "View::new",
                what: "byte offset",
                expected: format!("a multiple of {}", dtype.size()),
                got: offset.to_string(),
            });
        }
        Ok(Self { buffer, dtype, offset, rows, cols, stride: cols })
    }

    /// The buffer.
    #[must_use]
    pub fn buffer(&self) -> &B::Buffer {
        &self.buffer
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Byte offset of the first element.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements between the starts of neighbouring rows.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Whether the rows follow each other without a gap.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        self.stride == self.cols || self.rows <= 1
    }

    /// Bytes from the first to behind the last element.
    #[must_use]
    pub fn span_bytes(&self) -> usize {
        if self.rows == 0 || self.cols == 0 {
            return 0;
        }
        ((self.rows - 1) * self.stride + self.cols) * self.dtype.size()
    }

    /// Checks that host bytes are as many as the view's, which must be contiguous: for uploads and downloads.
    ///
    /// # Errors
    /// [`Error::Shape`] naming `op`.
    pub fn check_bytes(&self, op: &'static str, bytes: usize) -> Result<()> {
        if self.is_contiguous() && self.span_bytes() == bytes {
            return Ok(());
        }
        Err(Error::Shape {
            op,
            what: "host bytes",
            expected: format!("{} for a contiguous view", self.span_bytes()),
            got: format!("{bytes} for {self:?}"),
        })
    }

    /// The rows of a range.
    ///
    /// # Errors
    /// [`Error::Shape`] if the range ends behind the last row.
    pub fn row_range(&self, range: Range<usize>) -> Result<Self> {
        inside("rows", &range, self.rows)?;
        Ok(Self {
            buffer: self.buffer.clone(),
            offset: self.offset + range.start * self.stride * self.dtype.size(),
            rows: range.len(),
            ..*self
        })
    }

    /// The columns of a range.
    ///
    /// # Errors
    /// [`Error::Shape`] if the range ends behind the last column.
    pub fn col_range(&self, range: Range<usize>) -> Result<Self> {
        inside("columns", &range, self.cols)?;
        Ok(Self {
            buffer: self.buffer.clone(),
            offset: self.offset + range.start * self.dtype.size(),
            cols: range.len(),
            ..*self
        })
    }

    /// The same elements in another shape.
    ///
    /// # Errors
    /// [`Error::Shape`] if the view is not contiguous or the number of elements differs.
    pub fn reshape(&self, rows: usize, cols: usize) -> Result<Self> {
        if !self.is_contiguous() || rows.checked_mul(cols) != Some(self.rows * self.cols) {
            return Err(Error::Shape {
                op: "View::reshape",
                what: "shape",
                expected: format!("{} contiguous elements", self.rows * self.cols),
                got: format!("[{rows}, {cols}] from {self:?}"),
            });
        }
        Ok(Self { buffer: self.buffer.clone(), rows, cols, stride: cols, ..*self })
    }
}

fn inside(what: &'static str, range: &Range<usize>, limit: usize) -> Result<()> {
    if range.start <= range.end && range.end <= limit {
        return Ok(());
    }
    Err(Error::Shape { op: "View", what, expected: format!("a range inside 0..{limit}"), got: format!("{range:?}") })
}
