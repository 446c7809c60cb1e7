//! Prepared weights of the CPU backend: the packed bytes themselves, decoded sixteen columns at a time.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use half::f16;
use ninfer_core::backend::DeviceWeight;
use ninfer_core::format::{FP8_BLOCK, Fp8Scales, GROUP_PAD, GroupFormat, NVFP4_GROUP};
use ninfer_core::{DType, Error, PackedData, PackedRef, Result, WeightFormat};
use ninfer_quant::codes;

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
        Ok(Self(Arc::new(Stack { parts: stack, rows, cols, bytes })))
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
    pub(super) fn decode_row(&self, row: usize, out: &mut [f32]) {
        for (part, rows) in self.pieces(row..row + 1) {
            for r in rows {
                part.decode_row(r, out);
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

/// Yields the f32 values of a row, sixteen columns at a time.
///
/// Values are exactly those of the format's definition (code times scale, rounded once). Columns behind the last one are
/// zeros where a full group is stored and are never asked for otherwise.
pub(super) trait Decoder: Copy + Sync {
    /// Columns `16·chunk .. 16·chunk + 16` of a row.
    fn chunk(self, row: usize, chunk: usize) -> [f32; LANES];
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
    pub(super) fn decode_row(&self, row: usize, out: &mut [f32]) {
        with_decoder!(self, d => {
            for (chunk, out) in out[..self.cols].chunks_mut(LANES).enumerate() {
                let values = d.chunk(row, chunk);
                out.copy_from_slice(&values[..out.len()]);
            }
        });
    }
}

/// A whole chunk of a slice, or what is left of it followed by zeros.
#[inline(always)]
fn load<T: Copy + Default>(values: &[T], at: usize, row_end: usize) -> [T; LANES] {
    if at + LANES <= row_end {
        if let Some(full) = values[at..].first_chunk::<LANES>() {
            return *full;
        }
    }
    let mut out = [T::default(); LANES];
    let rest = &values[at..row_end.min(at + LANES)];
    out[..rest.len()].copy_from_slice(rest);
    out
}

#[derive(Clone, Copy)]
pub(super) struct Floats<'a> {
    pub(super) values: &'a [f32],
    pub(super) cols: usize,
}

impl Decoder for Floats<'_> {
    #[inline(always)]
    fn chunk(self, row: usize, chunk: usize) -> [f32; LANES] {
        load(self.values, row * self.cols + chunk * LANES, (row + 1) * self.cols)
    }
}

#[derive(Clone, Copy)]
pub(super) struct Halves<'a> {
    pub(super) values: &'a [f16],
    pub(super) cols: usize,
}

impl Decoder for Halves<'_> {
    #[inline(always)]
    fn chunk(self, row: usize, chunk: usize) -> [f32; LANES] {
        load(self.values, row * self.cols + chunk * LANES, (row + 1) * self.cols).map(f16::to_f32)
    }
}

#[derive(Clone, Copy)]
pub(super) struct Brains<'a> {
    pub(super) values: &'a [u16],
    pub(super) cols: usize,
}

impl Decoder for Brains<'_> {
    #[inline(always)]
    fn chunk(self, row: usize, chunk: usize) -> [f32; LANES] {
        let bits = load(self.values, row * self.cols + chunk * LANES, (row + 1) * self.cols);
        bits.map(|b| f32::from_bits(u32::from(b) << 16))
    }
}

#[derive(Clone, Copy)]
pub(super) struct Fp8<'a> {
    pub(super) codes: &'a [u8],
    pub(super) scales: &'a Scales,
    pub(super) cols: usize,
}

/// E4M3 by bit arithmetic: normal codes move into the f32 fields, subnormal ones are `(1 + m/8)·2⁻⁶ − 2⁻⁶`, both exact.
/// NaN codes do not occur in a prepared weight: [`Packed::new`] refuses them.
#[inline(always)]
fn e4m3(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7f) << 20;
    let subnormal = magnitude < 1 << 23;
    let normal = f32::from_bits(magnitude + (120 << 23));
    let small = f32::from_bits(magnitude + (121 << 23)) - 0.015_625;
    let value = if subnormal { small } else { normal };
    f32::from_bits(value.to_bits() | (u32::from(code & 0x80) << 24))
}

