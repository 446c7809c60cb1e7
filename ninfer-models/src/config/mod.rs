//! `config.json` as typed values.
//!
//! Two layouts are read: the wrapper of the multimodal releases, whose text model is described by `text_config`, and the
//! text-only export, whose keys stand at top level. Keys that do not change what the text model computes (vision, dropout,
//! initialisation, caching) are ignored; keys that would change it in a way that is not implemented are refused.

mod read;
mod rotary;
mod section;
#[cfg(test)]
mod tests;

use std::path::Path;

use ninfer_core::DType;
pub use ninfer_core::ops::OutputGate;
use ninfer_core::shape::{AttentionShape, FfnShape, ModelShape};
pub use ninfer_core::shape::{GdnShape, LayerKind};
pub use ninfer_quant::checkpoint::GptqZeros;

use crate::checkpoint::read_text;
use crate::rope::Rope;
use crate::{Error, Result};

/// Largest `config.json` that is read, in bytes.
pub const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Most layers a configuration may ask for.
pub const MAX_LAYERS: usize = 1024;
/// Most experts a layer may have.
pub const MAX_EXPERTS: usize = 4096;

/// Full-attention layers.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Attention {
    /// Query heads Hq, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key/value heads Hkv.
    pub kv_heads: usize,
    /// Features D of a head; not `hidden / heads`.
    pub head_dim: usize,
    /// Rotated features of a head, the first ones.
    pub rotary_dim: usize,
    /// Frequencies of the rotation.
    pub rope: Rope,
}

/// The feed-forward network of every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ffn {
    /// SwiGLU.
    #[non_exhaustive]
    Dense {
        /// Width I.
        intermediate: usize,
    },
    /// Routed experts and one shared expert, all SwiGLU.
    #[non_exhaustive]
    Moe {
        /// Experts E.
        experts: usize,
        /// Experts a token is sent to.
        top_k: usize,
        /// Width M of an expert.
        width: usize,
        /// Width S of the shared expert.
        shared_width: usize,
        /// Whether the weights of the chosen experts are divided by their sum (`norm_topk_prob`, true where absent).
        renormalise: bool,
    },
}

/// How `quantization_config` says the weights are stored.
///
/// Formats are decided by the stored tensors; this only carries what tensors do not show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Quantization {
    /// "compressed-tensors".
    CompressedTensors,
    /// "modelopt".
    ModelOpt,
    /// "fp8" with blocks of 128×128.
    Fp8Block,
    /// "gptq", 4 bits, with its zero-point convention (`checkpoint_format` "gptq" or "gptq_v2").
    Gptq(GptqZeros),
    /// "awq", 4 bits, version "gemm".
    Awq,
    /// "ninfer", version 1: modules of any of these kinds but GPTQ, and groupwise integers, side by side.
    Ninfer,
}

/// The text model a `config.json` describes.
///
/// Every value was checked: sizes are at least 1 and small enough for the arithmetic of this workspace, heads divide.
///
/// ```
/// use ninfer_models::config::{Config, LayerKind};
///
/// let config = Config::from_json_str(r#"{
///     "model_type": "qwen3_5_text", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 512,
///     "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
///     "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
///     "intermediate_size": 96, "rope_parameters": {"rope_theta": 1e7}, "tie_word_embeddings": true
/// }"#)?;
/// assert_eq!(config.layers[3], LayerKind::FullAttention);
/// assert_eq!(config.attention.rotary_dim, 8);
/// assert!(config.tied);
/// # Ok::<(), ninfer_models::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// Width H of the residual stream.
    pub hidden: usize,
    /// Rows V of embedding and head.
    pub vocab: usize,
    /// Added to the mean square in every norm.
    pub eps: f64,
    /// The layers in order; the MTP layer is not among them.
    pub layers: Vec<LayerKind>,
    /// Full-attention layers.
    pub attention: Attention,
    /// Gated DeltaNet layers.
    pub gdn: GdnShape,
    /// Feed-forward network of every layer, the MTP layer included.
    pub ffn: Ffn,
    /// Whether the head is declared to be the embedding; a stored head is used all the same.
    pub tied: bool,
    /// Declared layers of the MTP block, 0 or 1.
    pub mtp_layers: usize,
    /// Activation of the output gate of the Gated DeltaNet.
    pub output_gate: OutputGate,
    /// Positions the model is declared for.
    pub max_positions: usize,
    /// Declared end-of-text ids, wrapper and text section together. Chat models stop on more: see their generation
    /// configuration.
    pub eos: Vec<u32>,
    /// Declared beginning-of-text id.
    pub bos: Option<u32>,
    /// Declared padding id.
    pub pad: Option<u32>,
    /// Declared element type; the stored tensors decide.
    pub dtype: Option<DType>,
    /// Declared quantisation; the stored tensors decide.
    pub quantization: Option<Quantization>,
}

impl Config {
    /// Reads `config.json` in a folder.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::FileTooLarge`] if the file cannot be read, and those of [`Config::from_json_str`].
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Self> {
        let file = dir.as_ref().join("config.json");
        let text = read_text(&file, MAX_CONFIG_BYTES)?;
        Self::parse(&text, &file)
    }

    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// [`Error::Json`] if it does not parse, [`Error::UnsupportedModel`] for another family,
    /// [`Error::ConfigMissing`] and [`Error::ConfigValue`] naming the key, [`Error::UnsupportedQuantization`].
    pub fn from_json_str(text: &str) -> Result<Self> {
        Self::parse(text, Path::new("config.json"))
    }

    fn parse(text: &str, file: &Path) -> Result<Self> {
        let value: serde_json::Value =
            serde_json::from_str(text).map_err(|e| Error::Json { file: file.to_owned(), message: e.to_string() })?;
        read::config(&value)
    }

    /// Every dimension that decides parameters, state and traffic.
    ///
    /// [`ModelShape::mtp`] is what the configuration declares; what is stored can differ.
    #[must_use]
    pub fn shape(&self) -> ModelShape {
        let a = &self.attention;
        ModelShape {
            hidden: self.hidden,
            layers: self.layers.clone(),
            attention: AttentionShape { query_heads: a.heads, kv_heads: a.kv_heads, head_dim: a.head_dim },
            gdn: self.gdn,
            ffn: match self.ffn {
                Ffn::Dense { intermediate } => FfnShape::Dense { intermediate },
                Ffn::Moe { experts, top_k, width, shared_width, .. } => {
                    FfnShape::Moe { experts, top_k, width, shared_width }
                }
            },
            vocab: self.vocab,
            tied: self.tied,
            mtp: self.mtp_layers > 0,
        }
    }
}
