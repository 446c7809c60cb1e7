//! Prompts of Gated DeltaNet in chunks of 64 tokens: against the CPU backend, and to the last bit over splits and segments.

use ninfer_core::segment::Profile;
use ninfer_core::shape::GdnShape;

use super::gdn::{CHUNK_STATE, Inputs, Layer, Net, PROMPT, at, bits, dims};
use super::lab::{exact, gpu, near, same};
use super::rng::Rng;

fn ratio(ratio: usize) -> GdnShape {
    dims(1, ratio, 128, 128, 4)
}

/// Rows from position `start` on, behind a random state, on both backends.
fn compare(layer: &Layer, start: u32, rows: usize, rng: &mut Rng) {
    let Some(gpu) = gpu() else { return };
    let d = layer.dims;
    let inputs = Inputs::random(&d, rows, rng);
    let segments = [at(1, start, 0, rows as u32)];
    let mut cpu = Net::new(ninfer_kernels::cpu::Cpu::new(), layer, 2, 1);
    let mut cuda = Net::new(gpu, layer, 2, 1);
    if start > 0 {
        let window = exact(rng.values(d.channels() * 3, 1.0));
        let matrix = rng.values(d.values() * d.key_dim, 0.3);
        cpu.set_slot(1, &window, &matrix);
        cuda.set_slot(1, &window, &matrix);
    }
    let what = format!("{d:?}, {rows} rows from {start} on");
    let expected = cpu.prefill(rows, &segments, &inputs);
    near(&what, &cuda.prefill(rows, &segments, &inputs), &expected, PROMPT);
    let ((got_window, got), (window, matrix)) = (cuda.slot(1), cpu.slot(1));
    same(&format!("{what}: window"), &got_window, &window);
    near(&format!("{what}: state"), &got, &matrix, CHUNK_STATE);
    assert!(cuda.slot(0).1.iter().all(|x| x.is_nan()), "{what}: slot 0 was touched");
}

#[test]
fn chunks_are_the_cpu_operation() {
    for heads in 1..=4 {
        let mut rng = Rng::new(heads as u64);
        let layer = Layer::random(ratio(heads), &mut rng);
        for start in [0, 5, 62, 64, 100] {
            for rows in (1..=17).chain([31, 32, 33, 63, 64, 65, 127, 128, 129]) {
                compare(&layer, start, rows, &mut rng);
            }
        }
        compare(&layer, 5, 1000, &mut rng);
    }
    let mut rng = Rng::new(8);
    let layer = Layer::random(dims(16, 32, 128, 128, 4), &mut rng);
    compare(&layer, 0, 200, &mut rng);
    let layer = Layer::random(dims(16, 48, 128, 128, 4), &mut rng);
    compare(&layer, 100, 70, &mut rng);
}

/// What is rounded does not add up over many chunks, even where nothing decays.
#[test]
fn errors_do_not_grow() {
    let mut rng = Rng::new(4096);
    for a_log in [-2.0, -9.0, f32::NEG_INFINITY] {
        let layer = Layer { a_log: vec![a_log; 2], ..Layer::random(ratio(2), &mut rng) };
        compare(&layer, 0, 4096, &mut rng);
    }
}

/// Decays that leave nothing, those that leave everything, and both in turn.
#[test]
fn extreme_gates() {
    let mut rng = Rng::new(12);
    for a_log in [[f32::NEG_INFINITY, 200.0], [4.0, 6.0], [-60.0, 2.0]] {
        let random = Layer::random(ratio(2), &mut rng);
        for dt_bias in [[0.0, 0.0], [-30.0, 30.0]] {
            let layer = Layer { a_log: a_log.to_vec(), dt_bias: dt_bias.to_vec(), ..random.clone() };
            compare(&layer, 0, 150, &mut rng);
            compare(&layer, 77, 150, &mut rng);
        }
    }
}

