//! Prompt chunks.

use ninfer_core::backend::InferenceBackend;
use ninfer_core::model::{LogitSink, PrefillEnd};
use ninfer_core::ops::{CopyRows, Count, Head};
use ninfer_core::segment::{Batch, PAGE_TOKENS, Profile, Segment};
use ninfer_core::state::{Outcome, TokenRow};
use ninfer_core::view::View;
use ninfer_core::{Error, Result};

use super::cache::{KEPT, RING};
use super::lane::Lane;
use super::tail::Tail;
use super::{LOGIT_ROWS, Session};
use crate::qwen35::MtpPass;

/// Where a chunk ends: at most `chunk` rows on, and at a multiple of 64 if the chunk size allows it.
fn chunk_end(position: usize, end: usize, chunk: usize) -> usize {
    let stop = position + chunk;
    if stop >= end {
        return end;
    }
    let aligned = stop - stop % PAGE_TOKENS;
    if chunk >= PAGE_TOKENS && aligned > position { aligned } else { stop }
}

impl<B: InferenceBackend> Session<B> {
    pub(super) fn prefill_tokens(
        &mut self,
        lane: &mut Lane,
        tokens: &[u32],
        end: PrefillEnd,
        mut logits: Option<LogitSink<'_>>,
    ) -> Result<Option<Outcome>> {
        self.check_owner(lane)?;
        if tokens.is_empty() {
            return Err(Error::OutOfRange {
                what: "prompt length",
                got: "0 tokens".to_owned(),
                legal: "at least 1 token".to_owned(),
            });
        }
        self.check_ids(tokens)?;
        lane.check(tokens.len())?;
        let next = match end {
            PrefillEnd::Choose { drafts } if drafts > self.limits.max_drafts => {
                return Err(Error::OutOfRange {
                    what: "drafts",
                    got: drafts.to_string(),
                    legal: format!("0 to {}", self.limits.max_drafts),
                });
            }
            PrefillEnd::Choose { drafts } => drafts,
            PrefillEnd::More => 0,
        };
        if next > 0 {
            self.mtp_lag(lane).map_err(|reason| Error::MtpUnavailable { reason })?;
        }
        self.fold(lane)?;
        if self.limits.mtp && lane.position > 0 {
            // Rows up to the last committed token; the prompt's own rows follow.
            self.catch_up_prompt(lane)?;
        }
        lane.broken = true;
        let chunk = self.options.prefill_chunk.min(self.rows.x.rows());
        let mut outcome = None;
        let mut rest = tokens;
        while !rest.is_empty() {
            let stop = chunk_end(lane.position, lane.position + rest.len(), chunk);
            let (head, tail) = rest.split_at(stop - lane.position);
            rest = tail;
            let choose = match end {
                PrefillEnd::Choose { .. } if rest.is_empty() => Some(next),
                _ => None,
            };
            let sink: Option<LogitSink<'_>> = match &mut logits {
                Some(sink) => Some(&mut **sink),
                None => None,
            };
            outcome = self.prefill_chunk(lane, head, choose, sink)?;
        }
        lane.broken = false;
        Ok(outcome)
    }

    fn prefill_chunk(
        &mut self,
        lane: &mut Lane,
        tokens: &[u32],
        choose: Option<usize>,
        mut sink: Option<LogitSink<'_>>,
    ) -> Result<Option<Outcome>> {
        let (slot, start, len) = (lane.reserved.slot, lane.position, tokens.len());
        let segment = Segment { slot, start: start as u32, row: 0, len: len as u32, fold: 0, bank: 0 };
        let first = self.limits.lanes * RING;
        let ring_row = |position: usize| slot as usize * RING + position % RING;

        self.ingress.clear();
        let table = self.ingress.table(std::iter::once(segment))?;
        // Row s of the MTP block takes the token of position s and the state of position s − 1; there is no row 0.
        let skip = u32::from(start == 0);
        let mtp_segment = Segment { start: segment.start + skip, row: skip, len: segment.len - skip, ..segment };
        let mtp_table = self.ingress.table(std::iter::once(mtp_segment))?;
        let last = Segment { start: (start + len - 1) as u32, len: 1, ..segment };
        let last_table = self.ingress.table(std::iter::once(last))?;
        let block_tables = (0..len.div_ceil(LOGIT_ROWS) * usize::from(sink.is_some()))
            .map(|i| {
                let from = i * LOGIT_ROWS;
                let rows = LOGIT_ROWS.min(len - from);
                let block = Segment { start: (start + from) as u32, len: rows as u32, ..segment };
                Ok((from..from + rows, self.ingress.table(std::iter::once(block))?))
            })
            .collect::<Result<Vec<_>>>()?;
        let ids = self.ingress.ids(tokens.iter().copied())?;
        let mtp_index = self.ingress.indices((0..len).map(|r| match r {
            0 => start.checked_sub(1).map(ring_row),
            _ => Some(first + r - 1),
        }))?;
        let ring = self.ingress.indices((0..len).map(|r| (r + KEPT >= len).then(|| ring_row(start + r))))?;
        self.ingress.send(self.model.backend(), &mut self.queue)?;

        let batch = Batch::new(Profile::Prefill, len, table)?;
        let rows = self.rows.first(len)?;
        let normed = self.cache.hidden.row_range(first..first + len)?;
        let ring_rows = self.cache.hidden.row_range(0..first)?;
        let output = self.tail.mtp_output.row_range(0..len)?;
        let iota = self.tail.iota(len)?;
        let (model, cache, trace) = (&self.model, &self.cache, self.trace.as_ref());
        model.backend().run(&mut self.queue, |rec| {
            rec.count(Count {
                batch: batch.clone(),
                ids: ids.clone(),
                previous: cache.previous.clone(),
                counts: cache.counts.clone(),
            })?;
            model.trunk(rec, &batch, &ids, &rows, cache, false, &mut |rec, layer| match trace {
                Some(trace) => trace.keep(rec, layer, &rows.x, &iota),
                None => Ok(()),
            })?;
            model.final_norm(rec, &batch, &rows, &normed)?;
            let Some(kv) = &cache.mtp_kv else { return Ok(()) };
            if mtp_segment.len > 0 {
                let batch = Batch::new(Profile::Prefill, len, mtp_table)?;
                let pass = MtpPass { ids: &ids, hidden: &cache.hidden, index: &mtp_index, output: &output };
                model.mtp_pass(rec, &batch, &pass, &rows, kv)?;
            }
            rec.copy_rows(CopyRows { src: normed.clone(), src_index: iota.clone(), dst: ring_rows, dst_index: ring })
        })?;

        if let Some(sink) = sink.as_mut() {
            for (range, table) in block_tables {
                let (from, logits) = (range.start, self.tail.logits.row_range(0..range.len())?);
                let batch = Batch::new(Profile::Prefill, range.len(), table)?;
                let input = normed.row_range(range)?;
                let head = self.model.head().clone();
                let op = Head { batch, input, head, logits: logits.clone() };
                self.model.backend().run(&mut self.queue, |rec| rec.head(op))?;
                let values = self.download_floats(&logits)?;
                sink(start + from, &values)?;
            }
        }
        lane.push(tokens);
        if self.limits.mtp && lane.mtp_rows + 1 >= start {
            lane.mtp_rows = lane.position - 1;
        }
        lane.mtp_anchor = None;
        match choose {
            Some(next) => self.prefill_choice(lane, len, last_table, &ids, &normed, next).map(Some),
            None => Ok(None),
        }
    }

    /// Chooses the token behind a prompt, and drafts behind it.
    fn prefill_choice(
        &mut self,
        lane: &mut Lane,
        len: usize,
        table: View<B>,
        ids: &View<B>,
        normed: &View<B>,
        next: usize,
    ) -> Result<Outcome> {
        let batch = Batch::new(Profile::Step, 1, table)?;
        let tail = Tail {
            batch: &batch,
            ids: &ids.row_range(len - 1..len)?,
            normed: &normed.row_range(len - 1..len)?,
            index: &self.tail.pass_index.row_range(len - 1..len)?,
            columns: 1,
            next,
            sampled: lane.sampled,
            prompt: true,
            limit: self.limits.token_limit,
        };
        let (model, cache, buffers, rows) = (&self.model, &self.cache, &self.tail, &self.rows);
        model.backend().run(&mut self.queue, |rec| model.tail(rec, &tail, buffers, cache, rows))?;
        self.host.resize((2 + next) * 4, 0);
        let egress = self.tail.egress(1, 1, next)?;
        self.model.backend().download(&mut self.queue, &egress, &mut self.host)?;
        let token = self.result_word(1);
        if token == u32::MAX {
            return Err(Error::NonFinite { what: "logits", position: lane.position - 1 });
        }
        if next > 0 {
            lane.mtp_rows = lane.position;
            lane.mtp_anchor = Some(token);
        }
        Ok(Outcome {
            accepted: 0,
            tokens: TokenRow::new(&[token]),
            drafts: (0..next).map(|i| self.result_word(2 + i)).take_while(|&t| t != u32::MAX).collect(),
            columns: 1,
            realigned: usize::from(next > 0),
            logits: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::chunk_end;

    #[test]
    fn chunks_end_at_page_boundaries_where_they_can() {
        assert_eq!(chunk_end(0, 1000, 256), 256);
        assert_eq!(chunk_end(10, 1000, 256), 256);
        assert_eq!(chunk_end(10, 1000, 64), 64);
        assert_eq!(chunk_end(10, 1000, 7), 17);
        assert_eq!(chunk_end(960, 1000, 256), 1000);
        for chunk in 1..200 {
            let mut at = 3;
            while at < 777 {
                let next = chunk_end(at, 777, chunk);
                assert!(next > at && next <= at + chunk);
                at = next;
            }
        }
    }
}
