//! Gated full attention over paged keys and values.

use std::cell::RefCell;

use half::{bf16, f16};
use ninfer_core::ops::{Attend, KvLayer, RopeAppend};
use ninfer_core::segment::{PAGE_TOKENS, Segment};
use ninfer_core::{DType, Error, Result};

use super::Cpu;
use super::buffer::Access;
use super::kv::{E4m3, KvElement};
use super::norm::{normalise, sigmoid};
use super::parallel::{Shared, split};
use super::queue::Scratch;
use super::reserve;
use super::rows::Rows;
use super::simd::{Isa, Lanes, dispatch};

/// Row of the page matrices that holds the keys of a head at a position.
struct Pages<'a> {
    table: &'a [i32],
    stride: usize,
    per_sequence: usize,
    slots: usize,
    heads: usize,
    rows: usize,
}

impl<'a> Pages<'a> {
    fn new(access: &'a Access, kv: &KvLayer<Cpu>) -> Result<Self> {
        Ok(Self {
            table: access.read("pages", &kv.pages)?,
            stride: kv.pages.stride(),
            per_sequence: kv.pages.cols(),
            slots: kv.pages.rows(),
            heads: kv.heads,
            rows: kv.keys.rows(),
        })
    }

    /// First row of the page that holds position `p`, for head 0. Checked.
    fn page(&self, segment: &Segment, page: usize) -> Result<usize> {
        let overflow =
            Error::ContextOverflow { requested: (page + 1) * PAGE_TOKENS, limit: self.per_sequence * PAGE_TOKENS };
        let slot = segment.slot as usize;
        if slot >= self.slots || page >= self.per_sequence {
            return Err(overflow);
        }
        let entry = usize::try_from(self.table[slot * self.stride + page]).map_err(|_| overflow.clone())?;
        let rows = self.heads.saturating_mul(PAGE_TOKENS);
        let first = entry.saturating_mul(rows);
        if first.saturating_add(rows) > self.rows { Err(overflow) } else { Ok(first) }
    }
}

pub(super) fn rope_append(op: &RopeAppend<Cpu>, isa: Isa, scratch: &mut Scratch) -> Result<()> {
    match op.kv.keys.dtype() {
        DType::Bf16 => rope_append_as::<bf16>(op, isa, scratch),
        DType::I8 => rope_append_as::<i8>(op, isa, scratch),
        DType::F8E4M3 => rope_append_as::<E4m3>(op, isa, scratch),
        _ => rope_append_as::<f32>(op, isa, scratch),
    }
}

fn rope_append_as<E: KvElement>(op: &RopeAppend<Cpu>, isa: Isa, scratch: &mut Scratch) -> Result<()> {
    let access = Access::new("rope_append");
    let rows = Rows::read(&access, "rope_append", &op.batch)?;
    let (d, heads) = (op.gains.cols(), op.query.cols() / op.gains.cols());
    let query_gate: &[f32] = access.read("query_gate", &op.query_gate)?;
    let key: &[f32] = access.read("key", &op.key)?;
    let value: &[f32] = access.read("value", &op.value)?;
    let gains: &[f32] = access.read("gains", &op.gains)?;
    let frequencies: &[f32] = access.read("frequencies", &op.rope.frequencies)?;
    let pages = Pages::new(&access, &op.kv)?;
    let query: &mut [f32] = access.write("query", &op.query)?;
    let keys: &mut [E] = access.write("keys", &op.kv.keys)?;
    let values: &mut [E] = access.write("values", &op.kv.values)?;
    let [mut key_scales, mut value_scales] = match &op.kv.scales {
        Some(scales) => [
            Some((access.write::<f16>("key scales", &scales.keys)?, scales.keys.stride())),
            Some((access.write::<f16>("value scales", &scales.values)?, scales.values.stride())),
        ],
        None => [None, None],
    };
    let (q_gain, k_gain) = (&gains[..d], &gains[op.gains.stride()..][..d]);
    let half = frequencies.len();
    let [rotation, head] = scratch.floats.get([2 * half, d])?;
    for segment in rows.segments() {
        for i in 0..segment.len as usize {
            let (t, position) = (segment.row as usize + i, segment.start as usize + i);
            let angle_position = position.saturating_sub(op.rope.shift as usize) as f32;
            let (cos, sin) = rotation.split_at_mut(half);
            for ((c, s), f) in cos.iter_mut().zip(sin.iter_mut()).zip(frequencies) {
                // The angle is formed in f32; sine and cosine of it are accurate.
                let angle = f64::from(angle_position * f);
                *c = angle.cos() as f32 * op.rope.magnitude;
                *s = angle.sin() as f32 * op.rope.magnitude;
            }
            for h in 0..heads {
                let source = &query_gate[t * op.query_gate.stride() + h * 2 * d..][..d];
                let target = &mut query[t * op.query.stride() + h * d..][..d];
                normalise(isa, source, q_gain, op.eps, target);
                rotate(target, cos, sin);
            }
            let page = pages.page(segment, position / PAGE_TOKENS)?;
            for h in 0..op.kv.heads {
                let row = page + h * PAGE_TOKENS + position % PAGE_TOKENS;
                normalise(isa, &key[t * op.key.stride() + h * d..][..d], k_gain, op.eps, head);
                rotate(head, cos, sin);
                store(head, &mut keys[row * op.kv.keys.stride()..][..d], scales_of(&mut key_scales, row));
                let value = &value[t * op.value.stride() + h * d..][..d];
                store(value, &mut values[row * op.kv.values.stride()..][..d], scales_of(&mut value_scales, row));
            }
        }
    }
    Ok(())
}

