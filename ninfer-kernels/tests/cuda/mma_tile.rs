//! Products of prompts by the routes that every device has, whatever else this one could do.

use std::sync::OnceLock;

use ninfer_core::capability::Target;
use ninfer_core::format::{ActivationPrecision, GroupFormat};
use ninfer_core::ops::{Experts, LinearOps, MoeOps, Norm, Project, ProjectAdd, Swiglu};
use ninfer_core::segment::{Profile, Segment};
use ninfer_core::{Backend, DType, WeightFormat};
use ninfer_kernels::cuda::Cuda;

use super::lab::{EXPERTS, PRODUCT, SWIGLU, Side, Tolerance, exact, gpu, near, same};
use super::rng::Rng;
use super::rounded::{self, EPS};
use super::stored::{FORMATS, Stored};

/// Expert blocks whose intermediate results become codes: sums of another order move a few of them to the neighbouring code.
/// That changes an element by an eighth of one of its terms, so by about an eighth of the largest element at most; there are
/// too few of them to be seen in the relative L2 error.
const EXPERT_CODES: Tolerance = Tolerance { relative: 1.0 / 8.0, ..EXPERTS };

/// The device with bf16 products alone.
fn bf16() -> Option<Cuda> {
    gpu()?;
    static GPU: OnceLock<Cuda> = OnceLock::new();
    Some(GPU.get_or_init(|| Cuda::with_targets(0, &[Target::Sm80]).unwrap()).clone())
}

/// The device with products of E4M3 codes, where it accepts them.
fn e4m3() -> Option<Cuda> {
    gpu()?;
    static GPU: OnceLock<Option<Cuda>> = OnceLock::new();
    let open = || {
        let gpu = Cuda::with_targets(0, &[Target::Sm80, Target::Sm89]).unwrap();
        gpu.device().features().has(ninfer_core::capability::Feature::MmaFp8).then_some(gpu)
    };
    GPU.get_or_init(open).clone()
}

/// The device with products of E2M1 codes by the function in place of the instruction.
fn fp4() -> Option<Cuda> {
    gpu()?;
    static GPU: OnceLock<Cuda> = OnceLock::new();
    Some(GPU.get_or_init(|| Cuda::emulating_fp4(0).unwrap()).clone())
}

/// Precision of codes that a format takes.
const fn codes(format: WeightFormat) -> ActivationPrecision {
    match format {
        WeightFormat::Nvfp4 => ActivationPrecision::E2m1Group16,
        _ => ActivationPrecision::E4m3Token,
    }
}

/// A matrix, one of five rows, and what they are multiplied with.
pub struct Case {
    n: usize,
    k: usize,
    stored: Stored,
    second: Stored,
    pub x: Vec<f32>,
    gain: Option<Vec<f32>>,
    residual: Vec<f32>,
    precision: ActivationPrecision,
    profile: Profile,
}

impl Case {
    pub fn new((format, divide): (WeightFormat, bool), n: usize, k: usize, rows: usize, normed: bool) -> Self {
        let mut rng = Rng::new((n * 1000 + k * 10 + rows) as u64);
        let deviation = 1.0 / (k as f32).sqrt();
        let stored = Stored::random(format, divide, n, k, deviation, &mut rng);
        let second = Stored::random(WeightFormat::Bf16, false, 5, k, deviation, &mut rng);
        let x = exact(rng.values(rows * k, 1.0));
        let gain = normed.then(|| rng.values(k, 0.3));
        let residual = exact(rng.values(rows * n, 1.0));
        Self {
            n,
            k,
            stored,
            second,
            x,
            gain,
            residual,
            precision: ActivationPrecision::Native,
            profile: Profile::Prefill,
        }
    }

    /// With activations that become codes; one row of zeros, and one of tiny values.
    pub fn quantised(format: WeightFormat, n: usize, k: usize, rows: usize, normed: bool) -> Self {
        let mut case = Self::new((format, false), n, k, rows, normed);
        case.x[..k].fill(0.0);
        case.x[(rows - 1) * k..].iter_mut().for_each(|x| *x = exact(vec![*x * 1e-20])[0]);
        case.precision = codes(format);
        if let Some(gain) = &case.gain {
            rounded::settle(&mut case.x, k, gain, case.precision);
        }
        case
    }

    fn what(&self, rows: usize) -> String {
        format!("{} {} [{}, {}], {rows} rows", self.stored.packed().format(), self.precision, self.n, self.k)
    }

