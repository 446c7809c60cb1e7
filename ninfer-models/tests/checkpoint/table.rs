//! What is read from good folders.

use std::sync::{Arc, Mutex};

use ninfer_core::{DType, WeightFormat};
use ninfer_models::weights::{EntryRole, ExpertPart, LayerRef, MtpState, Stored, VectorRole};
use ninfer_models::{Error, WeightTable};
use ninfer_quant::checkpoint::StoredKind;
use ninfer_quant::{Recipe, TensorRole};

use crate::store::{Store, TEXT, Tensor, file, fixture, plain};

const KEEP: Recipe = Recipe::Keep;

/// Loads everything once.
fn load_all(table: &WeightTable) {
    for entry in table.entries() {
        match entry.role {
            EntryRole::Matrix(TensorRole::ExpertGate) => {
                table.experts(entry.layer, ExpertPart::GateUp, &KEEP).unwrap();
            }
            EntryRole::Matrix(TensorRole::ExpertUp) => {}
            EntryRole::Matrix(TensorRole::ExpertDown) => {
                table.experts(entry.layer, ExpertPart::Down, &KEEP).unwrap();
            }
            EntryRole::Matrix(role) => {
                table.matrix(entry.layer, role, &KEEP).unwrap();
            }
            EntryRole::Vector(role) => {
                table.vector(entry.layer, role).unwrap();
            }
            _ => unreachable!(),
        }
    }
}

#[test]
fn fixtures_open_and_account_for_every_byte() {
    for (name, layers, tied) in [("tiny-dense", 4, false), ("tiny-tied", 3, true), ("tiny-moe", 3, false)] {
        let table = WeightTable::open(fixture(name)).unwrap();
        assert_eq!((table.layers(), table.mtp_layers(), table.mtp()), (layers, 1, MtpState::Complete), "{name}");
        assert_eq!(table.shares_head(), tied);
        let stored = table.checkpoint().tensors().iter();
        let expected: u64 = stored.filter(|t| !t.name().starts_with("model.visual.")).map(|t| t.bytes()).sum();
        assert_eq!(table.total_bytes(), expected, "{name}");

        // The same sum from the shape alone: BF16 but for the F32 tensors, which are the smaller ones.
        let entries = table.entries();
        let elements: u64 = entries.iter().map(|e| (e.count * e.shape.iter().product::<usize>()) as u64).sum();
        let shape = table.shape();
        assert_eq!(shape.parameters().total(), elements, "{name}");
        load_all(&table);
    }
}

#[test]
fn values_are_those_of_the_file() {
    let store = Store::fixture("tiny-dense");
    let table = store.open().unwrap();
    let matrix = |layer, role| plain(table.matrix(layer, role, &KEEP).unwrap());
    let stored = |name: &str| &store.tensors[name];
    for (layer, role, name) in [
        (LayerRef::Root, TensorRole::Embedding, "model.language_model.embed_tokens.weight"),
        (LayerRef::Root, TensorRole::Head, "lm_head.weight"),
        (LayerRef::Main(0), TensorRole::GdnQkv, "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"),
        (LayerRef::Main(3), TensorRole::AttnQ, "model.language_model.layers.3.self_attn.q_proj.weight"),
        (LayerRef::Main(2), TensorRole::MlpDown, "model.language_model.layers.2.mlp.down_proj.weight"),
        (LayerRef::Mtp, TensorRole::MtpFc, "mtp.fc.weight"),
        (LayerRef::Mtp, TensorRole::AttnOut, "mtp.layers.0.self_attn.o_proj.weight"),
    ] {
        assert_eq!(matrix(layer, role), (DType::Bf16, stored(name).bytes.clone()), "{name}");
    }
    for (layer, role, name) in [
        (LayerRef::Root, VectorRole::FinalNorm, "model.language_model.norm.weight"),
        (LayerRef::Main(0), VectorRole::ALog, "model.language_model.layers.0.linear_attn.A_log"), // F32
        (LayerRef::Main(0), VectorRole::DtBias, "model.language_model.layers.0.linear_attn.dt_bias"), // BF16
        (LayerRef::Main(2), VectorRole::Conv, "model.language_model.layers.2.linear_attn.conv1d.weight"),
        (LayerRef::Main(1), VectorRole::KNorm, "model.language_model.layers.1.self_attn.k_norm.weight"),
        (LayerRef::Mtp, VectorRole::FinalNorm, "mtp.norm.weight"),
        (LayerRef::Mtp, VectorRole::InputNorm, "mtp.layers.0.input_layernorm.weight"),
        (LayerRef::Mtp, VectorRole::HiddenNorm, "mtp.pre_fc_norm_hidden.weight"),
    ] {
        assert_eq!(table.vector(layer, role).unwrap(), stored(name).values(), "{name}");
    }
    assert_eq!(table.vector(LayerRef::Main(0), VectorRole::Conv).unwrap().len(), 320 * 4);
}

