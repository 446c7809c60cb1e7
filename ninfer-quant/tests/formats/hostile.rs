//! Stored tensors that must be refused, each by an error that names the tensor.

use ninfer_core::shape::Part;
use ninfer_core::{DType, WeightFormat};
use ninfer_quant::checkpoint::{StoredKind, TensorInfo, classify};
use ninfer_quant::{Error, PackedMatrix, PackedParts, Site, TensorRole, encode};
use proptest::prelude::*;

use crate::fixtures::{Module, Tensor};

const UP: Site = Site::new(TensorRole::MlpUp, Part::Layer(0), 1, false);

fn t(dtype: DType, shape: &[usize], byte: u8) -> Tensor {
    let bytes = shape.iter().product::<usize>() * dtype.size();
    Tensor { dtype, shape: shape.to_vec(), bytes: vec![byte; bytes] }
}

fn module(tensors: &[(&str, Tensor)]) -> Module {
    Module(tensors.iter().map(|(s, t)| ((*s).to_owned(), t.clone())).collect())
}

/// 256 × 64 in NVFP4 as compressed-tensors stores it.
fn nvfp4() -> Module {
    module(&[
        ("weight_packed", t(DType::U8, &[256, 32], 0x12)),
        ("weight_scale", t(DType::F8E4M3, &[256, 4], 0x38)),
        ("weight_global_scale", Tensor::of_f32(&[1], &[3584.0])),
    ])
}

fn fp8() -> Module {
    module(&[
        ("weight", t(DType::F8E4M3, &[200, 300], 0x38)),
        ("weight_scale_inv", Tensor::of_f32(&[2, 3], &[1e-3; 6])),
    ])
}

fn bf16() -> Module {
    module(&[("weight", t(DType::Bf16, &[4, 6], 0x3C))])
}

/// The error, after checking that it names `tensor` and says what to do.
fn refusal(m: &Module, tensor: &str) -> Error {
    let e = m.decode().expect_err(tensor);
    assert!(e.to_string().contains(&format!("layers.0.mlp.up_proj.{tensor}")), "{e}");
    assert!(!e.help().is_empty());
    e
}

#[test]
fn the_modules_themselves_are_good() {
    assert_eq!(nvfp4().decode().unwrap().format(), WeightFormat::Nvfp4);
    assert_eq!(fp8().decode().unwrap().format(), WeightFormat::Fp8Block);
    assert_eq!(bf16().decode().unwrap().format(), WeightFormat::Bf16);
}

#[test]
fn activation_scales_do_not_matter_and_a_zero_bias_is_no_bias() {
    for m in [nvfp4(), fp8(), bf16()] {
        let plain = m.decode().unwrap();
        let mut m = m
            .with("input_scale", Tensor::of_f32(&[], &[f32::NAN]))
            .with("k_scale", Tensor::of_f32(&[], &[1.0]))
            .with("bias", t(DType::Bf16, &[4], 0));
        assert_eq!(m.decode().unwrap(), plain);
        m.get("bias").bytes[5] = 1;
        assert!(matches!(refusal(&m, "bias"), Error::TensorValue { index: 2, .. }));
    }
}

#[test]
fn tiled_scales_are_refused() {
    let e = refusal(&nvfp4().with("weight_scale", t(DType::F8E4M3, &[1024], 0x38)), "weight_scale");
    assert!(matches!(e, Error::TiledScales { .. }) && e.to_string().contains("[256, 4]"), "{e}");
    assert!(e.help().contains("row-major"));
    // Padding to whole tiles shows in the shape as well.
    let e = refusal(&nvfp4().with("weight_scale", t(DType::F8E4M3, &[256, 8], 0x38)), "weight_scale");
    assert!(matches!(e, Error::TensorShape { .. }));
}

#[test]
fn missing_tensors() {
    for (m, missing) in [
        (nvfp4().without("weight_scale"), "weight_scale"),
        (nvfp4().without("weight_global_scale"), "weight_global_scale"),
        (fp8().without("weight_scale_inv"), "weight_scale"),
    ] {
        assert!(matches!(refusal(&m, missing), Error::MissingTensor { .. }));
    }
    let modelopt =
        module(&[("weight", t(DType::U8, &[256, 32], 0x12)), ("weight_scale", t(DType::F8E4M3, &[256, 4], 0x38))]);
    assert!(matches!(refusal(&modelopt, "weight_scale_2"), Error::MissingTensor { .. }));
    let e = nvfp4().without("weight_packed").decode().unwrap_err();
    assert!(
        matches!(&e, Error::UnknownFormat { tensors, .. } if tensors.contains("weight_scale F8_E4M3 [256, 4]")),
        "{e}"
    );
    assert!(matches!(Module(vec![]).decode(), Err(Error::UnknownFormat { .. })));
}

