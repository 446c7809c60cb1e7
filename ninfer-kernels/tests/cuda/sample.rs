//! Heads, counts, acceptance: the greedy choice and all integers exactly as the CPU has them.

use ninfer_core::ops::{Accept, Choose, Count, Head, HeadArgmax, SampleOps};
use ninfer_core::sampling::{ChooseScratch, PARAM_WORDS, SamplingParams, choose};
use ninfer_core::segment::{Batch, Profile, Segment};
use ninfer_core::{Backend, DType, Error, View};
use ninfer_kernels::cpu::Cpu;
use ninfer_kernels::cuda::Cuda;

use super::lab::{PRODUCT, Side, exact, gpu, near, same};
use super::rng::Rng;
use super::stored::{FORMATS, Stored};

const NONE: u32 = u32::MAX;

/// Logits, and the greedy choice below `limit`.
fn head<B: SampleOps>(
    side: &mut Side<B>,
    head: &Stored,
    x: &[f32],
    rows: usize,
    profile: Profile,
    limit: usize,
) -> (Vec<f32>, Vec<u32>) {
    let packed = head.packed();
    let (vocab, h) = (packed.rows(), packed.cols());
    let head = side.backend.prepare(&[packed]).unwrap();
    let input = side.acts(rows, h, x);
    let (logits, output) = (side.poisoned(DType::F32, rows, vocab), side.poisoned(DType::U32, rows, 1));
    let batch = side.one(profile, rows, 0);
    side.run(|r| {
        r.head(Head { batch: batch.clone(), input: input.clone(), head: head.clone(), logits: logits.clone() })?;
        r.head_argmax(HeadArgmax { batch, input, head, limit, output: output.clone() })
    });
    let results = (side.read(&logits), side.read(&output));
    side.check_guards();
    results
}

fn greedy(row: &[f32], limit: usize) -> u32 {
    choose(row, limit, &SamplingParams::greedy(), &|_| 0, 0, &mut ChooseScratch::new()).unwrap_or(NONE)
}

#[test]
fn logits_are_those_of_the_cpu_and_the_choice_is_their_best() {
    let Some(gpu) = gpu() else { return };
    for (i, format) in FORMATS.into_iter().enumerate() {
        for (vocab, h, limit) in [(300, 64, 300), (131, 48, 120), (5000, 272, 4999)] {
            let rows = [1, 5, 17, 33, 127, 128][(i + vocab) % 6];
            let mut rng = Rng::new((i * vocab) as u64);
            let stored = Stored::random(format.0, format.1, vocab, h, 0.1, &mut rng);
            let x = exact(rng.values(rows * h, 1.0));
            let profile = if rows > 128 { Profile::Prefill } else { Profile::Step };
            let what = format!("{} [{vocab}, {h}], {rows} rows", format.0);
            let (expected, _) = head(&mut Side::cpu(), &stored, &x, rows, profile, limit);
            let (logits, ids) = head(&mut Side::new(gpu.clone()), &stored, &x, rows, profile, limit);
            near(&what, &logits, &expected, PRODUCT);
            let best: Vec<u32> = logits.chunks(vocab).map(|row| greedy(row, limit)).collect();
            same(&what, &ids, &best);
        }
    }
}

#[test]
fn a_head_never_sees_other_rows() {
    let Some(gpu) = gpu() else { return };
    let (vocab, h) = (4500, 256);
    let mut rng = Rng::new(11);
    let stored = Stored::random(FORMATS[0].0, false, vocab, h, 0.1, &mut rng);
    let x = exact(rng.values(1000 * h, 1.0));
    let run = |rows: std::ops::Range<usize>, profile| {
        let x = &x[rows.start * h..rows.end * h];
        head(&mut Side::new(gpu.clone()), &stored, x, rows.len(), profile, vocab)
    };
    let (all, ids) = run(0..128, Profile::Step);
    for rows in (1..=17).chain([31, 32, 33, 63, 64, 65, 127, 128]) {
        let (logits, chosen) = run(0..rows, Profile::Step);
        same("logits", &logits, &all[..rows * vocab]);
        same("ids", &chosen, &ids[..rows]);
    }
    // Heads of a prompt have bits of their own.
    let (all, ids) = run(0..1000, Profile::Prefill);
    for first in [64, 640, 936] {
        let (logits, chosen) = run(first..first + 64, Profile::Prefill);
        same("logits of a part", &logits, &all[first * vocab..(first + 64) * vocab]);
        same("ids of a part", &chosen, &ids[first..first + 64]);
    }
}

