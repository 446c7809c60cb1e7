//! Prepared weights of the CPU backend: the packed bytes themselves, decoded sixteen columns at a time.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use half::f16;
use ninfer_core::backend::DeviceWeight;
use ninfer_core::format::{ActivationPrecision, FP8_BLOCK, Fp8Scales, GROUP_PAD, GroupFormat, NVFP4_GROUP};
use ninfer_core::{DType, Error, PackedData, PackedRef, Result, WeightFormat};
use ninfer_quant::codes;

use super::simd::{Isa, Lanes, Plain, dispatch};

/// Columns that a decoder yields at a time; every format's group is a multiple of it.
pub(super) const LANES: usize = 16;

/// A packed matrix, or several of equal width stacked by rows; clones share the bytes.
#[derive(Clone)]
pub struct CpuWeight(Arc<Stack>);

struct Stack {
    parts: Vec<Part>,
    rows: usize,
    cols: usize,
    bytes: usize,
    activations: ActivationPrecision,
}

/// One packed matrix and the first row it stands at.
pub(super) struct Part {
    pub(super) first: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) data: Packed,
}

/// Owned bytes of one part.
pub(super) enum Packed {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<u16>),
    Fp8 { codes: Vec<u8>, scales: Scales },
    Nvfp4 { codes: Vec<u8>, scales: Vec<u8>, table: Box<[f32; 256]> },
    Group { format: GroupFormat, groups: usize, base: Vec<u8>, high: Vec<u8>, scales: Vec<f32> },
}

pub(super) enum Scales {
    Tensor(f32),
    Row(Vec<f32>),
    Block(Vec<f32>),
}

impl CpuWeight {
    pub(super) fn prepare(parts: &[PackedRef<'_>]) -> Result<Self> {
        let Some(first) = parts.first() else {
            return Err(Error::Shape {
                op: "prepare",
                what: "number of parts",
                expected: "at least 1".to_owned(),
                got: "0".to_owned(),
            });
        };
        let activations = ActivationPrecision::common(parts)?;
        let (mut rows, mut bytes, cols) = (0, 0, first.cols());
        let mut stack = Vec::with_capacity(parts.len());
        for part in parts {
            if part.cols() != cols {
                return Err(Error::Shape {
                    op: "prepare",
                    what: "columns of a part",
                    expected: cols.to_string(),
                    got: part.cols().to_string(),
                });
            }
            stack.push(Part { first: rows, rows: part.rows(), cols, data: Packed::new(part)? });
            rows += part.rows();
            bytes += part.bytes();
        }
        Ok(Self(Arc::new(Stack { parts: stack, rows, cols, bytes, activations })))
    }

    /// The parts that overlap a range of rows, with their share of it in rows of the part.
    pub(super) fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = (&Part, Range<usize>)> {
        let parts = &self.0.parts;
        let from = parts.partition_point(|p| p.first + p.rows <= range.start);
        parts[from..].iter().take_while(move |p| p.first < range.end).map(move |p| {
            let start = range.start.max(p.first) - p.first;
            let end = range.end.min(p.first + p.rows) - p.first;
            (p, start..end)
        })
    }

    /// Writes one row as f32.
    pub(super) fn decode_row(&self, isa: Isa, row: usize, out: &mut [f32]) {
        for (part, rows) in self.pieces(row..row + 1) {
            for r in rows {
                part.decode_row(isa, r, out);
            }
        }
    }
}

impl DeviceWeight for CpuWeight {
    fn rows(&self) -> usize {
        self.0.rows
    }

    fn cols(&self) -> usize {
        self.0.cols
    }

    fn format(&self) -> WeightFormat {
        match self.0.parts.first().map(|p| &p.data) {
            Some(Packed::F16(_)) => WeightFormat::F16,
            Some(Packed::Bf16(_)) => WeightFormat::Bf16,
            Some(Packed::Fp8 { scales: Scales::Tensor(_), .. }) => WeightFormat::Fp8Tensor,
            Some(Packed::Fp8 { scales: Scales::Row(_), .. }) => WeightFormat::Fp8Row,
            Some(Packed::Fp8 { .. }) => WeightFormat::Fp8Block,
            Some(Packed::Nvfp4 { .. }) => WeightFormat::Nvfp4,
            Some(Packed::Group { format, .. }) => WeightFormat::Group(*format),
            Some(Packed::F32(_)) | None => WeightFormat::F32,
        }
    }

    fn activations(&self) -> ActivationPrecision {
        self.0.activations
    }

