//! Tiny checkpoints, to be damaged and converted.

use std::path::{Path, PathBuf};

use ninfer_examples::quantize::{Job, Summary};
use ninfer_examples::{Failure, Result};
use tempfile::TempDir;

/// Dense with a head of its own, mixture of experts, and dense with a tied head; all with an MTP block.
pub(crate) const MODELS: [&str; 3] = ["tiny-dense", "tiny-moe", "tiny-tied"];

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../ninfer-models/tests/fixtures").join(name)
}

/// A job that writes `out` in a folder.
pub(crate) fn job(model: &Path, folder: &TempDir, recipes: &str) -> Job {
    Job {
        model: model.to_owned(),
        output: folder.path().join("out"),
        recipes: recipes.parse().unwrap(),
        shard_bytes: 1 << 30,
        force: false,
    }
}

pub(crate) fn run(job: &Job) -> Result<Summary> {
    job.plan()?.run(&mut |_| Ok(()))
}

/// What a job fails with; nothing is left of its output.
pub(crate) fn failure(job: &Job) -> Failure {
    let failure = run(job).unwrap_err();
    assert!(!job.output.exists() && !partial(job).exists(), "{failure}");
    failure
}

pub(crate) fn partial(job: &Job) -> PathBuf {
    job.output.with_file_name("out.partial")
}

/// A copy of a fixture, to be changed.
pub(crate) fn copy(name: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        // Written anew, because the originals may be read-only.
        std::fs::write(folder.path().join(file), std::fs::read(fixture(name).join(file)).unwrap()).unwrap();
    }
    folder
}

/// Overwrites elements of a tensor, from element `index` on.
pub(crate) fn patch(folder: &Path, tensor: &str, index: usize, bytes: &[u8]) {
    let path = folder.join("model.safetensors");
    let mut file = std::fs::read(&path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let data = tensors.tensor(tensor).unwrap().data();
    let at = data.as_ptr() as usize - file.as_ptr() as usize + index * bytes.len();
    file[at..at + bytes.len()].copy_from_slice(bytes);
    std::fs::write(path, file).unwrap();
}
