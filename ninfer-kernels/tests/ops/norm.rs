//! Embedding, norms, the input of the MTP block, row copies.

use half::bf16;
use ninfer_core::Error;
use ninfer_core::WeightFormat;
use ninfer_core::ops::{CopyRows, Embed, MtpStem, Norm, RmsNorm};
use ninfer_core::segment::{Profile, Segment};

use super::close::{EPS, close_by};
use super::lab::{Lab, Word};
use super::linear::product_error;
use super::oracle;
use super::rng::Rng;
use super::stored::{FORMATS, Stored};

#[test]
fn embedding_rows_are_the_decoded_rows() {
    for (format, divide) in FORMATS {
        for k in [16, 48, 144, 272] {
            let mut rng = Rng::new(k as u64);
            let table = Stored::random(format, divide, 130, k, 1.0, &mut rng);
            let ids = [0, 129, 5, u32::MAX, 64, 128, 5];
            let mut lab = Lab::cpu().with_gaps(2, 3);
            let weight = lab.weight(&[table.packed()]);
            let (id_view, output) = (lab.input(7, 1, &ids), lab.output::<f32>(7, k));
            let batch = lab.one(Profile::Step, 7, 0);
            lab.run(|r| r.embed(Embed { batch, ids: id_view.v(), table: weight, output: output.v() }));
            let got = lab.read::<f32>(&output);
            for (t, id) in ids.into_iter().enumerate() {
                for c in 0..k {
                    let expected = if id == u32::MAX { 0.0 } else { table.value(id as usize, c) };
                    assert_eq!(got[t * k + c], expected, "{format}, id {id}, column {c}");
                }
            }
        }
    }
}

/// Exactly, for every code and every scale, subnormal ones included; a zero may lose its sign.
#[test]
fn every_code_is_decoded_exactly() {
    for table in Stored::every_code() {
        let ids: Vec<u32> = (0..table.rows as u32).collect();
        let mut lab = Lab::cpu();
        let weight = lab.weight(&[table.packed()]);
        let (id_view, output) = (lab.input(ids.len(), 1, &ids), lab.output::<f32>(ids.len(), table.cols));
        let batch = lab.one(Profile::Prefill, ids.len(), 0);
        lab.run(|r| r.embed(Embed { batch, ids: id_view.v(), table: weight, output: output.v() }));
        assert_eq!(lab.read::<f32>(&output), table.values());
    }
}

/// A bad id in a row that counts is an error, in a padding row it is nothing.
#[test]
fn ids_outside_the_table() {
    let table = Stored::random(WeightFormat::Bf16, false, 10, 16, 1.0, &mut Rng::new(1));
    for (bad, refused) in [(1, true), (3, false)] {
        let mut ids = [4u32; 4];
        ids[bad] = 10;
        let mut lab = Lab::cpu();
        let weight = lab.weight(&[table.packed()]);
        let (ids, output) = (lab.input(4, 1, &ids), lab.output::<f32>(4, 16));
        let batch = lab.batch(Profile::Step, 4, &[Segment { len: 3, ..Segment::default() }]);
        let op = Embed { batch, ids: ids.v(), table: weight, output: output.v() };
        if refused {
            let error = lab.fail(|r| r.embed(op));
            assert!(matches!(error, Error::OutOfRange { what: "token id", .. }), "{error}");
        } else {
            lab.run(|r| r.embed(op));
        }
    }
}

#[test]
fn rms_norm_matches_f64() {
    for n in [1, 7, 16, 33, 96, 128, 257, 1000] {
        for rows in [1, 3, 17] {
            let mut rng = Rng::new((n + rows) as u64);
            let (x, gain) = (rng.values(rows * n, 3.0), rng.values(n, 0.5));
            let mut lab = Lab::cpu().with_gaps(1, 1);
            let (input, gains) = (lab.input(rows, n, &x), lab.input(1, n, &gain));
            let output = lab.output::<f32>(rows, n);
            let batch = lab.one(Profile::Prefill, rows, 64);
            let norm = Norm { gain: gains.v(), eps: 1e-5 };
            lab.run(|r| r.rms_norm(RmsNorm { batch, input: input.v(), norm, output: output.v() }));
            let expected = oracle::rms_norm(&oracle::wide(&x), &gain, 1e-5);
            // The mean of squares is a sum of positive terms: n/16 + 5 roundings, halved by the root; then four more.
            let error = (n as f64 / 32.0 + 8.0) * EPS;
            close_by("norm", &lab.read::<f32>(&output), &expected, |i| error * expected[i].abs());
        }
    }
}