    fn bytes(&self) -> usize {
        self.0.bytes
    }
}

impl fmt::Debug for CpuWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuWeight({} [{}, {}])", self.format(), self.rows(), self.cols())
    }
}

fn words<T, const N: usize>(bytes: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|&b| read(b)).collect()
}

impl Packed {
    fn new(matrix: &PackedRef<'_>) -> Result<Self> {
        Ok(match matrix.data() {
            PackedData::Plain { dtype: DType::F32, bytes } => Self::F32(words(bytes, f32::from_le_bytes)),
            PackedData::Plain { dtype: DType::F16, bytes } => Self::F16(words(bytes, f16::from_le_bytes)),
            PackedData::Plain { bytes, .. } => Self::Bf16(words(bytes, u16::from_le_bytes)),
            PackedData::Fp8 { codes, .. } if codes.iter().any(|c| c & 0x7f == 0x7f) => {
                let at = codes.iter().position(|c| c & 0x7f == 0x7f).unwrap_or_default();
                return Err(Error::OutOfRange {
                    what: "FP8 code",
                    got: format!("NaN in row {}, column {}", at / matrix.cols(), at % matrix.cols()),
                    legal: "finite E4M3 codes".to_owned(),
                });
            }
            PackedData::Fp8 { codes, scales } => Self::Fp8 {
                codes: codes.to_vec(),
                scales: match scales {
                    Fp8Scales::Tensor(s) => Scales::Tensor(s),
                    Fp8Scales::Row(s) => Scales::Row(s.to_vec()),
                    Fp8Scales::Block(s) => Scales::Block(s.to_vec()),
                },
            },
            PackedData::Nvfp4 { codes: packed, scales, global } => {
                let mut table = Box::new([0.0; 256]);
                for (code, value) in (0..=255u8).zip(table.iter_mut()) {
                    *value = global.apply(codes::decode_e4m3(code));
                }
                Self::Nvfp4 { codes: packed.to_vec(), scales: scales.to_vec(), table }
            }
            PackedData::Group { format, base, high, scales } => Self::Group {
                format,
                groups: matrix.cols().next_multiple_of(GROUP_PAD) / format.group_size(),
                base: base.to_vec(),
                high: high.to_vec(),
                scales: words(scales, |b| f16::from_le_bytes(b).to_f32()),
            },
            _ => {
                return Err(Error::Unsupported {
                    op: "prepare".to_owned(),
                    need: "a CPU route".to_owned(),
                    have: matrix.format().to_string(),
                });
            }
        })
    }
}

/// Yields the f32 values of rows, sixteen columns at a time.
///
/// Values are exactly those of the format's definition (code times scale, rounded once).
pub(super) trait Decoder: Copy + Sync {
    /// One row.
    type Row: DecodeRow;

    /// The row of this number.
    fn row(self, row: usize) -> Self::Row;
}

/// One row of a packed matrix.
pub(super) trait DecodeRow {
    /// Columns `16·chunk .. 16·chunk + 16`, all of them stored.
    fn chunk<L: Lanes>(&self, chunk: usize) -> L;

    /// The columns behind the last whole chunk, which has this number; lanes behind the last column are unspecified.
    fn rest(&self, chunk: usize) -> [f32; LANES];
}

/// Calls `$body` with a decoder for the part's format.
macro_rules! with_decoder {
    ($part:expr, $decoder:ident => $body:expr) => {{
        let part = $part;
        match &part.data {
            Packed::F32(values) => {
                let $decoder = Floats { values, cols: part.cols };
                $body
            }
            Packed::F16(values) => {
                let $decoder = Halves { values, cols: part.cols };
                $body
            }
            Packed::Bf16(values) => {
                let $decoder = Brains { values, cols: part.cols };
                $body
            }
            Packed::Fp8 { codes, scales } => {
                let $decoder = Fp8 { codes, scales, cols: part.cols };
                $body
            }
            Packed::Nvfp4 { codes, scales, table } => {
                let $decoder = Nvfp4 { codes, scales, table, cols: part.cols };
                $body
            }
            Packed::Group { format, groups, base, high, scales } => match format {
                GroupFormat::Q4 => {
                    let $decoder = Group::<4> { groups: *groups, base, high, scales };
                    $body
                }
                GroupFormat::Q5 => {
                    let $decoder = Group::<5> { groups: *groups, base, high, scales };
                    $body
                }
                GroupFormat::Q6 => {
                    let $decoder = Group::<6> { groups: *groups, base, high, scales };
                    $body
                }
                GroupFormat::W8 => {
                    let $decoder = Group::<8> { groups: *groups, base, high, scales };
                    $body
                }
            },
        }
    }};
}
pub(super) use with_decoder;

