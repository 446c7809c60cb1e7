//! From JSON to [`Config`].

use std::collections::BTreeSet;

use ninfer_core::DType;
use ninfer_core::shape::{GdnShape, LayerKind, MAX_DIM, ModelShape};
use serde_json::{Map, Value};

use super::section::Section;
use super::{Attention, Config, Ffn, GptqZeros, MAX_EXPERTS, MAX_LAYERS, OutputGate, Quantization, rotary};
use crate::{Error, Result};

const SUPPORTED: &str = "qwen3_5, qwen3_5_moe, qwen3_5_text, qwen3_5_moe_text";
const QUANTIZATIONS: &str =
    "compressed-tensors, modelopt, fp8 (blocks of 128), gptq (4 bits), awq (4 bits, gemm), ninfer (version 1)";
const DEFAULT_INTERVAL: usize = 4;
const DEFAULT_CONV_KERNEL: usize = 4;
const DEFAULT_EPS: f64 = 1e-6;
const DEFAULT_POSITIONS: usize = 32_768;

pub(super) fn config(value: &Value) -> Result<Config> {
    let empty = Map::new();
    let top = value.as_object().ok_or_else(|| Error::ConfigValue {
        key: "config".to_owned(),
        got: "no object".to_owned(),
        legal: "an object".to_owned(),
    })?;
    let wrapper = Section::new("", top);
    let text_map = wrapper.object("text_config")?;
    let (text, wrapper) = match text_map {
        Some(map) => (Section::new("text_config", map), wrapper),
        None => (wrapper, Section::new("", &empty)),
    };
    let moe = family(top, text_map)?;
    refuse_variants(text)?;

    let head_dim = text.dim("head_dim")?;
    let max_positions = text.size_to("max_position_embeddings", MAX_DIM)?.unwrap_or(DEFAULT_POSITIONS);
    let rope = rotary::read(text, head_dim, max_positions)?;
    let attention = Attention {
        heads: text.dim("num_attention_heads")?,
        kv_heads: text.dim("num_key_value_heads")?,
        head_dim,
        rotary_dim: rope.rotary_dim,
        rope,
    };
    let gdn = GdnShape {
        key_heads: text.dim("linear_num_key_heads")?,
        value_heads: text.dim("linear_num_value_heads")?,
        key_dim: text.dim("linear_key_head_dim")?,
        value_dim: text.dim("linear_value_head_dim")?,
        conv_kernel: text.size_to("linear_conv_kernel_dim", MAX_DIM)?.unwrap_or(DEFAULT_CONV_KERNEL),
    };
    if !attention.heads.is_multiple_of(attention.kv_heads) {
        let legal = format!("multiples of num_key_value_heads, {}", attention.kv_heads);
        return Err(text.illegal("num_attention_heads", legal));
    }
    if !gdn.value_heads.is_multiple_of(gdn.key_heads) {
        let legal = format!("multiples of linear_num_key_heads, {}", gdn.key_heads);
        return Err(text.illegal("linear_num_value_heads", legal));
    }
    let eps = text.number("rms_norm_eps")?.unwrap_or(DEFAULT_EPS);
    if eps <= 0.0 || eps >= 1.0 {
        return Err(text.illegal("rms_norm_eps", "numbers between 0 and 1"));
    }
    let tied = match wrapper.bool("tie_word_embeddings")? {
        Some(tied) => tied,
        None => text.bool("tie_word_embeddings")?.unwrap_or(false),
    };
    let config = Config {
        hidden: text.dim("hidden_size")?,
        vocab: text.dim("vocab_size")?,
        eps,
        layers: layers(text)?,
        attention,
        gdn,
        ffn: if moe { moe_ffn(text)? } else { Ffn::Dense { intermediate: text.dim("intermediate_size")? } },
        tied,
        mtp_layers: mtp_layers(text)?,
        output_gate: output_gate(text)?,
        max_positions,
        eos: ids(wrapper)?.into_iter().chain(ids(text)?).collect::<BTreeSet<_>>().into_iter().collect(),
        bos: token(text, "bos_token_id")?,
        pad: token(text, "pad_token_id")?,
        dtype: dtype(text)?,
        quantization: match quantization(wrapper)? {
            Some(q) => Some(q),
            None => quantization(text)?,
        },
    };
    config.shape().validate()?;
    Ok(config)
}

