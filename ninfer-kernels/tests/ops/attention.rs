//! Rotation, append and attention over paged keys and values.

use half::bf16;
use ninfer_core::ops::{Attend, KvLayer, RopeAppend, RopeTable};
use ninfer_core::segment::{PAGE_TOKENS, Profile, Segment};

use super::close::{GOLDEN, close, close_by};
use super::lab::{Lab, Mat, Word};
use super::oracle::{self, attention};
use super::rng::Rng;

/// Element of a cache under test.
pub trait Kv: Word {
    fn from_f32(x: f32) -> Self;
    fn f32(self) -> f32;
}

impl Kv for f32 {
    fn from_f32(x: f32) -> Self {
        x
    }
    fn f32(self) -> f32 {
        self
    }
}

impl Kv for bf16 {
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }
    fn f32(self) -> f32 {
        self.to_f32()
    }
}

/// `theta^(−2f/R)` in f32.
pub fn frequencies(half: usize) -> Vec<f32> {
    (0..half).map(|f| 1e7f64.powf(-(f as f64) / half as f64) as f32).collect()
}

/// A cache whose logical pages lie in a permuted order; every page without a token is poison.
pub struct Cache {
    pub keys: Mat<ninfer_kernels::cpu::Cpu>,
    pub values: Mat<ninfer_kernels::cpu::Cpu>,
    pub pages: Mat<ninfer_kernels::cpu::Cpu>,
    pub table: Vec<i32>,
    pub per_sequence: usize,
    pub heads: usize,
}

impl Cache {
    pub fn layer(&self) -> KvLayer<ninfer_kernels::cpu::Cpu> {
        KvLayer { keys: self.keys.v(), values: self.values.v(), scales: None, pages: self.pages.v(), heads: self.heads }
    }

    /// Row of the page matrices for a head and a position.
    pub fn row(&self, slot: usize, head: usize, position: usize) -> usize {
        let page = self.table[slot * self.per_sequence + position / PAGE_TOKENS] as usize;
        (page * self.heads + head) * PAGE_TOKENS + position % PAGE_TOKENS
    }
}

struct Heads {
    d: usize,
    query: usize,
    kv: usize,
}

