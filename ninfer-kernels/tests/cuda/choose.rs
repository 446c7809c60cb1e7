//! Choice of tokens: every id is the one of the definition.

use ninfer_core::ops::{Choose, SampleOps};
use ninfer_core::sampling::{
    self, ChooseScratch, PARAM_WORDS, PROMPT_BIT, Purpose, SamplingParams, distribution, uniform,
};
use ninfer_core::segment::{Profile, Segment};
use ninfer_core::{Backend, DType, View};

use super::lab::{Side, gpu};
use super::rng::Rng;

const NONE: u32 = u32::MAX;
const SLOTS: usize = 4;
/// How far a uniform number may be from a boundary of the distribution for the neighbour to be right, too: the device's
/// `exp` may differ in the last place, and sums of up to 2^18 weights are added in another order.
const BOUNDARY: f64 = 1e-12;

/// The data of one call.
#[derive(Clone)]
struct Case {
    profile: Profile,
    vocab: usize,
    limit: usize,
    rows: usize,
    segments: Vec<Segment>,
    params: Vec<SamplingParams>,
    counts: Vec<u32>,
    logits: Vec<f32>,
    ids: Vec<u32>,
}

/// The views of a call.
struct Call<B: Backend> {
    op: Choose<B>,
    table: View<B>,
}

impl Case {
    /// Sequences of up to `longest` rows with padding between them, in `SLOTS` slots.
    fn random(profile: Profile, vocab: usize, longest: usize, rng: &mut Rng) -> Self {
        let limit = if rng.below(3) == 0 { 1 + rng.below(vocab) } else { vocab };
        let params = (0..SLOTS).map(|_| random_params(limit, rng)).collect();
        let mut rows = rng.below(2);
        let mut segments = Vec::new();
        for slot in rng.permutation(SLOTS) {
            let len = rng.below(longest + 1) as u32;
            let start = rng.below(100_000) as u32;
            segments.push(Segment { slot: slot as u32, start, row: rows as u32, len, ..Segment::default() });
            rows += len as usize + rng.below(2);
        }
        let rows = rows.max(1);
        let mut counts = vec![0u32; SLOTS * vocab];
        for count in &mut counts {
            if rng.below(4) == 0 {
                *count = rng.below(4) as u32 | if rng.below(2) == 0 { PROMPT_BIT } else { 0 };
            }
        }
        counts[rng.below(SLOTS * vocab)] = u32::MAX;
        let logits = (0..rows).flat_map(|_| random_logits(vocab, rng)).collect();
        let ids = (0..rows).map(|_| rng.below(vocab.min(7)) as u32).collect();
        Self { profile, vocab, limit, rows, segments, params, counts, logits, ids }
    }

    fn words(&self) -> Vec<u32> {
        self.params.iter().flat_map(|p| p.to_words()).collect()
    }

    fn call<B: SampleOps>(&self, side: &mut Side<B>) -> Call<B> {
        let batch = side.batch(self.profile, self.rows, &self.segments);
        let table = batch.table.clone();
        let op = Choose {
            batch,
            logits: side.floats(self.rows, self.vocab, &self.logits),
            ids: side.plain(DType::U32, self.rows, 1, &self.ids),
            params: side.plain(DType::U32, SLOTS, PARAM_WORDS, &self.words()),
            counts: side.plain(DType::U32, SLOTS, self.vocab, &self.counts),
            limit: self.limit,
            output: side.poisoned(DType::U32, self.rows, 1),
        };
        Call { op, table }
    }

    fn run<B: SampleOps>(&self, side: &mut Side<B>) -> Vec<u32> {
        let call = self.call(side);
        let output = call.op.output.clone();
        side.run(|r| r.choose(call.op));
        let ids = side.read(&output);
        side.check_guards();
        ids
    }

