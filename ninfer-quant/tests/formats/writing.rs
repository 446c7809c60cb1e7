//! What is written is read back: the same matrix, to the bit.

use ninfer_core::format::GroupFormat;
use ninfer_core::{DType, WeightFormat};
use ninfer_quant::checkpoint::{DecodeOptions, StoredKind, StoredTensor, TensorInfo, classify, decode};
use ninfer_quant::nvfp4::Convention;
use ninfer_quant::writer::{BlockScaleName, WrittenTensor, kind, layout, tensors};
use ninfer_quant::{Error, PackedMatrix, encode, nvfp4};
use proptest::prelude::*;

const FORMATS: [WeightFormat; 11] = [
    WeightFormat::F32,
    WeightFormat::F16,
    WeightFormat::Bf16,
    WeightFormat::Fp8Tensor,
    WeightFormat::Fp8Row,
    WeightFormat::Fp8Block,
    WeightFormat::Nvfp4,
    WeightFormat::Group(GroupFormat::Q4),
    WeightFormat::Group(GroupFormat::Q5),
    WeightFormat::Group(GroupFormat::Q6),
    WeightFormat::Group(GroupFormat::W8),
];

fn stored<'a>(written: &'a [WrittenTensor<'_>]) -> Vec<StoredTensor<'a>> {
    written.iter().map(|t| StoredTensor::new(t.layout.suffix, t.layout.dtype, &t.layout.shape, &t.bytes)).collect()
}

fn read(written: &[WrittenTensor<'_>]) -> Result<PackedMatrix, Error> {
    decode("m", &stored(written), &DecodeOptions::default())
}

fn check(m: &PackedMatrix, blocks: BlockScaleName) {
    let written = tensors(m, blocks).unwrap();
    let layouts = layout(kind(m), m.rows(), m.cols(), blocks).unwrap();
    assert_eq!(layouts, written.iter().map(|t| t.layout.clone()).collect::<Vec<_>>());
    assert!(written.iter().all(|t| t.bytes.len() == t.layout.bytes()));
    let back = read(&written).unwrap();
    assert_eq!(back.dequantize(), m.dequantize());
    // Of one row, a scale for the row is a scale for the matrix or for its one block: the shapes are the same.
    if m.rows() > 1 || m.format() != WeightFormat::Fp8Row {
        assert_eq!(&back, m);
        let infos: Vec<TensorInfo<'_>> = stored(&written).iter().map(|t| t.info).collect();
        assert_eq!(classify("m", &infos).unwrap().kind, kind(m));
    }
}

proptest! {
    #[test]
    fn every_format_comes_back(
        rows in 1usize..140,
        groups in 1usize..20,
        seed in any::<u32>(),
        format in proptest::sample::select(&FORMATS),
    ) {
        let cols = if format == WeightFormat::Nvfp4 { 16 * groups } else { 16 * groups - seed as usize % 16 };
        let value = |i: usize| ((i as u32).wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32 / 2f32.powi(26) - 0.1;
        let w: Vec<f32> = (0..rows * cols).map(value).collect();
        let m = encode(format, rows, cols, &w).unwrap();
        check(&m, BlockScaleName::WeightScaleInv);
        check(&m, BlockScaleName::WeightScale);
    }
}

#[test]
fn the_multiplying_convention_comes_back() {
    let w: Vec<f32> = (0..96).map(|i| (i as f32 - 40.0) / 512.0).collect();
    check(&nvfp4::encode(Convention::ModelOpt, 3, 32, &w, None).unwrap(), BlockScaleName::default());
}

#[test]
fn kinds_that_are_only_read_are_refused() {
    for kind in [StoredKind::Gptq, StoredKind::Awq, StoredKind::IntCompressedTensors] {
        let error = layout(kind, 8, 8, BlockScaleName::default()).unwrap_err();
        assert_eq!(error, Error::NotWritten { kind });
    }
    let error = layout(StoredKind::Nvfp4ModelOpt, 8, 24, BlockScaleName::default()).unwrap_err();
    assert!(matches!(error, Error::Columns { multiple: 16, cols: 24, .. }));
}

/// A tensor of a stored module, to be damaged.
type Owned = (&'static str, DType, Vec<usize>, Vec<u8>);

/// What reading says of a Q5 matrix of 2 rows and 200 columns after a change to its tensors.
fn damaged(change: impl Fn(&mut Vec<Owned>)) -> Error {
    let w: Vec<f32> = (0..400).map(|i| (i % 31) as f32 - 15.0).collect();
    let m = encode(WeightFormat::Group(GroupFormat::Q5), 2, 200, &w).unwrap();
    let written = tensors(&m, BlockScaleName::default()).unwrap();
    let mut list: Vec<Owned> =
        written.into_iter().map(|t| (t.layout.suffix, t.layout.dtype, t.layout.shape, t.bytes.into_owned())).collect();
    change(&mut list);
    let tensors: Vec<_> = list.iter().map(|(s, d, shape, bytes)| StoredTensor::new(s, *d, shape, bytes)).collect();
    decode("m", &tensors, &DecodeOptions::default()).unwrap_err()
}

#[test]
fn damaged_groupwise_modules_name_the_tensor() {
    let f16 = |x: f32| half::f16::from_f32(x).to_le_bytes();
    type Damage<'a> = &'a dyn Fn(&mut Vec<Owned>);
    let cases: [(Damage<'_>, &str); 14] = [
        (&|l| drop(l.remove(3)), "m.weight_shape"),
        (&|l| drop(l.remove(2)), "m.weight_scale"),
        (&|l| l[0].1 = DType::I32, "m.weight_codes"),
        (&|l| l[0].1 = DType::I8, "m.weight_codes_high"),
        (&|l| l[0].2 = vec![4, 64], "m.weight_codes_high"),
        (&|l| l[1].2 = vec![64, 1], "m.weight_codes_high"),
        (&|l| l[1].1 = DType::I8, "m.weight_codes_high"),
        (&|l| l[2].1 = DType::Bf16, "m.weight_scale"),
        (&|l| l[2].3[..2].copy_from_slice(&f16(f32::NAN)), "m.weight_scale"),
        (&|l| l[2].3[2..4].copy_from_slice(&f16(-1.0)), "m.weight_scale"),
        (&|l| l[3].3[0] = 3, "m.weight_shape"),
        (&|l| l[3].3[9] = 1, "m.weight_shape"),
        (&|l| l[3].3[8] = 199, "m.weight_codes"),
        (&|l| l.push(("weight", DType::U8, vec![1, 1], vec![0])), "m.weight"),
    ];
    for (i, (change, tensor)) in cases.into_iter().enumerate() {
        let message = damaged(change).to_string();
        assert!(message.contains(tensor), "{i}: {message}");
    }
}
