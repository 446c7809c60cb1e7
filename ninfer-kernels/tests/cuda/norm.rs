//! Norms, embedding, the input of the MTP block, and row copies.

use ninfer_core::ops::{CopyRows, Embed, MtpStem, Norm, NormOps, RmsNorm};
use ninfer_core::segment::{Profile, Segment};
use ninfer_core::{Backend, DType, Error};

use super::lab::{NORM, PRODUCT, Side, exact, gpu, near, same};
use super::rng::Rng;
use super::stored::{FORMATS, Stored};

const EPS: f32 = 1e-6;

fn rms_norm<B: NormOps>(side: &mut Side<B>, x: &[f32], gain: &[f32], rows: usize) -> Vec<f32> {
    let h = gain.len();
    let (input, output) = (side.acts(rows, h, x), side.result(rows, h));
    let norm = Norm { gain: side.floats(1, h, gain), eps: EPS };
    let batch = side.one(Profile::Prefill, rows, 0);
    side.run(|r| r.rms_norm(RmsNorm { batch, input, norm, output: output.clone() }));
    let values = side.values(&output);
    side.check_guards();
    values
}

#[test]
fn rms_norm_is_the_cpu_operation() {
    let Some(gpu) = gpu() else { return };
    for (rows, h) in [(1, 1), (3, 7), (5, 256), (17, 2048), (129, 5120), (1000, 33), (2, 8192), (3, 8200), (2, 9999)] {
        let mut rng = Rng::new((rows * h) as u64);
        let (x, gain) = (exact(rng.values(rows * h, 3.0)), rng.values(h, 0.5));
        let expected = rms_norm(&mut Side::cpu(), &x, &gain, rows);
        let got = rms_norm(&mut Side::new(gpu.clone()), &x, &gain, rows);
        near(&format!("[{rows}, {h}]"), &got, &expected, NORM);
    }
}

/// A row has the same bits whatever rows are beside it.
#[test]
fn rms_norm_of_a_row_depends_on_that_row_alone() {
    let Some(gpu) = gpu() else { return };
    for h in [7, 2048, 5120, 8200] {
        let rows = 9;
        let mut rng = Rng::new(h as u64);
        let (x, gain) = (exact(rng.values(rows * h, 3.0)), rng.values(h, 0.5));
        let all = rms_norm(&mut Side::new(gpu.clone()), &x, &gain, rows);
        for (row, expected) in all.chunks(h).enumerate() {
            let got = rms_norm(&mut Side::new(gpu.clone()), &x[row * h..][..h], &gain, 1);
            same(&format!("row {row} of {h} columns"), &got, expected);
        }
    }
}

fn embed<B: NormOps>(side: &mut Side<B>, table: &Stored, ids: &[u32]) -> Vec<f32> {
    let packed = table.packed();
    let (rows, h) = (ids.len(), packed.cols());
    let table = side.backend.prepare(&[packed]).unwrap();
    let (ids, output) = (side.plain(DType::U32, rows, 1, ids), side.result(rows, h));
    // The last row is padding.
    let batch = side.batch(Profile::Step, rows, &[Segment { len: rows as u32 - 1, ..Segment::default() }]);
    side.run(|r| r.embed(Embed { batch, ids, table, output: output.clone() }));
    let values = side.values(&output);
    side.check_guards();
    values[..(rows - 1) * h].to_vec()
}

#[test]
fn embedding_rows_in_every_format() {
    let Some(gpu) = gpu() else { return };
    for format in FORMATS {
        for (v, h) in [(37, 64), (300, 272), (5, 16), (33, 2064)] {
            let mut rng = Rng::new((v * h) as u64);
            let table = Stored::random(format.0, format.1, v, h, 0.3, &mut rng);
            let mut ids: Vec<u32> = (0..20).map(|_| rng.below(v) as u32).collect();
            ids[3] = u32::MAX;
            let expected = embed(&mut Side::cpu(), &table, &ids);
            let got = embed(&mut Side::new(gpu.clone()), &table, &ids);
            // One rounding to bf16, and one of a scale that was inverted.
            near(&format!("{} [{v}, {h}]", format.0), &got, &expected, NORM);
        }
    }
}

