//! FP8 against torch and compressed-tensors.

use ninfer_core::{DType, WeightFormat};
use ninfer_quant::fp8::{encode_blocks, encode_rows, encode_tensor, widen_to_rows};
use ninfer_quant::{Error, PackedMatrix, encode};

use crate::fixtures::{File, Module, Tensor, assert_same, weights};

#[test]
fn blocks_with_ragged_edges_decode_and_encode_exactly() {
    let file = File::open("fp8.safetensors");
    let mut module = file.module("block", &["weight", "weight_scale_inv"]);
    let m = module.decode().unwrap();
    assert_eq!((m.rows(), m.cols(), m.format()), (137, 140, WeightFormat::Fp8Block));
    assert_same(&m.dequantize()[120 * 140..], &file.get("block.dequant_rows_120_137").f32());
    let w = file.get("block.weight_f32").f32();
    assert_eq!(encode_blocks(137, 140, &w).unwrap(), m);

    // The block preset of compressed-tensors calls the same scales weight_scale; F32 scales are accepted too.
    let scales = module.get("weight_scale_inv").clone();
    let renamed = module.clone().without("weight_scale_inv").with("weight_scale", scales.clone());
    assert_eq!(renamed.decode().unwrap(), m);
    let wide: Vec<f32> =
        scales.bytes.chunks_exact(2).map(|b| f32::from_bits(u32::from(b[1]) << 24 | u32::from(b[0]) << 16)).collect();
    let widened = module.with("weight_scale_inv", Tensor::of_f32(&[2, 2], &wide));
    assert_eq!(widened.decode().unwrap(), m);
}

#[test]
fn row_and_tensor_scales_decode_and_encode_exactly() {
    let file = File::open("fp8.safetensors");
    let w = &file.get("rows.weight_f32").f32();
    for (prefix, format) in [("channel", WeightFormat::Fp8Row), ("tensor", WeightFormat::Fp8Tensor)] {
        let m = file.module(prefix, &["weight", "weight_scale"]).decode().unwrap();
        assert_eq!((m.rows(), m.cols(), m.format()), (16, 300, format));
        assert_same(&m.dequantize(), &file.get(&format!("{prefix}.dequant")).f32());
        // The last row is there for the largest weight of the matrix.
        let whole = encode(format, 17, 300, w).unwrap();
        assert_eq!(whole.slice_rows(0..16).unwrap(), m);
    }
    // A row of 300 scales for 300 rows, without the trailing 1, is per row as well.
    let flat = Module(vec![
        ("weight".to_owned(), Tensor { dtype: DType::F8E4M3, shape: vec![3, 2], bytes: vec![0x38; 6] }),
        ("weight_scale".to_owned(), Tensor::of_f32(&[3], &[0.25, 0.5, 1.0])),
    ]);
    assert_eq!(flat.decode().unwrap().dequantize(), [0.25, 0.25, 0.5, 0.5, 1.0, 1.0]);
}

#[test]
fn one_scale_is_one_scale_in_any_shape() {
    for shape in [&[][..], &[1], &[1, 1]] {
        let module = Module(vec![
            ("weight".to_owned(), Tensor { dtype: DType::F8E4M3, shape: vec![200, 2], bytes: vec![0x38; 400] }),
            ("weight_scale".to_owned(), Tensor::of_f32(shape, &[0.25])),
        ]);
        let m = module.decode().unwrap();
        assert_eq!(m.format(), WeightFormat::Fp8Tensor);
        let rows = widen_to_rows(m.clone());
        assert_eq!(rows.format(), WeightFormat::Fp8Row);
        assert_same(&rows.dequantize(), &m.dequantize());
    }
}

#[test]
fn zeros_and_vanishing_weights_have_scales() {
    for f in [encode_tensor, encode_rows, encode_blocks] {
        let m = f(2, 3, &[0.0; 6]).unwrap();
        assert!(m.dequantize().iter().all(|&x| x == 0.0));
        let tiny = [f32::from_bits(1), 0.0, -f32::from_bits(1), 0.0, 0.0, 0.0];
        let m = f(2, 3, &tiny).unwrap();
        assert!(m.dequantize().iter().all(|x| x.is_finite()));
        assert_eq!(PackedMatrix::new(2, 3, m.parts().clone()).unwrap(), m);
    }
    assert_eq!(encode_rows(1, 2, &[f32::from_bits(448), 0.0]).unwrap().dequantize()[0], f32::from_bits(448));
    for f in [encode_tensor, encode_rows, encode_blocks] {
        let v = f(1, 2, &[f32::MAX, -f32::MAX]).unwrap().dequantize();
        assert!(v[0].is_finite() && v[0] > 0.99 * f32::MAX && v[1] == -v[0]);
    }
}

#[test]
fn blocks_are_cut_and_joined_at_their_edges_only() {
    let w = weights(5, 300 * 130);
    let m = encode_blocks(300, 130, &w).unwrap();
    let parts = [m.slice_rows(0..128).unwrap(), m.slice_rows(128..256).unwrap(), m.slice_rows(256..300).unwrap()];
    assert_eq!(PackedMatrix::concat_rows(&parts.each_ref()).unwrap(), m);
    assert_same(&m.slice_rows(128..200).unwrap().dequantize(), &m.dequantize()[128 * 130..200 * 130]);
    assert!(matches!(m.slice_rows(1..128), Err(Error::Rows { .. })));
    assert!(matches!(PackedMatrix::concat_rows(&[&parts[2], &parts[0]]), Err(Error::Rows { .. })));
    assert!(matches!(m.slice_rows(0..301), Err(Error::Rows { .. })));
}

#[test]
fn only_equal_formats_are_fused() {
    // A file whose in_proj_qkv and in_proj_z are FP8 while in_proj_a and in_proj_b are BF16.
    let w = weights(6, 4 * 128);
    let fp8 = encode_blocks(4, 128, &w).unwrap();
    let bf16 = encode(WeightFormat::Bf16, 4, 128, &w).unwrap();
    let refused = PackedMatrix::concat_rows(&[&bf16, &fp8]).unwrap_err();
    assert!(matches!(refused, Error::Unequal { index: 1, what: "format", .. }), "{refused}");
    let (a, b) = (encode_tensor(4, 128, &w).unwrap(), encode_tensor(1, 128, &[0.5; 128]).unwrap());
    assert!(matches!(PackedMatrix::concat_rows(&[&a, &b]), Err(Error::Unequal { what: "tensor scale", .. })));
    let joined = PackedMatrix::concat_rows(&[&widen_to_rows(a.clone()), &widen_to_rows(b.clone())]).unwrap();
    assert_same(&joined.dequantize(), &[a.dequantize(), b.dequantize()].concat());
}
