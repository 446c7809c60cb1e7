//! Number codes by slices: the loops under every encoder and decoder.
//!
//! The functions marked `inline(always)` are for callers that already run under [`wide`].

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::codes::{E2M1_PAIRS, decode_bf16, encode_bf16, nearest_e4m3};
use crate::simd::wide;

/// Elements whose halves are converted at a time.
const BLOCK: usize = 64;

/// Decodes E4M3 codes times `scale`: `out[i] = e4m3(codes[i]) · scale`, as far as the shorter of the two slices goes.
pub fn decode_e4m3_scaled(codes: &[u8], scale: f32, out: &mut [f32]) {
    wide!(e4m3_to_f32(codes, scale, out));
}

/// [`decode_e4m3_scaled`], to be inlined.
#[inline(always)]
pub(crate) fn e4m3_to_f32(codes: &[u8], scale: f32, out: &mut [f32]) {
    for (o, &c) in out.iter_mut().zip(codes) {
        *o = e4m3(c) * scale;
    }
}

/// The entry of [`E4M3`](crate::codes::E4M3), computed: a processor loads eight codes at once, but not eight entries.
#[inline(always)]
fn e4m3(code: u8) -> f32 {
    let (a, sign) = (u32::from(code) & 0x7F, (u32::from(code) & 0x80) << 24);
    // An f32 with these exponent and mantissa bits; of a subnormal, `mantissa · 2⁻⁹`, it is 2⁻⁶ more.
    let (bias, excess) = if a < 8 { (121 << 23, 1.0 / 64.0) } else { (120 << 23, 0.0) };
    let magnitude = (f32::from_bits((a << 20) + bias) - excess).to_bits();
    f32::from_bits(if a == 0x7F { f32::NAN.to_bits() } else { magnitude } | sign)
}

/// `codes[i] = e4m3(x[i] / scale)` of finite weights and a positive scale.
#[inline(always)]
pub(crate) fn f32_to_e4m3(x: &[f32], scale: f32, codes: &mut [u8]) {
    for (c, x) in codes.iter_mut().zip(x) {
        *c = nearest_e4m3(x / scale);
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
    wide!({
        for (o, b) in out.iter_mut().zip(bytes.as_chunks().0) {
            *o = decode_bf16(u16::from_le_bytes(*b));
        }
    });
}

/// Decodes little-endian F16, two bytes an element, as far as the shorter of the two slices goes.
pub fn decode_f16_slice(bytes: &[u8], out: &mut [f32]) {
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
    write_bf16(values, &mut bytes);
    bytes
}

/// The little-endian F16 bytes of `values`.
#[must_use]
pub fn encode_f16_slice(values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; 2 * values.len()];
    write_f16(values, &mut bytes);
    bytes
}

/// The little-endian F32 bytes of `values`.
#[must_use]
pub fn encode_f32_slice(values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; 4 * values.len()];
    write_f32(values, &mut bytes);
    bytes
}

/// Little-endian BF16, two bytes for each value.
pub(crate) fn write_bf16(values: &[f32], bytes: &mut [u8]) {
    wide!({
        for (b, &x) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
            *b = encode_bf16(x).to_le_bytes();
        }
    });
}

/// Little-endian F16, two bytes for each value.
pub(crate) fn write_f16(values: &[f32], bytes: &mut [u8]) {
    let mut halves = [f16::ZERO; BLOCK];
    for (bytes, x) in bytes.as_chunks_mut().0.chunks_mut(BLOCK).zip(values.chunks(BLOCK)) {
        halves[..x.len()].convert_from_f32_slice(x);
        for (b, h) in bytes.iter_mut().zip(&halves) {
            *b = h.to_le_bytes();
        }
    }
}

/// Little-endian F32, four bytes for each value.
pub(crate) fn write_f32(values: &[f32], bytes: &mut [u8]) {
    for (b, x) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
        *b = x.to_le_bytes();
    }
}
