//! Head, choice of tokens, acceptance and counts.

use ninfer_core::backend::DeviceWeight;
use ninfer_core::ops::{Accept, Choose, Count, Head, HeadArgmax};
use ninfer_core::sampling::{self, PARAM_WORDS, SamplingParams};
use ninfer_core::segment::{Profile, SEGMENT_WORDS, Segment};
use ninfer_core::{Error, Result};

use super::Cpu;
use super::buffer::Access;
use super::matmul::{Input, Output, matmul};
use super::queue::Scratch;
use super::rows::Rows;
use super::simd::Isa;

/// Marks a token of the prompt in a count.
const IN_PROMPT: u32 = 1 << 31;
/// No token.
const NONE: u32 = u32::MAX;

pub(super) fn head(op: &Head<Cpu>, isa: Isa, scratch: &mut Scratch) -> Result<()> {
    let access = Access::new("head");
    let rows = Rows::read(&access, "head", &op.batch)?;
    let x = Input::new(access.read("input", &op.input)?, op.input.stride());
    let logits = access.write_matrix("logits", &op.logits, rows.count, op.head.rows())?;
    matmul(isa, &rows, x, &op.head, &Output::set(logits, op.logits.stride()), &mut scratch.codes)
}

pub(super) fn head_argmax(op: &HeadArgmax<Cpu>, isa: Isa, scratch: &mut Scratch) -> Result<()> {
    let access = Access::new("head_argmax");
    let rows = Rows::read(&access, "head_argmax", &op.batch)?;
    let x = Input::new(access.read("input", &op.input)?, op.input.stride());
    let ids: &mut [u32] = access.write("output", &op.output)?;
    let vocab = op.head.rows();
    let Scratch { floats, codes, choose, .. } = scratch;
    let [logits] = floats.get([rows.count * vocab])?;
    matmul(isa, &rows, x, &op.head, &Output::set(logits, vocab), codes)?;
    for t in 0..rows.count {
        let row = &logits[t * vocab..][..vocab];
        let choice = sampling::choose(row, op.limit, &SamplingParams::greedy(), &|_| 0, 0, choose);
        ids[t * op.output.stride()] = choice.unwrap_or(NONE);
    }
    Ok(())
}

fn check_slot(segment: &Segment, slots: usize) -> Result<usize> {
    let slot = segment.slot as usize;
    if slot < slots {
        return Ok(slot);
    }
    Err(Error::OutOfRange { what: "sequence slot", got: slot.to_string(), legal: format!("below {slots}") })
}

/// A round has at most as many columns as `previous` and results have room for.
fn check_width(segment: &Segment, profile: Profile, width: usize) -> Result<()> {
    let columns = segment.len.max(segment.fold) as usize;
    if profile == Profile::Prefill || columns <= width {
        return Ok(());
    }
    Err(Error::OutOfRange { what: "columns of a round", got: columns.to_string(), legal: format!("0 to {width}") })
}

pub(super) fn choose(op: &Choose<Cpu>, _isa: Isa, scratch: &mut Scratch) -> Result<()> {
    let access = Access::new("choose");
    let rows = Rows::read(&access, "choose", &op.batch)?;
    let logits: &[f32] = access.read("logits", &op.logits)?;
    let ids: &[u32] = access.read("ids", &op.ids)?;
    let params: &[u32] = access.read("params", &op.params)?;
    let counts: &[u32] = access.read("counts", &op.counts)?;
    let output: &mut [u32] = access.write("output", &op.output)?;
    for segment in rows.segments() {
        let slot = check_slot(segment, op.params.rows())?;
        let mut words = [0; PARAM_WORDS];
        words.copy_from_slice(&params[slot * op.params.stride()..][..PARAM_WORDS]);
        let params = SamplingParams::from_words(&words);
        let counts = &counts[slot * op.counts.stride()..][..op.counts.cols()];
        for i in 0..segment.len as usize {
            let t = segment.row as usize + i;
            // In a step the inputs up to this row were generated, too; in a prompt chunk they are counted already.
            let overlay = if rows.profile == Profile::Step { segment.row as usize..t + 1 } else { 0..0 };
            let count = |id: u32| {
                let seen = overlay.clone().filter(|&r| ids[r * op.ids.stride()] == id).count();
                counts.get(id as usize).map_or(0, |c| c.saturating_add(seen as u32))
            };
            let row = &logits[t * op.logits.stride()..][..op.logits.cols()];
            let position = u64::from(segment.start) + i as u64 + 1;
            let choice = sampling::choose(row, op.limit, &params, &count, position, &mut scratch.choose);
            output[t * op.output.stride()] = choice.unwrap_or(NONE);
        }
    }
    Ok(())
}

