//! Routed experts, fused and one by one.

use ninfer_core::WeightFormat;
use ninfer_models::weights::{EntryRole, ExpertPart, LayerRef, MtpState};
use ninfer_models::{Error, WeightTable};
use ninfer_quant::{Recipe, TensorRole, convert};

use crate::store::{Store, Tensor};

const EXPERTS: usize = 6;
const WIDTH: usize = 32;
const HIDDEN: usize = 64;

/// Cuts the fused tensors of the layers for which `cut` holds into one tensor per expert and projection.
fn split(store: &mut Store, cut: impl Fn(&str) -> bool) {
    let names: Vec<String> = store.tensors.keys().filter(|n| n.contains(".experts.") && cut(n)).cloned().collect();
    for name in names {
        let t = store.remove(&name);
        let parts: Vec<Vec<u8>> = t.bytes.chunks(t.bytes.len() / EXPERTS).map(<[u8]>::to_vec).collect();
        for (e, bytes) in parts.into_iter().enumerate() {
            if let Some(stem) = name.strip_suffix("gate_up_proj") {
                let (gate, up) = bytes.split_at(bytes.len() / 2);
                for (part, bytes) in [("gate_proj", gate), ("up_proj", up)] {
                    let tensor = Tensor::new("BF16", &[WIDTH, HIDDEN], bytes.to_vec());
                    store.insert(format!("{stem}{e}.{part}.weight"), tensor);
                }
            } else if let Some(stem) = name.strip_suffix("down_proj") {
                store.insert(format!("{stem}{e}.down_proj.weight"), Tensor::new("BF16", &[HIDDEN, WIDTH], bytes));
            }
        }
    }
}

fn assert_same_experts(a: &WeightTable, b: &WeightTable, recipe: &Recipe) {
    for layer in [0, 1, 2].map(LayerRef::Main).into_iter().chain([LayerRef::Mtp]) {
        for part in [ExpertPart::GateUp, ExpertPart::Down] {
            assert_eq!(a.experts(layer, part, recipe).unwrap(), b.experts(layer, part, recipe).unwrap());
        }
    }
}

#[test]
fn experts_one_by_one_in_two_shards_equal_fused_ones() {
    let fused = Store::fixture("tiny-moe");
    let mut unfused = fused.clone();
    split(&mut unfused, |_| true);
    let dir = tempfile::tempdir().unwrap();
    unfused.write_sharded(dir.path(), |name| {
        let second = name.contains("layers.2.") || name.starts_with("mtp.");
        format!("model-0000{}-of-00002.safetensors", if second { 2 } else { 1 })
    });
    let (fused, unfused) = (fused.open().unwrap(), WeightTable::open(dir.path()).unwrap());
    assert_eq!((unfused.mtp(), unfused.total_bytes()), (MtpState::Complete, fused.total_bytes()));
    for recipe in ["keep", "q4", "nvfp4"] {
        assert_same_experts(&fused, &unfused, &recipe.parse().unwrap());
    }
    let entries = unfused.entries();
    let line =
        entries.iter().find(|e| e.layer == LayerRef::Main(2) && e.role == EntryRole::Matrix(TensorRole::ExpertUp));
    let line = line.unwrap();
    assert_eq!((line.count, line.name.as_str()), (EXPERTS, "model.language_model.layers.2.mlp.experts.*.up_proj"));
}

#[test]
fn each_layer_decides_for_itself() {
    let fused = Store::fixture("tiny-moe");
    let mut mixed = fused.clone();
    split(&mut mixed, |name| name.starts_with("mtp."));
    assert_same_experts(&fused.open().unwrap(), &mixed.open().unwrap(), &Recipe::Keep);
}

