//! Rounds: verify, choose, accept and draft in one recorded step.

use ninfer_core::backend::{InferenceBackend, Recorder};
use ninfer_core::model::RoundRow;
use ninfer_core::ops::CopyRows;
use ninfer_core::segment::{Batch, MAX_STEP_ROWS, Profile, Segment};
use ninfer_core::state::{Committed, Outcome, TokenRow};
use ninfer_core::view::View;
use ninfer_core::{Error, Result};

use super::Session;
use super::cache::{KEPT, RING};
use super::lane::Lane;
use super::tail::Tail;
use crate::qwen35::MtpPass;

/// Most recorded rounds kept.
const MAX_RECORDED: usize = 64;

/// What distinguishes one recorded round from another; everything else is device data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RoundKey {
    segments: usize,
    columns: usize,
    next: usize,
    sampled: bool,
}

/// Inputs of a pass on the device.
struct Inputs<B: InferenceBackend> {
    batch: Batch<B>,
    ids: View<B>,
    /// Ring row of each pass row, for models with MTP.
    ring: Option<View<B>>,
}

impl<B: InferenceBackend> Session<B> {
    /// How many MTP rows a lane lacks, its anchor's not counted; the reason if they cannot be made any more.
    pub(super) fn mtp_lag(&self, lane: &Lane) -> std::result::Result<usize, String> {
        if !self.limits.mtp {
            return Err(match self.model.has_mtp() {
                true => "the session was opened without it".to_owned(),
                false => "the checkpoint has no MTP block".to_owned(),
            });
        }
        let lag = lane.position.saturating_sub(lane.mtp_rows);
        if lag > KEPT {
            return Err(format!(
                "{lag} tokens were decoded without drafting; hidden states of the last {KEPT} are kept"
            ));
        }
        Ok(lag)
    }