/// The scales from those of a row on.
fn scales_of<'a>(scales: &'a mut Option<(&mut [f16], usize)>, row: usize) -> &'a mut [f16] {
    match scales {
        Some((scales, stride)) => &mut scales[row * *stride..],
        None => &mut [],
    }
}

fn store<E: KvElement>(from: &[f32], to: &mut [E], scales: &mut [f16]) {
    let group = E::group(from.len());
    let mut scales = scales.iter_mut();
    for (from, to) in from.chunks(group).zip(to.chunks_mut(group)) {
        let scale = E::encode(from, to);
        if let Some(place) = scales.next() {
            *place = scale;
        }
    }
}

/// Rotates pairs `(f, f + R/2)`; `cos` and `sin` have `R/2` entries.
fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, rest) = head.split_at_mut(cos.len());
    for (((a, b), c), s) in first.iter_mut().zip(rest).zip(cos).zip(sin) {
        (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
    }
}

thread_local! {
    /// Scores of one query head and the partial result of a leaf; grows to the context.
    static SCORES: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Makes room for the scores of one query head, and a partial result behind them, on this thread.
pub(super) fn reserve(len: usize) -> Result<()> {
    SCORES.with_borrow_mut(|scores| reserve::grow(scores, len))
}

pub(super) fn attend(op: &Attend<Cpu>, isa: Isa, scratch: &mut Scratch) -> Result<()> {
    match op.kv.keys.dtype() {
        DType::Bf16 => attend_as::<bf16>(op, isa, scratch),
        DType::I8 => attend_as::<i8>(op, isa, scratch),
        DType::F8E4M3 => attend_as::<E4m3>(op, isa, scratch),
        _ => attend_as::<f32>(op, isa, scratch),
    }
}

fn attend_as<E: KvElement>(op: &Attend<Cpu>, isa: Isa, scratch: &mut Scratch) -> Result<()> {
    let access = Access::new("attend");
    let rows = Rows::read(&access, "attend", &op.batch)?;
    let d = op.kv.keys.cols();
    let heads = op.query.cols() / d;
    let query: &[f32] = access.read("query", &op.query)?;
    let query_gate: &[f32] = access.read("query_gate", &op.query_gate)?;
    let keys: &[E] = access.read("keys", &op.kv.keys)?;
    let values: &[E] = access.read("values", &op.kv.values)?;
    let [key_scales, value_scales] = match &op.kv.scales {
        Some(scales) => [
            (access.read::<f16>("key scales", &scales.keys)?, scales.keys.stride()),
            (access.read::<f16>("value scales", &scales.values)?, scales.values.stride()),
        ],
        None => [(&[] as &[f16], 0); 2],
    };
    let pages = Pages::new(&access, &op.kv)?;
    let output: &mut [f32] = access.write_matrix("output", &op.output, rows.count, heads * d)?;
    let shared = Shared::new(output);
    for segment in rows.segments().iter().filter(|s| s.len > 0) {
        let visible = (segment.start + segment.len) as usize;
        scratch.indices.clear();
        for page in 0..visible.div_ceil(PAGE_TOKENS) {
            scratch.indices.push(pages.page(segment, page)? as u32);
        }
        let page_rows = &scratch.indices;
        let count = segment.len as usize * heads;
        split(count, 1, count * visible * d * 2, &|range| {
            for item in range {
                let (i, h) = (item / heads, item % heads);
                let (t, position) = (segment.row as usize + i, segment.start as usize + i);
                let first = op.first_key as usize;
                let at = t * op.output.stride() + h * d;
                // SAFETY: each item owns one head of one row, and rows are at least `heads · d` elements apart.
                let out = unsafe { shared.range(at..at + d) };
                let head = Head {
                    query: &query[t * op.query.stride() + h * d..][..d],
                    keys: Stored { elements: keys, stride: op.kv.keys.stride(), scales: key_scales },
                    values: Stored { elements: values, stride: op.kv.values.stride(), scales: value_scales },
                    pages: page_rows,
                    head_row: h / (heads / op.kv.heads) * PAGE_TOKENS,
                    visible: first..position + 1,
                };
                SCORES.with_borrow_mut(|scores| attend_head(isa, &head, scores, out));
                let gate = &query_gate[t * op.query_gate.stride() + h * 2 * d + d..][..d];
                for (o, g) in out.iter_mut().zip(gate) {
                    *o *= sigmoid(*g);
                }
            }
        });
    }
    Ok(())
}

/// Rows of keys or values.
struct Stored<'a, E> {
    elements: &'a [E],
    stride: usize,
    /// Scales with their stride; none for pages of elements.
    scales: (&'a [f16], usize),
}

impl<E: KvElement> Stored<'_, E> {
    /// The groups of a row of `d` features, each with its scale.
    #[inline(always)]
    fn groups(&self, row: usize, d: usize) -> impl Iterator<Item = (&[E], f32)> {
        let scales = if E::SCALED { &self.scales.0[row * self.scales.1..] } else { &[] };
        let mut scales = scales.iter();
        let scale = move || scales.next().map_or(1.0, |s| s.to_f32());
        self.elements[row * self.stride..][..d].chunks(E::group(d)).zip(std::iter::repeat_with(scale))
    }
}