#[test]
fn tensors_of_another_format_beside_a_module() {
    for (m, extra) in [
        (bf16().with("weight_scale", Tensor::of_f32(&[1], &[1.0])), "weight_scale"),
        (fp8().with("weight_scale_2", Tensor::of_f32(&[1], &[1.0])), "weight_scale_2"),
        (fp8().with("weight_scale", Tensor::of_f32(&[1], &[1.0])), "weight_scale"),
        (nvfp4().with("weight", t(DType::Bf16, &[256, 64], 0)), "weight"),
        (nvfp4().with("weight_scale_2", Tensor::of_f32(&[], &[1.0])), "weight_scale_2"),
        (bf16().with("lora_a", Tensor::of_f32(&[1], &[1.0])), "lora_a"),
    ] {
        assert!(matches!(refusal(&m, extra), Error::UnexpectedTensor { .. }));
    }
    let mut twice = bf16();
    twice.0.push(twice.0[0].clone());
    assert!(matches!(refusal(&twice, "weight"), Error::DuplicateTensor { .. }));
}

#[test]
fn wrong_element_types() {
    for (m, tensor) in [
        (nvfp4().with("weight_scale", t(DType::U8, &[256, 4], 0x38)), "weight_scale"), // MX scales
        (nvfp4().with("weight_global_scale", t(DType::Bf16, &[1], 0x38)), "weight_global_scale"),
        (nvfp4().with("weight_packed", t(DType::I8, &[256, 32], 0x38)), "weight_packed"),
        (fp8().with("weight_scale_inv", t(DType::U8, &[2, 3], 0x38)), "weight_scale_inv"),
        (fp8().with("weight", t(DType::I8, &[200, 300], 0x38)), "weight"),
    ] {
        assert!(matches!(refusal(&m, tensor), Error::TensorDType { .. }));
    }
}

#[test]
fn wrong_shapes_and_lengths() {
    for (m, tensor) in [
        (nvfp4().with("weight_packed", t(DType::U8, &[256, 36], 0)), "weight_packed"), // 72 columns
        (nvfp4().with("weight_packed", t(DType::U8, &[256, 40], 0)), "weight_scale"),  // 80 columns, scales of 64
        (nvfp4().with("weight_scale", t(DType::F8E4M3, &[4, 256], 0x38)), "weight_scale"),
        (nvfp4().with("weight_global_scale", Tensor::of_f32(&[2], &[1e3; 2])), "weight_global_scale"),
        (fp8().with("weight_scale_inv", Tensor::of_f32(&[3, 2], &[1e-3; 6])), "weight_scale_inv"),
        (fp8().with("weight_scale_inv", Tensor::of_f32(&[200, 1], &[1e-3; 200])), "weight_scale_inv"),
        (bf16().with("weight", t(DType::Bf16, &[24], 0)), "weight"),
        (bf16().with("weight", t(DType::Bf16, &[4, 0], 0)), "weight"),
    ] {
        assert!(matches!(refusal(&m, tensor), Error::TensorShape { .. }), "{tensor}");
    }
    for tensor in ["weight_packed", "weight_scale", "weight_global_scale"] {
        let mut m = nvfp4();
        m.get(tensor).bytes.pop();
        assert!(matches!(refusal(&m, tensor), Error::TensorBytes { .. }));
    }
}

#[test]
fn shapes_that_overflow_are_refused_before_anything_is_allocated() {
    for shape in [&[usize::MAX, 8][..], &[usize::MAX, usize::MAX], &[1 << 40, 1 << 30]] {
        for dtype in [DType::U8, DType::F8E4M3, DType::F32] {
            let info = [TensorInfo { suffix: "weight", dtype, shape }];
            assert!(matches!(classify("m", &info), Err(Error::TensorShape { .. })), "{shape:?}");
        }
    }
    for (rows, cols) in [(0, usize::MAX), (usize::MAX, 0), (usize::MAX, 2)] {
        for name in ["f32", "fp8-block", "nvfp4", "q5"] {
            let format = ninfer_quant::Recipe::ALL.map(|r| r.target(&UP, WeightFormat::F16));
            let format = format.into_iter().map(|c| c.result(WeightFormat::F16)).find(|f| f.name() == name).unwrap();
            assert!(encode(format, rows, cols, &[]).is_err());
        }
        let parts = PackedParts::Plain { dtype: DType::F32, bytes: vec![] };
        assert!(PackedMatrix::new(rows, cols, parts).is_err());
    }
}

