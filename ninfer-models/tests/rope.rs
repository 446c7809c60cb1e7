//! Rotary angles against those transformers forms in f32.

use std::path::Path;

use ninfer_models::Config;
use ninfer_models::rope::{Rope, inverse_frequencies};
use safetensors::SafeTensors;

/// What accurate f32 cosines may differ by from torch's vectorised ones.
const TOLERANCE: f32 = 1e-6;

fn fixture() -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/rope.safetensors")).unwrap()
}

fn floats(t: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    t.tensor(name).unwrap().data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn integers(t: &SafeTensors<'_>, name: &str) -> Vec<i64> {
    t.tensor(name).unwrap().data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
}

fn compare(case: &str, rope: &Rope) {
    let bytes = fixture();
    let t = SafeTensors::deserialize(&bytes).unwrap();
    let (inverse, magnitude) = inverse_frequencies(rope);
    let expected = floats(&t, &format!("{case}.inv_freq"));
    assert_eq!(inverse.len(), expected.len());
    for (f, (a, b)) in inverse.iter().zip(&expected).enumerate() {
        assert_eq!(a.to_bits(), b.to_bits(), "{case} frequency {f}: {a:e} and {b:e}");
    }
    let (cos, sin) = (floats(&t, &format!("{case}.cos")), floats(&t, &format!("{case}.sin")));
    for (row, p) in integers(&t, &format!("{case}.positions")).into_iter().enumerate() {
        for (f, i) in inverse.iter().enumerate() {
            let angle = f64::from(p as f32 * i);
            let at = row * inverse.len() + f;
            let (c, s) = (magnitude * angle.cos() as f32, magnitude * angle.sin() as f32);
            assert!((c - cos[at]).abs() <= TOLERANCE, "{case} cos at {p}, {f}: {c} and {}", cos[at]);
            assert!((s - sin[at]).abs() <= TOLERANCE, "{case} sin at {p}, {f}: {s} and {}", sin[at]);
        }
    }
}

fn config(head_dim: usize, rope_parameters: &str) -> Rope {
    let text = format!(
        r#"{{"model_type": "qwen3_5_text", "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 8,
            "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": {head_dim}, "intermediate_size": 8,
            "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "max_position_embeddings": 262144, "rope_parameters": {rope_parameters}}}"#
    );
    Config::from_json_str(&text).unwrap().attention.rope
}

#[test]
fn published_heads_match_to_position_262143() {
    compare("d256", &config(256, r#"{"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}"#));
}

#[test]
fn small_heads_match() {
    compare("d64", &config(64, r#"{"rope_theta": 10000000}"#));
}

#[test]
fn yarn_matches_to_a_million_positions() {
    let rope = config(
        256,
        r#"{"rope_type": "yarn", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "factor": 4.0,
            "original_max_position_embeddings": 262144}"#,
    );
    compare("yarn4_d256", &rope);
    let bytes = fixture();
    let t = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(inverse_frequencies(&rope).1, floats(&t, "yarn4_d256.attention_factor")[0]);
}