#[test]
fn what_a_layer_does_not_have_is_an_error() {
    let table = WeightTable::open(fixture("tiny-dense")).unwrap();
    let none = |e| matches!(e, Error::NoSuchWeight { .. });
    assert!(none(table.matrix(LayerRef::Main(0), TensorRole::AttnQ, &KEEP).unwrap_err()));
    assert!(none(table.matrix(LayerRef::Main(4), TensorRole::MlpUp, &KEEP).unwrap_err()));
    assert!(none(table.matrix(LayerRef::Main(0), TensorRole::ExpertUp, &KEEP).unwrap_err()));
    assert!(none(table.vector(LayerRef::Main(1), VectorRole::ALog).unwrap_err()));
    assert!(none(table.experts(LayerRef::Main(0), ExpertPart::Down, &KEEP).unwrap_err()));
}

#[test]
fn the_three_prefixes_are_the_same_model() {
    let store = Store::fixture("tiny-dense");
    let reference = store.open().unwrap();
    let q = |t: &WeightTable| t.matrix(LayerRef::Main(1), TensorRole::AttnQ, &KEEP).unwrap();
    for (prefix, outer) in [("model.", ""), ("language_model.model.", "language_model."), ("language_model.model.", "")]
    {
        let mut renamed = store.clone();
        for name in store.tensors.keys() {
            if let Some(rest) = name.strip_prefix(TEXT) {
                renamed.rename(name, &format!("{prefix}{rest}"));
            } else if !name.starts_with("model.visual.") {
                renamed.rename(name, &format!("{outer}{name}"));
            }
        }
        let table = renamed.open().unwrap();
        assert_eq!((table.mtp(), table.shares_head()), (MtpState::Complete, false));
        assert_eq!(q(&table), q(&reference));
        assert_eq!(table.total_bytes(), reference.total_bytes());
    }
}

#[test]
fn two_prefixes_at_once_are_refused() {
    let mut store = Store::fixture("tiny-tied");
    store.rename("model.language_model.norm.weight", "model.norm.weight");
    assert!(matches!(store.open(), Err(Error::MixedPrefixes { .. })));
}

#[test]
fn head_and_tying_combine_in_four_ways() {
    let open = |stored: bool, declared: bool| {
        let mut store = Store::fixture("tiny-dense");
        store.config["tie_word_embeddings"] = declared.into();
        if !stored {
            store.remove("lm_head.weight");
        }
        store.open()
    };
    let head = |t: &WeightTable| plain(t.matrix(LayerRef::Root, TensorRole::Head, &KEEP).unwrap());
    let embedding = |t: &WeightTable| plain(t.matrix(LayerRef::Root, TensorRole::Embedding, &KEEP).unwrap());
    for declared in [false, true] {
        let table = open(true, declared).unwrap();
        assert!(!table.shares_head() && !table.shape().tied);
        assert_ne!(head(&table), embedding(&table));
    }
    let shared = open(false, true).unwrap();
    assert!(shared.shares_head() && shared.shape().tied);
    assert_eq!(head(&shared), embedding(&shared));
    let error = open(false, false).unwrap_err();
    assert_eq!(error, Error::NoHead { tensor: "lm_head.weight".to_owned() });
    assert!(error.help().contains("tie_word_embeddings"));

    // A caller that knows better says so.
    let mut store = Store::fixture("tiny-dense");
    store.remove("lm_head.weight");
    assert!(store.open_with(|c| c.tied = true).unwrap().shares_head());
}