#[test]
fn the_order_is_gate_up_by_expert_and_each_is_converted_alone() {
    let store = Store::fixture("tiny-moe");
    let table = store.open().unwrap();
    let layer = LayerRef::Main(1);
    let stored = store.tensors["model.language_model.layers.1.mlp.experts.gate_up_proj"].values();
    let plain = table.experts(layer, ExpertPart::GateUp, &Recipe::Keep).unwrap();
    assert_eq!(plain.len(), 2 * EXPERTS);
    for (i, (m, expected)) in plain.iter().zip(stored.chunks(WIDTH * HIDDEN)).enumerate() {
        assert_eq!((m.rows(), m.cols()), (WIDTH, HIDDEN));
        assert_eq!(m.dequantize(), expected, "{i}");
    }
    // Fusing before quantising would give gate and up one global scale.
    let recipe: Recipe = "nvfp4".parse().unwrap();
    let quantized = table.experts(layer, ExpertPart::GateUp, &recipe).unwrap();
    for (i, (q, p)) in quantized.iter().zip(&plain).enumerate() {
        let role = if i % 2 == 0 { TensorRole::ExpertGate } else { TensorRole::ExpertUp };
        assert_eq!(q, &convert(p, &recipe, &table.site(layer, role)).unwrap(), "{i}");
    }
    let down = table.experts(layer, ExpertPart::Down, &Recipe::Keep).unwrap();
    assert_eq!((down.len(), down[0].rows(), down[0].cols()), (EXPERTS, HIDDEN, WIDTH));
}

#[test]
fn quantized_experts_beside_plain_mtp_experts() {
    let mut store = Store::fixture("tiny-moe");
    split(&mut store, |name| !name.starts_with("mtp."));
    let mut expected = Vec::new();
    for e in 0..EXPERTS {
        for part in ["gate_proj", "up_proj"] {
            let format = if e == 3 { WeightFormat::Fp8Row } else { WeightFormat::Nvfp4 };
            let module = format!("model.language_model.layers.0.mlp.experts.{e}.{part}");
            expected.push(store.quantize(&module, format));
        }
    }
    let table = store.open().unwrap();
    let gate_up = |layer| table.experts(layer, ExpertPart::GateUp, &Recipe::Keep).unwrap();
    assert_eq!(gate_up(LayerRef::Main(0)), expected);
    assert_eq!(gate_up(LayerRef::Mtp)[0].format(), WeightFormat::Bf16);
    let counts: Vec<usize> = table
        .entries()
        .iter()
        .filter(|e| e.layer == LayerRef::Main(0) && e.role == EntryRole::Matrix(TensorRole::ExpertGate))
        .map(|e| e.count)
        .collect();
    assert_eq!(counts, [5, 1]);
}

#[test]
fn a_missing_or_damaged_expert_is_named() {
    let mut store = Store::fixture("tiny-moe");
    split(&mut store, |_| true);
    let name = "model.language_model.layers.2.mlp.experts.5.down_proj.weight";
    let removed = store.remove(name);
    let Err(Error::TensorList { missing, unexpected }) = store.open() else { panic!() };
    assert_eq!((missing.names(), unexpected.len()), (&[name.to_owned()][..], 0));

    let mut values = removed.values();
    values[5] = f32::NAN;
    store.insert(name, Tensor::bf16(&[HIDDEN, WIDTH], &values));
    let table = store.open().unwrap();
    let error = table.experts(LayerRef::Main(2), ExpertPart::Down, &Recipe::Keep).unwrap_err();
    assert!(error.to_string().contains("experts.5.down_proj"), "{error}");

    let mut store = Store::fixture("tiny-moe");
    let name = "model.language_model.layers.2.mlp.experts.down_proj";
    let mut values = store.tensors[name].values();
    values[3 * HIDDEN * WIDTH] = f32::INFINITY;
    store.insert(name, Tensor::bf16(&[EXPERTS, HIDDEN, WIDTH], &values));
    let table = store.open().unwrap();
    let error = table.experts(LayerRef::Main(2), ExpertPart::Down, &Recipe::Keep).unwrap_err();
    assert!(error.to_string().contains("mlp.experts.down_proj[3]"), "{error}");
}

#[test]
fn a_layer_without_any_expert_misses_the_fused_tensors() {
    let mut store = Store::fixture("tiny-moe");
    store.remove("model.language_model.layers.0.mlp.experts.gate_up_proj");
    store.remove("model.language_model.layers.0.mlp.experts.down_proj");
    let Err(Error::TensorList { missing, .. }) = store.open() else { panic!() };
    assert_eq!(missing.len(), 2);
    assert!(missing.names()[0].ends_with("layers.0.mlp.experts.gate_up_proj"));
}
