//! What follows the last layer: choice of tokens, acceptance, and the MTP passes that draft the next ones.

use ninfer_core::backend::{InferenceBackend, Recorder};
use ninfer_core::ops::{Accept, Choose, CopyRows, Count, Head, HeadArgmax};
use ninfer_core::segment::{Batch, Profile, SEGMENT_WORDS};
use ninfer_core::view::View;
use ninfer_core::{DType, Error, Result};

use super::activations::{Rows, matrix};
use super::cache::{Cache, CacheSize, RING};
use super::words;
use crate::config::Config;
use crate::qwen35::{MtpPass, Qwen35};

/// Buffers of the tail, sized for the widest round.
pub(crate) struct TailBuffers<B: InferenceBackend> {
    /// I32 `[rows, 1]`: row `slots · RING + r` of the hidden states, where pass row `r` stands.
    pub(crate) pass_index: View<B>,
    /// I32 `[rows, 1]`: 0, 1, 2, …
    iota: View<B>,
    /// f32 `[logit rows, V]`.
    pub(crate) logits: View<B>,
    chosen: View<B>,
    realign: View<B>,
    last: View<B>,
    chain: View<B>,
    /// act `[rows, H]`: outputs of an MTP pass.
    pub(crate) mtp_output: View<B>,
    /// act `[lanes, H]`: the row a chained draft starts from.
    chain_hidden: View<B>,
    /// U32 words: results, then drafts.
    egress: View<B>,
    lanes: usize,
}

/// One call of the tail.
pub(crate) struct Tail<'a, B: InferenceBackend> {
    /// Rows, in the step profile.
    pub(crate) batch: &'a Batch<B>,
    /// Inputs of the rows.
    pub(crate) ids: &'a View<B>,
    /// Final-normed rows.
    pub(crate) normed: &'a View<B>,
    /// Rows of the hidden states in which `normed` stands.
    pub(crate) index: &'a View<B>,
    /// Columns per segment.
    pub(crate) columns: usize,
    /// Drafts to make.
    pub(crate) next: usize,
    /// Whether tokens are drawn from logits (else the head and the argmax are one operation).
    pub(crate) sampled: bool,
    /// Whether the inputs are prompt, which token counts hold already.
    pub(crate) prompt: bool,
    /// Tokens from here on are never chosen.
    pub(crate) limit: usize,
}

/// Where the MTP passes of a round work; see [`Accept`].
pub(super) struct DraftSegments<B: InferenceBackend> {
    pub(super) realign: View<B>,
    pub(super) last: View<B>,
    pub(super) chain: View<B>,
}

impl<B: InferenceBackend> TailBuffers<B> {
    pub(crate) fn alloc(
        backend: &B,
        queue: &mut B::Queue,
        config: &Config,
        vocab: usize,
        size: &CacheSize,
        step_rows: usize,
    ) -> Result<Self> {
        let (lanes, act) = (size.slots, backend.activation_dtype());
        let index = |first: usize, queue: &mut B::Queue| -> Result<View<B>> {
            let view = words(backend, "row indices", DType::I32, size.rows, 1)?;
            let values: Vec<i32> = (first..first + size.rows).map(|i| i as i32).collect();
            backend.upload(queue, &view, bytemuck::cast_slice(&values))?;
            Ok(view)
        };
        let drafts = size.columns.saturating_sub(1);
        Ok(Self {
            pass_index: index(lanes * RING, queue)?,
            iota: index(0, queue)?,
            logits: matrix(backend, "logits", DType::F32, step_rows, vocab)?,
            chosen: words(backend, "chosen tokens", DType::U32, step_rows, 1)?,
            realign: words(backend, "MTP segments", DType::I32, lanes, SEGMENT_WORDS)?,
            last: words(backend, "last rows", DType::I32, lanes, 1)?,
            chain: words(backend, "draft segments", DType::I32, drafts * lanes, SEGMENT_WORDS)?,
            mtp_output: matrix(backend, "MTP output", act, size.rows, config.hidden)?,
            chain_hidden: matrix(backend, "draft states", act, lanes, config.hidden)?,
            egress: words(backend, "results", DType::U32, 1, lanes * (size.columns + 1 + drafts))?,
            lanes,
        })
    }

    /// I32 `[count, 1]`: 0, 1, 2, …
    pub(crate) fn iota(&self, count: usize) -> Result<View<B>> {
        self.iota.row_range(0..count)
    }

    /// U32 `[segments, columns + 1]` of results.
    pub(crate) fn results(&self, segments: usize, columns: usize) -> Result<View<B>> {
        self.egress.col_range(0..segments * (columns + 1))?.reshape(segments, columns + 1)
    }

    /// U32 `[segments, 1]`: draft `i` of each segment.
    fn draft(&self, segments: usize, columns: usize, i: usize) -> Result<View<B>> {
        let first = segments * (columns + 1 + i);
        self.egress.col_range(first..first + segments)?.reshape(segments, 1)
    }

    /// Tables that [`Accept`] writes for `next` drafts.
    pub(super) fn draft_segments(&self, segments: usize, next: usize) -> Result<DraftSegments<B>> {
        Ok(DraftSegments {
            realign: self.realign.row_range(0..segments)?,
            last: self.last.row_range(0..segments)?,
            chain: self.chain.row_range(0..next * segments)?,
        })
    }