    /// Compares with the definition, and gives the number of rows.
    #[track_caller]
    fn check(&self, what: &str, got: &[u32]) -> usize {
        let mut scratch = ChooseScratch::new();
        let mut checked = 0;
        for (s, i) in self.segments.iter().flat_map(|s| (0..s.len).map(move |i| (s, i))) {
            let t = (s.row + i) as usize;
            let seen = if self.profile == Profile::Step { &self.ids[s.row as usize..=t] } else { &[] };
            let counts = &self.counts[s.slot as usize * self.vocab..][..self.vocab];
            let count = |id: u32| counts[id as usize].saturating_add(seen.iter().filter(|x| **x == id).count() as u32);
            let row = &self.logits[t * self.vocab..][..self.vocab];
            let params = &self.params[s.slot as usize];
            let position = u64::from(s.start + i) + 1;
            let expected = sampling::choose(row, self.limit, params, &count, position, &mut scratch).unwrap_or(NONE);
            checked += 1;
            if got[t] == expected {
                continue;
            }
            let p = distribution(row, self.limit, params, &count, &mut scratch).unwrap_or_default();
            let u = uniform(params.seed, position, Purpose::Choose, 0);
            let before: f64 = p.iter().take(got[t] as usize).sum();
            let inside = before - BOUNDARY..before + p.get(got[t] as usize).unwrap_or(&-1.0) + BOUNDARY;
            assert!(
                !params.is_greedy() && inside.contains(&u),
                "{what}, row {t}: {} instead of {expected}, {inside:?} for {u}, vocabulary {} of {}, {params:?}",
                got[t] as i32,
                self.limit,
                self.vocab
            );
        }
        checked
    }
}

fn random_params(limit: usize, rng: &mut Rng) -> SamplingParams {
    let pick = |list: &[f32], rng: &mut Rng| list[rng.below(list.len())];
    let top_k = match rng.below(8) {
        0 => 1,
        1 => 20,
        2 => 64,
        3 => 65,
        4 => limit as u32,
        5 => rng.below(limit + 2) as u32,
        6 => limit as u32 - 1,
        _ => 0,
    };
    let params = SamplingParams::greedy()
        .with_seed(rng.bits())
        .with_temperature(pick(&[0.0, 0.2, 0.7, 1.0, 1.0, 1.7, 30.0, 1e-3], rng))
        .with_top_k(top_k)
        .with_top_p(pick(&[1.0, 1.0, 0.95, 0.9, 0.5, 0.999_999, 0.01, 1e-30], rng))
        .with_min_p(pick(&[0.0, 0.0, 0.05, 0.5, 1.0, 1e-30], rng));
    if rng.below(2) == 0 {
        return params;
    }
    params
        .with_presence(pick(&[0.0, 1.5, -0.5], rng))
        .with_frequency(pick(&[0.0, 0.3, -2.0], rng))
        .with_repetition(pick(&[1.0, 1.3, 0.01, 100.0], rng))
}

fn random_logits(vocab: usize, rng: &mut Rng) -> Vec<f32> {
    let shape = rng.below(10);
    let mut x: Vec<f32> = (0..vocab)
        .map(|_| match shape {
            0 => 0.5,
            1 => rng.value(3.0).round(),
            2 => rng.value(0.01),
            3 => rng.value(1e30),
            4 => rng.value(10.0).floor() * 0.25,
            _ => rng.value(4.0),
        })
        .collect();
    let (here, there) = (rng.below(vocab), rng.below(vocab));
    match rng.below(20) {
        0 => x[here] = f32::NAN,
        1 => x.iter_mut().filter(|y| **y < 0.0).for_each(|y| *y = f32::NEG_INFINITY),
        2 => (x[here], x[there]) = (f32::INFINITY, f32::INFINITY),
        3 => x.fill(f32::NEG_INFINITY),
        4 => x.iter_mut().for_each(|y| *y *= -0.0),
        5 => {
            x.fill(f32::NEG_INFINITY);
            x[here] = -1.0;
        }
        6 => x.fill(f32::INFINITY),
        7 => x[here] = f32::MAX,
        _ => {}
    }
    x
}

#[test]
fn thousands_of_small_cases() {
    let Some(gpu) = gpu() else { return };
    let mut checked = 0;
    for seed in 0..400 {
        let mut rng = Rng::new(seed);
        let vocab = [1, 2, 63, 64, 65, 300, 1 + rng.below(1000)][seed as usize % 7];
        let profile = if seed % 3 == 0 { Profile::Prefill } else { Profile::Step };
        let case = Case::random(profile, vocab, 6, &mut rng);
        checked += case.check(&format!("seed {seed}"), &case.run(&mut Side::new(gpu.clone())));
    }
    assert!(checked > 3000, "{checked} rows");
}

