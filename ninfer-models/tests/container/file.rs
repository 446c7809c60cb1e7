//! Writing containers.

use std::path::{Path, PathBuf};

use ninfer_models::weights::{ExpertPart, LayerRef, MtpState, VectorRole, WeightTable};
use ninfer_quant::container::{ALIGNMENT, ContainerFormat, encode};
use ninfer_quant::{PackedMatrix, PackedParts, Recipe, TensorRole};
use serde_json::{Value, json};
use tempfile::TempDir;

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Objects with their payloads, in the order of a file.
#[derive(Clone, Default)]
pub(crate) struct Objects {
    pub(crate) list: Vec<(Value, Vec<u8>)>,
}

impl Objects {
    pub(crate) fn tensor(&mut self, name: &str, format: ContainerFormat, shape: &[usize], bytes: Vec<u8>) {
        let object = json!({
            "name": name, "kind": "tensor", "shape": shape, "format": format.name(), "layout": format.layout(),
        });
        self.list.push((object, bytes));
    }

    pub(crate) fn resource(&mut self, name: &str, bytes: &[u8]) {
        self.list.push((json!({"name": name, "kind": "resource", "encoding": "raw-bytes-v1"}), bytes.to_vec()));
    }

    pub(crate) fn position(&self, name: &str) -> usize {
        self.list.iter().position(|(o, _)| o["name"] == name).unwrap_or_else(|| panic!("{name}"))
    }

    pub(crate) fn remove(&mut self, name: &str) {
        let at = self.position(name);
        self.list.remove(at);
    }

    /// The bytes of a file, and where its payload starts.
    pub(crate) fn file(&self, version: u8, model_id: &str) -> (Vec<u8>, usize) {
        let mut payload: Vec<u8> = Vec::new();
        let mut objects = Vec::new();
        for (object, bytes) in &self.list {
            if object["kind"] == "tensor" {
                payload.resize(payload.len().next_multiple_of(ALIGNMENT as usize), 0);
            }
            let mut object = object.clone();
            object["offset"] = payload.len().into();
            object["bytes"] = bytes.len().into();
            objects.push(object);
            payload.extend_from_slice(bytes);
        }
        let root = match version {
            1 => json!({"model_id": model_id, "objects": objects}),
            _ => json!({"identity": {"model_id": model_id, "weights_id": "test"}, "objects": objects}),
        };
        let directory = root.to_string();
        let mut file = b"NINFER\0".to_vec();
        file.push(version);
        file.extend_from_slice(&(directory.len() as u64).to_le_bytes());
        file.extend_from_slice(directory.as_bytes());
        let start = file.len().next_multiple_of(4096);
        file.resize(start, 0);
        file.extend_from_slice(&payload);
        (file, start)
    }

    /// A folder with the container and, for a model that is not known by its identity, the configuration.
    pub(crate) fn write(&self, version: u8, config: &str) -> (TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tiny.ninfer");
        std::fs::write(&path, self.file(version, "tiny").0).unwrap();
        std::fs::copy(fixture(config).join("config.json"), dir.path().join("config.json")).unwrap();
        (dir, path)
    }
}

/// How an object is stored, by its name.
pub(crate) type Formats<'a> = &'a dyn Fn(&str) -> ContainerFormat;

/// Which objects share their rows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fusion {
    /// As in the groupwise inventory of the dense model: two objects for attention and GDN inputs.
    Pairs,
    /// As in that of the MoE model, and in the MTP block of both: one object.
    Whole,
}

struct Writer<'a> {
    table: &'a WeightTable,
    formats: Formats<'a>,
    fusion: Fusion,
    out: Objects,
}

