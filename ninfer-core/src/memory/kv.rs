//! Storage of the KV cache.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::DType;
use crate::shape::{ModelShape, product};

/// Columns that share a scale in [`KvFormat::Int8G64`].
pub const KV_GROUP: usize = 64;

/// How keys (after norm and rotary) and values are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum KvFormat {
    /// IEEE binary32.
    F32,
    /// bfloat16.
    #[default]
    Bf16,
    /// Signed bytes with one f16 scale per 64 features.
    Int8G64,
    /// E4M3 codes with one f16 scale per head and token.
    Fp8,
}

impl KvFormat {
    /// The format whose pages have this element type.
    ///
    /// ```
    /// use ninfer_core::{DType, memory::KvFormat};
    /// assert_eq!(KvFormat::of(DType::I8), Some(KvFormat::Int8G64));
    /// ```
    #[must_use]
    pub const fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::F32),
            DType::Bf16 => Some(Self::Bf16),
            DType::I8 => Some(Self::Int8G64),
            DType::F8E4M3 => Some(Self::Fp8),
            _ => None,
        }
    }

    /// Element type of the pages.
    #[must_use]
    pub const fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::Bf16,
            Self::Int8G64 => DType::I8,
            Self::Fp8 => DType::F8E4M3,
        }
    }

    /// Scales of one vector of `head_dim` features: 0 for pages of elements.
    #[must_use]
    pub const fn scale_groups(self, head_dim: usize) -> usize {
        match self {
            Self::F32 | Self::Bf16 => 0,
            Self::Int8G64 => head_dim.div_ceil(KV_GROUP),
            Self::Fp8 => 1,
        }
    }

    /// Bytes of the key and the value of one token in one KV head of `head_dim` features.
    ///
    /// f32 8·D, BF16 4·D, INT8 2·(D + 2·⌈D/64⌉), FP8 2·(D + 2): 2048, 1024, 528 and 516 at D = 256.
    ///
    /// ```
    /// use ninfer_core::memory::KvFormat;
    /// assert_eq!(KvFormat::Int8G64.head_bytes(256), 528);
    /// ```
    #[must_use]
    pub const fn head_bytes(self, head_dim: usize) -> u64 {
        let codes = (head_dim as u64).saturating_mul(self.dtype().size() as u64);
        codes.saturating_add(2 * self.scale_groups(head_dim) as u64).saturating_mul(2)
    }

    /// Bytes of one token in all full-attention layers, the MTP layer not counted.
    #[must_use]
    pub fn bytes_per_token(self, shape: &ModelShape) -> u64 {
        product([shape.full_layers(), shape.attention.kv_heads])
            .saturating_mul(self.head_bytes(shape.attention.head_dim))
    }

    /// Bytes of one token in the MTP layer; 0 for a model without one.
    #[must_use]
    pub fn mtp_bytes_per_token(self, shape: &ModelShape) -> u64 {
        if !shape.mtp {
            return 0;
        }
        product([shape.attention.kv_heads]).saturating_mul(self.head_bytes(shape.attention.head_dim))
    }

    /// Short lower-case name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8G64 => "int8-g64",
            Self::Fp8 => "fp8",
        }
    }
}

impl fmt::Display for KvFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::published;

    #[test]
    fn head_bytes_at_256() {
        let all = [KvFormat::F32, KvFormat::Bf16, KvFormat::Int8G64, KvFormat::Fp8];
        assert_eq!(all.map(|k| k.head_bytes(256)), [2048, 1024, 528, 516]);
        assert_eq!(KvFormat::Int8G64.head_bytes(65), 2 * (65 + 4));
        for k in all {
            assert!(k.head_bytes(usize::MAX) > 0);
            assert_eq!(KvFormat::of(k.dtype()), Some(k));
        }
    }

    #[test]
    fn page_payload_is_that_of_the_engine() {
        // 64 tokens, all layers: 27B 2.0625 MiB in INT8 and 4 MiB in BF16; 35B-A3B 0.6445 and 1.25 MiB.
        let dense = published("27b").unwrap();
        assert_eq!(64 * KvFormat::Int8G64.bytes_per_token(&dense), 33 << 16);
        assert_eq!(64 * KvFormat::Bf16.bytes_per_token(&dense), 4 << 20);
        let moe = published("35b-a3b").unwrap();
        assert_eq!(64 * KvFormat::Int8G64.bytes_per_token(&moe), 675_840);
        assert_eq!(64 * KvFormat::Bf16.bytes_per_token(&moe), 5 << 18);
        assert_eq!(KvFormat::Bf16.mtp_bytes_per_token(&moe), 2048);
    }
}
