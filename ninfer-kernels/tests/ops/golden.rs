//! Norms, rotation, attention, experts against golden tensors.

use ninfer_core::ops::{Attend, Experts, KvLayer, Norm, Project, RmsNorm, RopeAppend, RopeTable, Route};
use ninfer_core::segment::{PAGE_TOKENS, Profile};

use super::close::{GOLDEN, close, close_by};
use super::fixture::Fixture;
use super::lab::Lab;
use super::oracle::{self, wide};
use super::stored::Stored;

/// A norm that changes nothing: `x · rsqrt(mean(x²) + 1e12) · 1e6`, exact to 1e-12 for values of ordinary size.
const IDENTITY_EPS: f32 = 1e12;
const IDENTITY_GAIN: f32 = 999_999.0;

#[test]
fn norms() {
    let f = Fixture::read("norms.safetensors");
    for n in [64usize, 96, 128, 256] {
        let mut lab = Lab::cpu();
        let x = f.f32(&format!("n{n}.x"));
        let rows = x.len() / n;
        let (input, output) = (lab.input(rows, n, &x), lab.output::<f32>(rows, n));
        let gain = lab.input(1, n, &f.f32(&format!("n{n}.weight_unit_offset")));
        let batch = lab.one(Profile::Step, rows, 0);
        let norm = Norm { gain: gain.v(), eps: 1e-6 };
        lab.run(|r| r.rms_norm(RmsNorm { batch, input: input.v(), norm, output: output.v() }));
        close("norm", &lab.read::<f32>(&output), &wide(&f.f32(&format!("n{n}.y_unit_offset"))), GOLDEN);
    }
}

/// Rotates one head per row of `x` through the operation; the head norms change nothing.
fn rotate(frequencies: &[f32], magnitude: f32, positions: &[i64], x: &[f32], d: usize) -> Vec<f32> {
    let mut results = Vec::new();
    let heads = x.len() / positions.len() / d;
    for (position, row) in positions.iter().zip(x.chunks(heads * d)) {
        let mut lab = Lab::cpu();
        let mut query_gate = vec![f32::NAN; heads * 2 * d];
        for h in 0..heads {
            query_gate[h * 2 * d..][..d].copy_from_slice(&row[h * d..][..d]);
        }
        let pages = *position as usize / PAGE_TOKENS + 1;
        let mut table = vec![-1i32; pages];
        table[pages - 1] = 0;
        let zeros = vec![0.0f32; d];
        let batch = lab.one(Profile::Step, 1, *position as u32);
        let query = lab.output::<f32>(1, heads * d);
        let op = RopeAppend {
            batch,
            query_gate: lab.input(1, heads * 2 * d, &query_gate).v(),
            key: lab.input(1, d, &zeros).v(),
            value: lab.input(1, d, &zeros).v(),
            gains: lab.input(2, d, &vec![IDENTITY_GAIN; 2 * d]).v(),
            eps: IDENTITY_EPS,
            rope: RopeTable { frequencies: lab.input(1, frequencies.len(), frequencies).v(), magnitude, shift: 0 },
            query: query.v(),
            kv: KvLayer {
                keys: lab.output::<f32>(PAGE_TOKENS, d).v(),
                values: lab.output::<f32>(PAGE_TOKENS, d).v(),
                scales: None,
                pages: lab.input(1, pages, &table).v(),
                heads: 1,
            },
        };
        lab.run(|r| r.rope_append(op));
        results.extend(lab.read::<f32>(&query));
    }
    results
}

