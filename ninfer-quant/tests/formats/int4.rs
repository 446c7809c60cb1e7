//! Int4 layouts against the packages that write them.

use ninfer_core::format::GroupFormat;
use ninfer_core::{DType, WeightFormat};
use ninfer_quant::Error;
use ninfer_quant::checkpoint::{DecodeOptions, GptqZeros};

use crate::fixtures::{File, Module, Tensor};

const CT_SYM: [&str; 3] = ["weight_packed", "weight_scale", "weight_shape"];
const CT_ASYM: [&str; 4] = ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"];
const GPTQ: [&str; 4] = ["qweight", "qzeros", "scales", "g_idx"];
const AWQ: [&str; 3] = ["qweight", "qzeros", "scales"];

fn group(g: GroupFormat) -> WeightFormat {
    WeightFormat::Group(g)
}

#[test]
fn every_layout_decodes_exactly() {
    let file = File::open("int4.safetensors");
    // The scales of the compressed-tensors modules are F32 numbers that f16 does not hold; act-order scatters groups.
    let cases: [(&str, &[&str], WeightFormat); 6] = [
        ("ct_sym", &CT_SYM, WeightFormat::F32),
        ("ct_asym", &CT_ASYM, WeightFormat::F32),
        ("gptq_sym", &GPTQ, group(GroupFormat::Q4)),
        ("gptq_asym", &GPTQ, group(GroupFormat::Q5)),
        ("gptq_actorder", &GPTQ, WeightFormat::F32),
        ("awq", &AWQ, group(GroupFormat::Q5)),
    ];
    for (prefix, suffixes, format) in cases {
        let m = file.module(prefix, suffixes).decode().unwrap();
        assert_eq!((m.rows(), m.cols(), m.format()), (16, 256, format), "{prefix}");
        assert_eq!(m.dequantize(), file.get(&format!("{prefix}.dequant")).f32(), "{prefix}");
    }
}

#[test]
fn gptq_without_group_indices_is_told_from_awq_by_shape() {
    let file = File::open("int4.safetensors");
    let m = file.module("gptq_sym", &["qweight", "qzeros", "scales"]).decode().unwrap();
    assert_eq!(m, file.module("gptq_sym", &GPTQ).decode().unwrap());
}

#[test]
fn the_second_gptq_version_stores_the_zero_point_itself() {
    let file = File::open("int4.safetensors");
    let mut v2 = file.module("gptq_asym", &GPTQ);
    for word in v2.get("qzeros").bytes.chunks_exact_mut(4) {
        let w = u32::from_le_bytes(word.try_into().unwrap());
        word.copy_from_slice(&(w + 0x1111_1111).to_le_bytes());
    }
    let options = DecodeOptions::default().with_gptq_zeros(GptqZeros::Exact);
    assert_eq!(v2.decode_with(&options).unwrap(), file.module("gptq_asym", &GPTQ).decode().unwrap());
    assert_ne!(v2.decode().unwrap(), v2.decode_with(&options).unwrap());
}

fn packed(shape: [i64; 2], words: &[u32], groups: usize, scales: &[f32]) -> Module {
    let rows = usize::try_from(shape[0]).unwrap();
    let per_row = words.len() / rows;
    Module(vec![
        (
            "weight_packed".to_owned(),
            Tensor {
                dtype: DType::I32,
                shape: vec![rows, per_row],
                bytes: words.iter().flat_map(|w| w.to_le_bytes()).collect(),
            },
        ),
        ("weight_scale".to_owned(), Tensor::of_f32(&[rows, groups], scales)),
        (
            "weight_shape".to_owned(),
            Tensor { dtype: DType::I64, shape: vec![2], bytes: shape.iter().flat_map(|d| d.to_le_bytes()).collect() },
        ),
    ])
}

#[test]
fn eight_bit_words_and_partial_words() {
    // Bytes 0x80 + q, lowest first: q = 1, −2, 127, 0 and four zeros.
    let m = packed([1, 8], &[0x80FF_7E81, 0x8080_8080], 1, &[0.5]).decode().unwrap();
    assert_eq!(m.format(), group(GroupFormat::W8));
    assert_eq!(m.dequantize(), [0.5, -1.0, 63.5, 0.0, 0.0, 0.0, 0.0, 0.0]);
    // The narrowest format that holds the codes.
    let m = packed([1, 8], &[0x8083_7E81, 0x8080_8080], 1, &[0.5]).decode().unwrap();
    assert_eq!((m.format(), m.dequantize()[2]), (group(GroupFormat::Q4), 1.5));
    // Ten columns of four bits: the second word is mostly padding.
    let m = packed([1, 10], &[0x7654_3210, 0x0000_00F8], 1, &[2.0]).decode().unwrap();
    assert_eq!(m.format(), group(GroupFormat::Q4));
    assert_eq!(m.dequantize(), [-16.0, -14.0, -12.0, -10.0, -8.0, -6.0, -4.0, -2.0, 0.0, 14.0]);
    // The code −128 exists in this format and not in W8.
    let m = packed([1, 8], &[0x8080_8000, 0x8080_8080], 1, &[1.0]).decode().unwrap();
    assert_eq!((m.format(), m.dequantize()[0]), (WeightFormat::F32, -128.0));
}

#[test]
fn damaged_int4_modules_are_refused() {
    let file = File::open("int4.safetensors");
    let mut m = file.module("gptq_sym", &GPTQ);
    m.get("g_idx").bytes[8..12].copy_from_slice(&4i32.to_le_bytes());
    let e = m.decode().unwrap_err();
    assert!(matches!(e, Error::TensorValue { index: 2, .. }), "{e}");
    m.get("g_idx").bytes[8..12].copy_from_slice(&(-1i32).to_le_bytes());
    assert!(matches!(m.decode(), Err(Error::TensorValue { index: 2, .. })));

    let mut m = file.module("awq", &AWQ);
    m.get("scales").bytes[2..4].copy_from_slice(&0x7C00u16.to_le_bytes());
    assert!(matches!(m.decode(), Err(Error::TensorValue { index: 1, .. })));
    m.get("scales").shape = vec![3, 16];
    assert!(matches!(m.decode(), Err(Error::TensorShape { .. } | Error::TensorBytes { .. })));

    for shape in [[2, 4], [1, 3], [1, 400], [1, -4], [-1, 4], [1, i64::MAX]] {
        let e = packed([1, 4], &[0x8888_8888], 1, &[1.0]).with(
            "weight_shape",
            Tensor {
                dtype: DType::I64,
                shape: vec![2],
                bytes: shape.iter().flat_map(|d: &i64| d.to_le_bytes()).collect(),
            },
        );
        let e = e.decode();
        // Three columns fill one word as four do.
        assert_eq!(e.is_ok(), shape == [1, 3], "{shape:?}: {e:?}");
    }
    let e = packed([1, 16], &[0, 0], 3, &[1.0; 3]).decode().unwrap_err();
    assert!(matches!(e, Error::TensorShape { .. }), "{e}");
}
