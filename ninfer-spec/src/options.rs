//! What a generator is asked to do.

use ninfer_core::model::{Drafter, Limits};
use ninfer_core::sampling::SamplingParams;
use ninfer_core::state::MAX_COLUMNS;
use serde::{Deserialize, Serialize};

use crate::{AcceptRule, Error, MatchRule, MtpDrafter, NgramDrafter, Result};

/// How many drafts a round verifies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Drafts {
    /// None: plain decoding.
    #[default]
    Off,
    /// Always this many, as far as the drafter has them.
    Fixed(usize),
    /// As many as pay, by measurement (see [`Controller`](crate::Controller)).
    Auto {
        /// At most this many; more than the model can verify counts as what it can.
        max: usize,
    },
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FinishReason {
    /// A stop token; it is the last token of the answer unless the license refused it.
    Stop,
    /// The longest allowed answer.
    Length,
    /// The context is full.
    ContextLimit,
    /// Fewer tokens were licensed than offered: a stop string, or the caller's own reason.
    License,
    /// Cancelled.
    Cancelled,
}

/// Options of a [`Generator`](crate::Generator).
///
/// ```
/// use ninfer_core::sampling::SamplingParams;
/// use ninfer_spec::{Drafts, Options};
/// let options = Options::new()
///     .with_max_new(64)
///     .with_sampling(SamplingParams::greedy().with_temperature(0.7).with_seed(3))
///     .with_stop(&[151_645])
///     .with_drafts(Drafts::Auto { max: 3 })
///     .with_mtp();
/// # let _ = options;
/// ```
pub struct Options {
    pub(super) max_new: usize,
    pub(super) sampling: SamplingParams,
    pub(super) stop: Vec<u32>,
    pub(super) ignore_stop: bool,
    pub(super) drafts: Drafts,
    pub(super) drafter: Box<dyn Drafter>,
    pub(super) rule: Box<dyn AcceptRule>,
    pub(super) capacity: Option<usize>,
    pub(super) chunk: usize,
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { max_new, sampling, stop, ignore_stop, drafts, drafter, rule, capacity, chunk } = self;
        f.debug_struct("Options")
            .field("max_new", max_new)
            .field("sampling", sampling)
            .field("stop", stop)
            .field("ignore_stop", ignore_stop)
            .field("drafts", drafts)
            .field("drafter", &drafter.name())
            .field("rule", &rule.name())
            .field("capacity", capacity)
            .field("chunk", chunk)
            .finish()
    }
}

impl Default for Options {
    fn default() -> Self {
        Self::new()
    }
}

impl Options {
    /// Greedy, 256 tokens at most, no stop tokens, no drafts (MTP once they are switched on), prompts in chunks of 1024.
    #[must_use]
    pub fn new() -> Self {
        Self {
            max_new: 256,
            sampling: SamplingParams::greedy(),
            stop: Vec::new(),
            ignore_stop: false,
            drafts: Drafts::Off,
            drafter: Box::new(MtpDrafter),
            rule: Box::new(MatchRule),
            capacity: None,
            chunk: 1024,
        }
    }

    /// Sets the longest answer, in tokens; at least 1.
    #[must_use]
    pub fn with_max_new(mut self, max_new: usize) -> Self {
        self.max_new = max_new;
        self
    }

    /// Sets how tokens are chosen.
    #[must_use]
    pub fn with_sampling(mut self, sampling: SamplingParams) -> Self {
        self.sampling = sampling;
        self
    }

    /// Sets the tokens that end an answer.
    #[must_use]
    pub fn with_stop(mut self, ids: &[u32]) -> Self {
        self.stop = ids.to_vec();
        self
    }

    /// Whether to go on behind stop tokens.
    #[must_use]
    pub fn with_ignore_stop(mut self, ignore: bool) -> Self {
        self.ignore_stop = ignore;
        self
    }

    /// Sets how many drafts a round verifies.
    #[must_use]
    pub fn with_drafts(mut self, drafts: Drafts) -> Self {
        self.drafts = drafts;
        self
    }

    /// Drafts by the model's MTP block. This is the default; drafts are off where the model has none, with a note in the
    /// statistics.
    #[must_use]
    pub fn with_mtp(self) -> Self {
        self.with_drafter(MtpDrafter)
    }

    /// Drafts by copying from earlier in the text.
    #[must_use]
    pub fn with_ngram(self, drafter: NgramDrafter) -> Self {
        self.with_drafter(drafter)
    }

    /// Drafts by any drafter. It is used for all requests of the generator, one after the other.
    #[must_use]
    pub fn with_drafter(mut self, drafter: impl Drafter + 'static) -> Self {
        self.drafter = Box::new(drafter);
        self
    }

    /// Sets how drafts are accepted; [`MatchRule`] is the default.
    ///
    /// A rule that is not the model's own needs the logits of all columns on the host, which is slow, and cannot be combined
    /// with MTP, whose cache the model realigns by its own rule.
    #[must_use]
    pub fn with_rule(mut self, rule: impl AcceptRule + 'static) -> Self {
        self.rule = Box::new(rule);
        self
    }

    /// Sets the positions to reserve for a lane, more than one request needs if a sequence shall be continued; by default what the prompt and the longest answer need, or the model's
    /// limit if that is less.
    #[must_use]
    pub fn with_capacity(mut self, positions: usize) -> Self {
        self.capacity = Some(positions);
        self
    }

    /// Sets after how many prompt tokens progress is reported and cancellation looked at; a multiple of 64.
    #[must_use]
    pub fn with_prefill_chunk(mut self, tokens: usize) -> Self {
        self.chunk = tokens;
        self
    }

    /// The drafter.
    pub fn drafter(&mut self) -> &mut dyn Drafter {
        &mut *self.drafter
    }

    /// The accept rule.
    #[must_use]
    pub fn rule(&self) -> &dyn AcceptRule {
        &*self.rule
    }

    /// Checks the options against a model.
    ///
    /// # Errors
    /// [`Error::Option`] and [`Error::Incompatible`] naming the option; [`ninfer_core::Error::OutOfRange`] for sampling.
    pub fn validate(&self, limits: &Limits) -> Result<()> {
        let legal = |ok: bool, what, got: usize, legal: String| {
            if ok { Ok(()) } else { Err(Error::Option { what, got: got.to_string(), legal }) }
        };
        self.sampling.validate()?;
        legal(self.max_new > 0, "longest answer", self.max_new, "1 or more".into())?;
        let chunk_fits = self.chunk > 0 && self.chunk.is_multiple_of(64);
        legal(chunk_fits, "prefill chunk", self.chunk, "multiples of 64".into())?;
        if let Some(capacity) = self.capacity {
            let most = limits.max_context;
            legal((1..=most).contains(&capacity), "capacity", capacity, format!("1 to {most}"))?;
        }
        if let Drafts::Fixed(k) = self.drafts {
            let most = Self::most_drafts(limits);
            legal(k <= most, "number of drafts", k, format!("0 to {most}"))?;
        }
        if self.drafts != Drafts::Off && self.drafter.uses_mtp() && !self.rule.is_the_models() {
            return Err(Error::Incompatible {
                first: "MTP drafts",
                second: "an accept rule of the host",
                reason: "the model realigns its MTP cache by its own rule",
            });
        }
        Ok(())
    }

    /// Most drafts of a round with this model.
    pub(super) fn most_drafts(limits: &Limits) -> usize {
        limits.max_drafts.min(MAX_COLUMNS - 1)
    }
}
