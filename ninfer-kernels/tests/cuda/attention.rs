//! Attention over paged keys and values in every format.

use half::f16;
use ninfer_core::ops::{Attend, AttentionOps, KvLayer, KvScales};
use ninfer_core::segment::{PAGE_TOKENS, Profile, Segment};
use ninfer_core::{Backend, DType, Error, Recorder, Result, View};

use super::lab::{Side, Tolerance, exact, gpu, near, same};
use super::rng::Rng;

/// Weights and the result are rounded to bf16, by up to 2^-9 each, which is 1.65e-3 of many of them, or 2.35e-3 for both. In
/// steps a third rounding, of the values of INT8 pages or of weights times the scales of FP8 pages, makes 2.85e-3 of it;
/// prompts take one-byte pages in f16, whose rounding does not count.
const fn tolerance(dtype: DType) -> Tolerance {
    Tolerance { l2: if matches!(dtype, DType::Bf16) { 2.8e-3 } else { 3.15e-3 }, absolute: 1e-3, relative: 6e-3 }
}

pub const FORMATS: [DType; 3] = [DType::Bf16, DType::I8, DType::F8E4M3];

#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub dtype: DType,
    /// Features of a head.
    pub d: usize,
    /// Query heads of a KV head.
    pub group: usize,
    /// KV heads.
    pub heads: usize,
}

impl Sizes {
    pub fn groups(&self) -> usize {
        match self.dtype {
            DType::I8 => self.d.div_ceil(64),
            DType::F8E4M3 => 1,
            _ => 0,
        }
    }

    pub fn query_columns(&self) -> usize {
        self.group * self.heads * self.d
    }
}

/// Pages of one layer with their table, as bytes.
pub struct Content {
    pub sizes: Sizes,
    pub elements: [Vec<u8>; 2],
    pub scales: [Vec<f16>; 2],
    pub pages: usize,
    pub table: Vec<i32>,
    pub per_sequence: usize,
}

const SLOTS: usize = 3;

impl Content {
    /// Random pages for sequences of up to `tokens`; a long one repeats a few of them, so that it costs no memory.
    pub fn random(sizes: Sizes, tokens: usize, rng: &mut Rng) -> Self {
        let per_sequence = tokens.div_ceil(PAGE_TOKENS) + 1;
        let pages = SLOTS * per_sequence.min(9) + 2;
        let order = rng.permutation(pages);
        let table = (0..SLOTS * per_sequence)
            .map(|i| order[(i / per_sequence * per_sequence.min(9) + i % per_sequence % 9) % pages] as i32)
            .collect();
        let rows = pages * sizes.heads * PAGE_TOKENS;
        let mut elements = || -> Vec<u8> {
            let x = rng.values(rows * sizes.d, 1.0);
            match sizes.dtype {
                DType::Bf16 => x.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect(),
                DType::I8 => x.iter().map(|x| ((x * 127.0) as i8).max(-127).cast_unsigned()).collect(),
                _ => x.iter().map(|x| ninfer_quant::codes::encode_e4m3(x * 448.0)).collect(),
            }
        };
        let elements = [elements(), elements()];
        let limit = if sizes.dtype == DType::I8 { 127.0 } else { 448.0 };
        let mut scales =
            || -> Vec<f16> { (0..rows * sizes.groups()).map(|_| f16::from_f32(rng.range(0.5, 1.5) / limit)).collect() };
        let scales = [scales(), scales()];
        Self { sizes, elements, scales, pages, table, per_sequence }
    }

    /// Row of the page matrices.
    pub fn row(&self, slot: usize, head: usize, position: usize) -> usize {
        let page = self.table[slot * self.per_sequence + position / PAGE_TOKENS] as usize;
        (page * self.sizes.heads + head) * PAGE_TOKENS + position % PAGE_TOKENS
    }

    pub fn layer<B: Backend>(&self, side: &mut Side<B>) -> KvLayer<B> {
        let Sizes { dtype, d, heads, .. } = self.sizes;
        let rows = self.pages * heads * PAGE_TOKENS;
        let [keys, values] = [0, 1].map(|i| {
            let bytes = side.plain(DType::U8, rows, d * dtype.size(), &self.elements[i]);
            View::new(bytes.buffer().clone(), dtype, bytes.offset(), rows, d).unwrap()
        });
        let groups = self.sizes.groups();
        let scales = (groups > 0).then(|| {
            let [keys, values] = [0, 1].map(|i| side.plain(DType::F16, rows, groups, &self.scales[i]));
            KvScales { keys, values }
        });
        let pages = side.plain(DType::I32, SLOTS, self.per_sequence, &self.table);
        KvLayer { keys, values, scales, pages, heads }
    }

