//! What a run did, in numbers.

use std::fmt;

use serde::ser::{Serialize, SerializeStruct, Serializer};

use crate::{Error, Result};

/// Acceptance above this on ordinary text is a sign of a fault: text that repeats itself, or a drafter that knows the answer.
pub const SUSPICIOUS_ACCEPTANCE: f64 = 0.97;

/// Drafts before acceptance says anything.
const ENOUGH_DRAFTS: u64 = 64;

/// Counts and times of a run.
///
/// Every round counts in full, also where a stop token or a limit cut its tokens. The first token of an answer is chosen
/// by the prefill and belongs to no round. Serialising adds `acceptance`, `tokens_per_round`, `tokens_per_second` and
/// `is_suspicious`.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Statistics {
    /// Name of the drafter; empty without speculation.
    pub drafter: String,
    /// Prompt tokens that were computed.
    pub prefill_tokens: u64,
    /// Seconds of the prefill, up to the first token.
    pub prefill_seconds: f64,
    /// Committed tokens of all rounds.
    pub decode_tokens: u64,
    /// Seconds of all rounds, without the time of the license callback.
    pub decode_seconds: f64,
    /// Rounds.
    pub rounds: u64,
    /// Drafts verified.
    pub drafted: u64,
    /// Drafts accepted.
    pub accepted: u64,
    /// Drafts verified at each position.
    pub drafted_per_position: Vec<u64>,
    /// Drafts accepted at each position; accepted means that all before it were accepted too.
    pub accepted_per_position: Vec<u64>,
    /// Rounds without drafts although speculation was on: nothing proposed, too slow, or no room for more than one token.
    pub fallback_rounds: u64,
    /// Whether the text repeats itself (see [`LoopDetector`](crate::LoopDetector)).
    pub looping: bool,
    /// What else a reader should know.
    pub notes: Vec<String>,
}

impl Statistics {
    /// Nothing done yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Share of the drafts that were accepted; 0 without drafts.
    #[must_use]
    pub fn acceptance(&self) -> f64 {
        ratio(self.accepted as f64, self.drafted as f64)
    }

    /// Share of rounds that accepted the draft at `position` (from 0), among those that verified one there.
    #[must_use]
    pub fn acceptance_at(&self, position: usize) -> f64 {
        let at = |all: &[u64]| all.get(position).map_or(0.0, |&n| n as f64);
        ratio(at(&self.accepted_per_position), at(&self.drafted_per_position))
    }

    /// Tokens that a round brought: 1 and its accepted drafts; 0 without rounds.
    #[must_use]
    pub fn tokens_per_round(&self) -> f64 {
        ratio((self.rounds + self.accepted) as f64, self.rounds as f64)
    }

    /// Committed tokens per second of the rounds.
    #[must_use]
    pub fn tokens_per_second(&self) -> f64 {
        ratio(self.decode_tokens as f64, self.decode_seconds)
    }

    /// Prompt tokens per second.
    #[must_use]
    pub fn prefill_tokens_per_second(&self) -> f64 {
        ratio(self.prefill_tokens as f64, self.prefill_seconds)
    }

    /// Whether the numbers look too good: the text loops, or more than 97 % of at least 64 drafts were accepted.
    #[must_use]
    pub fn is_suspicious(&self) -> bool {
        self.looping || (self.drafted >= ENOUGH_DRAFTS && self.acceptance() > SUSPICIOUS_ACCEPTANCE)
    }

    /// Adds a round.
    pub fn record_round(&mut self, drafted: usize, accepted: usize, committed: usize, seconds: f64) {
        self.rounds += 1;
        self.drafted += drafted as u64;
        self.accepted += accepted as u64;
        self.decode_tokens += committed as u64;
        self.decode_seconds += seconds;
        add(&mut self.drafted_per_position, (0..drafted).map(|_| 1));
        add(&mut self.accepted_per_position, (0..drafted).map(|i| u64::from(i < accepted)));
    }

