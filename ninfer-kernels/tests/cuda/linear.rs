//! Projections in every weight format.

use ninfer_core::WeightFormat;
use ninfer_core::format::ActivationPrecision;
use ninfer_core::ops::{LinearOps, Norm, Project, ProjectAdd, Swiglu};
use ninfer_core::segment::{Profile, Segment};

use super::lab::{PRODUCT, SWIGLU, Side, exact, gpu, near, oldest, same};
use super::rng::Rng;
use super::stored::{FORMATS, Stored};

const EPS: f32 = 1e-6;

/// Numbers of rows at every boundary between routes.
const ROWS: [usize; 30] = [
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 31, 32, 33, 63, 64, 65, 66, 96, 127, 128, 129, 200, 1000,
];

struct Case {
    n: usize,
    k: usize,
    rows: usize,
    normed: bool,
    stored: Stored,
    second: Stored,
    x: Vec<f32>,
    gain: Vec<f32>,
    residual: Vec<f32>,
}

impl Case {
    fn new((format, divide): (WeightFormat, bool), n: usize, k: usize, rows: usize, normed: bool) -> Self {
        let mut rng = Rng::new((n * 1000 + k * 10 + rows) as u64);
        // Deviations that keep sums near 1, as in a model.
        let stored = Stored::random(format, divide, n, k, 1.0 / (k as f32).sqrt(), &mut rng);
        let second = Stored::random(WeightFormat::Bf16, false, 5, k, 1.0 / (k as f32).sqrt(), &mut rng);
        let x = exact(rng.values(rows * k, 1.0));
        let gain = rng.values(k, 0.3);
        let residual = exact(rng.values(rows * n, 1.0));
        Self { n, k, rows, normed, stored, second, x, gain, residual }
    }

    fn what(&self) -> String {
        format!("{:?} [{}, {}], {} rows", self.stored.packed().format(), self.n, self.k, self.rows)
    }

    /// Projection with two matrices, then projection and addition.
    fn run<B: LinearOps>(&self, side: &mut Side<B>, from: usize, rows: usize, replay: bool) -> [Vec<f32>; 3] {
        let profile = if rows <= 128 { Profile::Step } else { Profile::Prefill };
        let (n, k) = (self.n, self.k);
        let x = side.acts(rows, k, &self.x[from * k..(from + rows) * k]);
        let gain = side.floats(1, k, &self.gain);
        let weight = side.backend.prepare(&[self.stored.packed()]).unwrap();
        let second = side.backend.prepare(&[self.second.packed()]).unwrap();
        let (y, z) = (side.result(rows, n), side.result(rows, 5));
        let residual = side.acts(rows, n, &self.residual[from * n..(from + rows) * n]);
        let batch = side.one(profile, rows, 3);
        let norm = self.normed.then(|| Norm { gain: gain.clone(), eps: EPS });
        let parts = vec![(weight.clone(), y.clone()), (second, z.clone())];
        let project = Project { batch: batch.clone(), input: x.clone(), norm, parts };
        let add = ProjectAdd { batch, input: x, weight, residual: residual.clone() };
        let work = |r: &mut ninfer_core::Recorder<'_, B>| {
            r.project(project)?;
            r.project_add(add)
        };
        if replay {
            side.replay(work);
        } else {
            side.run(work);
        }
        let results = [side.values(&y), side.values(&z), side.values(&residual)];
        side.check_guards();
        results
    }
}

#[test]
fn every_format_and_shape_is_the_cpu_operation() {
    let Some(gpu) = gpu() else { return };
    for format in FORMATS {
        let shapes: &[(usize, usize)] = match format.0 {
            WeightFormat::Nvfp4 => &[(1, 16), (3, 48), (66, 144), (131, 272), (48, 1024)],
            _ => &[(1, 16), (3, 1), (9, 15), (2, 17), (67, 33), (7, 130), (131, 272), (48, 1024), (130, 129)],
        };
        for &(n, k) in shapes {
            for (rows, normed) in [(1, false), (5, true), (20, false)] {
                let case = Case::new(format, n, k, rows, normed);
                let expected = case.run(&mut Side::cpu(), 0, rows, false);
                let got = case.run(&mut Side::new(gpu.clone()), 0, rows, false);
                for (got, expected) in got.iter().zip(&expected) {
                    near(&case.what(), got, expected, PRODUCT);
                }
            }
        }
    }
}

#[test]
fn every_number_of_rows_is_right_and_independent_of_the_others() {
    let Some(gpu) = gpu() else { return };
    for format in FORMATS {
        let all = Case::new(format, 40, 320, 1000, true);
        let mut side = Side::new(gpu.clone());
        let expected = all.run(&mut Side::cpu(), 0, 1000, false);
        let alone: Vec<_> = (0..128).map(|row| all.run(&mut side, row, 1, false)).collect();
        for rows in ROWS {
            let got = all.run(&mut Side::new(gpu.clone()), 0, rows, rows % 2 == 0);
            // More rows than a step has are those of a prompt, another numeric class.
            let step_rows = if rows > 128 { 0 } else { rows };
            for i in 0..3 {
                let width = got[i].len() / rows;
                near(&all.what(), &got[i], &expected[i][..rows * width], PRODUCT);
                for row in 0..step_rows {
                    let what = format!("{} of {rows} rows, row {row}", all.what());
                    same(&what, &got[i][row * width..(row + 1) * width], &alone[row][i]);
                }
            }
        }
    }
}