    /// Projection with both matrices, then projection and addition, of rows `from ..`.
    pub fn run<B: LinearOps>(&self, side: &mut Side<B>, from: usize, rows: usize, replay: bool) -> [Vec<f32>; 3] {
        self.run_with(side, &self.stored, None, from, rows, replay)
    }

    /// The same with another matrix, and with inputs that are normed already.
    fn run_with<B: LinearOps>(
        &self,
        side: &mut Side<B>,
        stored: &Stored,
        normed: Option<&[f32]>,
        from: usize,
        rows: usize,
        replay: bool,
    ) -> [Vec<f32>; 3] {
        let (n, k) = (self.n, self.k);
        let x = side.acts(rows, k, &self.x[from * k..(from + rows) * k]);
        let input = normed.map_or_else(|| x.clone(), |normed| side.acts(rows, k, normed));
        let packed = stored.packed().with_activations(self.precision).unwrap();
        let weight = side.backend.prepare(&[packed]).unwrap();
        let second = side.backend.prepare(&[self.second.packed()]).unwrap();
        let (y, z) = (side.result(rows, n), side.result(rows, 5));
        let residual = side.acts(rows, n, &self.residual[from * n..(from + rows) * n]);
        let batch = side.one(self.profile, rows, from as u32);
        let gain = self.gain.as_ref().filter(|_| normed.is_none());
        let norm = gain.map(|gain| Norm { gain: side.floats(1, k, gain), eps: EPS });
        let parts = vec![(weight.clone(), y.clone()), (second, z.clone())];
        let project = Project { batch: batch.clone(), input, norm, parts };
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

    /// The first `rows` rows against the CPU, to which all that kernels round before they multiply is given rounded.
    pub fn check(&self, gpu: &Cuda, rows: usize, replay: bool) {
        if self.precision != ActivationPrecision::Native {
            return self.check_within(gpu, rows, replay, PRODUCT);
        }
        let normed = self.gain.as_ref().map(|gain| rounded::normed(&self.x[..rows * self.k], self.k, gain));
        let weights = rounded::weights(&self.stored);
        let expected = self.run_with(&mut Side::cpu(), &weights, normed.as_deref(), 0, rows, false);
        self.compare(gpu, rows, replay, &expected, PRODUCT);
    }

    /// The first `rows` rows against the CPU, which rounds nothing.
    pub fn check_within(&self, gpu: &Cuda, rows: usize, replay: bool, tolerance: Tolerance) {
        let expected = self.run(&mut Side::cpu(), 0, rows, false);
        self.compare(gpu, rows, replay, &expected, tolerance);
    }

    fn compare(&self, gpu: &Cuda, rows: usize, replay: bool, expected: &[Vec<f32>; 3], tolerance: Tolerance) {
        let got = self.run(&mut Side::new(gpu.clone()), 0, rows, replay);
        for (got, expected) in got.iter().zip(expected) {
            near(&self.what(rows), got, expected, tolerance);
        }
    }

    /// Rows have the same bits alone, in a call of `rows`, and in a prompt that is split at 64 and at 192.
    pub fn check_splits(&self, gpu: &Cuda, rows: usize) {
        let mut side = Side::new(gpu.clone());
        let whole = self.run(&mut side, 0, rows, false);
        let replayed = self.run(&mut side, 0, rows, true);
        let mut parts: [Vec<f32>; 3] = Default::default();
        for (from, to) in [(0, 64), (64, 192), (192, rows)] {
            let part = self.run(&mut side, from, to - from, false);
            parts.iter_mut().zip(part).for_each(|(all, part)| all.extend(part));
        }
        for i in 0..3 {
            same(&format!("{}: replay", self.what(rows)), &replayed[i], &whole[i]);
            same(&format!("{}: splits", self.what(rows)), &parts[i], &whole[i]);
        }
        for row in [0, 1, 8, 31, 32, 63, 127, 128, rows - 1] {
            let alone = self.run(&mut side, row, 1, false);
            for i in 0..3 {
                let width = alone[i].len();
                same(&format!("{}: row {row}", self.what(rows)), &alone[i], &whole[i][row * width..(row + 1) * width]);
            }
        }
    }
}

/// Whether a kernel has been used.
pub fn uses(gpu: &Cuda, name: &str) -> bool {
    gpu.kernel_report().iter().any(|k| k.name == name)
}

#[test]
fn every_format_and_shape_is_the_cpu_operation() {
    let Some(gpu) = bf16() else { return };
    for format in FORMATS {
        let shapes: &[(usize, usize)] = match format.0 {
            WeightFormat::Nvfp4 => &[(3, 48), (131, 272), (300, 1024)],
            _ => &[(3, 1), (67, 33), (131, 272), (130, 129), (300, 1024)],
        };
        for &(n, k) in shapes {
            for (rows, normed) in [(1, true), (17, false), (64, true), (129, false)] {
                Case::new(format, n, k, rows, normed).check(&gpu, rows, rows == 17);
            }
        }
    }
    for name in ["bf16", "fp8", "nvfp4", "q4", "q5", "q6", "w8"] {
        assert!(uses(&gpu, &format!("mma_tile_{name}")), "{name} took another route: {:?}", gpu.kernel_report());
    }
}

#[test]
fn every_number_of_rows_is_right() {
    let Some(gpu) = bf16() else { return };
    for format in FORMATS {
        let case = Case::new(format, 144, 320, 1000, true);
        for rows in [1, 17, 31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129, 1000] {
            case.check_within(&gpu, rows, false, PRODUCT);
        }
    }
}

#[test]
fn rows_do_not_depend_on_the_call_they_are_in() {
    let Some(gpu) = bf16() else { return };
    for format in FORMATS {
        Case::new(format, 200, 400, 300, true).check_splits(&gpu, 300);
    }
}

#[test]
fn e4m3_activations_are_those_of_the_cpu() {
    for gpu in [bf16(), e4m3()].into_iter().flatten() {
        for format in [WeightFormat::Fp8Tensor, WeightFormat::Fp8Row, WeightFormat::Fp8Block] {
            for (n, k, rows) in [(3, 1, 2), (33, 130, 17), (131, 65, 64), (64, 256, 65), (300, 1000, 129)] {
                for normed in [false, true] {
                    Case::quantised(format, n, k, rows, normed).check(&gpu, rows, normed);
                }
            }
            Case::quantised(format, 144, 320, 1000, true).check(&gpu, 1000, false);
            Case::quantised(format, 200, 400, 300, true).check_splits(&gpu, 300);
        }
    }
    if let Some(gpu) = e4m3() {
        assert!(uses(&gpu, "mma_tile_e4m3"), "{:?}", gpu.kernel_report());
    }
}

/// In both profiles: the codes are the same, and bf16 holds what they stand for exactly.
#[test]
fn e2m1_activations_are_those_of_the_cpu() {
    for gpu in [bf16(), fp4()].into_iter().flatten() {
        for (n, k, rows) in [(3, 16, 2), (33, 144, 17), (131, 80, 64), (64, 256, 65), (300, 1008, 129)] {
            for normed in [false, true] {
                Case::quantised(WeightFormat::Nvfp4, n, k, rows, normed).check(&gpu, rows, normed);
            }
        }
        for rows in [1, 9, 17] {
            let mut case = Case::quantised(WeightFormat::Nvfp4, 80, 320, rows.max(2), true);
            case.profile = Profile::Step;
            case.check(&gpu, rows, false);
        }
        Case::quantised(WeightFormat::Nvfp4, 144, 320, 1000, true).check(&gpu, 1000, false);
        Case::quantised(WeightFormat::Nvfp4, 200, 400, 300, true).check_splits(&gpu, 300);
    }
    if let Some(gpu) = fp4() {
        assert!(uses(&gpu, "mma_tile_e2m1"), "{:?}", gpu.kernel_report());
    }
}

/// SwiGLU of the pair, with inputs that are normed first, or already.
fn swiglu<B: LinearOps>(
    side: &mut Side<B>,
    parts: [&Stored; 2],
    (precision, normed): (ActivationPrecision, bool),
    rows: usize,
    x: &[f32],
) -> Vec<f32> {
    let packed = parts.map(|s| s.packed().with_activations(precision).unwrap());
    let (width, k) = (packed[0].rows(), packed[0].cols());
    let gate_up = side.backend.prepare(&packed).unwrap();
    let input = side.acts(rows, k, x);
    let norm = (!normed).then(|| Norm { gain: side.floats(1, k, &vec![GAIN; k]), eps: EPS });
    let output = side.result(rows, width);
    let batch = side.one(Profile::Prefill, rows, 0);
    side.run(|r| r.swiglu(Swiglu { batch, input, norm, gate_up, output: output.clone() }));
    let values = side.values(&output);
    side.check_guards();
    values
}

const GAIN: f32 = 0.25;

/// A pair of random matrices against the CPU, to which all that kernels round before they multiply is given rounded.
pub fn check_pair(
    gpu: &Cuda,
    (format, divide): (WeightFormat, bool),
    precision: ActivationPrecision,
    (width, k, rows): (usize, usize, usize),
) {
    let mut rng = Rng::new((width * k + rows) as u64);
    let mut part = || Stored::random(format, divide, width, k, 1.0 / (k as f32).sqrt(), &mut rng);
    let native = precision == ActivationPrecision::Native;
    let pair = [part(), part()].map(|m| if native { m } else { m.with_short_scales() });
    let mut x = exact(rng.values(rows * k, 1.0));
    let parts = [&pair[0], &pair[1]];
    let expected = if native {
        let weights = parts.map(rounded::weights);
        let x = rounded::normed(&x, k, &vec![GAIN; k]);
        swiglu(&mut Side::cpu(), [&weights[0], &weights[1]], (precision, true), rows, &x)
    } else {
        rounded::settle(&mut x, k, &vec![GAIN; k], precision);
        swiglu(&mut Side::cpu(), parts, (precision, false), rows, &x)
    };
    let got = swiglu(&mut Side::new(gpu.clone()), parts, (precision, false), rows, &x);
    near(&format!("swiglu {format} {precision} [{width}, {k}], {rows} rows"), &got, &expected, SWIGLU);
}

#[test]
fn pairs_with_aligned_and_odd_halves() {
    let native = FORMATS.map(|format| (format, ActivationPrecision::Native));
    let quantised = FORMATS.into_iter().filter(|f| codes(f.0).fits(f.0)).map(|format| (format, codes(format.0)));
    for gpu in [bf16(), e4m3(), fp4()].into_iter().flatten() {
        for (format, precision) in native.into_iter().chain(quantised.clone()) {
            for (width, k, rows) in [(16, 64, 1), (5, 48, 3), (80, 128, 65), (160, 256, 129), (24, 80, 17)] {
                check_pair(&gpu, format, precision, (width, k, rows));
            }
        }
    }
}

/// A stack of several formats is computed in pieces, which must not touch each other's columns.
#[test]
fn stacks_of_several_formats() {
    let Some(gpu) = bf16() else { return };
    let (k, rows) = (256, 70);
    let mut rng = Rng::new(9);
    let formats = [WeightFormat::Group(GroupFormat::Q4), WeightFormat::Bf16, WeightFormat::Group(GroupFormat::Q6)];
    let parts = formats.map(|format| Stored::random(format, false, 48, k, 1.0 / 16.0, &mut rng));
    let x = exact(rng.values(rows * k, 1.0));
    fn run<B: LinearOps>(side: &mut Side<B>, parts: &[Stored], rows: usize, x: &[f32]) -> Vec<f32> {
        let packed: Vec<_> = parts.iter().map(Stored::packed).collect();
        let weight = side.backend.prepare(&packed).unwrap();
        let input = side.acts(rows, packed[0].cols(), x);
        let output = side.result(rows, packed.iter().map(|p| p.rows()).sum());
        let batch = side.one(Profile::Prefill, rows, 0);
        side.run(|r| r.project(Project { batch, input, norm: None, parts: vec![(weight, output.clone())] }));
        side.check_guards();
        side.values(&output)
    }
    let weights: Vec<_> = parts.iter().map(rounded::weights).collect();
    let expected = run(&mut Side::cpu(), &weights, rows, &x);
    near("stack", &run(&mut Side::new(gpu), &parts, rows, &x), &expected, PRODUCT);
}

/// Sizes of an expert block.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    experts: usize,
    k: usize,
    pub h: usize,
    width: usize,
    shared: usize,
}

