//! Recorded steps: the same results, no allocation, no copy, and a known number of launches.

use ninfer_core::ops::Embed;
use ninfer_core::segment::{Profile, Segment};
use ninfer_core::testing::Counting;
use ninfer_core::{Backend, DType, DeviceBuffer, Error, View};
use ninfer_kernels::cpu::Cpu;

use super::gdn::at;
use super::lab::Lab;
use super::rng::Rng;
use super::stored::Stored;
use super::tiny::{Tiny, VOCAB};

type Counted = Counting<Cpu>;

fn tokens(seed: u64, n: usize) -> Vec<u32> {
    let mut rng = Rng::new(seed);
    (0..n).map(|_| rng.below(VOCAB) as u32).collect()
}

/// Launches of one pass of the tiny model, by operation.
const LAUNCHES: [(&str, u64); 17] = [
    ("attend", 1),
    ("choose", 1),
    ("count", 1),
    ("embed", 1),
    ("experts", 1),
    ("gdn_mix", 1),
    ("head", 1),
    ("head_argmax", 1),
    ("mtp_stem", 1),
    ("project", 2),
    ("project_add", 3),
    ("rms_norm", 1),
    ("rope_append", 1),
    ("route", 1),
    ("swiglu", 1),
    ("gdn_fold", 0),
    ("accept", 0),
];

/// A step is recorded once, and replayed while table, inputs and state change: the bits are those of the eager step, with a
/// prompt and decode steps around it, and a replay copies and allocates nothing.
#[test]
fn replays_equal_eager_steps() {
    const ROWS: usize = 6;
    let mut eager = Lab::cpu();
    let expected = Tiny::new(&mut eager, 3, 16, 4);
    let mut lab: Lab<Counted> = Lab::new(Counting::new(Cpu::new()));
    let tiny = Tiny::new(&mut lab, 3, 16, 4);
    for slot in 0..3 {
        let call = [(at(slot, 0, 0, 9), &tokens(u64::from(slot), 9)[..])];
        expected.run(&mut eager, Profile::Prefill, 9, &call);
        tiny.run(&mut lab, Profile::Prefill, 9, &call);
    }

    // Two segments of at most three columns; one of them is not in use in some rounds.
    let table = lab.poisoned::<i32>(2, 8);
    let batch = ninfer_core::segment::Batch::new(Profile::Step, ROWS, table.v()).unwrap();
    let counting = lab.backend.clone();
    counting.reset();
    let step = counting.record(&mut lab.queue, |r| tiny.forward(r, &batch)).unwrap();
    for (op, launches) in LAUNCHES {
        assert_eq!(step.launches().of(op), launches, "{op}");
    }
    assert_eq!(step.launches().total(), 18);
    assert_eq!(step.inner().len(), 18);
    let counts = counting.counts();
    assert_eq!((counts.recorded, counts.replays, counts.launches.total()), (1, 0, 0), "recording runs nothing");
    assert_eq!((counts.allocations, counts.uploads, counts.downloads, counts.prepared), (0, 0, 0, 0));

    let rounds: [[Segment; 2]; 4] = [
        [at(0, 9, 0, 3), at(2, 9, 3, 1)],
        [Segment { fold: 2, bank: 1, ..at(0, 11, 0, 3) }, Segment { fold: 1, bank: 1, ..at(2, 10, 4, 2) }],
        [at(1, 9, 1, 2), Segment::default()],
        [Segment { fold: 0, bank: 1, ..at(0, 11, 0, 1) }, Segment { fold: 2, bank: 0, ..at(2, 12, 1, 3) }],
    ];
    for (i, segments) in rounds.iter().enumerate() {
        let list = tokens(50 + i as u64, ROWS);
        let mut calls: Vec<(Segment, &[u32])> = Vec::new();
        for s in segments {
            calls.push((*s, &list[s.row as usize..(s.row + s.len) as usize]));
        }
        let want = expected.run(&mut eager, Profile::Step, ROWS, &calls);

        let words: Vec<i32> = segments.iter().flat_map(|s| s.to_words()).collect();
        lab.fill(&table, &words);
        tiny.feed(&mut lab, &calls);
        counting.reset();
        counting.replay(&mut lab.queue, &step).unwrap();
        let counts = counting.counts();
        assert_eq!((counts.replays, &counts.replayed), (1, step.launches()));
        assert_eq!((counts.allocations, counts.uploads, counts.downloads), (0, 0, 0));
        assert_eq!(counts.launches.total(), 0);
        lab.check();
        assert!(tiny.collect(&mut lab, segments) == want, "round {i}");
    }
}

