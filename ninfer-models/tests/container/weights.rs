//! The weight table of a container.

use std::sync::{Arc, Mutex};

use ninfer_core::WeightFormat;
use ninfer_core::format::GroupFormat;
use ninfer_models::container::{Container, is_container};
use ninfer_models::weights::{EntryRole, ExpertPart, LayerRef, MtpState, Stored, VectorRole};
use ninfer_models::{Error, WeightTable};
use ninfer_quant::checkpoint::StoredKind;
use ninfer_quant::container::ContainerFormat;
use ninfer_quant::{PackedMatrix, Recipe, TensorRole, widen};

use crate::file::{Fusion, convert, encoded, fixture, query_and_gate};

const BF16: ContainerFormat = ContainerFormat::Bf16;
const Q4: ContainerFormat = ContainerFormat::Group(GroupFormat::Q4);
const Q5: ContainerFormat = ContainerFormat::Group(GroupFormat::Q5);
const Q6: ContainerFormat = ContainerFormat::Group(GroupFormat::Q6);
const W8: ContainerFormat = ContainerFormat::Group(GroupFormat::W8);

/// The groupwise recipe of the dense model.
fn dense(name: &str) -> ContainerFormat {
    match name {
        n if n.starts_with("mtp/") => W8,
        "text/token_embedding" | "text/output_head" => Q6,
        n if n.ends_with("query_key") || n.ends_with("gate_up") => Q4,
        n if n.ends_with("gate_value") || n.ends_with("value_z") || n.ends_with("output") || n.ends_with("down") => Q5,
        _ => BF16,
    }
}

/// That of the MoE model, with one layer's down projections in six bits.
fn moe(name: &str) -> ContainerFormat {
    match name {
        n if n.ends_with("router_shared_gate") || n.ends_with("a_b_projection") => BF16,
        n if n.starts_with("mtp/") || n == "text/token_embedding" => W8,
        "text/output_head" | "text/layers/2/moe/routed_down" => Q6,
        n if n.ends_with("routed_gate_up") => Q4,
        n if n.ends_with("routed_down") => Q5,
        _ => W8,
    }
}

fn values(table: &WeightTable, layer: LayerRef, role: TensorRole) -> (usize, usize, Vec<f32>) {
    let m = table.matrix(layer, role, &Recipe::Keep).unwrap();
    (m.rows(), m.cols(), m.dequantize())
}

#[test]
fn the_dense_groupwise_inventory_is_read_exactly() {
    let source = WeightTable::open(fixture("tiny-dense")).unwrap();
    let (_dir, path) = convert("tiny-dense", Fusion::Pairs, &dense).write(2, "tiny-dense");
    let table = WeightTable::open(&path).unwrap();
    assert_eq!((table.mtp(), table.layers(), table.shares_head()), (MtpState::Complete, 4, false));
    let read = |layer, role| table.matrix(layer, role, &Recipe::Keep).unwrap();
    let expect = |layer, role, format| {
        let (rows, cols, w) = values(&source, layer, role);
        assert_eq!(read(layer, role), encoded(format, rows, cols, &w), "{layer} {role}");
    };
    for layer in (0..4).map(LayerRef::Main) {
        for (role, format) in [(TensorRole::MlpGate, Q4), (TensorRole::MlpUp, Q4), (TensorRole::MlpDown, Q5)] {
            expect(layer, role, format);
        }
    }
    let gdn = LayerRef::Main(2);
    for (role, format) in
        [(TensorRole::GdnZ, Q5), (TensorRole::GdnOut, Q5), (TensorRole::GdnA, BF16), (TensorRole::GdnB, BF16)]
    {
        expect(gdn, role, format);
    }
    // Rows of two formats: the four-bit ones are held in five bits, weight for weight.
    let (rows, cols, qkv) = values(&source, gdn, TensorRole::GdnQkv);
    let (query_key, value) = qkv.split_at(128 * cols);
    let four = widen(&encoded(Q4, 128, cols, query_key), GroupFormat::Q5).unwrap();
    let five = encoded(Q5, rows - 128, cols, value);
    assert_eq!(read(gdn, TensorRole::GdnQkv), PackedMatrix::concat_rows(&[&four, &five]).unwrap());
    let attention = LayerRef::Main(1);
    expect(attention, TensorRole::AttnK, Q4);
    expect(attention, TensorRole::AttnV, Q5);
    let (_, cols, q) = values(&source, attention, TensorRole::AttnQ);
    let (query, gate) = query_and_gate(&q, 4);
    let (query, gate) = (encoded(Q4, 256, cols, &query).dequantize(), encoded(Q5, 256, cols, &gate).dequantize());
    let got = read(attention, TensorRole::AttnQ);
    let (got_query, got_gate) = query_and_gate(&got.dequantize(), 4);
    assert_eq!((got.format(), got_query, got_gate), (WeightFormat::Group(GroupFormat::Q5), query, gate));
    // The MTP block: one object in eight bits.
    let (rows, cols, q) = values(&source, LayerRef::Mtp, TensorRole::AttnQ);
    assert_eq!(read(LayerRef::Mtp, TensorRole::AttnQ), encoded(W8, rows, cols, &q));
    for (layer, role) in [
        (gdn, VectorRole::Conv),
        (gdn, VectorRole::ALog),
        (gdn, VectorRole::GdnNorm),
        (attention, VectorRole::KNorm),
        (LayerRef::Mtp, VectorRole::HiddenNorm),
        (LayerRef::Root, VectorRole::FinalNorm),
    ] {
        assert_eq!(table.vector(layer, role).unwrap(), source.vector(layer, role).unwrap(), "{layer} {role}");
    }
}

