//! Elements of KV pages: what a stored key or value means, and how it is written.

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};
use ninfer_core::DType;
use ninfer_core::memory::KV_GROUP;
use ninfer_quant::codes::{E4M3_MAX, encode_e4m3};

use super::buffer::Element;
use super::simd::Lanes;

/// Largest code of an I8 page.
const I8_MAX: f32 = 127.0;

/// Element of a KV page.
pub(super) trait KvElement: Element + Send + Sync {
    /// Whether elements are codes with scales.
    const SCALED: bool = false;

    fn load(self) -> f32;
    fn lanes<L: Lanes>(values: &[Self; 16]) -> L;

    /// Features of a vector of `d` that share a scale.
    fn group(d: usize) -> usize {
        d.max(1)
    }

    /// Writes one group of features and returns its scale.
    fn encode(from: &[f32], to: &mut [Self]) -> f16;
}

impl KvElement for f32 {
    #[inline(always)]
    fn load(self) -> f32 {
        self
    }
    #[inline(always)]
    fn lanes<L: Lanes>(values: &[Self; 16]) -> L {
        L::load(values)
    }
    fn encode(from: &[f32], to: &mut [Self]) -> f16 {
        to.copy_from_slice(from);
        f16::ONE
    }
}

impl KvElement for bf16 {
    #[inline(always)]
    fn load(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn lanes<L: Lanes>(values: &[Self; 16]) -> L {
        L::bf16(bytemuck::cast_ref(values))
    }
    fn encode(from: &[f32], to: &mut [Self]) -> f16 {
        for (to, from) in to.iter_mut().zip(from) {
            *to = Self::from_f32(*from);
        }
        f16::ONE
    }
}

impl KvElement for i8 {
    const SCALED: bool = true;

    #[inline(always)]
    fn load(self) -> f32 {
        f32::from(self)
    }
    #[inline(always)]
    fn lanes<L: Lanes>(values: &[Self; 16]) -> L {
        L::i8(values)
    }
    fn group(_: usize) -> usize {
        KV_GROUP
    }
    fn encode(from: &[f32], to: &mut [Self]) -> f16 {
        encode_codes(from, to, I8_MAX, 0, |x| x.round_ties_even().clamp(-I8_MAX, I8_MAX) as Self)
    }
}

/// An E4M3 code.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(super) struct E4m3(u8);

// SAFETY: one byte, of which every value is allowed.
unsafe impl Zeroable for E4m3 {}
// SAFETY: as above.
unsafe impl Pod for E4m3 {}

impl Element for i8 {
    const DTYPE: DType = DType::I8;
}
impl Element for E4m3 {
    const DTYPE: DType = DType::F8E4M3;
}
impl Element for f16 {
    const DTYPE: DType = DType::F16;
}

impl KvElement for E4m3 {
    const SCALED: bool = true;

    #[inline(always)]
    fn load(self) -> f32 {
        ninfer_quant::codes::decode_e4m3(self.0)
    }
    #[inline(always)]
    fn lanes<L: Lanes>(values: &[Self; 16]) -> L {
        L::e4m3(bytemuck::cast_ref(values))
    }
    fn encode(from: &[f32], to: &mut [Self]) -> f16 {
        encode_codes(from, to, E4M3_MAX, Self(0), |x| Self(encode_e4m3(x)))
    }
}

/// Codes of one group: `s = f16(max|x| / limit)`, then `round(x · (1/s))`.
fn encode_codes<C: Copy>(from: &[f32], to: &mut [C], limit: f32, zero: C, round: impl Fn(f32) -> C) -> f16 {
    // Magnitudes are ordered like their bits; a NaN is the largest.
    let most = f32::from_bits(from.iter().fold(0, |most, x| (x.to_bits() & 0x7fff_ffff).max(most)));
    let scale = if most.is_finite() { f16::from_f32(most / limit).min(f16::MAX) } else { f16::NAN };
    if scale.is_nan() || scale <= f16::ZERO {
        to.fill(zero);
        return scale;
    }
    let inverse = 1.0 / scale.to_f32();
    for (to, from) in to.iter_mut().zip(from) {
        *to = round(from * inverse);
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded<E: KvElement>(x: &[f32]) -> (Vec<f32>, f16) {
        let mut codes = vec![E::zeroed(); x.len()];
        let scale = E::encode(x, &mut codes);
        (codes.into_iter().map(|c| c.load() * scale.to_f32()).collect(), scale)
    }

    #[test]
    fn codes_are_the_nearest_multiples_of_a_rounded_scale() {
        let x: Vec<f32> = (0..64).map(|i| (i as f32 - 20.0) * 0.37).collect();
        let (y, scale) = decoded::<i8>(&x);
        assert_eq!(scale, f16::from_f32(43.0f32 * 0.37 / 127.0));
        for (x, y) in x.iter().zip(&y) {
            assert!((x - y).abs() <= 0.5001 * scale.to_f32(), "{x} became {y}");
        }
        let (y, scale) = decoded::<E4m3>(&x);
        assert_eq!(scale, f16::from_f32(43.0f32 * 0.37 / 448.0));
        for (x, y) in x.iter().zip(&y) {
            // Three bits behind the leading one, or the smallest step.
            assert!((x - y).abs() <= (x.abs() / 15.9).max(scale.to_f32() / 1000.0), "{x} became {y}");
        }
    }

    #[test]
    fn a_scale_that_rounds_down_saturates() {
        // 1.0001 · 127 / 127 rounds to the f16 1.0, so the largest value would be 127.01.
        let (y, scale) = decoded::<i8>(&[127.01, -127.01, 0.5, 1.5, 2.5]);
        assert_eq!((scale, y), (f16::ONE, vec![127.0, -127.0, 0.0, 2.0, 2.0]));
    }

    #[test]
    fn groups_of_no_size_or_no_number() {
        for x in [[0.0f32, -0.0], [1e-9, -1e-9]] {
            assert_eq!(decoded::<i8>(&x), (vec![0.0; 2], f16::ZERO));
            assert_eq!(decoded::<E4m3>(&x), (vec![0.0; 2], f16::ZERO));
        }
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(decoded::<i8>(&[1.0, bad]).0.iter().all(|y| y.is_nan()));
            assert!(decoded::<E4m3>(&[1.0, bad]).0.iter().all(|y| y.is_nan()));
        }
        assert_eq!(decoded::<i8>(&[f32::MAX, -1.0]), (vec![127.0 * 65504.0, 0.0], f16::MAX));
        assert_eq!(decoded::<E4m3>(&[-f32::MAX, 0.0]), (vec![-448.0 * 65504.0, 0.0], f16::MAX));
    }
}
