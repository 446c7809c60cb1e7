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
use crate::encode::check_input;
use crate::{Error, PackedMatrix, PackedParts, Result};

/// The code of one lane; `base` is the group's 32 bytes, `high` its high plane.
pub(crate) fn code(format: GroupFormat, base: &[u8], high: &[u8], lane: usize) -> i32 {
    if format == GroupFormat::W8 {
        return i32::from(base[lane] as i8);
    }
    let low = u32::from(base[lane / 2] >> (4 * (lane % 2))) & 15;
    let (bits, value) = match format {
        GroupFormat::Q5 => (5, low | (u32::from(high[lane / 8] >> (lane % 8)) & 1) << 4),
        GroupFormat::Q6 => (6, low | (u32::from(high[lane / 4] >> (2 * (lane % 4))) & 3) << 4),
        _ => (4, low),
    };
    ((value << (32 - bits)) as i32) >> (32 - bits)
}

/// Writes the code of one lane into planes that are zero there.
pub(crate) fn set_code(format: GroupFormat, base: &mut [u8], high: &mut [u8], lane: usize, code: i32) {
    let c = code as u8;
    match format {
        GroupFormat::W8 => base[lane] = c,
        _ => base[lane / 2] |= (c & 15) << (4 * (lane % 2)),
    }
    match format {
        GroupFormat::Q5 => high[lane / 8] |= ((c >> 4) & 1) << (lane % 8),
        GroupFormat::Q6 => high[lane / 4] |= ((c >> 4) & 3) << (2 * (lane % 4)),
        _ => {}
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
        match format {
            GroupFormat::W8 => {
                for (o, &b) in out.iter_mut().zip(base) {
                    *o = f32::from(b as i8) * s;
                }
            }
            GroupFormat::Q4 => {
                for (o, &b) in out.chunks_mut(2).zip(base) {
                    o[0] = f32::from(((b << 4) as i8) >> 4) * s;
                    if let Some(o) = o.get_mut(1) {
                        *o = f32::from((b as i8) >> 4) * s;
                    }
                }
            }
            _ => {
                for (lane, o) in out.iter_mut().enumerate() {
                    *o = code(format, base, high, lane) as f32 * s;
                }
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
    check_input(WeightFormat::Group(format), rows, cols, w)?;
    let (size, qmax) = (format.group_size(), format.qmax() as f32);
    let groups = cols.next_multiple_of(GROUP_PAD) / size;
    let mut planes = Planes::zeroed(format, rows, cols);
    for row in 0..rows {
        for (g, x) in w[row * cols..(row + 1) * cols].chunks(size).enumerate() {
            let amax = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
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
            for (lane, &v) in x.iter().enumerate() {
                let q = (v * inv).round_ties_even().clamp(-qmax, qmax);
                set_code(format, base, high, lane, q as i32);
            }
        }
    }
    Ok(planes.finish(format, rows, cols))
}
