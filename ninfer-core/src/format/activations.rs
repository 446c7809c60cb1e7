//! The precision in which a matrix takes its inputs.

use std::fmt;

use super::{PackedRef, WeightFormat};
use crate::{Error, Result};

/// What a product does to its input rows before it multiplies them with a matrix.
///
/// It belongs to the matrix, since it decides what `x · Wᵀ` is. It says nothing about a table whose rows are looked up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ActivationPrecision {
    /// Nothing: rows are taken in the precision they have.
    #[default]
    Native,
    /// Each row becomes E4M3 codes with one f32 scale. Only matrices whose own codes are E4M3 have it.
    ///
    /// The row is what the product would read otherwise: the input as it is stored, or, where a norm or a SwiGLU is part of
    /// the same operation, its result in f32. Its `K` values `x_i` become
    ///
    /// ```text
    /// a   = max(|x_0|, …, |x_{K−1}|, 2⁻¹⁰⁰)
    /// s   = a / 448
    /// r   = 448 / a
    /// c_i = e4m3(x_i · r)        nearest, ties to even, beyond ±448 it is ±448
    /// y_n = s · Σ_i c_i · w_{n,i}
    /// ```
    ///
    /// where `s`, `r` and `x_i · r` are each rounded once, to the nearest f32, and the sum is taken in f32, in the order of the
    /// backend's own product; a scale that the `w_{n,i}` have in common may be taken out of it. Codes and `s` are therefore the
    /// same on every backend that has the same `x_i`. The lower limit
    /// of `a` keeps `s` and `r` normal numbers, so no row needs a rule of its own: one of zeros has codes of 0. A row with a
    /// NaN or an infinity gives NaN, and only that row does.
    E4m3Token,
    /// Each 16 columns of a row become E2M1 codes with one E4M3 scale, and each row has one f32 scale. Only NVFP4 matrices
    /// have it, whose own codes are of this kind.
    ///
    /// The row is the one that [`ActivationPrecision::E4m3Token`] would take. Its values `x_i` become, with `g` the group of
    /// column `i`,
    ///
    /// ```text
    /// a   = max(|x_0|, …, |x_{K−1}|, 2⁻¹⁰⁰)
    /// s   = a / 2688                              2688 = 6 · 448
    /// r   = 2688 / a
    /// u_i = x_i · r
    /// s_g = e4m3(max_{i in g} |u_i| / 6)
    /// c_i = e2m1(u_i / s_g)                       0 where s_g is 0
    /// y_n = s · Σ_i c_i · s_g · w_{n,i}
    /// ```
    ///
    /// Roundings are to the nearest, ties to even, and what is too large becomes the largest number, 448 or 6; `s`, `r` and each
    /// product and quotient are rounded once to f32. It is the encoding of stored NVFP4 with the row in place of the matrix, so
    /// no scale has to be measured beforehand. `c_i · s_g` has six significant bits: bf16 holds it exactly. A row with a NaN or
    /// an infinity gives NaN, and only that row does.
    E2m1Group16,
}

impl ActivationPrecision {
    /// The least value that `a` takes where rows become codes, 2⁻¹⁰⁰.
    pub const LEAST_AMAX: f32 = f32::from_bits((127 - 100) << 23);

