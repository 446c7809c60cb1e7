//! Seeded numbers for tests.

/// SplitMix64.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed ^ 0x5eed_5eed_5eed_5eed)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    pub fn byte(&mut self) -> u8 {
        self.bits() as u8
    }

    /// Uniform in `[low, high)`.
    pub fn range(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * ((self.bits() >> 40) as f32 / (1u64 << 24) as f32)
    }

    /// Roughly normal with the given deviation; one in 64 is an outlier of six deviations, one in 64 is zero.
    pub fn value(&mut self, deviation: f32) -> f32 {
        match self.below(64) {
            0 => 0.0,
            1 => 6.0 * deviation * if self.below(2) == 0 { 1.0 } else { -1.0 },
            // The sum of three uniform numbers in [−1, 1) has variance 1.
            _ => deviation * (0..3).map(|_| self.range(-1.0, 1.0)).sum::<f32>(),
        }
    }

    pub fn values(&mut self, n: usize, deviation: f32) -> Vec<f32> {
        (0..n).map(|_| self.value(deviation)).collect()
    }

    /// A permutation of `0..n`.
    pub fn permutation(&mut self, n: usize) -> Vec<usize> {
        let mut list: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            list.swap(i, self.below(i + 1));
        }
        list
    }
}