#[test]
fn the_moe_groupwise_inventory_is_read_exactly() {
    let source = WeightTable::open(fixture("tiny-moe")).unwrap();
    let (_dir, path) = convert("tiny-moe", Fusion::Whole, &moe).write(2, "tiny-moe");
    let table = WeightTable::open(&path).unwrap();
    for (layer, down) in [(LayerRef::Main(0), Q5), (LayerRef::Main(2), Q6), (LayerRef::Mtp, W8)] {
        let gate_up = if layer == LayerRef::Mtp { W8 } else { Q4 };
        for (part, format) in [(ExpertPart::GateUp, gate_up), (ExpertPart::Down, down)] {
            let plain = source.experts(layer, part, &Recipe::Keep).unwrap();
            let expected: Vec<PackedMatrix> =
                plain.iter().map(|m| encoded(format, m.rows(), m.cols(), &m.dequantize())).collect();
            assert_eq!(table.experts(layer, part, &Recipe::Keep).unwrap(), expected, "{layer}");
        }
        for role in [TensorRole::Router, TensorRole::SharedExpertGate] {
            assert_eq!(
                table.matrix(layer, role, &Recipe::Keep).unwrap(),
                source.matrix(layer, role, &Recipe::Keep).unwrap()
            );
        }
        for role in [TensorRole::SharedGate, TensorRole::SharedUp, TensorRole::SharedDown] {
            let (rows, cols, w) = values(&source, layer, role);
            assert_eq!(table.matrix(layer, role, &Recipe::Keep).unwrap(), encoded(W8, rows, cols, &w));
        }
    }
}

