//! Formats decided by what is stored.

use ninfer_core::WeightFormat;
use ninfer_models::Error;
use ninfer_models::weights::{EntryRole, LayerRef, Stored};
use ninfer_quant::checkpoint::StoredKind;
use ninfer_quant::{Recipe, TensorRole};
use serde_json::json;

use crate::store::{Store, Tensor};

fn module(layer: usize, name: &str) -> String {
    format!("model.language_model.layers.{layer}.{name}")
}

#[test]
fn bf16_fp8_and_nvfp4_mix_with_a_quantized_head() {
    let mut store = Store::fixture("tiny-dense");
    let expected = [
        (
            LayerRef::Main(0),
            TensorRole::GdnQkv,
            store.quantize(&module(0, "linear_attn.in_proj_qkv"), WeightFormat::Fp8Tensor),
        ),
        (LayerRef::Main(1), TensorRole::AttnK, store.quantize(&module(1, "self_attn.k_proj"), WeightFormat::Fp8Row)),
        (LayerRef::Main(3), TensorRole::MlpUp, store.quantize(&module(3, "mlp.up_proj"), WeightFormat::Nvfp4)),
        (LayerRef::Main(2), TensorRole::MlpDown, store.quantize(&module(2, "mlp.down_proj"), WeightFormat::Fp8Block)),
        (LayerRef::Root, TensorRole::Head, store.quantize("lm_head", WeightFormat::Nvfp4)),
        (LayerRef::Mtp, TensorRole::AttnOut, store.quantize("mtp.layers.0.self_attn.o_proj", WeightFormat::Fp8Block)),
    ];
    // What ModelOpt leaves beside matrices, weight-only ones too.
    for name in ["lm_head.input_scale", "model.language_model.layers.1.self_attn.k_proj.k_scale"] {
        store.insert(name, Tensor::f32(&[], &[1.0]));
    }
    store.insert(module(3, "mlp.up_proj.input_global_scale"), Tensor::f32(&[1], &[1.0]));
    store.config["quantization_config"] = json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"});
    let table = store.open().unwrap();
    for (layer, role, packed) in &expected {
        assert_eq!(&table.matrix(*layer, *role, &Recipe::Keep).unwrap(), packed, "{layer} {role}");
    }
    let up = table.matrix(LayerRef::Main(0), TensorRole::MlpUp, &Recipe::Keep).unwrap();
    assert_eq!(up.format(), WeightFormat::Bf16);
    let bridge = table.matrix(LayerRef::Root, TensorRole::Head, &Recipe::BridgeFp8).unwrap();
    assert_eq!(bridge.format(), WeightFormat::Fp8Row);
    let entries = table.entries();
    let head = entries.iter().find(|e| e.role == EntryRole::Matrix(TensorRole::Head)).unwrap();
    assert_eq!(head.stored, Stored::Matrix(StoredKind::Nvfp4CompressedTensors));
    assert_eq!(head.bytes, 512 * (32 + 4) + 4);
}

#[test]
fn half_of_the_fused_gdn_inputs_may_be_fp8() {
    let mut store = Store::fixture("tiny-dense");
    let qkv = store.quantize(&module(0, "linear_attn.in_proj_qkv"), WeightFormat::Fp8Block);
    let z = store.quantize(&module(0, "linear_attn.in_proj_z"), WeightFormat::Fp8Block);
    let a = store.tensors[&module(0, "linear_attn.in_proj_a.weight")].values();
    let table = store.open().unwrap();
    let load = |role| table.matrix(LayerRef::Main(0), role, &Recipe::Keep).unwrap();
    assert_eq!((load(TensorRole::GdnQkv), load(TensorRole::GdnZ)), (qkv, z));
    assert_eq!(load(TensorRole::GdnA).dequantize(), a);
    assert_eq!(load(TensorRole::GdnB).format(), WeightFormat::Bf16);
}

/// A symmetric 4-bit GPTQ module `[96, 64]` with one group: every code is 9, every scale 0.5.
fn gptq(store: &mut Store, module: &str) {
    let (rows, cols) = (96, 64);
    store.remove(&format!("{module}.weight"));
    let words = |n: usize, word: u32| word.to_le_bytes().repeat(n);
    let mut put = |suffix: &str, t| store.insert(format!("{module}.{suffix}"), t);
    put("qweight", Tensor::new("I32", &[cols / 8, rows], words(cols / 8 * rows, 0x9999_9999)));
    put("qzeros", Tensor::new("I32", &[1, rows / 8], words(rows / 8, 0x7777_7777)));
    put("scales", Tensor::new("F16", &[1, rows], half::f16::from_f32(0.5).to_le_bytes().repeat(rows)));
    put("g_idx", Tensor::new("I32", &[cols], words(cols, 0)));
}