#[test]
fn vocabularies_of_several_tiles() {
    let Some(gpu) = gpu() else { return };
    for (seed, vocab) in [4095, 4096, 4097, 8192, 12_289, 40_000, 65_537].into_iter().cycle().take(56).enumerate() {
        let mut rng = Rng::new(1000 + seed as u64);
        let case = Case::random(Profile::Step, vocab, 3, &mut rng);
        case.check(&format!("seed {seed}"), &case.run(&mut Side::new(gpu.clone())));
    }
}

/// The vocabulary of the published models, and one whose chunks have several tiles.
#[test]
fn full_vocabularies() {
    let Some(gpu) = gpu() else { return };
    for (seed, vocab) in [248_320, 248_320, 300_000, 248_320, 262_145, 248_320].into_iter().enumerate() {
        let mut rng = Rng::new(2000 + seed as u64);
        let case = Case::random(Profile::Step, vocab, 2, &mut rng);
        case.check(&format!("seed {seed}"), &case.run(&mut Side::new(gpu.clone())));
    }
}

/// All 128 rows of a step at once, each of them wide: more blocks than the device holds.
#[test]
fn many_rows_that_blocks_share() {
    let Some(gpu) = gpu() else { return };
    let mut rng = Rng::new(9);
    let (vocab, rows) = (70_000, 128);
    let params = [(0, 0.95, 0.0), (0, 1.0, 0.0), (1000, 0.9, 0.01), (65, 1.0, 0.0)];
    let segments = (0..rows as u32)
        .map(|row| Segment { slot: row % SLOTS as u32, start: 7 * row, row, len: 1, ..Segment::default() })
        .collect();
    let case = Case {
        profile: Profile::Step,
        vocab,
        limit: vocab,
        rows,
        segments,
        params: params
            .map(|(k, p, m)| SamplingParams::greedy().with_temperature(1.1).with_top_k(k).with_top_p(p).with_min_p(m))
            .to_vec(),
        counts: vec![0; SLOTS * vocab],
        logits: rng.values(rows * vocab, 3.0),
        ids: vec![0; rows],
    };
    case.check("128 wide rows", &case.run(&mut Side::new(gpu)));
}

#[test]
fn a_row_never_sees_its_neighbours() {
    let Some(gpu) = gpu() else { return };
    for seed in 0..10 {
        let mut rng = Rng::new(3000 + seed);
        let case = Case::random(Profile::Step, 9000, 8, &mut rng);
        let all = case.run(&mut Side::new(gpu.clone()));
        for s in &case.segments {
            let rows = s.row as usize..(s.row + s.len) as usize;
            if rows.is_empty() {
                continue;
            }
            let alone = Case {
                rows: rows.len(),
                segments: vec![Segment { row: 0, ..*s }],
                logits: case.logits[rows.start * case.vocab..rows.end * case.vocab].to_vec(),
                ids: case.ids[rows.clone()].to_vec(),
                ..case.clone()
            };
            assert_eq!(alone.run(&mut Side::new(gpu.clone())), all[rows], "seed {seed}, slot {}", s.slot);
        }
    }
}

/// One recording serves all parameters, positions and logits.
#[test]
fn a_recording_follows_its_data() {
    let Some(gpu) = gpu() else { return };
    let mut side = Side::new(gpu);
    let mut rng = Rng::new(4000);
    let shape = Case::random(Profile::Step, 6000, 4, &mut rng);
    let call = shape.call(&mut side);
    let op = call.op.clone();
    let step = side.backend.record(&mut side.queue, |r| r.choose(op)).unwrap();
    for round in 0..24 {
        let mut case =
            Case { params: (0..SLOTS).map(|_| random_params(shape.limit, &mut rng)).collect(), ..shape.clone() };
        case.logits = (0..case.rows).flat_map(|_| random_logits(case.vocab, &mut rng)).collect();
        case.ids = (0..case.rows).map(|_| rng.below(5) as u32).collect();
        for s in &mut case.segments {
            (s.start, s.slot) = (rng.below(1000) as u32, (s.slot + 1 + round % 3) % SLOTS as u32);
        }
        let table: Vec<i32> = case.segments.iter().flat_map(|s| s.to_words()).collect();
        let words = case.words();
        let uploads: [(&View<_>, &[u8]); 4] = [
            (&call.table, bytemuck::cast_slice(&table)),
            (&call.op.logits, bytemuck::cast_slice(&case.logits)),
            (&call.op.ids, bytemuck::cast_slice(&case.ids)),
            (&call.op.params, bytemuck::cast_slice(&words)),
        ];
        for (view, bytes) in uploads {
            side.backend.upload(&mut side.queue, view, bytes).unwrap();
        }
        side.backend.replay(&mut side.queue, &step).unwrap();
        let got: Vec<u32> = side.read(&call.op.output);
        case.check(&format!("replay {round}"), &got);
        side.check_guards();
    }
}

