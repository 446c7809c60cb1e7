//! Head, choice, counts, acceptance.

use ninfer_core::WeightFormat;
use ninfer_core::ops::{Accept, Choose, Count, Head, HeadArgmax, Project};
use ninfer_core::sampling::{self, ChooseScratch, PARAM_WORDS, PROMPT_BIT, SamplingParams};
use ninfer_core::segment::{Profile, Segment};

use super::close::same_bits;
use super::gdn::at;
use super::lab::Lab;
use super::rng::Rng;
use super::stored::{FORMATS, Stored};

const NONE: u32 = u32::MAX;

/// Logits are those of a projection (which `linear` compares with f64), and the greedy choice is their maximum.
#[test]
fn heads_agree_with_projections() {
    for (format, divide) in FORMATS {
        for (profile, rows) in [(Profile::Step, 5), (Profile::Step, 64), (Profile::Prefill, 3)] {
            let (vocab, h, limit) = (131, 48, 120);
            let mut rng = Rng::new(rows as u64);
            let stored = Stored::random(format, divide, vocab, h, 0.1, &mut rng);
            let x = rng.values(rows * h, 1.0);
            let mut lab = Lab::cpu().with_gaps(1, 2);
            let head = lab.weight(&[stored.packed()]);
            let input = lab.input(rows, h, &x);
            let (logits, plain) = (lab.output::<f32>(rows, vocab), lab.output::<f32>(rows, vocab));
            let ids = lab.output::<u32>(rows, 1);
            let batch = lab.one(profile, rows, 0);
            lab.run(|r| {
                r.head(Head { batch: batch.clone(), input: input.v(), head: head.clone(), logits: logits.v() })?;
                let parts = vec![(head.clone(), plain.v())];
                r.project(Project { batch: batch.clone(), input: input.v(), norm: None, parts })?;
                r.head_argmax(HeadArgmax { batch, input: input.v(), head, limit, output: ids.v() })
            });
            let logits = lab.read::<f32>(&logits);
            same_bits("head", &logits, &lab.read::<f32>(&plain));
            for (row, id) in logits.chunks(vocab).zip(lab.read::<u32>(&ids)) {
                let best = (0..limit).reduce(|a, b| if row[b] > row[a] { b } else { a }).unwrap();
                assert_eq!(id as usize, best);
            }
        }
    }
}

/// Chooses greedily in both ways from rows of logits that the head gives exactly.
fn greedy(rows: &[&[f32]], limit: usize) -> Vec<u32> {
    let vocab = rows[0].len();
    let mut results = Vec::new();
    for row in rows {
        let mut lab = Lab::cpu();
        let head = lab.weight(&[Stored::plain(vocab, 1, row).packed()]);
        let (input, output) = (lab.input(1, 1, &[1.0f32]), lab.output::<u32>(1, 1));
        let (logits, ids) = (lab.input(1, vocab, row), lab.input(1, 1, &[0u32]));
        let params = lab.input(1, PARAM_WORDS, &SamplingParams::greedy().to_words());
        let (counts, chosen) = (lab.input(1, vocab, &vec![0u32; vocab]), lab.output::<u32>(1, 1));
        let batch = lab.one(Profile::Step, 1, 3);
        lab.run(|r| {
            r.head_argmax(HeadArgmax { batch: batch.clone(), input: input.v(), head, limit, output: output.v() })?;
            r.choose(Choose {
                batch,
                logits: logits.v(),
                ids: ids.v(),
                params: params.v(),
                counts: counts.v(),
                limit,
                output: chosen.v(),
            })
        });
        let id = lab.read::<u32>(&output)[0];
        assert_eq!(id, lab.read::<u32>(&chosen)[0], "{row:?}");
        results.push(id);
    }
    results
}

