//! What a call returns for a token depends on that token and on what came before it in its sequence, and on nothing else:
//! not on the number of rows, not on neighbours or padding, not on the number of threads, not on where a prompt was cut.
//! All comparisons are of bits, over every operation of a small model.

use ninfer_core::WeightFormat;
use ninfer_core::ops::Project;
use ninfer_core::segment::{Profile, Segment};
use ninfer_kernels::cpu::Cpu;

use super::close::same_bits;
use super::gdn::at;
use super::lab::Lab;
use super::rng::Rng;
use super::stored::{FORMATS, Stored};
use super::tiny::{Tiny, VOCAB};

const ROWS: usize = 128;
const SLOTS: usize = 4;
const WIDTH: usize = 16;

fn tokens(seed: u64, n: usize) -> Vec<u32> {
    let mut rng = Rng::new(seed);
    (0..n).map(|_| rng.below(VOCAB) as u32).collect()
}

#[track_caller]
fn same(what: &str, got: &[Vec<u32>], expected: &[Vec<u32>]) {
    assert_eq!(got.len(), expected.len(), "{what}: tokens");
    for (t, (g, e)) in got.iter().zip(expected).enumerate() {
        let different = g.iter().zip(e).filter(|(a, b)| a != b).count();
        let first = g.iter().zip(e).position(|(a, b)| a != b);
        assert!(different == 0, "{what}: token {t} differs in {different} values, first at {first:?}");
    }
}

/// A model with a prompt of ten tokens in each slot.
fn prompted(threads: usize) -> (Lab, Tiny<Cpu>) {
    let mut lab = Lab::new(Cpu::with_threads(threads).unwrap());
    let tiny = Tiny::new(&mut lab, SLOTS, ROWS, WIDTH);
    for slot in 0..SLOTS as u32 {
        tiny.run(&mut lab, Profile::Prefill, 10, &[(at(slot, 0, 0, 10), &tokens(u64::from(slot), 10))]);
    }
    (lab, tiny)
}

/// Decodes tokens of a slot one at a time, alone.
fn decode(lab: &mut Lab, tiny: &Tiny<Cpu>, slot: u32, start: u32, list: &[u32]) -> Vec<Vec<u32>> {
    let mut results = Vec::new();
    for (i, token) in list.iter().enumerate() {
        let i = i as u32;
        let segment = Segment { fold: u32::from(i > 0), bank: i % 2, ..at(slot, start + i, 0, 1) };
        results.extend(tiny.run(lab, Profile::Step, 1, &[(segment, &[*token])]));
    }
    results
}

#[test]
fn verification_of_any_width_equals_decoding_on_any_number_of_threads() {
    let list = tokens(100, WIDTH);
    let (mut lab, tiny) = prompted(1);
    let decoded = decode(&mut lab, &tiny, 1, 10, &list);
    for threads in [1, 2, 3] {
        let (mut lab, tiny) = prompted(threads);
        for columns in 1..=WIDTH {
            let call = [(at(1, 10, 0, columns as u32), &list[..columns])];
            let verified = tiny.run(&mut lab, Profile::Step, columns, &call);
            same(&format!("{columns} columns, {threads} threads"), &verified, &decoded[..columns]);
        }
        same(&format!("{threads} threads"), &decode(&mut lab, &tiny, 1, 10, &list), &decoded);
    }
}

