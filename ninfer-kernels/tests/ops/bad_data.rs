//! Device data that no correct program writes: each gives a typed error and changes nothing, and never a panic.

use ninfer_core::ops::{
    Accept, Attend, Choose, CopyRows, Count, Experts, GdnFold, GdnState, Head, KvLayer, MtpStem, Norm, Project,
    ProjectAdd, RopeAppend, RopeTable, Swiglu,
};
use ninfer_core::sampling::{PARAM_WORDS, SamplingParams};
use ninfer_core::segment::{PAGE_TOKENS, Profile, Segment};
use ninfer_core::{Backend, DType, Error, PackedData, PackedRef, View, WeightFormat, format};
use ninfer_kernels::cpu::Cpu;

use super::gdn::{Inputs, Net, at, dims};
use super::lab::{Lab, Mat};
use super::oracle::gdn::Layer;
use super::rng::Rng;
use super::stored::Stored;

#[track_caller]
fn out_of_range(error: &Error, what: &str) {
    assert!(matches!(error, Error::OutOfRange { what: w, .. } if *w == what), "{error}");
}

/// Segments that GDN operations must refuse, with the value that the error names. Two slots, records of three columns.
fn bad_segments() -> Vec<(Segment, &'static str)> {
    let good = Segment { slot: 1, start: 8, row: 0, len: 2, fold: 2, bank: 1 };
    vec![
        (Segment { slot: 2, ..good }, "sequence slot"),
        (Segment { slot: i32::MAX as u32, ..good }, "sequence slot"),
        (Segment { fold: 4, ..good }, "folded columns"),
        // Enough to ask for more memory than there is, if it were not checked first.
        (Segment { fold: i32::MAX as u32, start: i32::MAX as u32, ..good }, "folded columns"),
        (Segment { fold: 9, ..good }, "fold of a segment"),
        (Segment { len: 4, ..good }, "recorded columns"),
        (Segment { len: 6, ..good }, "rows of a segment"),
        (Segment { row: i32::MAX as u32, ..good }, "rows of a segment"),
        (Segment { bank: 2, ..good }, "bank of a segment"),
    ]
}

#[test]
fn gdn_refuses_bad_segments_and_keeps_all_states() {
    let d = dims(1, 2, 16, 16, 4);
    let mut rng = Rng::new(1);
    let layer = Layer::random(d, &mut rng);
    let inputs = Inputs::random(&d, 5, &mut rng);
    for (bad, what) in bad_segments() {
        let mut lab = Lab::cpu();
        let net = Net::new(&mut lab, layer.clone(), 2, 3);
        for slot in 0..2 {
            net.prefill(&mut lab, 5, &[at(slot, 0, 0, 5)], &inputs);
        }
        net.step(&mut lab, 3, &[at(0, 5, 0, 3)], &inputs.placed(&d, 3, &[(0, 0), (1, 1), (2, 2)]));
        let before = (net.slot(&mut lab, 0), net.slot(&mut lab, 1));
        // The segment in front of the bad one is good, and would fold.
        let segments = [Segment { fold: 3, bank: 1, ..at(0, 8, 3, 1) }, bad];
        let (op, _) = net.op(&mut lab, (Profile::Step, true), 5, &segments, &inputs);
        out_of_range(&lab.fail(|r| r.gdn_mix(op)), what);
        assert_eq!((net.slot(&mut lab, 0), net.slot(&mut lab, 1)), before, "{what}");
        // The fold looks at slot, start, fold and bank only; its batch still has to lie inside the call.
        if what != "recorded columns" {
            let batch = lab.batch(Profile::Step, 5, &segments);
            let op = GdnFold { batch, params: net.params.clone(), state: net.state(), record: net.record() };
            out_of_range(&lab.fail(|r| r.gdn_fold(op)), what);
            assert_eq!((net.slot(&mut lab, 0), net.slot(&mut lab, 1)), before, "{what}");
        }
    }
    // Without a record there is nothing to fold from.
    let mut lab = Lab::cpu();
    let net = Net::new(&mut lab, layer, 1, 3);
    let (op, _) = net.op(&mut lab, (Profile::Prefill, false), 5, &[Segment { fold: 1, ..at(0, 3, 0, 5) }], &inputs);
    out_of_range(&lab.fail(|r| r.gdn_mix(op)), "fold of a segment");
}

