//! Products whose input rows become codes.

use ninfer_core::format::ActivationPrecision;
use ninfer_core::ops::{Embed, Experts, Head, HeadArgmax, MtpStem, Norm, Project, ProjectAdd, RmsNorm, Swiglu};
use ninfer_core::segment::{Profile, Segment};
use ninfer_core::{Backend, Error, WeightFormat};
use ninfer_kernels::cpu::{Cpu, CpuWeight};

use super::close::{EPS, close_by, same_bits};
use super::lab::{Lab, Mat};
use super::linear::product_error;
use super::oracle::{self, codes::quantise, codes::quantise_groups};
use super::rng::Rng;
use super::stored::Stored;

const FORMATS: [WeightFormat; 3] = [WeightFormat::Fp8Tensor, WeightFormat::Fp8Row, WeightFormat::Fp8Block];

fn stored(format: WeightFormat, n: usize, k: usize, rng: &mut Rng) -> Stored {
    Stored::random(format, false, n, k, 0.1, rng).with_activations(ActivationPrecision::E4m3Token)
}

/// Rows of very different sizes, one of zeros among them.
fn rows(count: usize, k: usize, rng: &mut Rng) -> Vec<f32> {
    let size = |t: usize| [1.0, 1e-3, 300.0, 0.0, 1e-30, 7.0][t % 6];
    (0..count).flat_map(|t| rng.values(k, 1.0).into_iter().map(move |x| x * size(t))).collect()
}

/// `y = s · Σ c·w` and, for each element, `s · Σ |c·w|`.
fn product(x: &[f32], w: &[f64], k: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut y, mut size) = (Vec::new(), Vec::new());
    for row in x.chunks(k) {
        let (codes, scale) = quantise(row);
        y.extend(oracle::matmul(&codes, w, k).iter().map(|y| scale * y));
        size.extend(oracle::magnitude(&codes, w, k).iter().map(|y| scale * y));
    }
    (y, size)
}

#[test]
fn products_match_f64() {
    for format in FORMATS {
        for (profile, start, count) in [(Profile::Step, 3, 1), (Profile::Step, 0, 7), (Profile::Prefill, 30, 70)] {
            for (n, k) in [(1, 1), (5, 16), (67, 33), (131, 272), (300, 130)] {
                let mut rng = Rng::new((n * k + count) as u64);
                let m = stored(format, n, k, &mut rng);
                let (x, old) = (rows(count, k, &mut rng), rng.values(count * n, 1.0));
                let (expected, size) = product(&x, &m.wide(), k);
                let mut lab = Lab::cpu().with_gaps(2, 1);
                let weight = lab.weight(&[m.packed()]);
                let input = lab.input(count, k, &x);
                let (output, residual) = (lab.output::<f32>(count, n), lab.inout(count, n, &old));
                let batch = lab.one(profile, count, start);
                lab.run(|r| {
                    let parts = vec![(weight.clone(), output.v())];
                    r.project(Project { batch: batch.clone(), input: input.v(), norm: None, parts })?;
                    r.project_add(ProjectAdd { batch, input: input.v(), weight, residual: residual.v() })
                });
                let what = format!("{format} [{n}, {k}], {count} rows");
                let error = product_error(k, false);
                close_by(&what, &lab.read::<f32>(&output), &expected, |i| error * size[i] + 1e-40);
                let sum: Vec<f64> = expected.iter().zip(&old).map(|(y, r)| y + f64::from(*r)).collect();
                close_by(&what, &lab.read::<f32>(&residual), &sum, |i| error * size[i] + EPS * sum[i].abs());
            }
        }
    }
}

