//! Prepared weights of the CUDA backend: records in the order in which lanes of a matrix instruction consume them.

use std::fmt;
use std::sync::Arc;

use ninfer_core::backend::DeviceWeight;
use ninfer_core::format::{ActivationPrecision, FP8_BLOCK, GroupFormat};
use ninfer_core::{Error, Result, WeightFormat};

use super::driver::Memory;

/// Rows of a row block.
pub(super) const ROW_BLOCK: usize = 16;
/// Columns of a record.
pub(super) const RECORD_COLUMNS: usize = 64;

/// Record formats, `Format` of `common/weight.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecordFormat {
    Bf16 = 0,
    Fp8 = 1,
    Nvfp4 = 2,
    Q4 = 3,
    Q5 = 4,
    Q6 = 5,
    W8 = 6,
}

impl RecordFormat {
    /// The records that hold a stored format.
    pub(super) fn of(format: WeightFormat) -> Self {
        match format {
            WeightFormat::Fp8Tensor | WeightFormat::Fp8Row | WeightFormat::Fp8Block => Self::Fp8,
            WeightFormat::Nvfp4 => Self::Nvfp4,
            WeightFormat::Group(GroupFormat::Q4) => Self::Q4,
            WeightFormat::Group(GroupFormat::Q5) => Self::Q5,
            WeightFormat::Group(GroupFormat::Q6) => Self::Q6,
            WeightFormat::Group(GroupFormat::W8) => Self::W8,
            _ => Self::Bf16,
        }
    }

    /// Bytes of a record, `record_bytes` of `common/weight.cuh`.
    pub(super) const fn record_bytes(self) -> usize {
        match self {
            Self::Bf16 => 2048,
            Self::Fp8 => 1024,
            Self::Nvfp4 => 576,
            Self::Q4 => 544,
            Self::Q5 => 672,
            Self::Q6 => 800,
            Self::W8 => 1088,
        }
    }
}

/// Where the parts of a weight lie in its memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct WeightLayout {
    pub(super) format: RecordFormat,
    /// Two runs of records: values, then their rounding errors.
    pub(super) double: bool,
    pub(super) row_scales: bool,
    pub(super) block_scales: bool,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl WeightLayout {
    /// Layout of a stack of `rows` rows stored in `format`.
    pub(super) fn new(format: WeightFormat, rows: usize, cols: usize) -> Self {
        let block_scales = format == WeightFormat::Fp8Block;
        let records = RecordFormat::of(format);
        Self {
            format: records,
            double: matches!(format, WeightFormat::F32 | WeightFormat::F16),
            row_scales: matches!(records, RecordFormat::Fp8 | RecordFormat::Nvfp4) && !block_scales,
            block_scales,
            rows,
            cols,
        }
    }

    /// Row blocks.
    pub(super) fn row_blocks(&self) -> usize {
        self.rows.div_ceil(ROW_BLOCK)
    }

    /// Records of a row block.
    pub(super) fn blocks(&self) -> usize {
        self.cols.div_ceil(RECORD_COLUMNS) * if self.double { 2 } else { 1 }
    }

    pub(super) fn record_bytes(&self) -> usize {
        self.row_blocks().saturating_mul(self.blocks()).saturating_mul(self.format.record_bytes())
    }

    /// Offset of the row scales, f32.
    pub(super) fn row_scale_at(&self) -> usize {
        self.record_bytes().next_multiple_of(256)
    }

    /// Offset of the block scales, f32 `[row blocks][blocks of 128 columns][16]`.
    pub(super) fn block_scale_at(&self) -> usize {
        self.row_scale_at()
            + if self.row_scales { (self.row_blocks() * ROW_BLOCK * 4).next_multiple_of(256) } else { 0 }
    }

    /// Number of block scales.
    pub(super) fn block_scale_count(&self) -> usize {
        if self.block_scales { self.row_blocks() * self.cols.div_ceil(FP8_BLOCK) * ROW_BLOCK } else { 0 }
    }

    /// All bytes.
    pub(super) fn bytes(&self) -> usize {
        self.block_scale_at().saturating_add(self.block_scale_count() * 4)
    }
}

/// Records of a chunk, `chunk_records` of `common/stream.cuh`.
pub(super) const fn chunk_records(format: RecordFormat) -> usize {
    match format {
        RecordFormat::Bf16 => 1,
        RecordFormat::Fp8 | RecordFormat::W8 => 2,
        _ => 4,
    }
}

/// Rows of a stack that have one format: `run` adjacent ones, then the next `run` after a stride, from row `first` on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) layout: WeightLayout,
    /// Offset of its records in the memory of the weight.
    pub(super) at: usize,
    pub(super) first: usize,
    pub(super) run: usize,
    pub(super) stride: usize,
}

/// A matrix, or several of equal width stacked by rows, in device memory; clones share it.
#[derive(Clone)]
pub struct CudaWeight(Arc<Inner>);

struct Inner {
    memory: Memory,
    pieces: Vec<Piece>,
    rows: usize,
    cols: usize,
    format: WeightFormat,
    activations: ActivationPrecision,
}

impl CudaWeight {
    pub(super) fn new(
        memory: Memory,
        pieces: Vec<Piece>,
        (rows, cols): (usize, usize),
        format: WeightFormat,
        activations: ActivationPrecision,
    ) -> Self {
        Self(Arc::new(Inner { memory, pieces, rows, cols, format, activations }))
    }

    pub(super) fn pieces(&self) -> &[Piece] {
        &self.0.pieces
    }

    /// A piece as kernels see it.
    pub(super) fn argument_of(&self, piece: &Piece) -> WeightArg {
        WeightArg::new(&piece.layout, self.0.memory.address + piece.at as u64)
    }

    /// The weight as kernels see it that take only matrices of one format.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a stack of several formats.
    pub(super) fn argument(&self, op: &'static str) -> Result<WeightArg> {
        match self.0.pieces.as_slice() {
            [one] => Ok(self.argument_of(one)),
            pieces => Err(Error::Unsupported {
                op: op.to_owned(),
                need: "a matrix of one format".to_owned(),
                have: format!("a stack of {} formats", pieces.len()),
            }),
        }
    }
}

impl DeviceWeight for CudaWeight {
    fn rows(&self) -> usize {
        self.0.rows
    }

    fn cols(&self) -> usize {
        self.0.cols
    }

    fn format(&self) -> WeightFormat {
        self.0.format
    }

    fn activations(&self) -> ActivationPrecision {
        self.0.activations
    }

    fn bytes(&self) -> usize {
        self.0.memory.bytes
    }
}

impl fmt::Debug for CudaWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaWeight({} [{}, {}])", self.format(), self.rows(), self.cols())
    }
}

/// `Weight` of `common/weight.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct WeightArg {
    records: u64,
    row_scale: u64,
    block_scale: u64,
    rows: i32,
    cols: i32,
    blocks: i32,
    format: i32,
}

impl WeightArg {
    pub(super) fn new(layout: &WeightLayout, address: u64) -> Self {
        let part = |present: bool, at: usize| if present { address + at as u64 } else { 0 };
        Self {
            records: address,
            row_scale: part(layout.row_scales, layout.row_scale_at()),
            block_scale: part(layout.block_scales, layout.block_scale_at()),
            rows: layout.rows as i32,
            cols: layout.cols as i32,
            blocks: layout.blocks() as i32,
            format: layout.format as i32,
        }
    }

    /// No weight.
    pub(super) const NONE: Self =
        Self { records: 0, row_scale: 0, block_scale: 0, rows: 0, cols: 0, blocks: 0, format: 0 };
}
