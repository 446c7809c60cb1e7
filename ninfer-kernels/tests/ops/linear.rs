//! Projections in every weight format.

use ninfer_core::WeightFormat;
use ninfer_core::ops::{Norm, Project, ProjectAdd, Swiglu};
use ninfer_core::segment::{Profile, Segment};
use ninfer_kernels::cpu::Cpu;

use super::close::{EPS, close_by, same_bits};
use super::lab::Lab;
use super::oracle;
use super::rng::Rng;
use super::stored::{FORMATS, Stored};

/// Rows of a step that end in every kind of block.
pub const ROWS: [usize; 23] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 31, 32, 33, 63, 64, 65];

/// Epsilon of the norms in these tests.
const NORM_EPS: f32 = 1e-6;

/// Rounding of a product of `k` terms, each rounded once or twice, relative to the sum of their magnitudes; a norm in front
/// rounds its inputs by about as much again.
pub fn product_error(k: usize, normed: bool) -> f64 {
    (if normed { 2 } else { 1 } * k + 8) as f64 * EPS
}

struct Case {
    profile: Profile,
    start: u32,
    rows: usize,
    /// Rows behind the segment.
    padding: usize,
    normed: bool,
    gaps: (usize, usize),
}

impl Case {
    fn step(rows: usize) -> Self {
        Self { profile: Profile::Step, start: 3, rows, padding: 0, normed: false, gaps: (0, 0) }
    }

    fn prefill(start: u32, rows: usize) -> Self {
        Self { profile: Profile::Prefill, start, ..Self::step(rows) }
    }

    /// Projects with a format's matrix `[n, k]` and, in the same call, with an f32 matrix of five rows.
    fn check(&self, (format, divide): (WeightFormat, bool), n: usize, k: usize) {
        let what = format!("{format} [{n}, {k}], {} rows {:?} from {}", self.rows, self.profile, self.start);
        let mut rng = Rng::new((n * 1000 + k * 10 + self.rows) as u64);
        let stored = Stored::random(format, divide, n, k, 0.1, &mut rng);
        let second = Stored::random(WeightFormat::F32, false, 5, k, 0.1, &mut rng);
        let (x, gain) = (rng.values(self.rows * k, 1.0), rng.values(k, 0.3));
        let total = self.rows + self.padding;
        let mut padded = x.clone();
        padded.resize(total * k, f32::NAN);

        let mut lab = Lab::cpu().with_gaps(self.gaps.0, self.gaps.1);
        let input = lab.input(total, k, &padded);
        let gain_view = lab.input(1, k, &gain);
        let weights = [lab.weight(&[stored.packed()]), lab.weight(&[second.packed()])];
        let outputs = [lab.output::<f32>(total, n), lab.output::<f32>(total, 5)];
        let segment = Segment { start: self.start, len: self.rows as u32, ..Segment::default() };
        let batch = lab.batch(self.profile, total, &[segment]);
        let norm = self.normed.then(|| Norm { gain: gain_view.v(), eps: NORM_EPS });
        let parts = weights.iter().cloned().zip(outputs.iter().map(|o| o.v())).collect();
        lab.run(|r| r.project(Project { batch, input: input.v(), norm, parts }));

        let x = if self.normed { oracle::rms_norm(&oracle::wide(&x), &gain, NORM_EPS) } else { oracle::wide(&x) };
        for (stored, output) in [&stored, &second].into_iter().zip(&outputs) {
            let w = stored.wide();
            let scale = oracle::magnitude(&x, &w, k);
            let got = lab.read::<f32>(output);
            let got = &got[..self.rows * stored.rows];
            close_by(&what, got, &oracle::matmul(&x, &w, k), |i| product_error(k, self.normed) * scale[i] + 1e-30);
        }
    }
}

#[test]
fn step_matches_f64_in_every_format_and_shape() {
    for format in FORMATS {
        for (n, k) in [(1, 16), (3, 48), (5, 80), (66, 144), (131, 272)] {
            Case::step(5).check(format, n, k);
            Case { normed: true, padding: 2, gaps: (3, 2), ..Case::step(3) }.check(format, n, k);
        }
        if format.0 != WeightFormat::Nvfp4 {
            for (n, k) in [(3, 1), (1, 7), (9, 15), (2, 17), (67, 33), (7, 130), (130, 129)] {
                Case::step(5).check(format, n, k);
                Case { padding: 3, gaps: (1, 4), ..Case::step(2) }.check(format, n, k);
            }
        }
    }
}

#[test]
fn step_matches_f64_for_every_number_of_rows() {
    for format in FORMATS {
        for rows in ROWS {
            Case { normed: rows % 2 == 0, ..Case::step(rows) }.check(format, 7, 48);
        }
    }
}