/// Chooses greedily in both ways from rows of logits that the head gives exactly.
#[test]
fn greedy_corners() {
    let Some(gpu) = gpu() else { return };
    const INF: f32 = f32::INFINITY;
    const NAN: f32 = f32::NAN;
    let rows: [&[f32]; 11] = [
        &[1.0, 3.0, 3.0, 2.0, 9.0],
        &[-5.0, -5.0, -5.0, -5.0, 9.0],
        &[-0.0, 0.0, 0.0, -0.0, 9.0],
        &[0.0, NAN, 1.0, 2.0, 9.0],
        &[0.0, 1.0, 2.0, 1.0, NAN],
        &[-INF, -INF, -INF, -INF, 9.0],
        &[INF, INF, INF, INF, 9.0],
        &[NAN, NAN, NAN, NAN, 9.0],
        &[-INF, -3.0, -INF, -INF, 9.0],
        &[1.0, INF, 2.0, INF, 9.0],
        &[-2.0, -INF, -2.0, -INF, INF],
    ];
    let expected = [1, 0, 0, NONE, 2, NONE, NONE, NONE, 1, 1, 0];
    let logits: Vec<f32> = rows.concat();
    let mut side = Side::new(gpu.clone());
    let batch = side.one(Profile::Step, 11, 3);
    let op = Choose {
        batch,
        logits: side.floats(11, 5, &logits),
        ids: side.plain(DType::U32, 11, 1, &[0u32; 11]),
        params: side.plain(DType::U32, 1, PARAM_WORDS, &SamplingParams::greedy().to_words()),
        counts: side.plain(DType::U32, 1, 5, &[0u32; 5]),
        limit: 4,
        output: side.poisoned(DType::U32, 11, 1),
    };
    let output = op.output.clone();
    side.run(|r| r.choose(op));
    same("choose", &side.read::<u32>(&output), &expected);
    for (row, expected) in rows.iter().zip(expected) {
        // One input of 1 gives the column of the head itself; the others are multiplied by 0, so NaN and infinity stay.
        let stored = Stored::plain(5, 1, row);
        let (_, ids) = head(&mut Side::new(gpu.clone()), &stored, &[1.0], 1, Profile::Step, 4);
        assert_eq!(ids, [expected], "{row:?}");
    }
}

/// The matrices of counting.
struct Counting<B: Backend> {
    side: Side<B>,
    previous: View<B>,
    counts: View<B>,
}

impl<B: SampleOps> Counting<B> {
    fn new(mut side: Side<B>, slots: usize, width: usize, counts: &[u32]) -> Self {
        let previous = side.plain(DType::U32, slots, width, &vec![3u32; slots * width]);
        let counts = side.plain(DType::U32, slots, counts.len() / slots, counts);
        Self { side, previous, counts }
    }

    fn run(&mut self, profile: Profile, rows: usize, segments: &[Segment], ids: &[u32]) -> (Vec<u32>, Vec<u32>) {
        let batch = self.side.batch(profile, rows, segments);
        let ids = self.side.plain(DType::U32, rows, 1, ids);
        let op = Count { batch, ids, previous: self.previous.clone(), counts: self.counts.clone() };
        self.side.run(|r| r.count(op));
        let state = (self.side.read(&self.previous), self.side.read(&self.counts));
        self.side.check_guards();
        state
    }
}

