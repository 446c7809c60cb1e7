//! Number codes: E2M1, E4M3, BF16 and F16, one value at a time and by slices.
//!
//! | code | sign, exponent (bias), mantissa | largest | smallest positive | not a number | infinity |
//! |---|---|---|---|---|---|
//! | E2M1 | 1, 2 (1), 1 | 6 | 0.5 | none | none |
//! | E4M3 (`e4m3fn`) | 1, 4 (7), 3 | 448 (`0x7E`) | 2⁻⁹ | `0x7F`, `0xFF` | none |
//! | BF16 | 1, 8 (127), 7 | 3.39e38 | 2⁻¹³³ | yes | yes |
//! | F16 | 1, 5 (15), 10 | 65504 | 2⁻²⁴ | yes | yes |
//!
//! Encoders round to nearest, ties to the even code. E2M1 and E4M3 saturate: anything above the largest value, infinity
//! included, becomes the largest value. The E4M3 code of a NaN is `0x7F` (`0xFF` if its sign bit is set); E2M1 has no
//! NaN, and [`encode_e2m1`] maps one to a zero, so whoever encodes weights checks for NaN first, as
//! [`encode`](crate::encode()) does.

use half::f16;

pub use crate::slices::{
    decode_bf16_slice, decode_e2m1_scaled, decode_e4m3_scaled, decode_f16_slice, decode_f32_slice, encode_bf16_slice,
    encode_f16_slice, encode_f32_slice,
};

/// Largest E2M1 value.
pub const E2M1_MAX: f32 = 6.0;
/// Largest E4M3 value.
pub const E4M3_MAX: f32 = 448.0;
/// Smallest positive E4M3 value, 2⁻⁹.
pub const E4M3_MIN_POSITIVE: f32 = 1.0 / 512.0;

/// The values of the 16 E2M1 codes; code 8 is −0.
pub const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The two E2M1 values of each byte: low nibble first.
pub const E2M1_PAIRS: [[f32; 2]; 256] = {
    let mut table = [[0.0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = [E2M1[byte & 15], E2M1[byte >> 4]];
        byte += 1;
    }
    table
};

/// The values of the 256 E4M3 codes; `0x7F` and `0xFF` are NaN.
pub const E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = e4m3_value(code as u32);
        code += 1;
    }
    table
};

const fn e4m3_value(code: u32) -> f32 {
    let (exponent, mantissa) = ((code >> 3) & 15, code & 7);
    let magnitude = if exponent == 15 && mantissa == 7 {
        f32::NAN
    } else if exponent == 0 {
        mantissa as f32 * E4M3_MIN_POSITIVE
    } else {
        f32::from_bits(((exponent + 120) << 23) | (mantissa << 20))
    };
    if code & 0x80 != 0 { -magnitude } else { magnitude }
}

/// Decodes an E2M1 code; the high four bits of `code` are ignored.
///
/// ```
/// use ninfer_quant::codes::decode_e2m1;
/// assert_eq!(decode_e2m1(5), 3.0);
/// assert_eq!(decode_e2m1(13), -3.0);
/// ```
#[must_use]
pub const fn decode_e2m1(code: u8) -> f32 {
    E2M1[(code & 15) as usize]
}

/// Encodes to E2M1: nearest, ties to the even code, saturating at ±6.
///
/// The midpoints go 0.25→0, 0.75→1, 1.25→1, 1.75→2, 2.5→2, 3.5→4, 5→4. The sign of zero is kept.
///
/// ```
/// use ninfer_quant::codes::{decode_e2m1, encode_e2m1};
/// assert_eq!(decode_e2m1(encode_e2m1(2.5)), 2.0);
/// assert_eq!(decode_e2m1(encode_e2m1(-1e9)), -6.0);
/// ```
#[must_use]
#[inline]
pub const fn encode_e2m1(x: f32) -> u8 {
    if x.is_nan() { (x.to_bits() >> 28) as u8 & 8 } else { nearest_e2m1(x) }
}

/// [`encode_e2m1`] of a number, in selections instead of branches: loops over it become vector instructions.
#[inline(always)]
pub(crate) const fn nearest_e2m1(x: f32) -> u8 {
    // Below 1 the codes are steps of 0.5: adding 2²² leaves such a step as the last bit of the sum, rounded to nearest even.
    const STEPS: f32 = 4_194_304.0;
    let bits = x.to_bits();
    let a = bits & 0x7FFF_FFFF;
    let below_one = (f32::from_bits(a) + STEPS).to_bits().wrapping_sub(STEPS.to_bits());
    // From 1 on they are exponent and first mantissa bit; a carry out of the mantissa raises the exponent correctly.
    let from_one = (bits >> 22 & 1).wrapping_add(a).wrapping_add(0x1F_FFFF).wrapping_sub(126 << 23) >> 22;
    // Compared as signed numbers, which vector units do in one step.
    let code = if (a as i32) < 0x3F80_0000 { below_one } else { from_one } as i32;
    let code = if code > 7 { 7 } else { code };
    (code as u32 | bits >> 28 & 8) as u8
}