#[test]
fn damaged_scales() {
    for byte in [0x7F, 0xFF, 0xB8] {
        let mut m = nvfp4();
        m.get("weight_scale").bytes[1023] = byte;
        assert!(matches!(refusal(&m, "weight_scale"), Error::TensorValue { index: 1023, .. }));
    }
    for g in [0.0, -3584.0, f32::NAN, f32::INFINITY] {
        let m = nvfp4().with("weight_global_scale", Tensor::of_f32(&[1], &[g]));
        assert!(matches!(refusal(&m, "weight_global_scale"), Error::TensorValue { index: 0, .. }));
    }
    for s in [-1e-3, f32::NAN, f32::NEG_INFINITY] {
        let m = fp8().with("weight_scale_inv", Tensor::of_f32(&[2, 3], &[1e-3, 1e-3, s, 1e-3, 1e-3, 1e-3]));
        assert!(matches!(refusal(&m, "weight_scale_inv"), Error::TensorValue { index: 2, .. }));
    }
    let m = fp8().without("weight_scale_inv").with("weight_scale", Tensor::of_f32(&[1], &[0.0]));
    assert!(matches!(refusal(&m, "weight_scale"), Error::TensorValue { .. }));
    let m = fp8().with("weight_scale_inv", Tensor::of_f32(&[2, 3], &[448.0; 6]));
    assert!(matches!(refusal(&m, "weight_scale_inv"), Error::SwappedScale { .. }));
}

#[test]
fn weights_that_are_not_finite() {
    let mut m = fp8();
    m.get("weight").bytes[301] = 0xFF;
    assert!(matches!(refusal(&m, "weight"), Error::TensorValue { index: 301, .. }));
    for (dtype, bits) in [(DType::Bf16, 0xFF80u16), (DType::Bf16, 0x7FC1), (DType::F16, 0x7C00), (DType::F16, 0xFE00)] {
        let mut tensor = t(dtype, &[50, 60], 0x3C);
        tensor.bytes[2 * 2047..2 * 2048].copy_from_slice(&bits.to_le_bytes());
        assert!(matches!(refusal(&module(&[("weight", tensor)]), "weight"), Error::TensorValue { index: 2047, .. }));
    }
    let mut w = [1.0; 32];
    w[21] = f32::NAN;
    for format in ["f32", "bf16", "q4", "w8", "fp8", "fp8-block", "nvfp4"] {
        let recipe: ninfer_quant::Recipe = format.parse().unwrap();
        let to = recipe.target(&UP, WeightFormat::F16).result(WeightFormat::F16);
        let e = encode(to, 2, 16, &w).unwrap_err();
        assert!(matches!(e, Error::NonFinite { row: 1, col: 5, .. }), "{format}: {e}");
    }
    // Finite in f32, infinite in the target.
    assert!(matches!(encode(WeightFormat::F16, 1, 1, &[-65520.0]), Err(Error::NonFinite { .. })));
    assert!(matches!(encode(WeightFormat::Bf16, 1, 1, &[f32::MAX]), Err(Error::NonFinite { .. })));
    let q6 = WeightFormat::Group(ninfer_core::format::GroupFormat::Q6);
    assert!(matches!(encode(q6, 1, 1, &[2.1e6]), Err(Error::Overflow { .. })));
    assert!(encode(q6, 1, 1, &[2.0e6]).is_ok());
}

#[test]
fn matrices_made_by_hand_are_checked() {
    use ninfer_core::format::GroupFormat::{Q5, W8};
    let group = |format, base: Vec<u8>, high: Vec<u8>, scale: u16| {
        let groups = base.len() / 32;
        PackedParts::Group { format, base, high, scales: scale.to_le_bytes().repeat(groups) }
    };
    assert!(PackedMatrix::new(1, 128, group(W8, vec![5; 128], vec![], 0x3C00)).is_ok());
    let e = PackedMatrix::new(1, 128, group(W8, vec![0x80; 128], vec![], 0x3C00));
    assert!(matches!(e, Err(Error::Code { index: 0, code: 0x80, .. })));
    // A code in the padding of 100 columns.
    let mut base = vec![0; 128];
    base[100] = 1;
    let e = PackedMatrix::new(1, 100, group(W8, base, vec![], 0x3C00));
    assert!(matches!(e, Err(Error::Code { index: 100, .. })));
    let mut high = vec![0; 16];
    high[15] = 0x80; // lane 127
    assert!(PackedMatrix::new(1, 128, group(Q5, vec![0; 64], high.clone(), 0x3C00)).is_ok());
    let e = PackedMatrix::new(1, 127, group(Q5, vec![0; 64], high, 0x3C00));
    assert!(matches!(e, Err(Error::Code { index: 127, .. })));
    for scale in [0x7C00, 0x7E00, 0xBC00] {
        let e = PackedMatrix::new(1, 128, group(Q5, vec![0; 64], vec![0; 16], scale));
        assert!(matches!(e, Err(Error::Scale { .. })));
    }
    assert!(matches!(
        PackedMatrix::new(1, 128, group(Q5, vec![0; 64], vec![0; 15], 0x3C00)),
        Err(Error::Core(ninfer_core::Error::Shape { .. }))
    ));
}

