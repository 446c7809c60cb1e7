//! Head norms, rotation and the append to pages of every format.

use half::{bf16, f16};
use ninfer_core::ops::{AttentionOps, KvLayer, KvScales, RopeAppend, RopeTable};
use ninfer_core::segment::{PAGE_TOKENS, Profile, Segment};
use ninfer_core::{Backend, DType, Error, View};
use ninfer_quant::codes::decode_e4m3;

use super::attention::{FORMATS, Sizes, failure};
use super::lab::{NORM, Side, exact, gpu, near, same};
use super::rng::Rng;

const SLOTS: usize = 2;
/// Pages of the pool.
const PAGES: usize = 7;

struct Case {
    sizes: Sizes,
    rows: usize,
    segments: Vec<Segment>,
    shift: u32,
    half: usize,
    table: Vec<i32>,
    per_sequence: usize,
    query_gate: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    gains: Vec<f32>,
}

/// What a call leaves behind: queries, then bytes of keys, values and their scales.
struct Left {
    query: Vec<f32>,
    elements: [Vec<u8>; 2],
    scales: [Vec<f16>; 2],
}

impl Case {
    /// Only pages that are written have a number; the rest of the table is −1.
    fn new(sizes: Sizes, rows: usize, segments: &[Segment], shift: u32) -> Self {
        let mut rng = Rng::new((sizes.d * 10_000 + rows) as u64 + u64::from(segments[0].start));
        let last = |s: &Segment| (s.start + s.len - 1) as usize / PAGE_TOKENS;
        let per_sequence = segments.iter().map(last).max().unwrap() + 2;
        let (order, mut used) = (rng.permutation(PAGES), 0);
        let mut table = vec![-1; SLOTS * per_sequence];
        for s in segments {
            for page in s.start as usize / PAGE_TOKENS..=last(s) {
                let entry = &mut table[s.slot as usize * per_sequence + page];
                if *entry < 0 {
                    *entry = order[used] as i32;
                    used += 1;
                }
            }
        }
        let mut values = |columns, size| exact(rng.values(rows * columns, size));
        let query_gate = values(2 * sizes.query_columns(), 1.0);
        let (key, value) = (values(sizes.heads * sizes.d, 1.0), values(sizes.heads * sizes.d, 3.0));
        let gains = rng.values(2 * sizes.d, 0.3);
        let (half, segments) = (sizes.d / 8, segments.to_vec());
        Self { sizes, rows, segments, shift, half, table, per_sequence, query_gate, key, value, gains }
    }

    fn op<B: Backend>(&self, side: &mut Side<B>) -> RopeAppend<B> {
        let Sizes { dtype, d, heads, .. } = self.sizes;
        let place = PAGES * heads * PAGE_TOKENS;
        let frequencies: Vec<f32> =
            (0..self.half).map(|f| 1e7f64.powf(-(f as f64) / self.half as f64) as f32).collect();
        let [keys, values] = [(); 2].map(|()| side.poisoned(dtype, place, d));
        let groups = self.sizes.groups();
        let scales = (groups > 0).then(|| {
            let [keys, values] = [(); 2].map(|()| side.poisoned(DType::F16, place, groups));
            KvScales { keys, values }
        });
        RopeAppend {
            batch: side.batch(Profile::Prefill, self.rows, &self.segments),
            query_gate: side.acts(self.rows, 2 * self.sizes.query_columns(), &self.query_gate),
            key: side.acts(self.rows, heads * d, &self.key),
            value: side.acts(self.rows, heads * d, &self.value),
            gains: side.floats(2, d, &self.gains),
            eps: 1e-6,
            rope: RopeTable {
                frequencies: side.floats(1, self.half, &frequencies),
                magnitude: 1.25,
                shift: self.shift,
            },
            query: side.result(self.rows, self.sizes.query_columns()),
            kv: KvLayer {
                keys,
                values,
                scales,
                pages: side.plain(DType::I32, SLOTS, self.per_sequence, &self.table),
                heads,
            },
        }
    }

    fn run<B: AttentionOps>(&self, side: &mut Side<B>, replay: bool) -> Left {
        let op = self.op(side);
        let (query, kv) = (op.query.clone(), op.kv.clone());
        if replay {
            side.replay(|r| r.rope_append(op));
        } else {
            side.run(|r| r.rope_append(op));
        }
        let scales = match &kv.scales {
            Some(scales) => [side.read(&scales.keys), side.read(&scales.values)],
            None => [Vec::new(), Vec::new()],
        };
        let left =
            Left { query: side.values(&query), elements: [side.bytes(&kv.keys), side.bytes(&kv.values)], scales };
        side.check_guards();
        left
    }

    /// What the bytes of keys or values mean.
    fn meaning(&self, left: &Left, i: usize) -> Vec<f32> {
        let (d, groups) = (self.sizes.d, self.sizes.groups());
        let group = if self.sizes.dtype == DType::I8 { 64 } else { d };
        let scale = |at: usize| left.scales[i][at / d * groups + at % d / group].to_f32();
        let bytes = &left.elements[i];
        match self.sizes.dtype {
            DType::Bf16 => bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            DType::I8 => bytes.iter().enumerate().map(|(at, &c)| f32::from(c.cast_signed()) * scale(at)).collect(),
            _ => bytes.iter().enumerate().map(|(at, &c)| decode_e4m3(c) * scale(at)).collect(),
        }
    }

