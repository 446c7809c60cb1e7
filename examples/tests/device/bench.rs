//! Where a check runs, and what all checks load.

use std::path::{Path, PathBuf};

use ninfer_core::DType;
use ninfer_core::backend::InferenceBackend;
use ninfer_core::model::{CausalModel, LaneOptions, PrefillEnd, RoundRow};
use ninfer_core::state::{Committed, Outcome};
use ninfer_examples::loader::load;
use ninfer_examples::progress::Progress;
use ninfer_examples::shipped;
use ninfer_models::session::Lane;
use ninfer_models::weights::WeightTable;
use ninfer_models::{Qwen35, Session};
use serde::de::DeserializeOwned;

/// How much of a check is run: GPUs do all of it, processors what takes some seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    Part,
    All,
}

impl Extent {
    /// The first `part` of some cases, or all of them.
    pub(crate) fn of<T>(self, cases: &[T], part: usize) -> &[T] {
        match self {
            Self::Part => &cases[..part.min(cases.len())],
            Self::All => cases,
        }
    }
}

/// Makes tests `NAME::cpu` and `NAME::gpu` of checks, functions of a backend and an [`Extent`].
macro_rules! on_every_backend {
    ($($name:ident),+ $(,)?) => {
        $(mod $name {
            #[test]
            fn cpu() {
                super::$name(&ninfer_kernels::cpu::Cpu::new(), $crate::bench::Extent::Part);
            }

            #[cfg(feature = "cuda")]
            #[test]
            fn gpu() {
                if let Some(gpu) = $crate::bench::gpu() {
                    super::$name(&gpu, $crate::bench::Extent::All);
                }
            }
        })+
    };
}
pub(crate) use on_every_backend;

/// The first GPU, or `None` with a printed line.
#[cfg(feature = "cuda")]
pub(crate) fn gpu() -> Option<ninfer_kernels::cuda::Cuda> {
    use std::io::Write;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use ninfer_kernels::cuda::Cuda;

    static GPU: OnceLock<Result<Cuda, String>> = OnceLock::new();
    static SKIPPED: AtomicUsize = AtomicUsize::new(0);
    match GPU.get_or_init(|| Cuda::new(0).map_err(|e| e.to_string())) {
        Ok(gpu) => Some(gpu.clone()),
        Err(reason) => {
            let count = SKIPPED.fetch_add(1, Ordering::Relaxed) + 1;
            // Past the test harness, which keeps what passing tests print.
            let _ = writeln!(std::io::stderr(), "GPU test skipped ({count} so far): {reason}");
            None
        }
    }
}

/// Whether activations are f32, so that results are those of the f32 references but for the order of additions.
pub(crate) fn is_exact<B: InferenceBackend>(backend: &B) -> bool {
    backend.activation_dtype() == DType::F32
}

/// The folder of the shipped model.
pub(crate) fn shipped_model() -> PathBuf {
    shipped::model_or_shipped(None).unwrap()
}

/// A tiny checkpoint of the model tests.
pub(crate) fn tiny_model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../ninfer-models/tests/fixtures").join(name)
}

pub(crate) fn model<B: InferenceBackend>(backend: &B, folder: &Path, recipes: &str) -> Qwen35<B> {
    let table = WeightTable::open(folder).unwrap();
    load(backend, &table, &recipes.parse().unwrap(), true, Progress::new(false)).unwrap()
}

/// A file of reference numbers.
pub(crate) fn fixture<T: DeserializeOwned>(name: &str) -> T {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Tokens of the vocabulary, the same everywhere.
pub(crate) fn tokens(count: usize, seed: u32, vocab: usize) -> Vec<u32> {
    (0..count as u32).map(|i| (i * 37 + i * i * 11 + seed * 101 + 5) % vocab as u32).collect()
}

pub(crate) fn open<B: InferenceBackend>(session: &mut Session<B>, capacity: usize) -> Committed<Lane> {
    session.open_lane(&LaneOptions::new(capacity)).unwrap()
}

/// Prefills without a choice behind it.
pub(crate) fn prefill<B: InferenceBackend>(session: &mut Session<B>, lane: &mut Committed<Lane>, tokens: &[u32]) {
    session.prefill(lane, tokens, PrefillEnd::More, None).unwrap();
}

/// Prefills and returns the logits of every position.
pub(crate) fn prompt_logits<B: InferenceBackend>(
    session: &mut Session<B>,
    lane: &mut Committed<Lane>,
    tokens: &[u32],
) -> Vec<f32> {
    let mut all = Vec::new();
    let mut sink = |_: usize, rows: &[f32]| {
        all.extend_from_slice(rows);
        Ok(())
    };
    session.prefill(lane, tokens, PrefillEnd::More, Some(&mut sink)).unwrap();
    all
}

/// One round of one lane, of which `commit` columns are committed; with none it leaves no trace.
pub(crate) fn round<B: InferenceBackend>(
    session: &mut Session<B>,
    lane: &mut Committed<Lane>,
    row: RoundRow<'_>,
    commit: usize,
) -> Outcome {
    session.verify(&mut [lane], &[row]).unwrap().commit(&[commit]).unwrap().remove(0)
}

/// The largest logit; of several the lowest.
pub(crate) fn best(row: &[f32]) -> u32 {
    let larger = |best: usize, i: usize| if row[i] > row[best] { i } else { best };
    (0..row.len()).fold(0, larger) as u32
}

/// Equal to the bit, and numbers.
#[track_caller]
pub(crate) fn same_bits(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{what}: length");
    let differs = |i: &usize| got[*i].to_bits() != expected[*i].to_bits() || got[*i].is_nan();
    if let Some(i) = (0..got.len()).find(differs) {
        let count = (0..got.len()).filter(differs).count();
        panic!("{what}: {count} of {} differ, first [{i}]: {} instead of {}", got.len(), got[i], expected[i]);
    }
}
