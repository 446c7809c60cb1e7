//! Writing checkpoints, and walking over their matrices one by one.

use ninfer_core::format::GroupFormat;
use ninfer_core::{DType, WeightFormat};
use ninfer_models::checkpoint::{Checkpoint, CheckpointWriter, NewTensor};
use ninfer_models::weights::{ExpertPart, WeightTable};
use ninfer_models::{Error, Recipe};
use ninfer_quant::TensorRole;
use ninfer_quant::checkpoint::StoredKind;
use ninfer_quant::writer::{BlockScaleName, tensors};

use crate::store::{Store, TEXT, Tensor, fixture};

fn plan() -> Vec<NewTensor> {
    vec![
        NewTensor::new("codes", DType::U8, &[3]),
        NewTensor::new("scale", DType::F32, &[]),
        NewTensor::new("empty", DType::I64, &[0, 4]),
        NewTensor::new("half", DType::Bf16, &[2, 1]),
    ]
}

fn fill(writer: &mut CheckpointWriter) {
    writer.write(3, 2, &[7, 8]).unwrap();
    writer.write(0, 0, &[1, 2, 3]).unwrap();
    writer.write(3, 0, &[5, 6]).unwrap();
    writer.write(1, 0, &1.5f32.to_le_bytes()).unwrap();
}

#[test]
fn pieces_in_any_order_become_files() {
    for (shard_bytes, files) in [(1000, 1), (7, 2), (1, 3)] {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = CheckpointWriter::create(folder.path(), &plan(), shard_bytes).unwrap();
        let planned: Vec<_> = writer.files().map(|(path, bytes)| (path.to_owned(), bytes)).collect();
        assert_eq!(planned.len(), files, "{shard_bytes}");
        fill(&mut writer);
        let written = writer.finish().unwrap();
        assert_eq!(written.len(), files + usize::from(files > 1));
        for (path, bytes) in planned {
            assert_eq!(std::fs::metadata(path).unwrap().len(), bytes);
        }
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let read = |name: &str| checkpoint.read(checkpoint.get(name).unwrap()).unwrap();
        assert_eq!((read("codes"), read("half"), read("empty")), (vec![1, 2, 3], vec![5, 6, 7, 8], vec![]));
        assert_eq!(read("scale"), 1.5f32.to_le_bytes());
        assert_eq!(checkpoint.get("empty").unwrap().shape(), [0, 4]);
    }
}

#[test]
fn files_are_nothing_until_they_are_full() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = CheckpointWriter::create(folder.path(), &plan(), 1000).unwrap();
    writer.write(0, 0, &[1, 2, 3]).unwrap();
    writer.write(3, 0, &[1, 2, 3, 4]).unwrap();
    // The tensor that lies last in the file is there, so the file has its full length already.
    assert!(matches!(Checkpoint::open(folder.path()).unwrap_err(), Error::Header { .. }));
    let error = writer.finish().unwrap_err();
    assert!(matches!(error, Error::Unwritten { bytes: 4, .. }), "{error}");
    assert!(Checkpoint::open(folder.path()).is_err());
}

#[test]
fn pieces_outside_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = CheckpointWriter::create(folder.path(), &plan(), 1000).unwrap();
    for (index, offset, bytes) in [(0, 1, 3), (1, u64::MAX, 1), (9, 0, 1)] {
        let error = writer.write(index, offset, &vec![0; bytes]).unwrap_err();
        assert!(matches!(error, Error::Unwritten { .. }), "{error}");
    }
    let twice = [NewTensor::new("a", DType::U8, &[1]), NewTensor::new("a", DType::U8, &[1])];
    let error = CheckpointWriter::create(folder.path(), &twice, 9).unwrap_err();
    assert!(matches!(&error, Error::DuplicateTensor { tensor, .. } if tensor == "a"), "{error}");
}

#[test]
fn files_that_are_there_are_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("model.safetensors"), "mine").unwrap();
    let mut writer = CheckpointWriter::create(folder.path(), &plan(), 1000).unwrap();
    assert!(matches!(writer.write(0, 0, &[1, 2, 3]).unwrap_err(), Error::Io { action: "write", .. }));
    assert_eq!(std::fs::read(folder.path().join("model.safetensors")).unwrap(), b"mine");
}