#[test]
fn neighbours_and_padding_do_not_matter() {
    let lists: Vec<Vec<u32>> = (0..SLOTS as u64).map(|s| tokens(200 + s, WIDTH)).collect();
    let (mut lab, tiny) = prompted(2);
    let alone: Vec<_> = (0..SLOTS).map(|s| decode(&mut lab, &tiny, s as u32, 10, &lists[s])).collect();
    // Total rows, up to the most that a step may have; then slot, first row and number of columns of each segment.
    type Place = (usize, u32, usize);
    let calls: [(usize, &[Place]); 6] = [
        (2, &[(0, 0, 1), (3, 1, 1)]),
        (16, &[(2, 3, 5), (1, 9, 7)]),
        (17, &[(3, 16, 1), (0, 0, 16)]),
        (33, &[(0, 1, 8), (1, 9, 8), (2, 17, 8), (3, 25, 8)]),
        (65, &[(1, 33, 16), (3, 0, 16), (0, 64, 1)]),
        (128, &[(0, 112, 16), (1, 96, 16), (2, 32, 16), (3, 3, 13)]),
    ];
    for (rows, segments) in calls {
        let call: Vec<(Segment, &[u32])> = segments
            .iter()
            .map(|&(slot, row, columns)| (at(slot as u32, 10, row, columns as u32), &lists[slot][..columns]))
            .collect();
        for threads in [1, 3] {
            let (mut lab, tiny) = prompted(threads);
            let got = tiny.run(&mut lab, Profile::Step, rows, &call);
            let expected: Vec<_> =
                segments.iter().flat_map(|&(slot, _, columns)| alone[slot][..columns].to_vec()).collect();
            same(&format!("{rows} rows, {threads} threads"), &got, &expected);
        }
    }
}

/// A prompt of 200 tokens cut at multiples of 64, resumed, on 1 to 3 threads, with and without another prompt beside it.
#[test]
fn prompts_may_be_cut_at_multiples_of_64() {
    let (prompt, other) = (tokens(1, 200), tokens(2, 110));
    let run = |threads: usize, cuts: &[usize], beside: bool| {
        let mut lab = Lab::new(Cpu::with_threads(threads).unwrap());
        let tiny = Tiny::new(&mut lab, SLOTS, 330, 1);
        let mut results = Vec::new();
        let mut start = 0;
        for &end in cuts {
            let (chunk, first) = (&prompt[start..end], if beside { 7 } else { 0 });
            let mut calls = vec![(at(2, start as u32, first, chunk.len() as u32), chunk)];
            if beside {
                // The neighbour stands at other positions than this chunk, in front of it or behind it.
                let row = if start == 0 { first + chunk.len() as u32 + 3 } else { 220 };
                calls.push((at(0, 0, row, 110), &other[..]));
            }
            let rows = if beside { 330 } else { chunk.len() };
            let got = tiny.run(&mut lab, Profile::Prefill, rows, &calls);
            results.extend_from_slice(&got[..chunk.len()]);
            start = end;
        }
        let lane = tiny.lane(&mut lab, 2, 200);
        (results, lane)
    };
    let (whole, lane) = run(1, &[200], false);
    for (threads, cuts, beside) in [
        (2, vec![200], false),
        (3, vec![200], true),
        (1, vec![64, 200], false),
        (3, vec![128, 200], false),
        (2, vec![64, 128, 192, 200], true),
        (2, vec![192, 200], false),
    ] {
        let (got, state) = run(threads, &cuts, beside);
        let what = format!("cut at {cuts:?}, {threads} threads, beside another: {beside}");
        same(&what, &got, &whole);
        assert!(state == lane, "{what}: state, counts or cache differ");
    }
}

/// The one-token tail of a prompt is a prompt chunk as well.
#[test]
fn a_tail_of_one_token_is_still_a_prompt() {
    let prompt = tokens(3, 65);
    let mut lab = Lab::cpu();
    let tiny = Tiny::new(&mut lab, SLOTS, 65, 1);
    let whole = tiny.run(&mut lab, Profile::Prefill, 65, &[(at(0, 0, 0, 65), &prompt)]);
    tiny.run(&mut lab, Profile::Prefill, 64, &[(at(1, 0, 0, 64), &prompt[..64])]);
    let tail = tiny.run(&mut lab, Profile::Prefill, 1, &[(at(1, 64, 0, 1), &prompt[64..])]);
    // Slot 1 draws with other parameters; everything but the drawn token is the same.
    let drawn = whole[64].len() - 3;
    let cut = |v: &[u32]| [&v[..drawn], &v[drawn + 1..]].concat();
    same("tail", &[cut(&tail[0])], &[cut(&whole[64])]);
}

