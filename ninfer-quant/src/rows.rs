//! Row ranges and row-wise joining of packed matrices, without touching a code.

use std::ops::Range;

use ninfer_core::format::{FP8_BLOCK, GROUP_PAD, NVFP4_GROUP};

use crate::{Error, Fp8ScaleVec, PackedMatrix, PackedParts, Result};

impl PackedMatrix {
    /// The rows `range` as a matrix of their own, codes and scales copied.
    ///
    /// An NVFP4 slice keeps the global scale of the whole.
    ///
    /// # Errors
    /// [`Error::Rows`] if the range does not lie in the matrix, or starts inside a block of FP8 scales.
    ///
    /// ```
    /// use ninfer_core::WeightFormat;
    /// use ninfer_quant::encode;
    /// let w: Vec<f32> = (0..64).map(|i| i as f32).collect();
    /// let m = encode(WeightFormat::Nvfp4, 4, 16, &w)?;
    /// assert_eq!(m.slice_rows(1..3)?.dequantize(), m.dequantize()[16..48]);
    /// # Ok::<(), ninfer_quant::Error>(())
    /// ```
    pub fn slice_rows(&self, range: Range<usize>) -> Result<Self> {
        let Range { start, end } = range;
        let refuse = |reason| Err(Error::Rows { format: self.format(), start, end, rows: self.rows(), reason });
        if start > end || end > self.rows() {
            return refuse("they are not in the matrix");
        }
        let cols = self.cols();
        let cut = |plane: &[u8], per_row: usize| plane[start * per_row..end * per_row].to_vec();
        let parts = match self.parts() {
            PackedParts::Plain { dtype, bytes } => {
                PackedParts::Plain { dtype: *dtype, bytes: cut(bytes, cols * dtype.size()) }
            }
            PackedParts::Fp8 { codes, scales } => PackedParts::Fp8 {
                codes: cut(codes, cols),
                scales: match scales {
                    Fp8ScaleVec::Tensor(s) => Fp8ScaleVec::Tensor(*s),
                    Fp8ScaleVec::Row(s) => Fp8ScaleVec::Row(s[start..end].to_vec()),
                    Fp8ScaleVec::Block(_) if start % FP8_BLOCK != 0 => {
                        return refuse("a slice of FP8 blocks starts at a multiple of 128");
                    }
                    Fp8ScaleVec::Block(s) => {
                        let blocks = cols.div_ceil(FP8_BLOCK);
                        let count = (end - start).div_ceil(FP8_BLOCK);
                        Fp8ScaleVec::Block(s[start / FP8_BLOCK * blocks..][..count * blocks].to_vec())
                    }
                },
            },
            PackedParts::Nvfp4 { codes, scales, global } => PackedParts::Nvfp4 {
                codes: cut(codes, cols / 2),
                scales: cut(scales, cols / NVFP4_GROUP),
                global: *global,
            },
            PackedParts::Group { format, base, high, scales } => {
                let groups = cols.next_multiple_of(GROUP_PAD) / format.group_size();
                PackedParts::Group {
                    format: *format,
                    base: cut(base, 32 * groups),
                    high: cut(high, format.high_bytes() * groups),
                    scales: cut(scales, 2 * groups),
                }
            }
        };
        Ok(Self::trusted(end - start, cols, parts))
    }

    /// Joins matrices of equal columns and format one below the other, without changing a weight.
    ///
    /// # Errors
    /// [`Error::Unequal`] if columns, formats, NVFP4 global scales or FP8 tensor scales differ
    /// ([`fp8::widen_to_rows`](crate::fp8::widen_to_rows) makes the last joinable); [`Error::Rows`] if a matrix with FP8
    /// block scales, other than the last, does not end at a block edge; [`Error::Length`] for an empty list.
    ///
    /// ```
    /// use ninfer_core::WeightFormat;
    /// use ninfer_quant::{PackedMatrix, encode};
    /// let (a, b) = (encode(WeightFormat::Fp8Row, 1, 2, &[1.0, 2.0])?, encode(WeightFormat::Bf16, 1, 2, &[1.0, 2.0])?);
    /// assert_eq!(PackedMatrix::concat_rows(&[&a, &a])?.rows(), 2);
    /// assert!(PackedMatrix::concat_rows(&[&a, &b]).is_err());
    /// # Ok::<(), ninfer_quant::Error>(())
    /// ```
    pub fn concat_rows(matrices: &[&Self]) -> Result<Self> {
        let Some((&first, rest)) = matrices.split_first() else {
            return Err(Error::Length { what: "list of matrices", expected: 1, got: 0 });
        };
        for (i, m) in rest.iter().enumerate() {
            check_joinable(i + 1, first, m)?;
        }
        let mut parts = first.parts().clone();
        let mut rows = first.rows();
        for m in rest {
            if matches!(parts, PackedParts::Fp8 { scales: Fp8ScaleVec::Block(_), .. }) && rows % FP8_BLOCK != 0 {
                let reason = "a matrix with FP8 blocks that is not the last must end at a multiple of 128";
                return Err(Error::Rows { format: first.format(), start: 0, end: rows, rows, reason });
            }
            append(&mut parts, m.parts());
            rows += m.rows();
        }
        Ok(Self::trusted(rows, first.cols(), parts))
    }
}

fn check_joinable(index: usize, a: &PackedMatrix, b: &PackedMatrix) -> Result<()> {
    let differ = |what, a: String, b: String| {
        if a == b { Ok(()) } else { Err(Error::Unequal { index, what, expected: a, got: b }) }
    };
    differ("number of columns", a.cols().to_string(), b.cols().to_string())?;
    differ("format", a.format().to_string(), b.format().to_string())?;
    match (a.parts(), b.parts()) {
        (PackedParts::Nvfp4 { global: x, .. }, PackedParts::Nvfp4 { global: y, .. }) => {
            differ("global scale", format!("{x:?}"), format!("{y:?}"))
        }
        (
            PackedParts::Fp8 { scales: Fp8ScaleVec::Tensor(x), .. },
            PackedParts::Fp8 { scales: Fp8ScaleVec::Tensor(y), .. },
        ) => differ("tensor scale", format!("{x:?}"), format!("{y:?}")),
        _ => Ok(()),
    }
}

/// Appends the planes of `b`, a matrix that was found joinable.
fn append(a: &mut PackedParts, b: &PackedParts) {
    match (a, b) {
        (PackedParts::Plain { bytes: a, .. }, PackedParts::Plain { bytes: b, .. }) => a.extend_from_slice(b),
        (PackedParts::Fp8 { codes: a, scales: s }, PackedParts::Fp8 { codes: b, scales: t }) => {
            a.extend_from_slice(b);
            match (s, t) {
                (Fp8ScaleVec::Row(s), Fp8ScaleVec::Row(t)) | (Fp8ScaleVec::Block(s), Fp8ScaleVec::Block(t)) => {
                    s.extend_from_slice(t);
                }
                _ => {}
            }
        }
        (PackedParts::Nvfp4 { codes: a, scales: s, .. }, PackedParts::Nvfp4 { codes: b, scales: t, .. }) => {
            a.extend_from_slice(b);
            s.extend_from_slice(t);
        }
        (
            PackedParts::Group { base: a, high: h, scales: s, .. },
            PackedParts::Group { base: b, high: i, scales: t, .. },
        ) => {
            a.extend_from_slice(b);
            h.extend_from_slice(i);
            s.extend_from_slice(t);
        }
        _ => {}
    }
}
