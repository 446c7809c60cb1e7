//! What rounds cost, as measured.

use std::collections::VecDeque;

/// Samples a cost is taken from.
const SAMPLES: usize = 8;

/// Slope assumed until a second point is known: share of a plain round that one more draft costs.
const ASSUMED_SLOPE: f64 = 0.12;

/// The lower median of the last few samples: one slow round (a first launch, a busy machine) moves it little.
#[derive(Clone, Debug, Default)]
struct Samples {
    last: VecDeque<f64>,
    median: Option<f64>,
}

impl Samples {
    fn push(&mut self, seconds: f64) {
        if self.last.len() == SAMPLES {
            self.last.pop_front();
        }
        self.last.push_back(seconds);
        let mut sorted: Vec<f64> = self.last.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        self.median = sorted.get((sorted.len() - 1) / 2).copied();
    }
}

/// Seconds of a round by number of drafts: verifying `k` drafts, and making `n` drafts for the next round on the device.
///
/// A round that verifies `k` and makes `n` is taken to cost `verify(k) + make(n)`, so that rounds in which the two differ
/// can be used too. Costs belong to a model and a machine: a table outlives a request and may be given to the next one.
#[derive(Clone, Debug)]
pub struct CostTable {
    verify: Vec<Samples>,
    make: Vec<Samples>,
}

impl CostTable {
    /// An empty table for up to `max` drafts.
    #[must_use]
    pub fn new(max: usize) -> Self {
        Self { verify: vec![Samples::default(); max + 1], make: vec![Samples::default(); max + 1] }
    }

    /// Most drafts it has a place for.
    #[must_use]
    pub fn max(&self) -> usize {
        self.verify.len().saturating_sub(1)
    }

    /// Adds a round that verified `drafted` drafts and made `next` others. Rounds of more drafts than the table has places
    /// for, and times that are not positive numbers, are left out.
    pub fn record(&mut self, drafted: usize, next: usize, seconds: f64) {
        if drafted > self.max() || next > self.max() || !seconds.is_finite() || seconds <= 0.0 {
            return;
        }
        let verify = self.verify(drafted);
        let measured = |all: &[Samples], k: usize| all.get(k).is_some_and(|s| s.median.is_some());
        if next > 0 && measured(&self.verify, drafted) && (drafted == 0 || !measured(&self.make, next)) {
            let rest = (seconds - verify.unwrap_or(0.0)).max(0.0);
            self.make[next].push(rest);
        } else {
            let rest = (seconds - self.make(next)).max(seconds * 0.05);
            self.verify[drafted].push(rest);
        }
    }

    /// Seconds of a plain round; `None` before the first one.
    #[must_use]
    pub fn plain(&self) -> Option<f64> {
        self.verify.first().and_then(|s| s.median)
    }

    /// How many plain rounds were measured, at most 8.
    #[must_use]
    pub fn plain_samples(&self) -> usize {
        self.verify.first().map_or(0, |s| s.last.len())
    }

    /// Whether rounds that verify `k` drafts were measured.
    #[must_use]
    pub fn is_measured(&self, k: usize) -> bool {
        self.verify.get(k).is_some_and(|s| s.median.is_some())
    }

    /// Most drafts that were measured.
    #[must_use]
    pub fn deepest(&self) -> usize {
        (0..=self.max()).rev().find(|&k| self.is_measured(k)).unwrap_or(0)
    }

    /// Seconds of a round that verifies `k` drafts and makes as many: measured, or on the line through the nearest measured
    /// neighbours. `None` before the first plain round.
    #[must_use]
    pub fn round(&self, k: usize) -> Option<f64> {
        Some(self.verify(k)? + self.make(k))
    }

    fn verify(&self, k: usize) -> Option<f64> {
        let plain = self.plain()?;
        Some(curve(&self.verify, plain, plain * ASSUMED_SLOPE, k))
    }

    /// Making drafts costs nothing where it was never seen to.
    fn make(&self, n: usize) -> f64 {
        curve(&self.make, 0.0, 0.0, n)
    }
}

/// The value at `k` of the line through the measured points around it; through (0, `origin`) with `slope` if there are none,
/// and never falling behind the last point.
fn curve(points: &[Samples], origin: f64, slope: f64, k: usize) -> f64 {
    let at = |i: usize| if i == 0 { Some(origin) } else { points.get(i).and_then(|s| s.median) };
    if let Some(value) = at(k) {
        return value;
    }
    let Some((low, low_value)) = (0..k).rev().find_map(|i| Some((i, at(i)?))) else { return origin };
    if let Some((high, high_value)) = (k + 1..points.len()).find_map(|i| Some((i, at(i)?))) {
        return low_value + (high_value - low_value) * (k - low) as f64 / (high - low) as f64;
    }
    let slope = match (0..low).rev().find_map(|i| Some((i, at(i)?))) {
        Some((lower, value)) => ((low_value - value) / (low - lower) as f64).max(0.0),
        None => slope,
    };
    low_value + slope * (k - low) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separates_verifying_from_making() {
        let mut costs = CostTable::new(4);
        costs.record(0, 0, 1.0);
        costs.record(0, 2, 1.2);
        costs.record(2, 0, 1.5);
        assert!((costs.round(2).unwrap() - 1.7).abs() < 1e-12);
        costs.record(2, 2, 1.9);
        costs.record(2, 2, 1.9);
        assert!((costs.round(2).unwrap() - 1.9).abs() < 1e-12);
        // Making became dearer; rounds without drafts tell the two apart.
        (0..3).for_each(|_| costs.record(0, 2, 1.4));
        assert!((costs.round(2).unwrap() - 2.1).abs() < 1e-12);
    }

    #[test]
    fn steady_rounds_alone_are_right_in_sum() {
        let mut costs = CostTable::new(4);
        costs.record(0, 0, 1.0);
        for _ in 0..5 {
            costs.record(3, 3, 2.0);
        }
        assert!((costs.round(3).unwrap() - 2.0).abs() < 1e-12);
    }

    #[test]
    fn estimates_lie_on_lines() {
        let mut costs = CostTable::new(8);
        assert_eq!(costs.round(1), None);
        costs.record(0, 0, 1.0);
        assert!((costs.round(5).unwrap() - 1.6).abs() < 1e-12);
        costs.record(2, 0, 2.0);
        assert!((costs.round(1).unwrap() - 1.5).abs() < 1e-12);
        assert!((costs.round(4).unwrap() - 3.0).abs() < 1e-12);
        costs.record(6, 0, 1.0);
        assert!((costs.round(8).unwrap() - 1.0).abs() < 1e-12, "the line never falls behind the last point");
        assert_eq!(costs.deepest(), 6);
    }

    #[test]
    fn outliers_and_nonsense_do_not_count() {
        let mut costs = CostTable::new(1);
        for seconds in [50.0, 1.0, 1.0, 9.0, 1.0, f64::NAN, -1.0, 0.0] {
            costs.record(0, 0, seconds);
        }
        costs.record(7, 0, 1.0);
        assert_eq!(costs.plain(), Some(1.0));
        assert_eq!(costs.plain_samples(), 5);
    }
}
