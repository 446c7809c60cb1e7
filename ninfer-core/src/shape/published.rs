//! Published sizes.

use super::{AttentionShape, FfnShape, GdnShape, ModelShape};
use crate::{Error, Result};

/// Names [`published`] knows, smallest first.
pub const PUBLISHED: [&str; 8] = ["0.8b", "2b", "4b", "9b", "27b", "35b-a3b", "122b-a10b", "397b-a17b"];

/// Rows of both vocabulary matrices in every published size.
const VOCAB: usize = 248_320;

/// The shape of a published size.
///
/// Versions 3.5, 3.6 and 3.8 of a size have the same shape, so the name is the size, in any case and with or without the
/// family in front: `27b`, `3.6-27B`, `Qwen3.5-35B-A3B`. Source of the dimensions: the configuration files of the
/// releases.
///
/// # Errors
/// [`Error::OutOfRange`] listing the names.
pub fn published(name: &str) -> Result<ModelShape> {
    let lower = name.to_ascii_lowercase();
    let size = PUBLISHED.into_iter().find(|&n| {
        lower == n || lower.strip_suffix(n).is_some_and(|family| family.ends_with('-') || family.ends_with('/'))
    });
    let dense = |intermediate| FfnShape::Dense { intermediate };
    let moe = |experts, top_k, width| FfnShape::Moe { experts, top_k, width, shared_width: width };
    // hidden, layers, FFN, query heads, KV heads, GDN value heads, tied
    let (hidden, layers, ffn, query_heads, kv_heads, value_heads, tied) = match size {
        Some("0.8b") => (1024, 24, dense(3584), 8, 2, 16, true),
        Some("2b") => (2048, 24, dense(6144), 8, 2, 16, true),
        Some("4b") => (2560, 32, dense(9216), 16, 4, 32, true),
        Some("9b") => (4096, 32, dense(12288), 16, 4, 32, false),
        Some("27b") => (5120, 64, dense(17408), 24, 4, 48, false),
        Some("35b-a3b") => (2048, 40, moe(256, 8, 512), 16, 2, 32, false),
        Some("122b-a10b") => (3072, 48, moe(256, 8, 1024), 32, 2, 64, false),
        Some("397b-a17b") => (4096, 60, moe(512, 10, 1024), 32, 2, 64, false),
        _ => {
            return Err(Error::OutOfRange {
                what: "published size",
                got: name.to_owned(),
                legal: PUBLISHED.join(", "),
            });
        }
    };
    Ok(ModelShape {
        hidden,
        layers: ModelShape::layer_pattern(layers, 4),
        attention: AttentionShape { query_heads, kv_heads, head_dim: 256 },
        gdn: GdnShape { key_heads: 16, value_heads, key_dim: 128, value_dim: 128, conv_kernel: 4 },
        ffn,
        vocab: VOCAB,
        tied,
        mtp: true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn family_and_case_do_not_matter() {
        let plain = published("35b-a3b").unwrap();
        for name in ["35B-A3B", "Qwen3.6-35B-A3B", "Qwen/Qwen3.5-35B-A3B", "3.5-35b-a3b"] {
            assert_eq!(published(name).unwrap(), plain, "{name}");
        }
        assert_eq!(published("Qwen3.5-2B").unwrap().hidden, 2048);
    }

    #[test]
    fn unknown_names_list_the_known_ones() {
        for name in ["", "b", "5b", "x27b", "1122b-a10b", "27b-fp8"] {
            let error = published(name).unwrap_err().to_string();
            assert!(error.contains("27b") && error.contains("397b-a17b"), "{error}");
        }
    }
}
