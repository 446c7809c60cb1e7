//! Fused expert tensors and checkpoints that mix formats.

use ninfer_core::format::GlobalScale;
use ninfer_core::shape::Part;
use ninfer_core::{DType, WeightFormat};
use ninfer_quant::codes::encode_bf16_slice;
use ninfer_quant::{Error, FusedExperts, PackedParts, Recipe, Site, TensorRole, dequantize_ref};

use crate::fixtures::{Module, Tensor, assert_same, weights};

#[test]
fn every_expert_matrix_is_quantised_by_itself() {
    let (experts, width, hidden) = (3, 4, 32);
    let mut w = weights(20, experts * 2 * width * hidden);
    // Up is ten times as large as gate, and each expert larger than the one before.
    for (i, x) in w.iter_mut().enumerate() {
        let (expert, is_up) = (i / (2 * width * hidden), i / (width * hidden) % 2 == 1);
        *x *= (expert + 1) as f32 * if is_up { 10.0 } else { 1.0 };
    }
    let bytes = encode_bf16_slice(&w);
    let fused = FusedExperts::new("experts.gate_up_proj", DType::Bf16, &[experts, 2 * width, hidden], &bytes).unwrap();
    assert_eq!(fused.experts(), experts);
    let mut globals = Vec::new();
    for e in 0..experts {
        let (gate, up) = fused.gate_up(e).unwrap();
        assert_same(
            &[dequantize_ref(&gate).unwrap(), dequantize_ref(&up).unwrap()].concat(),
            &dequantize_ref(&fused.matrix(e).unwrap()).unwrap(),
        );
        for (m, role) in [(gate, TensorRole::ExpertGate), (up, TensorRole::ExpertUp)] {
            let amax = dequantize_ref(&m).unwrap().iter().fold(0.0f32, |a, x| a.max(x.abs()));
            let q = Recipe::Nvfp4.target(&Site::new(role, Part::Layer(0), 1, true), m.format()).apply_ref(&m).unwrap();
            let PackedParts::Nvfp4 { global: GlobalScale::Divide(g), .. } = *q.parts() else { panic!() };
            assert_eq!(g, amax.recip() * 2688.0);
            globals.push(g);
        }
    }
    globals.dedup();
    assert_eq!(globals.len(), 2 * experts);
}

#[test]
fn fused_tensors_of_other_shapes_are_refused() {
    let bytes = [0u8; 24];
    let new = |dtype, shape: &[usize]| FusedExperts::new("mlp.experts.down_proj", dtype, shape, &bytes).map(|_| ());
    assert!(new(DType::F32, &[2, 3, 1]).is_ok());
    assert!(matches!(new(DType::F32, &[2, 3]), Err(Error::TensorShape { .. })));
    assert!(matches!(new(DType::F32, &[2, 3, 2]), Err(Error::TensorBytes { expected: 48, got: 24, .. })));
    assert!(matches!(new(DType::F32, &[usize::MAX, 3, 2]), Err(Error::TensorBytes { .. })));
    let e = new(DType::U8, &[2, 3, 4]).unwrap_err();
    assert!(matches!(e, Error::TensorDType { .. }) && e.to_string().contains("mlp.experts.down_proj"), "{e}");
    let odd = FusedExperts::new("x", DType::F32, &[2, 3, 1], &bytes).unwrap();
    assert!(matches!(odd.gate_up(0), Err(Error::Expert { rows: 3, .. })));
    assert!(matches!(odd.matrix(2), Err(Error::Expert { expert: 2, experts: 2, .. })));
}

#[test]
fn the_modules_of_one_file_may_have_four_formats() {
    // A mixed file: one BF16 and one FP8 projection, one NVFP4 expert that carries an input scale, and a quantised head.
    let t = |dtype: DType, shape: &[usize], byte| Tensor {
        dtype,
        shape: shape.to_vec(),
        bytes: vec![byte; shape.iter().product::<usize>() * dtype.size()],
    };
    let module = |tensors: Vec<(&str, Tensor)>| Module(tensors.into_iter().map(|(s, t)| (s.to_owned(), t)).collect());
    let scale = |x| Tensor::of_f32(&[], &[x]);
    let nvfp4 = |rows| {
        module(vec![
            ("weight", t(DType::U8, &[rows, 16], 0x21)),
            ("weight_scale", t(DType::F8E4M3, &[rows, 2], 0x40)),
            ("weight_scale_2", scale(1e-3)),
            ("input_scale", scale(0.01)),
        ])
    };
    let fp8 = module(vec![("weight", t(DType::F8E4M3, &[4, 32], 0x38)), ("weight_scale", scale(0.01))]);
    let bf16 = module(vec![("weight", t(DType::Bf16, &[4, 32], 0x3C))]);
    let formats: Vec<WeightFormat> =
        [bf16, fp8, nvfp4(8), nvfp4(512)].iter().map(|m| m.decode().unwrap().format()).collect();
    assert_eq!(formats, [WeightFormat::Bf16, WeightFormat::Fp8Tensor, WeightFormat::Nvfp4, WeightFormat::Nvfp4]);
}