impl Part {
    /// Writes one row as f32; `out` has the matrix's number of columns.
    pub(super) fn decode_row(&self, isa: Isa, row: usize, out: &mut [f32]) {
        with_decoder!(self, d => decode_row(isa, d, row, &mut out[..self.cols]));
    }
}

dispatch! {
    fn decode_row<D: Decoder>(decoder: D, row: usize, out: &mut [f32]) = decode_row_body
}

#[inline(always)]
fn decode_row_body<L: Lanes, D: Decoder>(decoder: D, row: usize, out: &mut [f32]) {
    let row = decoder.row(row);
    let (chunks, rest) = out.as_chunks_mut::<LANES>();
    let full = chunks.len();
    for (i, chunk) in chunks.iter_mut().enumerate() {
        *chunk = row.chunk::<L>(i).store();
    }
    if !rest.is_empty() {
        rest.copy_from_slice(&row.rest(full)[..rest.len()]);
    }
}

/// The elements of a row as whole chunks and what is left.
#[derive(Clone, Copy)]
pub(super) struct Chunks<'a, T> {
    chunks: &'a [[T; LANES]],
    rest: &'a [T],
}

impl<'a, T: Copy + Default> Chunks<'a, T> {
    #[inline(always)]
    fn of(values: &'a [T], cols: usize, row: usize) -> Self {
        let (chunks, rest) = values[row * cols..][..cols].as_chunks();
        Self { chunks, rest }
    }

    /// What is left, followed by zeros.
    fn padded(&self) -> [T; LANES] {
        let mut out = [T::default(); LANES];
        out[..self.rest.len()].copy_from_slice(self.rest);
        out
    }
}

/// A format whose elements need no scale.
macro_rules! plain_decoder {
    ($decoder:ident, $element:ty, $lanes:expr) => {
        #[derive(Clone, Copy)]
        pub(super) struct $decoder<'a> {
            pub(super) values: &'a [$element],
            pub(super) cols: usize,
        }

        impl<'a> Decoder for $decoder<'a> {
            type Row = Plainly<'a, $element>;

            #[inline(always)]
            fn row(self, row: usize) -> Self::Row {
                Plainly(Chunks::of(self.values, self.cols, row))
            }
        }

        impl DecodeRow for Plainly<'_, $element> {
            #[inline(always)]
            fn chunk<L: Lanes>(&self, chunk: usize) -> L {
                $lanes(&self.0.chunks[chunk])
            }

            fn rest(&self, _chunk: usize) -> [f32; LANES] {
                let lanes: Plain = $lanes(&self.0.padded());
                lanes.store()
            }
        }
    };
}

/// A row of elements without scales.
#[derive(Clone, Copy)]
pub(super) struct Plainly<'a, T>(Chunks<'a, T>);

plain_decoder!(Floats, f32, Lanes::load);
plain_decoder!(Halves, f16, halves);
plain_decoder!(Brains, u16, Lanes::bf16);

#[inline(always)]
fn halves<L: Lanes>(values: &[f16; LANES]) -> L {
    L::load(&values.map(f16::to_f32))
}

#[derive(Clone, Copy)]
pub(super) struct Fp8<'a> {
    pub(super) codes: &'a [u8],
    pub(super) scales: &'a Scales,
    pub(super) cols: usize,
}

/// A row of E4M3 codes; chunk `i` has scale `scales[i / 8]`, or the only one.
#[derive(Clone, Copy)]
pub(super) struct Fp8Row<'a> {
    codes: Chunks<'a, u8>,
    scales: &'a [f32],
}

impl Fp8Row<'_> {
    #[inline(always)]
    fn scale(&self, chunk: usize) -> f32 {
        match self.scales {
            [scale] => *scale,
            scales => scales[chunk / (FP8_BLOCK / LANES)],
        }
    }
}

impl<'a> Decoder for Fp8<'a> {
    type Row = Fp8Row<'a>;

    #[inline(always)]
    fn row(self, row: usize) -> Fp8Row<'a> {
        let blocks = self.cols.div_ceil(FP8_BLOCK);
        let scales = match self.scales {
            Scales::Tensor(s) => std::slice::from_ref(s),
            Scales::Row(s) => &s[row..=row],
            Scales::Block(s) => &s[row / FP8_BLOCK * blocks..][..blocks],
        };
        Fp8Row { codes: Chunks::of(self.codes, self.cols, row), scales }
    }
}

