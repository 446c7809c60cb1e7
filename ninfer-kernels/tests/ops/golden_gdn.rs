//! Convolution, gates, delta rule and the whole Gated DeltaNet module against golden tensors.

use ninfer_core::ops::{OutputGate, Project};
use ninfer_core::segment::{Profile, Segment};

use super::close::{GOLDEN, close, close_by};
use super::fixture::Fixture;
use super::gdn::{Inputs, Net, at, dims};
use super::lab::Lab;
use super::oracle::gdn::Layer;
use super::oracle::wide;
use super::rng::Rng;
use super::stored::Stored;

/// The convolution, seen through the record of a step. Only keys and values are recorded, so a second pass turns the
/// channels by the four that hold the query.
#[test]
fn convolution() {
    let f = Fixture::read("causal_conv1d.safetensors");
    let d = dims(1, 1, 4, 16, 4);
    let turn = |x: &[f32], width: usize, by: usize| -> Vec<f32> {
        // Channel c of the operation is channel (c + by) mod 24 of the fixture.
        (0..x.len()).map(|i| x[((i / width) + by) % 24 * width + i % width]).collect()
    };
    let turn_rows =
        |x: &[f32], by: usize| -> Vec<f32> { (0..x.len()).map(|i| x[i / 24 * 24 + (i % 24 + by) % 24]).collect() };
    for (rows, continued) in [1usize, 2, 3, 4, 37].into_iter().flat_map(|t| [(t, false), (t, true)]) {
        for by in [0, 4] {
            let suffix = if continued { "continued" } else { "fresh" };
            let get = |name: &str| f.f32(&format!("t{rows}.{name}"));
            let mut rng = Rng::new(1);
            let layer = Layer { conv: turn(&f.f32("weight"), 4, by), ..Layer::random(d, &mut rng) };
            let inputs = Inputs { qkv: turn_rows(&get("x"), by), ..Inputs::random(&d, rows, &mut rng) };
            let mut lab = Lab::cpu();
            let net = Net::new(&mut lab, layer, 1, 37);
            let start = if continued { 9 } else { 0 };
            if continued {
                net.set_slot(&mut lab, 0, &turn(&f.f32("state_in"), 3, by), &[0.0; 64]);
            }
            net.step(&mut lab, rows, &[at(0, start, 0, rows as u32)], &inputs);
            let y = turn_rows(&get(&format!("y_{suffix}")), by);
            let recorded = lab.read::<f32>(&net.key_value);
            for t in 0..rows {
                close(&format!("t{rows} {suffix}"), &recorded[t * 20..][..20], &wide(&y[t * 24 + 4..][..20]), GOLDEN);
            }
            // The window moves when the columns are folded, and just so in a prompt chunk.
            let state = wide(&turn(&get(&format!("state_{suffix}")), 3, by));
            let chunk = Net::new(&mut lab, net.layer.clone(), 1, 1);
            if continued {
                chunk.set_slot(&mut lab, 0, &turn(&f.f32("state_in"), 3, by), &[0.0; 64]);
            }
            chunk.prefill(&mut lab, rows, &[at(0, start, 0, rows as u32)], &inputs);
            close("window", &chunk.slot(&mut lab, 0).0, &state, 0.0);
            net.fold(&mut lab, &[Segment { fold: rows as u32, bank: 1, ..at(0, start + rows as u32, 0, 0) }]);
            close("folded window", &net.slot(&mut lab, 0).0, &state, 0.0);
        }
    }
}

#[test]
fn gates() {
    let f = Fixture::read("gdn_gates.safetensors");
    let d = dims(1, 6, 1, 1, 2);
    let mut rng = Rng::new(2);
    let layer = Layer { a_log: f.f32("A_log"), dt_bias: f.f32("dt_bias"), ..Layer::random(d, &mut rng) };
    let inputs = Inputs { a: f.f32("a"), b: f.f32("b"), ..Inputs::random(&d, 40, &mut rng) };
    let mut lab = Lab::cpu();
    let net = Net::new(&mut lab, layer, 1, 40);
    net.step(&mut lab, 40, &[at(0, 0, 0, 40)], &inputs);
    let recorded = lab.read::<f32>(&net.gates);
    let pick =
        |first: usize| -> Vec<f32> { recorded[..480].chunks(12).flat_map(|r| r[first..first + 6].to_vec()).collect() };
    for (name, got) in [("g", pick(0)), ("beta", pick(6))] {
        for expected in [wide(&f.f32(name)), wide(&f.f32(&format!("{name}_f64")))] {
            // Relative 1e-6, and where softplus is an exponential (a = −40) what the rounding of a + dt_bias to f32, half a
            // unit of 40, does to it. Values below the smallest normal number have no relative precision.
            close_by(name, &got, &expected, |i| (if i / 6 == 1 { 3e-6 } else { 1e-6 }) * expected[i].abs() + 1e-37);
        }
    }
}