#[test]
fn nvfp4_and_fp8_objects_are_cut_by_rows() {
    let formats = |name: &str| match name {
        n if n.ends_with("query_key_gate_value") || n.ends_with("query_key_value_z") => ContainerFormat::Nvfp4,
        n if n.ends_with("down") || n.ends_with("gate_up") => ContainerFormat::Fp8Row,
        _ => BF16,
    };
    let source = WeightTable::open(fixture("tiny-dense")).unwrap();
    let mut objects = convert("tiny-dense", Fusion::Whole, &formats);
    objects.tensor("text/layers/0/gdn/input_projection/input_scale_divisor", ContainerFormat::F32, &[], vec![0; 4]);
    let (_dir, path) = objects.write(2, "tiny-dense");
    let table = WeightTable::open(&path).unwrap();
    let read = |layer, role| table.matrix(layer, role, &Recipe::Keep).unwrap();
    let layer = LayerRef::Main(0);
    let (_, cols, qkv) = values(&source, layer, TensorRole::GdnQkv);
    let (z_rows, _, z) = values(&source, layer, TensorRole::GdnZ);
    let whole = encoded(ContainerFormat::Nvfp4, 320 + z_rows, cols, &[qkv, z].concat());
    assert_eq!(read(layer, TensorRole::GdnQkv), whole.slice_rows(0..320).unwrap());
    assert_eq!(read(layer, TensorRole::GdnZ), whole.slice_rows(320..512).unwrap());
    let (rows, cols, up) = values(&source, layer, TensorRole::MlpUp);
    assert_eq!(read(layer, TensorRole::MlpUp), encoded(ContainerFormat::Fp8Row, rows, cols, &up));
    // Query and gate of one NVFP4 object share its divisor.
    let attention = LayerRef::Main(1);
    let (_, cols, q) = values(&source, attention, TensorRole::AttnQ);
    let (query, gate) = query_and_gate(&q, 4);
    let (k, v) = (values(&source, attention, TensorRole::AttnK).2, values(&source, attention, TensorRole::AttnV).2);
    let whole = encoded(ContainerFormat::Nvfp4, 768, cols, &[query, k, gate, v].concat()).dequantize();
    let (query, gate) = query_and_gate(&read(attention, TensorRole::AttnQ).dequantize(), 4);
    assert_eq!((&query[..], &gate[..]), (&whole[..256 * cols], &whole[384 * cols..640 * cols]));
    let bridge = table.matrix(attention, TensorRole::AttnK, &"bridge-fp8".parse().unwrap()).unwrap();
    assert_eq!(bridge.format(), WeightFormat::Fp8Row);
}

#[test]
fn entries_and_progress_account_for_every_byte() {
    let (_dir, path) = convert("tiny-moe", Fusion::Whole, &moe).write(2, "tiny-moe");
    let seen = Arc::new(Mutex::new(0));
    let sink = Arc::clone(&seen);
    let table = WeightTable::open(&path).unwrap().with_progress(move |p| {
        assert_eq!(p.done.max(p.total), p.total);
        let mut most = sink.lock().unwrap();
        *most = p.done.max(*most);
    });
    let entries = table.entries();
    for e in &entries {
        match e.role {
            EntryRole::Matrix(TensorRole::ExpertGate) => {
                drop(table.experts(e.layer, ExpertPart::GateUp, &Recipe::Keep))
            }
            EntryRole::Matrix(TensorRole::ExpertDown) => drop(table.experts(e.layer, ExpertPart::Down, &Recipe::Keep)),
            EntryRole::Matrix(TensorRole::ExpertUp) => {}
            EntryRole::Matrix(role) => drop(table.matrix(e.layer, role, &Recipe::Keep).unwrap()),
            EntryRole::Vector(role) => drop(table.vector(e.layer, role).unwrap()),
            _ => unreachable!(),
        }
    }
    assert_eq!(*seen.lock().unwrap(), table.total_bytes());
    let elements: u64 = entries.iter().map(|e| (e.count * e.shape.iter().product::<usize>()) as u64).sum();
    assert_eq!(table.shape().parameters().total(), elements);
    let up = entries.iter().find(|e| e.role == EntryRole::Matrix(TensorRole::ExpertUp)).unwrap();
    assert_eq!((up.count, up.shape.as_slice()), (6, &[32, 64][..]));
    assert_eq!(up.stored, Stored::Matrix(StoredKind::Groupwise(GroupFormat::Q4)));
    assert_eq!(entries.last().map(|e| e.layer), Some(LayerRef::Mtp));
    assert_eq!(table.container().map(Container::model_id), Some("tiny"));
}

