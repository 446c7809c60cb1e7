//! What a prompt chunk computes inside: the residual stream after every layer, for comparing engines layer by layer.

use half::bf16;
use ninfer_core::backend::{InferenceBackend, Recorder};
use ninfer_core::model::PrefillEnd;
use ninfer_core::ops::CopyRows;
use ninfer_core::state::Committed;
use ninfer_core::view::View;
use ninfer_core::{DType, Error, Result};

use super::Session;
use super::activations::matrix;
use super::cache::RING;
use super::lane::Lane;

/// Intermediate values of the tokens of one prompt chunk, in f32.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Trace {
    /// Residual stream after each layer, `[T, H]` row-major each.
    pub layers: Vec<Vec<f32>>,
    /// After the final norm, `[T, H]`.
    pub final_norm: Vec<f32>,
    /// Output of the MTP block after its norm, `[T, H]`: row `t` was made from the token of `t` and the state before it. The row
    /// of position 0 means nothing. Empty without MTP.
    pub mtp: Vec<f32>,
}

/// Device copies of the residual stream.
pub(super) struct TraceBuffers<B: InferenceBackend> {
    layers: View<B>,
    rows: usize,
}

impl<B: InferenceBackend> TraceBuffers<B> {
    pub(super) fn keep(&self, rec: &mut Recorder<'_, B>, layer: usize, x: &View<B>, iota: &View<B>) -> Result<()> {
        rec.copy_rows(CopyRows {
            src: x.clone(),
            src_index: iota.clone(),
            dst: self.layers.row_range(layer * self.rows..(layer + 1) * self.rows)?,
            dst_index: iota.clone(),
        })
    }
}

impl<B: InferenceBackend> Session<B> {
    /// Prefills tokens like [`prefill`](ninfer_core::model::CausalModel::prefill), in one chunk, and returns what was computed
    /// on the way. Meant for tests and debugging: it allocates, and copies everything to the host.
    ///
    /// # Errors
    /// As `prefill`; [`Error::OutOfRange`] if the tokens do not fit into one chunk.
    pub fn trace_prompt(&mut self, lane: &mut Committed<Lane>, tokens: &[u32]) -> Result<Trace> {
        let rows = tokens.len();
        let most = self.options.prefill_chunk.min(self.rows.x.rows());
        if rows > most {
            return Err(Error::OutOfRange {
                what: "tokens of a trace",
                got: rows.to_string(),
                legal: format!("at most {most}, the rows of a prompt chunk"),
            });
        }
        let (backend, hidden) = (self.model.backend().clone(), self.model.config().hidden);
        let count = self.model.layers();
        let layers = matrix(&backend, "trace", backend.activation_dtype(), count * rows, hidden)?;
        self.trace = Some(TraceBuffers { layers: layers.clone(), rows });
        let done = self.prefill_tokens(lane.get_mut(), tokens, PrefillEnd::More, None);
        self.trace = None;
        done?;
        let first = self.limits.lanes * RING;
        let normed = self.cache.hidden.row_range(first..first + rows)?;
        let layers = (0..count)
            .map(|i| self.download_activations(&layers.row_range(i * rows..(i + 1) * rows)?))
            .collect::<Result<_>>()?;
        let mtp = match self.limits.mtp {
            true => self.download_activations(&self.tail.mtp_output.row_range(0..rows)?)?,
            false => Vec::new(),
        };
        Ok(Trace { layers, final_norm: self.download_activations(&normed)?, mtp })
    }

    /// Copies activations to the host as f32.
    fn download_activations(&mut self, view: &View<B>) -> Result<Vec<f32>> {
        if view.dtype() == DType::F32 {
            return self.download_floats(view);
        }
        let mut bytes = vec![0u8; view.span_bytes()];
        self.model.backend().download(&mut self.queue, view, &mut bytes)?;
        Ok(bytes.as_chunks::<2>().0.iter().map(|&b| bf16::from_le_bytes(b).to_f32()).collect())
    }
}
