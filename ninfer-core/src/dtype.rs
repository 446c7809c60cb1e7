//! Element types of buffers and stored tensors.

use std::fmt;

/// Element type of a buffer or of a stored tensor.
///
/// All multi-byte types are little endian.
///
/// ```
/// use ninfer_core::DType;
/// assert_eq!(DType::Bf16.size(), 2);
/// assert_eq!(DType::F8E4M3.to_string(), "F8_E4M3");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// 8-bit float, 4 exponent and 3 mantissa bits, no infinities (`e4m3fn`).
    F8E4M3,
    /// Unsigned bytes; also two packed 4-bit codes.
    U8,
    /// Signed bytes.
    I8,
    /// Signed 32-bit integers (positions, indices, page numbers; −1 means none).
    I32,
    /// Unsigned 32-bit integers (token ids; `u32::MAX` means none).
    U32,
    /// Signed 64-bit integers.
    I64,
}

impl DType {
    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::F8E4M3 | Self::U8 | Self::I8 => 1,
            Self::I64 => 8,
        }
    }

    /// The name used by the safetensors format.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::F8E4M3 => "F8_E4M3",
            Self::U8 => "U8",
            Self::I8 => "I8",
            Self::I32 => "I32",
            Self::U32 => "U32",
            Self::I64 => "I64",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