    /// Makes everything that no segment sees NaN.
    fn poison(&mut self, segments: &[Segment], first_key: usize) {
        let mut seen = vec![false; self.pages * self.sizes.heads * PAGE_TOKENS];
        for s in segments {
            for p in first_key..(s.start + s.len) as usize {
                for h in 0..self.sizes.heads {
                    seen[self.row(s.slot as usize, h, p)] = true;
                }
            }
        }
        for (row, _) in seen.iter().enumerate().filter(|(_, seen)| !**seen) {
            self.spoil(row);
        }
    }

    fn spoil(&mut self, row: usize) {
        let (width, groups) = (self.sizes.d * self.sizes.dtype.size(), self.sizes.groups());
        for i in 0..2 {
            self.elements[i][row * width..][..width].fill(0xff);
            self.scales[i][row * groups..][..groups].fill(f16::NAN);
        }
    }
}

/// One call.
struct Case {
    content: Content,
    segments: Vec<Segment>,
    rows: usize,
    profile: Profile,
    first_key: u32,
    query: Vec<f32>,
    gate: Vec<f32>,
}

fn at(slot: u32, start: u32, row: u32, len: u32) -> Segment {
    Segment { slot, start, row, len, ..Segment::default() }
}

impl Case {
    fn new(sizes: Sizes, profile: Profile, rows: usize, segments: &[Segment], first_key: u32) -> Self {
        let mut rng = Rng::new((sizes.d * 1000 + sizes.group * 100 + rows) as u64);
        let tokens = segments.iter().map(|s| (s.start + s.len) as usize).max().unwrap();
        let mut content = Content::random(sizes, tokens, &mut rng);
        content.poison(segments, first_key as usize);
        let columns = sizes.query_columns();
        let query = exact(rng.values(rows * columns, 1.5));
        let gate = exact(rng.values(rows * 2 * columns, 2.0));
        Self { content, segments: segments.to_vec(), rows, profile, first_key, query, gate }
    }

    fn what(&self) -> String {
        format!("{:?}, {:?} of {:?}", self.content.sizes, self.profile, self.segments)
    }

    fn op<B: Backend>(&self, side: &mut Side<B>, segments: &[Segment]) -> Attend<B> {
        let columns = self.content.sizes.query_columns();
        Attend {
            batch: side.batch(self.profile, self.rows, segments),
            query: side.acts(self.rows, columns, &self.query),
            query_gate: side.acts(self.rows, 2 * columns, &self.gate),
            kv: self.content.layer(side),
            first_key: self.first_key,
            output: side.result(self.rows, columns),
        }
    }

    fn run<B: AttentionOps>(&self, side: &mut Side<B>, segments: &[Segment]) -> Vec<f32> {
        let op = self.op(side, segments);
        let output = op.output.clone();
        side.run(|r| r.attend(op));
        let values = side.values(&output);
        side.check_guards();
        values
    }

    /// Results of the rows of a segment.
    fn of<'a>(&self, values: &'a [f32], s: &Segment) -> &'a [f32] {
        let columns = self.content.sizes.query_columns();
        // A segment without rows may name any row.
        let first = if s.len == 0 { 0 } else { s.row as usize };
        &values[first * columns..][..s.len as usize * columns]
    }

    fn check(&self) -> Vec<f32> {
        let Some(gpu) = gpu() else { return Vec::new() };
        let expected = self.run(&mut Side::cpu(), &self.segments);
        let got = self.run(&mut Side::new(gpu), &self.segments);
        for s in &self.segments {
            near(&self.what(), self.of(&got, s), self.of(&expected, s), tolerance(self.content.sizes.dtype));
        }
        got
    }

    /// Every row by itself gives the bits that it has in the whole call.
    fn check_rows(&self, whole: &[f32], rows: impl Iterator<Item = u32>) {
        let Some(gpu) = gpu() else { return };
        for row in rows {
            let s = self.segments.iter().find(|s| (s.row..s.row + s.len).contains(&row)).unwrap();
            let one = at(s.slot, s.start + row - s.row, row, 1);
            let got = self.run(&mut Side::new(gpu.clone()), &[one]);
            same(&format!("row {row} alone, {}", self.what()), self.of(&got, &one), self.of(whole, &one));
        }
    }
}

#[test]
fn every_grouping_head_size_and_format_is_the_cpu_operation() {
    if gpu().is_none() {
        return;
    }
    for dtype in FORMATS {
        for (group, heads) in [(1, 1), (2, 1), (4, 2), (6, 1), (8, 1), (3, 2), (16, 1), (20, 1)] {
            for d in [64, 128, 256, 16, 32, 40, 7] {
                let sizes = Sizes { dtype, d, group, heads };
                for (start, len, first_key) in [(0, 1, 0), (300, 3, 1), (255, 5, 0)] {
                    Case::new(sizes, Profile::Step, 5, &[at(1, start, 0, len)], first_key).check();
                }
                Case::new(sizes, Profile::Prefill, 70, &[at(2, 61, 0, 70)], 1).check();
            }
        }
    }
}

