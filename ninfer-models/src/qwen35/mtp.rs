//! The MTP block as a pass over some rows.

use ninfer_core::backend::{InferenceBackend, Recorder};
use ninfer_core::ops::{KvLayer, MtpStem, RmsNorm};
use ninfer_core::segment::Batch;
use ninfer_core::view::View;
use ninfer_core::{Error, Result};

use super::graph::{Addressing, ffn};
use super::{Mixer, Qwen35};
use crate::session::activations::Rows;

/// Rotary position of the row in slot `s` is `s − 1`; slot 0 is never written.
const ADDRESSING: Addressing = Addressing { shift: 1, first_key: 1 };

/// Inputs and output of a pass of the MTP block.
pub(crate) struct MtpPass<'a, B: InferenceBackend> {
    /// U32 `[T, 1]`: row in slot `s` takes the token of position `s`.
    pub(crate) ids: &'a View<B>,
    /// act `[R, H]`.
    pub(crate) hidden: &'a View<B>,
    /// I32 `[T, 1]`: row of `hidden` that belongs to position `s − 1`.
    pub(crate) index: &'a View<B>,
    /// act `[T, H]`: the block's output after its norm.
    pub(crate) output: &'a View<B>,
}

impl<B: InferenceBackend> Qwen35<B> {
    /// Writes the MTP rows of a batch to the cache and the block's normed output to `pass.output`.
    pub(crate) fn mtp_pass(
        &self,
        rec: &mut Recorder<'_, B>,
        batch: &Batch<B>,
        pass: &MtpPass<'_, B>,
        rows: &Rows<B>,
        kv: &KvLayer<B>,
    ) -> Result<()> {
        let absent = || Error::MtpUnavailable { reason: "the checkpoint has no MTP block".to_owned() };
        let w = self.mtp_weights().ok_or_else(absent)?;
        let Mixer::Attention(attention) = &w.layer.mixer else { return Err(absent()) };
        rec.mtp_stem(MtpStem {
            batch: batch.clone(),
            ids: pass.ids.clone(),
            table: self.embedding().clone(),
            hidden: pass.hidden.clone(),
            index: pass.index.clone(),
            embedding_norm: w.embedding_norm.clone(),
            hidden_norm: w.hidden_norm.clone(),
            fc: w.fc.clone(),
            output: rows.x.clone(),
        })?;
        self.attention(rec, batch, &w.layer.input_norm, attention, rows, kv, ADDRESSING)?;
        ffn(rec, batch, &w.layer, rows)?;
        rec.rms_norm(RmsNorm {
            batch: batch.clone(),
            input: rows.x.clone(),
            norm: w.norm.clone(),
            output: pass.output.clone(),
        })
    }
}