#[test]
fn shards_may_have_any_name() {
    let store = Store::fixture("tiny-dense");
    let dir = tempfile::tempdir().unwrap();
    store.write_sharded(dir.path(), |name| match name.split('.').nth(3) {
        Some(layer) if name.contains(".layers.") => format!("layers-{layer}.safetensors"),
        _ if name.starts_with("mtp.") => "mtp".to_owned(),
        _ => "outside.safetensors".to_owned(),
    });
    let (sharded, single) = (WeightTable::open(dir.path()).unwrap(), store.open().unwrap());
    assert_eq!(sharded.entries(), single.entries());
    for role in [TensorRole::GdnQkv, TensorRole::MlpUp] {
        let layer = LayerRef::Main(2);
        assert_eq!(sharded.matrix(layer, role, &KEEP).unwrap(), single.matrix(layer, role, &KEEP).unwrap());
    }
}

#[test]
fn data_may_start_at_an_odd_offset() {
    let store = Store::fixture("tiny-tied");
    let reference = store.open().unwrap();
    let role = VectorRole::PostNorm;
    for padding in 1..4 {
        let dir = tempfile::tempdir().unwrap();
        store.write(dir.path());
        std::fs::write(dir.path().join("model.safetensors"), file(&store.tensors, padding)).unwrap();
        let table = WeightTable::open(dir.path()).unwrap();
        let norm = table.vector(LayerRef::Mtp, role).unwrap();
        assert_eq!(norm, reference.vector(LayerRef::Mtp, role).unwrap());
        load_all(&table);
    }
}

#[test]
fn recipes_convert_on_load_and_leave_mtp_alone() {
    let table = WeightTable::open(fixture("tiny-dense")).unwrap();
    let recipe: Recipe = "w8".parse().unwrap();
    let format = |layer, role| table.matrix(layer, role, &recipe).unwrap().format().name();
    assert_eq!(format(LayerRef::Main(0), TensorRole::MlpUp), "w8");
    assert_eq!(format(LayerRef::Main(0), TensorRole::GdnA), "bf16");
    assert_eq!(format(LayerRef::Root, TensorRole::Head), "bf16");
    assert_eq!(format(LayerRef::Mtp, TensorRole::MlpUp), "bf16");
    let f32 = table.matrix(LayerRef::Mtp, TensorRole::MlpUp, &Recipe::F32).unwrap();
    assert_eq!(f32.format(), WeightFormat::F32);
    assert_eq!(f32.dequantize(), table.matrix(LayerRef::Mtp, TensorRole::MlpUp, &KEEP).unwrap().dequantize());
}

#[test]
fn progress_counts_up_to_the_total() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&seen);
    let table = WeightTable::open(fixture("tiny-moe"))
        .unwrap()
        .with_progress(move |p| sink.lock().unwrap().push((p.done, p.total)));
    load_all(&table);
    let seen = seen.lock().unwrap();
    let total = table.total_bytes();
    assert!(seen.iter().all(|&(done, t)| done <= total && t == total));
    assert_eq!(seen.iter().map(|&(done, _)| done).max(), Some(total));
}