#[test]
fn greedy_corners() {
    const INF: f32 = f32::INFINITY;
    const NAN: f32 = f32::NAN;
    let rows: [&[f32]; 12] = [
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
        &[f32::MAX, f32::MAX, 1.0, 1.0, 9.0],
        &[f32::MIN, -INF, f32::MIN, -INF, INF],
    ];
    let expected = [1, 0, 0, NONE, 2, NONE, NONE, NONE, 1, 1, 0, 0];
    assert_eq!(greedy(&rows, 4), expected);
}

/// The choice is the pure function of `sampling`, with the counts of the slot and, in a step, the inputs of the segment.
#[test]
fn choices_follow_the_definition() {
    let (vocab, limit) = (97, 90);
    for profile in [Profile::Step, Profile::Prefill] {
        for seed in 0..20 {
            let mut rng = Rng::new(seed);
            let slots = [
                SamplingParams::greedy().with_repetition(1.7).with_presence(0.5),
                SamplingParams::greedy().with_temperature(0.8).with_top_k(20).with_top_p(0.9).with_seed(seed),
                SamplingParams::greedy().with_temperature(1.3).with_frequency(0.9).with_min_p(0.01).with_seed(seed + 7),
            ];
            let words: Vec<u32> = slots.iter().flat_map(|p| p.to_words()).collect();
            let mut counts = vec![0u32; 3 * vocab];
            for count in counts.iter_mut().step_by(3) {
                *count = rng.below(4) as u32 | if rng.below(2) == 0 { PROMPT_BIT } else { 0 };
            }
            let segments = [at(1, 17, 1, 4), at(0, 0, 6, 2), at(2, 500, 8, 3), at(1, 3, 90, 0)];
            let rows = 12;
            let (mut logits, mut ids) = (vec![f32::NAN; rows * vocab], vec![NONE; rows]);
            for t in segments.iter().flat_map(|s| s.row..s.row + s.len) {
                logits[t as usize * vocab..][..vocab].copy_from_slice(&rng.values(vocab, 2.0));
                ids[t as usize] = rng.below(5) as u32;
            }
            let mut lab = Lab::cpu().with_gaps(1, 1);
            let output = lab.output::<u32>(rows, 1);
            let op = Choose {
                batch: lab.batch(profile, rows, &segments),
                logits: lab.input(rows, vocab, &logits).v(),
                ids: lab.input(rows, 1, &ids).v(),
                params: lab.input(3, PARAM_WORDS, &words).v(),
                counts: lab.input(3, vocab, &counts).v(),
                limit,
                output: output.v(),
            };
            lab.run(|r| r.choose(op));
            let got = lab.read::<u32>(&output);
            for s in &segments {
                for i in 0..s.len {
                    let t = (s.row + i) as usize;
                    let seen = if profile == Profile::Step { &ids[s.row as usize..=t] } else { &[] };
                    let count = |id: u32| {
                        counts[s.slot as usize * vocab + id as usize] + seen.iter().filter(|x| **x == id).count() as u32
                    };
                    let row = &logits[t * vocab..][..vocab];
                    let position = u64::from(s.start + i) + 1;
                    let params = &slots[s.slot as usize];
                    let mut scratch = ChooseScratch::new();
                    let expected = sampling::choose(row, limit, params, &count, position, &mut scratch);
                    assert_eq!(got[t], expected.unwrap(), "row {t}");
                }
            }
        }
    }
}

#[test]
fn rows_that_cannot_be_drawn_from_give_none() {
    let params = SamplingParams::greedy().with_temperature(1.0);
    for bad in [f32::NAN, f32::NEG_INFINITY, f32::INFINITY] {
        let mut lab = Lab::cpu();
        let output = lab.output::<u32>(2, 1);
        let op = Choose {
            batch: lab.one(Profile::Step, 2, 0),
            logits: lab.input(2, 3, &[bad, bad, bad, 0.0, -1e30, -1e30]).v(),
            ids: lab.input(2, 1, &[0u32, 0]).v(),
            params: lab.input(1, PARAM_WORDS, &params.to_words()).v(),
            // Counts that only a fault can leave: they saturate.
            counts: lab.input(1, 3, &[u32::MAX; 3]).v(),
            limit: 3,
            output: output.v(),
        };
        lab.run(|r| r.choose(op));
        assert_eq!(lab.read::<u32>(&output), [NONE, 0]);
    }
}