pub struct Block {
    sizes: Sizes,
    weights: [Stored; 4],
    precision: ActivationPrecision,
    hidden: Vec<f32>,
    residual: Vec<f32>,
    chosen: Vec<i32>,
    shares: Vec<f32>,
}

impl Block {
    pub fn new(
        sizes: Sizes,
        (format, divide): (WeightFormat, bool),
        precision: ActivationPrecision,
        rows: usize,
    ) -> Self {
        let Sizes { experts, k, h, width, shared } = sizes;
        let mut rng = Rng::new((h + width + rows) as u64);
        let shapes = [(experts * 2 * width, h), (experts * h, width), (2 * shared, h), (h, shared)];
        let weights = shapes.map(|(n, k)| {
            let m = Stored::random(format, divide, n, k, 1.0 / (k as f32).sqrt(), &mut rng);
            if precision == ActivationPrecision::Native { m } else { m.with_short_scales() }
        });
        let hidden = exact(rng.values(rows * h, 1.0));
        let residual = exact(rng.values(rows * h, 1.0));
        // Different experts for each row; the first ones get most rows.
        let chosen = (0..rows * k)
            .map(|pair| {
                let (row, choice) = (pair / k, pair % k);
                let start = if row % 3 == 0 { 0 } else { rng.byte() as usize };
                ((start * k + choice) % experts) as i32
            })
            .collect();
        let shares = (0..rows * (k + 1)).map(|_| rng.range(0.1, 0.9)).collect();
        Self { sizes, weights, precision, hidden, residual, chosen, shares }
    }

