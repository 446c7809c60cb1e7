//! How many drafts a round shall verify.

use std::collections::VecDeque;

use crate::CostTable;

/// Tokens over which the loss against plain decoding is bounded.
pub const WINDOW: usize = 256;

/// Largest loss against plain decoding over [`WINDOW`] tokens, as a share.
pub const LARGEST_LOSS: f64 = 0.05;

/// Share of the bound that choices may use; the rest covers rounds that cost more than measured.
const USABLE: f64 = 0.8;

/// Weight that an acceptance estimate keeps at each new observation: half is forgotten after ten.
const MEMORY: f64 = 0.933;

/// Acceptance assumed for the first position; the others lean on the position before. Weights in observations; they fade as
/// observations do.
const ASSUMED: f64 = 0.6;
const ASSUMED_WEIGHT: f64 = 2.0;
const NEIGHBOUR_WEIGHT: f64 = 4.0;

/// Plain rounds measured before anything else is tried.
const PLAIN_ROUNDS: usize = 2;

/// Longest run of plain rounds between two trials. Below the 64 positions an MTP cache can fall behind.
const LONGEST_GAP: usize = 48;

/// Rounds with drafts after which a plain round is measured again, and rounds after which one more draft is tried.
const PLAIN_AGAIN: usize = 128;
const DEEPER_AGAIN: usize = 32;

/// Deviation from the known cost up to which one plain round is measurement enough, and the most rounds if it is larger.
const PLAIN_CHANGED: f64 = 0.1;
const PLAIN_REPEATS: usize = 4;

/// What a round did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observation {
    /// Drafts verified.
    pub drafted: usize,
    /// Drafts accepted.
    pub accepted: usize,
    /// Drafts that the model made for the next round.
    pub next: usize,
    /// Duration.
    pub seconds: f64,
}

/// How often the draft at one position was accepted, given that all before it were.
#[derive(Clone, Copy, Debug)]
struct Rate {
    hits: f64,
    trials: f64,
    /// Weight of the assumption.
    weight: f64,
}

impl Rate {
    fn new(position: usize) -> Self {
        let weight = if position == 0 { ASSUMED_WEIGHT } else { NEIGHBOUR_WEIGHT };
        Self { hits: 0.0, trials: 0.0, weight }
    }

    fn observe(&mut self, hit: bool) {
        self.hits = self.hits * MEMORY + f64::from(u8::from(hit));
        self.trials = self.trials * MEMORY + 1.0;
        self.weight *= MEMORY;
    }

    fn estimate(self, assumed: f64) -> f64 {
        (self.hits + self.weight * assumed) / (self.trials + self.weight)
    }
}

/// Picks the number of drafts with the most expected tokens per second, 0 included.
///
/// With `α_i` the estimated acceptance of draft `i` (given that the drafts before it were accepted; old rounds fade
/// exponentially) and `c(k)` the measured seconds of a round, it maximises `(1 + Σ_{j ≤ k} Π_{i ≤ j} α_i) / c(k)`. An estimate
/// leans on that of the position before, the more the fewer observations it has.
///
/// To notice changes it sometimes tries another number. Two rules bound what that costs. A ledger of the last 256
/// tokens keeps what rounds with drafts lost against plain decoding, and a number is chosen only if even a round without an
/// accepted draft leaves the loss of every run of rounds in that window below 5 % of 256 plain tokens. And an unmeasured
/// number is at most twice the largest measured one plus one, so its cost is no surprise.
///
/// The choice never changes a text: random numbers depend only on positions.
#[derive(Clone, Debug)]
pub struct Controller {
    max: usize,
    rates: Vec<Rate>,
    costs: CostTable,
    /// Tokens of a round and seconds it lost against plain decoding, newest last.
    ledger: VecDeque<(usize, f64)>,
    ledger_tokens: usize,
    /// Plain rounds in a row, and how many shall pass before a trial.
    plain_run: usize,
    gap: usize,
    /// Rounds since the cost of a plain one was confirmed.
    since_plain: usize,
    /// For each number of drafts: rounds since so many or more were verified.
    since_depth: Vec<usize>,
}

impl Controller {
    /// A controller for up to `max` drafts that has measured nothing.
    #[must_use]
    pub fn new(max: usize) -> Self {
        Self::with_costs(max, CostTable::new(max))
    }

    /// A controller that starts with measured costs.
    #[must_use]
    pub fn with_costs(max: usize, costs: CostTable) -> Self {
        let costs = if costs.max() < max { CostTable::new(max) } else { costs };
        Self {
            max,
            rates: (0..max).map(Rate::new).collect(),
            costs,
            ledger: VecDeque::new(),
            ledger_tokens: 0,
            plain_run: 0,
            gap: 1,
            since_plain: 0,
            since_depth: vec![0; max + 1],
        }
    }