/// A prompt marks, a step counts what the round before it committed, and a dropped round leaves nothing.
#[test]
fn counts_follow_what_is_committed() {
    let vocab = 10;
    let mut lab = Lab::cpu().with_gaps(2, 1);
    let (counts, previous) = (lab.output::<u32>(3, vocab), lab.output::<u32>(3, 4));
    let run = |lab: &mut Lab, profile, rows: usize, segment: Segment, ids: &[u32]| {
        let op = Count {
            batch: lab.batch(profile, rows, &[segment]),
            ids: lab.input(rows, 1, ids).v(),
            previous: previous.v(),
            counts: counts.v(),
        };
        lab.run(|r| r.count(op));
        let all = lab.read::<u32>(&counts);
        assert!([0, 2].iter().all(|s| all[s * vocab..][..vocab].iter().all(|c| *c == NONE)), "other slots");
        all[vocab..2 * vocab].to_vec()
    };
    // A prompt in two chunks; the first one clears what the slot held. Ids outside the vocabulary have no count.
    let mut expected = vec![0u32; vocab];
    (expected[3], expected[5]) = (PROMPT_BIT, PROMPT_BIT);
    assert_eq!(run(&mut lab, Profile::Prefill, 3, at(1, 0, 0, 3), &[3, 5, 3]), expected);
    expected[9] = PROMPT_BIT;
    assert_eq!(run(&mut lab, Profile::Prefill, 2, at(1, 3, 0, 2), &[9, 1_000_000]), expected);
    // A round of three inputs counts nothing yet; it is dropped, and another one takes its place.
    assert_eq!(run(&mut lab, Profile::Step, 4, at(1, 5, 1, 3), &[NONE, 7, 7, 7]), expected);
    assert_eq!(run(&mut lab, Profile::Step, 3, at(1, 5, 0, 3), &[2, 5, 2]), expected);
    // Two of its inputs were committed.
    (expected[2], expected[5]) = (1, PROMPT_BIT | 1);
    assert_eq!(run(&mut lab, Profile::Step, 1, Segment { fold: 2, ..at(1, 7, 0, 1) }, &[4]), expected);
    expected[4] = 1;
    assert_eq!(run(&mut lab, Profile::Step, 1, Segment { fold: 1, ..at(1, 8, 0, 1) }, &[NONE]), expected);
    assert_eq!(run(&mut lab, Profile::Step, 1, Segment { fold: 1, ..at(1, 9, 0, 1) }, &[0]), expected);
}

/// A sequence that was generated from its first token on: the fold of its first round still clears the slot.
#[test]
fn counts_of_a_sequence_without_a_prompt() {
    let mut lab = Lab::cpu();
    let (counts, previous) = (lab.output::<u32>(1, 4), lab.output::<u32>(1, 3));
    for (segment, ids, expected) in [
        (at(0, 0, 0, 3), [1u32, 2, 1], [0u32, 0, 0, 0]),
        (Segment { fold: 3, ..at(0, 3, 0, 3) }, [0, 0, 0], [0, 2, 1, 0]),
    ] {
        let op = Count {
            batch: lab.batch(Profile::Step, 3, &[segment]),
            ids: lab.input(3, 1, &ids).v(),
            previous: previous.v(),
            counts: counts.v(),
        };
        lab.run(|r| r.count(op));
        assert_eq!(lab.read::<u32>(&counts), expected);
    }
}