pub(super) fn count(op: &Count<Cpu>, _isa: Isa, _scratch: &mut Scratch) -> Result<()> {
    let access = Access::new("count");
    let rows = Rows::read(&access, "count", &op.batch)?;
    let ids: &[u32] = access.read("ids", &op.ids)?;
    let previous: &mut [u32] = access.write("previous", &op.previous)?;
    let counts: &mut [u32] = access.write("counts", &op.counts)?;
    for segment in rows.segments().iter().filter(|s| s.len > 0) {
        let slot = check_slot(segment, op.counts.rows())?;
        check_width(segment, rows.profile, op.previous.cols())?;
        let counts = &mut counts[slot * op.counts.stride()..][..op.counts.cols()];
        let previous = &mut previous[slot * op.previous.stride()..][..op.previous.cols()];
        if segment.base() == 0 {
            counts.fill(0);
        }
        let inputs = (0..segment.len as usize).map(|i| ids[(segment.row as usize + i) * op.ids.stride()]);
        if rows.profile == Profile::Prefill {
            for id in inputs {
                if let Some(c) = counts.get_mut(id as usize) {
                    *c |= IN_PROMPT;
                }
            }
            continue;
        }
        for &id in previous.iter().take(segment.fold as usize) {
            if let Some(c) = counts.get_mut(id as usize) {
                *c = c.saturating_add(1);
            }
        }
        for (p, id) in previous.iter_mut().zip(inputs) {
            *p = id;
        }
    }
    Ok(())
}

pub(super) fn accept(op: &Accept<Cpu>, _isa: Isa, _scratch: &mut Scratch) -> Result<()> {
    let access = Access::new("accept");
    let rows = Rows::read(&access, "accept", &op.batch)?;
    let ids: &[u32] = access.read("ids", &op.ids)?;
    let chosen: &[u32] = access.read("chosen", &op.chosen)?;
    let result: &mut [u32] = access.write("result", &op.result)?;
    let realign: &mut [i32] = access.write("realign", &op.realign)?;
    let last: &mut [i32] = access.write("last", &op.last)?;
    let chain: &mut [i32] = access.write("chain", &op.chain)?;
    let width = op.result.cols() - 1;
    let count = op.batch.segments;
    for (s, segment) in rows.segments().iter().enumerate() {
        check_width(&Segment { fold: 0, ..*segment }, Profile::Step, width)?;
        let (row, len) = (segment.row as usize, segment.len as usize);
        let token = |i: usize| chosen[(row + i) * op.chosen.stride()];
        let draft = |i: usize| ids[(row + i) * op.ids.stride()];
        let mut accepted = 0;
        while accepted + 1 < len && draft(accepted + 1) == token(accepted) {
            accepted += 1;
        }
        let emitted = if len == 0 { 0 } else { accepted + 1 };
        let out = &mut result[s * op.result.stride()..][..width + 1];
        out[0] = accepted as u32;
        for (i, out) in out[1..].iter_mut().enumerate() {
            *out = if i < emitted { token(i) } else { NONE };
        }
        let next = Segment { start: segment.start + 1, len: emitted as u32, fold: 0, ..*segment };
        put(realign, op.realign.stride() * s, next);
        last[s * op.last.stride()] = if len == 0 { -1 } else { (row + accepted) as i32 };
        for i in 0..op.chain.rows() / count.max(1) {
            let start = segment.start + accepted as u32 + 1 + i as u32;
            let link = Segment { start, row: s as u32, len: emitted.min(1) as u32, fold: 0, ..*segment };
            put(chain, op.chain.stride() * (i * count + s), link);
        }
    }
    Ok(())
}

fn put(table: &mut [i32], at: usize, segment: Segment) {
    table[at..at + SEGMENT_WORDS].copy_from_slice(&segment.to_words());
}
