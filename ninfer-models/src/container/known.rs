//! Models that a container names and does not describe.

use ninfer_core::shape::{FfnShape, LayerKind, published};
use serde_json::json;

use crate::{Config, Result};

/// Model identities whose configuration is known.
pub(super) const MODELS: [&str; 3] = ["qwen3.6-27b", "qwen3.6-35b-a3b", "qwen3.8-27b"];

/// The configuration of a model identity, if it is one of [`MODELS`].
pub(super) fn config(model_id: &str) -> Result<Option<Config>> {
    if !MODELS.contains(&model_id) {
        return Ok(None);
    }
    let shape = published(model_id)?;
    let kinds = shape.layers.iter().map(|k| match k {
        LayerKind::LinearAttention => "linear_attention",
        LayerKind::FullAttention => "full_attention",
    });
    let mut text = json!({
        "model_type": "qwen3_5_text",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers.len(),
        "layer_types": kinds.collect::<Vec<_>>(),
        "vocab_size": shape.vocab,
        "num_attention_heads": shape.attention.query_heads,
        "num_key_value_heads": shape.attention.kv_heads,
        "head_dim": shape.attention.head_dim,
        "linear_num_key_heads": shape.gdn.key_heads,
        "linear_num_value_heads": shape.gdn.value_heads,
        "linear_key_head_dim": shape.gdn.key_dim,
        "linear_value_head_dim": shape.gdn.value_dim,
        "linear_conv_kernel_dim": shape.gdn.conv_kernel,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            "mrope_interleaved": true, "mrope_section": [11, 11, 10],
        },
        "tie_word_embeddings": shape.tied,
        "mtp_num_hidden_layers": 1,
        "eos_token_id": 248_044,
    });
    let mut put = |key: &str, value: serde_json::Value| text[key] = value;
    match shape.ffn {
        FfnShape::Dense { intermediate } => put("intermediate_size", intermediate.into()),
        FfnShape::Moe { experts, top_k, width, shared_width } => {
            put("model_type", "qwen3_5_moe_text".into());
            put("num_experts", experts.into());
            put("num_experts_per_tok", top_k.into());
            put("moe_intermediate_size", width.into());
            put("shared_expert_intermediate_size", shared_width.into());
        }
        _ => return Ok(None),
    }
    Config::from_json_str(&text.to_string()).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_models_have_the_published_shapes() {
        for (id, layers, hidden) in
            [("qwen3.6-27b", 64, 5120), ("qwen3.6-35b-a3b", 40, 2048), ("qwen3.8-27b", 64, 5120)]
        {
            let config = config(id).unwrap().unwrap();
            assert_eq!((config.layers.len(), config.hidden, config.attention.rotary_dim), (layers, hidden, 64));
            assert_eq!(config.shape(), published(id).unwrap());
        }
        assert_eq!(config("qwen3.6-27B").unwrap(), None);
        assert_eq!(config("").unwrap(), None);
    }
}
