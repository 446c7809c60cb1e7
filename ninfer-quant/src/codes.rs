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
use half::slice::HalfFloatSliceExt;

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
pub const fn encode_e2m1(x: f32) -> u8 {
    let a = x.abs();
    let magnitude = (a > 0.25) as u8
        + (a >= 0.75) as u8
        + (a > 1.25) as u8
        + (a >= 1.75) as u8
        + (a > 2.5) as u8
        + (a >= 3.5) as u8
        + (a > 5.0) as u8;
    magnitude | ((x.is_sign_negative() as u8) << 3)
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
pub const fn encode_e4m3(x: f32) -> u8 {
    // Adding 2¹⁴ leaves 2⁻⁹, the subnormal step, as the last bit of the sum, rounded to nearest even.
    const SUBNORMAL: f32 = 16384.0;
    let bits = x.to_bits();
    let sign = (bits >> 24) as u8 & 0x80;
    let a = bits & 0x7FFF_FFFF;
    let magnitude = if a > 0x7F80_0000 {
        0x7F
    } else if a >= E4M3_MAX.to_bits() {
        0x7E
    } else if a < 0x3C80_0000 {
        (f32::from_bits(a) + SUBNORMAL).to_bits() - SUBNORMAL.to_bits()
    } else {
        // Below 448 the rounded code is at most 0x7E: the carry out of the mantissa raises the exponent correctly.
        ((a + 0x7_FFFF + ((a >> 20) & 1)) >> 20) - (120 << 3)
    };
    sign | magnitude as u8
}

/// Decodes a BF16 bit pattern; exact.
#[must_use]
pub const fn decode_bf16(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// Encodes to BF16, nearest even; overflow becomes infinity, a NaN stays a NaN.
#[must_use]
pub const fn encode_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        // Quiet, so that cutting the low bits off cannot make an infinity of it.
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
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

/// Decodes E4M3 codes times `scale`: `out[i] = e4m3(codes[i]) · scale`, as far as the shorter of the two slices goes.
pub fn decode_e4m3_scaled(codes: &[u8], scale: f32, out: &mut [f32]) {
    for (o, &c) in out.iter_mut().zip(codes) {
        *o = E4M3[c as usize] * scale;
    }
}

/// Decodes packed E2M1 codes times `scale`; byte `j` gives `out[2j]` (low nibble) and `out[2j + 1]` (high nibble).
pub fn decode_e2m1_scaled(packed: &[u8], scale: f32, out: &mut [f32]) {
    for (o, &b) in out.chunks_exact_mut(2).zip(packed) {
        let pair = E2M1_PAIRS[b as usize];
        o[0] = pair[0] * scale;
        o[1] = pair[1] * scale;
    }
}

/// Decodes little-endian BF16, two bytes an element, as far as the shorter of the two slices goes.
pub fn decode_bf16_slice(bytes: &[u8], out: &mut [f32]) {
    for (o, b) in out.iter_mut().zip(bytes.as_chunks().0) {
        *o = decode_bf16(u16::from_le_bytes(*b));
    }
}

/// Decodes little-endian F16, two bytes an element, as far as the shorter of the two slices goes.
pub fn decode_f16_slice(bytes: &[u8], out: &mut [f32]) {
    const BLOCK: usize = 64;
    let mut halves = [f16::ZERO; BLOCK];
    for (out, bytes) in out.chunks_mut(BLOCK).zip(bytes.as_chunks().0.chunks(BLOCK)) {
        let n = out.len().min(bytes.len());
        for (h, b) in halves.iter_mut().zip(bytes) {
            *h = f16::from_le_bytes(*b);
        }
        halves[..n].convert_to_f32_slice(&mut out[..n]);
    }
}

/// Decodes little-endian F32, four bytes an element, as far as the shorter of the two slices goes.
pub fn decode_f32_slice(bytes: &[u8], out: &mut [f32]) {
    for (o, b) in out.iter_mut().zip(bytes.as_chunks().0) {
        *o = f32::from_le_bytes(*b);
    }
}

/// The little-endian BF16 bytes of `values`.
#[must_use]
pub fn encode_bf16_slice(values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; 2 * values.len()];
    for (b, &x) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
        *b = encode_bf16(x).to_le_bytes();
    }
    bytes
}

/// The little-endian F16 bytes of `values`.
#[must_use]
pub fn encode_f16_slice(values: &[f32]) -> Vec<u8> {
    const BLOCK: usize = 64;
    let mut halves = [f16::ZERO; BLOCK];
    let mut bytes = vec![0; 2 * values.len()];
    for (bytes, x) in bytes.as_chunks_mut().0.chunks_mut(BLOCK).zip(values.chunks(BLOCK)) {
        halves[..x.len()].convert_from_f32_slice(x);
        for (b, h) in bytes.iter_mut().zip(&halves) {
            *b = h.to_le_bytes();
        }
    }
    bytes
}

/// The little-endian F32 bytes of `values`.
#[must_use]
pub fn encode_f32_slice(values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; 4 * values.len()];
    for (b, x) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
        *b = x.to_le_bytes();
    }
    bytes
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
