//! Corners of the delta rule that were reported as bugs elsewhere.

use ninfer_core::segment::Profile;

use super::close::{GOLDEN, close, same_bits};
use super::gdn::{Inputs, Net, at, dims, oracle, results_close, state_close};
use super::lab::Lab;
use super::oracle::gdn::{Layer, State};
use super::oracle::wide;
use super::rng::Rng;

/// `a` for which a layer with `A_log` = 0 and `dt_bias` = 0 has the log decay `−rate`: the inverse of softplus.
fn decay(rate: f64) -> f32 {
    (if rate > 30.0 { rate } else { rate.exp_m1().ln() }) as f32
}

/// P15: log decays of −30 for 64 tokens, and a mixture of none and −200, against the sequential oracle.
#[test]
fn strong_decay_makes_no_nan() {
    let d = dims(1, 2, 32, 32, 4);
    let mut rng = Rng::new(1);
    let layer = Layer { a_log: vec![0.0; 2], dt_bias: vec![0.0; 2], ..Layer::random(d, &mut rng) };
    for rates in [vec![30.0], vec![30.0, 0.1, 200.0, 1e-6]] {
        let mut inputs = Inputs::random(&d, 64, &mut rng);
        inputs.a = (0..128).map(|i| decay(rates[i % rates.len()])).collect();
        let mut lab = Lab::cpu();
        let net = Net::new(&mut lab, layer.clone(), 1, 1);
        let got = net.prefill(&mut lab, 64, &[at(0, 0, 0, 64)], &inputs);
        let mut state = State::zero(&d);
        results_close("decay", &got, &oracle(&layer, &mut state, &inputs, 0..64));
        state_close("decay", &net.slot(&mut lab, 0), &state, GOLDEN);
    }
}

/// P12: a state of 1e5·I and a query of equal features read out a vector far beyond the range of f16; it stays exact up to
/// the gated norm, and finite behind it.
#[test]
fn large_states_stay_finite() {
    let d = dims(1, 1, 128, 128, 4);
    let mut rng = Rng::new(2);
    let layer = Layer { a_log: vec![f32::NEG_INFINITY], ..Layer::random(d, &mut rng) };
    let mut inputs = Inputs::random(&d, 1, &mut rng);
    inputs.qkv[..128].fill(1.0);
    let mut matrix = vec![0.0f32; 128 * 128];
    (0..128).for_each(|i| matrix[i * 129] = 1e5);
    let window = vec![1.0f32; d.channels() * 3];
    for (profile, record) in [(Profile::Step, true), (Profile::Prefill, false)] {
        let mut lab = Lab::cpu();
        let net = Net::new(&mut lab, layer.clone(), 1, 2);
        net.set_slot(&mut lab, 0, &window, &matrix);
        let (op, output) = net.op(&mut lab, (profile, record), 1, &[at(0, 9, 0, 1)], &inputs);
        lab.run(|r| r.gdn_mix(op));
        let mut state = State { window: wide(&window), matrix: wide(&matrix) };
        let expected: Vec<f64> = oracle(&layer, &mut state, &inputs, 0..1).iter().map(|r| r.value).collect();
        assert!(expected.iter().any(|y| y.abs() > 0.1));
        // The norm divides by the size of the read-out, so the error is relative to results of order 1.
        close("read-out", &lab.read::<f32>(&output), &expected, GOLDEN);
    }
}

/// Gates recorded by one step of a layer with one key head.
fn gates(a_log: &[f32], dt_bias: f32, a: f32) -> Vec<f32> {
    let heads = a_log.len();
    let d = dims(1, heads, 4, 4, 4);
    let mut rng = Rng::new(3);
    let layer = Layer { a_log: a_log.to_vec(), dt_bias: vec![dt_bias; heads], ..Layer::random(d, &mut rng) };
    let mut inputs = Inputs::random(&d, 1, &mut rng);
    inputs.a = vec![a; heads];
    let mut lab = Lab::cpu();
    let net = Net::new(&mut lab, layer, 1, 1);
    let got = net.step(&mut lab, 1, &[at(0, 0, 0, 1)], &inputs);
    assert!(got.iter().all(|x| x.is_finite()), "{got:?}");
    let recorded = lab.read::<f32>(&net.gates);
    recorded[..heads].iter().map(|g| g.exp()).collect()
}