#[test]
fn counts_are_those_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for (seed, vocab) in [10, 300, 8192, 8193, 40_000].into_iter().enumerate() {
        let (slots, width) = (5, 16);
        let mut rng = Rng::new(seed as u64);
        let start: Vec<u32> = (0..slots * vocab).map(|_| rng.bits() as u32 >> rng.below(32)).collect();
        let mut cpu = Counting::new(Side::cpu(), slots, width, &start);
        let mut device = Counting::new(Side::new(gpu.clone()), slots, width, &start);
        for round in 0..60 {
            let profile = if rng.below(3) == 0 { Profile::Prefill } else { Profile::Step };
            let longest = if profile == Profile::Prefill { 600 } else { width + 1 };
            let mut rows = rng.below(2);
            let mut segments = Vec::new();
            for slot in rng.permutation(slots) {
                let fold = if profile == Profile::Step { rng.below(width + 1) as u32 } else { 0 };
                // A third of the sequences begins here.
                let start = fold + if rng.below(3) == 0 { 0 } else { rng.below(1000) as u32 };
                let len = rng.below(longest) as u32;
                let segment = Segment { slot: slot as u32, start, row: rows as u32, len, fold, bank: 1 };
                segments.push(segment);
                rows += len as usize + rng.below(2);
            }
            rows = rows.max(1);
            // Few different ones, so that they repeat; some outside.
            let some = [3, vocab, vocab + 2][round % 3];
            let ids: Vec<u32> =
                (0..rows).map(|_| if rng.below(20) == 0 { NONE } else { rng.below(some) as u32 }).collect();
            let expected = cpu.run(profile, rows, &segments, &ids);
            let got = device.run(profile, rows, &segments, &ids);
            same(&format!("previous, round {round} of {vocab}"), &got.0, &expected.0);
            same(&format!("counts, round {round} of {vocab}"), &got.1, &expected.1);
        }
    }
}

/// Result, realign, last and chain of an acceptance.
type Accepted = (Vec<u32>, Vec<i32>, Vec<i32>, Vec<i32>);

struct Drafts {
    rows: usize,
    segments: Vec<Segment>,
    ids: Vec<u32>,
    chosen: Vec<u32>,
    width: usize,
    links: usize,
}

impl Drafts {
    fn random(rng: &mut Rng) -> Self {
        let most = if rng.below(3) == 0 { 60 } else { 6 };
        let width = 1 + rng.below(most);
        let mut rows = 0;
        let mut segments = Vec::new();
        for slot in 0..1 + rng.below(6) as u32 {
            // A step has at most 128 rows.
            let len = rng.below((width + 1).min(128 - rows).max(1)) as u32;
            let start = if rng.below(20) == 0 { i32::MAX as u32 - 2 } else { rng.below(1000) as u32 };
            segments.push(Segment { slot, start, row: rows as u32, len, fold: start.min(2), bank: slot % 2 });
            rows = (rows + len as usize + rng.below(2)).min(128);
        }
        let rows = rows.max(1);
        let chosen: Vec<u32> = (0..rows).map(|_| rng.below(3) as u32).collect();
        // Most drafts are right.
        let ids =
            (0..rows).map(|i| if i > 0 && rng.below(10) > 0 { chosen[i - 1] } else { rng.below(3) as u32 }).collect();
        Self { rows, segments, ids, chosen, width, links: rng.below(4) }
    }

    fn call<B: SampleOps>(&self, side: &mut Side<B>) -> Accept<B> {
        let n = self.segments.len();
        Accept {
            batch: side.batch(Profile::Step, self.rows, &self.segments),
            ids: side.plain(DType::U32, self.rows, 1, &self.ids),
            chosen: side.plain(DType::U32, self.rows, 1, &self.chosen),
            result: side.poisoned(DType::U32, n, self.width + 1),
            realign: side.poisoned(DType::I32, n, 8),
            last: side.poisoned(DType::I32, n, 1),
            chain: side.poisoned(DType::I32, n * self.links, 8),
        }
    }

    fn run<B: SampleOps>(&self, side: &mut Side<B>, recorded: bool) -> Accepted {
        let op = self.call(side);
        let views = op.clone();
        if recorded {
            let _step = side.replay(|r| r.accept(op));
        } else {
            side.run(|r| r.accept(op));
        }
        let results =
            (side.read(&views.result), side.read(&views.realign), side.read(&views.last), side.read(&views.chain));
        side.check_guards();
        results
    }
}

#[test]
fn acceptance_is_that_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for seed in 0..120 {
        let drafts = Drafts::random(&mut Rng::new(seed));
        let expected = drafts.run(&mut Side::cpu(), false);
        for recorded in [false, true] {
            let got = drafts.run(&mut Side::new(gpu.clone()), recorded);
            let what = format!("seed {seed}");
            same(&what, &got.0, &expected.0);
            same(&what, &got.1, &expected.1);
            same(&what, &got.2, &expected.2);
            same(&what, &got.3, &expected.3);
        }
    }
}

