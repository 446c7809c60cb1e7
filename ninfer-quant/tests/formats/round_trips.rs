//! Round trips over random shapes and values.

use ninfer_core::WeightFormat;
use ninfer_core::format::GroupFormat;
use ninfer_quant::codes::*;
use ninfer_quant::{PackedMatrix, PackedParts, encode};
use proptest::prelude::*;

use crate::fixtures::assert_same;

const GROUPS: [GroupFormat; 4] = [GroupFormat::Q4, GroupFormat::Q5, GroupFormat::Q6, GroupFormat::W8];

fn finite() -> impl Strategy<Value = f32> {
    any::<u32>().prop_map(f32::from_bits).prop_filter("finite", |x| x.is_finite())
}

fn matrix(max_cols: usize) -> impl Strategy<Value = (usize, usize, Vec<f32>)> {
    let value = prop_oneof![8 => -1.0f32..1.0, 1 => Just(0.0), 1 => -1e-6f32..1e-6, 1 => -100.0f32..100.0];
    (1usize..5, 1..=max_cols)
        .prop_flat_map(move |(r, c)| (Just(r), Just(c), prop::collection::vec(value.clone(), r * c)))
}

/// The encoder of the groupwise formats, once more and in the plainest form, in terms of whole weights.
fn groupwise_by_definition(f: GroupFormat, cols: usize, w: &[f32]) -> Vec<f32> {
    let mut out = Vec::new();
    for row in w.chunks(cols) {
        for group in row.chunks(f.group_size()) {
            let amax = group.iter().map(|x| x.abs()).fold(0.0, f32::max);
            let mut s = half::f16::from_f32(amax / f.qmax() as f32).to_f32();
            if s == 0.0 && amax > 0.0 {
                s = 2f32.powi(-24);
            }
            let inv = 1.0 / s;
            let q = |x: f32| if amax == 0.0 { 0.0 } else { (x * inv).round_ties_even() };
            let limit = f.qmax() as f32;
            // Codes are integers: a negative zero does not survive.
            out.extend(group.iter().map(|&x| q(x).clamp(-limit, limit) as i32 as f32 * s));
        }
    }
    out
}

/// The nearest of all E4M3 values by search, ties to the even code.
fn nearest_e4m3(x: f32) -> u8 {
    let distance = |c: u8| (f64::from(decode_e4m3(c)) - f64::from(x).abs()).abs();
    if x.abs() >= 448.0 {
        return 0x7E | (u8::from(x.is_sign_negative()) << 7);
    }
    let best = (0..=0x7Eu8).min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))).unwrap();
    best | (u8::from(x.is_sign_negative()) << 7)
}