/// P13: `exp(A_log)` overflows while softplus underflows; their product must not be ∞ · 0.
#[test]
fn overflowing_rate_times_vanishing_softplus_is_no_decay() {
    assert_eq!(gates(&[100.0], 0.0, -200.0), [1.0]);
    assert_eq!(gates(&[100.0, 1e30, f32::INFINITY], 0.0, -200.0), [1.0; 3]);
    // And where softplus does not vanish, such a head forgets everything.
    assert_eq!(gates(&[100.0], 0.0, 5.0), [0.0]);
}

/// P14: `A_log` = −∞ is a head that never decays.
#[test]
fn minus_infinity_is_no_decay() {
    for x in [-3.0f32, 0.0, 2.5, 40.0] {
        let got = gates(&[f32::NEG_INFINITY, 0.0], 0.0, x);
        assert_eq!(got[0], 1.0);
        let expected = (-f64::from(x).exp().ln_1p()).exp();
        assert!((f64::from(got[1]) - expected).abs() < 1e-6, "{x}: {} instead of {expected}", got[1]);
    }
}

/// P17: a verification of `T` columns gives the bits of `T` decode steps, for every `T` up to 8.
#[test]
fn verification_equals_decoding() {
    for d in [dims(2, 4, 32, 32, 4), dims(1, 3, 16, 24, 4)] {
        for columns in 1..=8u32 {
            let mut rng = Rng::new(u64::from(columns));
            let layer = Layer::random(d, &mut rng);
            let inputs = Inputs::random(&d, columns as usize, &mut rng);
            let prompt = Inputs::random(&d, 5, &mut rng);
            let mut lab = Lab::cpu();
            let net = Net::new(&mut lab, layer, 2, 8);
            net.prefill(&mut lab, 5, &[at(0, 0, 0, 5)], &prompt);
            net.prefill(&mut lab, 5, &[at(1, 0, 0, 5)], &prompt);
            let verified = net.step(&mut lab, columns as usize, &[at(0, 5, 0, columns)], &inputs);
            let mut decoded = Vec::new();
            for t in 0..columns {
                let token = inputs.placed(&d, 1, &[(t as usize, 0)]);
                let mut segment = at(1, 5 + t, 0, 1);
                (segment.fold, segment.bank) = (u32::from(t > 0), t % 2);
                decoded.extend(net.step(&mut lab, 1, &[segment], &token));
            }
            same_bits(&format!("{columns} columns"), &verified, &decoded);
        }
    }
}

/// β of 0 and 1, and keys and queries of zeros: no division by their length.
#[test]
fn zero_rows_and_closed_gates() {
    let d = dims(1, 2, 16, 16, 4);
    let mut rng = Rng::new(4);
    let layer = Layer::random(d, &mut rng);
    let mut inputs = Inputs::random(&d, 12, &mut rng);
    for t in 2..8 {
        inputs.qkv[t * d.channels()..][..2 * d.keys()].fill(0.0);
    }
    for (i, b) in inputs.b.iter_mut().enumerate() {
        *b = [100.0, -100.0, f32::INFINITY, f32::NEG_INFINITY, 0.5][i % 5];
    }
    let mut lab = Lab::cpu();
    let net = Net::new(&mut lab, layer, 1, 1);
    let got = net.prefill(&mut lab, 12, &[at(0, 0, 0, 12)], &inputs);
    let mut state = State::zero(&d);
    results_close("zeros", &got, &oracle(&net.layer, &mut state, &inputs, 0..12));
    state_close("zeros", &net.slot(&mut lab, 0), &state, GOLDEN);
}