    pub fn run<B: MoeOps>(&self, side: &mut Side<B>, from: usize, rows: usize, replay: bool) -> Vec<f32> {
        let Sizes { k, h, .. } = self.sizes;
        let [gate_up, down, shared_gate_up, shared_down] = [0, 1, 2, 3].map(|i| {
            let packed = self.weights[i].packed().with_activations(self.precision).unwrap();
            side.backend.prepare(&[packed]).unwrap()
        });
        let hidden = side.acts(rows, h, &self.hidden[from * h..(from + rows) * h]);
        let residual = side.acts(rows, h, &self.residual[from * h..(from + rows) * h]);
        let experts = side.plain(DType::I32, rows, k, &self.chosen[from * k..(from + rows) * k]);
        let weights = side.floats(rows, k + 1, &self.shares[from * (k + 1)..(from + rows) * (k + 1)]);
        let segments = [Segment { len: rows as u32, start: from as u32, ..Segment::default() }];
        let batch = side.batch(Profile::Prefill, rows, &segments);
        let residual_out = residual.clone();
        let op = Experts { batch, hidden, experts, weights, gate_up, down, shared_gate_up, shared_down, residual };
        if replay {
            side.replay(|r| r.experts(op));
        } else {
            side.run(|r| r.experts(op));
        }
        side.check_guards();
        side.values(&residual_out)
    }
}