proptest! {
    #[test]
    fn e4m3_is_the_nearest_value(x in prop_oneof![finite(), -500.0f32..500.0, -0.05f32..0.05]) {
        prop_assert_eq!(encode_e4m3(x), nearest_e4m3(x));
    }

    #[test]
    fn e2m1_is_the_nearest_value(x in prop_oneof![finite(), -8.0f32..8.0]) {
        let distance = |c: u8| (decode_e2m1(c) - x.abs()).abs();
        let got = encode_e2m1(x);
        prop_assert_eq!(got >> 3 == 1, x.is_sign_negative());
        prop_assert!((0..8).all(|c| distance(got & 7) <= distance(c)));
    }

    #[test]
    fn halves_are_the_nearest_values(x in finite()) {
        for (code, back, next) in [
            (encode_bf16(x), decode_bf16 as fn(u16) -> f32, 0x7F80u16),
            (encode_f16(x), decode_f16 as fn(u16) -> f32, 0x7C00),
        ] {
            let (m, a) = (code & 0x7FFF, f64::from(x.abs()));
            prop_assert_eq!(code >> 15 == 1, x.is_sign_negative());
            let d = |m: u16| (f64::from(back(m)) - a).abs();
            if m < next - 1 {
                prop_assert!((m == 0 || d(m) <= d(m - 1)) && d(m) <= d(m + 1));
            }
        }
    }

    #[test]
    fn groupwise_follows_its_definition((rows, cols, w) in matrix(200), f in prop::sample::select(GROUPS.to_vec())) {
        let m = encode(WeightFormat::Group(f), rows, cols, &w).unwrap();
        let got = m.dequantize();
        let expected = groupwise_by_definition(f, cols, &w);
        prop_assert_eq!(&got, &expected);
        for (x, v) in w.iter().zip(&got) {
            // Half a step, a step being at most amax / qmax plus the f16 rounding of the scale.
            prop_assert!((x - v).abs() <= 100.0 / f.qmax() as f32);
        }
        // Codes and padding are legal, and the exact weights encode to themselves once the scale is kept.
        prop_assert_eq!(&PackedMatrix::new(rows, cols, m.parts().clone()).unwrap(), &m);
    }

    #[test]
    fn encoded_matrices_are_valid_and_rows_agree((rows, cols, w) in matrix(150), pick in 0usize..12) {
        let formats = [
            WeightFormat::F32, WeightFormat::F16, WeightFormat::Bf16, WeightFormat::Fp8Tensor, WeightFormat::Fp8Row,
            WeightFormat::Fp8Block, WeightFormat::Nvfp4, WeightFormat::Nvfp4,
            WeightFormat::Group(GroupFormat::Q4), WeightFormat::Group(GroupFormat::Q5),
            WeightFormat::Group(GroupFormat::Q6), WeightFormat::Group(GroupFormat::W8),
        ];
        let format = formats[pick];
        let (cols, w) = if format == WeightFormat::Nvfp4 { (cols * 16, w.repeat(16)) } else { (cols, w) };
        let m = encode(format, rows, cols, &w).unwrap();
        prop_assert_eq!(m.format(), format);
        prop_assert_eq!(m.bytes(), format.bytes(rows, cols));
        prop_assert_eq!(&PackedMatrix::new(rows, cols, m.parts().clone()).unwrap(), &m);
        prop_assert_eq!(&PackedMatrix::from_ref(&m.as_ref()).unwrap(), &m);
        let all = m.dequantize();
        let mut row = vec![f32::NAN; cols];
        for r in 0..rows {
            m.dequantize_row(r, &mut row).unwrap();
            assert_same(&row, &all[r * cols..(r + 1) * cols]);
        }
        if format != WeightFormat::Fp8Block {
            let (a, b) = (m.slice_rows(0..rows / 2).unwrap(), m.slice_rows(rows / 2..rows).unwrap());
            assert_same(&b.dequantize(), &all[rows / 2 * cols..]);
            prop_assert_eq!(PackedMatrix::concat_rows(&[&a, &b]).unwrap(), m);
        }
    }

    #[test]
    fn fp8_is_within_half_a_step((rows, cols, w) in matrix(150)) {
        for format in [WeightFormat::Fp8Tensor, WeightFormat::Fp8Row, WeightFormat::Fp8Block] {
            let m = encode(format, rows, cols, &w).unwrap();
            let PackedParts::Fp8 { scales, .. } = m.parts() else { panic!() };
            let largest = match scales {
                ninfer_quant::Fp8ScaleVec::Tensor(s) => *s,
                ninfer_quant::Fp8ScaleVec::Row(s) | ninfer_quant::Fp8ScaleVec::Block(s) => s.iter().copied().fold(0.0, f32::max),
            };
            for (x, v) in w.iter().zip(m.dequantize()) {
                // Half an E4M3 step is a 17th; a block scale rounded down to BF16 saturates by 2⁻⁹ more at most.
                prop_assert!((x - v).abs() <= (x.abs() * (1.0 / 17.0 + 1.0 / 512.0)).max(largest / 1024.0) * 1.00001);
            }
        }
    }

    #[test]
    fn nvfp4_codes_survive_decoding_and_encoding(
        codes in prop::collection::vec(any::<u8>(), 16),
        scales in prop::collection::vec(0x20u8..0x7F, 2),
        exponent in -20i32..10,
    ) {
        // A group that holds ±6 under a power-of-two global scale determines its scale and codes again.
        let mut codes = codes;
        (codes[0], codes[9]) = (0x77, 0xF7);
        let g = 2f32.powi(exponent);
        let global = ninfer_core::format::GlobalScale::Multiply(g);
        let m = PackedMatrix::new(1, 32, PackedParts::Nvfp4 { codes, scales, global }).unwrap();
        let convention = ninfer_quant::nvfp4::Convention::ModelOpt;
        let again = ninfer_quant::nvfp4::encode(convention, 1, 32, &m.dequantize(), Some(2688.0 * g)).unwrap();
        prop_assert_eq!(again, m);
    }
}