struct Head<'a, E> {
    query: &'a [f32],
    keys: Stored<'a, E>,
    values: Stored<'a, E>,
    /// First row of each page of the sequence.
    pages: &'a [u32],
    /// Offset of the KV head inside a page.
    head_row: usize,
    visible: std::ops::Range<usize>,
}

impl<E> Head<'_, E> {
    #[inline(always)]
    fn row(&self, position: usize) -> usize {
        self.pages[position / PAGE_TOKENS] as usize + self.head_row + position % PAGE_TOKENS
    }
}

/// Keys whose weights and weighted values are summed by themselves, by absolute position. So the error of a sum over a
/// quarter of a million keys stays that of a sum over about a thousand.
const LEAF: usize = 256;

dispatch! {
    /// `out = softmax(q·Kᵀ / √D) V` for one query head: keys in ascending order inside a leaf, then leaves in ascending
    /// order.
    fn attend_head<E: KvElement>(head: &Head<'_, E>, scores: &mut Vec<f32>, out: &mut [f32]) = attend_head_body
}

#[inline(always)]
fn attend_head_body<L: Lanes, E: KvElement>(head: &Head<'_, E>, scores: &mut Vec<f32>, out: &mut [f32]) {
    let d = out.len();
    let scale = 1.0 / (d as f32).sqrt();
    scores.clear();
    let mut max = f32::NEG_INFINITY;
    for position in head.visible.clone() {
        let groups = head.keys.groups(head.row(position), d).zip(head.query.chunks(E::group(d)));
        let score = groups.fold(0.0, |sum, ((key, s), query)| L::scalar(s, dot_kv::<L, E>(query, key), sum)) * scale;
        max = max.max(score);
        scores.push(score);
    }
    let count = scores.len();
    scores.resize(count + d, 0.0);
    let (scores, partial) = scores.split_at_mut(count);
    let mut scores = scores.iter();
    let mut sum = 0.0;
    out.fill(0.0);
    let mut position = head.visible.start;
    while position < head.visible.end {
        let end = head.visible.end.min((position / LEAF + 1) * LEAF);
        let mut partial_sum = 0.0;
        partial.fill(0.0);
        for (position, score) in (position..end).zip(&mut scores) {
            let weight = (*score - max).exp();
            partial_sum += weight;
            let groups = head.values.groups(head.row(position), d).zip(partial.chunks_mut(E::group(d)));
            for ((value, s), partial) in groups {
                for (o, v) in partial.iter_mut().zip(value) {
                    *o = L::scalar(weight, v.load() * s, *o);
                }
            }
        }
        sum += partial_sum;
        for (o, p) in out.iter_mut().zip(&*partial) {
            *o += p;
        }
        position = end;
    }
    if sum > 0.0 {
        let inverse = 1.0 / sum;
        out.iter_mut().for_each(|o| *o *= inverse);
    } else if sum.is_nan() {
        out.fill(f32::NAN);
    }
}

#[inline(always)]
fn dot_kv<L: Lanes, E: KvElement>(q: &[f32], k: &[E]) -> f32 {
    let mut acc = L::zero();
    let (q16, q_rest) = q.as_chunks::<16>();
    let (k16, k_rest) = k.as_chunks::<16>();
    for (x, y) in q16.iter().zip(k16) {
        acc = L::load(x).mul_add(E::lanes(y), acc);
    }
    q_rest.iter().zip(k_rest).fold(acc.sum(), |sum, (x, y)| L::scalar(*x, y.load(), sum))
}
