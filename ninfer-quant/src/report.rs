//! How far one set of weights is from another.

use serde::Serialize;

use crate::{Error, PackedMatrix, Result};

/// Differences between reference weights `w` and their stored form `v`.
///
/// Sums are taken in f64.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ErrorReport {
    /// Number of weights.
    pub count: usize,
    /// `‖v − w‖ / ‖w‖`; 0 if both are zero, infinite if only `w` is.
    pub relative_l2: f64,
    /// `max |v − w|`.
    pub max_abs: f64,
    /// Mean of `|v − w| / |w|` over `w ≠ 0`.
    pub mean_relative: f64,
    /// `w · v / (‖w‖ ‖v‖)`; 1 if both are zero, 0 if only one is.
    pub cosine: f64,
}

impl ErrorReport {
    /// Compares two slices of equal length.
    ///
    /// # Errors
    /// [`Error::Length`] if the lengths differ.
    ///
    /// ```
    /// use ninfer_quant::ErrorReport;
    /// let r = ErrorReport::new(&[3.0, 4.0], &[3.0, 3.5])?;
    /// assert_eq!((r.relative_l2, r.max_abs), (0.1, 0.5));
    /// # Ok::<(), ninfer_quant::Error>(())
    /// ```
    pub fn new(reference: &[f32], stored: &[f32]) -> Result<Self> {
        if reference.len() != stored.len() {
            return Err(Error::Length { what: "stored weights", expected: reference.len(), got: stored.len() });
        }
        let (mut ww, mut vv, mut wv, mut dd) = (0.0f64, 0.0f64, 0.0f64, 0.0f64);
        let (mut max_abs, mut relative, mut nonzero) = (0.0f64, 0.0f64, 0usize);
        for (&w, &v) in reference.iter().zip(stored) {
            let (w, v) = (f64::from(w), f64::from(v));
            let d = (v - w).abs();
            ww += w * w;
            vv += v * v;
            wv += w * v;
            dd += d * d;
            max_abs = max_abs.max(d);
            if w != 0.0 {
                relative += d / w.abs();
                nonzero += 1;
            }
        }
        let relative_l2 = match (ww > 0.0, dd > 0.0) {
            (true, _) => (dd / ww).sqrt(),
            (false, true) => f64::INFINITY,
            (false, false) => 0.0,
        };
        let cosine = match (ww > 0.0, vv > 0.0) {
            (true, true) => wv / (ww.sqrt() * vv.sqrt()),
            (false, false) => 1.0,
            _ => 0.0,
        };
        let mean_relative = if nonzero == 0 { 0.0 } else { relative / nonzero as f64 };
        Ok(Self { count: reference.len(), relative_l2, max_abs, mean_relative, cosine })
    }

    /// Compares two packed matrices of equal shape.
    ///
    /// # Errors
    /// [`Error::Unequal`] if the shapes differ.
    pub fn between(reference: &PackedMatrix, stored: &PackedMatrix) -> Result<Self> {
        let shape = |m: &PackedMatrix| format!("{} × {}", m.rows(), m.cols());
        if (reference.rows(), reference.cols()) != (stored.rows(), stored.cols()) {
            let (expected, got) = (shape(reference), shape(stored));
            return Err(Error::Unequal { index: 1, what: "shape", expected, got });
        }
        Self::new(&reference.dequantize(), &stored.dequantize())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_do_not_divide() {
        let r = ErrorReport::new(&[0.0; 3], &[0.0; 3]).unwrap();
        assert_eq!((r.relative_l2, r.cosine, r.mean_relative), (0.0, 1.0, 0.0));
        let r = ErrorReport::new(&[0.0], &[1.0]).unwrap();
        assert_eq!((r.relative_l2, r.cosine), (f64::INFINITY, 0.0));
        assert!(ErrorReport::new(&[0.0], &[]).is_err());
    }
}