/// Logits with gaps between their rows, which start at odd addresses.
#[test]
fn rows_may_have_gaps() {
    let Some(gpu) = gpu() else { return };
    let mut rng = Rng::new(5000);
    let case = Case::random(Profile::Step, 5001, 5, &mut rng);
    let stride = case.vocab + 5;
    let spread: Vec<f32> = case
        .logits
        .chunks(case.vocab)
        .flat_map(|row| [f32::NAN; 3].into_iter().chain(row.iter().copied()).chain([f32::NAN; 2]))
        .collect();
    let mut side = Side::new(gpu);
    let whole = side.floats(case.rows, stride, &spread);
    let mut op = case.call(&mut side).op;
    op.logits = whole.col_range(3..3 + case.vocab).unwrap();
    let output = op.output.clone();
    side.run(|r| r.choose(op));
    let got: Vec<u32> = side.read(&output);
    case.check("gaps", &got);
}

/// χ² of 20,000 draws against the final distribution, for each way to draw.
#[test]
fn draws_have_the_frequencies_of_the_distribution() {
    let Some(gpu) = gpu() else { return };
    let vocab = 300;
    let mut rng = Rng::new(6000);
    let row = rng.values(vocab, 2.0);
    let plain = SamplingParams::greedy().with_temperature(1.0);
    // Short lists, a nucleus of all, and everything; limits of χ² at p = 1e-4 by Wilson and Hilferty.
    for params in [plain.with_top_k(40), plain.with_top_p(0.9), plain] {
        let (rows, rounds) = (128, 160);
        let mut hits = vec![0u32; vocab];
        let mut side = Side::new(gpu.clone());
        let case = Case {
            profile: Profile::Step,
            vocab,
            limit: vocab,
            rows,
            segments: vec![Segment { len: rows as u32, ..Segment::default() }],
            params: vec![params.with_seed(3); SLOTS],
            counts: vec![0; SLOTS * vocab],
            logits: row.repeat(rows),
            ids: vec![0; rows],
        };
        let call = case.call(&mut side);
        for round in 0..rounds {
            let segment = Segment { start: (round * rows) as u32, len: rows as u32, ..Segment::default() };
            let words = segment.to_words();
            side.backend.upload(&mut side.queue, &call.table, bytemuck::cast_slice(&words)).unwrap();
            let op = call.op.clone();
            side.run(|r| r.choose(op));
            side.read::<u32>(&call.op.output).iter().for_each(|&id| hits[id as usize] += 1);
        }
        let p = distribution(&row, vocab, &params, &|_| 0, &mut ChooseScratch::new()).unwrap();
        let draws = (rows * rounds) as f64;
        // Rare tokens share a cell.
        let (mut chi, mut cells, mut rest) = (0.0, 0, (0.0, 0.0));
        for (p, hits) in p.iter().zip(&hits) {
            let (expected, hits) = (p * draws, f64::from(*hits));
            if expected >= 10.0 {
                chi += (hits - expected).powi(2) / expected;
                cells += 1;
            } else {
                rest = (rest.0 + expected, rest.1 + hits);
            }
        }
        if rest.0 > 0.0 {
            chi += (rest.1 - rest.0).powi(2) / rest.0;
            cells += 1;
        }
        let free = f64::from(cells - 1);
        let limit = free * (1.0 - 2.0 / (9.0 * free) + 3.72 * (2.0 / (9.0 * free)).sqrt()).powi(3);
        assert!(chi < limit, "χ² = {chi:.1} of {cells} cells, limit {limit:.1}, {params:?}");
    }
}