/// Views with gaps, whose rows GDN operations would take for neighbours, and sizes of zero.
#[test]
fn gdn_refuses_gaps_and_empty_dimensions() {
    let d = dims(1, 2, 16, 16, 4);
    let mut rng = Rng::new(2);
    let layer = Layer::random(d, &mut rng);
    let inputs = Inputs::random(&d, 2, &mut rng);
    let mut lab = Lab::cpu().with_gaps(0, 1);
    let net = Net::new(&mut lab, layer, 1, 3);
    let gaps = [
        lab.output::<f32>(d.channels(), 3).v(),
        lab.output::<f32>(32, 16).v(),
        lab.output::<f32>(6, d.channels()).v(),
        lab.output::<f32>(6, 48).v(),
        lab.output::<f32>(6, 4).v(),
        lab.output::<f32>(d.channels(), 4).v(),
    ];
    for (i, gap) in gaps.into_iter().enumerate() {
        let (mut op, _) = net.op(&mut lab, (Profile::Step, true), 2, &[at(0, 0, 0, 2)], &inputs);
        let record = op.record.as_mut().unwrap();
        let places: [&mut View<Cpu>; 6] = [
            &mut op.state.window,
            &mut op.state.matrix,
            &mut record.columns,
            &mut record.key_value,
            &mut record.gates,
            &mut op.params.conv,
        ];
        *places.into_iter().nth(i).unwrap() = gap;
        let error = lab.fail(|r| r.gdn_mix(op));
        assert!(matches!(&error, Error::Shape { expected, .. } if expected == "rows without gaps"), "{error}");
    }
    for sizes in [dims(1, 0, 16, 16, 4), dims(1, 1, 0, 16, 4), dims(1, 1, 16, 0, 4)] {
        let layer = Layer::random(sizes, &mut rng);
        let mut lab = Lab::cpu();
        let inputs = Inputs::random(&sizes, 1, &mut rng);
        let window = lab.poisoned::<f32>(sizes.channels(), 3);
        let matrix = lab.poisoned::<f32>(sizes.value_heads * sizes.key_dim, sizes.value_dim);
        let net = Net::new(&mut lab, layer, 1, 1);
        let (mut op, _) = net.op(&mut lab, (Profile::Prefill, false), 1, &[at(0, 0, 0, 1)], &inputs);
        op.state = GdnState { window: window.v(), matrix: matrix.v() };
        assert!(matches!(lab.fail(|r| r.gdn_mix(op)), Error::Shape { .. }));
    }
}

/// A cache of three pages in a table of two slots with two pages each.
struct Attention {
    query_gate: Mat<Cpu>,
    rows: [Mat<Cpu>; 2],
    query: Mat<Cpu>,
    output: Mat<Cpu>,
    gains: Mat<Cpu>,
    frequencies: Mat<Cpu>,
    kv: KvLayer<Cpu>,
}

fn attention(lab: &mut Lab, table: &[i32; 4]) -> Attention {
    let d = 8;
    Attention {
        query_gate: lab.input(2, 4 * d, &vec![1.0f32; 8 * d]),
        rows: [lab.input(2, d, &vec![1.0f32; 2 * d]), lab.input(2, d, &vec![1.0f32; 2 * d])],
        query: lab.inout(2, 2 * d, &vec![1.0f32; 4 * d]),
        output: lab.output::<f32>(2, 2 * d),
        gains: lab.input(2, d, &vec![0.0f32; 2 * d]),
        frequencies: lab.input(1, 2, &[1.0f32, 0.1]),
        kv: KvLayer {
            keys: lab.output::<f32>(3 * PAGE_TOKENS, d).v(),
            values: lab.output::<f32>(3 * PAGE_TOKENS, d).v(),
            scales: None,
            pages: lab.input(2, 2, table).v(),
            heads: 1,
        },
    }
}