/// Decodes an E4M3 code.
///
/// ```
/// use ninfer_quant::codes::decode_e4m3;
/// assert_eq!(decode_e4m3(0x01), 0.001953125);
/// assert_eq!(decode_e4m3(0x7E), 448.0);
/// assert!(decode_e4m3(0x7F).is_nan());
/// ```
#[must_use]
pub const fn decode_e4m3(code: u8) -> f32 {
    E4M3[code as usize]
}

/// Encodes to E4M3: nearest, ties to the even code, saturating at ±448; a NaN stays a NaN.
///
/// ```
/// use ninfer_quant::codes::encode_e4m3;
/// assert_eq!(encode_e4m3(1.0), 0x38);
/// assert_eq!(encode_e4m3(1e9), 0x7E);
/// assert_eq!(encode_e4m3(f32::NAN) & 0x7F, 0x7F);
/// ```
#[must_use]
#[inline]
pub const fn encode_e4m3(x: f32) -> u8 {
    if x.is_nan() { 0x7F | (x.to_bits() >> 24) as u8 & 0x80 } else { nearest_e4m3(x) }
}

/// [`encode_e4m3`] of a number, in selections instead of branches: loops over it become vector instructions.
#[inline(always)]
pub(crate) const fn nearest_e4m3(x: f32) -> u8 {
    // Adding 2¹⁴ leaves 2⁻⁹, the subnormal step, as the last bit of the sum, rounded to nearest even.
    const STEPS: f32 = 16384.0;
    let bits = x.to_bits();
    let a = bits & 0x7FFF_FFFF;
    let subnormal = (f32::from_bits(a) + STEPS).to_bits().wrapping_sub(STEPS.to_bits());
    // A carry out of the mantissa raises the exponent correctly.
    let normal = (bits >> 20 & 1).wrapping_add(a).wrapping_add(0x7_FFFF).wrapping_sub(120 << 23) >> 20;
    // Compared as signed numbers, which vector units do in one step.
    let code = if (a as i32) < 0x3C80_0000 { subnormal } else { normal } as i32;
    let code = if code > 0x7E { 0x7E } else { code };
    (code as u32 | bits >> 24 & 0x80) as u8
}

/// Decodes a BF16 bit pattern; exact.
#[must_use]
#[inline]
pub const fn decode_bf16(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// Encodes to BF16, nearest even; overflow becomes infinity, a NaN stays a NaN.
#[must_use]
#[inline]
pub const fn encode_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
    // Quiet, so that cutting the low bits off cannot make an infinity of a NaN.
    let quiet = (bits >> 16) | 0x40;
    (if bits & 0x7FFF_FFFF > 0x7F80_0000 { quiet } else { rounded }) as u16
}

/// Decodes an F16 bit pattern; exact.
#[must_use]
pub fn decode_f16(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}

/// Encodes to F16, nearest even; overflow becomes infinity, a NaN stays a NaN.
#[must_use]
pub fn encode_f16(x: f32) -> u16 {
    f16::from_f32(x).to_bits()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subnormals_of_e4m3_are_not_decoded_as_normals() {
        for m in 0..8u8 {
            assert_eq!(decode_e4m3(m), f32::from(m) / 512.0);
            assert_eq!(decode_e4m3(0x80 | m), -f32::from(m) / 512.0);
        }
    }

    #[test]
    fn every_code_encodes_to_itself() {
        for c in 0..=255u8 {
            if c & 0x7F != 0x7F {
                assert_eq!(encode_e4m3(decode_e4m3(c)), c);
            }
        }
        for c in 0..16u8 {
            assert_eq!(encode_e2m1(decode_e2m1(c)), c);
        }
    }

    #[test]
    fn e4m3_ties_go_to_the_even_code() {
        for c in 0..0x7Eu8 {
            // The midpoint of two neighbours has four significant bits more at most: exact in f32.
            let mid = (decode_e4m3(c) + decode_e4m3(c + 1)) / 2.0;
            let even = if c % 2 == 0 { c } else { c + 1 };
            assert_eq!(encode_e4m3(mid), even);
            assert_eq!(encode_e4m3(mid.next_down()), c);
            assert_eq!(encode_e4m3(mid.next_up()), c + 1);
            assert_eq!(encode_e4m3(-mid), even | 0x80);
        }
    }

    #[test]
    fn nan_keeps_its_sign_in_e4m3() {
        assert_eq!(encode_e4m3(f32::NAN.copysign(1.0)), 0x7F);
        assert_eq!(encode_e4m3(f32::NAN.copysign(-1.0)), 0xFF);
    }
}