#[test]
fn every_place_reads_the_matrix_of_the_table() {
    for name in ["tiny-dense", "tiny-moe", "tiny-tied"] {
        let table = WeightTable::open(fixture(name)).unwrap();
        let places = table.places();
        assert!(places.windows(2).all(|w| w[0].layer <= w[1].layer));
        for place in &places {
            let got = table.read_place(place).unwrap();
            let expected = match (place.role, place.expert) {
                (TensorRole::ExpertGate, Some(e)) => {
                    table.experts(place.layer, ExpertPart::GateUp, &Recipe::Keep).unwrap()[2 * e].clone()
                }
                (TensorRole::ExpertUp, Some(e)) => {
                    table.experts(place.layer, ExpertPart::GateUp, &Recipe::Keep).unwrap()[2 * e + 1].clone()
                }
                (TensorRole::ExpertDown, Some(e)) => {
                    table.experts(place.layer, ExpertPart::Down, &Recipe::Keep).unwrap()[e].clone()
                }
                (role, _) => table.matrix(place.layer, role, &Recipe::Keep).unwrap(),
            };
            assert!(got == expected, "{}", place.name);
            assert_eq!((got.rows(), got.cols()), (place.rows, place.cols));
        }
        let stored: u64 = table.entries().iter().map(|e| e.bytes).sum();
        let elements: usize = places.iter().map(|p| p.rows * p.cols).sum();
        assert!(2 * elements as u64 <= stored);
    }
}

/// Stores a matrix of the model as groupwise integers.
fn groupwise(store: &mut Store, module: &str, format: GroupFormat) -> ninfer_quant::PackedMatrix {
    let plain = store.remove(&format!("{module}.weight"));
    let m = ninfer_quant::encode(WeightFormat::Group(format), plain.shape[0], plain.shape[1], &plain.values()).unwrap();
    for t in tensors(&m, BlockScaleName::default()).unwrap() {
        let dtype = match t.layout.dtype {
            DType::I8 => "I8",
            DType::F16 => "F16",
            DType::I64 => "I64",
            _ => "U8",
        };
        let tensor = Tensor::new(dtype, &t.layout.shape, t.bytes.to_vec());
        store.insert(format!("{module}.{}", t.layout.suffix), tensor);
    }
    m
}

#[test]
fn groupwise_integers_are_found_and_read() {
    let mut store = Store::fixture("tiny-dense");
    let module = |leaf: &str| format!("{TEXT}layers.0.mlp.{leaf}");
    let gate = groupwise(&mut store, &module("gate_proj"), GroupFormat::Q4);
    let up = groupwise(&mut store, &module("up_proj"), GroupFormat::Q6);
    let down = groupwise(&mut store, &module("down_proj"), GroupFormat::W8);
    store.config["quantization_config"] = serde_json::json!({ "quant_method": "ninfer", "version": 1 });
    let table = store.open().unwrap();
    let layer = ninfer_models::weights::LayerRef::Main(0);
    for (role, m) in [(TensorRole::MlpGate, gate), (TensorRole::MlpUp, up), (TensorRole::MlpDown, down)] {
        assert_eq!(table.matrix(layer, role, &Recipe::Keep).unwrap(), m);
        let place = table.places().into_iter().find(|p| (p.layer, p.role) == (layer, role)).unwrap();
        let WeightFormat::Group(format) = m.format() else { panic!() };
        assert_eq!(place.stored, StoredKind::Groupwise(format));
    }

    store.config["quantization_config"]["version"] = serde_json::json!(2);
    assert!(matches!(store.open().unwrap_err(), Error::UnsupportedQuantization { .. }));
    store.config["quantization_config"]["version"] = serde_json::json!(1);
    let shape = store.remove(&format!("{}.weight_shape", module("up_proj")));
    assert!(matches!(store.open().unwrap_err(), Error::TensorList { .. }));
    store.insert(format!("{}.weight_shape", module("up_proj")), Tensor::new("I64", &[2], vec![255; shape.bytes.len()]));
    let error = store.open().unwrap().matrix(layer, TensorRole::MlpUp, &Recipe::Keep).unwrap_err();
    assert!(matches!(error, Error::Quant { source: ninfer_quant::Error::TensorValue { .. }, .. }), "{error}");
}
