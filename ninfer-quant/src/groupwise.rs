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

use ninfer_core::WeightFormat;
use ninfer_core::format::{GROUP_PAD, GroupFormat};

use crate::codes::{decode_f16, encode_f16};
use crate::encode::{check_input, largest};
use crate::{Error, PackedMatrix, PackedParts, Result};

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
                for (i, c) in c.iter_mut().enumerate() {
                    let low = b[i / 2] >> (4 * (i % 2)) & 15;
                    *c = (((low | (h >> i & 1) << 4) << 3) as i8) >> 3;
                }
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
    codes
}

/// Writes the codes of one group into its 32 bytes of the base plane and its bytes of the high plane; the inverse of
/// [`unpack_group`].
pub(crate) fn pack_group(format: GroupFormat, codes: &[i8; 64], base: &mut [u8], high: &mut [u8]) {
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
    // Bits of the high plane per lane: none for Q4.
    let bits = format.bits() - 4;
    for (h, c) in high.iter_mut().zip(codes.chunks(8 / bits.max(1))) {
        *h = c.iter().enumerate().fold(0, |h, (i, &c)| h | ((c as u8 >> 4) & ((1 << bits) - 1)) << (bits * i));
    }
}

/// Decodes a row; `out` is `cols` long and the planes are those of the whole matrix.
pub(crate) fn decode_row(format: GroupFormat, row: usize, base: &[u8], high: &[u8], scales: &[u8], out: &mut [f32]) {
    let size = format.group_size();
    let groups = out.len().next_multiple_of(GROUP_PAD) / size;
    for (g, out) in out.chunks_mut(size).enumerate() {
        let at = row * groups + g;
        let base = &base[32 * at..32 * (at + 1)];
        let high = &high[format.high_bytes() * at..format.high_bytes() * (at + 1)];
        let s = decode_f16(u16::from_le_bytes([scales[2 * at], scales[2 * at + 1]]));
        for (o, &c) in out.iter_mut().zip(&unpack_group(format, base, high)) {
            *o = f32::from(c) * s;
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
    const ROUND: f32 = 12_582_912.0; // 1.5 · 2²³
    check_input(WeightFormat::Group(format), rows, cols, w)?;
    let (size, qmax) = (format.group_size(), format.qmax() as f32);
    let groups = cols.next_multiple_of(GROUP_PAD) / size;
    let mut planes = Planes::zeroed(format, rows, cols);
    for row in 0..rows {
        for (g, x) in w[row * cols..(row + 1) * cols].chunks(size).enumerate() {
            let amax = largest(x);
            if amax == 0.0 {
                continue;
            }
            let mut bits = encode_f16(amax / qmax);
            if bits == 0 {
                bits = 1;
            }
            let s = decode_f16(bits);
            if s.is_infinite() {
                return Err(Error::Overflow { format: WeightFormat::Group(format), row, col: g * size, amax });
            }
            let inv = 1.0 / s;
            planes.set_scale(row * groups + g, bits);
            let (base, high) = planes.group(format, row * groups + g);
            let mut codes = [0i8; 64];
            for (c, &v) in codes.iter_mut().zip(x) {
                // |v · inv| is below 1.5 · qmax, and such a sum has no fraction: it is rounded to the nearest even integer.
                let q = (v * inv + ROUND) - ROUND;
                *c = q.clamp(-qmax, qmax) as i8;
            }
            pack_group(format, &codes, base, high);
        }
    }
    Ok(planes.finish(format, rows, cols))
}