/// Appends at the positions of two segments, then looks at queries and at every element of the pages.
fn append<E: Kv>(heads: &Heads, starts: [u32; 2], shift: u32) {
    let Heads { d, query, kv } = *heads;
    let half = d / 8;
    let mut rng = Rng::new((d * 100 + query * 10 + kv) as u64 + u64::from(starts[0]));
    let segments = [
        Segment { slot: 2, start: starts[0], row: 1, len: 3, ..Segment::default() },
        Segment { slot: 0, start: starts[1], row: 5, len: 2, ..Segment::default() },
    ];
    let rows = 8;
    let (per_sequence, slots, pages) = (starts[0].max(starts[1]) as usize / PAGE_TOKENS + 2, 3, 7);
    // Only the pages that are written have a number; the rest of the table is −1.
    let mut table = vec![-1i32; slots * per_sequence];
    let order = rng.permutation(pages);
    let mut used = 0;
    for s in &segments {
        for p in s.start as usize / PAGE_TOKENS..=(s.start + s.len - 1) as usize / PAGE_TOKENS {
            table[s.slot as usize * per_sequence + p] = order[used] as i32;
            used += 1;
        }
    }
    let query_gate = rng.values(rows * query * 2 * d, 1.0);
    let (key, value) = (rng.values(rows * kv * d, 1.0), rng.values(rows * kv * d, 1.0));
    let (gains, inverse) = (rng.values(2 * d, 0.3), frequencies(half));

    let mut lab = Lab::cpu().with_gaps(3, 1);
    let views =
        [lab.input(rows, query * 2 * d, &query_gate), lab.input(rows, kv * d, &key), lab.input(rows, kv * d, &value)];
    let (gain_view, frequency_view) = (lab.input(2, d, &gains), lab.input(1, half, &inverse));
    let queries = lab.output::<f32>(rows, query * d);
    let cache = Cache {
        keys: lab.output::<E>(pages * kv * PAGE_TOKENS, d),
        values: lab.output::<E>(pages * kv * PAGE_TOKENS, d),
        pages: lab.input(slots, per_sequence, &table),
        table,
        per_sequence,
        heads: kv,
    };
    let batch = lab.batch(Profile::Step, rows, &segments);
    lab.run(|r| {
        r.rope_append(RopeAppend {
            batch,
            query_gate: views[0].v(),
            key: views[1].v(),
            value: views[2].v(),
            gains: gain_view.v(),
            eps: 1e-6,
            rope: RopeTable { frequencies: frequency_view.v(), magnitude: 1.25, shift },
            query: queries.v(),
            kv: cache.layer(),
        })
    });

    let got = lab.read::<f32>(&queries);
    let (keys, values) = (lab.read::<E>(&cache.keys), lab.read::<E>(&cache.values));
    let mut written = vec![false; pages * kv * PAGE_TOKENS];
    let expected = |x: &[f32], gain: &[f32], position: u32| {
        let mut head = oracle::rms_norm(&oracle::wide(x), gain, 1e-6);
        attention::rotate(&mut head, position.saturating_sub(shift), &inverse, 1.25);
        head
    };
    for s in &segments {
        for i in 0..s.len {
            let (t, position) = ((s.row + i) as usize, s.start + i);
            for h in 0..query {
                let x = &query_gate[(t * query + h) * 2 * d..][..d];
                close("query", &got[(t * query + h) * d..][..d], &expected(x, &gains[..d], position), GOLDEN);
            }
            for h in 0..kv {
                let row = cache.row(s.slot as usize, h, position as usize);
                written[row] = true;
                let x = &key[(t * kv + h) * d..][..d];
                let stored: Vec<f32> = keys[row * d..][..d].iter().map(|k| k.f32()).collect();
                let key = expected(x, &gains[d..], position);
                // bf16 keeps eight bits: half a unit is up to 2⁻⁸ of the value.
                let rounding = if E::DTYPE == f32::DTYPE { 0.0 } else { 2f64.powi(-8) };
                close_by("key", &stored, &key, |i| GOLDEN + rounding * key[i].abs());
                for (v, x) in values[row * d..][..d].iter().zip(&value[(t * kv + h) * d..][..d]) {
                    assert_eq!(*v, E::from_f32(*x), "value");
                }
            }
        }
    }
    for (row, written) in written.iter().enumerate() {
        for x in keys[row * d..][..d].iter().chain(&values[row * d..][..d]) {
            assert_eq!(x.f32().is_nan(), !written, "row {row} of the pages");
        }
    }
}

#[test]
fn rope_append_matches_f64() {
    for (query, kv) in [(1, 1), (2, 1), (4, 2), (6, 1), (16, 2)] {
        for d in [64, 128, 256] {
            append::<f32>(&Heads { d, query, kv }, [62, 0], 0);
            append::<bf16>(&Heads { d, query, kv }, [127, 63], 1);
        }
    }
    for start in [0, 4095, 4096, 8191, 262_140] {
        for shift in [0, 1] {
            append::<f32>(&Heads { d: 64, query: 2, kv: 1 }, [start, 5], shift);
            append::<bf16>(&Heads { d: 256, query: 6, kv: 1 }, [start, 64], shift);
        }
    }
}

