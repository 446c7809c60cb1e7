//! Input rows as codes, from the definitions of `ActivationPrecision`.

use crate::stored::e4m3;

/// The values of the codes, and the scale, of one row.
pub fn quantise(x: &[f32]) -> (Vec<f64>, f64) {
    let amax = x.iter().fold(2f64.powi(-100), |a, x| a.max(f64::from(*x).abs()));
    // A quotient of two f32 numbers that is rounded to f64 and then to f32 is the quotient rounded once.
    let (scale, reciprocal) = ((amax / 448.0) as f32, (448.0 / amax) as f32);
    let codes = x.iter().map(|x| nearest(f64::from((f64::from(*x) * f64::from(reciprocal)) as f32)));
    (codes.collect(), f64::from(scale))
}

/// The values of the codes with the scales of their groups, and the scale, of one row: `ActivationPrecision::E2m1Group16`.
pub fn quantise_groups(x: &[f32]) -> (Vec<f64>, f64) {
    let amax = x.iter().fold(2f64.powi(-100), |a, x| a.max(f64::from(*x).abs()));
    let (scale, reciprocal) = ((amax / 2688.0) as f32, (2688.0 / amax) as f32);
    let scaled: Vec<f64> = x.iter().map(|x| f64::from((f64::from(*x) * f64::from(reciprocal)) as f32)).collect();
    let mut values = Vec::new();
    for group in scaled.chunks(16) {
        let most = group.iter().fold(0.0, |a: f64, u| a.max(u.abs()));
        let s = nearest(f64::from((most / 6.0) as f32));
        let code = |u: &f64| if s == 0.0 { 0.0 } else { nearest_e2m1(f64::from((u / s) as f32)) };
        values.extend(group.iter().map(|u| code(u) * s));
    }
    (values, f64::from(scale))
}

/// The nearest E2M1 number; of two equally near ones the one whose code is even.
fn nearest_e2m1(x: f64) -> f64 {
    const NUMBERS: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let distance = |code: &usize| (NUMBERS[*code] - x.abs()).abs();
    let order = |a: &usize, b: &usize| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2)));
    NUMBERS[(0..8).min_by(order).unwrap()].copysign(x)
}

/// The nearest of all E4M3 numbers; of two equally near ones the one whose code is even.
fn nearest(x: f64) -> f64 {
    let distance = |code: &u8| (f64::from(e4m3(*code)) - x.abs()).abs();
    let by_distance = |a: &u8, b: &u8| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2)));
    let code = (0..0x7f).min_by(by_distance).unwrap();
    f64::from(e4m3(code)).copysign(x)
}