#[test]
fn rows_and_buffers_that_do_not_exist() {
    let m = encode(WeightFormat::Fp8Row, 2, 3, &[1.0; 6]).unwrap();
    assert!(matches!(m.dequantize_row(2, &mut [0.0; 3]), Err(Error::Rows { .. })));
    assert!(matches!(m.dequantize_row(usize::MAX, &mut [0.0; 3]), Err(Error::Rows { .. })));
    assert!(matches!(m.dequantize_row(0, &mut [0.0; 4]), Err(Error::Length { .. })));
    #[expect(clippy::reversed_empty_ranges)]
    let reversed = m.slice_rows(2..1);
    assert!(matches!(reversed, Err(Error::Rows { .. })));
    assert!(matches!(PackedMatrix::concat_rows(&[]), Err(Error::Length { .. })));
    assert!(matches!(encode(WeightFormat::F32, 2, 3, &[1.0; 5]), Err(Error::Length { .. })));
    assert!(matches!(encode(WeightFormat::Nvfp4, 1, 24, &[1.0; 24]), Err(Error::Columns { .. })));
}

#[test]
fn stored_kinds_are_known_from_headers() {
    let info = |suffix, dtype, shape| TensorInfo { suffix, dtype, shape };
    let m =
        classify("m", &[info("weight", DType::F8E4M3, &[100, 100]), info("weight_scale_inv", DType::Bf16, &[1, 1])]);
    assert_eq!(m.unwrap().kind, StoredKind::Fp8Block);
    let m = classify(
        "m",
        &[
            info("weight", DType::U8, &[4, 32]),
            info("weight_scale", DType::F8E4M3, &[4, 4]),
            info("weight_scale_2", DType::F32, &[]),
        ],
    )
    .unwrap();
    assert_eq!((m.kind, m.rows, m.cols, m.max_bytes()), (StoredKind::Nvfp4ModelOpt, 4, 64, 4 * 36 + 4));
    let e = classify(
        "m",
        &[
            info("qweight", DType::I32, &[4, 8]),
            info("qzeros", DType::I32, &[1, 2]),
            info("scales", DType::F16, &[1, 8]),
            info("g_idx", DType::I32, &[16]),
        ],
    );
    assert!(matches!(&e, Err(Error::Unsupported { what, .. }) if what.contains("8-bit")), "{e:?}");
}

fn any_tensor() -> impl Strategy<Value = (String, Tensor)> {
    let suffix = prop::sample::select(
        ninfer_quant::checkpoint::WEIGHT_SUFFIXES.into_iter().chain(["input_scale", "other"]).collect::<Vec<_>>(),
    );
    let dtype = prop::sample::select(vec![
        DType::F32,
        DType::F16,
        DType::Bf16,
        DType::F8E4M3,
        DType::U8,
        DType::I32,
        DType::I64,
    ]);
    let dimension = prop::sample::select(vec![0usize, 1, 2, 4, 8, 16, 32]);
    (suffix, dtype, prop::collection::vec(dimension, 0..4), any::<u64>(), 0usize..20).prop_map(
        |(suffix, dtype, shape, seed, cut)| {
            let len = shape.iter().product::<usize>() * dtype.size();
            // Small integers now and then, so that shapes and indices are sometimes meaningful.
            let mut bytes: Vec<u8> = (0..len).map(|i| (seed.rotate_left(i as u32 % 64) >> (seed % 8)) as u8).collect();
            if seed % 3 == 0 {
                bytes.iter_mut().enumerate().for_each(|(i, b)| *b = if i % dtype.size() == 0 { *b % 9 } else { 0 });
            }
            if cut == 0 {
                bytes.pop();
            }
            (suffix.to_owned(), Tensor { dtype, shape, bytes })
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn no_list_of_tensors_panics(tensors in prop::collection::vec(any_tensor(), 0..5)) {
        if let Ok(m) = Module(tensors).decode() {
            prop_assert!(m.dequantize().iter().all(|x| x.is_finite()));
            prop_assert!(PackedMatrix::new(m.rows(), m.cols(), m.parts().clone()).is_ok());
        }
    }

    #[test]
    fn damaged_bytes_of_good_modules_never_panic(which in 0usize..3, tensor in 0usize..3, at in any::<usize>(), byte: u8) {
        let mut m = [nvfp4(), fp8(), bf16()][which].clone();
        let count = m.0.len();
        let t = &mut m.0[tensor % count].1;
        let n = t.bytes.len();
        t.bytes[at % n] = byte;
        if let Ok(m) = m.decode() {
            prop_assert!(m.dequantize().iter().all(|x| x.is_finite()));
        }
    }
}
