//! Groupwise integers: symmetric codes with one f16 scale per group of columns.
//!
//! A weight is `code · f16(scale)`. The encoder looks at one group of one row at a time and does nothing but round:
//!
//! ```text
//! amax  = max |x|
//! s     = f16(amax / qmax)              rounded to nearest even; 2⁻²⁴ if that is 0 and amax is not; overflow is an error
//! inv   = 1 / f32(s)                    in f32
//! code  = clamp(rne(x · inv), −qmax, qmax)
//! ```
//!
//! An all-zero group has scale 0 and codes 0. Columns are padded to a multiple of 128 with zero codes; groups wholly in
//! the padding have scale 0.
//!
//! | format | group | qmax | bits per weight with scales |
//! |---|---|---|---|
//! | Q4 | 64 | 7 | 4.25 |
//! | Q5 | 64 | 15 | 5.25 |
//! | Q6 | 64 | 31 | 6.25 |
//! | W8 | 32 | 127 | 8.5 |

use half::f16;
use ninfer_core::WeightFormat;
use ninfer_core::format::{GROUP_PAD, GroupFormat};

use crate::codes::decode_f16;
use crate::simd::wide;
use crate::source::{Source, largest};
use crate::{Error, PackedMatrix, PackedParts, Result};

/// Columns whose codes are worked on at a time: whole groups, and buffers that stay near the processor.
const PIECE: usize = 512;
/// Added to a small number and taken off again, it leaves the nearest even integer.
const ROUND: f32 = 12_582_912.0; // 1.5 · 2²³

/// The codes of one group, in lane order; `base` is its 32 bytes of the base plane, `high` its bytes of the high plane.
///
/// Lanes past the group size stay 0, and so do lanes whose bytes are missing.
///
/// ```
/// use ninfer_core::format::GroupFormat;
/// let mut base = [0u8; 32];
/// base[0] = 0x7F; // lanes 0 and 1 of Q4: −1 and 7
/// assert_eq!(ninfer_quant::groupwise::unpack_group(GroupFormat::Q4, &base, &[])[..3], [-1, 7, 0]);
/// ```
#[must_use]
pub fn unpack_group(format: GroupFormat, base: &[u8], high: &[u8]) -> [i8; 64] {
    let mut codes = [0i8; 64];
    unpack(format, base, high, &mut codes);
    codes
}

/// The codes of neighbouring groups, in lane order.
#[inline(always)]
fn unpack(format: GroupFormat, base: &[u8], high: &[u8], codes: &mut [i8]) {
    match format {
        GroupFormat::W8 => {
            for (c, &b) in codes.iter_mut().zip(base) {
                *c = b as i8;
            }
        }
        GroupFormat::Q4 => {
            for (c, &b) in codes.as_chunks_mut().0.iter_mut().zip(base) {
                *c = [((b << 4) as i8) >> 4, (b as i8) >> 4];
            }
        }
        GroupFormat::Q5 => {
            for ((c, b), &h) in codes.as_chunks_mut::<8>().0.iter_mut().zip(base.as_chunks::<4>().0).zip(high) {
                // The high bit of a code is its sign: where it is set, the upper four bits of the byte are.
                let codes = spread_nibbles(*b) | SIGNS[h as usize];
                *c = codes.to_le_bytes().map(|c| c as i8);
            }
        }
        GroupFormat::Q6 => {
            for ((c, b), &h) in codes.as_chunks_mut::<4>().0.iter_mut().zip(base.as_chunks::<2>().0).zip(high) {
                for (i, c) in c.iter_mut().enumerate() {
                    let low = b[i / 2] >> (4 * (i % 2)) & 15;
                    *c = (((low | (h >> (2 * i) & 3) << 4) << 2) as i8) >> 2;
                }
            }
        }
    }
}

/// Eight bytes for the bits of each byte, lowest first: `0xF0` where the bit is set.
static SIGNS: [u64; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut bit = 0;
        while bit < 8 {
            if byte >> bit & 1 == 1 {
                table[byte] |= 0xF0 << (8 * bit);
            }
            bit += 1;
        }
        byte += 1;
    }
    table
};

/// The eight nibbles of four bytes, each in a byte of its own, low nibble first.
#[inline(always)]
fn spread_nibbles(bytes: [u8; 4]) -> u64 {
    let x = u64::from(u32::from_le_bytes(bytes));
    let x = (x | x << 16) & 0x0000_FFFF_0000_FFFF;
    let x = (x | x << 8) & 0x00FF_00FF_00FF_00FF;
    (x | x << 4) & 0x0F0F_0F0F_0F0F_0F0F
}

