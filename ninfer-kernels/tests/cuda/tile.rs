//! Products of prompts by the matrix instructions of warpgroups, on the devices that have them.

use ninfer_core::capability::Feature;
use ninfer_core::format::ActivationPrecision;
use ninfer_core::{Backend, WeightFormat};
use ninfer_kernels::cuda::Cuda;

use super::lab::{EXPERTS, PRODUCT, Side, gpu, near, same};
use super::mma_tile::{Block, Case, MEDIUM, ODD, SMALL, check_pair, uses};
use super::stored::FORMATS;

const NATIVE: ActivationPrecision = ActivationPrecision::Native;

/// A device with these instructions.
fn hopper() -> Option<Cuda> {
    gpu().filter(|gpu| gpu.device().features().has(Feature::Wgmma))
}

#[test]
fn every_format_and_shape_is_the_cpu_operation() {
    let Some(gpu) = hopper() else { return };
    for format in FORMATS {
        let shapes: &[(usize, usize)] = match format.0 {
            WeightFormat::Nvfp4 => &[(1, 16), (3, 48), (131, 272), (300, 1024)],
            _ => &[(1, 16), (3, 1), (67, 33), (131, 272), (130, 129), (257, 65), (300, 1024)],
        };
        for &(n, k) in shapes {
            for (rows, normed) in [(1, true), (17, false), (64, true), (129, false)] {
                Case::new(format, n, k, rows, normed).check(&gpu, rows, rows == 17);
            }
        }
    }
    assert!(uses(&gpu, "tile_32"), "{:?}", gpu.kernel_report());
}

#[test]
fn every_number_of_rows_is_right() {
    let Some(gpu) = hopper() else { return };
    for format in FORMATS {
        let case = Case::new(format, 272, 320, 1000, true);
        for rows in [1, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000] {
            case.check_within(&gpu, rows, false, PRODUCT);
        }
    }
}

/// Matrices for which tiles of each width fill an H200 best, and calls that split them.
#[test]
fn all_widths_of_tiles_give_the_same_bits() {
    let Some(gpu) = hopper() else { return };
    for (i, format) in FORMATS.into_iter().enumerate() {
        for n in [1024, 2048, 4096, 5120] {
            let case = Case::new(format, n, 80, 1000, n == 1024);
            case.check_splits(&gpu, 1000);
            if i % 4 == n / 1024 % 4 {
                case.check_within(&gpu, 1000, false, PRODUCT);
            }
        }
    }
    if gpu.device().sm_count == 132 {
        for width in [32, 64, 96, 128] {
            assert!(uses(&gpu, &format!("tile_{width}")), "{width}: {:?}", gpu.kernel_report());
        }
    }
}

/// Many more stages than the ring holds, and several tiles for each block.
#[test]
fn long_rows_and_many_tiles() {
    let Some(gpu) = hopper() else { return };
    for format in FORMATS {
        Case::new(format, 270, 4096, 70, false).check_within(&gpu, 70, false, PRODUCT);
        Case::new(format, 9000, 64, 100, false).check_within(&gpu, 100, false, PRODUCT);
        Case::new(format, 9000, 192, 700, false).check_splits(&gpu, 700);
    }
}

#[test]
fn e4m3_activations_are_those_of_the_cpu() {
    let Some(gpu) = hopper() else { return };
    for format in [WeightFormat::Fp8Tensor, WeightFormat::Fp8Row, WeightFormat::Fp8Block] {
        for (n, k, rows) in [(3, 1, 2), (33, 130, 17), (131, 65, 64), (64, 256, 65), (300, 1000, 129)] {
            Case::quantised(format, n, k, rows, rows % 2 == 0).check_within(&gpu, rows, false, PRODUCT);
        }
        Case::quantised(format, 200, 400, 300, true).check_splits(&gpu, 300);
    }
}

#[test]
fn pairs_with_aligned_and_odd_halves() {
    let Some(gpu) = hopper() else { return };
    for format in FORMATS {
        for (width, k, rows) in [(16, 64, 1), (5, 48, 3), (80, 128, 65), (160, 256, 257), (24, 80, 17), (2048, 96, 600)]
        {
            check_pair(&gpu, format, NATIVE, (width, k, rows));
        }
    }
}

/// Tiles of experts are 32, 64 or 128 wide; some experts get nothing, some more than a tile.
#[test]
fn experts_are_the_cpu_operation_and_independent_of_the_call() {
    let Some(gpu) = hopper() else { return };
    for format in FORMATS {
        // Columns of NVFP4 come in sixteens.
        let other = if format.0 == WeightFormat::Nvfp4 { SMALL } else { ODD };
        let calls = [(SMALL, 1), (SMALL, 40), (other, 9), (MEDIUM, 17), (MEDIUM, 200), (MEDIUM, 1000), (SMALL, 1000)];
        for (sizes, rows) in calls {
            let block = Block::new(sizes, format, NATIVE, rows);
            let what = format!("{} {sizes:?}, {rows} rows", format.0);
            let mut side = Side::new(gpu.clone());
            let got = block.run(&mut side, 0, rows, rows % 2 == 0);
            near(&what, &got, &block.run(&mut Side::cpu(), 0, rows, false), EXPERTS);
            for row in [0, rows / 2, rows - 1] {
                let alone = block.run(&mut side, row, 1, false);
                same(&format!("{what}: row {row}"), &alone, &got[row * sizes.h..(row + 1) * sizes.h]);
            }
        }
    }
}

/// A NaN or an infinity in one row stays there.
#[test]
fn a_broken_row_breaks_no_other() {
    let Some(gpu) = hopper() else { return };
    let clean = Case::new(FORMATS[0], 40, 320, 70, false);
    let mut broken = Case::new(FORMATS[0], 40, 320, 70, false);
    broken.x[4 * 320 + 7] = f32::NAN;
    broken.x[66 * 320] = f32::INFINITY;
    let [clean, broken] = [clean, broken].map(|case| case.run(&mut Side::new(gpu.clone()), 0, 70, false));
    for row in 0..70 {
        let at = row * 40..(row + 1) * 40;
        if [4, 66].contains(&row) {
            assert!(broken[0][at].iter().any(|y| !y.is_finite()), "row {row}");
        } else {
            same("row", &broken[0][at.clone()], &clean[0][at]);
        }
    }
}
