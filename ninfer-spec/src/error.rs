//! What generation can report.

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error with the facts needed to act on it; [`Error::help`] says what to do.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model or its backend refused.
    #[error(transparent)]
    Model(#[from] ninfer_core::Error),
    /// An option is outside its legal range.
    #[error("{what} is {got}, legal range is {legal}")]
    Option {
        /// Which option.
        what: &'static str,
        /// Its value.
        got: String,
        /// The legal range in words.
        legal: String,
    },
    /// Two options exclude each other.
    #[error("{first} cannot be combined with {second}: {reason}")]
    Incompatible {
        /// One option.
        first: &'static str,
        /// The other.
        second: &'static str,
        /// Why.
        reason: &'static str,
    },
    /// More tokens were licensed than had been offered; nothing was committed.
    #[error("{licensed} tokens licensed, {offered} were offered")]
    License {
        /// Tokens offered.
        offered: usize,
        /// Tokens licensed.
        licensed: usize,
    },
    /// A drafter's block contradicts itself.
    #[error("drafter {drafter}: {what} is {got}, expected {expected}")]
    Drafter {
        /// Name of the drafter.
        drafter: &'static str,
        /// Which part of the block.
        what: &'static str,
        /// What it had to be.
        expected: usize,
        /// What it was.
        got: usize,
    },
    /// What a model returned for a round contradicts itself.
    #[error("outcome of a round: {what} is {got}, expected {expected}")]
    Outcome {
        /// Which part.
        what: &'static str,
        /// What it had to be.
        expected: String,
        /// What it was.
        got: String,
    },
    /// An accept rule was given columns that do not fit together.
    #[error("accept rule {rule}: {what} is {got}, expected {expected}")]
    Columns {
        /// Name of the rule.
        rule: &'static str,
        /// Which part.
        what: &'static str,
        /// What it had to be.
        expected: usize,
        /// What it was.
        got: usize,
    },
    /// A distribution without any probability: its logits held a NaN or nothing finite.
    #[error("no token can be chosen for position {position}")]
    NoChoice {
        /// Position of the token.
        position: u64,
    },
    /// Statistics of a run that repeats itself are not averaged with others.
    #[error("the text of this run repeats itself; its speed and acceptance mean nothing")]
    Looping,
}

impl Error {
    /// One line on what to do about it.
    #[must_use]
    pub fn help(&self) -> &'static str {
        match self {
            Self::Model(error) => error.help(),
            Self::Option { .. } => "choose a value inside the legal range",
            Self::Incompatible { .. } => "drop one of the two options",
            Self::License { .. } => "license at most as many tokens as the callback was given",
            Self::Drafter { .. } => "correct the drafter: one distribution over the whole vocabulary for each draft",
            Self::Outcome { .. } => "correct the model's `verify`; its documentation lists what an outcome holds",
            Self::Columns { .. } => "give k drafts, k + 1 target distributions and k or no proposal distributions",
            Self::NoChoice { .. } => "check the checkpoint for damaged weights",
            Self::Looping => "use a fresh, ordinary prompt, or sample instead of decoding greedily",
        }
    }
}