/// The modules for the oldest devices add in the same order as those for the newest.
#[test]
fn modules_of_all_targets_agree_to_the_bit() {
    let Some(gpu) = gpu() else { return };
    let oldest = oldest();
    for format in FORMATS {
        for (n, k, rows) in [(40, 320, 1), (40, 320, 3), (129, 576, 8), (64, 1088, 1), (33, 128, 17)] {
            let case = Case::new(format, n, k, rows, rows % 2 == 1);
            let expected = case.run(&mut Side::new(gpu.clone()), 0, rows, false);
            let got = case.run(&mut Side::new(oldest.clone()), 0, rows, rows % 2 == 0);
            for i in 0..3 {
                same(&case.what(), &got[i], &expected[i]);
            }
        }
    }
}

fn swiglu<B: LinearOps>(side: &mut Side<B>, parts: &[&Stored], k: usize, rows: usize, x: &[f32]) -> Vec<f32> {
    let packed: Vec<_> = parts.iter().map(|s| s.packed()).collect();
    let width = packed.iter().map(|p| p.rows()).sum::<usize>() / 2;
    let gate_up = side.backend.prepare(&packed).unwrap();
    let input = side.acts(rows, k, x);
    let gain = side.floats(1, k, &vec![0.25; k]);
    let output = side.result(rows, width);
    let segments = [Segment { len: rows as u32, ..Segment::default() }];
    let batch = side.batch(Profile::Step, rows, &segments);
    let norm = Some(Norm { gain, eps: EPS });
    side.run(|r| r.swiglu(Swiglu { batch, input, norm, gate_up, output: output.clone() }));
    let values = side.values(&output);
    side.check_guards();
    values
}

#[test]
fn swiglu_with_aligned_and_odd_halves() {
    let Some(gpu) = gpu() else { return };
    for format in FORMATS {
        for (width, k, rows) in [(16, 64, 1), (5, 48, 3), (40, 128, 9), (96, 256, 33), (24, 80, 17)] {
            let mut rng = Rng::new((width * k + rows) as u64);
            let mut part = || Stored::random(format.0, format.1, width, k, 1.0 / (k as f32).sqrt(), &mut rng);
            let (gate, up) = (part(), part());
            let x = exact(rng.values(rows * k, 1.0));
            let expected = swiglu(&mut Side::cpu(), &[&gate, &up], k, rows, &x);
            let got = swiglu(&mut Side::new(gpu.clone()), &[&gate, &up], k, rows, &x);
            near(&format!("swiglu {} [{width}, {k}], {rows} rows", format.0), &got, &expected, SWIGLU);
        }
    }
}

/// E4M3 activations: the same codes as on the CPU, so only the order of the sum and the rounding of the result differ.
#[test]
fn e4m3_activations_are_those_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let run = |quantised: bool| {
        for format in [WeightFormat::Fp8Tensor, WeightFormat::Fp8Row, WeightFormat::Fp8Block] {
            for (n, k, rows) in [(33, 130, 1), (64, 256, 7), (130, 512, 40)] {
                let mut rng = Rng::new((n + k + rows) as u64);
                let stored = Stored::random(format, false, n, k, 1.0 / (k as f32).sqrt(), &mut rng);
                let mut x = rng.values(rows * k, 1.0);
                // A row of zeros, one of tiny and one of large values.
                x[..k].fill(0.0);
                x[(rows - 1) * k..].iter_mut().for_each(|x| *x *= 1e-20);
                let x = exact(x);
                let gain = rng.values(k, 0.3);
                let expected = project_a8(&mut Side::cpu(), &stored, &x, &gain, k, rows, quantised);
                let got = project_a8(&mut Side::new(gpu.clone()), &stored, &x, &gain, k, rows, quantised);
                near(&format!("{format}-a8 [{n}, {k}], {rows} rows, norm {quantised}"), &got, &expected, PRODUCT);
            }
        }
    };
    run(false);
    run(true);
}

fn project_a8<B: LinearOps>(
    side: &mut Side<B>,
    stored: &Stored,
    x: &[f32],
    gain: &[f32],
    k: usize,
    rows: usize,
    normed: bool,
) -> Vec<f32> {
    let packed = stored.packed().with_activations(ActivationPrecision::E4m3Token).unwrap();
    let weight = side.backend.prepare(&[packed]).unwrap();
    let input = side.acts(rows, k, x);
    let gain = side.floats(1, k, gain);
    let output = side.result(rows, packed.rows());
    let batch = side.one(Profile::Step, rows, 0);
    let norm = normed.then(|| Norm { gain, eps: EPS });
    side.run(|r| r.project(Project { batch, input, norm, parts: vec![(weight, output.clone())] }));
    side.values(&output)
}

/// A NaN or an infinity in one row stays there.
#[test]
fn a_broken_row_breaks_no_other() {
    let Some(gpu) = gpu() else { return };
    let case = Case::new(FORMATS[0], 40, 320, 9, false);
    let mut broken = Case::new(FORMATS[0], 40, 320, 9, false);
    broken.x[4 * 320 + 7] = f32::NAN;
    broken.x[6 * 320] = f32::INFINITY;
    let clean = case.run(&mut Side::new(gpu.clone()), 0, 9, false);
    let got = broken.run(&mut Side::new(gpu), 0, 9, false);
    for row in (0..9).filter(|r| ![4, 6].contains(r)) {
        same("row", &got[0][row * 40..(row + 1) * 40], &clean[0][row * 40..(row + 1) * 40]);
    }
    assert!(got[0][4 * 40..5 * 40].iter().any(|y| y.is_nan()));
}