#[test]
fn every_number_of_rows_is_right_and_independent_of_the_others() {
    if gpu().is_none() {
        return;
    }
    for dtype in FORMATS {
        for (d, group) in [(64, 4), (256, 8), (32, 2)] {
            let sizes = Sizes { dtype, d, group, heads: 1 };
            for rows in (1..=17).chain([31, 32, 33, 63, 64, 65, 127, 128]) {
                let case = Case::new(sizes, Profile::Step, rows, &[at(0, 250, 0, rows as u32)], 0);
                let got = case.check();
                let last = rows as u32 - 1;
                case.check_rows(&got, [0, last / 2, last].into_iter());
            }
            for rows in [1, 16, 63, 64, 65, 129, 1000] {
                let case = Case::new(sizes, Profile::Prefill, rows, &[at(0, 0, 0, rows as u32)], 0);
                let got = case.check();
                case.check_rows(&got, [0, rows as u32 - 1].into_iter());
            }
        }
    }
}

#[test]
fn the_last_position_of_a_long_context() {
    if gpu().is_none() {
        return;
    }
    for dtype in FORMATS {
        for (d, start, first_key) in
            [(64, 9000, 0), (256, 4096, 1), (256, 8191, 0), (256, 262_143, 0), (256, 262_140, 1), (40, 9000, 1)]
        {
            let sizes = Sizes { dtype, d, group: 2, heads: 1 };
            let case = Case::new(sizes, Profile::Step, 2, &[at(1, start, 1, 1)], first_key);
            case.check();
        }
    }
}

#[test]
fn segments_see_their_own_sequence() {
    if gpu().is_none() {
        return;
    }
    let segments = [at(2, 470, 3, 4), at(0, 0, 0, 2), at(1, 128, 9, 1), at(1, 7, 200, 0), at(0, 700, 10, 2)];
    for dtype in FORMATS {
        for (d, group) in [(64, 4), (256, 6), (256, 8), (24, 2)] {
            for profile in [Profile::Step, Profile::Prefill] {
                let sizes = Sizes { dtype, d, group, heads: 2 };
                let case = Case::new(sizes, profile, 14, &segments, 0);
                let got = case.check();
                case.check_rows(&got, [0, 1, 3, 6, 9, 11].into_iter());
            }
        }
    }
}

#[test]
fn a_prompt_may_be_cut_at_multiples_of_64() {
    let Some(gpu) = gpu() else { return };
    for dtype in FORMATS {
        for (d, group) in [(64, 2), (256, 1), (256, 6), (20, 2)] {
            let sizes = Sizes { dtype, d, group, heads: 1 };
            let case = Case::new(sizes, Profile::Prefill, 333, &[at(0, 0, 0, 333)], 0);
            let whole = case.check();
            for (from, to) in [(0, 64), (64, 128), (128, 320), (320, 333)] {
                let part = at(0, from, from, to - from);
                let got = case.run(&mut Side::new(gpu.clone()), &[part]);
                same(&format!("{from}..{to} of {}", case.what()), case.of(&got, &part), case.of(&whole, &part));
            }
        }
    }
}

/// Partial results of a prompt's leaves are merged in one order, whether a block merges them or several blocks share them.
#[test]
fn leaves_of_a_prompt_are_merged_in_order() {
    let Some(gpu) = gpu() else { return };
    for dtype in FORMATS {
        // Across positions 8,192 and, from key 5,000 on, 8,192 alone.
        for first_key in [0, 5000] {
            let sizes = Sizes { dtype, d: 256, group: 2, heads: 1 };
            let case = Case::new(sizes, Profile::Prefill, 70, &[at(0, 8150, 0, 70)], first_key);
            let got = case.check();
            case.check_rows(&got, [0, 41, 42, 69].into_iter());
        }
        // Tiles enough for the whole device, then few.
        let sizes = Sizes { dtype, d: 256, group: 6, heads: 4 };
        let case = Case::new(sizes, Profile::Prefill, 640, &[at(1, 3968, 0, 640)], 0);
        let whole = case.run(&mut Side::new(gpu.clone()), &case.segments);
        for from in (0..640).step_by(64) {
            let part = at(1, 3968 + from, from, 64);
            let got = case.run(&mut Side::new(gpu.clone()), &[part]);
            same(&format!("{from}.. of {}", case.what()), case.of(&got, &part), case.of(&whole, &part));
        }
        case.check_rows(&whole, [0, 128, 639].into_iter());
    }
}

