//! Whole checkpoints in publishers' quantised layouts, against logits of their exactly dequantised weights.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ninfer_core::model::{CausalModel, LaneOptions, PrefillEnd};
use ninfer_kernels::cpu::Cpu;
use ninfer_models::weights::{EntryRole, ExpertPart, LayerRef, MtpState, Stored, WeightTable};
use ninfer_models::{Qwen35, Recipe, SessionOptions};
use ninfer_quant::TensorRole;
use safetensors::SafeTensors;

/// The f32 results are within 2e-5 of f64 (fixtures/tiny-quant/README.md), and orders of summation differ by as much again.
const TOLERANCE: f32 = 5e-4;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-quant").join(name)
}

struct Golden(Vec<u8>);

impl Golden {
    fn open(name: &str) -> Self {
        Self(std::fs::read(folder(name).join("golden.safetensors")).unwrap())
    }

    fn ids(&self, name: &str) -> Vec<u32> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let data = file.tensor(name).unwrap().data().to_vec();
        data.as_chunks::<8>().0.iter().map(|b| u32::try_from(i64::from_le_bytes(*b)).unwrap()).collect()
    }

    fn logits(&self) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let data = file.tensor("logits").unwrap().data().to_vec();
        data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }
}

fn model(name: &str, recipe: &Recipe) -> Qwen35<Cpu> {
    Qwen35::load(&Cpu::new(), folder(name), recipe, &mut |_| {}).unwrap()
}