/// Writes the codes of neighbouring groups into their bytes of the base plane and of the high plane; the inverse of
/// [`unpack_group`].
#[inline(always)]
pub(crate) fn pack(format: GroupFormat, codes: &[i8], base: &mut [u8], high: &mut [u8]) {
    if format == GroupFormat::W8 {
        for (b, &c) in base.iter_mut().zip(codes) {
            *b = c as u8;
        }
        return;
    }
    for (b, c) in base.iter_mut().zip(codes.as_chunks().0) {
        let [even, odd] = *c;
        *b = (even as u8 & 15) | ((odd as u8) << 4);
    }
    match format {
        GroupFormat::Q5 => {
            for (h, c) in high.iter_mut().zip(codes.as_chunks::<8>().0) {
                // Bit 4 of byte i, moved to bit 56 + i: the products of the others do not reach the highest byte.
                let bits = u64::from_le_bytes(c.map(|c| c as u8)) >> 4 & 0x0101_0101_0101_0101;
                *h = (bits.wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8;
            }
        }
        GroupFormat::Q6 => {
            for (h, c) in high.iter_mut().zip(codes.as_chunks::<4>().0) {
                // As above with two bits of each of four bytes.
                let bits = u32::from_le_bytes(c.map(|c| c as u8)) >> 4 & 0x0303_0303;
                *h = (bits.wrapping_mul(0x0104_1040) >> 24) as u8;
            }
        }
        GroupFormat::Q4 | GroupFormat::W8 => {}
    }
}

/// Writes the codes of one group, at most 64, into its 32 bytes of the base plane and its bytes of the high plane.
pub(crate) fn pack_group(format: GroupFormat, codes: &[i8; 64], base: &mut [u8], high: &mut [u8]) {
    pack(format, codes, base, high);
}

/// Decodes a row; `out` is `cols` long and the planes are those of the whole matrix.
pub(crate) fn decode_row(format: GroupFormat, row: usize, base: &[u8], high: &[u8], scales: &[u8], out: &mut [f32]) {
    let groups = out.len().next_multiple_of(GROUP_PAD) / format.group_size();
    let of_row = |bytes: usize| row * groups * bytes..(row + 1) * groups * bytes;
    let (base, high, scales) = (&base[of_row(32)], &high[of_row(format.high_bytes())], &scales[of_row(2)]);
    wide!(match format {
        GroupFormat::Q4 => decode_pieces(GroupFormat::Q4, base, high, scales, out),
        GroupFormat::Q5 => decode_pieces(GroupFormat::Q5, base, high, scales, out),
        GroupFormat::Q6 => decode_pieces(GroupFormat::Q6, base, high, scales, out),
        GroupFormat::W8 => decode_pieces(GroupFormat::W8, base, high, scales, out),
    });
}

#[inline(always)]
fn decode_pieces(format: GroupFormat, base: &[u8], high: &[u8], scales: &[u8], out: &mut [f32]) {
    let size = format.group_size();
    let groups = PIECE / size;
    let mut high = high.chunks(groups * format.high_bytes().max(1));
    let pieces = base.chunks(groups * 32).zip(scales.as_chunks::<2>().0.chunks(groups));
    for (out, (base, scales)) in out.chunks_mut(PIECE).zip(pieces) {
        let mut codes = [0; PIECE];
        unpack(format, base, high.next().unwrap_or_default(), &mut codes);
        for ((out, codes), s) in out.chunks_mut(size).zip(codes.chunks(size)).zip(scales) {
            let s = decode_f16(u16::from_le_bytes(*s));
            for (o, &c) in out.iter_mut().zip(codes) {
                *o = f32::from(c) * s;
            }
        }
    }
}

/// Planes of a matrix, all zero.
pub(crate) struct Planes {
    pub(crate) base: Vec<u8>,
    pub(crate) high: Vec<u8>,
    pub(crate) scales: Vec<u8>,
}

impl Planes {
    pub(crate) fn zeroed(format: GroupFormat, rows: usize, cols: usize) -> Self {
        let groups = rows * (cols.next_multiple_of(GROUP_PAD) / format.group_size());
        Self { base: vec![0; 32 * groups], high: vec![0; format.high_bytes() * groups], scales: vec![0; 2 * groups] }
    }

    /// Base and high plane of group `at`, counted over the whole matrix.
    pub(crate) fn group(&mut self, format: GroupFormat, at: usize) -> (&mut [u8], &mut [u8]) {
        let h = format.high_bytes();
        (&mut self.base[32 * at..32 * (at + 1)], &mut self.high[h * at..h * (at + 1)])
    }

    pub(crate) fn groups_per_row(&self, rows: usize) -> usize {
        self.base.len() / 32 / rows.max(1)
    }

    pub(crate) fn set_scale(&mut self, at: usize, bits: u16) {
        self.scales[2 * at..2 * at + 2].copy_from_slice(&bits.to_le_bytes());
    }

    pub(crate) fn finish(self, format: GroupFormat, rows: usize, cols: usize) -> PackedMatrix {
        let Self { base, high, scales } = self;
        PackedMatrix::trusted(rows, cols, PackedParts::Group { format, base, high, scales })
    }
}

/// Encodes a row-major `[rows, cols]` matrix as groupwise integers.
///
/// # Errors
/// [`Error::Length`], [`Error::NonFinite`], and [`Error::Overflow`] where a scale exceeds what f16 holds.
///
/// ```
/// use ninfer_core::format::GroupFormat;
/// let w: Vec<f32> = (-7..=7).map(|i| i as f32 * 0.5).collect();
/// let m = ninfer_quant::groupwise::encode(GroupFormat::Q4, 1, 15, &w)?;
/// assert_eq!(m.dequantize(), w); // the scale is 0.5, exactly
/// # Ok::<(), ninfer_quant::Error>(())
/// ```
pub fn encode(format: GroupFormat, rows: usize, cols: usize, w: &[f32]) -> Result<PackedMatrix> {
    encode_source(format, Source::values(rows, cols, w)?)
}

pub(crate) fn encode_source(format: GroupFormat, mut w: Source<'_>) -> Result<PackedMatrix> {
    let (rows, cols) = (w.rows(), w.cols());
    let groups = cols.next_multiple_of(GROUP_PAD) / format.group_size();
    let mut planes = Planes::zeroed(format, rows, cols);
    let mut high = planes.high.chunks_exact_mut((groups * format.high_bytes()).max(1));
    let others = planes.base.chunks_exact_mut((groups * 32).max(1));
    let others = others.zip(planes.scales.chunks_exact_mut((groups * 2).max(1)));
    for (row, (base, scales)) in others.enumerate() {
        let (x, _) = w.finite_row(WeightFormat::Group(format), row)?;
        let high = high.next().unwrap_or_default();
        let overflow = wide!(match format {
            GroupFormat::Q4 => encode_pieces(GroupFormat::Q4, x, base, high, scales),
            GroupFormat::Q5 => encode_pieces(GroupFormat::Q5, x, base, high, scales),
            GroupFormat::Q6 => encode_pieces(GroupFormat::Q6, x, base, high, scales),
            GroupFormat::W8 => encode_pieces(GroupFormat::W8, x, base, high, scales),
        });
        if let Some((col, amax)) = overflow {
            w.check_from(WeightFormat::Group(format), row + 1)?;
            return Err(Error::Overflow { format: WeightFormat::Group(format), row, col, amax });
        }
    }
    Ok(planes.finish(format, rows, cols))
}

/// Encodes a row; stops at the first group whose scale overflows, with its first column and its largest magnitude.
#[inline(always)]
fn encode_pieces(
    format: GroupFormat,
    x: &[f32],
    base: &mut [u8],
    high: &mut [u8],
    scales: &mut [u8],
) -> Option<(usize, f32)> {
    let (size, qmax) = (format.group_size(), format.qmax());
    let groups = PIECE / size;
    let mut high = high.chunks_mut(groups * format.high_bytes().max(1));
    let pieces = base.chunks_mut(groups * 32).zip(scales.as_chunks_mut::<2>().0.chunks_mut(groups));
    for (piece, (x, (base, scales))) in x.chunks(PIECE).zip(pieces).enumerate() {
        let mut codes = [0; PIECE];
        for (g, ((codes, x), scale)) in codes.chunks_mut(size).zip(x.chunks(size)).zip(scales).enumerate() {
            let amax = largest(x);
            let Some(s) = group_scale(amax, qmax as f32) else { return Some((piece * PIECE + g * size, amax)) };
            *scale = s.to_bits().to_le_bytes();
            let inv = if amax > 0.0 { 1.0 / s.to_f32() } else { 0.0 };
            for (c, x) in codes.iter_mut().zip(x) {
                // |x · inv| is below 1.5 · qmax: the sum has no fraction, it is rounded to the nearest even integer, and
                // its last bits are that integer.
                let q = (x * inv + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i32;
                *c = q.clamp(-qmax, qmax) as i8;
            }
        }
        pack(format, &codes, base, high.next().unwrap_or_default());
    }
    None
}

/// The f16 scale of a group, `None` if it overflows.
#[inline(always)]
fn group_scale(amax: f32, qmax: f32) -> Option<f16> {
    let s = f16::from_f32(amax / qmax);
    match s.to_bits() {
        0 if amax > 0.0 => Some(f16::from_bits(1)),
        0x7C00 => None,
        _ => Some(s),
    }
}
