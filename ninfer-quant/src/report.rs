//! How far one set of weights is from another.

use serde::Serialize;

use crate::{Error, PackedMatrix, Result};

/// Differences between reference weights `w` and their stored form `v`.
///
/// Sums are taken in f64. Where any weight or stored weight is NaN or infinite, all figures but the count are NaN, which JSON
/// writes as `null`.
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
        let mut sums = ErrorSums::default();
        sums.add(reference, stored)?;
        Ok(sums.report())
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
        let mut sums = ErrorSums::default();
        let (mut w, mut v) = (vec![0.0; reference.cols()], vec![0.0; stored.cols()]);
        for row in 0..reference.rows() {
            reference.dequantize_row(row, &mut w)?;
            stored.dequantize_row(row, &mut v)?;
            sums.add(&w, &v)?;
        }
        Ok(sums.report())
    }
}

/// Sums over weights that come in pieces: rows of a matrix, or matrices of a model.
///
/// ```
/// use ninfer_quant::{ErrorReport, ErrorSums};
/// let mut sums = ErrorSums::default();
/// sums.add(&[3.0], &[3.0])?;
/// sums.add(&[4.0], &[3.5])?;
/// assert_eq!(sums.report(), ErrorReport::new(&[3.0, 4.0], &[3.0, 3.5])?);
/// # Ok::<(), ninfer_quant::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ErrorSums {
    count: usize,
    nonzero: usize,
    /// `Σ w²`, `Σ v²`, `Σ w · v`, `Σ (v − w)²`.
    squares: [f64; 4],
    max_abs: f64,
    relative: f64,
}

impl ErrorSums {
    /// Counts two slices of equal length.
    ///
    /// # Errors
    /// [`Error::Length`] if the lengths differ.
    pub fn add(&mut self, reference: &[f32], stored: &[f32]) -> Result<()> {
        if reference.len() != stored.len() {
            return Err(Error::Length { what: "stored weights", expected: reference.len(), got: stored.len() });
        }
        let [mut ww, mut vv, mut wv, mut dd] = self.squares;
        for (&w, &v) in reference.iter().zip(stored) {
            let (w, v) = (f64::from(w), f64::from(v));
            let d = (v - w).abs();
            ww += w * w;
            vv += v * v;
            wv += w * v;
            dd += d * d;
            self.max_abs = self.max_abs.max(d);
            if w != 0.0 {
                self.relative += d / w.abs();
                self.nonzero += 1;
            }
        }
        self.squares = [ww, vv, wv, dd];
        self.count += reference.len();
        Ok(())
    }

    /// Counts what another has counted.
    pub fn merge(&mut self, other: &Self) {
        self.count += other.count;
        self.nonzero += other.nonzero;
        for (a, b) in self.squares.iter_mut().zip(other.squares) {
            *a += b;
        }
        self.max_abs = self.max_abs.max(other.max_abs);
        self.relative += other.relative;
    }

    /// The differences so far.
    #[must_use]
    pub fn report(&self) -> ErrorReport {
        let [ww, vv, wv, dd] = self.squares;
        // Squares of finite f32 values and their sums are finite in f64, so this is about the values.
        if !self.squares.iter().all(|sum| sum.is_finite()) {
            let [relative_l2, max_abs, mean_relative, cosine] = [f64::NAN; 4];
            return ErrorReport { count: self.count, relative_l2, max_abs, mean_relative, cosine };
        }
        let relative_l2 = match (ww > 0.0, dd > 0.0) {
            (true, _) => (dd / ww).sqrt(),
            (false, true) => f64::INFINITY,
            (false, false) => 0.0,
        };
        let cosine = match (ww > 0.0, vv > 0.0) {
            (true, true) => (wv / (ww * vv).sqrt()).clamp(-1.0, 1.0),
            (false, false) => 1.0,
            _ => 0.0,
        };
        let mean_relative = if self.nonzero == 0 { 0.0 } else { self.relative / self.nonzero as f64 };
        ErrorReport { count: self.count, relative_l2, max_abs: self.max_abs, mean_relative, cosine }
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

    #[test]
    fn figures_by_hand() {
        // ‖v − w‖² = 1 + 4 + 0.25, ‖w‖² = 1 + 4 + 4, ‖v‖² = 0 + 16 + 2.25, w · v = 0 + 8 + 3.
        let r = ErrorReport::new(&[1.0, -2.0, 2.0, 0.0], &[0.0, -4.0, 1.5, 0.0]).unwrap();
        assert_eq!((r.count, r.max_abs, r.mean_relative), (4, 2.0, (1.0 + 1.0 + 0.25) / 3.0));
        assert!((r.relative_l2 - (5.25f64 / 9.0).sqrt()).abs() < 1e-15);
        assert!((r.cosine - 11.0 / (3.0 * 18.25f64.sqrt())).abs() < 1e-15);
        let r = ErrorReport::new(&[1.0, 2.0], &[-1.0, -2.0]).unwrap();
        assert_eq!((r.relative_l2, r.cosine), (2.0, -1.0));
        // A direction is a direction whatever its size, and rounding never makes a cosine above 1.
        let w: Vec<f32> = (1..50).map(|i| 1e-40 * i as f32).collect();
        let r = ErrorReport::new(&w, &w.iter().map(|x| 3.0 * x).collect::<Vec<_>>()).unwrap();
        assert!(r.cosine <= 1.0 && r.cosine > 1.0 - 1e-9 && (r.relative_l2 - 2.0).abs() < 1e-4, "{r:?}");
        assert_eq!(ErrorReport::new(&[], &[]).unwrap().count, 0);
    }

    /// A NaN must not look like a perfect copy, and it is not lost when parts are merged.
    #[test]
    fn values_that_are_no_numbers_make_all_figures_nan() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for (w, v) in [([1.0, bad], [1.0, 2.0]), ([1.0, 2.0], [1.0, bad]), ([0.0, bad], [0.0, bad])] {
                let mut sums = ErrorSums::default();
                sums.merge(&{
                    let mut part = ErrorSums::default();
                    part.add(&w, &v).unwrap();
                    part
                });
                sums.add(&[1.0], &[1.0]).unwrap();
                let r = sums.report();
                assert_eq!(r.count, 3);
                let figures = [r.relative_l2, r.max_abs, r.mean_relative, r.cosine];
                assert!(figures.iter().all(|f| f.is_nan()), "{w:?} {v:?}: {r:?}");
            }
        }
        // The largest finite values are no reason.
        let r = ErrorReport::new(&[f32::MAX, -f32::MAX], &[-f32::MAX, f32::MAX]).unwrap();
        assert_eq!((r.relative_l2, r.cosine, r.max_abs), (2.0, -1.0, 2.0 * f64::from(f32::MAX)));
    }

    #[test]
    fn parts_add_up() {
        let (w, v) = ([1.0, -2.0, 0.0, 4.0], [1.5, -2.0, 0.25, 4.0]);
        let (mut a, mut b) = (ErrorSums::default(), ErrorSums::default());
        a.add(&w[..1], &v[..1]).unwrap();
        b.add(&w[1..], &v[1..]).unwrap();
        a.merge(&b);
        assert_eq!(a.report(), ErrorReport::new(&w, &v).unwrap());
        assert_eq!((a.report().count, a.report().max_abs, a.report().mean_relative), (4, 0.5, 0.5 / 3.0));
    }
}