#[test]
fn entries_tell_format_and_bytes_without_loading() {
    let table = WeightTable::open(fixture("tiny-moe")).unwrap();
    let entries = table.entries();
    assert_eq!(entries.first().map(|e| e.layer), Some(LayerRef::Root));
    assert_eq!(entries.last().map(|e| e.layer), Some(LayerRef::Mtp));
    let find = |layer, role| entries.iter().find(|e| e.layer == layer && e.role == role).unwrap();
    let gate = find(LayerRef::Main(1), EntryRole::Matrix(TensorRole::ExpertGate));
    assert_eq!((gate.count, gate.shape.as_slice(), gate.bytes), (6, &[32, 64][..], 6 * 32 * 64 * 2));
    assert_eq!(gate.stored, Stored::Elements(DType::Bf16));
    let q = find(LayerRef::Main(2), EntryRole::Matrix(TensorRole::AttnQ));
    assert_eq!(
        (q.name.as_str(), q.stored),
        ("model.language_model.layers.2.self_attn.q_proj", Stored::Matrix(StoredKind::Plain(DType::Bf16)))
    );
    let conv = find(LayerRef::Main(0), EntryRole::Vector(VectorRole::Conv));
    assert_eq!((conv.shape.as_slice(), conv.role.to_string().as_str()), (&[256, 1, 4][..], "gdn.conv"));
}

#[test]
fn a_head_that_never_decays_is_legal_and_nothing_else_is_infinite() {
    const A_LOG: &str = "model.language_model.layers.1.linear_attn.A_log";
    const NORM: &str = "model.language_model.layers.1.input_layernorm.weight";
    let mut store = Store::fixture("tiny-tied");
    store.insert(A_LOG, Tensor::f32(&[2], &[f32::NEG_INFINITY, 0.0]));
    let values = |store: &Store, role| store.open().unwrap().vector(LayerRef::Main(1), role);
    assert_eq!(values(&store, VectorRole::ALog).unwrap(), [f32::NEG_INFINITY, 0.0]);
    store.insert(A_LOG, Tensor::bf16(&[2], &[0.0, f32::NEG_INFINITY]));
    assert_eq!(values(&store, VectorRole::ALog).unwrap(), [0.0, f32::NEG_INFINITY]);
    store.insert(A_LOG, Tensor::f32(&[2], &[0.0, f32::INFINITY]));
    let error = Error::NonFinite { tensor: A_LOG.to_owned(), index: 1, value: f32::INFINITY };
    assert_eq!(values(&store, VectorRole::ALog).unwrap_err(), error);
    store.insert(A_LOG, Tensor::f32(&[2], &[f32::NAN, 0.0]));
    assert!(matches!(values(&store, VectorRole::ALog), Err(Error::NonFinite { index: 0, .. })));
    let mut norm = vec![0.0; 64];
    norm[63] = f32::NEG_INFINITY;
    store.insert(NORM, Tensor::bf16(&[64], &norm));
    let error = values(&store, VectorRole::InputNorm).unwrap_err();
    assert!(matches!(&error, Error::NonFinite { tensor, index: 63, .. } if tensor == NORM), "{error}");
}

#[test]
fn a_matrix_with_nan_is_refused_by_name() {
    const MODULE: &str = "model.language_model.layers.0.mlp.up_proj";
    let mut store = Store::fixture("tiny-tied");
    let name = format!("{MODULE}.weight");
    let mut values = store.tensors[&name].values();
    values[64 + 7] = f32::NAN;
    store.insert(name.clone(), Tensor::bf16(&[96, 64], &values));
    let load = |store: &Store| store.open().unwrap().matrix(LayerRef::Main(0), TensorRole::MlpUp, &KEEP);
    let error = load(&store).unwrap_err();
    let expected = |e: &Error| {
        let Error::Quant { module, source } = e else { return false };
        module == MODULE && matches!(source, ninfer_quant::Error::NonFinite { row: 1, col: 7, .. })
    };
    assert!(expected(&error), "{error}");
    values[64 + 7] = f32::INFINITY;
    store.insert(name, Tensor::f32(&[96, 64], &values));
    assert!(expected(&load(&store).unwrap_err()));
}