#[test]
fn an_id_outside_the_table_is_a_typed_error() {
    let Some(gpu) = gpu() else { return };
    let mut rng = Rng::new(1);
    let table = Stored::random(FORMATS[0].0, false, 10, 16, 0.3, &mut rng);
    let mut side = Side::new(gpu);
    let table = side.backend.prepare(&[table.packed()]).unwrap();
    let (ids, output) = (side.plain(DType::U32, 2, 1, &[3u32, 10]), side.result(2, 16));
    let batch = side.one(Profile::Step, 2, 0);
    side.run(|r| r.embed(Embed { batch, ids, table, output: output.clone() }));
    let mut bytes = vec![0; 64];
    let error = side.backend.download(&mut side.queue, &output, &mut bytes).unwrap_err();
    assert_eq!(error, Error::OutOfRange { what: "token id", got: "10".into(), legal: "below 10".into() });
    // The report is cleared, and the queue goes on.
    assert_eq!(side.backend.download(&mut side.queue, &output, &mut bytes), Ok(()));
}

fn stem<B: NormOps>(side: &mut Side<B>, table: &Stored, fc: &Stored, hidden: &[f32], rows: usize) -> Vec<f32> {
    let h = table.packed().cols();
    let ids: Vec<u32> = (0..rows as u32).map(|i| if i == 2 { u32::MAX } else { (i * 7) % 11 }).collect();
    let index: Vec<i32> = (0..rows as i32).map(|i| if i == 1 { -1 } else { (i * 5) % 9 }).collect();
    let op = MtpStem {
        batch: side.one(Profile::Step, rows, 1),
        ids: side.plain(DType::U32, rows, 1, &ids),
        table: side.backend.prepare(&[table.packed()]).unwrap(),
        hidden: side.acts(9, h, hidden),
        index: side.plain(DType::I32, rows, 1, &index),
        embedding_norm: Norm { gain: side.floats(1, h, &vec![0.1; h]), eps: EPS },
        hidden_norm: Norm { gain: side.floats(1, h, &vec![-0.2; h]), eps: EPS },
        fc: side.backend.prepare(&[fc.packed()]).unwrap(),
        output: side.result(rows, h),
    };
    let output = op.output.clone();
    side.run(|r| r.mtp_stem(op));
    let values = side.values(&output);
    side.check_guards();
    values
}

#[test]
fn mtp_stem_is_the_cpu_operation() {
    let Some(gpu) = gpu() else { return };
    for (h, rows) in [(16, 1), (48, 5), (256, 17), (40, 128), (2064, 3)] {
        let mut rng = Rng::new((h + rows) as u64);
        let table = Stored::random(FORMATS[1].0, FORMATS[1].1, 11, h, 0.3, &mut rng);
        let fc = Stored::random(ninfer_core::WeightFormat::Bf16, false, h, 2 * h, 0.1, &mut rng);
        let hidden = exact(rng.values(9 * h, 1.0));
        let expected = stem(&mut Side::cpu(), &table, &fc, &hidden, rows);
        let got = stem(&mut Side::new(gpu.clone()), &table, &fc, &hidden, rows);
        near(&format!("hidden {h}, {rows} rows"), &got, &expected, PRODUCT);
    }
}

#[test]
fn rows_are_copied_exactly() {
    let Some(gpu) = gpu() else { return };
    let mut side = Side::new(gpu);
    for width in [1usize, 3, 8, 64, 1000] {
        let src: Vec<u32> = (0..7 * width as u32).collect();
        let dst = vec![u32::MAX; 5 * width];
        let op = CopyRows {
            src: side.plain(DType::U32, 7, width, &src),
            src_index: side.plain(DType::I32, 4, 1, &[6i32, 0, -1, 3]),
            dst: side.plain(DType::U32, 5, width, &dst),
            dst_index: side.plain(DType::I32, 4, 1, &[0i32, 4, 2, -1]),
        };
        let to = op.dst.clone();
        side.run(|r| r.copy_rows(op));
        let got: Vec<u32> = side.read(&to);
        let mut expected = dst;
        expected[..width].copy_from_slice(&src[6 * width..]);
        expected[4 * width..].copy_from_slice(&src[..width]);
        same("copied rows", &got, &expected);
    }
    side.check_guards();
}
