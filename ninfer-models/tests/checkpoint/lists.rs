//! Every expected tensor is there and every present one is used, or an error says which.

use ninfer_models::Error;
use ninfer_models::weights::{LayerRef, MtpState};
use ninfer_quant::{Recipe, TensorRole};
use proptest::prelude::*;

use crate::store::{Store, Tensor};

#[test]
fn any_single_mtp_tensor_that_is_missing_is_named() {
    for fixture in ["tiny-dense", "tiny-moe"] {
        let store = Store::fixture(fixture);
        let names: Vec<&String> = store.tensors.keys().filter(|n| n.starts_with("mtp.")).collect();
        assert!(names.len() >= 15);
        for &name in &names {
            let mut broken = store.clone();
            broken.remove(name);
            let Err(Error::IncompleteMtp { missing }) = broken.open() else { panic!("{name}") };
            assert_eq!(missing.names(), std::slice::from_ref(name));
        }
        let mut none = store.clone();
        names.iter().for_each(|n| {
            none.remove(n);
        });
        let table = none.open().unwrap();
        assert_eq!((table.mtp(), table.mtp_layers(), table.shape().mtp), (MtpState::Absent, 0, false));
        assert!(matches!(
            table.matrix(LayerRef::Mtp, TensorRole::MtpFc, &Recipe::Keep),
            Err(Error::NoSuchWeight { .. })
        ));
    }
}

#[test]
fn the_mtp_layer_is_not_counted_among_the_layers() {
    let mut store = Store::fixture("tiny-tied");
    let table = store.open().unwrap();
    assert_eq!((table.layers(), table.mtp_layers(), table.shape().layers.len()), (3, 1, 3));
    // What is stored decides, not what is declared.
    store.text_config()["mtp_num_hidden_layers"] = 0.into();
    assert_eq!(store.open().unwrap().mtp(), MtpState::Complete);
    let extra = store.tensors["mtp.layers.0.input_layernorm.weight"].clone();
    store.insert("mtp.layers.1.input_layernorm.weight", extra);
    let Err(Error::TensorList { missing, unexpected }) = store.open() else { panic!() };
    assert_eq!((missing.len(), unexpected.names()[0].as_str()), (0, "mtp.layers.1.input_layernorm.weight"));
}