pub const SMALL: Sizes = Sizes { experts: 5, k: 2, h: 48, width: 32, shared: 48 };
pub const ODD: Sizes = Sizes { experts: 5, k: 2, h: 48, width: 24, shared: 40 };
pub const MEDIUM: Sizes = Sizes { experts: 32, k: 8, h: 256, width: 64, shared: 96 };

#[test]
fn experts_are_the_cpu_operation_and_independent_of_the_call() {
    for gpu in [bf16(), e4m3(), fp4()].into_iter().flatten() {
        for format in FORMATS {
            for precision in [ActivationPrecision::Native, codes(format.0)] {
                if !precision.fits(format.0) {
                    continue;
                }
                for (sizes, rows) in [(SMALL, 1), (SMALL, 40), (ODD, 9), (MEDIUM, 17), (MEDIUM, 200), (SMALL, 1000)] {
                    if format.0 == WeightFormat::Nvfp4 && sizes.width % 16 != 0 {
                        continue;
                    }
                    let block = Block::new(sizes, format, precision, rows);
                    let what = format!("{} {precision} {sizes:?}, {rows} rows", format.0);
                    let mut side = Side::new(gpu.clone());
                    let got = block.run(&mut side, 0, rows, rows % 2 == 0);
                    let native = precision == ActivationPrecision::Native;
                    let tolerance = if native { EXPERTS } else { EXPERT_CODES };
                    near(&what, &got, &block.run(&mut Side::cpu(), 0, rows, false), tolerance);
                    for row in [0, rows / 2, rows - 1] {
                        let alone = block.run(&mut side, row, 1, false);
                        same(&format!("{what}: row {row}"), &alone, &got[row * sizes.h..(row + 1) * sizes.h]);
                    }
                }
            }
        }
    }
}

/// A NaN or an infinity in one row stays there.
#[test]
fn a_broken_row_breaks_no_other() {
    for (gpu, quantised) in [(bf16(), false), (bf16(), true), (e4m3(), true)] {
        let Some(gpu) = gpu else { continue };
        let case = |broken: bool| {
            let mut case = match quantised {
                true => Case::quantised(WeightFormat::Fp8Row, 40, 320, 70, false),
                false => Case::new(FORMATS[0], 40, 320, 70, false),
            };
            if broken {
                case.x[4 * 320 + 7] = f32::NAN;
                case.x[66 * 320] = f32::INFINITY;
            }
            case.run(&mut Side::new(gpu.clone()), 0, 70, false)
        };
        let (clean, broken) = (case(false), case(true));
        for row in (0..70).filter(|r| ![4, 66].contains(r)) {
            same("row", &broken[0][row * 40..(row + 1) * 40], &clean[0][row * 40..(row + 1) * 40]);
        }
        for row in [4, 66] {
            assert!(broken[0][row * 40..(row + 1) * 40].iter().any(|y| !y.is_finite()), "row {row}");
        }
    }
}