    /// Everything that goes to the host after a round.
    pub(crate) fn egress(&self, segments: usize, columns: usize, next: usize) -> Result<View<B>> {
        self.egress.col_range(0..segments * (columns + 1 + next))
    }

    fn check(&self, tail: &Tail<'_, B>) -> Result<()> {
        if tail.batch.segments > self.lanes {
            return Err(Error::Shape {
                op: "round",
                what: "segments",
                expected: format!("at most {}", self.lanes),
                got: tail.batch.segments.to_string(),
            });
        }
        Ok(())
    }
}

impl<B: InferenceBackend> Qwen35<B> {
    /// Submits the tail of a pass.
    pub(crate) fn tail(
        &self,
        rec: &mut Recorder<'_, B>,
        tail: &Tail<'_, B>,
        buffers: &TailBuffers<B>,
        cache: &Cache<B>,
        rows: &Rows<B>,
    ) -> Result<()> {
        buffers.check(tail)?;
        let (batch, count, segments) = (tail.batch, tail.batch.rows, tail.batch.segments);
        let chosen = buffers.chosen.row_range(0..count)?;
        if tail.sampled {
            let choose_batch =
                Batch { profile: if tail.prompt { Profile::Prefill } else { Profile::Step }, ..batch.clone() };
            if !tail.prompt {
                rec.count(Count {
                    batch: batch.clone(),
                    ids: tail.ids.clone(),
                    previous: cache.previous.clone(),
                    counts: cache.counts.clone(),
                })?;
            }
            let logits = buffers.logits.row_range(0..count)?;
            rec.head(Head {
                batch: batch.clone(),
                input: tail.normed.clone(),
                head: self.head().clone(),
                logits: logits.clone(),
            })?;
            rec.choose(Choose {
                batch: choose_batch,
                logits,
                ids: tail.ids.clone(),
                params: cache.params.clone(),
                counts: cache.counts.clone(),
                limit: tail.limit,
                output: chosen.clone(),
            })?;
        } else {
            self.argmax(rec, batch, tail.normed, tail.limit, &chosen)?;
        }
        let mtp = buffers.draft_segments(segments, tail.next)?;
        rec.accept(Accept {
            batch: batch.clone(),
            ids: tail.ids.clone(),
            chosen: chosen.clone(),
            result: buffers.results(segments, tail.columns)?,
            realign: mtp.realign.clone(),
            last: mtp.last.clone(),
            chain: mtp.chain.clone(),
        })?;
        if tail.next == 0 { Ok(()) } else { self.draft(rec, tail, &chosen, &mtp, buffers, cache, rows) }
    }

    /// Writes the MTP rows of the emitted tokens and drafts behind the last of them.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn draft(
        &self,
        rec: &mut Recorder<'_, B>,
        tail: &Tail<'_, B>,
        chosen: &View<B>,
        mtp: &DraftSegments<B>,
        buffers: &TailBuffers<B>,
        cache: &Cache<B>,
        rows: &Rows<B>,
    ) -> Result<()> {
        let (count, segments) = (tail.batch.rows, tail.batch.segments);
        let kv = cache
            .mtp_kv
            .as_ref()
            .ok_or_else(|| Error::MtpUnavailable { reason: "the session was opened without it".to_owned() })?;
        // From the target's own states; the last row drafts first.
        let output = buffers.mtp_output.row_range(0..count)?;
        let pass = MtpPass { ids: chosen, hidden: &cache.hidden, index: tail.index, output: &output };
        let realign = Batch::new(Profile::Step, count, mtp.realign.clone())?;
        self.mtp_pass(rec, &realign, &pass, &rows.first(count)?, kv)?;
        let hidden = buffers.chain_hidden.row_range(0..segments)?;
        let iota = buffers.iota(segments)?;
        rec.copy_rows(CopyRows {
            src: output,
            src_index: mtp.last.clone(),
            dst: hidden.clone(),
            dst_index: iota.clone(),
        })?;
        let link =
            |i: usize| Batch::new(Profile::Step, segments, mtp.chain.row_range(i * segments..(i + 1) * segments)?);
        let mut draft = buffers.draft(segments, tail.columns, 0)?;
        self.argmax(rec, &link(0)?, &hidden, tail.limit, &draft)?;
        // Chained drafts feed back the block's own output.
        let rows = rows.first(segments)?;
        for i in 1..tail.next {
            let batch = link(i)?;
            let pass = MtpPass { ids: &draft, hidden: &hidden, index: &iota, output: &hidden };
            self.mtp_pass(rec, &batch, &pass, &rows, kv)?;
            draft = buffers.draft(segments, tail.columns, i)?;
            self.argmax(rec, &batch, &hidden, tail.limit, &draft)?;
        }
        Ok(())
    }

    fn argmax(
        &self,
        rec: &mut Recorder<'_, B>,
        batch: &Batch<B>,
        input: &View<B>,
        limit: usize,
        output: &View<B>,
    ) -> Result<()> {
        rec.head_argmax(HeadArgmax {
            batch: batch.clone(),
            input: input.clone(),
            head: self.head().clone(),
            limit,
            output: output.clone(),
        })
    }
}