impl Decoder for Fp8<'_> {
    #[inline(always)]
    fn chunk(self, row: usize, chunk: usize) -> [f32; LANES] {
        let at = chunk * LANES;
        let codes = load(self.codes, row * self.cols + at, (row + 1) * self.cols);
        let scale = match self.scales {
            Scales::Tensor(s) => *s,
            Scales::Row(s) => s[row],
            Scales::Block(s) => s[row / FP8_BLOCK * self.cols.div_ceil(FP8_BLOCK) + at / FP8_BLOCK],
        };
        codes.map(|c| e4m3(c) * scale)
    }
}

#[derive(Clone, Copy)]
pub(super) struct Nvfp4<'a> {
    pub(super) codes: &'a [u8],
    pub(super) scales: &'a [u8],
    pub(super) table: &'a [f32; 256],
    pub(super) cols: usize,
}

/// Both signed 4-bit values of a byte, low nibble first.
static I4_PAIRS: [[f32; 2]; 256] = {
    let mut table = [[0.0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = [((byte as i32 & 15) ^ 8) as f32 - 8.0, ((byte as i32 >> 4) ^ 8) as f32 - 8.0];
        byte += 1;
    }
    table
};

#[inline(always)]
fn pairs(table: &[[f32; 2]; 256], bytes: &[u8; 8], scale: f32) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    for (i, &b) in bytes.iter().enumerate() {
        let [low, high] = table[usize::from(b)];
        out[2 * i] = low * scale;
        out[2 * i + 1] = high * scale;
    }
    out
}

impl Decoder for Nvfp4<'_> {
    #[inline(always)]
    fn chunk(self, row: usize, chunk: usize) -> [f32; LANES] {
        let group = row * (self.cols / NVFP4_GROUP) + chunk;
        let scale = self.table[usize::from(self.scales[group])];
        let bytes = self.codes[group * 8..].first_chunk::<8>();
        bytes.map_or([0.0; LANES], |b| pairs(&codes::E2M1_PAIRS, b, scale))
    }
}

#[derive(Clone, Copy)]
pub(super) struct Group<'a, const BITS: usize> {
    pub(super) groups: usize,
    pub(super) base: &'a [u8],
    pub(super) high: &'a [u8],
    pub(super) scales: &'a [f32],
}

impl<const BITS: usize> Decoder for Group<'_, BITS> {
    #[inline(always)]
    fn chunk(self, row: usize, chunk: usize) -> [f32; LANES] {
        let per_group = if BITS == 8 { 2 } else { 4 };
        let (group, part) = (row * self.groups + chunk / per_group, chunk % per_group);
        let scale = self.scales[group];
        if BITS == 8 {
            let bytes = load(self.base, group * 32 + part * LANES, self.base.len());
            return bytes.map(|b| f32::from(b.cast_signed()) * scale);
        }
        let Some(bytes) = self.base[group * 32 + part * 8..].first_chunk::<8>() else {
            return [0.0; LANES];
        };
        if BITS == 4 {
            return pairs(&I4_PAIRS, bytes, scale);
        }
        // Q5: 2 bytes, one bit a lane; Q6: 4 bytes, two bits a lane.
        let (width, mask) = (BITS - 4, (1u32 << (BITS - 4)) - 1);
        let mut word = 0u32;
        for i in 0..2 * width {
            word |= u32::from(self.high[group * 8 * width + part * 2 * width + i]) << (8 * i);
        }
        let sign = 1i32 << (BITS - 1);
        let mut out = [0.0; LANES];
        for (lane, out) in out.iter_mut().enumerate() {
            let low = u32::from(bytes[lane / 2] >> (4 * (lane % 2))) & 15;
            let code = (low | ((word >> (width * lane)) & mask) << 4).cast_signed();
            *out = ((code ^ sign) - sign) as f32 * scale;
        }
        out
    }
}