/// One row for each segment at the end of a long context, or several rows; caches of all slots share physical pages.
fn attend<E: Kv>(heads: &Heads, segments: &[Segment], rows: usize, first_key: u32, profile: Profile) {
    let Heads { d, query, kv } = *heads;
    let mut rng = Rng::new((d * 100 + query * 10 + kv) as u64 + u64::from(segments[0].start));
    let longest = segments.iter().map(|s| (s.start + s.len) as usize).max().unwrap();
    let (slots, per_sequence) = (3, longest.div_ceil(PAGE_TOKENS) + 1);
    // A long context repeats a few pages, so that it costs no memory; pages of poison lie between them.
    let (good, pages) = (per_sequence.min(9), 2 * per_sequence.min(9) + 1);
    let order = rng.permutation(pages);
    let mut table = vec![-1i32; slots * per_sequence];
    for s in segments {
        for p in 0..((s.start + s.len) as usize).div_ceil(PAGE_TOKENS) {
            table[s.slot as usize * per_sequence + p] = order[(p + s.slot as usize) % good] as i32;
        }
    }
    let nan = E::from_f32(f32::NAN);
    let (mut keys, mut values) = (vec![nan; pages * kv * PAGE_TOKENS * d], vec![nan; pages * kv * PAGE_TOKENS * d]);
    for page in &order[..good] {
        for i in page * kv * PAGE_TOKENS * d..(page + 1) * kv * PAGE_TOKENS * d {
            (keys[i], values[i]) = (E::from_f32(rng.value(1.0)), E::from_f32(rng.value(1.0)));
        }
    }
    if longest <= good * PAGE_TOKENS && segments.len() == 1 {
        // Nothing repeats: everything behind the last visible key is poison as well, and so is what comes before the first.
        let slot = segments[0].slot as usize;
        for position in (longest..longest.next_multiple_of(PAGE_TOKENS)).chain(0..first_key as usize) {
            let page = table[slot * per_sequence + position / PAGE_TOKENS] as usize;
            for h in 0..kv {
                let row = (page * kv + h) * PAGE_TOKENS + position % PAGE_TOKENS;
                keys[row * d..][..d].fill(nan);
                values[row * d..][..d].fill(nan);
            }
        }
    }
    let mut queries = vec![f32::NAN; rows * query * d];
    let mut query_gate = vec![f32::NAN; rows * query * 2 * d];
    for t in segments.iter().flat_map(|s| s.row..s.row + s.len) {
        for h in 0..query {
            let at = t as usize * query + h;
            queries[at * d..][..d].copy_from_slice(&rng.values(d, 1.0));
            query_gate[at * 2 * d + d..][..d].copy_from_slice(&rng.values(d, 2.0));
        }
    }

    let mut lab = Lab::cpu().with_gaps(1, 3);
    let (q, g) = (lab.input(rows, query * d, &queries), lab.input(rows, query * 2 * d, &query_gate));
    let cache = Cache {
        keys: lab.input(pages * kv * PAGE_TOKENS, d, &keys),
        values: lab.input(pages * kv * PAGE_TOKENS, d, &values),
        pages: lab.input(slots, per_sequence, &table),
        table,
        per_sequence,
        heads: kv,
    };
    let output = lab.output::<f32>(rows, query * d);
    let batch = lab.batch(profile, rows, segments);
    let op = Attend { batch, query: q.v(), query_gate: g.v(), kv: cache.layer(), first_key, output: output.v() };
    lab.run(|r| r.attend(op));

    let got = lab.read::<f32>(&output);
    let wide = |x: &[E]| -> Vec<f64> { x.iter().map(|x| f64::from(x.f32())).collect() };
    let (keys, values) = (wide(&keys), wide(&values));
    for s in segments {
        for i in 0..s.len {
            let (t, position) = ((s.row + i) as usize, (s.start + i) as usize);
            for h in 0..query {
                let visible =
                    (first_key as usize..position + 1).map(|p| cache.row(s.slot as usize, h / (query / kv), p));
                let rows: Vec<usize> = visible.collect();
                let k: Vec<&[f64]> = rows.iter().map(|r| &keys[r * d..][..d]).collect();
                let v: Vec<&[f64]> = rows.iter().map(|r| &values[r * d..][..d]).collect();
                let at = t * query + h;
                let q = oracle::wide(&queries[at * d..][..d]);
                let gate = oracle::wide(&query_gate[at * 2 * d + d..][..d]);
                let expected = attention::attend(&q, &k, &v, &gate);
                close(&format!("row {t}, head {h}"), &got[at * d..][..d], &expected, GOLDEN);
            }
        }
    }
}