/// P63: what a recording refuses, and that the queue works afterwards, however the recording ended.
#[test]
fn a_recording_allocates_and_copies_nothing() {
    let mut lab: Lab<Counted> = Lab::new(Counting::new(Cpu::new()));
    let counting = lab.backend.clone();
    let table = Stored::plain(2, 4, &[1.0; 8]);
    let weight = lab.weight(&[table.packed()]);
    let (ids, output) = (lab.input(1, 1, &[1u32]), lab.output::<f32>(1, 4));
    let batch = lab.one(Profile::Step, 1, 0);
    let view = output.v();
    let embed = || Embed { batch: batch.clone(), ids: ids.v(), table: weight.clone(), output: output.v() };
    let refused = |result: ninfer_core::Result<()>, expected: &str| {
        assert!(matches!(&result, Err(Error::Recording { what }) if *what == expected), "{expected}: {result:?}");
    };
    let before = counting.counts();
    let result = counting.record(&mut lab.queue, |r| {
        let backend = r.backend().clone();
        let mut other = backend.queue()?;
        assert!(backend.is_recording());
        refused(backend.alloc("inside", 64).map(drop), "an allocation");
        refused(backend.upload(&mut other, &view, &[0; 16]), "an upload");
        refused(backend.download(&mut other, &view, &mut [0; 16]), "a download");
        refused(backend.prepare(&[table.packed()]).map(drop), "preparing a weight");
        refused(backend.record(&mut other, |_| Ok(())).map(drop), "recording another step");
        r.embed(embed())?;
        // The closure itself fails: the recording is thrown away.
        backend.alloc("inside", 64).map(drop)
    });
    refused(result.map(drop), "an allocation");
    assert!(!counting.is_recording());
    assert_eq!(counting.counts(), before, "nothing of that was counted");
    assert!(lab.read::<f32>(&output).iter().all(|x| x.is_nan()), "recording must not execute");
    // The next eager step works, and so does the next recording.
    lab.run(|r| r.embed(embed()));
    assert_eq!(lab.read::<f32>(&output), [1.0; 4]);
    let step = counting.record(&mut lab.queue, |r| r.embed(embed())).unwrap();
    counting.replay(&mut lab.queue, &step).unwrap();
    assert_eq!(counting.counts().launches.of("embed"), 1);
    assert_eq!(counting.counts().replayed.of("embed"), 1);
    assert_eq!(counting.counts().replayed.to_string(), "embed 1 (1)");
}

/// A closure that panics leaves neither backend in the state of recording.
#[test]
fn a_panic_ends_the_recording() {
    let counting = Counting::new(Cpu::new());
    let mut queue = counting.queue().unwrap();
    let panics = std::panic::AssertUnwindSafe(|| counting.record(&mut queue, |_| panic!("as intended")).map(drop));
    assert!(std::panic::catch_unwind(panics).is_err());
    assert!(!counting.is_recording());
    let buffer = counting.alloc("after", 8).unwrap();
    let view = View::new(buffer, DType::U8, 0, 1, 8).unwrap();
    counting.upload(&mut queue, &view, &[7; 8]).unwrap();
    let mut bytes = [0; 8];
    counting.download(&mut queue, &view, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 8]);
    assert!(counting.record(&mut queue, |_| Ok(())).is_ok());
}