/// Results and state depend on the tokens alone where a prompt is split at multiples of 64, wherever it begins.
#[test]
fn prompts_may_be_split_between_chunks() {
    let Some(gpu) = gpu() else { return };
    let d = ratio(3);
    let mut rng = Rng::new(9);
    let layer = Layer::random(d, &mut rng);
    let rows = 300;
    let inputs = Inputs::random(&d, rows, &mut rng);
    let window = exact(rng.values(d.channels() * 3, 1.0));
    let matrix = rng.values(d.values() * d.key_dim, 0.3);
    for start in [0, 5, 62, 64] {
        let mut net = Net::new(gpu.clone(), &layer, 1, 1);
        net.set_slot(0, &window, &matrix);
        let whole = net.prefill(rows, &[at(0, start, 0, rows as u32)], &inputs);
        let end = net.slot_bits(0);
        for position in [64, 128, 192, 256] {
            let split = (position - start) as usize;
            if split == 0 {
                continue;
            }
            net.set_slot(0, &window, &matrix);
            let mut parts = Vec::new();
            for range in [0..split, split..rows] {
                let segment = at(0, start + range.start as u32, 0, range.len() as u32);
                parts.extend(net.prefill(range.len(), &[segment], &inputs.range(&d, range)));
            }
            same(&format!("from {start}, split at {position}"), &bits(&parts), &bits(&whole));
            assert_eq!(net.slot_bits(0), end, "from {start}, split at {position}");
        }
    }
}

/// Several prompts at different positions and padding rows of NaN in one call, run and replayed, give what each gives
/// alone; padding rows become zeros.
#[test]
fn segments_do_not_depend_on_their_neighbours() {
    let Some(gpu) = gpu() else { return };
    let d = dims(2, 4, 128, 128, 4);
    let mut rng = Rng::new(5);
    let layer = Layer::random(d, &mut rng);
    let (lens, starts) = ([70usize, 0, 1, 130, 3, 64], [0u32, 9, 63, 5, 62, 128]);
    let inputs = Inputs::random(&d, lens.iter().sum(), &mut rng);
    let mut alone = Net::new(gpu.clone(), &layer, 6, 1);
    let mut together = [Net::new(gpu.clone(), &layer, 6, 1), Net::new(gpu.clone(), &layer, 6, 1)];
    let (mut segments, mut places, mut expected, mut from, mut row) = (Vec::new(), Vec::new(), Vec::new(), 0, 3);
    for (slot, (len, start)) in lens.into_iter().zip(starts).enumerate() {
        let window = exact(rng.values(d.channels() * 3, 1.0));
        let matrix = rng.values(d.values() * d.key_dim, 0.3);
        for net in together.iter_mut().chain([&mut alone]) {
            net.set_slot(slot, &window, &matrix);
        }
        segments.push(at(slot as u32, start, row as u32, len as u32));
        places.extend((0..len).map(|i| (from + i, row + i)));
        if len > 0 {
            let own = at(slot as u32, start, 0, len as u32);
            expected.push((row, alone.prefill(len, &[own], &inputs.range(&d, from..from + len))));
        }
        from += len;
        row += len + 2;
    }
    // Not in the order of their rows.
    segments.swap(0, 3);
    let placed = inputs.placed(&d, row, &places);
    let [run, replayed] = &mut together;
    let got = run.prefill(row, &segments, &placed);
    for (row, values) in expected {
        same(&format!("rows from {row}"), &bits(&got[row * d.values()..][..values.len()]), &bits(&values));
    }
    assert!(got[..3 * d.values()].iter().all(|x| *x == 0.0));
    let call = replayed.call(row, &placed);
    let op = replayed.op(&call, Profile::Prefill, &segments);
    replayed.side.replay(|r| r.gdn_mix(op));
    same("replay", &bits(&replayed.side.values(&call.output)), &bits(&got));
    replayed.side.check_guards();
    for slot in 0..6 {
        assert_eq!(run.slot_bits(slot), alone.slot_bits(slot), "slot {slot}");
        assert_eq!(replayed.slot_bits(slot), alone.slot_bits(slot), "replay, slot {slot}");
    }
}

/// A prompt that was refused leaves every state alone.
#[test]
fn faults_are_reported() {
    let Some(gpu) = gpu() else { return };
    let d = ratio(2);
    let mut rng = Rng::new(2);
    let layer = Layer::random(d, &mut rng);
    let inputs = Inputs::random(&d, 70, &mut rng);
    for segment in [at(2, 0, 0, 70), at(1, 0, 1, 70), at(1, 0, 0, 71)] {
        let mut net = Net::new(gpu.clone(), &layer, 2, 1);
        let before = net.slot_bits(1);
        let call = net.call(70, &inputs);
        let op = net.op(&call, Profile::Prefill, &[segment]);
        net.side.run(|r| r.gdn_mix(op));
        let mut out = vec![0; 70 * d.values() * 2];
        let result = ninfer_core::Backend::download(&net.side.backend, &mut net.side.queue, &call.output, &mut out);
        assert!(result.is_err(), "{segment:?}");
        assert_eq!(net.slot_bits(1), before, "{segment:?}");
    }
}
