use serde_json::{Value, json};

use super::*;
use crate::rope::RopeScaling;

fn text() -> Value {
    json!({
        "model_type": "qwen3_5_text", "hidden_size": 5120, "num_hidden_layers": 64, "vocab_size": 248_320,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "hidden_act": "silu",
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "intermediate_size": 17_408,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 262_144, "attention_bias": false, "attn_output_gate": true,
        "full_attention_interval": 4, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false,
        "eos_token_id": 248_044, "bos_token_id": null, "dtype": "bfloat16", "mamba_ssm_dtype": "float32",
        "output_gate_type": "swish",
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10], "mrope_interleaved": true
        },
    })
}

fn moe_text() -> Value {
    let mut t = text();
    set(&mut t, "model_type", json!("qwen3_5_moe_text"));
    for (key, value) in [
        ("num_experts", 256),
        ("num_experts_per_tok", 8),
        ("moe_intermediate_size", 512),
        ("shared_expert_intermediate_size", 512),
    ] {
        set(&mut t, key, json!(value));
    }
    t
}

fn wrap(kind: &str, text: Value) -> Value {
    json!({"model_type": kind, "text_config": text, "tie_word_embeddings": false, "vision_config": {"depth": 27}})
}

fn set(object: &mut Value, key: &str, value: Value) {
    object.as_object_mut().unwrap().insert(key.to_owned(), value);
}

fn unset(object: &mut Value, key: &str) {
    object.as_object_mut().unwrap().remove(key);
}

fn read(value: &Value) -> Result<Config> {
    Config::from_json_str(&value.to_string())
}

fn with(key: &str, value: Value) -> Result<Config> {
    let mut t = text();
    set(&mut t, key, value);
    read(&wrap("qwen3_5", t))
}

fn with_rope(rope: Value) -> Result<Config> {
    with("rope_parameters", rope)
}

/// The key that a refusal names.
fn refused(result: Result<Config>) -> String {
    match result.unwrap_err() {
        Error::ConfigValue { key, .. } | Error::ConfigMissing { key } => key,
        other => panic!("{other}"),
    }
}

#[test]
fn a_wrapper_config_is_the_published_shape() {
    let c = read(&wrap("qwen3_5", text())).unwrap();
    assert_eq!(c.shape(), ninfer_core::shape::published("27b").unwrap());
    assert_eq!((c.attention.rotary_dim, c.attention.rope), (64, Rope::new(1e7, 64)));
    assert_eq!((c.eps, c.max_positions, c.output_gate), (1e-6, 262_144, OutputGate::Silu));
    assert_eq!((c.eos.as_slice(), c.bos, c.dtype), (&[248_044][..], None, Some(DType::Bf16)));
    assert_eq!((c.mtp_layers, c.quantization), (1, None));
}

#[test]
fn a_text_only_config_is_the_same_model() {
    let mut t = text();
    set(&mut t, "tie_word_embeddings", json!(false));
    assert_eq!(read(&t).unwrap(), read(&wrap("qwen3_5", text())).unwrap());
}

#[test]
fn moe_renormalises_unless_told_otherwise() {
    let mut t = moe_text();
    unset(&mut t, "intermediate_size");
    let c = read(&wrap("qwen3_5_moe", t.clone())).unwrap();
    assert_eq!(c.ffn, Ffn::Moe { experts: 256, top_k: 8, width: 512, shared_width: 512, renormalise: true });
    set(&mut t, "norm_topk_prob", json!(false));
    assert!(matches!(read(&t).unwrap().ffn, Ffn::Moe { renormalise: false, .. }));
    set(&mut t, "num_experts_per_tok", json!(257));
    assert_eq!(refused(read(&t)), "num_experts_per_tok");
    unset(&mut t, "num_experts");
    assert_eq!(refused(read(&t)), "num_experts");
}

#[test]
fn layers_come_from_the_list_or_the_interval() {
    let mut t = text();
    set(&mut t, "num_hidden_layers", json!(5));
    unset(&mut t, "full_attention_interval");
    let by_default = read(&t).unwrap();
    assert_eq!(by_default.layers[3], LayerKind::FullAttention);
    assert_eq!(by_default.shape().full_layers(), 1);
    set(&mut t, "full_attention_interval", json!(2));
    assert_eq!(read(&t).unwrap().shape().full_layers(), 2);
    set(&mut t, "layer_types", json!(["full_attention", "linear_attention", "linear_attention", "full_attention"]));
    assert_eq!(refused(read(&t)), "layer_types");
    set(&mut t, "num_hidden_layers", json!(4));
    assert_eq!(read(&t).unwrap().layers[0], LayerKind::FullAttention);
    set(&mut t, "layer_types", json!(["sliding_attention", 1, 2, 3]));
    assert_eq!(refused(read(&t)), "layer_types");
}