#[test]
fn products_with_e2m1_activations_match_f64() {
    for divide in [false, true] {
        for (profile, start, count) in [(Profile::Step, 3, 1), (Profile::Step, 0, 7), (Profile::Prefill, 30, 70)] {
            for (n, k) in [(1, 16), (67, 48), (131, 272)] {
                let mut rng = Rng::new((n * k + count) as u64);
                let m = Stored::random(WeightFormat::Nvfp4, divide, n, k, 0.1, &mut rng)
                    .with_activations(ActivationPrecision::E2m1Group16);
                let x = rows(count, k, &mut rng);
                let (mut expected, mut size) = (Vec::new(), Vec::new());
                for row in x.chunks(k) {
                    let (codes, scale) = quantise_groups(row);
                    expected.extend(oracle::matmul(&codes, &m.wide(), k).iter().map(|y| scale * y));
                    size.extend(oracle::magnitude(&codes, &m.wide(), k).iter().map(|y| scale * y));
                }
                let mut lab = Lab::cpu().with_gaps(2, 1);
                let weight = lab.weight(&[m.packed()]);
                let (input, output) = (lab.input(count, k, &x), lab.output::<f32>(count, n));
                let batch = lab.one(profile, count, start);
                lab.run(|r| {
                    r.project(Project { batch, input: input.v(), norm: None, parts: vec![(weight, output.v())] })
                });
                let error = product_error(k, false);
                let what = format!("nvfp4-a4 [{n}, {k}], {count} rows");
                close_by(&what, &lab.read::<f32>(&output), &expected, |i| error * size[i] + 1e-40);
            }
        }
    }
}

/// A call's projections have precisions of their own, and a weight that is native gives what it gave.
#[test]
fn weights_of_one_call_keep_their_own_precision() {
    let (k, count) = (48, 5);
    let mut rng = Rng::new(3);
    let native = Stored::random(WeightFormat::Fp8Row, false, 9, k, 0.1, &mut rng);
    let x = rows(count, k, &mut rng);
    let mut lab = Lab::cpu();
    let weights = [lab.weight(&[native.packed()]), {
        let packed = native.packed().with_activations(ActivationPrecision::E4m3Token).unwrap();
        lab.weight(&[packed])
    }];
    let input = lab.input(count, k, &x);
    let outputs = [lab.output::<f32>(count, 9), lab.output::<f32>(count, 9)];
    let batch = lab.one(Profile::Step, count, 0);
    let parts = weights.into_iter().zip(outputs.iter().map(|o| o.v())).collect();
    lab.run(|r| r.project(Project { batch, input: input.v(), norm: None, parts }));
    let (w, wide) = (native.wide(), oracle::wide(&x));
    let size = oracle::magnitude(&wide, &w, k);
    let native = lab.read::<f32>(&outputs[0]);
    close_by("native", &native, &oracle::matmul(&wide, &w, k), |i| product_error(k, false) * size[i] + 1e-40);
    assert_ne!(native, lab.read::<f32>(&outputs[1]));
}

/// The norm comes first, and its f32 result is what becomes codes: the same bits as with a norm of its own.
#[test]
fn fused_norms_come_before_the_codes() {
    let (n, k, count) = (66, 40, 6);
    for profile in [Profile::Step, Profile::Prefill] {
        let mut rng = Rng::new(4);
        let m = [stored(WeightFormat::Fp8Row, n, k, &mut rng), stored(WeightFormat::Fp8Block, n, k, &mut rng)];
        let (x, gain) = (rows(count, k, &mut rng), rng.values(k, 0.3));
        let mut lab = Lab::cpu();
        let [weight, gate_up] = [lab.weight(&[m[0].packed()]), lab.weight(&[m[1].packed(), m[1].packed()])];
        let (input, gain) = (lab.input(count, k, &x), lab.input(1, k, &gain));
        let normed = lab.output::<f32>(count, k);
        let outputs: [Mat<Cpu>; 4] = std::array::from_fn(|_| lab.output::<f32>(count, n));
        let batch = lab.one(profile, count, 0);
        let norm = Norm { gain: gain.v(), eps: 1e-6 };
        lab.run(|r| {
            r.rms_norm(RmsNorm { batch: batch.clone(), input: input.v(), norm: norm.clone(), output: normed.v() })?;
            for (i, (input, norm)) in [(&input, Some(norm)), (&normed, None)].into_iter().enumerate() {
                let (batch, parts) = (batch.clone(), vec![(weight.clone(), outputs[2 * i].v())]);
                r.project(Project { batch: batch.clone(), input: input.v(), norm: norm.clone(), parts })?;
                let (gate_up, output) = (gate_up.clone(), outputs[2 * i + 1].v());
                r.swiglu(Swiglu { batch, input: input.v(), norm, gate_up, output })?;
            }
            Ok(())
        });
        let [a, b, c, d] = outputs.map(|o| lab.read::<f32>(&o));
        same_bits("project", &a, &c);
        same_bits("swiglu", &b, &d);
    }
}

