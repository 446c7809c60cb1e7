//! The segment table as kernels see it.

use ninfer_core::segment::{Batch, Profile};

use super::Cuda;
use super::buffer::Matrix;

/// `Batch` of `common/batch.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchArg {
    table: Matrix,
    segments: i32,
    rows: i32,
    step: i32,
    unused: i32,
}

impl From<&Batch<Cuda>> for BatchArg {
    fn from(batch: &Batch<Cuda>) -> Self {
        Self {
            table: Matrix::from(&batch.table),
            segments: batch.segments as i32,
            rows: batch.rows as i32,
            step: i32::from(batch.profile == Profile::Step),
            unused: 0,
        }
    }
}
