//! Record and fold of Gated DeltaNet: any accepted prefix of a round gives the bits of sequential decoding.

use ninfer_core::Error;
use ninfer_core::ops::{GdnOps, OutputGate};
use ninfer_core::segment::{Profile, Segment};
use ninfer_core::shape::GdnShape;
use ninfer_core::{Backend, DType};
use ninfer_kernels::cuda::Cuda;

use super::gdn::{Inputs, Layer, Net, at, bits, dims, sizes};
use super::lab::{gpu, same};
use super::rng::Rng;

const WIDTH: usize = 16;
type Bits = (Vec<u8>, Vec<u8>);

/// Decodes `rows` of `inputs` one at a time from position `start` on, each step folding the one before it; then folds the
/// last one. Gives the results and the state.
fn sequential(net: &mut Net<Cuda>, slot: u32, start: u32, inputs: &Inputs, rows: usize) -> (Vec<f32>, Bits) {
    let d = net.dims();
    let mut results = Vec::new();
    for t in 0..rows {
        let segment = Segment { fold: u32::from(t > 0), bank: t as u32 % 2, ..at(slot, start + t as u32, 0, 1) };
        results.extend(net.step(1, &[segment], &inputs.range(&d, t..t + 1)));
    }
    let last = Segment { fold: u32::from(rows > 0), bank: rows as u32 % 2, ..at(slot, start + rows as u32, 0, 0) };
    net.fold(&[last]);
    let state = net.slot_bits(slot as usize);
    (results, state)
}

/// A layer with a prompt of seven tokens behind it in every slot.
fn prepared(gpu: &Cuda, layer: &Layer, prompt: &Inputs, slots: u32) -> Net<Cuda> {
    let mut net = Net::new(gpu.clone(), layer, slots as usize, WIDTH);
    for slot in 0..slots {
        net.prefill(7, &[at(slot, 0, 0, 7)], prompt);
    }
    net
}

fn accepted_prefixes(gpu: &Cuda, d: GdnShape, columns: usize, prefixes: impl Iterator<Item = usize>) {
    let mut rng = Rng::new((columns * 7 + d.value_dim) as u64);
    let layer = Layer::random(d, &mut rng);
    let (prompt, round) = (Inputs::random(&d, 7, &mut rng), Inputs::random(&d, columns, &mut rng));
    let next = Inputs::random(&d, 3, &mut rng);
    for n in prefixes {
        let what = format!("{d:?}: {n} of {columns}");
        let mut net = prepared(gpu, &layer, &prompt, 2);
        let before = net.slot_bits(0);
        let got = net.step(columns, &[Segment { bank: 1, ..at(0, 7, 0, columns as u32) }], &round);
        assert_eq!(net.slot_bits(0), before, "{what}: an open round leaves committed state alone");
        // Slot 1 decodes the accepted tokens, then those of the next round.
        let (accepted, expected) = sequential(&mut net, 1, 7, &round, n);
        same(&format!("{what}: the round"), &bits(&got[..accepted.len()]), &bits(&accepted));
        let (after, _) = sequential(&mut net, 1, 7 + n as u32, &next, 3);
        // The next round of slot 0 folds first.
        let resumed = Segment { fold: n as u32, bank: 0, ..at(0, 7 + n as u32, 0, 3) };
        let fused = net.step(3, &[resumed], &next);
        same(&format!("{what}: the next round"), &bits(&fused), &bits(&after));
        assert_eq!(net.slot_bits(0), expected, "{what}: state");
    }
}

#[test]
fn every_accepted_prefix_equals_sequential_decoding() {
    let Some(gpu) = gpu() else { return };
    for d in sizes() {
        for columns in [1, 2, 5] {
            accepted_prefixes(&gpu, d, columns, 0..=columns);
        }
    }
    for columns in [8, 9, 16] {
        accepted_prefixes(&gpu, dims(1, 2, 128, 128, 4), columns, 0..=columns);
    }
    accepted_prefixes(&gpu, dims(16, 32, 128, 128, 4), 4, [0, 1, 3, 4].into_iter());
    accepted_prefixes(&gpu, dims(16, 48, 128, 128, 4), 6, [2, 6].into_iter());
}