#[test]
fn the_config_tells_how_gptq_stores_zeros() {
    let mut store = Store::fixture("tiny-tied");
    gptq(&mut store, &module(1, "mlp.gate_proj"));
    let load = |store: &Store| {
        let m = store.open().unwrap().matrix(LayerRef::Main(1), TensorRole::MlpGate, &Recipe::Keep).unwrap();
        m.dequantize()
    };
    store.config["quantization_config"] = json!({"quant_method": "gptq", "bits": 4});
    assert_eq!(load(&store), vec![0.5; 96 * 64]); // 9 − (7 + 1)
    store.config["quantization_config"] = json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"});
    assert_eq!(load(&store), vec![1.0; 96 * 64]); // 9 − 7
}

#[test]
fn packed_integers_of_compressed_tensors_are_checked_once_their_shape_is_read() {
    let mut store = Store::fixture("tiny-tied");
    let name = module(1, "mlp.gate_proj");
    store.remove(&format!("{name}.weight"));
    let (rows, cols) = (96usize, 64usize);
    let shape = |rows: usize, cols: usize| [rows as i64, cols as i64].iter().flat_map(|n| n.to_le_bytes()).collect();
    store.insert(format!("{name}.weight_packed"), Tensor::new("I32", &[rows, cols / 8], vec![0x99; rows * cols / 2]));
    store.insert(format!("{name}.weight_scale"), Tensor::bf16(&[rows, 1], &vec![0.25; rows]));
    store.insert(format!("{name}.weight_shape"), Tensor::new("I64", &[2], shape(rows, cols)));
    let load = |store: &Store| store.open()?.matrix(LayerRef::Main(1), TensorRole::MlpGate, &Recipe::Keep);
    assert_eq!(load(&store).unwrap().dequantize(), vec![0.25; rows * cols]);
    // The header fits, the data says otherwise.
    store.insert(format!("{name}.weight_shape"), Tensor::new("I64", &[2], shape(rows, cols - 1)));
    let error = load(&store).unwrap_err();
    assert!(matches!(&error, Error::TensorShape { tensor, got, .. } if *tensor == name && got[1] == 63), "{error}");
}

#[test]
fn damaged_scales_are_refused_by_name() {
    let mut store = Store::fixture("tiny-tied");
    let name = module(0, "mlp.up_proj");
    store.quantize(&name, WeightFormat::Nvfp4);
    let global = format!("{name}.weight_global_scale");
    let load = |store: &Store| store.open()?.matrix(LayerRef::Main(0), TensorRole::MlpUp, &Recipe::Keep);
    for value in [0.0, f32::NAN, f32::INFINITY, -1.0, 1e-6] {
        store.insert(global.clone(), Tensor::f32(&[1], &[value]));
        let error = load(&store).unwrap_err();
        assert!(matches!(&error, Error::Quant { module, .. } if *module == name), "{value}: {error}");
        assert!(error.to_string().contains("weight_global_scale") && !error.help().is_empty(), "{error}");
    }
    // Shapes are checked before anything is loaded.
    store.insert(format!("{name}.weight_scale"), Tensor::new("F8_E4M3", &[4 * 96], vec![0x38; 4 * 96]));
    assert!(matches!(store.open(), Err(Error::Quant { source: ninfer_quant::Error::TiledScales { .. }, .. })));
}

#[test]
fn wrong_shapes_and_dtypes_are_found_in_the_headers() {
    let name = module(0, "mlp.up_proj.weight");
    let wrong = |tensor: &str, t: Tensor| {
        let mut store = Store::fixture("tiny-tied");
        store.insert(tensor, t);
        store.open().unwrap_err()
    };
    let error = wrong(&name, Tensor::bf16(&[64, 96], &[0.0; 64 * 96]));
    let Error::TensorShape { file, tensor, expected, got } = error else { panic!("{error}") };
    assert_eq!((expected, got), (vec![96, 64], vec![64, 96]));
    assert!(tensor.ends_with("mlp.up_proj") && file.ends_with("model.safetensors"));
    let error = wrong(&name, Tensor::new("F64", &[96, 64], vec![0; 8 * 96 * 64]));
    assert!(matches!(&error, Error::TensorDType { got, .. } if got == "F64"), "{error}");
    let norm = module(0, "input_layernorm.weight");
    let error = wrong(&norm, Tensor::f32(&[65], &[0.0; 65]));
    assert!(matches!(&error, Error::TensorShape { tensor, .. } if *tensor == norm), "{error}");
    let error = wrong(&norm, Tensor::new("I32", &[64], vec![0; 256]));
    assert!(matches!(&error, Error::TensorDType { expected, .. } if expected.contains("BF16")), "{error}");
    let conv = module(0, "linear_attn.conv1d.weight");
    let error = wrong(&conv, Tensor::bf16(&[192, 4, 1], &[0.0; 768]));
    assert!(matches!(error, Error::TensorShape { .. }));
    let error = wrong(&name, Tensor::new("I32", &[96, 64], vec![0; 4 * 96 * 64]));
    assert!(matches!(error, Error::Quant { .. }), "{error}");
}