/// P48: the gain is kept as stored and 1 is added in f32, so a gain below the step of bf16 at 1 has an effect.
#[test]
fn small_gains_are_not_lost() {
    let run = |gain: f32| {
        let mut lab = Lab::cpu();
        let (input, gain) = (lab.input(1, 4, &[1.0f32, -2.0, 3.0, 0.5]), lab.input(1, 4, &[gain; 4]));
        let output = lab.output::<f32>(1, 4);
        let batch = lab.one(Profile::Step, 1, 0);
        let norm = Norm { gain: gain.v(), eps: 0.0 };
        lab.run(|r| r.rms_norm(RmsNorm { batch, input: input.v(), norm, output: output.v() }));
        lab.read::<f32>(&output)
    };
    let (plain, shifted) = (run(0.0), run(2f32.powi(-9)));
    for (p, s) in plain.iter().zip(&shifted) {
        assert!((s / p - (1.0 + 2f32.powi(-9))).abs() < 3e-7, "{p} {s}");
    }
}

#[test]
fn mtp_stem_matches_f64() {
    for (format, divide) in FORMATS {
        for profile in [Profile::Step, Profile::Prefill] {
            let (h, vocab, rows, stored_rows) = (48, 20, 9, 5);
            let mut rng = Rng::new(17);
            let table = Stored::random(format, divide, vocab, h, 1.0, &mut rng);
            let fc = Stored::random(format, divide, h, 2 * h, 0.1, &mut rng);
            let hidden = rng.values(stored_rows * h, 2.0);
            let (e_gain, h_gain) = (rng.values(h, 0.3), rng.values(h, 0.3));
            let ids = [3, 19, u32::MAX, 0, 7, 7, 1, 99, 99];
            let index = [4, 0, 2, -1, 3, 3, 1, 77, -5];
            // The last two rows are padding, with an id and an index that no row could use.
            let segments = [Segment { len: 7, start: 1, ..Segment::default() }];
            let mut lab = Lab::cpu().with_gaps(2, 1);
            let (table_w, fc_w) = (lab.weight(&[table.packed()]), lab.weight(&[fc.packed()]));
            let (id_view, index_view) = (lab.input::<u32>(rows, 1, &ids), lab.input::<i32>(rows, 1, &index));
            let hidden_view = lab.input(stored_rows, h, &hidden);
            let gains = [lab.input(1, h, &e_gain), lab.input(1, h, &h_gain)];
            let output = lab.output::<f32>(rows, h);
            let batch = lab.batch(profile, rows, &segments);
            lab.run(|r| {
                r.mtp_stem(MtpStem {
                    batch,
                    ids: id_view.v(),
                    table: table_w,
                    hidden: hidden_view.v(),
                    index: index_view.v(),
                    embedding_norm: Norm { gain: gains[0].v(), eps: 1e-6 },
                    hidden_norm: Norm { gain: gains[1].v(), eps: 1e-5 },
                    fc: fc_w,
                    output: output.v(),
                })
            });
            let mut both = Vec::new();
            for t in 0..7 {
                let id = ids[t] as usize;
                let embedding: Vec<f64> =
                    (0..h).map(|c| if id < vocab { f64::from(table.value(id, c)) } else { 0.0 }).collect();
                both.extend(oracle::rms_norm(&embedding, &e_gain, 1e-6));
                match usize::try_from(index[t]) {
                    Ok(i) => both.extend(oracle::rms_norm(&oracle::wide(&hidden[i * h..][..h]), &h_gain, 1e-5)),
                    Err(_) => both.extend(vec![0.0; h]),
                }
            }
            let w = fc.wide();
            let scale = oracle::magnitude(&both, &w, 2 * h);
            let got = lab.read::<f32>(&output);
            close_by("stem", &got[..7 * h], &oracle::matmul(&both, &w, 2 * h), |i| {
                product_error(2 * h, true) * scale[i] + 1e-30
            });
        }
    }
}

fn copies<T: Word>(value: impl Fn(usize) -> T) {
    let (w, rows) = (5, 6);
    let source: Vec<T> = (0..rows * w).map(&value).collect();
    let old: Vec<T> = (100..100 + 4 * w).map(&value).collect();
    let mut lab = Lab::cpu().with_gaps(1, 2);
    let (src, dst) = (lab.input(rows, w, &source), lab.inout(4, w, &old));
    let from = lab.input(5, 1, &[5i32, -1, 0, 2, 3]);
    let to = lab.input(5, 1, &[1i32, 0, -7, 3, 1]);
    let op = CopyRows { src: src.v(), src_index: from.v(), dst: dst.v(), dst_index: to.v() };
    lab.run(|r| r.copy_rows(op));
    let got = lab.read::<T>(&dst);
    assert_eq!(got[..w], old[..w]);
    assert_eq!(got[w..2 * w], source[3 * w..4 * w]);
    assert_eq!(got[2 * w..3 * w], old[2 * w..3 * w]);
    assert_eq!(got[3 * w..], source[2 * w..3 * w]);
}

#[test]
fn rows_are_copied_whatever_their_type() {
    copies(|i| i as f32);
    copies(|i| i as u32);
    copies(|i| i as i32);
    copies(|i| bf16::from_f32(i as f32));
}