/// The separate fold and the one in front of a step write the same bits.
#[test]
fn gdn_fold_equals_the_fused_fold() {
    let Some(gpu) = gpu() else { return };
    for d in [dims(2, 6, 32, 32, 4), dims(2, 4, 128, 128, 4)] {
        let mut rng = Rng::new(3);
        let layer = Layer::random(d, &mut rng);
        let (prompt, round) = (Inputs::random(&d, 7, &mut rng), Inputs::random(&d, 12, &mut rng));
        for n in 0..=12 {
            let mut net = prepared(&gpu, &layer, &prompt, 2);
            net.step(12, &[at(0, 7, 0, 12)], &round);
            net.step(12, &[at(1, 7, 0, 12)], &round);
            net.step(1, &[Segment { fold: n, bank: 1, ..at(0, 7 + n, 0, 1) }], &round.range(&d, 0..1));
            net.fold(&[Segment { fold: n, bank: 1, ..at(1, 7 + n, 0, 0) }]);
            assert_eq!(net.slot_bits(0), net.slot_bits(1), "{n} columns");
        }
    }
}

/// Rounds of up to eight sequences, folded by different numbers, between padding rows: each row has the bits that it has
/// alone, and so has each state.
#[test]
fn rounds_do_not_depend_on_their_neighbours() {
    let Some(gpu) = gpu() else { return };
    for d in [dims(1, 3, 16, 24, 4), dims(2, 4, 128, 128, 4)] {
        let mut rng = Rng::new(17);
        let layer = Layer::random(d, &mut rng);
        let (prompt, first) = (Inputs::random(&d, 7, &mut rng), Inputs::random(&d, 6, &mut rng));
        for count in 1..=8u32 {
            let rows = 128;
            let inputs = Inputs::random(&d, rows, &mut rng);
            let mut together = prepared(&gpu, &layer, &prompt, 9);
            let mut alone = prepared(&gpu, &layer, &prompt, 9);
            let (mut segments, mut places, mut row) = (Vec::new(), Vec::new(), 1);
            for i in 0..count {
                for net in [&mut together, &mut alone] {
                    net.step(6, &[at(8 - i, 7, 0, 6)], &first);
                }
                let (fold, len) = (i % 7, 1 + i * 2);
                segments.push(Segment { fold, bank: 1, ..at(8 - i, 7 + fold, row, len) });
                places.extend((row..row + len).map(|r| (r as usize, r as usize)));
                row += len + i % 2;
            }
            let got = together.step(rows, &segments, &inputs.placed(&d, rows, &places));
            for s in &segments {
                let (from, len) = (s.row as usize, s.len as usize);
                let own = alone.step(len, &[Segment { row: 0, ..*s }], &inputs.range(&d, from..from + len));
                same(&format!("{s:?}"), &bits(&got[from * d.values()..][..own.len()]), &bits(&own));
            }
            for slot in 0..9 {
                assert_eq!(together.slot_bits(slot), alone.slot_bits(slot), "slot {slot} of {count}");
            }
        }
    }
}

/// Dropping a round costs nothing: the next one starts from the same bytes, in the other bank or in the same one.
#[test]
fn a_dropped_round_leaves_no_trace() {
    let Some(gpu) = gpu() else { return };
    let d = dims(1, 3, 128, 128, 4);
    let mut rng = Rng::new(6);
    let layer = Layer::random(d, &mut rng);
    let (prompt, dropped) = (Inputs::random(&d, 7, &mut rng), Inputs::random(&d, 6, &mut rng));
    let real = Inputs::random(&d, 4, &mut rng);
    let mut net = prepared(&gpu, &layer, &prompt, 2);
    let before = net.slot_bits(0);
    let clean = net.step(4, &[at(1, 7, 0, 4)], &real);
    for bank in [0, 1, 1, 0] {
        net.step(6, &[Segment { bank, ..at(0, 7, 0, 6) }], &dropped);
        assert_eq!(net.slot_bits(0), before);
        let again = net.step(4, &[Segment { bank, ..at(0, 7, 0, 4) }], &real);
        same("after a dropped round", &bits(&again), &bits(&clean));
    }
}