    fn check(&self, replay: bool) {
        let Some(gpu) = gpu() else { return };
        let what = format!("{:?}, {:?}", self.sizes, self.segments);
        let expected = self.run(&mut Side::cpu(), false);
        let got = self.run(&mut Side::new(gpu), replay);
        let columns = self.sizes.query_columns();
        for s in &self.segments {
            let rows = s.row as usize * columns..(s.row + s.len) as usize * columns;
            near(&what, &got.query[rows.clone()], &expected.query[rows], NORM);
        }
        // Values are not computed with, so codes and scales are the same bits, in every row of every page.
        same(&what, &got.elements[1], &expected.elements[1]);
        same(
            &what,
            &got.scales[1].iter().map(|s| s.to_bits()).collect::<Vec<_>>(),
            &expected.scales[1].iter().map(|s| s.to_bits()).collect::<Vec<_>>(),
        );
        // Keys differ in the last bit of f32 before they are rounded, which may move a few of them by one step.
        let (keys, reference) = (self.meaning(&got, 0), self.meaning(&expected, 0));
        let (d, mut moved) = (self.sizes.d, 0);
        for (row, (keys, reference)) in keys.chunks(d).zip(reference.chunks(d)).enumerate() {
            let most = reference.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            for (k, r) in keys.iter().zip(reference) {
                let step = match self.sizes.dtype {
                    DType::Bf16 => (r.abs() / 120.0).max(most / 100_000.0),
                    DType::I8 => most / 100.0,
                    _ => (r.abs() / 7.5).max(most / 100_000.0),
                };
                assert!((k.is_nan() && r.is_nan()) || (k - r).abs() <= step, "{what}, row {row}: {k} instead of {r}");
                moved += usize::from(k.to_bits() != r.to_bits() && (k - r).abs() > 2e-3 * r.abs());
            }
        }
        let written = self.segments.iter().map(|s| s.len as usize).sum::<usize>() * self.sizes.heads * d;
        assert!(moved <= 4 + written / 50, "{what}: {moved} of {written} keys differ");
    }
}

fn at(slot: u32, start: u32, row: u32, len: u32) -> Segment {
    Segment { slot, start, row, len, ..Segment::default() }
}

#[test]
fn every_head_size_and_format_is_the_cpu_operation() {
    if gpu().is_none() {
        return;
    }
    for dtype in FORMATS {
        for (group, heads) in [(1, 1), (4, 2), (6, 1), (8, 2)] {
            for d in [64, 128, 256, 16, 72, 200] {
                let sizes = Sizes { dtype, d, group, heads };
                Case::new(sizes, 8, &[at(1, 62, 1, 3), at(0, 0, 5, 2)], 0).check(d == 64);
                Case::new(sizes, 1, &[at(1, 0, 0, 1)], 1).check(false);
            }
        }
    }
}

/// Angles of up to 262,143 radians.
#[test]
fn every_position_rotates() {
    if gpu().is_none() {
        return;
    }
    for dtype in FORMATS {
        for start in [1, 63, 64, 1000, 4095, 8191, 65_535, 131_072, 262_140] {
            for shift in [0, 1] {
                Case::new(Sizes { dtype, d: 256, group: 2, heads: 1 }, 6, &[at(0, start, 2, 4)], shift).check(false);
            }
        }
    }
}

#[test]
fn many_rows_at_once() {
    if gpu().is_none() {
        return;
    }
    for dtype in FORMATS {
        for rows in [17, 65, 300] {
            let sizes = Sizes { dtype, d: 128, group: 3, heads: 2 };
            Case::new(sizes, rows + 2, &[at(1, 30, 1, rows as u32)], 0).check(rows == 65);
        }
    }
}

/// Zeros, tiny and huge values, and what is no number.
#[test]
fn values_of_all_sizes_are_encoded_alike() {
    let Some(gpu) = gpu() else { return };
    for dtype in FORMATS {
        let sizes = Sizes { dtype, d: 128, group: 1, heads: 1 };
        let mut case = Case::new(sizes, 8, &[at(0, 60, 0, 8)], 0);
        for (row, factor) in [0.0, 1e-30, 1e-6, 1e5, 1e30, f32::INFINITY, f32::NAN, 1.0].into_iter().enumerate() {
            case.value[row * 128..][..128].iter_mut().for_each(|x| *x *= factor);
        }
        case.value = exact(case.value);
        let expected = case.run(&mut Side::cpu(), false);
        let got = case.run(&mut Side::new(gpu.clone()), false);
        let bits = |left: &Left| {
            let meaning = case.meaning(left, 1);
            meaning.into_iter().map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }).collect::<Vec<_>>()
        };
        same(&format!("{dtype}"), &bits(&got), &bits(&expected));
    }
}

#[test]
fn positions_without_a_page_are_reported() {
    let Some(gpu) = gpu() else { return };
    let mut case = Case::new(Sizes { dtype: DType::I8, d: 64, group: 2, heads: 1 }, 3, &[at(0, 126, 0, 3)], 0);
    case.table[2] = PAGES as i32;
    let mut side = Side::new(gpu);
    let op = case.op(&mut side);
    let output: View<_> = op.query.clone();
    let error = failure(&mut side, &output, |r| r.rope_append(op));
    let limit = case.per_sequence * PAGE_TOKENS;
    assert_eq!(error, Some(Error::ContextOverflow { requested: 192, limit }));
    side.check_guards();
}
