//! Products of prompts of E4M3 codes by the matrix instructions of warpgroups, on the devices that have them.

use std::sync::OnceLock;

use ninfer_core::capability::Feature;
use ninfer_core::format::{ActivationPrecision, FP8_BLOCK, Fp8Scales};
use ninfer_core::ops::{LinearOps, Project, ProjectAdd};
use ninfer_core::segment::Profile;
use ninfer_core::{Backend, PackedData, PackedRef, WeightFormat};
use ninfer_kernels::cuda::Cuda;

use super::lab::{PRODUCT, Side, exact, gpu, near, same};
use super::mma_tile::{Case, check_pair, uses};
use super::rng::Rng;
use super::stored::Stored;

const CODES: ActivationPrecision = ActivationPrecision::E4m3Token;
const FORMATS: [WeightFormat; 3] = [WeightFormat::Fp8Tensor, WeightFormat::Fp8Row, WeightFormat::Fp8Block];
/// Rows on both sides of the widths of tiles and of the groups of codes.
const ROWS: [usize; 13] = [1, 7, 8, 9, 17, 63, 64, 65, 127, 128, 129, 257, 1000];

/// A device with these instructions, which takes these kernels.
fn hopper() -> Option<Cuda> {
    static GPU: OnceLock<Cuda> = OnceLock::new();
    gpu().filter(|gpu| gpu.device().features().has(Feature::Wgmma))?;
    Some(GPU.get_or_init(|| Cuda::trying_all(0).unwrap()).clone())
}

/// A matrix and inputs of small integers, so that every sum is exact, whatever its order: weights of −2 to 2 times a power
/// of two, inputs of −8 to 8 but for one of 448 in each row, times a power of two that becomes the token's scale.
struct Integers {
    n: usize,
    k: usize,
    weights: Vec<i32>,
    /// Of each row, then of each block of 128 columns, as powers of two.
    scale: Box<dyn Fn(usize, usize) -> i32>,
    format: WeightFormat,
    x: Vec<i32>,
    /// Of each row of the input.
    exponents: Vec<i32>,
}

fn power(exponent: i32) -> f32 {
    2f32.powi(exponent)
}

impl Integers {
    fn new(format: WeightFormat, n: usize, k: usize, rows: usize) -> Self {
        let mut rng = Rng::new((n * 7 + k * 3 + rows) as u64);
        let weights = (0..n * k).map(|_| rng.below(5) as i32 - 2).collect();
        let mut x: Vec<i32> = (0..rows * k).map(|_| rng.below(17) as i32 - 8).collect();
        for row in 0..rows {
            x[row * k + rng.below(k)] = 448;
        }
        let exponents = (0..rows).map(|_| rng.below(5) as i32 - 6).collect();
        let scale: Box<dyn Fn(usize, usize) -> i32> = match format {
            WeightFormat::Fp8Tensor => Box::new(|_, _| -2),
            WeightFormat::Fp8Row => Box::new(|row, _| (row % 5) as i32 - 4),
            _ => Box::new(|row, col| (row / FP8_BLOCK + 2 * (col / FP8_BLOCK)) as i32 % 3),
        };
        Self { n, k, weights, scale, format, x, exponents }
    }

    fn input(&self) -> Vec<f32> {
        self.x.iter().enumerate().map(|(i, &x)| x as f32 * power(self.exponents[i / self.k])).collect()
    }

    /// The exact product, row-major.
    fn product(&self) -> Vec<f32> {
        let rows = self.exponents.len();
        let mut y = Vec::with_capacity(rows * self.n);
        for row in 0..rows {
            let x = &self.x[row * self.k..(row + 1) * self.k];
            for r in 0..self.n {
                let w = &self.weights[r * self.k..(r + 1) * self.k];
                let sum: f32 = x
                    .chunks(FP8_BLOCK)
                    .zip(w.chunks(FP8_BLOCK))
                    .enumerate()
                    .map(|(b, (x, w))| {
                        let part: i32 = x.iter().zip(w).map(|(x, w)| x * w).sum();
                        part as f32 * power((self.scale)(r, b * FP8_BLOCK))
                    })
                    .sum();
                y.push(sum * power(self.exponents[row]));
            }
        }
        y
    }

