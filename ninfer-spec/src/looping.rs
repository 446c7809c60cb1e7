//! Recognises text that repeats itself.

use std::collections::VecDeque;

/// Longest period that is recognised.
const MAX_PERIOD: usize = 64;

/// Fewest repeated tokens of a loop.
const MIN_REPEATED: usize = 64;

/// Watches a text for loops: at least 64 tokens, and at least three times the period, each equal to the token one period
/// before, with a period of at most 64.
///
/// A drafter copies such text without effort, so speed and acceptance measured on it say nothing about ordinary text.
///
/// ```
/// use ninfer_spec::LoopDetector;
/// let mut detector = LoopDetector::new();
/// (0..100u32).for_each(|i| detector.push(i % 7));
/// assert!(detector.found());
/// ```
#[derive(Clone, Debug)]
pub struct LoopDetector {
    /// The last tokens, newest first.
    recent: VecDeque<u32>,
    /// For period `p`, at `p − 1`: how many tokens in a row equalled the one `p` before.
    repeated: [usize; MAX_PERIOD],
    found: bool,
}

impl Default for LoopDetector {
    fn default() -> Self {
        Self { recent: VecDeque::with_capacity(MAX_PERIOD + 1), repeated: [0; MAX_PERIOD], found: false }
    }
}

impl LoopDetector {
    /// Starts with an empty text.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a token.
    pub fn push(&mut self, token: u32) {
        for (i, &earlier) in self.recent.iter().enumerate() {
            let Some(repeated) = self.repeated.get_mut(i) else { break };
            *repeated = if earlier == token { *repeated + 1 } else { 0 };
            self.found |= *repeated >= MIN_REPEATED.max(3 * (i + 1));
        }
        self.recent.push_front(token);
        self.recent.truncate(MAX_PERIOD);
    }

    /// Whether a loop was found at any time.
    #[must_use]
    pub fn found(&self) -> bool {
        self.found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(tokens: impl IntoIterator<Item = u32>) -> bool {
        let mut detector = LoopDetector::new();
        tokens.into_iter().for_each(|token| detector.push(token));
        detector.found()
    }

    #[test]
    fn loops_of_any_period_are_found() {
        for period in 1..=64u32 {
            assert!(
                found((0..1000 + period + 64.max(3 * period)).map(|i| if i < 1000 { i } else { i % period })),
                "{period}"
            );
        }
        assert!(found((0..65).map(|_| 3)));
        assert!(!found((0..64).map(|_| 3)));
    }

    #[test]
    fn ordinary_text_is_not_a_loop() {
        assert!(!found((0..5000u32).map(|i| i.wrapping_mul(2_654_435_761) >> 27)));
        assert!(!found((0..40).chain(0..40).chain(0..40).chain(50..90)), "a list of three similar items");
    }

    #[test]
    fn a_loop_stays_found() {
        assert!(found((0..200).map(|_| 1).chain(0..500)));
    }
}
