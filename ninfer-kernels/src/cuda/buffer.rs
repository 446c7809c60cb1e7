//! Device buffers and the addresses of their views.

use std::sync::Arc;

use ninfer_core::backend::DeviceBuffer;
use ninfer_core::view::View;

use super::Cuda;
use super::driver::Memory;

/// A handle to device memory; clones share it.
#[derive(Clone, Debug)]
pub struct CudaBuffer(pub(super) Arc<Memory>);

impl DeviceBuffer for CudaBuffer {
    fn len(&self) -> usize {
        self.0.bytes
    }

    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// A matrix as kernels see it: `Matrix` of `common/matrix.cuh`. Strides count elements.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    address: u64,
    stride: i64,
}

impl Matrix {
    /// No matrix.
    pub(super) const NONE: Self = Self { address: 0, stride: 0 };

    /// A matrix at an address of the workspace.
    pub(super) fn at(address: u64, stride: usize) -> Self {
        Self { address, stride: stride as i64 }
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn stride(&self) -> usize {
        self.stride as usize
    }
}

impl From<&View<Cuda>> for Matrix {
    fn from(view: &View<Cuda>) -> Self {
        Self { address: view.buffer().0.address + view.offset() as u64, stride: view.stride() as i64 }
    }
}
