//! Codes against tables made by torch and compressed-tensors.

use ninfer_quant::codes::*;

use crate::fixtures::{File, assert_same};

#[test]
fn every_code_decodes_as_in_the_tables() {
    let file = File::open("tables.safetensors");
    let e4m3: Vec<f32> = (0..=255).map(decode_e4m3).collect();
    assert_same(&e4m3, &file.get("e4m3_to_f32").f32());
    assert_same(&e4m3[..128], &file.get("ue4m3_to_f32").f32());
    let e2m1: Vec<f32> = (0..16).map(decode_e2m1).collect();
    assert_same(&e2m1, &file.get("e2m1_to_f32").f32());
}

#[test]
fn every_probe_encodes_as_in_the_tables() {
    let file = File::open("tables.safetensors");
    let (x, codes) = (file.get("e4m3_encode.input").f32(), file.get("e4m3_encode.code").bytes);
    assert_eq!(x.len(), 1535);
    for (x, code) in x.into_iter().zip(codes) {
        let got = encode_e4m3(x);
        assert!(got == code || (x.is_nan() && got & 0x7F == 0x7F), "{x}: {got:#x} is not {code:#x}");
    }
    let (x, codes) = (file.get("e2m1_encode.input").f32(), file.get("e2m1_encode.code").bytes);
    assert_eq!(x.len(), 108);
    for (x, code) in x.into_iter().zip(codes) {
        assert_eq!(encode_e2m1(x), code, "{x}");
    }
    for (bits, code) in file.get("bf16_encode.input_bits").i64().into_iter().zip(file.get("bf16_encode.code").i64()) {
        let x = f32::from_bits(u32::try_from(bits).unwrap());
        let got = encode_bf16(x);
        if x.is_nan() {
            assert!(decode_bf16(got).is_nan());
        } else {
            assert_eq!(i64::from(got), code, "{x}");
        }
    }
}

#[test]
fn e5m2_bytes_are_not_read_as_e4m3() {
    // 0x3C is 1.0 in E5M2 and 1.5 in E4M3; 0x01 is 2⁻¹⁶ there and 2⁻⁹ here.
    assert_eq!(decode_e4m3(0x3C), 1.5);
    assert_eq!(decode_e4m3(0x01), 0.001953125);
}

#[test]
fn slices_decode_as_single_values_do() {
    let codes: Vec<u8> = (0..=255).collect();
    let mut out = vec![0.0; 256];
    decode_e4m3_scaled(&codes, 0.375, &mut out);
    assert_same(&out, &codes.iter().map(|&c| decode_e4m3(c) * 0.375).collect::<Vec<_>>());
    let mut out = vec![0.0; 512];
    decode_e2m1_scaled(&codes, 0.7, &mut out);
    let expected: Vec<f32> =
        codes.iter().flat_map(|c| [decode_e2m1(c & 15) * 0.7, decode_e2m1(c >> 4) * 0.7]).collect();
    assert_same(&out, &expected);

    let every_word: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let mut out = vec![0.0; 65536];
    decode_bf16_slice(&every_word, &mut out);
    assert_same(&out, &(0..=u16::MAX).map(decode_bf16).collect::<Vec<_>>());
    let finite: Vec<f32> = out.iter().copied().filter(|x| x.is_finite()).collect();
    let mut back = vec![0.0; finite.len()];
    decode_bf16_slice(&encode_bf16_slice(&finite), &mut back);
    assert_same(&back, &finite);
    decode_f16_slice(&every_word, &mut out);
    assert_same(&out, &(0..=u16::MAX).map(decode_f16).collect::<Vec<_>>());
    let finite: Vec<f32> = out.iter().copied().filter(|x| x.is_finite()).collect();
    let mut back = vec![0.0; finite.len()];
    decode_f16_slice(&encode_f16_slice(&finite), &mut back);
    assert_same(&back, &finite);
    decode_f32_slice(&encode_f32_slice(&finite), &mut back);
    assert_same(&back, &finite);
}

#[test]
fn f16_at_its_edges() {
    assert_eq!(decode_f16(0x0001), 2f32.powi(-24));
    assert_eq!(decode_f16(0x7BFF), 65504.0);
    // Halfway to the smallest subnormal goes to the even code, 0; anything above goes up.
    assert_eq!(encode_f16(2f32.powi(-25)), 0);
    assert_eq!(encode_f16(2f32.powi(-25).next_up()), 1);
    assert_eq!(encode_f16(65519.99), 0x7BFF);
    assert_eq!(encode_f16(65520.0), 0x7C00);
}