#[test]
fn the_wrapper_decides_about_tying() {
    let tied = |outer: Value, inner: Value| {
        let mut t = text();
        set(&mut t, "tie_word_embeddings", inner);
        let mut w = wrap("qwen3_5", t);
        set(&mut w, "tie_word_embeddings", outer);
        read(&w).unwrap().tied
    };
    assert!(tied(json!(true), json!(false)));
    assert!(!tied(json!(false), json!(true)));
    assert!(tied(Value::Null, json!(true)));
    assert!(!tied(Value::Null, Value::Null));
}

#[test]
fn rotary_keys_are_read_from_the_object_first() {
    let mut t = text();
    set(&mut t, "partial_rotary_factor", json!(0.5));
    set(&mut t, "rope_theta", json!(1e4));
    assert_eq!(read(&t).unwrap().attention.rope, Rope::new(1e7, 64));
    set(&mut t, "rope_parameters", json!({"rope_type": "default"}));
    assert_eq!(read(&t).unwrap().attention.rope, Rope::new(1e4, 128));
    unset(&mut t, "rope_parameters");
    unset(&mut t, "partial_rotary_factor");
    assert_eq!(read(&t).unwrap().attention.rope, Rope::new(1e4, 64));
    unset(&mut t, "rope_theta");
    assert_eq!(refused(read(&t)), "rope_parameters.rope_theta");
}

#[test]
fn yarn_is_read_and_other_scalings_are_refused() {
    let yarn = |extra: Value| {
        let mut rope = json!({"rope_type": "yarn", "rope_theta": 1e7, "original_max_position_embeddings": 262_144});
        for (key, value) in extra.as_object().unwrap() {
            set(&mut rope, key, value.clone());
        }
        with_rope(rope)
    };
    let scaling = |extra| yarn(extra).unwrap().attention.rope.scaling;
    let attention = |extra| match scaling(extra) {
        RopeScaling::Yarn { attention_factor, factor, .. } => (factor, attention_factor),
        RopeScaling::None => panic!("no scaling"),
    };
    assert_eq!(attention(json!({"factor": 4.0})), (4.0, 0.1 * 4f64.ln() + 1.0));
    assert_eq!(attention(json!({})), (1.0, 1.0)); // max_position_embeddings / original
    assert_eq!(attention(json!({"factor": 4, "attention_factor": 1.5})), (4.0, 1.5));
    assert_eq!(attention(json!({"factor": 4, "mscale": 1.0, "mscale_all_dim": 1.0})), (4.0, 1.0));
    assert!(matches!(
        scaling(json!({"factor": 2, "beta_fast": 16, "truncate": false})),
        RopeScaling::Yarn { beta_fast: 16.0, beta_slow: 1.0, truncate: false, original_positions: 262_144, .. }
    ));
    assert_eq!(refused(yarn(json!({"factor": 0.5}))), "text_config.rope_parameters.factor");
    assert_eq!(refused(yarn(json!({"factor": -1}))), "text_config.rope_parameters.factor");
    assert_eq!(
        refused(with_rope(json!({"rope_type": "yarn", "rope_theta": 1e7, "factor": 4}))),
        "rope_parameters.original_max_position_embeddings"
    );
    for kind in ["linear", "dynamic", "longrope", "llama3", "mrope"] {
        let key = refused(with_rope(json!({"rope_type": kind, "rope_theta": 1e7, "factor": 4.0})));
        assert_eq!(key, "text_config.rope_parameters.rope_type", "{kind}");
    }
    for (theta, partial) in [(1e7, 0.0), (1e7, 1.5), (1e7, 0.005), (1e7, 0.0118), (1.0, 0.25), (1e300, 0.25)] {
        assert!(
            with_rope(json!({"rope_theta": theta, "partial_rotary_factor": partial})).is_err(),
            "{theta} {partial}"
        );
    }
}

#[test]
fn other_models_are_refused_by_name() {
    for kind in ["qwen4_exp", "qwen3_next", "qwen3", "llama", ""] {
        let mut t = text();
        set(&mut t, "model_type", json!(kind));
        let error = read(&t).unwrap_err();
        assert!(matches!(&error, Error::UnsupportedModel { got, .. } if got == kind), "{error}");
        assert!(matches!(read(&wrap(kind, text())), Err(Error::UnsupportedModel { .. })));
        assert!(matches!(read(&wrap("qwen3_5", t)), Err(Error::UnsupportedModel { .. })));
    }
    assert!(matches!(read(&wrap("qwen3_5", moe_text())), Err(Error::UnsupportedModel { .. })));
    assert_eq!(refused(read(&json!({"hidden_size": 3}))), "model_type");
    assert!(matches!(Config::from_json_str("{"), Err(Error::Json { .. })));
    assert_eq!(refused(Config::from_json_str("[]")), "config");
}