fn at(slot: u32, start: u32, row: u32, len: u32) -> Segment {
    Segment { slot, start, row, len, ..Segment::default() }
}

#[test]
fn attention_matches_f64_for_every_grouping_and_head_size() {
    for (query, kv) in [(1, 1), (2, 1), (4, 1), (6, 1), (8, 1), (4, 2), (12, 2)] {
        for d in [64, 128, 256] {
            attend::<f32>(&Heads { d, query, kv }, &[at(1, 61, 0, 5)], 5, 0, Profile::Step);
            attend::<bf16>(&Heads { d, query, kv }, &[at(2, 300, 1, 2)], 4, 1, Profile::Step);
        }
    }
}

#[test]
fn attention_matches_f64_far_into_a_context() {
    for start in [0, 1, 63, 64, 255, 256, 257, 4095, 4096, 8191] {
        attend::<f32>(&Heads { d: 64, query: 6, kv: 1 }, &[at(0, start, 0, 1)], 1, 0, Profile::Step);
        attend::<bf16>(&Heads { d: 256, query: 2, kv: 1 }, &[at(0, start, 0, 3)], 3, 0, Profile::Step);
    }
    attend::<f32>(&Heads { d: 64, query: 2, kv: 1 }, &[at(0, 262_143, 0, 1)], 1, 0, Profile::Step);
    attend::<bf16>(&Heads { d: 128, query: 1, kv: 1 }, &[at(0, 262_143, 0, 1)], 1, 1, Profile::Step);
}

#[test]
fn segments_see_their_own_sequence() {
    let segments = [at(2, 70, 3, 4), at(0, 0, 0, 2), at(1, 128, 9, 1), at(1, 7, 200, 0)];
    for profile in [Profile::Step, Profile::Prefill] {
        attend::<f32>(&Heads { d: 64, query: 4, kv: 2 }, &segments, 12, 0, profile);
        attend::<bf16>(&Heads { d: 64, query: 8, kv: 1 }, &segments, 12, 0, profile);
    }
    attend::<f32>(&Heads { d: 64, query: 4, kv: 2 }, &[at(0, 0, 0, 130)], 130, 0, Profile::Prefill);
}

/// Slot 0 of the MTP block is never written: its row sees nothing, and gives zeros.
#[test]
fn a_row_without_a_visible_key_gives_zeros() {
    attend::<f32>(&Heads { d: 64, query: 2, kv: 1 }, &[at(0, 0, 0, 2)], 2, 1, Profile::Step);
}

/// Scores of ±1e4 and equal scores: the softmax stays finite and exact.
#[test]
fn extreme_scores() {
    let d = 64;
    let mut keys = vec![0.0f32; PAGE_TOKENS * d];
    let values: Vec<f32> = (0..PAGE_TOKENS * d).map(|i| (i / d) as f32).collect();
    (keys[0], keys[d], keys[2 * d]) = (1e4, -1e4, 1e4);
    let mut lab = Lab::cpu();
    let mut query = vec![0.0f32; d];
    query[0] = 8.0;
    let (q, g) = (lab.input(1, d, &query), lab.input(1, 2 * d, &vec![30.0f32; 2 * d]));
    let cache = Cache {
        keys: lab.input(PAGE_TOKENS, d, &keys),
        values: lab.input(PAGE_TOKENS, d, &values),
        pages: lab.input(1, 1, &[0i32]),
        table: vec![0],
        per_sequence: 1,
        heads: 1,
    };
    let output = lab.output::<f32>(1, d);
    let batch = lab.one(Profile::Step, 1, 3);
    let op = Attend { batch, query: q.v(), query_gate: g.v(), kv: cache.layer(), first_key: 0, output: output.v() };
    lab.run(|r| r.attend(op));
    // Keys 0 and 2 share all the weight; sigmoid(30) is 1.
    assert_eq!(lab.read::<f32>(&output), vec![1.0; d]);
}
