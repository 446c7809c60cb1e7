//! Reading of the fixture files.

use std::path::PathBuf;

use ninfer_core::DType;
use ninfer_quant::checkpoint::{DecodeOptions, StoredTensor, decode};
use ninfer_quant::{PackedMatrix, Result};
use safetensors::{Dtype, SafeTensors};

/// A tensor that owns its bytes.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Tensor {
    pub(crate) fn f32(&self) -> Vec<f32> {
        assert_eq!(self.dtype, DType::F32);
        self.bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub(crate) fn i64(&self) -> Vec<i64> {
        assert_eq!(self.dtype, DType::I64);
        self.bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub(crate) fn of_f32(shape: &[usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        Self { dtype: DType::F32, shape: shape.to_vec(), bytes }
    }
}

/// The tensors of one module, by suffix.
#[derive(Clone, Debug)]
pub(crate) struct Module(pub(crate) Vec<(String, Tensor)>);

impl Module {
    pub(crate) fn decode(&self) -> Result<PackedMatrix> {
        self.decode_with(&DecodeOptions::default())
    }

    pub(crate) fn decode_with(&self, options: &DecodeOptions) -> Result<PackedMatrix> {
        let tensors: Vec<_> = self.0.iter().map(|(s, t)| StoredTensor::new(s, t.dtype, &t.shape, &t.bytes)).collect();
        decode("layers.0.mlp.up_proj", &tensors, options)
    }

    pub(crate) fn get(&mut self, suffix: &str) -> &mut Tensor {
        &mut self.0.iter_mut().find(|(s, _)| s == suffix).unwrap_or_else(|| panic!("no {suffix}")).1
    }

    pub(crate) fn without(mut self, suffix: &str) -> Self {
        self.0.retain(|(s, _)| s != suffix);
        self
    }

    pub(crate) fn with(mut self, suffix: &str, tensor: Tensor) -> Self {
        self.0.retain(|(s, _)| s != suffix);
        self.0.push((suffix.to_owned(), tensor));
        self
    }
}

/// A fixture file.
pub(crate) struct File(Vec<u8>);

impl File {
    pub(crate) fn open(name: &str) -> Self {
        Self::at(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name))
    }

    pub(crate) fn at(path: PathBuf) -> Self {
        Self(std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
    }

    fn parse(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.0).unwrap()
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.parse().names().into_iter().map(str::to_owned).collect()
    }

    pub(crate) fn get(&self, name: &str) -> Tensor {
        let file = self.parse();
        let t = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        let dtype = match t.dtype() {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::Bf16,
            Dtype::F8_E4M3 => DType::F8E4M3,
            Dtype::U8 => DType::U8,
            Dtype::I32 => DType::I32,
            Dtype::I64 => DType::I64,
            other => panic!("{name} is {other:?}"),
        };
        Tensor { dtype, shape: t.shape().to_vec(), bytes: t.data().to_vec() }
    }

    /// The tensors `prefix.suffix` for the given suffixes.
    pub(crate) fn module(&self, prefix: &str, suffixes: &[&str]) -> Module {
        Module(suffixes.iter().map(|s| ((*s).to_owned(), self.get(&format!("{prefix}.{s}")))).collect())
    }
}

/// Equality of bits, except that any NaN equals any NaN.
pub(crate) fn assert_same(got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len());
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!(g.to_bits() == e.to_bits() || (g.is_nan() && e.is_nan()), "element {i}: {g} is not {e}");
    }
}

/// Deterministic weights: a wide spread of magnitudes, zeros and both signs.
pub(crate) fn weights(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..count)
        .map(|_| {
            let (sign, magnitude, zero) = (next() - 0.5, next() * 6.0 - 6.0, next());
            if zero < 0.05 { 0.0 } else { 0.1 * sign * magnitude.exp2() }
        })
        .collect()
}