    /// Short lower-case name; what a recipe appends to the name of a format: `fp8` and `fp8-a8`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::E4m3Token => "a8",
            Self::E2m1Group16 => "a4",
        }
    }

    /// Whether matrices of this format can take their inputs this way.
    #[must_use]
    pub const fn fits(self, format: WeightFormat) -> bool {
        match self {
            Self::Native => true,
            Self::E4m3Token => {
                matches!(format, WeightFormat::Fp8Tensor | WeightFormat::Fp8Row | WeightFormat::Fp8Block)
            }
            Self::E2m1Group16 => matches!(format, WeightFormat::Nvfp4),
        }
    }

    /// Refuses a format that cannot take its inputs this way.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming both.
    pub fn check(self, format: WeightFormat) -> Result<()> {
        if self.fits(format) {
            return Ok(());
        }
        Err(Error::Unsupported {
            op: format!("activation precision {self}"),
            need: match self {
                Self::E2m1Group16 => "an NVFP4 matrix".to_owned(),
                _ => "a matrix of E4M3 codes".to_owned(),
            },
            have: format.to_string(),
        })
    }

    /// The precision that all parts of a stack have: for [`Backend::prepare`](crate::Backend::prepare).
    ///
    /// # Errors
    /// [`Error::OutOfRange`] naming the first part that differs from part 0.
    pub fn common(parts: &[PackedRef<'_>]) -> Result<Self> {
        let first = parts.first().map_or(Self::Native, PackedRef::activations);
        match parts.iter().position(|p| p.activations() != first) {
            None => Ok(first),
            Some(i) => Err(Error::OutOfRange {
                what: "activation precision of a part",
                got: format!("{} in part {i}", parts[i].activations()),
                legal: format!("{first}, as in part 0"),
            }),
        }
    }
}

impl fmt::Display for ActivationPrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Fp8Scales, PackedData};
    use super::*;
    use crate::DType;

    fn fp8(scales: Fp8Scales<'_>) -> PackedRef<'_> {
        PackedRef::new(2, 3, PackedData::Fp8 { codes: &[0; 6], scales }).unwrap()
    }

    #[test]
    fn only_matrices_of_e4m3_codes_have_it() {
        for scales in [Fp8Scales::Tensor(1.0), Fp8Scales::Row(&[1.0; 2]), Fp8Scales::Block(&[1.0])] {
            let m = fp8(scales);
            assert_eq!(m.activations(), ActivationPrecision::Native);
            let m = m.with_activations(ActivationPrecision::E4m3Token).unwrap();
            assert_eq!(m.activations(), ActivationPrecision::E4m3Token);
        }
        let plain = PackedRef::new(1, 2, PackedData::Plain { dtype: DType::Bf16, bytes: &[0; 4] }).unwrap();
        assert!(plain.with_activations(ActivationPrecision::Native).is_ok());
        let error = plain.with_activations(ActivationPrecision::E4m3Token).unwrap_err();
        assert!(matches!(&error, Error::Unsupported { have, .. } if have == "bf16"), "{error}");
    }

    #[test]
    fn only_nvfp4_matrices_take_e2m1_codes() {
        let nvfp4 =
            PackedData::Nvfp4 { codes: &[0; 8], scales: &[0], global: super::super::GlobalScale::Multiply(1.0) };
        let m = PackedRef::new(1, 16, nvfp4).unwrap().with_activations(ActivationPrecision::E2m1Group16).unwrap();
        assert_eq!((m.activations(), m.activations().name()), (ActivationPrecision::E2m1Group16, "a4"));
        assert!(m.with_activations(ActivationPrecision::E4m3Token).is_err());
        let error = fp8(Fp8Scales::Tensor(1.0)).with_activations(ActivationPrecision::E2m1Group16).unwrap_err();
        assert!(matches!(&error, Error::Unsupported { need, .. } if need.contains("NVFP4")), "{error}");
    }

    #[test]
    fn parts_of_a_stack_agree() {
        let native = fp8(Fp8Scales::Tensor(1.0));
        let token = native.with_activations(ActivationPrecision::E4m3Token).unwrap();
        assert_eq!(ActivationPrecision::common(&[]), Ok(ActivationPrecision::Native));
        assert_eq!(ActivationPrecision::common(&[token, token]), Ok(ActivationPrecision::E4m3Token));
        let error = ActivationPrecision::common(&[token, token, native]).unwrap_err().to_string();
        assert!(error.contains("native in part 2") && error.contains("a8, as in part 0"), "{error}");
    }

    #[test]
    fn the_lower_limit_keeps_scale_and_reciprocal_normal() {
        let a = ActivationPrecision::LEAST_AMAX;
        assert_eq!(f64::from(a), 2f64.powi(-100));
        assert!((a / 448.0).is_normal() && (448.0 / a).is_normal() && (448.0 / f32::MAX).is_normal());
    }
}