#[test]
fn variants_that_are_not_implemented_are_refused_by_key() {
    for (key, value) in [
        ("attention_bias", json!(true)),
        ("attn_output_gate", json!(false)),
        ("hidden_act", json!("gelu")),
        ("mlp_only_layers", json!([3])),
        ("decoder_sparse_step", json!(2)),
        ("mtp_use_dedicated_embeddings", json!(true)),
        ("mtp_num_hidden_layers", json!(2)),
        ("output_gate_type", json!("tanh")),
        ("num_attention_heads", json!(23)),
        ("linear_num_value_heads", json!(40)),
        ("rms_norm_eps", json!(0.0)),
        ("eos_token_id", json!("x")),
        ("eos_token_id", json!([1, -1])),
        ("bos_token_id", json!(4_294_967_296u64)),
    ] {
        assert_eq!(refused(with(key, value)), format!("text_config.{key}"));
    }
    assert_eq!(with("output_gate_type", json!("sigmoid")).unwrap().output_gate, OutputGate::Sigmoid);
    assert_eq!(with("output_gate_type", Value::Null).unwrap().output_gate, OutputGate::Silu);
    assert_eq!(with("mtp_num_hidden_layers", Value::Null).unwrap().mtp_layers, 0);
    assert_eq!(with("eos_token_id", json!([7, 5, 7])).unwrap().eos, [5, 7]);
    assert_eq!(with("dtype", json!("float8")).unwrap().dtype, None);
}

#[test]
fn absurd_numbers_are_refused_by_key() {
    for key in [
        "hidden_size",
        "vocab_size",
        "num_hidden_layers",
        "head_dim",
        "num_key_value_heads",
        "linear_key_head_dim",
        "linear_conv_kernel_dim",
        "intermediate_size",
        "max_position_embeddings",
    ] {
        for value in [json!(0), json!(-4), json!(1.5), json!(u64::MAX), json!(1e300), json!("64"), json!([64])] {
            assert_eq!(refused(with(key, value.clone())), format!("text_config.{key}"), "{value}");
        }
    }
    for key in ["hidden_size", "head_dim", "num_attention_heads", "linear_num_key_heads", "intermediate_size"] {
        let mut t = text();
        unset(&mut t, key);
        assert_eq!(refused(read(&t)), key);
    }
    // Each legal alone, their product is not.
    let mut t = text();
    set(&mut t, "linear_value_head_dim", json!(1u64 << 28));
    assert!(matches!(read(&t), Err(Error::Core(ninfer_core::Error::OutOfRange { .. }))));
}

#[test]
fn quantization_methods_are_known_or_refused() {
    let read_quant = |q: Value| {
        let mut w = wrap("qwen3_5", text());
        set(&mut w, "quantization_config", q);
        read(&w)
    };
    let good = |q: Value| read_quant(q).unwrap().quantization;
    assert_eq!(good(json!({"quant_method": "compressed-tensors"})), Some(Quantization::CompressedTensors));
    assert_eq!(good(json!({"quant_method": "modelopt", "quant_algo": "NVFP4"})), Some(Quantization::ModelOpt));
    assert_eq!(good(json!({"quant_method": "fp8", "weight_block_size": [128, 128]})), Some(Quantization::Fp8Block));
    assert_eq!(good(json!({"quant_method": "awq", "bits": 4, "version": "gemm"})), Some(Quantization::Awq));
    let gptq = |q: Value| good(q).unwrap();
    assert_eq!(gptq(json!({"quant_method": "gptq", "bits": 4})), Quantization::Gptq(GptqZeros::MinusOne));
    let v2 = json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"});
    assert_eq!(gptq(v2), Quantization::Gptq(GptqZeros::Exact));
    for q in [
        json!({"quant_method": "bitsandbytes"}),
        json!({"quant_method": "gptq", "bits": 8}),
        json!({"quant_method": "gptq", "checkpoint_format": "marlin"}),
        json!({"quant_method": "awq", "version": "gemv"}),
    ] {
        let error = read_quant(q.clone()).unwrap_err();
        assert!(matches!(error, Error::UnsupportedQuantization { .. }), "{q}");
        assert!(!error.help().is_empty());
    }
    assert_eq!(
        refused(read_quant(json!({"quant_method": "fp8", "weight_block_size": [64, 64]}))),
        "quantization_config.weight_block_size"
    );
    let mut t = text();
    set(&mut t, "quantization_config", json!({"quant_method": "awq"}));
    assert_eq!(read(&wrap("qwen3_5", t)).unwrap().quantization, Some(Quantization::Awq));
}

proptest::proptest! {
    #[test]
    fn random_values_of_known_keys_never_panic(
        key in proptest::sample::select(text().as_object().unwrap().keys().cloned().collect::<Vec<_>>()),
        number: i64,
        float: f64,
        kind in 0..5,
    ) {
        let value = match kind {
            0 => json!(number),
            1 => json!(float),
            2 => json!([number]),
            3 => json!({"rope_theta": float, "partial_rotary_factor": number, "rope_type": "yarn", "factor": float}),
            _ => json!(number.to_string()),
        };
        let _ = with(&key, value);
    }

    #[test]
    fn random_text_never_panics(text in ".{0,200}") {
        let _ = Config::from_json_str(&text);
    }
}