/// Acceptance, and the segments of the passes that follow, written out.
#[test]
fn acceptance_and_the_passes_behind_it() {
    // Rows: an empty segment, a lane of four columns, a lane of one, a lane of three whose first draft is wrong.
    let segments = [at(5, 40, 77, 0), Segment { fold: 2, bank: 1, ..at(2, 10, 0, 4) }, at(0, 3, 5, 1), at(1, 8, 6, 3)];
    let ids = [100u32, 11, 12, 13, NONE, 200, 300, 31, 32];
    let chosen = [11u32, 12, 99, 55, NONE, 21, 30, 32, 33];
    let chain_rows = 2;
    let mut lab = Lab::cpu().with_gaps(1, 3);
    let result = lab.output::<u32>(4, 5);
    let (realign, last) = (lab.output::<i32>(4, 8), lab.output::<i32>(4, 1));
    let chain = lab.output::<i32>(4 * chain_rows, 8);
    let op = Accept {
        batch: lab.batch(Profile::Step, 9, &segments),
        ids: lab.input(9, 1, &ids).v(),
        chosen: lab.input(9, 1, &chosen).v(),
        result: result.v(),
        realign: realign.v(),
        last: last.v(),
        chain: chain.v(),
    };
    lab.run(|r| r.accept(op));
    assert_eq!(
        lab.read::<u32>(&result),
        [[0, NONE, NONE, NONE, NONE], [2, 11, 12, 99, NONE], [0, 21, NONE, NONE, NONE], [0, 30, NONE, NONE, NONE],]
            .concat()
    );
    // An empty segment has no last row.
    assert_eq!(lab.read::<i32>(&last), [-1, 2, 5, 6]);
    let plain = |slot, start, row, len, bank| Segment { slot, start, row, len, fold: 0, bank };
    let words = |list: &[Segment]| list.iter().flat_map(|s| s.to_words()).collect::<Vec<i32>>();
    let passes = [plain(5, 41, 77, 0, 0), plain(2, 11, 0, 3, 1), plain(0, 4, 5, 1, 0), plain(1, 9, 6, 1, 0)];
    assert_eq!(lab.read::<i32>(&realign), words(&passes));
    let links = [
        [plain(5, 41, 0, 0, 0), plain(2, 13, 1, 1, 1), plain(0, 4, 2, 1, 0), plain(1, 9, 3, 1, 0)],
        [plain(5, 42, 0, 0, 0), plain(2, 14, 1, 1, 1), plain(0, 5, 2, 1, 0), plain(1, 10, 3, 1, 0)],
    ];
    assert_eq!(lab.read::<i32>(&chain), words(&links.concat()));
}

/// All drafts accepted, and a result exactly as wide as the round.
#[test]
fn acceptance_of_everything() {
    let mut lab = Lab::cpu();
    let result = lab.output::<u32>(1, 5);
    let (realign, last, chain) = (lab.output::<i32>(1, 8), lab.output::<i32>(1, 1), lab.output::<i32>(0, 8));
    let op = Accept {
        batch: lab.one(Profile::Step, 4, 9),
        ids: lab.input(4, 1, &[1u32, 2, 3, 4]).v(),
        chosen: lab.input(4, 1, &[2u32, 3, 4, 5]).v(),
        result: result.v(),
        realign: realign.v(),
        last: last.v(),
        chain: chain.v(),
    };
    lab.run(|r| r.accept(op));
    assert_eq!(lab.read::<u32>(&result), [3, 2, 3, 4, 5]);
    assert_eq!(lab.read::<i32>(&last), [3]);
}

#[test]
fn one_token_may_be_alone_in_its_vocabulary() {
    let head = Stored::random(WeightFormat::F32, false, 1, 3, 1.0, &mut Rng::new(0));
    let mut lab = Lab::cpu();
    let weight = lab.weight(&[head.packed()]);
    let (input, output) = (lab.input(1, 3, &[1.0f32, 2.0, 3.0]), lab.output::<u32>(1, 1));
    let batch = lab.one(Profile::Step, 1, 0);
    lab.run(|r| r.head_argmax(HeadArgmax { batch, input: input.v(), head: weight, limit: 1, output: output.v() }));
    assert_eq!(lab.read::<u32>(&output), [0]);
}
