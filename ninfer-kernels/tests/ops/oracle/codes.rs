//! Input rows as E4M3 codes, from the definition of `ActivationPrecision::E4m3Token`.

use crate::stored::e4m3;

/// The values of the codes, and the scale, of one row.
pub fn quantise(x: &[f32]) -> (Vec<f64>, f64) {
    let amax = x.iter().fold(2f64.powi(-100), |a, x| a.max(f64::from(*x).abs()));
    // A quotient of two f32 numbers that is rounded to f64 and then to f32 is the quotient rounded once.
    let (scale, reciprocal) = ((amax / 448.0) as f32, (448.0 / amax) as f32);
    let codes = x.iter().map(|x| nearest(f64::from((f64::from(*x) * f64::from(reciprocal)) as f32)));
    (codes.collect(), f64::from(scale))
}

/// The nearest of all E4M3 numbers; of two equally near ones the one whose code is even.
fn nearest(x: f64) -> f64 {
    let distance = |code: &u8| (f64::from(e4m3(*code)) - x.abs()).abs();
    let by_distance = |a: &u8, b: &u8| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2)));
    let code = (0..0x7f).min_by(by_distance).unwrap();
    f64::from(e4m3(code)).copysign(x)
}