#[test]
fn attention_refuses_pages_and_slots_that_do_not_exist() {
    let good = [2, 1, 0, 2];
    let cases: [([i32; 4], Segment); 8] = [
        (good, at(2, 0, 0, 1)),
        (good, at(i32::MAX as u32, 0, 0, 1)),
        (good, at(0, 127, 0, 2)),
        (good, at(0, i32::MAX as u32, 0, 1)),
        ([2, -1, 0, 2], at(0, 64, 0, 1)),
        ([2, 3, 0, 2], at(0, 64, 0, 1)),
        ([i32::MAX, 1, 0, 2], at(0, 0, 0, 1)),
        ([i32::MIN, 1, 0, 2], at(0, 0, 0, 1)),
    ];
    for (table, segment) in cases {
        let mut lab = Lab::cpu();
        let a = attention(&mut lab, &table);
        let batch = lab.batch(Profile::Step, 2, &[segment]);
        let rope = RopeTable { frequencies: a.frequencies.v(), magnitude: 1.0, shift: 0 };
        let append = RopeAppend {
            batch: batch.clone(),
            query_gate: a.query_gate.v(),
            key: a.rows[0].v(),
            value: a.rows[1].v(),
            gains: a.gains.v(),
            eps: 1e-6,
            rope,
            query: a.query.v(),
            kv: a.kv.clone(),
        };
        let error = lab.fail(|r| r.rope_append(append));
        assert!(matches!(error, Error::ContextOverflow { limit: 128, .. }), "{error}");
        let attend = Attend {
            batch,
            query: a.query.v(),
            query_gate: a.query_gate.v(),
            kv: a.kv.clone(),
            first_key: 0,
            output: a.output.v(),
        };
        let error = lab.fail(|r| r.attend(attend));
        assert!(matches!(error, Error::ContextOverflow { limit: 128, .. }), "{error}");
    }
}

/// Keys and values of another type than the CPU keeps, or of two types.
#[test]
fn attention_refuses_caches_of_other_types() {
    let retype = |v: &View<Cpu>, dtype| View::new(v.buffer().clone(), dtype, v.offset(), v.rows(), v.cols()).unwrap();
    for (keys, values) in
        [(DType::F16, DType::F16), (DType::Bf16, DType::F32), (DType::F32, DType::Bf16), (DType::U8, DType::U8)]
    {
        let mut lab = Lab::cpu();
        let a = attention(&mut lab, &[0, 1, 2, 0]);
        let kv = KvLayer { keys: retype(&a.kv.keys, keys), values: retype(&a.kv.values, values), ..a.kv.clone() };
        let op = Attend {
            batch: lab.one(Profile::Step, 2, 0),
            query: a.query.v(),
            query_gate: a.query_gate.v(),
            kv: kv.clone(),
            first_key: 0,
            output: a.output.v(),
        };
        let error = lab.fail(|r| r.attend(op));
        assert!(matches!(error, Error::WrongDType { .. }), "{error}");
        let op = RopeAppend {
            batch: lab.one(Profile::Step, 2, 0),
            query_gate: a.query_gate.v(),
            key: a.rows[0].v(),
            value: a.rows[1].v(),
            gains: a.gains.v(),
            eps: 1e-6,
            rope: RopeTable { frequencies: a.frequencies.v(), magnitude: 1.0, shift: 0 },
            query: a.query.v(),
            kv,
        };
        let error = lab.fail(|r| r.rope_append(op));
        assert!(matches!(error, Error::WrongDType { .. }), "{error}");
    }
}

#[test]
fn indices_of_rows_and_experts_are_checked() {
    let mut lab = Lab::cpu();
    let (src, dst) = (lab.input(2, 3, &[1.0f32; 6]), lab.output::<f32>(2, 3));
    for (from, to, what) in [(2, 0, "source row"), (i32::MAX, 0, "source row"), (0, 2, "destination row")] {
        let (from, to) = (lab.input(1, 1, &[from]), lab.input(1, 1, &[to]));
        let op = CopyRows { src: src.v(), src_index: from.v(), dst: dst.v(), dst_index: to.v() };
        out_of_range(&lab.fail(|r| r.copy_rows(op)), what);
    }

    let table = Stored::random(WeightFormat::Bf16, false, 4, 16, 1.0, &mut Rng::new(1));
    let fc = Stored::random(WeightFormat::Bf16, false, 16, 32, 1.0, &mut Rng::new(2));
    for (id, index, what) in [(4u32, 0i32, "token id"), (0, 2, "hidden row"), (0, i32::MAX, "hidden row")] {
        let (ids, index) = (lab.input(1, 1, &[id]), lab.input(1, 1, &[index]));
        let gain = lab.input(1, 16, &[0.0f32; 16]);
        let norm = || Norm { gain: gain.v(), eps: 1e-6 };
        let op = MtpStem {
            batch: lab.one(Profile::Step, 1, 0),
            ids: ids.v(),
            table: lab.weight(&[table.packed()]),
            hidden: lab.input(2, 16, &[1.0f32; 32]).v(),
            index: index.v(),
            embedding_norm: norm(),
            hidden_norm: norm(),
            fc: lab.weight(&[fc.packed()]),
            output: lab.output::<f32>(1, 16).v(),
        };
        out_of_range(&lab.fail(|r| r.mtp_stem(op)), what);
    }

    let make = |rows, cols| Stored::random(WeightFormat::Bf16, false, rows, cols, 1.0, &mut Rng::new(3));
    for bad in [-1, 3, i32::MAX, i32::MIN] {
        let residual = lab.inout(2, 16, &[1.0f32; 32]);
        // The bad number of the second row counts; the one in the padding row does not.
        let chosen = lab.input(3, 2, &[0, 1, 2, bad, bad, bad]);
        let op = Experts {
            batch: lab.batch(Profile::Step, 2, &[at(0, 0, 0, 2)]),
            hidden: lab.input(2, 16, &[1.0f32; 32]).v(),
            experts: chosen.view.row_range(0..2).unwrap(),
            weights: lab.input(2, 3, &[0.3f32; 6]).v(),
            gate_up: lab.weight(&[make(3 * 8, 16).packed()]),
            down: lab.weight(&[make(3 * 16, 4).packed()]),
            shared_gate_up: lab.weight(&[make(8, 16).packed()]),
            shared_down: lab.weight(&[make(16, 4).packed()]),
            residual: residual.v(),
        };
        out_of_range(&lab.fail(|r| r.experts(op)), "expert");
        assert_eq!(lab.read::<f32>(&residual), [1.0; 32]);
    }
}