#[test]
fn rope() {
    let f = Fixture::read("rope.safetensors");
    for d in [256usize, 64] {
        let get = |name: &str| f.f32(&format!("d{d}.{name}"));
        let (positions, frequencies) = (f.i64(&format!("d{d}.positions")), get("inv_freq"));
        let expected = wide(&get("k_rope"));
        let got = rotate(&frequencies, 1.0, &positions, &get("k"), d);
        // Sines accurate to 1e-6, two of them times values of up to 4, and the norm that is an identity to 2e-7.
        close_by("rotation", &got, &expected, |i| 4e-6 + 4e-7 * expected[i].abs());
    }
    // A head of (1, 0) pairs rotates into cosine and sine.
    for name in ["d256", "d64", "yarn4_d256"] {
        let get = |tensor: &str| f.f32(&format!("{name}.{tensor}"));
        let (positions, frequencies) = (f.i64(&format!("{name}.positions")), get("inv_freq"));
        let magnitude = if f.has(&format!("{name}.attention_factor")) { get("attention_factor")[0] } else { 1.0 };
        let half = frequencies.len();
        let d = 8 * half;
        let unit: Vec<f32> = (0..positions.len() * d).map(|i| if i % d < half { 1.0 } else { 0.0 }).collect();
        let got = rotate(&frequencies, magnitude, &positions, &unit, d);
        let (cos, sin) = (wide(&get("cos")), wide(&get("sin")));
        for (t, row) in got.chunks(d).enumerate() {
            // 1e-6 for the sine itself, and the rounding of the identity norm.
            close(&format!("{name} cos"), &row[..half], &cos[t * half..][..half], 1.5e-6);
            close(&format!("{name} sin"), &row[half..2 * half], &sin[t * half..][..half], 1.5e-6);
        }
    }
}

#[test]
fn gated_attention() {
    let f = Fixture::read("gated_attention.safetensors");
    let (d, heads, h) = (256, 1, 64);
    let x = f.f32("x");
    let weight = |name: &str, rows: usize| Stored::plain(rows, h, &f.f32(&format!("weight.{name}.weight")));
    let stored = [weight("q_proj", heads * 2 * d), weight("k_proj", d), weight("v_proj", d)];
    let frequencies: Vec<f32> = (0..32).map(|i| (1.0 / 1e7f64.powf(f64::from(i) / 32.0)) as f32).collect();
    let gains = [f.f32("weight.q_norm.weight"), f.f32("weight.k_norm.weight")].concat();

    let mut lab = Lab::cpu();
    let weights = stored.each_ref().map(|s| lab.weight(&[s.packed()]));
    let (gains, frequencies) = (lab.input(2, d, &gains), lab.input(1, 32, &frequencies));
    let kv = KvLayer {
        keys: lab.output::<f32>(3 * PAGE_TOKENS, d).v(),
        values: lab.output::<f32>(3 * PAGE_TOKENS, d).v(),
        scales: None,
        pages: lab.input(1, 1, &[1i32]).v(),
        heads: 1,
    };
    let mut got = Vec::new();
    for (start, rows) in [(0, 21), (21, 1), (22, 1)] {
        let profile = if start == 0 { Profile::Prefill } else { Profile::Step };
        let input = lab.input(rows, h, &x[start * h..][..rows * h]);
        let parts = [heads * 2 * d, d, d].map(|n| lab.output::<f32>(rows, n));
        let (query, output) = (lab.output::<f32>(rows, heads * d), lab.output::<f32>(rows, heads * d));
        let batch = lab.one(profile, rows, start as u32);
        let rope = RopeTable { frequencies: frequencies.v(), magnitude: 1.0, shift: 0 };
        lab.run(|r| {
            let outputs = weights.iter().cloned().zip(parts.iter().map(|p| p.v())).collect();
            r.project(Project { batch: batch.clone(), input: input.v(), norm: None, parts: outputs })?;
            r.rope_append(RopeAppend {
                batch: batch.clone(),
                query_gate: parts[0].v(),
                key: parts[1].v(),
                value: parts[2].v(),
                gains: gains.v(),
                eps: 1e-6,
                rope,
                query: query.v(),
                kv: kv.clone(),
            })?;
            r.attend(Attend {
                batch,
                query: query.v(),
                query_gate: parts[0].v(),
                kv: kv.clone(),
                first_key: 0,
                output: output.v(),
            })
        });
        got.extend(lab.read::<f32>(&output));
    }
    let page = |view: &ninfer_core::View<_>, lab: &mut Lab| {
        lab.read_view::<f32>(&view.row_range(PAGE_TOKENS..PAGE_TOKENS + 23).unwrap())
    };
    close("keys", &page(&kv.keys, &mut lab), &wide(&f.f32("key")), GOLDEN);
    close("values", &page(&kv.values, &mut lab), &wide(&f.f32("value")), GOLDEN);
    let both = oracle::matmul(&wide(&x), &stored[0].wide(), h);
    let expected: Vec<f64> = f
        .f32("f64.attn")
        .iter()
        .enumerate()
        .map(|(i, a)| f64::from(*a) * oracle::sigmoid(both[i / d * 2 * d + d + i % d]))
        .collect();
    close("attention", &got, &expected, GOLDEN);
}