/// A sequence that begins reads neither the state nor the record of whoever had its slot before: both are poison here.
#[test]
fn a_beginning_never_reads_old_state() {
    let Some(gpu) = gpu() else { return };
    for d in [dims(2, 2, 16, 24, 4), dims(1, 2, 128, 128, 4)] {
        let mut rng = Rng::new(8);
        let layer = Layer::random(d, &mut rng);
        let (round, next) = (Inputs::random(&d, 5, &mut rng), Inputs::random(&d, 2, &mut rng));
        for n in 0..=5u32 {
            let mut net = Net::new(gpu.clone(), &layer, 2, WIDTH);
            let got = net.step(5, &[at(0, 0, 0, 5)], &round);
            assert!(got.iter().all(|x| x.is_finite()));
            let poison = vec![f32::NAN; d.channels() * (d.conv_kernel - 1) + d.values() * d.key_dim];
            let (window, matrix) = poison.split_at(d.channels() * (d.conv_kernel - 1));
            net.set_slot(0, window, matrix);
            let after = net.step(2, &[Segment { fold: n, bank: 1, ..at(0, n, 0, 2) }], &next);
            let (accepted, expected) = sequential(&mut net, 1, 0, &round, n as usize);
            same("the round", &bits(&got[..accepted.len()]), &bits(&accepted));
            let (plain, _) = sequential(&mut net, 1, n, &next, 2);
            same("the next round", &bits(&after), &bits(&plain));
            if n > 0 {
                assert_eq!(net.slot_bits(0), expected);
            }
        }
    }
}

/// A recorded step with another table and other inputs gives what a step run at once gives.
#[test]
fn replays_follow_the_device_data() {
    let Some(gpu) = gpu() else { return };
    let d = dims(2, 4, 128, 128, 4);
    let mut rng = Rng::new(9);
    let layer = Layer::random(d, &mut rng);
    let prompt = Inputs::random(&d, 7, &mut rng);
    let (mut eager, mut replayed) = (prepared(&gpu, &layer, &prompt, 2), prepared(&gpu, &layer, &prompt, 2));
    let empty = Inputs::random(&d, 8, &mut rng);
    let call = replayed.call(8, &empty);
    let op = replayed.op(&call, Profile::Step, &[at(0, 0, 0, 0), at(0, 0, 0, 0)]);
    let table = op.batch.table.clone();
    let step = replayed.side.replay(|r| r.gdn_mix(op));
    let rounds = [
        [at(0, 7, 0, 4), at(1, 7, 4, 4)],
        [Segment { fold: 3, bank: 1, ..at(0, 10, 1, 2) }, Segment { fold: 4, bank: 1, ..at(1, 11, 3, 5) }],
        [Segment { fold: 0, bank: 1, ..at(1, 11, 0, 4) }, Segment { fold: 2, bank: 0, ..at(0, 12, 4, 1) }],
    ];
    for segments in rounds {
        let inputs = Inputs::random(&d, 8, &mut rng);
        let expected = eager.step(8, &segments, &inputs);
        let fresh = replayed.call(8, &inputs);
        let words: Vec<i32> = segments.iter().flat_map(|s| s.to_words()).collect();
        let side = &mut replayed.side;
        side.backend.upload(&mut side.queue, &table, bytemuck::cast_slice(&words)).unwrap();
        for (from, to) in [(&fresh.qkv, &call.qkv), (&fresh.z, &call.z), (&fresh.a, &call.a), (&fresh.b, &call.b)] {
            let bytes = side.bytes(from);
            side.backend.upload(&mut side.queue, to, &bytes).unwrap();
        }
        side.backend.replay(&mut side.queue, &step).unwrap();
        let got = side.values(&call.output);
        for s in segments {
            let part = s.row as usize * d.values()..(s.row + s.len) as usize * d.values();
            same(&format!("{s:?}"), &bits(&got[part.clone()]), &bits(&expected[part]));
        }
        for slot in 0..2 {
            assert_eq!(replayed.slot_bits(slot), eager.slot_bits(slot));
        }
    }
}