/// A value that is no number reaches the rows that see it, and no other.
#[test]
fn rows_do_not_see_what_is_behind_them() {
    let Some(gpu) = gpu() else { return };
    for dtype in FORMATS {
        for (d, group) in [(64, 2), (256, 8), (48, 1)] {
            for profile in [Profile::Step, Profile::Prefill] {
                let sizes = Sizes { dtype, d, group, heads: 1 };
                let mut case = Case::new(sizes, profile, 8, &[at(0, 97, 0, 8)], 0);
                let good = case.run(&mut Side::new(gpu.clone()), &case.segments);
                let row = case.content.row(0, 0, 100);
                case.content.spoil(row);
                let got = case.run(&mut Side::new(gpu.clone()), &case.segments);
                let border = 3 * sizes.query_columns();
                same(&case.what(), &got[..border], &good[..border]);
                assert!(got[border..].iter().all(|x| x.is_nan()), "{}", case.what());
                // So does a query.
                let mut case = Case::new(sizes, profile, 8, &[at(0, 97, 0, 8)], 0);
                case.query[2 * sizes.query_columns()] = f32::NAN;
                let got = case.run(&mut Side::new(gpu.clone()), &case.segments);
                let columns = sizes.query_columns();
                same(&case.what(), &got[..2 * columns], &good[..2 * columns]);
                same(&case.what(), &got[3 * columns..], &good[3 * columns..]);
                assert!(got[2 * columns..2 * columns + d].iter().all(|x| x.is_nan()));
            }
        }
    }
}

/// A recorded step follows the segment table.
#[test]
fn a_recorded_step_reads_segments_when_it_runs() {
    let Some(gpu) = gpu() else { return };
    for dtype in FORMATS {
        for d in [64, 256, 32] {
            let sizes = Sizes { dtype, d, group: 8, heads: 2 };
            let segments = [at(0, 500, 0, 2), at(1, 10, 2, 1)];
            let case = Case::new(sizes, Profile::Step, 4, &segments, 0);
            let mut side = Side::new(gpu.clone());
            let op = case.op(&mut side, &segments);
            let (output, table) = (op.output.clone(), op.batch.table.clone());
            let step = side.replay(|r| r.attend(op));
            let expected = case.run(&mut Side::new(gpu.clone()), &segments);
            let got = side.values(&output);
            segments.iter().for_each(|s| same(&case.what(), case.of(&got, s), case.of(&expected, s)));
            for other in [[at(0, 17, 0, 1), at(0, 499, 1, 3)], [at(1, 0, 0, 0), at(0, 63, 0, 4)]] {
                let words: Vec<i32> = other.iter().flat_map(|s| s.to_words()).collect();
                side.backend.upload(&mut side.queue, &table, bytemuck::cast_slice(&words)).unwrap();
                side.backend.replay(&mut side.queue, &step).unwrap();
                let got = side.values(&output);
                let expected = case.run(&mut Side::new(gpu.clone()), &other);
                other.iter().for_each(|s| same(&case.what(), case.of(&got, s), case.of(&expected, s)));
            }
            side.check_guards();
        }
    }
}

/// What a call reports when its results are fetched.
pub fn failure<B: AttentionOps>(
    side: &mut Side<B>,
    output: &View<B>,
    work: impl FnOnce(&mut Recorder<'_, B>) -> Result<()>,
) -> Option<Error> {
    let ran = side.backend.run(&mut side.queue, work);
    let mut bytes = vec![0; output.span_bytes()];
    ran.and_then(|()| side.backend.download(&mut side.queue, output, &mut bytes)).err()
}

#[test]
fn positions_without_a_page_are_reported() {
    let Some(gpu) = gpu() else { return };
    for d in [64, 32] {
        for profile in [Profile::Step, Profile::Prefill] {
            let sizes = Sizes { dtype: DType::I8, d, group: 4, heads: 2 };
            let mut case = Case::new(sizes, profile, 2, &[at(0, 300, 0, 2)], 0);
            let limit = case.content.per_sequence * PAGE_TOKENS;
            let mut side = Side::new(gpu.clone());
            for segment in [at(0, 3000, 0, 2), at(3, 0, 0, 1)] {
                let op = case.op(&mut side, &[segment]);
                let output = op.output.clone();
                let error = failure(&mut side, &output, |r| r.attend(op));
                assert!(matches!(error, Some(Error::ContextOverflow { limit: l, .. }) if l == limit), "{error:?}");
            }
            case.content.table[2] = -1;
            let op = case.op(&mut side, &case.segments);
            let output = op.output.clone();
            let error = failure(&mut side, &output, |r| r.attend(op));
            assert!(matches!(error, Some(Error::ContextOverflow { requested: 192, .. })), "{error:?}");
            // The queue goes on.
            case.content.table[2] = case.content.table[1];
            let op = case.op(&mut side, &case.segments);
            let output = op.output.clone();
            assert_eq!(failure(&mut side, &output, |r| r.attend(op)), None);
            side.check_guards();
        }
    }
}