/// Whether the model is a mixture of experts; refuses everything outside the family.
fn family(top: &Map<String, Value>, text: Option<&Map<String, Value>>) -> Result<bool> {
    let kind = |map: &Map<String, Value>, path| -> Result<Option<String>> {
        Ok(Section::new(path, map).string("model_type")?.map(str::to_owned))
    };
    let refuse = |got: &str| Error::UnsupportedModel { got: got.to_owned(), supported: SUPPORTED };
    let outer = kind(top, "")?.ok_or_else(|| Section::new("", top).missing("model_type"))?;
    let moe = match outer.as_str() {
        "qwen3_5" | "qwen3_5_text" => false,
        "qwen3_5_moe" | "qwen3_5_moe_text" => true,
        _ => return Err(refuse(&outer)),
    };
    if let Some(inner) = text.map_or(Ok(None), |t| kind(t, "text_config"))? {
        let expected = if moe { "qwen3_5_moe_text" } else { "qwen3_5_text" };
        if inner != expected {
            return Err(refuse(&format!("{outer} with a text model {inner}")));
        }
    }
    Ok(moe)
}

/// Refuses keys that would change the computation in a way that is not implemented.
fn refuse_variants(text: Section<'_>) -> Result<()> {
    if text.bool("attention_bias")? == Some(true) {
        return Err(text.illegal("attention_bias", "false: projections have no bias"));
    }
    if text.bool("attn_output_gate")? == Some(false) {
        return Err(text.illegal("attn_output_gate", "true: attention has an output gate"));
    }
    if !matches!(text.string("hidden_act")?, None | Some("silu" | "swish")) {
        return Err(text.illegal("hidden_act", "\"silu\""));
    }
    if text.array("mlp_only_layers")?.is_some_and(|list| !list.is_empty()) {
        return Err(text.illegal("mlp_only_layers", "[]: every layer of a MoE model has experts"));
    }
    if !matches!(text.integer("decoder_sparse_step")?, None | Some(1)) {
        return Err(text.illegal("decoder_sparse_step", "1: every layer of a MoE model has experts"));
    }
    if text.bool("mtp_use_dedicated_embeddings")? == Some(true) {
        return Err(text.illegal("mtp_use_dedicated_embeddings", "false: MTP shares embedding and head"));
    }
    Ok(())
}

fn layers(text: Section<'_>) -> Result<Vec<LayerKind>> {
    let count = text.size_to("num_hidden_layers", MAX_LAYERS)?.ok_or_else(|| text.missing("num_hidden_layers"))?;
    let Some(list) = text.array("layer_types")? else {
        let interval = text.size_to("full_attention_interval", MAX_DIM)?.unwrap_or(DEFAULT_INTERVAL);
        return Ok(ModelShape::layer_pattern(count, interval));
    };
    if list.len() != count {
        return Err(text.illegal("layer_types", format!("{count} entries, as num_hidden_layers says")));
    }
    let kind = |value: &Value| match value.as_str() {
        Some("linear_attention") => Ok(LayerKind::LinearAttention),
        Some("full_attention") => Ok(LayerKind::FullAttention),
        _ => Err(Error::ConfigValue {
            key: text.name("layer_types"),
            got: value.to_string().chars().take(80).collect(),
            legal: "\"linear_attention\", \"full_attention\"".to_owned(),
        }),
    };
    list.iter().map(kind).collect()
}

fn moe_ffn(text: Section<'_>) -> Result<Ffn> {
    let experts = text.size_to("num_experts", MAX_EXPERTS)?.ok_or_else(|| text.missing("num_experts"))?;
    Ok(Ffn::Moe {
        experts,
        top_k: text.size_to("num_experts_per_tok", experts)?.ok_or_else(|| text.missing("num_experts_per_tok"))?,
        width: text.dim("moe_intermediate_size")?,
        shared_width: text.dim("shared_expert_intermediate_size")?,
        renormalise: text.bool("norm_topk_prob")?.unwrap_or(true),
    })
}