#[test]
fn missing_and_unknown_objects_are_listed() {
    let good = convert("tiny-dense", Fusion::Pairs, &|_| BF16);
    let open = |change: &dyn Fn(&mut crate::file::Objects)| {
        let mut objects = good.clone();
        change(&mut objects);
        let (_dir, path) = objects.write(2, "tiny-dense");
        WeightTable::open(path)
    };
    let error = open(&|o| {
        o.remove("text/layers/3/attention/gate_value");
        o.tensor("text/layers/9/mlp/down", BF16, &[1, 1], vec![0; 2]);
    });
    let Err(Error::TensorList { missing, unexpected }) = error else { panic!() };
    assert_eq!(
        (missing.names(), unexpected.names()),
        (&["text/layers/3/attention/gate_value".to_owned()][..], &["text/layers/9/mlp/down".to_owned()][..])
    );
    let Err(Error::NoHead { tensor }) = open(&|o| o.remove("text/output_head")) else { panic!() };
    assert_eq!(tensor, "text/output_head");
    let Err(Error::IncompleteMtp { missing }) = open(&|o| o.remove("mtp/hidden_norm")) else { panic!() };
    assert_eq!(missing.names(), ["mtp/hidden_norm"]);
    let none = open(&|o| o.list.retain(|(o, _)| !o["name"].as_str().unwrap().starts_with("mtp/")));
    assert_eq!(none.unwrap().mtp(), MtpState::Absent);
    // Objects of other parts are skipped.
    let other = open(&|o| {
        o.tensor("vision/patch_embedding_bias", BF16, &[3], vec![0; 6]);
        o.tensor("dflash/layer/x", BF16, &[3], vec![0; 6]);
        o.tensor("text/draft_head", Q4, &[1, 64], vec![0; 260]);
        o.tensor("text/draft_head_token_ids", ContainerFormat::I32, &[1], vec![0; 4]);
        o.resource("frontend/x", b"y");
    });
    assert_eq!(other.unwrap().total_bytes(), open(&|_| {}).unwrap().total_bytes());
}

#[test]
fn wrong_shapes_and_formats_name_file_and_object() {
    let good = convert("tiny-dense", Fusion::Pairs, &|_| BF16);
    let replaced = |name: &str, format: ContainerFormat, shape: &[usize]| {
        let mut objects = good.clone();
        let at = objects.position(name);
        objects.list.remove(at);
        objects.tensor(name, format, shape, vec![0; format.object_bytes(shape).unwrap() as usize]);
        let (_dir, path) = objects.write(2, "tiny-dense");
        (WeightTable::open(&path).unwrap_err(), path)
    };
    let (error, path) = replaced("text/layers/0/mlp/down", BF16, &[64, 81]);
    let Error::TensorShape { file, tensor, expected, got } = error else { panic!("{error}") };
    assert_eq!((file, tensor.as_str()), (path, "text/layers/0/mlp/down"));
    assert_eq!((expected, got), (vec![64, 80], vec![64, 81]));
    let (error, _) = replaced("text/layers/0/mlp/down", ContainerFormat::I32, &[64, 80]);
    assert!(matches!(&error, Error::TensorDType { tensor, got, .. } if tensor.ends_with("mlp/down") && got == "I32"));
    let (error, _) = replaced("text/final_norm", ContainerFormat::I32, &[64]);
    assert!(matches!(error, Error::TensorDType { .. }));
    // One tap of a convolution transposed.
    let (error, _) = replaced("text/layers/0/gdn/convolution", BF16, &[320, 4]);
    assert!(matches!(error, Error::TensorShape { .. }), "{error}");
    // Halves of a module in formats that do not join.
    let formats = |name: &str| if name.ends_with("gate_value") { Q5 } else { BF16 };
    let (_dir, path) = convert("tiny-dense", Fusion::Pairs, &formats).write(2, "tiny-dense");
    let error =
        WeightTable::open(path).unwrap().matrix(LayerRef::Main(1), TensorRole::AttnQ, &Recipe::Keep).unwrap_err();
    assert!(error.to_string().contains("text/layers/1/attention/query_key"), "{error}");
}

#[test]
fn a_model_without_a_configuration_is_refused() {
    let objects = convert("tiny-dense", Fusion::Pairs, &|_| BF16);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.ninfer");
    std::fs::write(&path, objects.file(2, "tiny").0).unwrap();
    let error = WeightTable::open(&path).unwrap_err();
    assert!(matches!(&error, Error::UnknownContainer { model_id, .. } if model_id == "tiny"), "{error}");
    assert!(error.help().contains("config.json"));
    // A caller may bring it.
    let config = ninfer_models::Config::from_dir(fixture("tiny-dense")).unwrap();
    assert!(WeightTable::open_with(&path, config).is_ok());
    // A known model has its own, and these are not its weights.
    std::fs::write(&path, objects.file(1, "qwen3.6-27b").0).unwrap();
    assert!(matches!(WeightTable::open(&path), Err(Error::TensorShape { .. })));
    // A folder of that name is a folder.
    assert!(is_container(&path) && !is_container(dir.path()));
    let folder = dir.path().join("folder.ninfer");
    std::fs::create_dir(&folder).unwrap();
    assert!(!is_container(&folder));
}