#[test]
fn moe() {
    let f = Fixture::read("moe.safetensors");
    let (h, experts, width, shared, k) = (64, 16, 32, 48, 4);
    let x = f.f32("x");
    let rows = x.len() / h;
    let plain = |name: &str, n: usize, k: usize| Stored::plain(n, k, &f.f32(&format!("weight.{name}")));
    let router = plain("gate.weight", experts, h);
    let gate_up = plain("experts.gate_up_proj", experts * 2 * width, h);
    let down = plain("experts.down_proj", experts * h, width);
    let shared_gate = plain("shared_expert_gate.weight", 1, h);
    let shared_parts = ["gate", "up"].map(|n| plain(&format!("shared_expert.{n}_proj.weight"), shared, h));
    let shared_down = plain("shared_expert.down_proj.weight", h, shared);
    for (profile, start) in [(Profile::Step, 0), (Profile::Prefill, 50)] {
        let mut lab = Lab::cpu();
        let input = lab.input(rows, h, &x);
        let norm = Norm { gain: lab.input(1, h, &vec![IDENTITY_GAIN; h]).v(), eps: IDENTITY_EPS };
        let (hidden, chosen) = (lab.output::<f32>(rows, h), lab.output::<i32>(rows, k));
        let weights = lab.output::<f32>(rows, k + 1);
        let residual = lab.inout(rows, h, &vec![0.0f32; rows * h]);
        let batch = lab.one(profile, rows, start);
        let route = Route {
            batch: batch.clone(),
            input: input.v(),
            norm,
            router: lab.weight(&[router.packed()]),
            shared_gate: lab.weight(&[shared_gate.packed()]),
            renormalise: true,
            hidden: hidden.v(),
            experts: chosen.v(),
            weights: weights.v(),
        };
        let block = Experts {
            batch,
            hidden: hidden.v(),
            experts: chosen.v(),
            weights: weights.v(),
            gate_up: lab.weight(&[gate_up.packed()]),
            down: lab.weight(&[down.packed()]),
            shared_gate_up: lab.weight(&shared_parts.each_ref().map(Stored::packed)),
            shared_down: lab.weight(&[shared_down.packed()]),
            residual: residual.v(),
        };
        lab.run(|r| {
            r.route(route)?;
            r.experts(block)
        });
        let ids: Vec<i64> = lab.read::<i32>(&chosen).iter().map(|&e| i64::from(e)).collect();
        assert_eq!(ids, f.i64("topk_index"));
        let got = lab.read::<f32>(&weights);
        let routed: Vec<f32> = got.chunks(k + 1).flat_map(|w| w[..k].to_vec()).collect();
        close("weights", &routed, &wide(&f.f32("topk_weight")), GOLDEN);
        let gates: Vec<f32> = got.chunks(k + 1).map(|w| w[k]).collect();
        close("shared gate", &gates, &wide(&f.f32("f64.shared_gate")), GOLDEN);
        close("block", &lab.read::<f32>(&residual), &wide(&f.f32("y_f64")), GOLDEN);
    }
}