    /// Runs one round and returns an outcome a lane.
    pub(super) fn run_round(
        &mut self,
        lanes: &mut [&mut Committed<Lane>],
        rows: &[RoundRow<'_>],
    ) -> Result<Vec<Outcome>> {
        let key = self.check_round(lanes, rows)?;
        for (lane, row) in lanes.iter_mut().zip(rows) {
            let lane = lane.get_mut();
            if lane.mtp_rows >= lane.position && lane.mtp_anchor != Some(row.anchor) {
                lane.mtp_rows = lane.position.saturating_sub(1);
            }
            if row.next_drafts > 0 {
                self.catch_up(lane, row.anchor)?;
            }
        }
        let inputs = self.round_inputs(key, lanes, rows)?;
        if !self.recorded.contains_key(&key) {
            if self.recorded.len() >= MAX_RECORDED {
                self.recorded.clear();
            }
            let step = self.record_round(key, &inputs)?;
            self.recorded.insert(key, step);
        }
        self.ingress.send(self.model.backend(), &mut self.queue)?;
        let width = key.segments * (key.columns + 1 + key.next);
        self.host.resize(width * 4, 0);
        lanes.iter_mut().for_each(|l| l.get_mut().broken = true);
        if let Some(step) = self.recorded.get(&key) {
            self.model.backend().replay(&mut self.queue, step)?;
        }
        let egress = self.tail.egress(key.segments, key.columns, key.next)?;
        self.model.backend().download(&mut self.queue, &egress, &mut self.host)?;
        self.finish_round(key, lanes, rows)
    }

    fn check_round(&self, lanes: &[&mut Committed<Lane>], rows: &[RoundRow<'_>]) -> Result<RoundKey> {
        if lanes.len() != rows.len() || lanes.is_empty() || lanes.len() > self.limits.lanes {
            return Err(Error::Shape {
                op: "verify",
                what: "lanes and rows",
                expected: format!("equal numbers, 1 to {}", self.limits.lanes),
                got: format!("{} and {}", lanes.len(), rows.len()),
            });
        }
        let (mut columns, mut next, mut sampled) = (1, 0, false);
        for (lane, row) in lanes.iter().zip(rows) {
            let lane = lane.get();
            self.check_owner(lane)?;
            for (what, count) in [("drafts", row.drafts.len()), ("drafts for the next round", row.next_drafts)] {
                if count > self.limits.max_drafts {
                    return Err(Error::OutOfRange {
                        what,
                        got: count.to_string(),
                        legal: format!("0 to {}", self.limits.max_drafts),
                    });
                }
            }
            self.check_ids(&[row.anchor])?;
            self.check_ids(row.drafts)?;
            lane.check(1 + row.drafts.len())?;
            if row.next_drafts > 0 {
                self.mtp_lag(lane).map_err(|reason| Error::MtpUnavailable { reason })?;
            }
            columns = columns.max(1 + row.drafts.len());
            next = next.max(row.next_drafts);
            sampled |= lane.sampled || row.logits;
        }
        let segments = pad_segments(lanes.len(), columns).min(self.limits.lanes);
        if segments * columns > MAX_STEP_ROWS || segments * columns > self.tail.logits.rows() {
            return Err(Error::OutOfRange {
                what: "rows of a round",
                got: format!("{segments} × {columns}"),
                legal: format!("at most {}", MAX_STEP_ROWS.min(self.tail.logits.rows())),
            });
        }
        Ok(RoundKey { segments, columns, next, sampled })
    }

    fn round_inputs(
        &mut self,
        key: RoundKey,
        lanes: &[&mut Committed<Lane>],
        rows: &[RoundRow<'_>],
    ) -> Result<Inputs<B>> {
        let columns = key.columns;
        let column = |row: &RoundRow<'_>, c: usize| match c.checked_sub(1) {
            None => Some(row.anchor),
            Some(d) => row.drafts.get(d).copied(),
        };
        self.ingress.clear();
        let table = self.ingress.table((0..key.segments).map(|s| {
            let row = (s * columns) as u32;
            let Some((lane, input)) = lanes.get(s).map(|l| l.get()).zip(rows.get(s)) else {
                return Segment { row, ..Segment::default() };
            };
            Segment {
                slot: lane.reserved.slot,
                start: lane.position as u32,
                row,
                len: 1 + input.drafts.len() as u32,
                fold: lane.fold as u32,
                bank: 1 - lane.bank,
            }
        }))?;
        let cells = || (0..key.segments * columns).map(|r| (r / columns, r % columns));
        let ids =
            self.ingress.ids(cells().map(|(s, c)| rows.get(s).and_then(|row| column(row, c)).unwrap_or(u32::MAX)))?;
        let ring = if self.limits.mtp {
            Some(self.ingress.indices(cells().map(|(s, c)| {
                let (lane, row) = (lanes.get(s)?.get(), rows.get(s)?);
                column(row, c)?;
                Some(lane.reserved.slot as usize * RING + (lane.position + c) % RING)
            }))?)
        } else {
            None
        };
        Ok(Inputs { batch: Batch::new(Profile::Step, key.segments * columns, table)?, ids, ring })
    }

    fn record_round(&mut self, key: RoundKey, inputs: &Inputs<B>) -> Result<B::Recorded> {
        let count = inputs.batch.rows;
        let rows = self.rows.first(count)?;
        let first = self.limits.lanes * RING;
        let normed = self.cache.hidden.row_range(first..first + count)?;
        let ring_rows = self.cache.hidden.row_range(0..first)?;
        let tail = Tail {
            batch: &inputs.batch,
            ids: &inputs.ids,
            normed: &normed,
            index: &self.tail.pass_index.row_range(0..count)?,
            columns: key.columns,
            next: key.next,
            sampled: key.sampled,
            prompt: false,
            limit: self.limits.token_limit,
        };
        let iota = self.tail.iota(count)?;
        let (model, cache, buffers) = (&self.model, &self.cache, &self.tail);
        model.backend().record(&mut self.queue, |rec: &mut Recorder<'_, B>| {
            model.trunk(rec, &inputs.batch, &inputs.ids, &rows, cache, true, &mut |_, _| Ok(()))?;
            model.final_norm(rec, &inputs.batch, &rows, &normed)?;
            if let Some(ring) = &inputs.ring {
                rec.copy_rows(CopyRows {
                    src: normed.clone(),
                    src_index: iota,
                    dst: ring_rows,
                    dst_index: ring.clone(),
                })?;
            }
            model.tail(rec, &tail, buffers, cache, &rows)
        })
    }

    fn finish_round(
        &mut self,
        key: RoundKey,
        lanes: &mut [&mut Committed<Lane>],
        rows: &[RoundRow<'_>],
    ) -> Result<Vec<Outcome>> {
        let first_draft = key.segments * (key.columns + 1);
        let mut outcomes = Vec::with_capacity(lanes.len());
        for (s, (lane, row)) in lanes.iter_mut().zip(rows).enumerate() {
            let lane = lane.get_mut();
            let result = s * (key.columns + 1);
            let accepted = (self.result_word(result) as usize).min(row.drafts.len());
            let tokens: TokenRow = (0..=accepted).map(|i| self.result_word(result + 1 + i)).collect();
            let drafts = (0..row.next_drafts).map(|i| self.result_word(first_draft + i * key.segments + s));
            // The step has folded the round before and recorded this one; nothing of it is committed yet.
            lane.fold = 0;
            lane.bank = 1 - lane.bank;
            lane.broken = false;
            lane.pending = (std::iter::once(row.anchor).chain(row.drafts.iter().copied()).collect(), tokens);
            outcomes.push(Outcome {
                accepted,
                tokens,
                drafts: drafts.take_while(|&t| t != u32::MAX).collect(),
                columns: 1 + row.drafts.len(),
                realigned: if key.next > 0 && lane.mtp_rows >= lane.position { accepted + 1 } else { 0 },
                logits: None,
            });
        }
        for (lane, outcome) in lanes.iter().zip(&outcomes) {
            if let Some(column) = outcome.tokens.iter().position(|&t| t == u32::MAX) {
                return Err(Error::NonFinite { what: "logits", position: lane.position() + column });
            }
        }
        for (s, row) in rows.iter().enumerate().filter(|(_, r)| r.logits) {
            let first = s * key.columns;
            let view = self.tail.logits.row_range(first..first + 1 + row.drafts.len())?;
            outcomes[s].logits = Some(self.download_floats(&view)?);
        }
        Ok(outcomes)
    }

    /// Word `i` of the results that were downloaded last.
    pub(super) fn result_word(&self, i: usize) -> u32 {
        self.host.as_chunks::<4>().0.get(i).map_or(u32::MAX, |b| u32::from_le_bytes(*b))
    }

    /// Copies an f32 view to the host.
    pub(super) fn download_floats(&mut self, view: &View<B>) -> Result<Vec<f32>> {
        let mut values = vec![0.0f32; view.rows() * view.cols()];
        self.model.backend().download(&mut self.queue, view, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    /// Makes the MTP rows that plain decoding left out, up to the one of the anchor.
    fn catch_up(&mut self, lane: &mut Lane, anchor: u32) -> Result<()> {
        self.mtp_lag(lane).map_err(|reason| Error::MtpUnavailable { reason })?;
        self.catch_up_rows(lane, lane.position, anchor)?;
        lane.mtp_rows = lane.position;
        lane.mtp_anchor = Some(anchor);
        Ok(())
    }

    /// Before more prompt: makes the missing MTP rows of committed tokens, if that is still possible.
    pub(super) fn catch_up_prompt(&mut self, lane: &mut Lane) -> Result<()> {
        if self.mtp_lag(lane).is_ok() {
            // Row `position` takes the prompt's first token and is made with the prompt.
            self.catch_up_rows(lane, lane.position - 1, 0)?;
            lane.mtp_rows = lane.mtp_rows.max(lane.position - 1);
        }
        Ok(())
    }

    /// Makes MTP rows up to slot `last` from the hidden states in the ring; `anchor` is the token of slot `position`.
    fn catch_up_rows(&mut self, lane: &Lane, last: usize, anchor: u32) -> Result<()> {
        let (slot, slots) = (lane.reserved.slot, lane.mtp_rows + 1..last + 1);
        let Some(kv) = self.cache.mtp_kv.clone().filter(|_| !slots.is_empty()) else { return Ok(()) };
        let count = slots.len();
        self.ingress.clear();
        let segment = Segment { slot, start: slots.start as u32, row: 0, len: count as u32, fold: 0, bank: 0 };
        let table = self.ingress.table(std::iter::once(segment))?;
        let token = |s: usize| if s == lane.position { anchor } else { lane.recent[s % RING] };
        let ids = self.ingress.ids(slots.clone().map(token))?;
        let index = self.ingress.indices(slots.map(|s| Some(slot as usize * RING + (s - 1) % RING)))?;
        self.ingress.send(self.model.backend(), &mut self.queue)?;
        let batch = Batch::new(Profile::Step, count, table)?;
        let rows = self.rows.first(count)?;
        let output = self.tail.mtp_output.row_range(0..count)?;
        let pass = MtpPass { ids: &ids, hidden: &self.cache.hidden, index: &index, output: &output };
        let model = &self.model;
        model.backend().run(&mut self.queue, |rec| model.mtp_pass(rec, &batch, &pass, &rows, &kv))
    }
}

/// Rounds up the number of segments, so that few recordings serve many widths.
fn pad_segments(count: usize, columns: usize) -> usize {
    let padded = match count {
        0..=8 => count,
        9..=12 => 12,
        13..=16 => 16,
        _ => count.next_multiple_of(8),
    };
    if padded * columns > MAX_STEP_ROWS { count } else { padded }
}
