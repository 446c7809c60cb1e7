//! A lane together with its tokens.

use std::collections::HashMap;

use ninfer_core::sampling::PROMPT_BIT;
use ninfer_core::state::{Committed, LaneState};

use crate::{Error, Result};

/// Count words of the tokens of a sequence, as penalties need them (see [`ninfer_core::sampling`]).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts(HashMap<u32, u32>);

impl Counts {
    /// No tokens.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Marks tokens as part of the prompt.
    pub fn add_prompt(&mut self, tokens: &[u32]) {
        tokens.iter().for_each(|&t| *self.0.entry(t).or_default() |= PROMPT_BIT);
    }

    /// Counts generated tokens.
    pub fn add_generated(&mut self, tokens: &[u32]) {
        tokens.iter().for_each(|&t| *self.0.entry(t).or_default() += 1);
    }

    /// The count word of a token.
    #[must_use]
    pub fn word(&self, token: u32) -> u32 {
        self.0.get(&token).copied().unwrap_or(0)
    }
}

/// A sequence that can be continued: a committed lane and the tokens that belong to it.
///
/// The lane holds the first `lane.position()` tokens. After an answer exactly one token, the last, is not in the lane yet:
/// it was emitted but has not been an input.
#[derive(Debug)]
pub struct Sequence<L> {
    pub(super) lane: Committed<L>,
    pub(super) tokens: Vec<u32>,
    pub(super) counts: Counts,
    pub(super) capacity: usize,
}

impl<L: LaneState> Sequence<L> {
    /// Puts a lane, its tokens and the positions it was opened with together; all tokens count as prompt. `tokens` may go on
    /// behind what the lane holds.
    ///
    /// # Errors
    /// [`Error::Outcome`] if the lane holds more positions than there are tokens.
    pub fn new(lane: Committed<L>, tokens: Vec<u32>, capacity: usize) -> Result<Self> {
        if lane.position() > tokens.len() {
            return Err(Error::Outcome {
                what: "position of the lane",
                expected: format!("at most {}", tokens.len()),
                got: lane.position().to_string(),
            });
        }
        let mut counts = Counts::new();
        counts.add_prompt(&tokens);
        Ok(Self { lane, tokens, counts, capacity })
    }

    /// The lane.
    #[must_use]
    pub fn lane(&self) -> &Committed<L> {
        &self.lane
    }

    /// The lane, to take a snapshot or to change how it samples.
    pub fn lane_mut(&mut self) -> &mut Committed<L> {
        &mut self.lane
    }

    /// All tokens: prompt and answer.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Takes it apart.
    #[must_use]
    pub fn into_lane(self) -> Committed<L> {
        self.lane
    }
}
