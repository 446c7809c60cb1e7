//! NVFP4 against the packages that define it, and the two conventions against each other.

use ninfer_core::WeightFormat;
use ninfer_core::format::GlobalScale;
use ninfer_quant::nvfp4::{Convention, encode};
use ninfer_quant::{Error, PackedMatrix, PackedParts};

use crate::fixtures::{File, Module, Tensor, assert_same, weights};

const CT: [&str; 3] = ["weight_packed", "weight_scale", "weight_global_scale"];
const MODELOPT: [&str; 4] = ["weight", "weight_scale", "weight_scale_2", "input_scale"];

#[test]
fn compressed_tensors_modules_decode_and_encode_exactly() {
    let file = File::open("nvfp4_compressed_tensors.safetensors");
    for (prefix, rows, cols) in [("r8c32", 8, 32), ("r24c96", 24, 96), ("r12c256", 12, 256)] {
        let m = file.module(prefix, &CT).decode().unwrap();
        assert_eq!((m.rows(), m.cols(), m.format()), (rows, cols, WeightFormat::Nvfp4));
        let expected = file.get(&format!("{prefix}.dequant")).f32();
        assert_same(&m.dequantize(), &expected);
        let mut row = vec![f32::NAN; cols];
        m.dequantize_row(rows - 1, &mut row).unwrap();
        assert_same(&row, &expected[(rows - 1) * cols..]);

        let w = file.get(&format!("{prefix}.weight_f32")).f32();
        assert_eq!(encode(Convention::CompressedTensors, rows, cols, &w, None).unwrap(), m);
    }
}

#[test]
fn modelopt_modules_decode_and_encode_exactly() {
    let file = File::open("nvfp4_modelopt.safetensors");
    for (prefix, rows, cols) in [("r8c32", 8, 32), ("r24c96", 24, 96)] {
        let m = file.module(prefix, &MODELOPT).decode().unwrap();
        assert_same(&m.dequantize(), &file.get(&format!("{prefix}.dequant")).f32());
        let w = file.get(&format!("{prefix}.weight_f32")).f32();
        assert_eq!(encode(Convention::ModelOpt, rows, cols, &w, None).unwrap(), m);
    }
}

fn tensors(codes: &str, m: &PackedMatrix) -> (Module, f32) {
    let PackedParts::Nvfp4 { codes: c, scales, global } = m.parts() else { panic!("not NVFP4") };
    let (GlobalScale::Divide(g) | GlobalScale::Multiply(g)) = *global;
    let u8s = |dtype, cols, bytes: &[u8]| Tensor { dtype, shape: vec![m.rows(), cols], bytes: bytes.to_vec() };
    let module = Module(vec![
        (codes.to_owned(), u8s(ninfer_core::DType::U8, m.cols() / 2, c)),
        ("weight_scale".to_owned(), u8s(ninfer_core::DType::F8E4M3, m.cols() / 16, scales)),
    ]);
    (module, g)
}

#[test]
fn both_conventions_of_one_matrix_mean_the_same_weights() {
    // A power-of-two divisor has an exact reciprocal, so the two files must agree bit for bit.
    let w = weights(1, 32 * 32);
    let amax = 2688.0 / 4096.0;
    let m = encode(Convention::CompressedTensors, 32, 32, &w, Some(amax)).unwrap();
    let (module, g) = tensors("weight_packed", &m);
    assert_eq!(g, 4096.0);
    let divide = module.with("weight_global_scale", Tensor::of_f32(&[1], &[g])).decode().unwrap();
    let (module, _) = tensors("weight", &m);
    let multiply = module.with("weight_scale_2", Tensor::of_f32(&[], &[1.0 / g])).decode().unwrap();
    assert_same(&divide.dequantize(), &multiply.dequantize());
    assert_same(&divide.dequantize(), &m.dequantize());
}

#[test]
fn a_global_scale_of_the_other_convention_is_refused() {
    let m = encode(Convention::CompressedTensors, 4, 32, &weights(2, 128), None).unwrap();
    let (module, g) = tensors("weight_packed", &m);
    let swapped = module.with("weight_global_scale", Tensor::of_f32(&[1], &[1.0 / g])).decode().unwrap_err();
    let Error::SwappedScale { tensor, multiplier, .. } = &swapped else { panic!("{swapped}") };
    assert_eq!(tensor, "layers.0.mlp.up_proj.weight_global_scale");
    assert!(*multiplier > 1.0);
    assert!(swapped.help().contains("divisor"));
    let (module, _) = tensors("weight", &m);
    let swapped = module.with("weight_scale_2", Tensor::of_f32(&[], &[g])).decode().unwrap_err();
    assert!(matches!(swapped, Error::SwappedScale { .. }), "{swapped}");
}