/// The state that the rule leaves, through a record that holds raw keys, values and gates.
#[test]
fn delta_rule_states() {
    for case in ["t1", "t1_state", "t5_state", "t37", "t65", "t150_asym", "t66_128", "extreme"] {
        let f = Fixture::read(&format!("gated_delta_rule.{case}.safetensors"));
        let (k, v) = (f.shape("k"), f.shape("v"));
        let (rows, d) = (k[0], dims(k[1], v[1], k[2], v[2], 2));
        let mut rng = Rng::new(3);
        let mut lab = Lab::cpu();
        let net = Net::new(&mut lab, Layer::random(d, &mut rng), 1, rows);
        let start = if f.has("state_in") { rows + 1 } else { rows };
        if f.has("state_in") {
            net.set_slot(&mut lab, 0, &vec![0.0; d.channels()], &f.f32("state_in"));
        }
        let interleave = |a: &[f32], b: &[f32]| -> Vec<f32> {
            let (wa, wb) = (a.len() / rows, b.len() / rows);
            let mut bank: Vec<f32> =
                (0..rows).flat_map(|t| [&a[t * wa..][..wa], &b[t * wb..][..wb]].concat()).collect();
            // The other bank is never read.
            bank.resize(2 * rows * (wa + wb), f32::NAN);
            bank
        };
        lab.fill(&net.key_value, &interleave(&f.f32("k"), &f.f32("v")));
        lab.fill(&net.gates, &interleave(&f.f32("g"), &f.f32("beta")));
        lab.fill(&net.columns, &vec![0.0f32; 2 * rows * d.channels()]);
        net.fold(&mut lab, &[Segment { fold: rows as u32, bank: 1, ..at(0, start as u32, 0, 0) }]);
        close(case, &net.slot(&mut lab, 0).1, &wide(&f.f32("state_f64")), GOLDEN);
    }
}

#[test]
fn module() {
    let f = Fixture::read("gated_delta_net.safetensors");
    let (d, h) = (dims(1, 2, 128, 128, 4), 64);
    let get = |name: &str| f.f32(&format!("weight.{name}"));
    let layer = Layer {
        dims: d,
        conv: get("conv1d.weight"),
        a_log: get("A_log"),
        dt_bias: get("dt_bias"),
        gain: get("norm.weight"),
        eps: 1e-6,
        gate: OutputGate::Silu,
    };
    let widths = [d.channels(), d.values(), 2, 2];
    let names = ["qkv", "z", "a", "b"];
    let stored: Vec<Stored> =
        names.iter().zip(widths).map(|(n, w)| Stored::plain(w, h, &get(&format!("in_proj_{n}.weight")))).collect();
    let out = Stored::plain(h, d.values(), &get("out_proj.weight"));
    let x = f.f32("x");
    // 21 rows of prompt, then two steps; the second step folds the first, and a fold follows the second.
    let mut lab = Lab::cpu();
    let weights: Vec<_> = stored.iter().map(|s| lab.weight(&[s.packed()])).collect();
    let out = lab.weight(&[out.packed()]);
    let net = Net::new(&mut lab, layer, 1, 1);
    let mut got = Vec::new();
    for (start, rows, fold) in [(0, 21, 0), (21, 1, 0), (22, 1, 1)] {
        let profile = if start == 0 { Profile::Prefill } else { Profile::Step };
        let input = lab.input(rows, h, &x[start * h..][..rows * h]);
        let parts = widths.map(|n| lab.output::<f32>(rows, n));
        let y = lab.output::<f32>(rows, h);
        let segment = Segment { fold, bank: fold, ..at(0, start as u32, 0, rows as u32) };
        let batch = lab.batch(profile, rows, &[segment]);
        let blank = Inputs::default().placed(&d, rows, &[]);
        let (mut mix, mixed) = net.op(&mut lab, (profile, start > 0), rows, &[segment], &blank);
        (mix.qkv, mix.z, mix.a, mix.b) = (parts[0].v(), parts[1].v(), parts[2].v(), parts[3].v());
        lab.run(|r| {
            let outputs = weights.iter().cloned().zip(parts.iter().map(|p| p.v())).collect();
            r.project(Project { batch: batch.clone(), input: input.v(), norm: None, parts: outputs })?;
            r.gdn_mix(mix)?;
            r.project(Project { batch, input: mixed.v(), norm: None, parts: vec![(out.clone(), y.v())] })
        });
        got.extend(lab.read::<f32>(&y));
    }
    net.fold(&mut lab, &[Segment { fold: 1, ..at(0, 23, 0, 0) }]);
    close("module", &got, &wide(&f.f32("y_f64")), GOLDEN);
    let (window, matrix) = net.slot(&mut lab, 0);
    close("window", &window, &wide(&f.f32("conv")), GOLDEN);
    close("state", &matrix[..32 * 128], &wide(&f.f32("state")), GOLDEN);
}