#[test]
fn swiglu_matches_f64() {
    let (width, k, count) = (33, 80, 6);
    for format in FORMATS {
        let mut rng = Rng::new(8);
        let m = [stored(format, width, k, &mut rng), stored(format, width, k, &mut rng)];
        let x = rows(count, k, &mut rng);
        let (both, size) = product(&x, &[m[0].wide(), m[1].wide()].concat(), k);
        let mut lab = Lab::cpu();
        let gate_up = lab.weight(&m.each_ref().map(Stored::packed));
        let (input, output) = (lab.input(count, k, &x), lab.output::<f32>(count, width));
        let batch = lab.one(Profile::Step, count, 1);
        lab.run(|r| r.swiglu(Swiglu { batch, input: input.v(), norm: None, gate_up, output: output.v() }));
        // silu has a slope of at most 1.1; its own rounding is a few units of its value.
        let error = product_error(k, false);
        close_by("swiglu", &lab.read::<f32>(&output), &oracle::swiglu(&both, width), |i| {
            let (row, col) = (i / width * 2 * width, i % width);
            let (g, u) = (row + col, row + width + col);
            error * (1.1 * size[g] * both[u].abs() + both[g].abs() * size[u])
                + 8.0 * EPS * (both[g] * both[u]).abs()
                + 1e-40
        });
    }
}

/// Every expert is a SwiGLU whose f32 result becomes codes for the down projection: the same bits as from operations of
/// their own.
#[test]
fn experts_quantise_their_hidden_rows_and_what_is_between_their_projections() {
    let (h, width, shared, experts, k, count) = (40, 24, 56, 4, 2, 7);
    let mut rng = Rng::new(6);
    let mut make = |n, k| stored(WeightFormat::Fp8Row, n, k, &mut rng);
    let gate_up: Vec<[Stored; 2]> = (0..experts).map(|_| [make(width, h), make(width, h)]).collect();
    let down: Vec<Stored> = (0..experts).map(|_| make(h, width)).collect();
    let shared_gate_up = [make(shared, h), make(shared, h)];
    let shared_down = make(h, shared);
    let (x, old) = (rows(count, h, &mut rng), rng.values(count * h, 1.0));
    let chosen: Vec<i32> = (0..count as i32).flat_map(|t| [t % 4, (t + 1 + t % 2) % 4]).collect();
    let weights = rng.values(count * (k + 1), 0.5);

    let mut lab = Lab::cpu();
    let (hidden, ids) = (lab.input(count, h, &x), lab.input(count, k, &chosen));
    let (factors, residual) = (lab.input(count, k + 1, &weights), lab.inout(count, h, &old));
    let stack: Vec<_> = gate_up.iter().flatten().map(Stored::packed).collect();
    let op = Experts {
        batch: lab.one(Profile::Step, count, 0),
        hidden: hidden.v(),
        experts: ids.v(),
        weights: factors.v(),
        gate_up: lab.weight(&stack),
        down: lab.weight(&down.iter().map(Stored::packed).collect::<Vec<_>>()),
        shared_gate_up: lab.weight(&shared_gate_up.each_ref().map(Stored::packed)),
        shared_down: lab.weight(&[shared_down.packed()]),
        residual: residual.v(),
    };
    lab.run(|r| r.experts(op));

    let one = |gate_up: &[Stored; 2], down: &Stored, x: &[f32]| {
        let mut lab = Lab::cpu();
        let weights = [lab.weight(&gate_up.each_ref().map(Stored::packed)), lab.weight(&[down.packed()])];
        let (input, output) = (lab.input(1, h, x), lab.output::<f32>(1, h));
        let mid = lab.output::<f32>(1, gate_up[0].rows);
        let batch = lab.one(Profile::Step, 1, 0);
        let [gate_up, down] = weights;
        lab.run(|r| {
            r.swiglu(Swiglu { batch: batch.clone(), input: input.v(), norm: None, gate_up, output: mid.v() })?;
            r.project(Project { batch, input: mid.v(), norm: None, parts: vec![(down, output.v())] })
        });
        lab.read::<f32>(&output)
    };
    let mut expected = old;
    for t in 0..count {
        let x = &x[t * h..][..h];
        let routed: Vec<_> = chosen[t * k..][..k].iter().map(|&e| e as usize).collect();
        let parts: Vec<_> = routed.iter().map(|&e| one(&gate_up[e], &down[e], x)).collect();
        let shared = one(&shared_gate_up, &shared_down, x);
        let w = &weights[t * (k + 1)..][..k + 1];
        for (c, r) in expected[t * h..][..h].iter_mut().enumerate() {
            let sum = parts.iter().zip(w).fold(0.0, |sum, (y, w)| sum + w * y[c]);
            *r += sum + w[k] * shared[c];
        }
    }
    same_bits("experts", &lab.read::<f32>(&residual), &expected);
}