impl DecodeRow for Fp8Row<'_> {
    #[inline(always)]
    fn chunk<L: Lanes>(&self, chunk: usize) -> L {
        L::e4m3(&self.codes.chunks[chunk]).scale(self.scale(chunk))
    }

    fn rest(&self, chunk: usize) -> [f32; LANES] {
        Plain::e4m3(&self.codes.padded()).scale(self.scale(chunk)).store()
    }
}

#[derive(Clone, Copy)]
pub(super) struct Nvfp4<'a> {
    pub(super) codes: &'a [u8],
    pub(super) scales: &'a [u8],
    pub(super) table: &'a [f32; 256],
    pub(super) cols: usize,
}

/// A row of E2M1 codes; a chunk is a group.
#[derive(Clone, Copy)]
pub(super) struct Nvfp4Row<'a> {
    codes: &'a [[u8; 8]],
    scales: &'a [u8],
    table: &'a [f32; 256],
}

/// Twice the E2M1 values, which are whole numbers.
const E2M1_TWICE: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
/// Signed 4-bit values.
const I4: [i8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1];

impl<'a> Decoder for Nvfp4<'a> {
    type Row = Nvfp4Row<'a>;

    #[inline(always)]
    fn row(self, row: usize) -> Nvfp4Row<'a> {
        let groups = self.cols / NVFP4_GROUP;
        Nvfp4Row {
            codes: self.codes[row * groups * 8..][..groups * 8].as_chunks().0,
            scales: &self.scales[row * groups..][..groups],
            table: self.table,
        }
    }
}

impl DecodeRow for Nvfp4Row<'_> {
    #[inline(always)]
    fn chunk<L: Lanes>(&self, chunk: usize) -> L {
        // Halving is exact, so the value is rounded once, in the product with the scale.
        let scale = self.table[usize::from(self.scales[chunk])];
        L::nibbles(&self.codes[chunk], &E2M1_TWICE).scale(0.5).scale(scale)
    }

    fn rest(&self, _chunk: usize) -> [f32; LANES] {
        [0.0; LANES] // columns are whole groups
    }
}

#[derive(Clone, Copy)]
pub(super) struct Group<'a, const BITS: usize> {
    pub(super) groups: usize,
    pub(super) base: &'a [u8],
    pub(super) high: &'a [u8],
    pub(super) scales: &'a [f32],
}

/// A row of groupwise integers, padded to whole groups.
#[derive(Clone, Copy)]
pub(super) struct GroupRow<'a, const BITS: usize> {
    base: &'a [u8],
    high: &'a [u8],
    scales: &'a [f32],
}

impl<'a, const BITS: usize> Decoder for Group<'a, BITS> {
    type Row = GroupRow<'a, BITS>;

    #[inline(always)]
    fn row(self, row: usize) -> GroupRow<'a, BITS> {
        let (groups, high) = (self.groups, if BITS == 8 { 0 } else { 8 * (BITS - 4) });
        GroupRow {
            base: &self.base[row * groups * 32..][..groups * 32],
            high: &self.high[row * groups * high..][..groups * high],
            scales: &self.scales[row * groups..][..groups],
        }
    }
}

impl<const BITS: usize> DecodeRow for GroupRow<'_, BITS> {
    #[inline(always)]
    fn chunk<L: Lanes>(&self, chunk: usize) -> L {
        if BITS == 8 {
            let bytes = &self.base.as_chunks::<LANES>().0[chunk];
            return L::i8(&bytes.map(u8::cast_signed)).scale(self.scales[chunk / 2]);
        }
        let scale = self.scales[chunk / 4];
        let bytes = &self.base.as_chunks::<8>().0[chunk];
        if BITS == 4 {
            return L::nibbles(bytes, &I4).scale(scale);
        }
        // Q5: 2 bytes a chunk, one bit a lane; Q6: 4 bytes, two bits a lane. Lane 0 is the lowest bit.
        let (width, mask) = (BITS - 4, (1u32 << (BITS - 4)) - 1);
        let word = match width {
            1 => u32::from(u16::from_le_bytes(self.high.as_chunks::<2>().0[chunk])),
            _ => u32::from_le_bytes(self.high.as_chunks::<4>().0[chunk]),
        };
        let sign = 1u8 << (BITS - 1);
        L::i8(&std::array::from_fn(|lane| {
            let low = bytes[lane / 2] >> (4 * (lane % 2)) & 15;
            let code = low | (((word >> (width * lane)) & mask) as u8) << 4;
            (code ^ sign).wrapping_sub(sign).cast_signed()
        }))
        .scale(scale)
    }

    fn rest(&self, chunk: usize) -> [f32; LANES] {
        self.chunk::<Plain>(chunk).store() // padded to whole groups
    }
}
