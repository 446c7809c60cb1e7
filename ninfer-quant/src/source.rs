//! The weights that encoders read: a row at a time, from f32 values or from a packed matrix.

use ninfer_core::{DType, PackedData, PackedRef, WeightFormat};

use crate::codes::decode_bf16;
use crate::packed::check_dimensions;
use crate::simd::wide;
use crate::{Error, Result, dequantize_ref_row};

/// Weights that are encoded. A packed matrix is decoded into a buffer of one row, so that no f32 copy of it is made.
pub(crate) struct Source<'a> {
    rows: usize,
    cols: usize,
    weights: Weights<'a>,
    buffer: Vec<f32>,
}

enum Weights<'a> {
    Values(&'a [f32]),
    Packed(PackedRef<'a>),
}

impl<'a> Source<'a> {
    /// Row-major values `[rows, cols]`.
    pub(crate) fn values(rows: usize, cols: usize, w: &'a [f32]) -> Result<Self> {
        check_dimensions(rows, cols)?;
        let expected = rows.saturating_mul(cols);
        if w.len() != expected {
            return Err(Error::Length { what: "weights", expected, got: w.len() });
        }
        Ok(Self { rows, cols, weights: Weights::Values(w), buffer: Vec::new() })
    }

    /// A matrix in any format.
    pub(crate) fn packed(m: &PackedRef<'a>) -> Result<Self> {
        check_dimensions(m.rows(), m.cols())?;
        Ok(Self { rows: m.rows(), cols: m.cols(), weights: Weights::Packed(*m), buffer: vec![0.0; m.cols()] })
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// The weights of a row, below [`Source::rows`].
    pub(crate) fn row(&mut self, row: usize) -> Result<&[f32]> {
        match &self.weights {
            Weights::Values(w) => Ok(&w[row * self.cols..(row + 1) * self.cols]),
            Weights::Packed(m) => {
                dequantize_ref_row(m, row, &mut self.buffer)?;
                Ok(&self.buffer)
            }
        }
    }

    /// A row and the largest magnitude in it; an error if a weight is not finite, in the name of the format to be encoded.
    pub(crate) fn finite_row(&mut self, format: WeightFormat, row: usize) -> Result<(&[f32], f32)> {
        let x = self.row(row)?;
        let amax = wide!(largest(x));
        if amax.is_finite() {
            return Ok((x, amax));
        }
        // Only NaN and infinity have larger bits than every finite number.
        let col = x.iter().position(|x| !x.is_finite()).unwrap_or_default();
        Err(Error::NonFinite { format, row, col, value: x[col] })
    }

    /// The largest magnitude of a row, with the check of [`Source::finite_row`] but without decoding BF16.
    pub(crate) fn largest_of_row(&mut self, format: WeightFormat, row: usize) -> Result<f32> {
        if let Weights::Packed(m) = &self.weights
            && let PackedData::Plain { dtype: DType::Bf16, bytes } = m.data()
        {
            let bytes = &bytes[2 * row * self.cols..2 * (row + 1) * self.cols];
            let amax = decode_bf16(wide!(largest_bf16(bytes)));
            if amax.is_finite() {
                return Ok(amax);
            }
        }
        self.finite_row(format, row).map(|(_, amax)| amax)
    }

    /// Refuses weights that are not finite from a row on, so that an encoder which stops half-way reports them first.
    pub(crate) fn check_from(&mut self, format: WeightFormat, first: usize) -> Result<()> {
        (first..self.rows).try_for_each(|row| self.largest_of_row(format, row).map(drop))
    }
}

/// Largest magnitude; of finite numbers it is the one with the largest bits, and integers are compared many at a time. NaN
/// and infinity are larger than all numbers and come out as what they are.
#[inline(always)]
pub(crate) fn largest(w: &[f32]) -> f32 {
    f32::from_bits(w.iter().fold(0, |m, x| m.max(x.to_bits() & 0x7FFF_FFFF)))
}

#[inline(always)]
fn largest_bf16(bytes: &[u8]) -> u16 {
    bytes.as_chunks().0.iter().fold(0, |m, b| m.max(u16::from_le_bytes(*b) & 0x7FFF))
}
