//! Random numbers that depend on nothing but what they are for.

/// What a random number is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Purpose {
    /// The target's choice of a token.
    Choose = 0,
    /// A drafter's choice of a token.
    Draft = 1,
    /// Whether a draft is accepted.
    Accept = 2,
    /// The token in place of a rejected draft.
    Residual = 3,
}

/// A uniform number in [0, 1): a pure function of the seed, the absolute position of the token it decides about, what it is
/// for, and an index for further numbers of the same kind.
///
/// With `mix` the 64-bit finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
/// OOPSLA 2014), all arithmetic modulo 2⁶⁴ and γ = 0x9e3779b97f4a7c15:
///
/// ```text
/// mix(z): z = (z ^ (z >> 30)) · 0xbf58476d1ce4e5b9
///         z = (z ^ (z >> 27)) · 0x94d049bb133111eb
///         z ^ (z >> 31)
/// h = mix(seed + γ)
/// h = mix((h ^ position) + γ)
/// h = mix((h ^ (purpose · 2³² + index)) + γ)
/// u = (h >> 11) · 2⁻⁵³
/// ```
///
/// ```
/// use ninfer_core::sampling::{Purpose, uniform};
/// let u = uniform(1, 10, Purpose::Choose, 0);
/// assert!((0.0..1.0).contains(&u));
/// assert_eq!(u, uniform(1, 10, Purpose::Choose, 0));
/// assert_ne!(u, uniform(1, 11, Purpose::Choose, 0));
/// ```
#[must_use]
pub const fn uniform(seed: u64, position: u64, purpose: Purpose, index: u32) -> f64 {
    let h = mix(seed);
    let h = mix(h ^ position);
    let h = mix(h ^ ((purpose as u64) << 32 | index as u64));
    (h >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// One step of SplitMix64: adds the increment, then mixes.
const fn mix(z: u64) -> u64 {
    let z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first outputs of SplitMix64 from state 0, as its authors' program prints them.
    #[test]
    fn mixer_is_splitmix64() {
        assert_eq!(mix(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(mix(0x9e37_79b9_7f4a_7c15), 0x6e78_9e6a_a1b9_65f4);
    }

    /// Sixteen equal cells, 200,000 numbers along each argument: χ² with 15 degrees of freedom stays below 37.70 (p = 1e-3).
    #[test]
    fn numbers_are_uniform_along_every_argument() {
        type Argument = (&'static str, fn(u64) -> f64);
        let arguments: [Argument; 4] = [
            ("seed", |i| uniform(i, 7, Purpose::Choose, 0)),
            ("position", |i| uniform(3, i, Purpose::Choose, 0)),
            ("index", |i| uniform(3, 7, Purpose::Draft, i as u32)),
            ("seed and position", |i| uniform(i, i, Purpose::Accept, 0)),
        ];
        for (name, number) in arguments {
            let mut cells = [0u32; 16];
            for i in 0..200_000 {
                let u = number(i);
                assert!((0.0..1.0).contains(&u));
                cells[(u * 16.0) as usize] += 1;
            }
            let expected = 200_000.0 / 16.0;
            let chi: f64 = cells.iter().map(|&n| (f64::from(n) - expected).powi(2) / expected).sum();
            assert!(chi < 37.70, "{name}: χ² = {chi}");
        }
    }

    /// Neighbouring positions and purposes are independent: 4 × 4 cells of pairs, as above.
    #[test]
    fn neighbours_are_independent() {
        type Pair = fn(u64) -> (f64, f64);
        let pairs: [Pair; 3] = [
            |i| (uniform(5, i, Purpose::Choose, 0), uniform(5, i + 1, Purpose::Choose, 0)),
            |i| (uniform(5, i, Purpose::Accept, 0), uniform(5, i, Purpose::Residual, 0)),
            |i| (uniform(i, 9, Purpose::Choose, 0), uniform(i + 1, 9, Purpose::Choose, 0)),
        ];
        for pair in pairs {
            let mut cells = [0u32; 16];
            for i in 0..200_000 {
                let (a, b) = pair(i);
                cells[(a * 4.0) as usize * 4 + (b * 4.0) as usize] += 1;
            }
            let expected = 200_000.0 / 16.0;
            let chi: f64 = cells.iter().map(|&n| (f64::from(n) - expected).powi(2) / expected).sum();
            assert!(chi < 37.70, "χ² = {chi}");
        }
    }
}
