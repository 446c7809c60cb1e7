//! Sampling parameters and their device form.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// U32 words of [`SamplingParams::to_words`].
pub const PARAM_WORDS: usize = 16;

/// How tokens are chosen; the default is greedy without penalties.
///
/// ```
/// use ninfer_core::sampling::SamplingParams;
/// let params = SamplingParams::greedy().with_temperature(0.7).with_top_k(20).with_top_p(0.8).with_seed(1);
/// params.validate()?;
/// assert!(!params.is_greedy());
/// # Ok::<(), ninfer_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct SamplingParams {
    /// Divides the logits; 0 takes the most likely token.
    pub temperature: f32,
    /// Keeps the `k` most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps the most likely tokens that together reach this share, in (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// Drops tokens less likely than this multiple of the most likely one, in \[0, 1\]; 0 drops none.
    pub min_p: f32,
    /// Subtracted from the logit of every token generated so far, in \[−2, 2\].
    pub presence: f32,
    /// Subtracted from a token's logit for each time it was generated, in \[−2, 2\].
    pub frequency: f32,
    /// Positive logits of tokens in the prompt or the answer are divided by it, negative ones multiplied, in \[0.01, 100\].
    pub repetition: f32,
    /// Selects the random numbers.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self::greedy()
    }
}

impl SamplingParams {
    /// The most likely token at each step, no penalties.
    #[must_use]
    pub const fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence: 0.0,
            frequency: 0.0,
            repetition: 1.0,
            seed: 0,
        }
    }

    /// Sets the temperature; 0 is greedy.
    #[must_use]
    pub const fn with_temperature(mut self, temperature: f32) -> Self {
        self.temperature = temperature;
        self
    }

    /// Sets how many of the most likely tokens are kept; 0 keeps all.
    #[must_use]
    pub const fn with_top_k(mut self, top_k: u32) -> Self {
        self.top_k = top_k;
        self
    }

    /// Sets the share of probability that is kept.
    #[must_use]
    pub const fn with_top_p(mut self, top_p: f32) -> Self {
        self.top_p = top_p;
        self
    }

    /// Sets the least probability relative to the most likely token.
    #[must_use]
    pub const fn with_min_p(mut self, min_p: f32) -> Self {
        self.min_p = min_p;
        self
    }

    /// Sets the presence penalty.
    #[must_use]
    pub const fn with_presence(mut self, presence: f32) -> Self {
        self.presence = presence;
        self
    }

    /// Sets the frequency penalty.
    #[must_use]
    pub const fn with_frequency(mut self, frequency: f32) -> Self {
        self.frequency = frequency;
        self
    }

    /// Sets the repetition penalty.
    #[must_use]
    pub const fn with_repetition(mut self, repetition: f32) -> Self {
        self.repetition = repetition;
        self
    }

    /// Sets the seed.
    #[must_use]
    pub const fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Whether no random number is needed.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Whether logits depend on earlier tokens' counts.
    #[must_use]
    pub fn has_penalties(&self) -> bool {
        self.presence != 0.0 || self.frequency != 0.0 || self.repetition != 1.0
    }

    /// Checks every value against its range.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] naming the first value outside.
    pub fn validate(&self) -> Result<()> {
        fn inside(what: &'static str, value: f32, low: f32, high: f32) -> Result<()> {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(Error::OutOfRange { what, got: value.to_string(), legal: format!("{low} to {high}") })
        }
        inside("temperature", self.temperature, 0.0, 100.0)?;
        inside("top_p", self.top_p, f32::MIN_POSITIVE, 1.0)?;
        inside("min_p", self.min_p, 0.0, 1.0)?;
        inside("presence penalty", self.presence, -2.0, 2.0)?;
        inside("frequency penalty", self.frequency, -2.0, 2.0)?;
        inside("repetition penalty", self.repetition, 0.01, 100.0)
    }

    /// The device form.
    ///
    /// | word | content |
    /// |---:|---|
    /// | 0 | temperature, f32 bits |
    /// | 1 | top-k |
    /// | 2, 3 | top-p, min-p, f32 bits |
    /// | 4, 5, 6 | presence, frequency, repetition penalty, f32 bits |
    /// | 7, 8 | low and high half of the seed |
    /// | 9 | bit 0: greedy; bit 1: has penalties |
    /// | 10–15 | 0 |
    #[must_use]
    pub fn to_words(&self) -> [u32; PARAM_WORDS] {
        let mut words = [0; PARAM_WORDS];
        words[0] = self.temperature.to_bits();
        words[1] = self.top_k;
        words[2] = self.top_p.to_bits();
        words[3] = self.min_p.to_bits();
        words[4] = self.presence.to_bits();
        words[5] = self.frequency.to_bits();
        words[6] = self.repetition.to_bits();
        words[7] = (self.seed & 0xffff_ffff) as u32;
        words[8] = (self.seed >> 32) as u32;
        words[9] = u32::from(self.is_greedy()) | u32::from(self.has_penalties()) << 1;
        words
    }

    /// Reads the device form; word 9 follows from the others and is not read.
    #[must_use]
    pub fn from_words(words: &[u32; PARAM_WORDS]) -> Self {
        Self {
            temperature: f32::from_bits(words[0]),
            top_k: words[1],
            top_p: f32::from_bits(words[2]),
            min_p: f32::from_bits(words[3]),
            presence: f32::from_bits(words[4]),
            frequency: f32::from_bits(words[5]),
            repetition: f32::from_bits(words[6]),
            seed: u64::from(words[7]) | u64::from(words[8]) << 32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn odd() -> SamplingParams {
        SamplingParams::greedy()
            .with_temperature(0.7)
            .with_top_k(20)
            .with_top_p(0.95)
            .with_min_p(0.05)
            .with_presence(1.5)
            .with_frequency(-0.25)
            .with_repetition(1.1)
            .with_seed(0x0123_4567_89ab_cdef)
    }

    #[test]
    fn words_round_trip() {
        assert_eq!(SamplingParams::from_words(&odd().to_words()), odd());
        let greedy = SamplingParams::greedy();
        assert_eq!(SamplingParams::from_words(&greedy.to_words()), greedy);
        assert_eq!(odd().to_words()[7..10], [0x89ab_cdef, 0x0123_4567, 2]);
        assert_eq!(greedy.to_words()[9], 1);
    }

    #[test]
    fn validation_names_the_value() {
        odd().validate().unwrap();
        SamplingParams::default().validate().unwrap();
        for (params, name) in [
            (odd().with_temperature(-1.0), "temperature"),
            (odd().with_temperature(f32::NAN), "temperature"),
            (odd().with_top_p(0.0), "top_p"),
            (odd().with_min_p(1.5), "min_p"),
            (odd().with_presence(2.5), "presence"),
            (odd().with_frequency(f32::INFINITY), "frequency"),
            (odd().with_repetition(0.0), "repetition"),
        ] {
            let message = params.validate().unwrap_err().to_string();
            assert!(message.contains(name), "{message}");
        }
    }

    #[test]
    fn missing_fields_take_their_defaults() {
        let params: SamplingParams = serde_json::from_str(r#"{"temperature":0.5}"#).unwrap();
        assert_eq!(params, SamplingParams::greedy().with_temperature(0.5));
    }
}