#[test]
fn the_second_level_is_never_folded_into_the_first() {
    // Group scales at both ends of E4M3 with a small global scale: folding would round or underflow.
    let g = 3.1e-5f32;
    let codes = vec![0x27u8; 2 * 16]; // 6 and 1
    let parts = |global| PackedParts::Nvfp4 { codes: codes.clone(), scales: vec![0x01, 0x7E, 0x7E, 0x01], global };
    let m = PackedMatrix::new(2, 32, parts(GlobalScale::Multiply(g))).unwrap();
    let (low, high) = (2f32.powi(-9) * g, 448.0 * g);
    assert_same(&m.dequantize()[14..18], &[6.0 * low, low, 6.0 * high, high]);
    let amax = 6.0 * 448.0 * g;
    assert_eq!(amax / 2688.0, g);
    assert_eq!(encode(Convention::ModelOpt, 2, 32, &m.dequantize(), Some(amax)).unwrap(), m);
}

#[test]
fn a_matrix_without_a_usable_global_scale_cannot_be_made() {
    for g in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        for global in [GlobalScale::Divide(g), GlobalScale::Multiply(g)] {
            let parts = PackedParts::Nvfp4 { codes: vec![0; 8], scales: vec![0x38], global };
            assert!(matches!(PackedMatrix::new(1, 16, parts), Err(Error::Scale { .. })), "{global:?}");
        }
    }
    // 6 · 448 / g overflows.
    let parts = PackedParts::Nvfp4 { codes: vec![0; 8], scales: vec![0x7E], global: GlobalScale::Divide(1e-36) };
    assert!(matches!(PackedMatrix::new(1, 16, parts), Err(Error::Scale { .. })));
}

#[test]
fn extreme_magnitudes_stay_finite() {
    for convention in [Convention::CompressedTensors, Convention::ModelOpt] {
        let zero = encode(convention, 2, 16, &[0.0; 32], None).unwrap();
        assert!(zero.dequantize().iter().all(|&x| x == 0.0));
        for amax in [f32::from_bits(1), 1e-42, 1e-37, 1e-30, 1e30, 3e38] {
            let mut w = [0.0; 32];
            (w[3], w[20]) = (amax, -amax / 2.0);
            let m = encode(convention, 2, 16, &w, None).unwrap();
            assert!(m.dequantize().iter().all(|x| x.is_finite() && x.abs() <= 1.1 * amax), "{amax:e}");
            // Where scales are normal numbers, the maximum is met within E4M3's half step.
            if amax > 1e-33 {
                assert!((m.dequantize()[3] / amax - 1.0).abs() < 0.07, "{amax:e}");
            }
            assert_eq!(PackedMatrix::new(2, 16, m.parts().clone()).unwrap(), m);
        }
    }
}

#[test]
fn a_shared_maximum_makes_matrices_joinable() {
    let (a, b) = (weights(3, 64), weights(4, 96));
    let amax = a.iter().chain(&b).fold(0.0f32, |m, x| m.max(x.abs()));
    let c = Convention::CompressedTensors;
    let (x, y) = (encode(c, 2, 32, &a, None).unwrap(), encode(c, 3, 32, &b, None).unwrap());
    assert!(matches!(PackedMatrix::concat_rows(&[&x, &y]), Err(Error::Unequal { index: 1, .. })));
    let (x, y) = (encode(c, 2, 32, &a, Some(amax)).unwrap(), encode(c, 3, 32, &b, Some(amax)).unwrap());
    let both = PackedMatrix::concat_rows(&[&x, &y]).unwrap();
    assert_same(&both.dequantize(), &[x.dequantize(), y.dequantize()].concat());
    assert_eq!(both.slice_rows(2..5).unwrap(), y);
    assert!(matches!(encode(c, 2, 32, &a, Some(amax / 1e3)), Err(Error::Overflow { .. })));
    assert!(matches!(encode(c, 2, 32, &a, Some(f32::NAN)), Err(Error::Overflow { .. })));
}
