//! Input rows as codes: [`ActivationPrecision::E4m3Token`] and [`ActivationPrecision::E2m1Group16`].

use ninfer_core::Result;
use ninfer_core::backend::DeviceWeight;
use ninfer_core::format::{ActivationPrecision, NVFP4_GROUP};
use ninfer_quant::codes::E4M3_MAX;

use super::matmul::Input;
use super::parallel::{Shared, split};
use super::reserve::grow;
use super::simd::{Isa, Lanes, dispatch};
use super::weight::CpuWeight;

/// The codes of the rows of one product, as f32 values, and the scale of each row; grows to the largest and stays.
#[derive(Debug, Default)]
pub(super) struct Codes {
    values: Vec<f32>,
    scales: Vec<f32>,
}

impl Codes {
    /// Makes room for `values` codes in `rows` rows.
    pub(super) fn reserve(&mut self, values: usize, rows: usize) -> Result<()> {
        for (list, len) in [(&mut self.values, values), (&mut self.scales, rows)] {
            if list.len() < len {
                grow(list, len)?;
                list.resize(len, 0.0);
            }
        }
        Ok(())
    }

    /// The first `rows` rows of an input as a weight takes them.
    pub(super) fn of<'a>(&'a mut self, isa: Isa, weight: &CpuWeight, rows: usize, x: Input<'a>) -> Result<Input<'a>> {
        let quantise = match weight.activations() {
            ActivationPrecision::E4m3Token => quantise,
            ActivationPrecision::E2m1Group16 => quantise_groups,
            _ => return Ok(x),
        };
        let k = weight.cols();
        self.reserve(rows.saturating_mul(k), rows)?;
        let (values, scales) = (&mut self.values[..rows * k], &mut self.scales[..rows]);
        let shared = (Shared::new(values), Shared::new(scales));
        split(rows, 1, rows * k, &|range| {
            for row in range {
                // SAFETY: tasks have disjoint rows.
                let (codes, scale) = unsafe { (shared.0.range(row * k..(row + 1) * k), shared.1.range(row..row + 1)) };
                scale[0] = quantise(isa, x.row(row, k), codes);
            }
        });
        Ok(Input::scaled(&self.values[..rows * k], k, &self.scales[..rows]))
    }
}

dispatch! {
    /// Writes the values of a row's codes and returns their scale.
    fn quantise(x: &[f32], codes: &mut [f32]) -> f32 = quantise_body
}

#[inline(always)]
fn quantise_body<L: Lanes>(x: &[f32], codes: &mut [f32]) -> f32 {
    // Magnitudes are ordered like their bits, and integers are compared many at a time; a NaN is the largest.
    let mut most = 0;
    for x in x {
        most = (x.to_bits() & 0x7fff_ffff).max(most);
    }
    let amax = f32::from_bits(most).max(ActivationPrecision::LEAST_AMAX);
    let reciprocal = E4M3_MAX / amax;
    for (code, x) in codes.iter_mut().zip(x) {
        *code = round(x * reciprocal);
    }
    amax / E4M3_MAX
}

/// Largest E2M1 number times the largest E4M3 number.
const GROUPS_MAX: f32 = 6.0 * E4M3_MAX;

dispatch! {
    /// Writes the values of a row's codes, their group's scale included, and returns the scale of the row.
    fn quantise_groups(x: &[f32], codes: &mut [f32]) -> f32 = quantise_groups_body
}

#[inline(always)]
fn quantise_groups_body<L: Lanes>(x: &[f32], codes: &mut [f32]) -> f32 {
    let mut most = 0;
    for x in x {
        most = (x.to_bits() & 0x7fff_ffff).max(most);
    }
    let amax = f32::from_bits(most).max(ActivationPrecision::LEAST_AMAX);
    let reciprocal = GROUPS_MAX / amax;
    for (codes, x) in codes.chunks_mut(NVFP4_GROUP).zip(x.chunks(NVFP4_GROUP)) {
        let mut most = 0.0f32;
        for (code, x) in codes.iter_mut().zip(x) {
            *code = x * reciprocal;
            // A NaN is no maximum, but stays in the codes of its group.
            most = most.max(code.abs());
        }
        let scale = round(most / 6.0);
        for code in codes {
            *code = if scale == 0.0 { *code * 0.0 } else { round_e2m1(*code / scale) * scale };
        }
    }
    amax / GROUPS_MAX
}

/// The nearest E2M1 number, ties to even, saturating; NaN stays NaN. As [`round`], with one bit of fraction.
#[inline(always)]
fn round_e2m1(x: f32) -> f32 {
    let x = x.clamp(-6.0, 6.0);
    let exponent = (x.to_bits() & 0x7f80_0000).max(127 << 23);
    let shift = f32::from_bits(exponent.wrapping_add(22 << 23) | 1 << 22);
    (x + shift) - shift
}

/// The nearest E4M3 number, ties to even, saturating; NaN stays NaN.
///
/// Adding `1.5 · 2^(e+20)` to a number in `[2^e, 2^(e+1))` leaves three bits of its fraction, rounded as f32 sums are.
#[inline(always)]
fn round(x: f32) -> f32 {
    let x = x.clamp(-E4M3_MAX, E4M3_MAX);
    let exponent = (x.to_bits() & 0x7f80_0000).max((127 - 6) << 23);
    let shift = f32::from_bits(exponent.wrapping_add(20 << 23) | 1 << 22);
    (x + shift) - shift
}