/// The container that a converter makes of a folder, without vision and draft head.
pub(crate) fn convert(folder: &str, fusion: Fusion, formats: Formats<'_>) -> Objects {
    let table = WeightTable::open(fixture(folder)).unwrap();
    let mut w = Writer { table: &table, formats, fusion, out: Objects::default() };
    let config = table.config();
    w.whole("text/token_embedding", LayerRef::Root, TensorRole::Embedding);
    for i in 0..table.layers() {
        w.layer(&format!("text/layers/{i}/"), LayerRef::Main(i), fusion);
    }
    w.vector("text/final_norm", LayerRef::Root, VectorRole::FinalNorm);
    if !config.tied {
        w.whole("text/output_head", LayerRef::Root, TensorRole::Head);
    }
    if table.mtp() == MtpState::Complete {
        w.whole("mtp/input_projection", LayerRef::Mtp, TensorRole::MtpFc);
        w.vector("mtp/embedding_norm", LayerRef::Mtp, VectorRole::EmbeddingNorm);
        w.vector("mtp/hidden_norm", LayerRef::Mtp, VectorRole::HiddenNorm);
        w.layer("mtp/layer/", LayerRef::Mtp, Fusion::Whole);
        w.vector("mtp/final_norm", LayerRef::Mtp, VectorRole::FinalNorm);
    }
    w.out
}

/// A matrix encoded as an object of this format stores it.
pub(crate) fn encoded(format: ContainerFormat, rows: usize, cols: usize, w: &[f32]) -> PackedMatrix {
    let m = ninfer_quant::encode(format.weight_format().unwrap(), rows, cols, w).unwrap();
    match m.into_parts() {
        PackedParts::Fp8 { codes, scales: ninfer_quant::Fp8ScaleVec::Row(scales) } => {
            // Multipliers are BF16 in a container.
            let scales = scales.iter().map(|&s| half::bf16::from_f32(s).to_f32()).collect();
            let parts = PackedParts::Fp8 { codes, scales: ninfer_quant::Fp8ScaleVec::Row(scales) };
            PackedMatrix::new(rows, cols, parts).unwrap()
        }
        parts => PackedMatrix::new(rows, cols, parts).unwrap(),
    }
}

/// Query and gate rows of a `q_proj`, each of all heads.
pub(crate) fn query_and_gate(w: &[f32], heads: usize) -> (Vec<f32>, Vec<f32>) {
    let head = w.len() / heads;
    let pick = |half: usize| w.chunks(head).flat_map(|h| h[half * head / 2..(half + 1) * head / 2].to_vec()).collect();
    (pick(0), pick(1))
}