/// Largest difference of the golden rows.
fn difference(model: &Qwen35<Cpu>, golden: &Golden) -> f32 {
    let mut session = model.session(&SessionOptions::new(64)).unwrap();
    let mut lane = session.open_lane(&LaneOptions::new(64)).unwrap();
    let mut all = Vec::new();
    let mut sink = |_: usize, rows: &[f32]| {
        all.extend_from_slice(rows);
        Ok(())
    };
    session.prefill(&mut lane, &golden.ids("input_ids"), PrefillEnd::More, Some(&mut sink)).unwrap();
    let expected = golden.logits();
    let rows = golden.ids("rows");
    let vocab = expected.len() / rows.len();
    let got = rows.iter().flat_map(|&r| all[r as usize * vocab..][..vocab].to_vec());
    got.zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Stored formats of the matrices, the MTP block apart.
fn formats(name: &str) -> BTreeMap<(bool, &'static str), String> {
    let table = WeightTable::open(folder(name)).unwrap();
    let mut out = BTreeMap::new();
    for e in table.entries() {
        if let EntryRole::Matrix(role) = e.role {
            let stored = match e.stored {
                Stored::Matrix(kind) => kind.to_string(),
                other => other.to_string(),
            };
            let before = out.insert((e.layer.is_mtp(), role.name()), stored.clone());
            assert!(before.is_none_or(|b| b == stored), "{name}: {role}");
        }
    }
    out
}

#[test]
fn logits_are_those_of_the_dequantised_weights() {
    for name in ["ct-nvfp4", "modelopt-mixed", "qwen-fp8-block"] {
        let golden = Golden::open(name);
        let d = difference(&model(name, &Recipe::Keep), &golden);
        assert!(d < TOLERANCE, "{name}: {d:e}");
        // Exact decoding to f32 first gives the same.
        let d = difference(&model(name, &Recipe::F32), &golden);
        assert!(d < TOLERANCE, "{name} in f32: {d:e}");
        // The comparison would notice a scale that is off by one part in 16.
        let d = difference(&model(name, &"q6".parse().unwrap()), &golden);
        assert!(d > 10.0 * TOLERANCE, "{name} in six bits: {d:e}");
    }
}

#[test]
fn drafts_of_the_mtp_block_match() {
    for name in ["modelopt-mixed", "qwen-fp8-block"] {
        let golden = Golden::open(name);
        let mut session = model(name, &Recipe::Keep).session(&SessionOptions::new(64)).unwrap();
        let mut lane = session.open_lane(&LaneOptions::new(64)).unwrap();
        let end = PrefillEnd::Choose { drafts: 3 };
        let out = session.prefill(&mut lane, &golden.ids("input_ids")[..37], end, None).unwrap().unwrap();
        assert_eq!([&out.tokens[..], &out.drafts[..]].concat(), golden.ids("chosen"), "{name}");
    }
    assert_eq!(WeightTable::open(folder("ct-nvfp4")).unwrap().mtp(), MtpState::Absent);
}

#[test]
fn each_matrix_is_read_in_the_format_it_is_stored_in() {
    let ct = formats("ct-nvfp4");
    let is = |map: &BTreeMap<(bool, &'static str), String>, mtp: bool, role: TensorRole, expected: &str| {
        assert_eq!(map[&(mtp, role.name())], expected, "{role}");
    };
    for role in [TensorRole::GdnQkv, TensorRole::GdnZ, TensorRole::AttnQ, TensorRole::MlpDown] {
        is(&ct, false, role, "NVFP4 (compressed-tensors)");
    }
    for role in [TensorRole::GdnA, TensorRole::GdnB, TensorRole::Embedding, TensorRole::Head] {
        is(&ct, false, role, "BF16");
    }
    // P31, P45: three formats, a quantised head, and BF16 experts in the MTP block.
    let mixed = formats("modelopt-mixed");
    for role in [TensorRole::GdnQkv, TensorRole::GdnOut, TensorRole::AttnK, TensorRole::AttnOut] {
        is(&mixed, false, role, "FP8 per tensor");
    }
    for role in [TensorRole::ExpertUp, TensorRole::SharedDown, TensorRole::Head] {
        is(&mixed, false, role, "NVFP4 (ModelOpt)");
    }
    for role in [TensorRole::Router, TensorRole::SharedExpertGate, TensorRole::GdnA] {
        is(&mixed, false, role, "BF16");
    }
    is(&mixed, true, TensorRole::ExpertUp, "BF16");
    is(&mixed, true, TensorRole::AttnQ, "BF16");
    // P38: half of what engines fuse is FP8.
    let fp8 = formats("qwen-fp8-block");
    for role in [TensorRole::GdnQkv, TensorRole::GdnZ, TensorRole::ExpertDown, TensorRole::SharedUp] {
        is(&fp8, false, role, "FP8 blocks");
    }
    for role in [TensorRole::GdnA, TensorRole::GdnB, TensorRole::Router, TensorRole::Head] {
        is(&fp8, false, role, "BF16");
    }
    is(&fp8, true, TensorRole::AttnV, "FP8 blocks");
    is(&fp8, true, TensorRole::MtpFc, "BF16");
}

#[test]
fn experts_keep_a_global_scale_of_their_own() {
    let table = WeightTable::open(folder("modelopt-mixed")).unwrap();
    let gate_up = table.experts(LayerRef::Main(1), ExpertPart::GateUp, &Recipe::Keep).unwrap();
    assert_eq!(gate_up.len(), 12);
    let scales: Vec<String> = gate_up
        .iter()
        .map(|m| match m.parts() {
            ninfer_quant::PackedParts::Nvfp4 { global, .. } => format!("{global:?}"),
            other => panic!("{other:?}"),
        })
        .collect();
    // Gate and up of one expert share it; two of the six experts have the same maximum.
    assert!(scales.chunks(2).all(|pair| pair[0] == pair[1]));
    assert_eq!(scales.iter().collect::<std::collections::BTreeSet<_>>().len(), 5);
}

#[test]
fn the_bridge_stays_close_to_the_stored_weights() {
    // E4M3 has a step of 1/8: most products of E2M1 and E4M3 are on its grid, so logits move by tenths.
    for name in ["ct-nvfp4", "modelopt-mixed"] {
        let d = difference(&model(name, &"bridge-fp8".parse().unwrap()), &Golden::open(name));
        assert!(d > TOLERANCE && d < 1.0, "{name}: {d}");
    }
}

#[test]
fn scales_of_activations_change_nothing() {
    // P27: a config that asks for quantised activations, and the scale for them beside every module.
    let from = folder("ct-nvfp4");
    let dir = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(from.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    let group = &mut config["quantization_config"]["config_groups"]["group_0"];
    assert!(group["input_activations"].is_null());
    group["input_activations"] = group["weights"].clone();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let scale = 0.01f32.to_le_bytes();
    let mut tensors: Vec<(String, safetensors::tensor::TensorView<'_>)> = file.tensors();
    for (name, _) in file.tensors() {
        if let Some(module) = name.strip_suffix("weight_packed") {
            let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![1], &scale).unwrap();
            tensors.push((format!("{module}input_global_scale"), view));
        }
    }
    let written = safetensors::serialize(tensors, None).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), written).unwrap();
    let golden = Golden::open("ct-nvfp4");
    let with = Qwen35::load(&Cpu::new(), dir.path(), &Recipe::Keep, &mut |_| {}).unwrap();
    assert_eq!(difference(&with, &golden), difference(&model("ct-nvfp4", &Recipe::Keep), &golden));
}