#[cfg(test)]
mod tests {
    use ninfer_quant::codes::{decode_e2m1, decode_e4m3, encode_e2m1, encode_e4m3};

    use super::*;

    /// Every code, every midpoint, their neighbours, and numbers of all sizes.
    #[test]
    fn rounding_is_that_of_the_codec() {
        let mut probes: Vec<f32> = (0..0x7fu8).map(decode_e4m3).collect();
        let middles: Vec<f32> = probes.windows(2).map(|w| (w[0] + w[1]) / 2.0).collect();
        probes.extend(middles);
        let near = |x: &f32| (-2..=2).map(|d| f32::from_bits(x.to_bits().saturating_add_signed(d))).collect::<Vec<_>>();
        probes = probes.iter().flat_map(near).filter(|x| !x.is_nan()).collect();
        probes.extend((0..200_000u32).map(|i| f32::from_bits(i.wrapping_mul(2_654_435_761) >> 1)));
        probes.extend([449.0, 464.0, 465.0, f32::MAX, f32::INFINITY, f32::MIN_POSITIVE, 1e-45]);
        for x in probes.into_iter().filter(|x| !x.is_nan()) {
            for x in [x, -x] {
                assert_eq!(round(x), decode_e4m3(encode_e4m3(x)), "{x:e}");
            }
        }
        assert!(round(f32::NAN).is_nan() && round(-f32::NAN).is_nan());
    }

    #[test]
    fn rounding_to_e2m1_is_that_of_the_codec() {
        let near = |x: f32| (-2..=2).map(move |d| f32::from_bits(x.to_bits().saturating_add_signed(d)));
        let probes = (0..=28).map(|i| i as f32 / 4.0).flat_map(near);
        let more = (0..100_000u32).map(|i| f32::from_bits(i.wrapping_mul(2_654_435_761) >> 1));
        for x in probes.chain(more).filter(|x| !x.is_nan()) {
            for x in [x, -x] {
                assert_eq!(round_e2m1(x), decode_e2m1(encode_e2m1(x)), "{x:e}");
            }
        }
        assert!(round_e2m1(f32::NAN).is_nan());
    }

    #[test]
    fn groups_have_scales_of_their_own() {
        // The row's largest value is 6 in its group; a group a thousand times as small keeps its codes.
        let mut x = [0.0f32; 40];
        (x[0], x[1], x[2]) = (12.0, -2.0, 1.0);
        (x[16], x[17], x[18], x[19]) = (0.006, 0.003, -0.002, 0.0);
        (x[39], x[38]) = (1e-9, -1e-12);
        let mut codes = [1.0; 40];
        let scale = quantise_groups(Isa::Base, &x, &mut codes);
        assert_eq!((scale, codes[0]), (12.0 / 2688.0, 2688.0));
        assert_eq!(codes[..3].iter().map(|c| c / 448.0).collect::<Vec<_>>(), [6.0, -1.0, 0.5]);
        let small = codes[16] / 6.0;
        assert_eq!(small, decode_e4m3(encode_e4m3(0.006 * (2688.0 / 12.0) / 6.0)));
        assert_eq!(codes[17..20].iter().map(|c| c / small).collect::<Vec<_>>(), [3.0, -2.0, 0.0]);
        // A group that is too small for any scale has codes of 0.
        assert!(codes[32..].iter().all(|c| *c == 0.0));
        for bad in [f32::NAN, f32::INFINITY] {
            let mut codes = [1.0; 20];
            let scale = quantise_groups(Isa::Base, &[1.0, bad, 2.0, 0.0].repeat(5), &mut codes);
            assert!(codes.iter().any(|c| (c * scale).is_nan()), "{bad}");
        }
    }

    #[test]
    fn both_copies_give_the_same_bits() {
        let x: Vec<f32> =
            (0..1003u32).map(|i| ((i * 37 % 101) as f32 - 50.0) * 1.7f32.powi(i as i32 % 9 - 4)).collect();
        let (mut a, mut b) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        let scales = [quantise(Isa::Base, &x, &mut a), quantise(Isa::detect(), &x, &mut b)];
        assert_eq!(scales[0].to_bits(), scales[1].to_bits());
        assert!(a == b && a.iter().any(|c| c.abs() == 448.0));
        let scales = [quantise_groups(Isa::Base, &x, &mut a), quantise_groups(Isa::detect(), &x, &mut b)];
        assert_eq!(scales[0].to_bits(), scales[1].to_bits());
        assert!(a == b && a.iter().any(|c| c.abs() == 2688.0));
    }

    #[test]
    fn rows_of_no_size_need_no_rule() {
        for x in [[0.0f32, -0.0, 0.0], [1e-45, 0.0, -1e-45]] {
            let mut codes = [1.0; 3];
            let scale = quantise(Isa::Base, &x, &mut codes);
            assert_eq!((codes, scale), ([0.0; 3], ActivationPrecision::LEAST_AMAX / 448.0));
        }
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut codes = [1.0; 3];
            let scale = quantise(Isa::Base, &[1.0, bad, 2.0], &mut codes);
            assert!(codes.iter().any(|c| (c * scale).is_nan()), "{bad}: {codes:?} {scale}");
        }
        let mut codes = [0.0; 2];
        let scale = quantise(Isa::Base, &[f32::MAX, -f32::MAX / 2.0], &mut codes);
        assert_eq!((codes, scale), ([448.0, -224.0], f32::MAX / 448.0));
    }
}
