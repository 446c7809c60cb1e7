//! Configuration files of published shapes.

use ninfer_core::shape::{FfnShape, LayerKind, ModelShape};
use serde_json::{Value, json};

/// The `config.json` of a shape.
#[must_use]
pub fn shape_config(shape: &ModelShape) -> Value {
    let kinds = shape.layers.iter().map(|kind| match kind {
        LayerKind::LinearAttention => "linear_attention",
        LayerKind::FullAttention => "full_attention",
    });
    let mut config = json!({
        "model_type": "qwen3_5_text",
        "hidden_size": shape.hidden,
        "vocab_size": shape.vocab,
        "num_hidden_layers": shape.layers.len(),
        "layer_types": kinds.collect::<Vec<_>>(),
        "num_attention_heads": shape.attention.query_heads,
        "num_key_value_heads": shape.attention.kv_heads,
        "head_dim": shape.attention.head_dim,
        "linear_num_key_heads": shape.gdn.key_heads,
        "linear_num_value_heads": shape.gdn.value_heads,
        "linear_key_head_dim": shape.gdn.key_dim,
        "linear_value_head_dim": shape.gdn.value_dim,
        "linear_conv_kernel_dim": shape.gdn.conv_kernel,
        "rope_parameters": { "rope_theta": 1e7, "partial_rotary_factor": 0.25 },
        "tie_word_embeddings": shape.tied,
        "mtp_num_hidden_layers": usize::from(shape.mtp),
    });
    match shape.ffn {
        FfnShape::Dense { intermediate } => config["intermediate_size"] = json!(intermediate),
        FfnShape::Moe { experts, top_k, width, shared_width } => {
            config["model_type"] = json!("qwen3_5_moe_text");
            config["num_experts"] = json!(experts);
            config["num_experts_per_tok"] = json!(top_k);
            config["moe_intermediate_size"] = json!(width);
            config["shared_expert_intermediate_size"] = json!(shared_width);
        }
        _ => {}
    }
    config
}

#[cfg(test)]
mod tests {
    use ninfer_core::shape::{PUBLISHED, published};
    use ninfer_models::Config;

    use super::*;

    #[test]
    fn the_configuration_has_the_shape() {
        for name in PUBLISHED {
            let shape = published(name).unwrap();
            let read = Config::from_json_str(&shape_config(&shape).to_string()).unwrap();
            assert_eq!(read.shape(), shape, "{name}");
        }
    }
}
