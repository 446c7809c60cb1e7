//! Record and fold: any accepted prefix of a round gives the bits of sequential decoding.

use ninfer_core::segment::{Profile, Segment};

use super::close::same_bits;
use super::gdn::{Inputs, Net, at, dims, sizes};
use super::lab::Lab;
use super::oracle::gdn::Layer;
use super::rng::Rng;

const WIDTH: usize = 6;

/// Decodes `rows` of `inputs` one at a time from position `start` on, each step folding the one before it; then folds the
/// last one. Gives the results and the state.
fn sequential(
    lab: &mut Lab,
    net: &Net,
    slot: u32,
    start: u32,
    inputs: &Inputs,
    rows: usize,
) -> (Vec<f32>, (Vec<f32>, Vec<f32>)) {
    let d = net.layer.dims;
    let mut results = Vec::new();
    for t in 0..rows {
        let token = inputs.placed(&d, 1, &[(t, 0)]);
        let segment = Segment { fold: u32::from(t > 0), bank: t as u32 % 2, ..at(slot, start + t as u32, 0, 1) };
        results.extend(net.step(lab, 1, &[segment], &token));
    }
    let last = Segment { fold: u32::from(rows > 0), bank: rows as u32 % 2, ..at(slot, start + rows as u32, 0, 0) };
    net.fold(lab, &[last]);
    let state = net.slot(lab, slot as usize);
    (results, state)
}

/// A layer with a prompt of seven tokens behind it, in slots 0 and 1.
fn prepared(lab: &mut Lab, layer: &Layer, prompt: &Inputs) -> Net {
    let net = Net::new(lab, layer.clone(), 2, WIDTH);
    for slot in 0..2 {
        net.prefill(lab, 7, &[at(slot, 0, 0, 7)], prompt);
    }
    net
}

/// P09, P17: after a round of `k + 1` columns of which `n` are committed, the state (window and matrix), what the round
/// itself returned, and what the next round returns are those of decoding one token at a time, to the last bit.
#[test]
fn every_accepted_prefix_equals_sequential_decoding() {
    for d in sizes() {
        for columns in [1, 2, 5, 6] {
            let mut rng = Rng::new((columns * 7 + d.value_dim) as u64);
            let layer = Layer::random(d, &mut rng);
            let prompt = Inputs::random(&d, 7, &mut rng);
            let round = Inputs::random(&d, columns, &mut rng);
            let next = Inputs::random(&d, 3, &mut rng);
            let width = d.values();
            for n in 0..=columns {
                let mut lab = Lab::cpu();
                let net = prepared(&mut lab, &layer, &prompt);
                let before = net.slot(&mut lab, 0);
                let drafted = Segment { bank: 1, ..at(0, 7, 0, columns as u32) };
                let got = net.step(&mut lab, columns, &[drafted], &round);
                assert_eq!(net.slot(&mut lab, 0), before, "an open round leaves committed state alone");

                // Slot 1 decodes the accepted tokens, then those of the next round.
                let (accepted, expected) = sequential(&mut lab, &net, 1, 7, &round, n);
                same_bits("the round", &got[..n * width], &accepted);
                let (after, _) = sequential(&mut lab, &net, 1, 7 + n as u32, &next, 3);

                // The next round of slot 0 folds first.
                let resumed = Segment { fold: n as u32, bank: 0, ..at(0, 7 + n as u32, 0, 3) };
                let fused = net.step(&mut lab, 3, &[resumed], &next);
                let what = format!("{d:?}: {n} of {columns}");
                same_bits(&what, &fused, &after);
                let (window, matrix) = net.slot(&mut lab, 0);
                same_bits(&format!("{what}: window"), &window, &expected.0);
                same_bits(&format!("{what}: matrix"), &matrix, &expected.1);
            }
        }
    }
}

/// The separate fold and the one in front of a step write the same bits.
#[test]
fn gdn_fold_equals_the_fused_fold() {
    let d = dims(2, 6, 32, 32, 4);
    let mut rng = Rng::new(3);
    let layer = Layer::random(d, &mut rng);
    let (prompt, round) = (Inputs::random(&d, 7, &mut rng), Inputs::random(&d, 5, &mut rng));
    for n in 0..=5 {
        let mut states = Vec::new();
        for fused in [false, true] {
            let mut lab = Lab::cpu();
            let net = prepared(&mut lab, &layer, &prompt);
            net.step(&mut lab, 5, &[at(0, 7, 0, 5)], &round);
            let segment = Segment { fold: n, bank: 1, ..at(0, 7 + n, 0, 1) };
            if fused {
                net.step(&mut lab, 1, &[segment], &round.placed(&d, 1, &[(0, 0)]));
            } else {
                net.fold(&mut lab, &[segment]);
            }
            states.push(net.slot(&mut lab, 0));
        }
        assert_eq!(states[0], states[1], "{n} columns");
    }
}

