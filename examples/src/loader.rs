//! Loading a model with a progress bar.

use ninfer_core::backend::InferenceBackend;
use ninfer_core::memory::binary_size;
use ninfer_models::Qwen35;
use ninfer_models::weights::WeightTable;

use crate::Result;
use crate::progress::Progress;
use crate::recipes::{Converted, Recipes};

/// Loads all weights of an opened checkpoint, converted by recipes, with the MTP block if it is there and `mtp` is set.
///
/// # Errors
/// What the checkpoint and the backend report.
pub fn load<B: InferenceBackend>(
    backend: &B,
    table: &WeightTable,
    recipes: &Recipes,
    mtp: bool,
    progress: Progress,
) -> Result<Qwen35<B>> {
    let bar = progress.bar("loading", 0, "parts");
    let source = Converted::new(table, recipes, mtp);
    let model = Qwen35::from_source(backend, &source, &mut |done| {
        bar.set_length(done.total as u64);
        bar.set_position(done.done as u64);
        bar.set_message(binary_size(done.bytes as u64));
    });
    bar.finish_and_clear();
    release_staging(backend);
    Ok(model?)
}

/// Gives back what only loading needs.
#[cfg(feature = "cuda")]
fn release_staging<B: InferenceBackend>(backend: &B) {
    if let Some(gpu) = (backend as &dyn std::any::Any).downcast_ref::<ninfer_kernels::cuda::Cuda>() {
        gpu.finish_loading();
    }
}

/// Nothing is kept on the processor.
#[cfg(not(feature = "cuda"))]
fn release_staging<B: InferenceBackend>(_backend: &B) {}
