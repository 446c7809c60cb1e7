//! Fused expert tensors, cut into one matrix per expert.

use ninfer_core::{DType, PackedData, PackedRef};

use crate::{Error, Result};

/// A fused tensor `[experts, rows, cols]` of plain elements, borrowed.
///
/// `experts.gate_up_proj` is `[experts, 2 · width, hidden]`, gate rows before up rows; `experts.down_proj` is
/// `[experts, hidden, width]`. Each expert's gate, up and down is a matrix of its own, with scales of its own once it is
/// quantised: cut first, then convert.
///
/// ```
/// use ninfer_core::DType;
/// use ninfer_quant::FusedExperts;
/// // Two experts, width 1, hidden 2.
/// let w: Vec<u8> = (0..8).flat_map(|i| (i as f32).to_le_bytes()).collect();
/// let fused = FusedExperts::new("mlp.experts.gate_up_proj", DType::F32, &[2, 2, 2], &w)?;
/// let (gate, up) = fused.gate_up(1)?;
/// assert_eq!(ninfer_quant::dequantize_ref(&gate)?, [4.0, 5.0]);
/// assert_eq!(ninfer_quant::dequantize_ref(&up)?, [6.0, 7.0]);
/// # Ok::<(), ninfer_quant::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct FusedExperts<'a> {
    dtype: DType,
    experts: usize,
    rows: usize,
    cols: usize,
    bytes: &'a [u8],
}

impl<'a> FusedExperts<'a> {
    /// Checks dtype, shape and length of the tensor called `tensor`.
    ///
    /// # Errors
    /// [`Error::TensorDType`], [`Error::TensorShape`], [`Error::TensorBytes`].
    pub fn new(tensor: &str, dtype: DType, shape: &[usize], bytes: &'a [u8]) -> Result<Self> {
        if !matches!(dtype, DType::F32 | DType::F16 | DType::Bf16) {
            return Err(Error::TensorDType { tensor: tensor.to_owned(), expected: "F32, F16 or BF16", got: dtype });
        }
        let &[experts, rows, cols] = shape else {
            let expected = "[experts, rows, columns]".to_owned();
            return Err(Error::TensorShape { tensor: tensor.to_owned(), expected, got: shape.to_vec() });
        };
        let expected = shape.iter().try_fold(dtype.size(), |n, &d| n.checked_mul(d)).unwrap_or(usize::MAX);
        if bytes.len() != expected {
            return Err(Error::TensorBytes { tensor: tensor.to_owned(), expected, got: bytes.len() });
        }
        Ok(Self { dtype, experts, rows, cols, bytes })
    }

    /// Number of experts.
    #[must_use]
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// The whole matrix of one expert: `experts.down_proj`, or gate above up.
    ///
    /// # Errors
    /// [`Error::Expert`] if there is no such expert.
    pub fn matrix(&self, expert: usize) -> Result<PackedRef<'a>> {
        self.cut(expert, 0, self.rows)
    }

    /// The gate and up matrices of one expert of `experts.gate_up_proj`.
    ///
    /// # Errors
    /// [`Error::Expert`] if there is no such expert, or its rows do not halve.
    pub fn gate_up(&self, expert: usize) -> Result<(PackedRef<'a>, PackedRef<'a>)> {
        if !self.rows.is_multiple_of(2) {
            return Err(Error::Expert { expert, experts: self.experts, rows: self.rows });
        }
        let half = self.rows / 2;
        Ok((self.cut(expert, 0, half)?, self.cut(expert, half, half)?))
    }

    fn cut(&self, expert: usize, start: usize, rows: usize) -> Result<PackedRef<'a>> {
        if expert >= self.experts {
            return Err(Error::Expert { expert, experts: self.experts, rows: self.rows });
        }
        let row = self.cols * self.dtype.size();
        let from = (expert * self.rows + start) * row;
        let data = PackedData::Plain { dtype: self.dtype, bytes: &self.bytes[from..from + rows * row] };
        Ok(PackedRef::new(rows, self.cols, data)?)
    }
}