#[test]
fn prefill_matches_f64_in_every_format_and_shape() {
    for format in FORMATS {
        for (n, k) in [(1, 16), (5, 80), (64, 48), (256, 32), (257, 16), (131, 272)] {
            Case::prefill(0, 5).check(format, n, k);
            Case { normed: true, padding: 2, gaps: (3, 2), ..Case::prefill(30, 70) }.check(format, n, k);
        }
        if format.0 != WeightFormat::Nvfp4 {
            for (n, k) in [(3, 1), (1, 7), (65, 33), (520, 17), (130, 129)] {
                Case { padding: 1, ..Case::prefill(63, 66) }.check(format, n, k);
            }
        }
    }
    for rows in ROWS {
        Case::prefill(60, rows).check(FORMATS[2], 7, 48);
    }
}

/// Gate and up, or the experts of a layer, are stacked with scales and formats of their own.
#[test]
fn stacked_parts_keep_their_own_scales() {
    let mut rng = Rng::new(7);
    let k = 64;
    let parts: Vec<Stored> = FORMATS
        .iter()
        .zip([3, 1, 5, 2, 164, 7, 9, 4, 66, 8, 266, 1])
        .map(|(&(format, divide), n)| Stored::random(format, divide, n, k, 0.1, &mut rng))
        .collect();
    let n = parts.iter().map(|p| p.rows).sum::<usize>();
    let w: Vec<f64> = parts.iter().flat_map(Stored::wide).collect();
    let x = rng.values(5 * k, 1.0);
    for profile in [Profile::Step, Profile::Prefill] {
        let mut lab = Lab::cpu();
        let weight = lab.weight(&parts.iter().map(Stored::packed).collect::<Vec<_>>());
        let (input, output) = (lab.input(5, k, &x), lab.output::<f32>(5, n));
        let batch = lab.one(profile, 5, 0);
        lab.run(|r| r.project(Project { batch, input: input.v(), norm: None, parts: vec![(weight, output.v())] }));
        let scale = oracle::magnitude(&oracle::wide(&x), &w, k);
        let expected = oracle::matmul(&oracle::wide(&x), &w, k);
        close_by("stack", &lab.read::<f32>(&output), &expected, |i| product_error(k, false) * scale[i]);
    }
}

#[test]
fn project_add_adds_to_the_residual() {
    for format in FORMATS {
        for (profile, start) in [(Profile::Step, 9), (Profile::Prefill, 62)] {
            for (rows, n, k) in [(1, 5, 16), (5, 33, 48), (66, 67, 80)] {
                let mut rng = Rng::new((rows + n + k) as u64);
                let stored = Stored::random(format.0, format.1, n, k, 0.1, &mut rng);
                let (x, old) = (rng.values(rows * k, 1.0), rng.values(rows * n, 1.0));
                let mut lab = Lab::cpu().with_gaps(2, 1);
                let weight = lab.weight(&[stored.packed()]);
                let (input, residual) = (lab.input(rows, k, &x), lab.inout(rows, n, &old));
                let batch = lab.one(profile, rows, start);
                lab.run(|r| r.project_add(ProjectAdd { batch, input: input.v(), weight, residual: residual.v() }));
                let (x, w) = (oracle::wide(&x), stored.wide());
                let scale = oracle::magnitude(&x, &w, k);
                let sum: Vec<f64> =
                    oracle::matmul(&x, &w, k).iter().zip(&old).map(|(y, r)| y + f64::from(*r)).collect();
                close_by("residual", &lab.read::<f32>(&residual), &sum, |i| {
                    product_error(k, false) * scale[i] + EPS * sum[i].abs()
                });
            }
        }
    }
}

/// Where the inputs are not wanted twice: a padding row of a step is computed, but never a row of another segment.
#[test]
fn project_add_leaves_rows_of_no_segment_of_a_prompt_alone() {
    let (mut rng, mut lab) = (Rng::new(3), Lab::cpu());
    let stored = Stored::random(WeightFormat::Bf16, false, 4, 16, 0.1, &mut rng);
    let (x, old) = (rng.values(6 * 16, 1.0), rng.values(6 * 4, 1.0));
    let weight = lab.weight(&[stored.packed()]);
    let (input, residual) = (lab.input(6, 16, &x), lab.inout(6, 4, &old));
    let segments =
        [Segment { row: 1, len: 2, ..Segment::default() }, Segment { row: 5, slot: 1, ..Segment::default() }];
    let batch = lab.batch(Profile::Prefill, 6, &segments);
    lab.run(|r| r.project_add(ProjectAdd { batch, input: input.v(), weight, residual: residual.v() }));
    let got = lab.read::<f32>(&residual);
    assert_eq!((&got[..4], &got[12..]), (&old[..4], &old[12..]));
    assert_ne!(got[4..12], old[4..12]);
}