    /// Adds a note unless it stands there already.
    pub fn note(&mut self, note: impl Into<String>) {
        let note = note.into();
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Adds another run, for averages over prompts.
    ///
    /// # Errors
    /// [`Error::Looping`] if the text of either run repeats itself; nothing is added then.
    pub fn merge(&mut self, other: &Self) -> Result<()> {
        if self.looping || other.looping {
            return Err(Error::Looping);
        }
        if self.drafter.is_empty() {
            self.drafter.clone_from(&other.drafter);
        }
        self.prefill_tokens += other.prefill_tokens;
        self.prefill_seconds += other.prefill_seconds;
        self.decode_tokens += other.decode_tokens;
        self.decode_seconds += other.decode_seconds;
        self.rounds += other.rounds;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        add(&mut self.drafted_per_position, other.drafted_per_position.iter().copied());
        add(&mut self.accepted_per_position, other.accepted_per_position.iter().copied());
        self.fallback_rounds += other.fallback_rounds;
        other.notes.iter().for_each(|note| self.note(note));
        Ok(())
    }
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

fn add(sums: &mut Vec<u64>, more: impl ExactSizeIterator<Item = u64>) {
    if sums.len() < more.len() {
        sums.resize(more.len(), 0);
    }
    sums.iter_mut().zip(more).for_each(|(sum, n)| *sum += n);
}

impl Serialize for Statistics {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut s = serializer.serialize_struct("Statistics", 17)?;
        s.serialize_field("drafter", &self.drafter)?;
        s.serialize_field("prefill_tokens", &self.prefill_tokens)?;
        s.serialize_field("prefill_seconds", &self.prefill_seconds)?;
        s.serialize_field("decode_tokens", &self.decode_tokens)?;
        s.serialize_field("decode_seconds", &self.decode_seconds)?;
        s.serialize_field("tokens_per_second", &self.tokens_per_second())?;
        s.serialize_field("rounds", &self.rounds)?;
        s.serialize_field("tokens_per_round", &self.tokens_per_round())?;
        s.serialize_field("drafted", &self.drafted)?;
        s.serialize_field("accepted", &self.accepted)?;
        s.serialize_field("acceptance", &self.acceptance())?;
        s.serialize_field("drafted_per_position", &self.drafted_per_position)?;
        s.serialize_field("accepted_per_position", &self.accepted_per_position)?;
        s.serialize_field("fallback_rounds", &self.fallback_rounds)?;
        s.serialize_field("looping", &self.looping)?;
        s.serialize_field("is_suspicious", &self.is_suspicious())?;
        s.serialize_field("notes", &self.notes)?;
        s.end()
    }
}

impl fmt::Display for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let speed = |tokens: u64, seconds: f64| {
            format!("{tokens} tokens in {seconds:.3} s ({:.1} tokens/s)", ratio(tokens as f64, seconds))
        };
        writeln!(f, "{:<14}{}", "prefill", speed(self.prefill_tokens, self.prefill_seconds))?;
        writeln!(f, "{:<14}{}", "decode", speed(self.decode_tokens, self.decode_seconds))?;
        writeln!(f, "{:<14}{} ({:.3} tokens a round)", "rounds", self.rounds, self.tokens_per_round())?;
        if !self.drafter.is_empty() {
            let share = 100.0 * self.acceptance();
            writeln!(f, "{:<14}{}", "drafter", self.drafter)?;
            writeln!(f, "{:<14}{} of {} drafts ({share:.1} %)", "accepted", self.accepted, self.drafted)?;
            for (i, (accepted, drafted)) in
                self.accepted_per_position.iter().zip(&self.drafted_per_position).enumerate()
            {
                let share = 100.0 * self.acceptance_at(i);
                writeln!(f, "  {:<12}{accepted} of {drafted} ({share:.1} %)", format!("draft {}", i + 1))?;
            }
            writeln!(f, "{:<14}{} rounds without drafts", "fallback", self.fallback_rounds)?;
        }
        if self.looping {
            writeln!(f, "{:<14}the text repeats itself: speed and acceptance mean nothing", "warning")?;
        } else if self.is_suspicious() {
            writeln!(f, "{:<14}acceptance is above 97 %, which ordinary text does not give", "warning")?;
        }
        for note in &self.notes {
            writeln!(f, "{:<14}{note}", "note")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> Statistics {
        let mut s = Statistics { drafter: "ngram".into(), ..Statistics::new() };
        s.record_round(3, 3, 4, 0.5);
        s.record_round(2, 0, 1, 0.25);
        s.record_round(3, 1, 2, 0.25);
        s.record_round(0, 0, 1, 0.25);
        s
    }

    #[test]
    fn shares_follow_from_counts() {
        let s = run();
        assert_eq!((s.rounds, s.drafted, s.accepted, s.decode_tokens), (4, 8, 4, 8));
        assert_eq!(s.drafted_per_position, [3, 3, 2]);
        assert_eq!(s.accepted_per_position, [2, 1, 1]);
        assert_eq!(s.acceptance(), 0.5);
        assert_eq!(s.acceptance_at(2), 0.5);
        assert_eq!(s.acceptance_at(9), 0.0);
        assert_eq!(s.tokens_per_round(), 2.0);
        assert_eq!(s.tokens_per_second(), 6.4);
        assert_eq!(Statistics::new().tokens_per_round(), 0.0);
    }

    #[test]
    fn runs_add_up_unless_one_loops() {
        let mut sum = Statistics::new();
        sum.merge(&run()).unwrap();
        sum.merge(&run()).unwrap();
        assert_eq!((sum.rounds, sum.drafted_per_position.as_slice()), (8, [6, 6, 4].as_slice()));
        let looping = Statistics { looping: true, ..run() };
        assert_eq!(sum.merge(&looping), Err(Error::Looping));
        assert_eq!(sum.rounds, 8);
    }

    #[test]
    fn too_good_is_suspicious() {
        let mut s = Statistics::new();
        (0..21).for_each(|_| s.record_round(3, 3, 4, 0.1));
        assert!(!s.is_suspicious(), "63 drafts say nothing yet");
        s.record_round(3, 3, 4, 0.1);
        assert!(s.is_suspicious());
        assert!(!run().is_suspicious());
    }

    #[test]
    fn json_and_table_hold_the_numbers() {
        let mut s = run();
        s.note("no MTP");
        s.note("no MTP");
        let json = serde_json::to_value(&s).unwrap();
        assert_eq!(json["tokens_per_round"], 2.0);
        assert_eq!(json["accepted_per_position"], serde_json::json!([2, 1, 1]));
        assert_eq!(json["notes"], serde_json::json!(["no MTP"]));
        let table = s.to_string();
        for text in ["8 tokens in 1.250 s (6.4 tokens/s)", "4 of 8 drafts (50.0 %)", "draft 3", "no MTP"] {
            assert!(table.contains(text), "{table}");
        }
    }
}
