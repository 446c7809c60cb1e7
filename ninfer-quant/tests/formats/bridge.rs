//! The bridge from NVFP4 to FP8: exactness where promised, the error bound everywhere.

use ninfer_core::WeightFormat;
use ninfer_core::format::GlobalScale;
use ninfer_quant::bridge::{BridgeScale, bridge};
use ninfer_quant::codes::{decode_e4m3, encode_e4m3};
use ninfer_quant::{Error, Fp8ScaleVec, PackedMatrix, PackedParts, encode};

use crate::fixtures::weights;

/// Roundings of f32 on both sides: the multiplier, the scale and two products.
const F32_ROUNDINGS: f32 = 4.0 * f32::EPSILON;

/// Row `r` has every E2M1 code under the group scale of code `r + 1`, and under a second one that moves the row maximum.
fn every_product(other: u8, global: GlobalScale) -> PackedMatrix {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for scale in 1..=0x7Eu8 {
        let all = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE];
        codes.extend(all.into_iter().chain(all));
        scales.extend([scale, other]);
    }
    PackedMatrix::new(126, 32, PackedParts::Nvfp4 { codes, scales, global }).unwrap()
}

fn scale_of(m: &PackedMatrix, row: usize, col: usize) -> f32 {
    match m.parts() {
        PackedParts::Fp8 { scales: Fp8ScaleVec::Row(s), .. } => s[row],
        PackedParts::Fp8 { scales: Fp8ScaleVec::Block(s), .. } => s[row / 128 * m.cols().div_ceil(128) + col / 128],
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_product_of_code_and_scale_is_within_the_bound() {
    for global in [GlobalScale::Divide(3001.7), GlobalScale::Multiply(4.1e-4), GlobalScale::Divide(4096.0)] {
        for other in [0x01, 0x08, 0x38, 0x3D, 0x7E] {
            let m = every_product(other, global);
            let w = m.dequantize();
            for (kind, share) in
                [(BridgeScale::Pow2Row, 21.0), (BridgeScale::AmaxRow, 17.0), (BridgeScale::Pow2Block, 21.0)]
            {
                let b = bridge(&m.as_ref(), kind).unwrap();
                assert_eq!((b.rows(), b.cols()), (126, 32));
                for (i, (w, v)) in w.iter().zip(b.dequantize()).enumerate() {
                    let s = scale_of(&b, i / 32, i % 32);
                    let bound = (w.abs() / share).max(s / 1024.0) + w.abs() * F32_ROUNDINGS;
                    assert!((w - v).abs() <= bound, "{kind:?} {global:?} element {i}: {w} became {v}");
                    assert_eq!(w.is_sign_negative(), v.is_sign_negative());
                }
            }
        }
    }
}

#[test]
fn powers_of_two_keep_their_value() {
    // Codes 0.5, 1, 2, 4 and a power-of-two multiplier: nothing rounds as long as no subnormal is met.
    let m = every_product(0x7E, GlobalScale::Divide(4096.0));
    let b = bridge(&m.as_ref(), BridgeScale::Pow2Row).unwrap();
    let (w, v) = (m.dequantize(), b.dequantize());
    for (i, (w, v)) in w.iter().zip(v).enumerate() {
        let power = matches!(i % 8, 0 | 1 | 2 | 4 | 6); // the column is the code
        let normal = w.abs() >= scale_of(&b, i / 32, 0) / 64.0;
        if power && normal {
            assert_eq!(*w, v, "element {i}");
        }
    }
}

#[test]
fn ties_go_toward_zero_whatever_the_multiplier() {
    // 3 · 9 and 3 · 14 lie between 26 and 28 and between 40 and 44; 3 · 11 and 3 · 13 are nearer to 32 and to 40.
    let e4m3 = [0x51, 0x56, 0x53, 0x55]; // 9, 14, 11, 13
    for g in [1.0f32, 0.7, 3.3e-4, 0.099] {
        let codes = [0x5D; 4 * 8].to_vec(); // −3 and 3
        let parts = PackedParts::Nvfp4 { codes, scales: e4m3.to_vec(), global: GlobalScale::Multiply(g) };
        let m = PackedMatrix::new(1, 64, parts).unwrap();
        let b = bridge(&m.as_ref(), BridgeScale::Pow2Row).unwrap();
        let PackedParts::Fp8 { codes, .. } = b.parts() else { panic!() };
        let units: Vec<f32> = codes.iter().map(|&c| decode_e4m3(c) * scale_of(&b, 0, 0) / g).collect();
        for (u, expected) in units.chunks(16).zip([26.0, 40.0, 32.0, 40.0]) {
            assert!(u.chunks(2).all(|u| u[0] == -u[1] && (u[1] / expected - 1.0).abs() < 1e-6), "{u:?}, {expected}");
        }
    }
}

#[test]
fn the_exponent_is_the_smallest_that_fits() {
    let w = weights(7, 6 * 64);
    let m = encode(WeightFormat::Nvfp4, 6, 64, &w).unwrap();
    let PackedParts::Nvfp4 { global: GlobalScale::Divide(g), .. } = *m.parts() else { panic!() };
    let b = bridge(&m.as_ref(), BridgeScale::Pow2Row).unwrap();
    for row in 0..6 {
        let power = scale_of(&b, row, 0) / (1.0 / g);
        assert_eq!(power, power.log2().round().exp2());
        let amax = m.dequantize()[row * 64..(row + 1) * 64].iter().fold(0.0f32, |a, x| a.max(x.abs())) * g;
        assert!(amax <= 448.0 * power * 1.000001 && amax > 224.0 * power * 0.999999, "row {row}: {amax}, {power}");
    }
}

/// Squared error of a row of units under the row scale `p`, saturating, ties whichever way.
fn squared_error(units: &[f32], p: f32) -> f64 {
    let error = |u: &f32| f64::from(decode_e4m3(encode_e4m3(u / p)) * p - u).powi(2);
    units.iter().map(error).sum()
}

#[test]
fn no_other_exponent_has_a_smaller_error() {
    for (seed, spread) in [(21, 1.0), (22, 30.0), (23, 1000.0)] {
        // Columns of very different sizes, so that there are subnormals.
        let mut w = weights(seed, 40 * 512);
        w.iter_mut().enumerate().for_each(|(i, x)| *x *= f32::powf(spread, -((i % 512) as f32) / 512.0));
        let m = encode(WeightFormat::Nvfp4, 40, 512, &w).unwrap();
        let PackedParts::Nvfp4 { global: GlobalScale::Divide(g), .. } = *m.parts() else { panic!() };
        let b = bridge(&m.as_ref(), BridgeScale::Pow2Row).unwrap();
        for (row, units) in m.dequantize().chunks(512).enumerate() {
            let units: Vec<f32> = units.iter().map(|w| w * g).collect();
            let p = (scale_of(&b, row, 0) * g).log2().round().exp2();
            let chosen = squared_error(&units, p);
            for other in [p / 4.0, p / 2.0, p * 2.0, p * 4.0] {
                assert!(chosen <= squared_error(&units, other) * 1.000_001, "row {row}: {p} and {other}");
            }
        }
    }
}

#[test]
fn blocks_have_scales_of_their_own() {
    let mut w = weights(8, 130 * 160);
    w.iter_mut().step_by(160).for_each(|x| *x *= 100.0); // outliers in the first block column
    let m = encode(WeightFormat::Nvfp4, 130, 160, &w).unwrap();
    let rows = bridge(&m.as_ref(), BridgeScale::Pow2Row).unwrap();
    let blocks = bridge(&m.as_ref(), BridgeScale::Pow2Block).unwrap();
    assert_eq!((rows.format(), blocks.format()), (WeightFormat::Fp8Row, WeightFormat::Fp8Block));
    assert!(scale_of(&blocks, 0, 159) <= scale_of(&blocks, 0, 0));
    assert_eq!(PackedMatrix::new(130, 160, blocks.parts().clone()).unwrap(), blocks);
}

#[test]
fn zeros_and_odd_scales_pass_and_other_formats_do_not() {
    let zero = encode(WeightFormat::Nvfp4, 2, 16, &[0.0; 32]).unwrap();
    for kind in [BridgeScale::Pow2Row, BridgeScale::AmaxRow, BridgeScale::Pow2Block] {
        assert!(bridge(&zero.as_ref(), kind).unwrap().dequantize().iter().all(|&x| x == 0.0));
        // A multiplier so small that halving it further would leave the normal numbers.
        let tiny = every_product(0x01, GlobalScale::Multiply(2.0 * f32::MIN_POSITIVE));
        let b = bridge(&tiny.as_ref(), kind).unwrap();
        assert!(b.dequantize().iter().all(|x| x.is_finite()));
    }
    let fp8 = encode(WeightFormat::Fp8Row, 2, 16, &[1.0; 32]).unwrap();
    assert!(matches!(bridge(&fp8.as_ref(), BridgeScale::Pow2Row), Err(Error::Conversion { .. })));
}