/// A wrong operation is refused while recording, and the recording goes on or ends as its closure decides.
#[test]
fn operations_are_checked_when_they_are_recorded() {
    let mut lab = Lab::cpu();
    let table = Stored::plain(2, 4, &[1.0; 8]);
    let weight = lab.weight(&[table.packed()]);
    let (ids, output) = (lab.input(1, 1, &[1u32]), lab.output::<f32>(1, 5));
    let batch = lab.one(Profile::Step, 1, 0);
    let embed = Embed { batch, ids: ids.v(), table: weight, output: output.v() };
    let backend = lab.backend.clone();
    let error = backend.record(&mut lab.queue, |r| r.embed(embed.clone())).unwrap_err();
    assert!(matches!(error, Error::Shape { op: "embed", .. }), "{error}");
    let step = backend
        .record(&mut lab.queue, |r| {
            assert!(r.embed(embed).is_err());
            Ok(())
        })
        .unwrap();
    assert!(step.is_empty());
}

/// A recorded step keeps its buffers: everything else may drop its handles.
#[test]
fn recordings_own_their_buffers() {
    let cpu = Cpu::new();
    let mut queue = cpu.queue().unwrap();
    let table = Stored::plain(1, 4, &[3.0; 4]);
    let output = cpu.alloc("output", 16).unwrap();
    let view = View::new(output, DType::F32, 0, 1, 4).unwrap();
    let step = {
        let weight = cpu.prepare(&[table.packed()]).unwrap();
        let ids = View::new(cpu.alloc("ids", 4).unwrap(), DType::U32, 0, 1, 1).unwrap();
        let words = View::new(cpu.alloc("table", 32).unwrap(), DType::I32, 0, 1, 8).unwrap();
        let segment = Segment { len: 1, ..Segment::default() };
        cpu.upload(&mut queue, &words, bytemuck::cast_slice(&segment.to_words())).unwrap();
        let batch = ninfer_core::segment::Batch::new(Profile::Step, 1, words).unwrap();
        cpu.record(&mut queue, |r| r.embed(Embed { batch, ids, table: weight, output: view.clone() })).unwrap()
    };
    assert_eq!(view.buffer().len(), 16);
    cpu.replay(&mut queue, &step).unwrap();
    let mut bytes = [0u8; 16];
    cpu.download(&mut queue, &view, &mut bytes).unwrap();
    assert_eq!(bytemuck::cast_slice::<u8, f32>(&bytes), [3.0; 4]);
}

/// A counting backend gives the views of all its operations on unchanged, whatever their gaps.
#[test]
fn counting_keeps_views_with_gaps() {
    let (mut plain, mut counted) = (Lab::cpu().with_gaps(3, 2), Lab::new(Counting::new(Cpu::new())).with_gaps(3, 2));
    let stored = Stored::plain(5, 4, &(0..20).map(|i| i as f32).collect::<Vec<_>>());
    let x: Vec<f32> = (0..12).map(|i| i as f32 - 4.0).collect();
    fn run<B: ninfer_core::backend::InferenceBackend>(lab: &mut Lab<B>, stored: &Stored, x: &[f32]) -> Vec<f32> {
        let weight = lab.weight(&[stored.packed()]);
        let (input, output) = (lab.input(3, 4, x), lab.output::<f32>(3, 5));
        let batch = lab.one(Profile::Step, 3, 0);
        let parts = vec![(weight, output.v())];
        lab.run(|r| r.project(ninfer_core::ops::Project { batch, input: input.v(), norm: None, parts }));
        lab.read(&output)
    }
    assert_eq!(run(&mut counted, &stored, &x), run(&mut plain, &stored, &x));
    assert_eq!(counted.backend.counts().launches.of("project"), 1);
}