/// Segments that claim the same rows: whatever that means, a projection gives the rows their results, once each.
#[test]
fn overlapping_segments_of_a_prompt() {
    let (n, k, rows) = (600, 40, 140);
    let mut rng = Rng::new(5);
    let stored = Stored::random(WeightFormat::Bf16, false, n, k, 0.1, &mut rng);
    let x = rng.values(rows * k, 1.0);
    let mut lab = Lab::new(Cpu::with_threads(3).unwrap());
    let weight = lab.weight(&[stored.packed()]);
    let input = lab.input(rows, k, &x);
    let all = Segment { len: rows as u32, ..Segment::default() };
    let part = Segment { slot: 1, row: 64, len: 64, ..Segment::default() };
    let results = [vec![all], vec![all, part], vec![part, all]].map(|segments| {
        let output = lab.output::<f32>(rows, n);
        let batch = lab.batch(Profile::Prefill, rows, &segments);
        let parts = vec![(weight.clone(), output.v())];
        lab.run(|r| r.project(Project { batch, input: input.v(), norm: None, parts }));
        lab.read::<f32>(&output)
    });
    same_bits("the part last", &results[1], &results[0]);
    same_bits("the part first", &results[2], &results[0]);
}

/// SwiGLU with its norm, and what happens if gate and up are exchanged.
#[test]
fn swiglu_takes_the_gate_from_the_first_half() {
    for format in FORMATS {
        for (profile, rows, width, k) in
            [(Profile::Step, 3, 5, 32), (Profile::Step, 17, 33, 80), (Profile::Prefill, 65, 65, 48)]
        {
            let mut rng = Rng::new((rows * width) as u64);
            let gate = Stored::random(format.0, format.1, width, k, 0.2, &mut rng);
            let up = Stored::random(format.0, format.1, width, k, 0.2, &mut rng);
            let (x, gain) = (rng.values(rows * k, 1.0), rng.values(k, 0.3));
            let mut results = Vec::new();
            for parts in [[&gate, &up], [&up, &gate]] {
                let mut lab = Lab::cpu().with_gaps(1, 2);
                let gate_up = lab.weight(&parts.map(Stored::packed));
                let (input, gain) = (lab.input(rows, k, &x), lab.input(1, k, &gain));
                let output = lab.output::<f32>(rows, width);
                let batch = lab.one(profile, rows, 7);
                let norm = Some(Norm { gain: gain.v(), eps: NORM_EPS });
                lab.run(|r| r.swiglu(Swiglu { batch, input: input.v(), norm, gate_up, output: output.v() }));
                results.push(lab.read::<f32>(&output));
            }
            assert_ne!(results[0], results[1], "gate and up are exchanged without an effect");
            let x = oracle::rms_norm(&oracle::wide(&x), &gain, NORM_EPS);
            let w = [gate.wide(), up.wide()].concat();
            let both = oracle::matmul(&x, &w, k);
            let scale = oracle::magnitude(&x, &w, k);
            // silu has a slope of at most 1.1; its own rounding is a few units of its value.
            let error = product_error(k, true);
            close_by("swiglu", &results[0], &oracle::swiglu(&both, width), |i| {
                let (row, col) = (i / width * 2 * width, i % width);
                let (g, u) = (row + col, row + width + col);
                error * (1.1 * scale[g] * both[u].abs() + both[g].abs() * scale[u])
                    + 8.0 * EPS * (both[g] * both[u]).abs()
            });
        }
    }
}

/// A NaN in one row stays in that row, and a NaN weight stays in its column.
#[test]
fn nan_stays_in_its_row_and_column() {
    let mut rng = Rng::new(11);
    let (n, k, rows) = (70, 33, 6);
    let mut w = rng.values(n * k, 0.1);
    w[68 * k + 32] = f32::NAN;
    let mut x = rng.values(rows * k, 1.0);
    x[2 * k + 5] = f32::NAN;
    for profile in [Profile::Step, Profile::Prefill] {
        let mut lab = Lab::cpu();
        let weight = lab.weight(&[Stored::plain(n, k, &w).packed()]);
        let (input, output) = (lab.input(rows, k, &x), lab.output::<f32>(rows, n));
        let batch = lab.one(profile, rows, 0);
        lab.run(|r| r.project(Project { batch, input: input.v(), norm: None, parts: vec![(weight, output.v())] }));
        for (i, y) in lab.read::<f32>(&output).iter().enumerate() {
            assert_eq!(y.is_nan(), i / n == 2 || i % n == 68, "row {}, column {}", i / n, i % n);
        }
    }
}