#[test]
fn slots_and_widths_of_rounds_are_checked() {
    let mut lab = Lab::cpu();
    let batch = lab.batch(Profile::Step, 2, &[at(3, 5, 0, 1)]);
    let op = Choose {
        batch,
        logits: lab.input(2, 4, &[1.0f32; 8]).v(),
        ids: lab.input(2, 1, &[0u32; 2]).v(),
        params: lab.input(3, PARAM_WORDS, &[SamplingParams::greedy().to_words(); 3].concat()).v(),
        counts: lab.input(3, 4, &[0u32; 12]).v(),
        limit: 4,
        output: lab.output::<u32>(2, 1).v(),
    };
    out_of_range(&lab.fail(|r| r.choose(op)), "sequence slot");

    for (segment, what) in [
        (at(2, 9, 0, 1), "sequence slot"),
        (at(1, 9, 0, 4), "columns of a round"),
        (Segment { fold: 4, ..at(1, 9, 0, 1) }, "columns of a round"),
    ] {
        let (previous, counts) = (lab.output::<u32>(2, 3), lab.output::<u32>(2, 7));
        let op = Count {
            batch: lab.batch(Profile::Step, 4, &[segment]),
            ids: lab.input(4, 1, &[1u32; 4]).v(),
            previous: previous.v(),
            counts: counts.v(),
        };
        out_of_range(&lab.fail(|r| r.count(op)), what);
        let (counts, previous) = (lab.read::<u32>(&counts), lab.read::<u32>(&previous));
        assert!(counts.iter().chain(&previous).all(|x| *x == u32::MAX), "{what}: something was written");
    }

    let op = Accept {
        batch: lab.batch(Profile::Step, 4, &[at(0, 9, 0, 4)]),
        ids: lab.input(4, 1, &[1u32; 4]).v(),
        chosen: lab.input(4, 1, &[1u32; 4]).v(),
        result: lab.output::<u32>(1, 4).v(),
        realign: lab.output::<i32>(1, 8).v(),
        last: lab.output::<i32>(1, 1).v(),
        chain: lab.output::<i32>(1, 8).v(),
    };
    out_of_range(&lab.fail(|r| r.accept(op)), "columns of a round");
}

/// An E4M3 code that is not a number is damage, and it is found when the weight is prepared.
#[test]
fn weights_with_nan_codes_are_refused() {
    let cpu = Cpu::new();
    for nan in [0x7f, 0xff] {
        let mut codes = [0x38u8; 12];
        codes[7] = nan;
        let data = PackedData::Fp8 { codes: &codes, scales: format::Fp8Scales::Tensor(1.0) };
        let error = cpu.prepare(&[PackedRef::new(3, 4, data).unwrap()]).unwrap_err();
        out_of_range(&error, "FP8 code");
        assert!(error.to_string().contains("row 1, column 3"), "{error}");
    }
    assert!(matches!(cpu.prepare(&[]), Err(Error::Shape { .. })));
    let (a, b) = (Stored::plain(1, 2, &[0.0; 2]), Stored::plain(1, 3, &[0.0; 3]));
    assert!(matches!(cpu.prepare(&[a.packed(), b.packed()]), Err(Error::Shape { .. })));
}

