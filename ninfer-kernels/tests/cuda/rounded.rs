//! What kernels for prompts multiply: weights and normed inputs that have been rounded, and inputs whose codes are certain.

use half::bf16;
use ninfer_core::WeightFormat;
use ninfer_core::format::ActivationPrecision;

use super::lab::exact;
use super::stored::{Stored, e4m3};

pub const EPS: f32 = 1e-6;

/// The matrix of bf16(code · scale) for formats whose scales belong to groups or blocks of columns, and of the same values
/// for the others. Sums that nearly cancel show this rounding much enlarged, so it has to be in the reference of small ones.
pub fn weights(m: &Stored) -> Stored {
    let values = m.values();
    let rounds = matches!(m.packed().format(), WeightFormat::Group(_) | WeightFormat::Fp8Block);
    Stored::plain(m.rows, m.cols, &if rounds { exact(values) } else { values })
}

/// Rows of `k` inputs, normed, rounded to bf16.
pub fn normed(x: &[f32], k: usize, gain: &[f32]) -> Vec<f32> {
    exact(x.chunks(k).flat_map(|row| norm(row, gain)).collect())
}

fn norm(row: &[f32], gain: &[f32]) -> Vec<f32> {
    let mean = row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>() / row.len() as f64;
    let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
    row.iter().zip(gain).map(|(x, g)| (f64::from(*x) * factor * f64::from(1.0 + g)) as f32).collect()
}

/// Moves inputs by single bf16 steps until the codes of their normed values do not depend on the last bits of the norm.
/// Where a value lies on the border of two codes (and with equal gains many do exactly: 3 / 4 of the largest is one), two
/// orders of summation may choose different ones, an eighth of the value apart or more; no tolerance tells that from an error.
pub fn settle(x: &mut [f32], k: usize, gain: &[f32], precision: ActivationPrecision) {
    for row in x.chunks_mut(k) {
        while let Some(moved) = unsettled(row, gain, precision) {
            for i in moved {
                // Towards zero, so that the largest value stays the largest.
                row[i] = f32::from_bits(row[i].to_bits() - (1 << 16));
                assert_eq!(bf16::from_f32(row[i]).to_f32(), row[i]);
            }
        }
    }
}

/// Values that are closer than this part of them to a border may be rounded either way.
const CLOSE: f64 = 1e-5;

/// Which inputs are to be moved next.
fn unsettled(row: &[f32], gain: &[f32], precision: ActivationPrecision) -> Option<Vec<usize>> {
    // The factor of the norm cancels.
    let sizes: Vec<f64> = row.iter().zip(gain).map(|(x, g)| (f64::from(*x) * f64::from(1.0 + g)).abs()).collect();
    let largest = sizes.iter().copied().fold(0.0, f64::max);
    if largest == 0.0 {
        return None;
    }
    let moved: Vec<usize> = match precision {
        ActivationPrecision::E4m3Token => {
            let unit = 448.0 / largest;
            (0..row.len()).filter(|&i| on_border(sizes[i] * unit, &E4M3)).collect()
        }
        ActivationPrecision::E2m1Group16 => {
            let unit = 6.0 * 448.0 / largest;
            sizes
                .chunks(16)
                .enumerate()
                .flat_map(|(g, sizes)| group(sizes, unit).into_iter().map(move |i| 16 * g + i))
                .collect()
        }
        _ => Vec::new(),
    };
    (!moved.is_empty()).then_some(moved)
}

/// Inputs of a group to be moved: the largest ones, if the group's scale is uncertain, else those whose codes are.
fn group(sizes: &[f64], unit: f64) -> Vec<usize> {
    let most = sizes.iter().copied().fold(0.0, f64::max);
    let exact = most * unit / 6.0;
    if on_border(exact, &E4M3) {
        return (0..sizes.len()).filter(|&i| sizes[i] == most).collect();
    }
    let scale = nearest(exact, &E4M3);
    let uncertain = |i: &usize| scale > 0.0 && on_border(sizes[*i] * unit / scale, &E2M1);
    (0..sizes.len()).filter(uncertain).collect()
}

/// Magnitudes of codes in ascending order.
static E4M3: std::sync::LazyLock<Vec<f64>> =
    std::sync::LazyLock::new(|| (0..0x7f).map(|c| f64::from(e4m3(c))).collect());
static E2M1: std::sync::LazyLock<Vec<f64>> = std::sync::LazyLock::new(|| vec![0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);

/// Place of the first code that is not below a value, at least 1; `None` behind the last.
fn above(value: f64, codes: &[f64]) -> Option<usize> {
    let i = codes.partition_point(|&c| c < value).max(1);
    (i < codes.len()).then_some(i)
}

fn on_border(value: f64, codes: &[f64]) -> bool {
    let border = |i: usize| (codes[i - 1] + codes[i]) / 2.0;
    above(value, codes).is_some_and(|i| (value - border(i)).abs() <= CLOSE * value)
}

fn nearest(value: f64, codes: &[f64]) -> f64 {
    let Some(i) = above(value, codes) else { return codes[codes.len() - 1] };
    if value - codes[i - 1] <= codes[i] - value { codes[i - 1] } else { codes[i] }
}

#[test]
fn inputs_settle() {
    let mut row = exact((0..96).map(|i| 0.25 * ((i * 37 % 96) as f32 - 47.5)).collect());
    row[3] = 0.0;
    (row[5], row[6], row[7]) = (16.0, 12.0, 2.0);
    let gain = vec![0.25; 96];
    for precision in [ActivationPrecision::E4m3Token, ActivationPrecision::E2m1Group16] {
        let mut x = row.clone();
        assert!(unsettled(&x, &gain, precision).is_some());
        settle(&mut x, 96, &gain, precision);
        assert!(unsettled(&x, &gain, precision).is_none());
        assert!(x.iter().zip(&row).all(|(a, b)| (a - b).abs() <= b.abs() / 16.0));
    }
    let codes = |c: f64| [on_border(c, &E2M1), nearest(c, &E2M1) == 4.0];
    assert_eq!(
        [5.0, 4.99, 3.5, 3.51, 7.0].map(codes),
        [[true, true], [false, true], [true, false], [false, true], [false; 2]]
    );
}