    /// Projection, and projection with addition to 3, in bf16.
    fn run<B: LinearOps>(&self, side: &mut Side<B>) -> [Vec<f32>; 2] {
        let (n, k, rows) = (self.n, self.k, self.exponents.len());
        let codes: Vec<u8> = self.weights.iter().map(|&w| [0xc0, 0xb8, 0x00, 0x38, 0x40][(w + 2) as usize]).collect();
        let scales: Vec<f32> = match self.format {
            WeightFormat::Fp8Tensor => vec![power((self.scale)(0, 0))],
            WeightFormat::Fp8Row => (0..n).map(|row| power((self.scale)(row, 0))).collect(),
            _ => {
                let (tall, wide) = (n.div_ceil(FP8_BLOCK), k.div_ceil(FP8_BLOCK));
                let at = |i: usize| power((self.scale)(i / wide * FP8_BLOCK, i % wide * FP8_BLOCK));
                (0..tall * wide).map(at).collect()
            }
        };
        let scales = match self.format {
            WeightFormat::Fp8Tensor => Fp8Scales::Tensor(scales[0]),
            WeightFormat::Fp8Row => Fp8Scales::Row(&scales),
            _ => Fp8Scales::Block(&scales),
        };
        let packed = PackedRef::new(n, k, PackedData::Fp8 { codes: &codes, scales }).unwrap();
        let weight = side.backend.prepare(&[packed.with_activations(CODES).unwrap()]).unwrap();
        let input = side.acts(rows, k, &self.input());
        let (y, residual) = (side.result(rows, n), side.acts(rows, n, &vec![3.0; rows * n]));
        let batch = side.one(Profile::Prefill, rows, 0);
        let parts = vec![(weight.clone(), y.clone())];
        let project = Project { batch: batch.clone(), input: input.clone(), norm: None, parts };
        let add = ProjectAdd { batch, input, weight, residual: residual.clone() };
        side.run(|r| {
            r.project(project)?;
            r.project_add(add)
        });
        side.check_guards();
        [side.values(&y), side.values(&residual)].map(exact)
    }

    fn check(&self, gpu: &Cuda) {
        let what = format!("{} [{}, {}], {} rows", self.format, self.n, self.k, self.exponents.len());
        let product = self.product();
        let expected = [0.0, 3.0].map(|more| exact(product.iter().map(|y| y + more).collect()));
        for (got, expected) in self.run(&mut Side::new(gpu.clone())).iter().zip(&expected) {
            same(&what, got, expected);
        }
    }
}

/// The reference of the exact tests is the CPU operation.
#[test]
fn integers_are_exact_on_the_cpu() {
    for format in FORMATS {
        let case = Integers::new(format, 131, 300, 9);
        let product = case.product();
        let expected = [0.0, 3.0].map(|more| exact(product.iter().map(|y| y + more).collect()));
        for (got, expected) in case.run(&mut Side::cpu()).iter().zip(&expected) {
            same(&format!("{format}"), got, expected);
        }
    }
}

#[test]
fn products_of_small_integers_are_exact() {
    let Some(gpu) = hopper() else { return };
    for format in FORMATS {
        for rows in ROWS {
            Integers::new(format, 67, 200, rows).check(&gpu);
        }
        for (n, k) in
            [(1, 1), (16, 64), (3, 63), (33, 65), (255, 127), (256, 128), (257, 129), (300, 1000), (530, 2048)]
        {
            Integers::new(format, n, k, 73).check(&gpu);
        }
    }
    assert!(uses(&gpu, "e4m3_tile_128"), "{:?}", gpu.kernel_report());
}