/// Head, choice by the head, and the input of the MTP block.
#[test]
fn heads_and_the_mtp_stem_take_codes_too() {
    let (vocab, h, count) = (37, 48, 3);
    let mut rng = Rng::new(12);
    let m = stored(WeightFormat::Fp8Row, vocab, h, &mut rng);
    let x = rng.values(count * h, 1.0);
    let (expected, size) = product(&x, &m.wide(), h);
    let mut lab = Lab::cpu();
    let head = lab.weight(&[m.packed()]);
    let (input, logits, ids) = (lab.input(count, h, &x), lab.output::<f32>(count, vocab), lab.output::<u32>(count, 1));
    let batch = lab.one(Profile::Step, count, 0);
    lab.run(|r| {
        let (table, b) = (head.clone(), batch.clone());
        r.head(Head { batch: b.clone(), input: input.v(), head: table.clone(), logits: logits.v() })?;
        r.head_argmax(HeadArgmax { batch: b, input: input.v(), head: table, limit: vocab, output: ids.v() })
    });
    let got = lab.read::<f32>(&logits);
    close_by("head", &got, &expected, |i| product_error(h, false) * size[i]);
    for (row, id) in got.chunks(vocab).zip(lab.read::<u32>(&ids)) {
        assert!(row.iter().all(|x| *x <= row[id as usize]));
    }

    // The stem's two norms, concatenated, are one row.
    let fc = stored(WeightFormat::Fp8Block, h, 2 * h, &mut rng);
    let gains = [rng.values(h, 0.2), rng.values(h, 0.2)];
    let [e, n] = [lab.input(1, h, &gains[0]), lab.input(1, h, &gains[1])].map(|g| Norm { gain: g.v(), eps: 1e-6 });
    let tokens = [5u32, 0, 36];
    let (token, index) = (lab.input(count, 1, &tokens), lab.input(count, 1, &[2i32, 0, 1]));
    let fc = lab.weight(&[fc.packed()]);
    let outputs = [lab.output::<f32>(count, h), lab.output::<f32>(count, h)];
    let (rows, both) = (lab.output::<f32>(count, h), lab.output::<f32>(count, 2 * h));
    let order: Vec<f32> = [2, 0, 1].iter().flat_map(|&i| x[i * h..(i + 1) * h].to_vec()).collect();
    let ordered = lab.input(count, h, &order);
    let halves = [both.view.col_range(0..h).unwrap(), both.view.col_range(h..2 * h).unwrap()];
    lab.run(|r| {
        let b = || batch.clone();
        r.mtp_stem(MtpStem {
            batch: b(),
            ids: token.v(),
            index: index.v(),
            table: head.clone(),
            hidden: input.v(),
            embedding_norm: e.clone(),
            hidden_norm: n.clone(),
            fc: fc.clone(),
            output: outputs[0].v(),
        })?;
        r.embed(Embed { batch: b(), ids: token.v(), table: head.clone(), output: rows.v() })?;
        r.rms_norm(RmsNorm { batch: b(), input: rows.v(), norm: e.clone(), output: halves[0].clone() })?;
        r.rms_norm(RmsNorm { batch: b(), input: ordered.v(), norm: n.clone(), output: halves[1].clone() })?;
        r.project(Project { batch: b(), input: both.v(), norm: None, parts: vec![(fc, outputs[1].v())] })
    });
    let [stem, parts] = outputs.map(|o| lab.read::<f32>(&o));
    same_bits("stem", &stem, &parts);
}