fn mtp_layers(text: Section<'_>) -> Result<usize> {
    match text.integer("mtp_num_hidden_layers")? {
        None | Some(0) => Ok(0),
        Some(1) => Ok(1),
        Some(_) => Err(text.illegal("mtp_num_hidden_layers", "0, 1")),
    }
}

fn output_gate(text: Section<'_>) -> Result<OutputGate> {
    match text.string("output_gate_type")? {
        None | Some("silu" | "swish") => Ok(OutputGate::Silu),
        Some("sigmoid") => Ok(OutputGate::Sigmoid),
        Some(_) => Err(text.illegal("output_gate_type", "\"silu\", \"swish\", \"sigmoid\"")),
    }
}

/// The end-of-text ids of a section: one, a list, or none.
fn ids(section: Section<'_>) -> Result<Vec<u32>> {
    const KEY: &str = "eos_token_id";
    let illegal = || section.illegal(KEY, "a token id or a list of token ids");
    let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok()).ok_or_else(illegal);
    match section.get(KEY) {
        None => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(id).collect(),
        Some(value) => Ok(vec![id(value)?]),
    }
}

fn token(text: Section<'_>, key: &str) -> Result<Option<u32>> {
    let id = |n| u32::try_from(n).map_err(|_| text.illegal(key, "a token id"));
    text.integer(key)?.map(id).transpose()
}

fn dtype(text: Section<'_>) -> Result<Option<DType>> {
    let name = match text.string("dtype")? {
        None => text.string("torch_dtype")?,
        name => name,
    };
    Ok(match name {
        Some("bfloat16") => Some(DType::Bf16),
        Some("float16") => Some(DType::F16),
        Some("float32") => Some(DType::F32),
        _ => None,
    })
}

fn quantization(section: Section<'_>) -> Result<Option<Quantization>> {
    let Some(map) = section.object("quantization_config")? else { return Ok(None) };
    let path = section.name("quantization_config");
    let keys = Section::new(&path, map);
    let method = keys.string("quant_method")?.ok_or_else(|| keys.missing("quant_method"))?;
    let refuse = |detail: String| Error::UnsupportedQuantization { method: detail, supported: QUANTIZATIONS };
    let bits = || match keys.integer("bits")? {
        None | Some(4) => Ok(()),
        Some(bits) => Err(refuse(format!("{method} with {bits} bits"))),
    };
    Ok(Some(match method {
        "compressed-tensors" => Quantization::CompressedTensors,
        "modelopt" => Quantization::ModelOpt,
        "fp8" => {
            let block = keys.array("weight_block_size")?;
            if block.is_some_and(|b| b.iter().any(|n| n.as_u64() != Some(128)) || b.len() != 2) {
                return Err(keys.illegal("weight_block_size", "[128, 128]"));
            }
            Quantization::Fp8Block
        }
        "gptq" => {
            bits()?;
            match keys.string("checkpoint_format")? {
                None | Some("gptq") => Quantization::Gptq(GptqZeros::MinusOne),
                Some("gptq_v2") => Quantization::Gptq(GptqZeros::Exact),
                Some(other) => return Err(refuse(format!("gptq with checkpoint_format {other:?}"))),
            }
        }
        "awq" => {
            bits()?;
            match keys.string("version")? {
                Some(v) if !v.eq_ignore_ascii_case("gemm") => {
                    return Err(refuse(format!("awq version {v:?}")));
                }
                _ => Quantization::Awq,
            }
        }
        "ninfer" => match keys.integer("version")? {
            Some(1) => Quantization::Ninfer,
            version => {
                let version = version.map_or_else(|| "none".to_owned(), |v| v.to_string());
                return Err(refuse(format!("ninfer, version {version}")));
            }
        },
        other => return Err(refuse(format!("{other:?}"))),
    }))
}
