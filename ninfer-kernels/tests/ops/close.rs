//! Comparison of results.

/// What the golden fixtures allow on convolution, norms, attention, delta rule and expert blocks in f32: their own f32
/// implementations differ from f64 by up to 1.5e-6 on values of this size.
pub const GOLDEN: f64 = 1e-5;

/// Unit roundoff of f32.
pub const EPS: f64 = 5.960_464_477_539_063e-8;

#[track_caller]
pub fn close(what: &str, got: &[f32], expected: &[f64], tolerance: f64) {
    close_by(what, got, expected, |_| tolerance);
}

/// Compares element `i` with its own tolerance.
#[track_caller]
pub fn close_by(what: &str, got: &[f32], expected: &[f64], tolerance: impl Fn(usize) -> f64) {
    assert_eq!(got.len(), expected.len(), "{what}: length");
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        let (error, allowed) = ((f64::from(*g) - e).abs(), tolerance(i));
        assert!(error <= allowed, "{what}[{i}]: {g} instead of {e}, off by {error:.3e}, allowed {allowed:.3e}");
    }
}

/// Equal bits, element by element; NaNs are equal if their bits are.
#[track_caller]
pub fn same_bits(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{what}: length");
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!(
            g.to_bits() == e.to_bits(),
            "{what}[{i}]: {g} ({:08x}) instead of {e} ({:08x})",
            g.to_bits(),
            e.to_bits()
        );
    }
}