/// Runs an operation on both backends; both must refuse it, the device when something is downloaded.
fn refused(what: &'static str, cpu: Result<(), Error>, mut side: Side<Cuda>, probe: &View<Cuda>) {
    let named = |error: &Error| matches!(error, Error::OutOfRange { what: found, .. } if *found == what);
    assert!(cpu.as_ref().is_err_and(named), "{cpu:?}");
    let mut bytes = vec![0; probe.rows() * probe.cols() * 4];
    let device = side.backend.download(&mut side.queue, probe, &mut bytes);
    assert!(device.as_ref().is_err_and(named), "{device:?} instead of {cpu:?}");
    side.check_guards();
}

fn count_op<B: SampleOps>(side: &mut Side<B>, batch: Batch<B>, rows: usize) -> Count<B> {
    Count {
        batch,
        ids: side.plain(DType::U32, rows, 1, &vec![1u32; rows]),
        previous: side.plain(DType::U32, 2, 3, &[0u32; 6]),
        counts: side.plain(DType::U32, 2, 9, &[0u32; 18]),
    }
}

#[test]
fn bad_segments_are_typed_errors() {
    let Some(gpu) = gpu() else { return };
    let of = |slot, len, fold| Segment { slot, start: 9, row: 0, len, fold, bank: 0 };
    for (what, segment) in [
        ("sequence slot", of(2, 2, 0)),
        ("columns of a round", of(0, 4, 0)),
        ("columns of a round", of(1, 1, 4)),
        ("rows of a segment", Segment { row: 3, ..of(1, 2, 0) }),
    ] {
        let run = |side: &mut Side<Cpu>| {
            let batch = side.batch(Profile::Step, 4, &[segment]);
            let op = count_op(side, batch, 4);
            side.backend.run(&mut side.queue, |r| r.count(op))
        };
        let cpu = run(&mut Side::cpu());
        let mut side = Side::new(gpu.clone());
        let batch = side.batch(Profile::Step, 4, &[segment]);
        let op = count_op(&mut side, batch, 4);
        let probe = op.counts.clone();
        side.run(|r| r.count(op));
        refused(what, cpu, side, &probe);
    }
}

#[test]
fn a_choice_or_acceptance_for_no_slot_or_too_many_columns_is_a_typed_error() {
    let Some(gpu) = gpu() else { return };
    fn choice<B: SampleOps>(side: &mut Side<B>, len: u32) -> Choose<B> {
        let segments = [Segment { slot: 7, len, ..Segment::default() }];
        Choose {
            batch: side.batch(Profile::Step, 1, &segments),
            logits: side.floats(1, 3, &[1.0; 3]),
            ids: side.plain(DType::U32, 1, 1, &[0u32]),
            params: side.plain(DType::U32, 2, PARAM_WORDS, &[0u32; 2 * PARAM_WORDS]),
            counts: side.plain(DType::U32, 2, 3, &[0u32; 6]),
            limit: 3,
            output: side.poisoned(DType::U32, 1, 1),
        }
    }
    for len in [1, 0] {
        let (mut cpu, mut side) = (Side::cpu(), Side::new(gpu.clone()));
        let op = choice(&mut cpu, len);
        let expected = cpu.backend.run(&mut cpu.queue, |r| r.choose(op));
        let op = choice(&mut side, len);
        let probe = op.output.clone();
        side.run(|r| r.choose(op));
        refused("sequence slot", expected, side, &probe);
    }
    let drafts = Drafts {
        rows: 4,
        segments: vec![Segment { len: 4, ..Segment::default() }],
        ids: vec![0; 4],
        chosen: vec![0; 4],
        width: 3,
        links: 1,
    };
    let (mut cpu, mut side) = (Side::cpu(), Side::new(gpu));
    let op = drafts.call(&mut cpu);
    let expected = cpu.backend.run(&mut cpu.queue, |r| r.accept(op));
    let op = drafts.call(&mut side);
    let probe = op.last.clone();
    side.run(|r| r.accept(op));
    refused("columns of a round", expected, side, &probe);
}
