//! Checks of one operation, the same for all backends: shapes, element types, and that nothing written overlaps.

use crate::backend::{Backend, DeviceBuffer, DeviceWeight};
use crate::segment::Batch;
use crate::{DType, Error, Result, View};

/// Most views of one operation.
const MAX_VIEWS: usize = 32;

/// Collects the views of an operation while it checks them.
///
/// A written view may not overlap any other view of the operation. The range of a view goes from its first to its last
/// element, gaps between rows included, so two views that interleave in one buffer count as overlapping. Views without
/// elements take no part in this. The list is kept inline, since a step allocates nothing.
pub(crate) struct Check<'a, B: Backend> {
    op: &'static str,
    views: [Option<(&'a View<B>, bool)>; MAX_VIEWS],
    len: usize,
}

impl<'a, B: Backend> Check<'a, B> {
    pub(crate) fn new(op: &'static str) -> Self {
        Self { op, views: [None; MAX_VIEWS], len: 0 }
    }

    /// An operation on the rows of a batch, whose segment table it reads.
    pub(crate) fn batch(op: &'static str, batch: &'a Batch<B>) -> Result<Self> {
        let mut check = Self::new(op);
        check.apart("segment table", &batch.table, false)?;
        Ok(check)
    }

    /// A view that is read only.
    pub(crate) fn read(
        &mut self,
        what: &'static str,
        view: &'a View<B>,
        dtype: DType,
        rows: usize,
        cols: usize,
    ) -> Result<()> {
        self.fits(what, view, dtype, rows, cols)?;
        self.apart(what, view, false)
    }

    /// A view that is written, and perhaps read.
    pub(crate) fn write(
        &mut self,
        what: &'static str,
        view: &'a View<B>,
        dtype: DType,
        rows: usize,
        cols: usize,
    ) -> Result<()> {
        self.fits(what, view, dtype, rows, cols)?;
        self.apart(what, view, true)
    }

    fn fits(&self, what: &'static str, view: &View<B>, dtype: DType, rows: usize, cols: usize) -> Result<()> {
        if view.dtype() != dtype {
            return Err(Error::WrongDType { op: self.op, what, expected: dtype, got: view.dtype() });
        }
        if (view.rows(), view.cols()) != (rows, cols) {
            return self.shape(what, format!("[{rows}, {cols}]"), format!("[{}, {}]", view.rows(), view.cols()));
        }
        Ok(())
    }

    fn apart(&mut self, what: &'static str, view: &'a View<B>, write: bool) -> Result<()> {
        if view.span_bytes() == 0 {
            return Ok(());
        }
        let end = |v: &View<B>| v.offset().saturating_add(v.span_bytes());
        let clash = |&(other, written): &(&View<B>, bool)| {
            (write || written)
                && view.offset() < end(other)
                && other.offset() < end(view)
                && view.buffer().is_same(other.buffer())
        };
        if self.views[..self.len].iter().flatten().any(clash) {
            return Err(Error::Aliased { op: self.op, what });
        }
        let Some(place) = self.views.get_mut(self.len) else {
            return self.shape("number of views", format!("at most {MAX_VIEWS}"), "more".to_owned());
        };
        *place = Some((view, write));
        self.len += 1;
        Ok(())
    }

    pub(crate) fn weight(&self, what: &'static str, w: &B::Weight, rows: usize, cols: usize) -> Result<()> {
        if (w.rows(), w.cols()) != (rows, cols) {
            return self.shape(what, format!("[{rows}, {cols}]"), format!("[{}, {}]", w.rows(), w.cols()));
        }
        Ok(())
    }

    pub(crate) fn at_least(&self, what: &'static str, least: usize, got: usize) -> Result<()> {
        if got >= least {
            return Ok(());
        }
        self.shape(what, format!("at least {least}"), got.to_string())
    }

    pub(crate) fn divides(&self, what: &'static str, divisor: usize, value: usize) -> Result<()> {
        if divisor != 0 && value.is_multiple_of(divisor) {
            return Ok(());
        }
        self.shape(what, format!("a multiple of {divisor}"), value.to_string())
    }

    /// The error of an argument with another shape than expected.
    pub(crate) fn shape(&self, what: &'static str, expected: String, got: String) -> Result<()> {
        Err(Error::Shape { op: self.op, what, expected, got })
    }
}