impl Writer<'_> {
    fn values(&self, layer: LayerRef, role: TensorRole) -> Vec<f32> {
        self.table.matrix(layer, role, &Recipe::Keep).unwrap().dequantize()
    }

    fn put(&mut self, name: &str, cols: usize, w: &[f32]) {
        let (format, rows) = ((self.formats)(name), w.len() / cols);
        self.out.tensor(name, format, &[rows, cols], encode(&encoded(format, rows, cols, w)).unwrap());
    }

    fn whole(&mut self, name: &str, layer: LayerRef, role: TensorRole) {
        let m = self.table.matrix(layer, role, &Recipe::Keep).unwrap();
        self.put(name, m.cols(), &m.dequantize());
    }

    fn vector(&mut self, name: &str, layer: LayerRef, role: VectorRole) {
        let values = self.table.vector(layer, role).unwrap();
        let n = values.len();
        self.numbers(name, &[n], &values);
    }

    /// FP32, so that any stored vector keeps its values.
    fn numbers(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.out.tensor(name, ContainerFormat::F32, shape, bytes);
    }

    fn layer(&mut self, stem: &str, layer: LayerRef, fusion: Fusion) {
        let h = self.table.config().hidden;
        self.vector(&format!("{stem}input_norm"), layer, VectorRole::InputNorm);
        if self.table.matrix(layer, TensorRole::AttnK, &Recipe::Keep).is_ok() {
            let heads = self.table.config().attention.heads;
            let (query, gate) = query_and_gate(&self.values(layer, TensorRole::AttnQ), heads);
            let (key, value) = (self.values(layer, TensorRole::AttnK), self.values(layer, TensorRole::AttnV));
            let (first, second) = ([query, key].concat(), [gate, value].concat());
            if fusion == Fusion::Pairs {
                self.put(&format!("{stem}attention/query_key"), h, &first);
                self.put(&format!("{stem}attention/gate_value"), h, &second);
            } else {
                self.put(&format!("{stem}attention/query_key_gate_value"), h, &[first, second].concat());
            }
            self.vector(&format!("{stem}attention/query_norm"), layer, VectorRole::QNorm);
            self.vector(&format!("{stem}attention/key_norm"), layer, VectorRole::KNorm);
            self.whole(&format!("{stem}attention/output"), layer, TensorRole::AttnOut);
        } else {
            self.gdn(&format!("{stem}gdn/"), layer);
        }
        self.vector(&format!("{stem}post_attention_norm"), layer, VectorRole::PostNorm);
        if self.table.matrix(layer, TensorRole::MlpGate, &Recipe::Keep).is_ok() {
            let both = [self.values(layer, TensorRole::MlpGate), self.values(layer, TensorRole::MlpUp)].concat();
            self.put(&format!("{stem}mlp/gate_up"), h, &both);
            self.whole(&format!("{stem}mlp/down"), layer, TensorRole::MlpDown);
            return;
        }
        let stem = format!("{stem}moe/");
        let router =
            [self.values(layer, TensorRole::Router), self.values(layer, TensorRole::SharedExpertGate)].concat();
        self.put(&format!("{stem}router_shared_gate"), h, &router);
        for (part, name) in [(ExpertPart::GateUp, "routed_gate_up"), (ExpertPart::Down, "routed_down")] {
            let experts = self.table.experts(layer, part, &Recipe::Keep).unwrap();
            let all: Vec<f32> = experts.iter().flat_map(PackedMatrix::dequantize).collect();
            self.put(&format!("{stem}{name}"), experts[0].cols(), &all);
        }
        let both = [self.values(layer, TensorRole::SharedGate), self.values(layer, TensorRole::SharedUp)].concat();
        self.put(&format!("{stem}shared_gate_up"), h, &both);
        self.whole(&format!("{stem}shared_down"), layer, TensorRole::SharedDown);
    }

    fn gdn(&mut self, stem: &str, layer: LayerRef) {
        let (h, g) = (self.table.config().hidden, self.table.config().gdn);
        let qkv = self.values(layer, TensorRole::GdnQkv);
        let z = self.values(layer, TensorRole::GdnZ);
        let (a, b) = (self.values(layer, TensorRole::GdnA), self.values(layer, TensorRole::GdnB));
        if self.fusion == Fusion::Pairs {
            let (query_key, value) = qkv.split_at((g.channels() - g.values()) * h);
            self.put(&format!("{stem}query_key"), h, query_key);
            self.put(&format!("{stem}value_z"), h, &[value, &z].concat());
            self.put(&format!("{stem}a_projection"), h, &a);
            self.put(&format!("{stem}b_projection"), h, &b);
        } else {
            self.put(&format!("{stem}query_key_value_z"), h, &[qkv, z].concat());
            self.put(&format!("{stem}a_b_projection"), h, &[a, b].concat());
        }
        let conv = self.table.vector(layer, VectorRole::Conv).unwrap();
        let taps = g.conv_kernel;
        let by_tap: Vec<f32> = (0..taps).flat_map(|t| conv.iter().skip(t).step_by(taps).copied()).collect();
        self.numbers(&format!("{stem}convolution"), &[taps, g.channels()], &by_tap);
        self.vector(&format!("{stem}a_log"), layer, VectorRole::ALog);
        self.vector(&format!("{stem}dt_bias"), layer, VectorRole::DtBias);
        self.vector(&format!("{stem}norm"), layer, VectorRole::GdnNorm);
        self.whole(&format!("{stem}output"), layer, TensorRole::GdnOut);
    }
}
