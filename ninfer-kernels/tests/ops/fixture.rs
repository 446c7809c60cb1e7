//! Golden tensors; tests/fixtures/README.md says where they come from.

use std::path::PathBuf;

use half::bf16;
use safetensors::{Dtype, SafeTensors};

pub struct Fixture(Vec<u8>);

impl Fixture {
    pub fn read(name: &str) -> Self {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        Self(std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
    }

    fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.0).unwrap()
    }

    pub fn shape(&self, name: &str) -> Vec<usize> {
        self.tensors().tensor(name).unwrap().shape().to_vec()
    }

    pub fn has(&self, name: &str) -> bool {
        self.tensors().tensor(name).is_ok()
    }

    /// An F32 or BF16 tensor.
    pub fn f32(&self, name: &str) -> Vec<f32> {
        let tensors = self.tensors();
        let tensor = tensors.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        match tensor.dtype() {
            Dtype::F32 => tensor.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Dtype::BF16 => tensor.data().as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            other => panic!("{name} is {other:?}"),
        }
    }

    /// An I64 tensor.
    pub fn i64(&self, name: &str) -> Vec<i64> {
        let tensors = self.tensors();
        let tensor = tensors.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), Dtype::I64);
        tensor.data().as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect()
    }
}
