use std::path::Path;

use safetensors::SafeTensors;

use super::*;
use crate::cpu::simd::Isa;

/// Tolerance of the golden tensors: their own f32 implementations are within 1.5e-6 of f64 on values of this size.
const GOLDEN: f32 = 1e-5;

struct Fixture(Vec<u8>);

impl Fixture {
    fn read(name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        Self(std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
    }

    fn shape(&self, name: &str) -> Vec<usize> {
        SafeTensors::deserialize(&self.0).unwrap().tensor(name).unwrap().shape().to_vec()
    }

    fn get(&self, name: &str) -> Option<Vec<f32>> {
        let tensors = SafeTensors::deserialize(&self.0).unwrap();
        let data = tensors.tensor(name).ok()?.data().as_chunks::<4>().0;
        Some(data.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }
}

/// Both copies of each body, where the processor has both.
fn isas() -> Vec<Isa> {
    let mut list = vec![Isa::Base];
    if Isa::detect() != Isa::Base {
        list.push(Isa::detect());
    }
    list
}

#[track_caller]
fn close(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len());
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!((g - e).abs() <= GOLDEN, "{what}[{i}]: {g} instead of {e}");
    }
}

/// Read-outs and states of the rule; the state is the same bits without a read-out.
#[test]
fn rule_matches_golden_read_outs() {
    for case in ["t1", "t1_state", "t5_state", "t37", "t65", "t150_asym", "t66_128", "extreme"] {
        let f = Fixture::read(&format!("gated_delta_rule.{case}.safetensors"));
        let get = |name: &str| f.get(name).unwrap();
        let (key_shape, value_shape) = (f.shape("k"), f.shape("v"));
        let (rows, hk, dk) = (key_shape[0], key_shape[1], key_shape[2]);
        let (hv, dv) = (value_shape[1], value_shape[2]);
        let (q, k, v, g, beta) = (get("q"), get("k"), get("v"), get("g"), get("beta"));
        let start = f.get("state_in").unwrap_or_else(|| vec![0.0; hv * dk * dv]);
        for isa in isas() {
            let (mut read, mut silent) = (start.clone(), start.clone());
            let mut out = vec![0.0; rows * hv * dv];
            let mut u = vec![f32::NAN; dv];
            for t in 0..rows {
                for h in 0..hv {
                    let kh = h / (hv / hk);
                    let head = |x: &[f32], scale: f32| {
                        let mut x = x[(t * hk + kh) * dk..][..dk].to_vec();
                        l2_normalise(isa, &mut x, 1e-6, scale);
                        x
                    };
                    let (q, k) = (head(&q, 1.0 / (dk as f32).sqrt()), head(&k, 1.0));
                    let v = &v[(t * hv + h) * dv..][..dv];
                    let gates = [g[t * hv + h], beta[t * hv + h]];
                    let own = h * dk * dv..(h + 1) * dk * dv;
                    let out = &mut out[(t * hv + h) * dv..][..dv];
                    delta_step(isa, &mut read[own.clone()], &k, v, gates, &mut u, Some((&q, out)));
                    delta_step(isa, &mut silent[own], &k, v, gates, &mut u, None);
                }
            }
            close(&format!("{case}: read-out"), &out, &get("out_f64"));
            close(&format!("{case}: state"), &read, &get("state_f64"));
            assert!(
                read.iter().zip(&silent).all(|(a, b)| a.to_bits() == b.to_bits()),
                "{case}: state without read-out"
            );
        }
    }
}

#[test]
fn head_norms_match_golden() {
    let f = Fixture::read("norms.safetensors");
    for n in [64usize, 96, 128, 256] {
        let get = |name: &str| f.get(&format!("n{n}.{name}")).unwrap();
        let (x, z, gain) = (get("x"), get("z"), get("weight_gated"));
        for isa in isas() {
            let mut l2 = x.clone();
            l2.chunks_mut(n).for_each(|row| l2_normalise(isa, row, 1e-6, 1.0));
            close("l2", &l2, &get("y_l2norm"));
            let mut gated = x.clone();
            for (row, z) in gated.chunks_mut(n).zip(z.chunks(n)) {
                gated_norm(isa, row, z, &gain, 1e-6, OutputGate::Silu);
            }
            close("gated", &gated, &get("y_gated"));
        }
    }
}

#[test]
fn softplus_is_the_identity_above_20() {
    assert_eq!(softplus(20.5), 20.5);
    assert_eq!(softplus(1e30), 1e30);
    assert_eq!(softplus(-200.0), 0.0);
    assert_eq!(softplus(0.0), std::f32::consts::LN_2);
    // On both sides of the switch.
    assert!((softplus(20.0) - softplus(20.0001)).abs() < 1e-3);
}