    /// Measured costs.
    #[must_use]
    pub fn costs(&self) -> &CostTable {
        &self.costs
    }

    /// Estimated acceptance of each position, given that the drafts before it were accepted.
    #[must_use]
    pub fn acceptance(&self) -> Vec<f64> {
        let mut last = ASSUMED;
        let estimate = |rate: &Rate| {
            last = rate.estimate(last);
            last
        };
        self.rates.iter().map(estimate).collect()
    }

    /// Expected tokens of a round with `k` drafts.
    #[must_use]
    pub fn expected_tokens(&self, k: usize) -> f64 {
        let mut reached = 1.0;
        self.acceptance().iter().take(k).fold(1.0, |sum, alpha| {
            reached *= alpha;
            sum + reached
        })
    }

    /// Number of drafts for a coming round, while a round of `pending` drafts (0 if none) is not observed yet.
    #[must_use]
    pub fn choose(&self, pending: usize) -> usize {
        let Some(plain) = self.costs.plain() else { return 0 };
        if self.costs.plain_samples() < PLAIN_ROUNDS || self.since_plain >= PLAIN_AGAIN {
            return 0;
        }
        let left = USABLE * LARGEST_LOSS * WINDOW as f64 * plain - self.lost() - self.worst(pending);
        let reach = self.max.min(2 * self.costs.deepest() + 1);
        let allowed = |k: usize| k <= reach && self.worst(k) <= left;
        let speed = |k: usize| self.costs.round(k).map_or(0.0, |seconds| self.expected_tokens(k) / seconds);
        let better = |best: usize, k: usize| if allowed(k) && speed(k) > speed(best) { k } else { best };
        let best = (1..=self.max).fold(0, better);
        if best > 0 {
            let deeper = best + 1;
            let stale = self.since_depth.get(deeper).is_some_and(|&rounds| rounds >= DEEPER_AGAIN);
            return if stale && allowed(deeper) { deeper } else { best };
        }
        if self.plain_run >= self.gap {
            let trial = (2..=self.max).fold(1, better);
            return if allowed(trial) { trial } else { 0 };
        }
        0
    }

    /// Takes note of a round.
    pub fn observe(&mut self, round: Observation) {
        let Observation { drafted, accepted, next, seconds } = round;
        self.costs.record(drafted, next, seconds);
        for (i, rate) in self.rates.iter_mut().enumerate().take(drafted.min(accepted + 1)) {
            rate.observe(i < accepted);
        }
        let is_plain = drafted == 0 && next == 0;
        let changed = self.costs.plain().is_some_and(|plain| (seconds / plain - 1.0).abs() > PLAIN_CHANGED);
        let lost = match self.costs.plain() {
            Some(plain) if !is_plain => seconds - (accepted + 1) as f64 * plain,
            _ => 0.0,
        };
        self.ledger.push_back((accepted + 1, lost));
        self.ledger_tokens += accepted + 1;
        while let Some(&(tokens, _)) = self.ledger.front().filter(|(tokens, _)| self.ledger_tokens - tokens >= WINDOW) {
            self.ledger_tokens -= tokens;
            self.ledger.pop_front();
        }
        if is_plain {
            self.plain_run += 1;
            if !changed || self.plain_run >= PLAIN_REPEATS {
                self.since_plain = 0;
            }
        } else {
            self.plain_run = 0;
            self.since_plain += 1;
        }
        if drafted > 0 {
            self.gap = match accepted {
                0 => (2 * self.gap).min(LONGEST_GAP),
                a if a >= drafted => (self.gap / 4).max(1),
                _ => self.gap,
            };
        }
        for (k, since) in self.since_depth.iter_mut().enumerate() {
            *since = if k <= drafted { 0 } else { *since + 1 };
        }
    }

    /// The largest loss of a run of rounds that ends now, inside the window.
    fn lost(&self) -> f64 {
        let mut sum = 0.0;
        self.ledger.iter().rev().fold(0.0, |worst: f64, &(_, lost)| {
            sum += lost;
            worst.max(sum)
        })
    }

    /// What a round of `k` drafts loses if none is accepted; twice the estimate where it is not measured.
    fn worst(&self, k: usize) -> f64 {
        let (Some(plain), Some(round)) = (self.costs.plain(), self.costs.round(k)) else { return 0.0 };
        let extra = (round - plain).max(0.0);
        if self.costs.is_measured(k) { extra } else { 2.0 * extra }
    }
}

#[cfg(test)]
mod tests;