#[test]
fn every_shape_is_the_cpu_operation() {
    let Some(gpu) = hopper() else { return };
    for format in FORMATS {
        for (n, k, rows) in [(3, 1, 2), (33, 130, 17), (131, 65, 64), (64, 256, 65), (300, 1000, 129), (270, 4096, 70)]
        {
            for normed in [false, true] {
                Case::quantised(format, n, k, rows, normed).check_within(&gpu, rows, normed, PRODUCT);
            }
        }
        let case = Case::quantised(format, 272, 320, 1000, true);
        for rows in ROWS {
            case.check_within(&gpu, rows, false, PRODUCT);
        }
    }
}

/// The last matrix has tiles of 64 tokens for short calls and of 128 for long ones, where 132 blocks run at once.
#[test]
fn rows_do_not_depend_on_the_call_they_are_in() {
    let Some(gpu) = hopper() else { return };
    for format in FORMATS {
        Case::quantised(format, 200, 400, 300, true).check_splits(&gpu, 300);
        Case::quantised(format, 1100, 192, 1000, false).check_splits(&gpu, 1000);
        Case::quantised(format, 17_200, 130, 300, false).check_splits(&gpu, 300);
    }
    if gpu.device().sm_count == 132 {
        for width in [64, 128] {
            assert!(uses(&gpu, &format!("e4m3_tile_{width}")), "{width}: {:?}", gpu.kernel_report());
        }
    }
}

#[test]
fn pairs_with_aligned_and_odd_halves() {
    let Some(gpu) = hopper() else { return };
    for format in FORMATS {
        for (width, k, rows) in [(16, 64, 1), (5, 48, 3), (80, 128, 65), (160, 256, 257), (24, 80, 17), (2048, 96, 600)]
        {
            check_pair(&gpu, (format, false), CODES, (width, k, rows));
        }
    }
}

/// A stack of several kinds of scales is computed in pieces, which must not touch each other's columns.
#[test]
fn stacks_of_several_formats() {
    let Some(gpu) = hopper() else { return };
    let (k, rows) = (320, 130);
    let mut rng = Rng::new(9);
    let formats = [WeightFormat::Fp8Row, WeightFormat::Fp8Block, WeightFormat::Fp8Row, WeightFormat::Fp8Tensor];
    let parts = formats.map(|format| Stored::random(format, false, 128, k, 1.0 / 16.0, &mut rng));
    let x = exact(rng.values(rows * k, 1.0));
    fn run<B: LinearOps>(side: &mut Side<B>, parts: &[Stored], rows: usize, x: &[f32]) -> Vec<f32> {
        let packed: Vec<_> = parts.iter().map(|p| p.packed().with_activations(CODES).unwrap()).collect();
        let weight = side.backend.prepare(&packed).unwrap();
        let input = side.acts(rows, packed[0].cols(), x);
        let output = side.result(rows, packed.iter().map(|p| p.rows()).sum());
        let batch = side.one(Profile::Prefill, rows, 0);
        side.run(|r| r.project(Project { batch, input, norm: None, parts: vec![(weight, output.clone())] }));
        side.check_guards();
        side.values(&output)
    }
    let expected = run(&mut Side::cpu(), &parts, rows, &x);
    near("stack", &run(&mut Side::new(gpu), &parts, rows, &x), &expected, PRODUCT);
}

/// A NaN or an infinity in one row stays there.
#[test]
fn a_broken_row_breaks_no_other() {
    let Some(gpu) = hopper() else { return };
    for format in FORMATS {
        let [clean, broken] = [false, true].map(|broken| {
            let mut case = Case::quantised(format, 40, 320, 70, false);
            if broken {
                case.x[4 * 320 + 7] = f32::NAN;
                case.x[66 * 320] = f32::INFINITY;
            }
            case.run(&mut Side::new(gpu.clone()), 0, 70, false)
        });
        for row in 0..70 {
            let at = row * 40..(row + 1) * 40;
            if [4, 66].contains(&row) {
                assert!(broken[0][at].iter().any(|y| !y.is_finite()), "row {row}");
            } else {
                same("row", &broken[0][at.clone()], &clean[0][at]);
            }
        }
    }
}