/// The trait's methods take operations that nobody checked: an output of another width is still an
/// error, since rows that share elements would be written by two threads.
#[test]
fn unchecked_operations_cannot_make_rows_share_elements() {
    let cpu = Cpu::with_threads(3).unwrap();
    let mut lab = Lab::new(cpu.clone());
    let stored = Stored::random(WeightFormat::Bf16, false, 640, 64, 0.1, &mut Rng::new(4));
    let weight = lab.weight(&[stored.packed()]);
    let input = lab.input(16, 64, &vec![1.0f32; 16 * 64]);
    let narrow = lab.output::<f32>(16, 320);
    let batch = lab.one(Profile::Step, 16, 0);
    let parts = vec![(weight.clone(), narrow.v())];
    let project = Project { batch: batch.clone(), input: input.v(), norm: None, parts };
    let add = ProjectAdd { batch: batch.clone(), input: input.v(), weight: weight.clone(), residual: narrow.v() };
    let head = Head { batch: batch.clone(), input: input.v(), head: weight.clone(), logits: narrow.v() };
    use ninfer_core::ops::{LinearOps, SampleOps};
    assert!(matches!(cpu.project(&mut lab.queue, project), Err(Error::Shape { .. })));
    assert!(matches!(cpu.project_add(&mut lab.queue, add), Err(Error::Shape { .. })));
    assert!(matches!(cpu.head(&mut lab.queue, head), Err(Error::Shape { .. })));
    lab.check();
    let rest = lab.read::<f32>(&narrow);
    assert!(rest.iter().all(|x| x.is_nan()), "something was written");
    // A matrix of 640 gate and up rows has 320 results.
    let wide = lab.output::<f32>(16, 640);
    let op = Swiglu { batch, input: input.v(), norm: None, gate_up: weight, output: wide.v() };
    assert!(matches!(cpu.swiglu(&mut lab.queue, op), Err(Error::Shape { .. })));
    lab.check();
}

/// P08: every state and every activation of another type is refused before anything is launched.
#[test]
fn wrong_types_never_launch() {
    use ninfer_core::testing::Counting;
    let d = dims(1, 2, 16, 16, 4);
    let mut rng = Rng::new(5);
    let layer = Layer::random(d, &mut rng);
    let inputs = Inputs::random(&d, 1, &mut rng);
    let mut lab = Lab::new(Counting::new(Cpu::new()));
    let net = Net::new(&mut lab, layer, 1, 1);
    let counting = lab.backend.clone();
    // The same bytes, read as half as many or twice as many elements.
    let as_bf16 =
        |v: &View<Counting<Cpu>>| View::new(v.buffer().clone(), DType::Bf16, v.offset(), v.rows(), v.cols()).unwrap();
    for place in 0..10 {
        let (mut op, _) = net.op(&mut lab, (Profile::Step, true), 1, &[at(0, 0, 0, 1)], &inputs);
        {
            let record = op.record.as_mut().unwrap();
            let places: [&mut View<_>; 10] = [
                &mut op.state.matrix,
                &mut op.state.window,
                &mut record.columns,
                &mut record.key_value,
                &mut record.gates,
                &mut op.qkv,
                &mut op.z,
                &mut op.a,
                &mut op.params.a_log,
                &mut op.params.gain,
            ];
            let place = places.into_iter().nth(place).unwrap();
            *place = as_bf16(place);
        }
        let error = lab.fail(|r| r.gdn_mix(op));
        assert!(matches!(error, Error::WrongDType { got: DType::Bf16, .. }), "{error}");
    }
    assert_eq!(counting.counts().launches.total(), 0, "a launch with the wrong type");
    // If all activations agree on a type that the CPU does not compute with, the operation itself refuses.
    let (mut op, _) = net.op(&mut lab, (Profile::Step, true), 1, &[at(0, 0, 0, 1)], &inputs);
    {
        let record = op.record.as_mut().unwrap();
        let activations: [&mut View<_>; 8] = [
            &mut op.state.window,
            &mut record.columns,
            &mut record.key_value,
            &mut op.qkv,
            &mut op.z,
            &mut op.a,
            &mut op.b,
            &mut op.output,
        ];
        activations.into_iter().for_each(|v| *v = as_bf16(v));
    }
    let error = lab.fail(|r| r.gdn_mix(op));
    assert!(matches!(error, Error::WrongDType { expected: DType::F32, got: DType::Bf16, .. }), "{error}");
}
