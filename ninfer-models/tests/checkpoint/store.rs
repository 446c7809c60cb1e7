//! Checkpoints in memory, to be changed and written to a folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ninfer_core::format::GlobalScale;
use ninfer_core::{DType, WeightFormat};
use ninfer_models::{Config, Result, WeightTable};
use ninfer_quant::{Fp8ScaleVec, PackedMatrix, PackedParts, encode};
use serde_json::{Value, json};
use tempfile::TempDir;

/// The prefix of the fixtures' text tensors.
pub(crate) const TEXT: &str = "model.language_model.";

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tensor {
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Tensor {
    pub(crate) fn new(dtype: &'static str, shape: &[usize], bytes: Vec<u8>) -> Self {
        Self { dtype, shape: shape.to_vec(), bytes }
    }

    pub(crate) fn f32(shape: &[usize], values: &[f32]) -> Self {
        Self::new("F32", shape, values.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    pub(crate) fn bf16(shape: &[usize], values: &[f32]) -> Self {
        let bits = |x: &f32| half::bf16::from_f32(*x).to_le_bytes();
        Self::new("BF16", shape, values.iter().flat_map(bits).collect())
    }

    /// The elements of a BF16 or F32 tensor.
    pub(crate) fn values(&self) -> Vec<f32> {
        match self.dtype {
            "BF16" => {
                self.bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes(b.try_into().unwrap()).to_f32()).collect()
            }
            "F32" => self.bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
            other => panic!("{other}"),
        }
    }
}

/// A checkpoint: its configuration and its tensors.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    pub(crate) config: Value,
    pub(crate) tensors: BTreeMap<String, Tensor>,
}

impl Store {
    pub(crate) fn fixture(name: &str) -> Self {
        let dir = fixture(name);
        let config = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
        let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let tensor = |(name, t): (&str, safetensors::tensor::TensorView<'_>)| {
            let dtype = if t.dtype() == safetensors::Dtype::F32 { "F32" } else { "BF16" };
            (name.to_owned(), Tensor::new(dtype, t.shape(), t.data().to_vec()))
        };
        Self { config, tensors: file.iter().map(tensor).collect() }
    }

    pub(crate) fn text_config(&mut self) -> &mut Value {
        &mut self.config["text_config"]
    }

    pub(crate) fn remove(&mut self, name: &str) -> Tensor {
        self.tensors.remove(name).unwrap_or_else(|| panic!("{name}"))
    }

    pub(crate) fn insert(&mut self, name: impl Into<String>, tensor: Tensor) {
        self.tensors.insert(name.into(), tensor);
    }

    pub(crate) fn rename(&mut self, from: &str, to: &str) {
        let tensor = self.remove(from);
        self.insert(to, tensor);
    }

    /// Replaces a plain matrix by its encoding, stored as compressed-tensors or Qwen's FP8 releases do.
    pub(crate) fn quantize(&mut self, module: &str, format: WeightFormat) -> PackedMatrix {
        let plain = self.remove(&format!("{module}.weight"));
        let packed = encode(format, plain.shape[0], plain.shape[1], &plain.values()).unwrap();
        let (rows, cols) = (packed.rows(), packed.cols());
        let name = |suffix: &str| format!("{module}.{suffix}");
        match packed.clone().into_parts() {
            PackedParts::Nvfp4 { codes, scales, global: GlobalScale::Divide(g) } => {
                self.insert(name("weight_packed"), Tensor::new("U8", &[rows, cols / 2], codes));
                self.insert(name("weight_scale"), Tensor::new("F8_E4M3", &[rows, cols / 16], scales));
                self.insert(name("weight_global_scale"), Tensor::f32(&[1], &[g]));
            }
            PackedParts::Fp8 { codes, scales } => {
                self.insert(name("weight"), Tensor::new("F8_E4M3", &[rows, cols], codes));
                let (suffix, shape, values) = match scales {
                    Fp8ScaleVec::Tensor(s) => ("weight_scale", vec![], vec![s]),
                    Fp8ScaleVec::Row(s) => ("weight_scale", vec![rows, 1], s),
                    Fp8ScaleVec::Block(s) => ("weight_scale_inv", vec![rows.div_ceil(128), cols.div_ceil(128)], s),
                };
                self.insert(name(suffix), Tensor::f32(&shape, &values));
            }
            other => panic!("{other:?}"),
        }
        packed
    }

    pub(crate) fn write(&self, dir: &Path) {
        std::fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        std::fs::write(dir.join("model.safetensors"), file(self.tensors.iter(), 0)).unwrap();
    }

    /// Writes shards with an index; `shard` tells the file of each tensor.
    pub(crate) fn write_sharded(&self, dir: &Path, shard: impl Fn(&str) -> String) {
        std::fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        let map: BTreeMap<&String, String> = self.tensors.keys().map(|n| (n, shard(n))).collect();
        let mut files: BTreeMap<&str, Vec<(&String, &Tensor)>> = BTreeMap::new();
        for (name, file) in &map {
            files.entry(file).or_default().push((name, &self.tensors[*name]));
        }
        for (name, tensors) in files {
            std::fs::write(dir.join(name), file(tensors, 0)).unwrap();
        }
        let index = json!({"metadata": {"total_size": 0}, "weight_map": map});
        std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
    }

    pub(crate) fn open(&self) -> Result<WeightTable> {
        let dir = TempDir::new().unwrap();
        self.write(dir.path());
        // The table keeps its files open.
        WeightTable::open(dir.path())
    }

    pub(crate) fn open_with(&self, change: impl FnOnce(&mut Config)) -> Result<WeightTable> {
        let dir = TempDir::new().unwrap();
        self.write(dir.path());
        let mut config = Config::from_dir(dir.path())?;
        change(&mut config);
        WeightTable::open_with(dir.path(), config)
    }
}

/// The bytes of a safetensors file whose header has `padding` spaces at its end.
pub(crate) fn file<'a>(tensors: impl IntoIterator<Item = (&'a String, &'a Tensor)>, padding: usize) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, t) in tensors {
        let start = data.len();
        data.extend_from_slice(&t.bytes);
        let offsets = [start, data.len()];
        header.insert(name.clone(), json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": offsets}));
    }
    raw_file(&(Value::Object(header).to_string() + &" ".repeat(padding)), &data)
}

pub(crate) fn raw_file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// Element type of a packed matrix of plain elements, and its bytes.
pub(crate) fn plain(m: PackedMatrix) -> (DType, Vec<u8>) {
    match m.into_parts() {
        PackedParts::Plain { dtype, bytes } => (dtype, bytes),
        other => panic!("{other:?}"),
    }
}