/// A row's codes come from that row alone, on any number of threads.
#[test]
fn results_do_not_depend_on_other_rows() {
    let (n, k) = (70, 300);
    let mut rng = Rng::new(9);
    let m = stored(WeightFormat::Fp8Block, n, k, &mut rng);
    let mut x = rows(170, k, &mut rng);
    x[100 * k + 7] = f32::NAN;
    x[30 * k + 299] = f32::INFINITY;
    let run = |threads: usize, profile: Profile, rows: std::ops::Range<usize>| {
        let mut lab = Lab::new(Cpu::with_threads(threads).unwrap());
        let weight = lab.weight(&[m.packed()]);
        let (input, output) =
            (lab.input(rows.len(), k, &x[rows.start * k..rows.end * k]), lab.output::<f32>(rows.len(), n));
        let segment = Segment { start: rows.start as u32, len: rows.len() as u32, ..Segment::default() };
        let batch = lab.batch(profile, rows.len(), &[segment]);
        lab.run(|r| r.project(Project { batch, input: input.v(), norm: None, parts: vec![(weight, output.v())] }));
        lab.read::<f32>(&output)
    };
    let whole = run(3, Profile::Prefill, 0..170);
    for part in [0..64, 64..128, 128..170] {
        same_bits("prefill", &run(1, Profile::Prefill, part.clone()), &whole[part.start * n..part.end * n]);
    }
    let whole = run(2, Profile::Step, 0..120);
    for part in [0..1, 29..32, 99..103] {
        same_bits("step", &run(1, Profile::Step, part.clone()), &whole[part.start * n..part.end * n]);
    }
    for (t, row) in whole.chunks(n).enumerate() {
        assert!(row.iter().all(|y| y.is_nan() == (t == 100 || t == 30)), "row {t}");
    }
}

#[test]
fn parts_of_different_precisions_are_refused() {
    let mut rng = Rng::new(1);
    let token = stored(WeightFormat::Fp8Row, 3, 16, &mut rng);
    let native = Stored::random(WeightFormat::Fp8Row, false, 3, 16, 0.1, &mut rng);
    let cpu = Cpu::new();
    let weight: CpuWeight = cpu.prepare(&[token.packed(), token.packed()]).unwrap();
    assert_eq!(ninfer_core::DeviceWeight::activations(&weight), ActivationPrecision::E4m3Token);
    for parts in [[&token, &native], [&native, &token]] {
        let error = cpu.prepare(&parts.map(Stored::packed)).unwrap_err();
        assert!(matches!(&error, Error::OutOfRange { got, .. } if got.contains("part 1")), "{error}");
    }
}