/// Segments that no correct program writes are typed errors and change no state.
#[test]
fn bad_segments_are_refused() {
    let Some(gpu) = gpu() else { return };
    let d = dims(1, 2, 16, 16, 4);
    let mut rng = Rng::new(1);
    let layer = Layer::random(d, &mut rng);
    let inputs = Inputs::random(&d, 5, &mut rng);
    let good = Segment { slot: 1, start: 8, row: 0, len: 2, fold: 2, bank: 1 };
    let bad = [
        (Segment { slot: 2, ..good }, "sequence slot"),
        (Segment { slot: i32::MAX as u32, ..good }, "sequence slot"),
        (Segment { fold: 17, start: 20, ..good }, "folded columns"),
        (Segment { fold: i32::MAX as u32, start: i32::MAX as u32, ..good }, "folded columns"),
        (Segment { fold: 9, ..good }, "fold of a segment"),
        (Segment { len: 17, ..good }, "recorded columns"),
        (Segment { len: 21, ..good }, "rows of a segment"),
        (Segment { row: i32::MAX as u32, ..good }, "rows of a segment"),
        (Segment { bank: 2, ..good }, "bank of a segment"),
    ];
    for (segment, what) in bad {
        let mut net = Net::new(gpu.clone(), &layer, 2, WIDTH);
        for slot in 0..2 {
            net.prefill(5, &[at(slot, 0, 0, 5)], &inputs);
        }
        let before = (net.slot_bits(0), net.slot_bits(1));
        let call = net.call(20, &Inputs::random(&d, 20, &mut rng));
        let op = net.op(&call, Profile::Step, &[segment]);
        net.side.run(|r| r.gdn_mix(op));
        refused(&mut net, what);
        if what != "recorded columns" {
            let op = net.fold_op(20, &[segment]);
            net.side.run(|r| r.gdn_fold(op));
            refused(&mut net, what);
        }
        assert_eq!((net.slot_bits(0), net.slot_bits(1)), before, "{what}");
        net.side.check_guards();
    }
    // Without a record there is nothing to fold from.
    let mut net = Net::new(gpu, &layer, 1, WIDTH);
    let call = net.call(5, &inputs);
    let op = net.op(&call, Profile::Prefill, &[Segment { fold: 1, ..at(0, 3, 0, 5) }]);
    net.side.run(|r| r.gdn_mix(op));
    refused(&mut net, "fold of a segment");
}

/// The error that the next download reports.
#[track_caller]
fn refused(net: &mut Net<Cuda>, what: &str) {
    let side = &mut net.side;
    let error =
        side.backend.download(&mut side.queue, &net.record.gates, &mut gates_of(&net.record.gates)).unwrap_err();
    assert!(matches!(&error, Error::OutOfRange { what: w, .. } if *w == what), "{error} instead of {what}");
}

fn gates_of(view: &ninfer_core::View<Cuda>) -> Vec<u8> {
    vec![0; view.rows() * view.cols() * view.dtype().size()]
}

/// `exp(A_log)` overflows while softplus underflows, A_log = −∞, and log decays far below zero.
#[test]
fn extreme_gates() {
    let Some(gpu) = gpu() else { return };
    let d = dims(1, 4, 128, 128, 4);
    let mut rng = Rng::new(3);
    let layer = Layer {
        a_log: vec![100.0, f32::NEG_INFINITY, f32::INFINITY, 0.0],
        dt_bias: vec![0.0; 4],
        gate: OutputGate::Sigmoid,
        ..Layer::random(d, &mut rng)
    };
    for (a, decays) in [(-200.0, [1.0, 1.0, 1.0, 1.0]), (5.0, [0.0, 1.0, 0.0, 0.006_692_851])] {
        let mut inputs = Inputs::random(&d, 3, &mut rng);
        inputs.a.fill(a);
        inputs.b = [100.0, -100.0, f32::INFINITY, f32::NEG_INFINITY].repeat(3);
        let mut net = Net::new(gpu.clone(), &layer, 1, 3);
        let got = net.step(3, &[at(0, 0, 0, 3)], &inputs);
        assert!(got.iter().all(|x| x.is_finite()), "{a}");
        let recorded = net.record.gates.row_range(0..1).unwrap();
        let gates = net.side.values(&recorded);
        for (got, expected) in gates[..4].iter().zip(decays) {
            assert!((got.exp() - expected).abs() < 1e-6, "{gates:?}");
        }
        assert_eq!(gates[4..], [1.0, 0.0, 1.0, 0.0]);
    }
}

