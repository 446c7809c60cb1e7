//! Random numbers that are the same in every run.

/// SplitMix64 (Steele, Lea and Flood, 2014): a counter and a mixing function.
///
/// ```
/// use ninfer_benches::Random;
/// let mut random = Random::new(1);
/// assert!((0..100).all(|_| (-1.0..1.0).contains(&random.uniform())));
/// assert_eq!(Random::new(7).word(), Random::new(7).word());
/// ```
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Numbers of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Uniform in −1 … 1.
    pub fn uniform(&mut self) -> f32 {
        // 24 bits are what an f32 holds.
        (self.word() >> 40) as f32 / 8_388_608.0 - 1.0
    }

    /// Uniform below `limit`.
    pub fn below(&mut self, limit: u32) -> u32 {
        (self.word() % u64::from(limit.max(1))) as u32
    }
}