/// A round of which some columns are committed, beside others with other numbers, all in one call after the other.
#[test]
fn rounds_with_partial_commits_equal_decoding() {
    let lists: Vec<Vec<u32>> = (0..3u64).map(|s| tokens(300 + s, 12)).collect();
    let (mut lab, tiny) = prompted(2);
    let alone: Vec<_> = (0..3).map(|s| decode(&mut lab, &tiny, s as u32, 10, &lists[s])).collect();
    let (mut lab, tiny) = prompted(3);
    // Of the five columns of each round, this many are committed; the others hold wrong drafts.
    let commits = [[1usize, 5, 3], [4, 0, 2], [2, 5, 1], [5, 2, 5]];
    let mut done = [0usize; 3];
    let mut last = [0usize; 3];
    for (round, counts) in commits.iter().enumerate() {
        let wrong = tokens(400 + round as u64, 15);
        let columns: Vec<Vec<u32>> = (0..3)
            .map(|s| {
                let right = counts[s].min(12 - done[s]).max(1);
                let mut list = lists[s][done[s]..done[s] + right].to_vec();
                list.extend_from_slice(&wrong[s * 5..s * 5 + 5 - right]);
                list
            })
            .collect();
        let calls: Vec<(Segment, &[u32])> = (0..3)
            .map(|s| {
                let start = 10 + done[s] as u32;
                let segment = Segment {
                    fold: last[s] as u32,
                    bank: round as u32 % 2,
                    ..at(s as u32, start, s as u32 * 7 + 1, 5)
                };
                (segment, &columns[s][..])
            })
            .collect();
        let got = tiny.run(&mut lab, Profile::Step, 24, &calls);
        for s in 0..3 {
            let n = counts[s].min(12 - done[s]);
            same(&format!("round {round}, slot {s}"), &got[s * 5..s * 5 + n], &alone[s][done[s]..done[s] + n]);
            (done[s], last[s]) = (done[s] + n, n);
        }
    }
}

/// One projection in odd sizes: bits of every row, however many rows and threads, wherever the segment begins in the call.
#[test]
fn projections_of_any_size_and_format() {
    const ROWS: usize = 150;
    for (format, divide) in FORMATS {
        let mut shapes = vec![(1, 16), (67, 48), (257, 32), (130, 272)];
        if format != WeightFormat::Nvfp4 {
            shapes.extend([(1, 1), (1, 7), (67, 33), (5, 131)]);
        }
        for (n, k) in shapes {
            let mut rng = Rng::new((n * k) as u64);
            let stored = Stored::random(format, divide, n, k, 0.1, &mut rng);
            let x = rng.values(ROWS * k, 1.0);
            // Rows `from..to` of x at positions from 64 + `from` on, `first` rows into the call.
            let run = |threads: &Cpu, profile: Profile, range: std::ops::Range<usize>, first: usize| {
                let mut lab = Lab::new(threads.clone());
                let (len, total) = (range.len(), first + range.len());
                let mut rows = vec![f32::NAN; first * k];
                rows.extend_from_slice(&x[range.start * k..range.end * k]);
                let weight = lab.weight(&[stored.packed()]);
                let (input, output) = (lab.input(total, k, &rows), lab.output::<f32>(total, n));
                let batch = lab.batch(profile, total, &[at(0, 64 + range.start as u32, first as u32, len as u32)]);
                let parts = vec![(weight, output.v())];
                lab.run(|r| r.project(Project { batch, input: input.v(), norm: None, parts }));
                lab.read::<f32>(&output)[first * n..].to_vec()
            };
            let what = format!("{format} [{n}, {k}]");
            let pools = [1, 2, 3].map(|threads| Cpu::with_threads(threads).unwrap());
            let whole = run(&pools[0], Profile::Prefill, 0..ROWS, 0);
            for (cuts, pool, first) in [(vec![64, ROWS], 1, 0), (vec![128, ROWS], 2, 5), (vec![64, 128, ROWS], 1, 63)] {
                let mut start = 0;
                for end in cuts {
                    let part = run(&pools[pool], Profile::Prefill, start..end, first);
                    same_bits(&what, &part, &whole[start * n..end * n]);
                    start = end;
                }
            }
            let step = run(&pools[2], Profile::Step, 0..97, 0);
            for range in [0..1, 1..3, 3..6, 6..10, 10..17, 17..50, 50..97] {
                let part = run(&pools[range.len() % 3], Profile::Step, range.clone(), range.start % 4);
                same_bits(&what, &part, &step[range.start * n..range.end * n]);
            }
        }
    }
}