/// Inputs that are columns of wider matrices, and a record for more slots than the state has.
#[test]
fn views_with_gaps() {
    let Some(gpu) = gpu() else { return };
    let d = dims(1, 2, 128, 128, 4);
    let mut rng = Rng::new(4);
    let layer = Layer::random(d, &mut rng);
    let inputs = Inputs::random(&d, 5, &mut rng);
    let mut net = Net::new(gpu, &layer, 2, WIDTH);
    let plain = net.step(5, &[at(0, 0, 0, 5)], &inputs);
    let mut call = net.call(5, &inputs);
    for (view, values, width) in [
        (&mut call.qkv, &inputs.qkv, d.channels()),
        (&mut call.z, &inputs.z, d.values()),
        (&mut call.a, &inputs.a, 2),
        (&mut call.b, &inputs.b, 2),
    ] {
        let wide: Vec<f32> =
            values.chunks(width).flat_map(|row| [&[f32::NAN; 3], row, &[f32::NAN; 2]].concat()).collect();
        *view = net.side.acts(5, width + 5, &wide).col_range(3..3 + width).unwrap();
    }
    let output = net.side.poisoned(DType::Bf16, 5, d.values() + 7);
    call.output = output.col_range(1..1 + d.values()).unwrap();
    let op = net.op(&call, Profile::Step, &[at(1, 0, 0, 5)]);
    net.side.run(|r| r.gdn_mix(op));
    let got: Vec<u16> = net.side.read(&output);
    for (t, row) in got.chunks(d.values() + 7).enumerate() {
        let expected: Vec<u16> =
            plain[t * d.values()..][..d.values()].iter().map(|x| half::bf16::from_f32(*x).to_bits()).collect();
        same("row", &row[1..1 + d.values()], &expected);
        assert!(row[..1].iter().chain(&row[1 + d.values()..]).all(|&x| x == 0xffff), "between the rows");
    }
}

/// Sizes without a kernel, and states with gaps, are errors before anything runs.
#[test]
fn what_cannot_run_is_refused() {
    let Some(gpu) = gpu() else { return };
    let mut rng = Rng::new(5);
    for d in [dims(1, 1, 257, 8, 4), dims(1, 1, 8, 8, 9)] {
        let layer = Layer::random(d, &mut rng);
        let mut net = Net::new(gpu.clone(), &layer, 1, 1);
        let call = net.call(1, &Inputs::random(&d, 1, &mut rng));
        let op = net.op(&call, Profile::Prefill, &[at(0, 0, 0, 1)]);
        let error = net.side.backend.gdn_mix(&mut net.side.queue, op).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    }
    let d = dims(1, 2, 16, 16, 4);
    let layer = Layer::random(d, &mut rng);
    let mut net = Net::new(gpu, &layer, 1, 1);
    let call = net.call(1, &Inputs::random(&d, 1, &mut rng));
    let mut op = net.op(&call, Profile::Prefill, &[at(0, 0, 0, 1)]);
    op.state.matrix = net.side.poisoned(DType::F32, 32, 17).col_range(0..16).unwrap();
    let error = net.side.backend.gdn_mix(&mut net.side.queue, op).unwrap_err();
    assert!(matches!(&error, Error::Shape { expected, .. } if expected == "rows without gaps"), "{error}");
}