/// A fold of 0 changes nothing at all, also where the state was never written; other slots are not touched.
#[test]
fn fold_of_nothing_is_a_no_op() {
    let d = dims(1, 2, 16, 16, 4);
    let mut rng = Rng::new(4);
    let layer = Layer::random(d, &mut rng);
    let (prompt, round) = (Inputs::random(&d, 7, &mut rng), Inputs::random(&d, 5, &mut rng));
    let mut lab = Lab::cpu();
    let net = Net::new(&mut lab, layer, 3, WIDTH);
    for slot in 0..2 {
        net.prefill(&mut lab, 7, &[at(slot, 0, 0, 7)], &prompt);
    }
    net.step(&mut lab, 5, &[at(0, 7, 0, 5)], &round);
    let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    let before = (bits(lab.read(&net.window)), bits(lab.read(&net.matrix)));
    // The last one is how a row of a table that is not in use looks.
    net.fold(&mut lab, &[Segment { bank: 1, ..at(0, 7, 0, 0) }, at(2, 0, 0, 0), Segment::default()]);
    assert_eq!((bits(lab.read(&net.window)), bits(lab.read(&net.matrix))), before);
    net.fold(&mut lab, &[Segment { fold: 2, bank: 1, ..at(0, 9, 0, 0) }]);
    let after = (bits(lab.read(&net.window)), bits(lab.read(&net.matrix)));
    let (w, m) = (d.channels() * 3, d.values() * d.key_dim);
    assert!(after.0[..w] != before.0[..w] && after.1[..m] != before.1[..m]);
    assert!(after.0[w..] == before.0[w..] && after.1[m..] == before.1[m..]);
}

/// Dropping a round costs nothing: the next one starts from the same bytes, in the other bank or in the same one.
#[test]
fn a_dropped_round_leaves_no_trace() {
    let d = dims(1, 3, 16, 16, 4);
    let mut rng = Rng::new(6);
    let layer = Layer::random(d, &mut rng);
    let (prompt, dropped) = (Inputs::random(&d, 7, &mut rng), Inputs::random(&d, 6, &mut rng));
    let real = Inputs::random(&d, 4, &mut rng);
    let mut lab = Lab::cpu();
    let net = prepared(&mut lab, &layer, &prompt);
    let before = net.slot(&mut lab, 0);
    let clean = net.step(&mut lab, 4, &[at(1, 7, 0, 4)], &real);
    for bank in [0, 1, 1, 0] {
        net.step(&mut lab, 6, &[Segment { bank, ..at(0, 7, 0, 6) }], &dropped);
        assert_eq!(net.slot(&mut lab, 0), before);
        same_bits(
            "after a dropped round",
            &net.step(&mut lab, 4, &[Segment { bank, ..at(0, 7, 0, 4) }], &real),
            &clean,
        );
    }
}

/// A sequence that begins reads neither the state nor the record of whoever had its slot before: both are poison here.
#[test]
fn a_beginning_never_reads_old_state() {
    let d = dims(2, 2, 16, 24, 4);
    let mut rng = Rng::new(8);
    let layer = Layer::random(d, &mut rng);
    let (round, next) = (Inputs::random(&d, 5, &mut rng), Inputs::random(&d, 2, &mut rng));
    for n in 0..=5u32 {
        let mut lab = Lab::cpu();
        let net = Net::new(&mut lab, layer.clone(), 2, WIDTH);
        let got = net.step(&mut lab, 5, &[at(0, 0, 0, 5)], &round);
        assert!(got.iter().all(|x| x.is_finite()));
        // Committing n columns leaves a state whose base is still position 0: it is not read, whatever is there now.
        let (w, m) = (d.channels() * 3, d.values() * d.key_dim);
        net.set_slot(&mut lab, 0, &vec![f32::NAN; w], &vec![f32::NAN; m]);
        let after = net.step(&mut lab, 2, &[Segment { fold: n, bank: 1, ..at(0, n, 0, 2) }], &next);
        let (accepted, expected) = sequential(&mut lab, &net, 1, 0, &round, n as usize);
        same_bits("the round", &got[..accepted.len()], &accepted);
        let (plain, _) = sequential(&mut lab, &net, 1, n, &next, 2);
        same_bits("the next round", &after, &plain);
        if n > 0 {
            assert_eq!(net.slot(&mut lab, 0), expected);
        }
    }
}

/// A prompt chunk goes on from a state that was folded, and a snapshot taken there is that of the sequence alone.
#[test]
fn prompts_continue_after_a_fold() {
    let d = dims(1, 2, 32, 16, 4);
    let mut rng = Rng::new(12);
    let layer = Layer::random(d, &mut rng);
    let (prompt, round) = (Inputs::random(&d, 7, &mut rng), Inputs::random(&d, 4, &mut rng));
    let more = Inputs::random(&d, 9, &mut rng);
    let mut lab = Lab::cpu();
    let net = prepared(&mut lab, &layer, &prompt);
    net.step(&mut lab, 4, &[at(0, 7, 0, 4)], &round);
    net.fold(&mut lab, &[Segment { fold: 3, bank: 1, ..at(0, 10, 0, 0) }]);
    sequential(&mut lab, &net, 1, 7, &round, 3);
    let (op, output) = net.op(&mut lab, (Profile::Prefill, false), 9, &[at(0, 10, 0, 9)], &more);
    lab.run(|r| r.gdn_mix(op));
    let folded = lab.read::<f32>(&output);
    same_bits("chunk", &net.prefill(&mut lab, 9, &[at(1, 10, 0, 9)], &more), &folded);
    assert_eq!(net.slot(&mut lab, 0), net.slot(&mut lab, 1));
}
