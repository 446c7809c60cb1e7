//! Input rows as E4M3 codes: [`ActivationPrecision::E4m3Token`].

use ninfer_core::Result;
use ninfer_core::backend::DeviceWeight;
use ninfer_core::format::ActivationPrecision;
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
        if weight.activations() == ActivationPrecision::Native {
            return Ok(x);
        }
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
    use ninfer_quant::codes::{decode_e4m3, encode_e4m3};

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
    fn both_copies_give_the_same_bits() {
        let x: Vec<f32> =
            (0..1003u32).map(|i| ((i * 37 % 101) as f32 - 50.0) * 1.7f32.powi(i as i32 % 9 - 4)).collect();
        let (mut a, mut b) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        let scales = [quantise(Isa::Base, &x, &mut a), quantise(Isa::detect(), &x, &mut b)];
        assert_eq!(scales[0].to_bits(), scales[1].to_bits());
        assert!(a == b && a.iter().any(|c| c.abs() == 448.0));
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