#[test]
fn a_renamed_tensor_is_in_both_lists() {
    for (from, to) in [
        (
            "model.language_model.layers.2.linear_attn.in_proj_a.weight",
            "model.language_model.layers.2.linear_attn.in_proj_ba.weight",
        ),
        ("model.language_model.layers.0.linear_attn.A_log", "model.language_model.layers.0.linear_attn.a_log"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.language_model.layers.0.mlp.up_proj.weights"),
        ("model.language_model.norm.weight", "norm.weight"),
        ("lm_head.weight", "head.weight"),
        ("mtp.fc.weight", "mtp.eh_proj.weight"),
    ] {
        let mut store = Store::fixture("tiny-dense");
        store.rename(from, to);
        let error = store.open().unwrap_err();
        let message = error.to_string();
        let Error::TensorList { missing, unexpected } = error else { panic!("{message}") };
        assert_eq!((missing.names(), unexpected.names()), (&[from.to_owned()][..], &[to.to_owned()][..]));
        assert!(message.contains(from) && message.contains(to));
    }
}

#[test]
fn an_unknown_tensor_is_refused() {
    for name in
        ["model.language_model.layers.0.mlp.extra.weight", "model.language_model.layers.4.norm.weight", "x", "mtp.x"]
    {
        let mut store = Store::fixture("tiny-tied");
        store.insert(name, Tensor::f32(&[1], &[0.0]));
        let Err(Error::TensorList { missing, unexpected }) = store.open() else { panic!("{name}") };
        assert_eq!((missing.len(), unexpected.names()), (0, &[name.to_owned()][..]));
    }
}

#[test]
fn the_parts_of_a_quantized_matrix_are_listed_too() {
    let module = "model.language_model.layers.0.mlp.up_proj";
    let mut quantized = Store::fixture("tiny-tied");
    quantized.quantize(module, ninfer_core::WeightFormat::Nvfp4);
    for (from, to) in [("weight_global_scale", "weight_global"), ("weight_packed", "packed")] {
        let mut store = quantized.clone();
        store.rename(&format!("{module}.{from}"), &format!("{module}.{to}"));
        let Err(Error::TensorList { missing, unexpected }) = store.open() else { panic!("{from}") };
        assert_eq!(missing.len(), 1);
        assert!(missing.names()[0].starts_with(module));
        assert!(unexpected.names().contains(&format!("{module}.{to}")));
    }
    // A scale beside a matrix that needs none is not skipped in silence.
    let mut store = Store::fixture("tiny-tied");
    store.insert(format!("{module}.weight_scale"), Tensor::f32(&[96, 1], &[1.0; 96]));
    assert!(matches!(store.open(), Err(Error::Quant { .. })));
}

#[test]
fn vision_and_activation_scales_are_skipped() {
    let mut store = Store::fixture("tiny-tied");
    let before = store.open().unwrap().total_bytes();
    for name in [
        "model.visual.blocks.0.attn.qkv.weight",
        "visual.merger.norm.bias",
        "vision_tower.x",
        "model.language_model.layers.2.self_attn.k_proj.k_scale",
        "model.language_model.layers.2.self_attn.v_proj.v_scale",
        "model.language_model.layers.0.mlp.up_proj.input_scale",
        "mtp.fc.input_global_scale",
    ] {
        store.insert(name, Tensor::new("BOOL", &[1], vec![1]));
    }
    assert_eq!(store.open().unwrap().total_bytes(), before);
}

#[test]
fn a_config_of_another_size_is_refused_before_loading() {
    let mut store = Store::fixture("tiny-tied");
    let change = |store: &mut Store, key: &str, value: u64| store.text_config()[key] = value.into();
    change(&mut store, "intermediate_size", 128);
    assert!(matches!(store.open(), Err(Error::TensorShape { .. })));
    let mut store = Store::fixture("tiny-moe");
    change(&mut store, "num_experts", 15);
    assert!(matches!(store.open(), Err(Error::TensorShape { .. })));
    // An absurd but legal config costs little and names only the first tensors.
    let mut store = Store::fixture("tiny-tied");
    store.text_config()["layer_types"] = serde_json::Value::Null;
    change(&mut store, "num_hidden_layers", 1024);
    let Err(Error::TensorList { missing, .. }) = store.open() else { panic!() };
    assert!(missing.len() > 10_000 && missing.names().len() == 256);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn removing_renaming_and_reshaping_at_random_never_panics(
        edits in proptest::collection::vec((any::<proptest::sample::Index>(), 0..4, any::<u8>()), 1..4),
    ) {
        let mut store = Store::fixture("tiny-tied");
        for (at, kind, byte) in edits {
            let Some(name) = store.tensors.keys().nth(at.index(store.tensors.len())).cloned() else { continue };
            let mut tensor = store.remove(&name);
            match kind {
                0 => {}
                1 => store.insert(format!("{name}{}", char::from(byte % 26 + b'a')), tensor),
                2 => {
                    tensor.shape.reverse();
                    store.insert(name, tensor);
                }
                _ => {
                    tensor.bytes.iter_mut().for_each(|b| *b = byte);
                    store.insert(name, tensor);
                }
            }
        }
        if let Ok(table) = store.open() {
            for layer in [LayerRef::Root, LayerRef::Main(0), LayerRef::Main(3), LayerRef::Mtp] {
                for role in TensorRole::ALL {
                    let _ = table.matrix(layer, role, &Recipe::Keep);
                }
            }
        }
    }
}
