//! Drives a model through prompts and answers.

use std::fmt;
use std::sync::Arc;

use ninfer_core::model::{CausalModel, LaneOptions, PrefillEnd};
use ninfer_core::state::{Committed, Outcome};

use crate::{
    Answer, Cancel, Clock, CostTable, Counts, Error, FinishReason, Options, Request, Result, Running, Sequence,
    SystemClock,
};

/// Receives prompt tokens done and prompt tokens in all.
type Progress<'m> = Box<dyn FnMut(usize, usize) + Send + 'm>;

/// Generates answers with any model, one request after the other.
///
/// The same tokens come out whatever the drafter and the number of drafts, if the rule is [`MatchRule`](crate::MatchRule).
///
/// ```
/// use ninfer_core::model::CausalModel;
/// use ninfer_spec::{Drafts, Generator, NgramDrafter, Options, Result};
///
/// fn answer<M: CausalModel>(model: &mut M, prompt: &[u32], stop: &[u32]) -> Result<Vec<u32>> {
///     let drafter = NgramDrafter::new(2, 4)?;
///     let options = Options::new().with_stop(stop).with_drafts(Drafts::Auto { max: 4 }).with_ngram(drafter);
///     let mut generator = Generator::new(model, options)?;
///     // License every token; a text front end would look for stop strings here.
///     let answer = generator.generate(prompt, |tokens| tokens.len())?;
///     eprintln!("{}", answer.statistics);
///     Ok(answer.tokens)
/// }
/// ```
pub struct Generator<'m, M: CausalModel> {
    pub(super) model: &'m mut M,
    pub(super) options: Options,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) cancel: Cancel,
    progress: Option<Progress<'m>>,
    pub(super) costs: Option<CostTable>,
}

impl<M: CausalModel> fmt::Debug for Generator<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Generator").field("options", &self.options).field("costs", &self.costs).finish_non_exhaustive()
    }
}

impl<'m, M: CausalModel> Generator<'m, M> {
    /// Checks the options against the model.
    ///
    /// # Errors
    /// [`Error::Option`] and [`Error::Incompatible`] naming the option; [`ninfer_core::Error::OutOfRange`] for sampling.
    pub fn new(model: &'m mut M, options: Options) -> Result<Self> {
        options.validate(model.limits())?;
        let clock = Arc::new(SystemClock::new());
        Ok(Self { model, options, clock, cancel: Cancel::new(), progress: None, costs: None })
    }

    /// Takes times from another clock.
    #[must_use]
    pub fn with_clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Lets a handle end requests.
    #[must_use]
    pub fn with_cancel(mut self, cancel: &Cancel) -> Self {
        self.cancel = cancel.clone();
        self
    }

    /// Reports prompt tokens done, and how many there are, after each chunk.
    #[must_use]
    pub fn with_progress(mut self, progress: impl FnMut(usize, usize) + Send + 'm) -> Self {
        self.progress = Some(Box::new(progress));
        self
    }

    /// The model.
    pub fn model(&mut self) -> &mut M {
        self.model
    }

    /// Answers a prompt.
    ///
    /// `license` is given the tokens of each round before they are committed, and returns how many of them may be: all, fewer
    /// (the answer ends there, exactly), or 0. Tokens it licenses are final, so it can stream them.
    ///
    /// # Errors
    /// What the model reports; [`Error::License`] if more tokens are licensed than given.
    pub fn generate(&mut self, prompt: &[u32], license: impl FnMut(&[u32]) -> usize) -> Result<Answer> {
        Ok(self.start(prompt)?.run(license)?.0)
    }

    /// Prefills a prompt in a lane of its own and waits for [`Running::step`].
    ///
    /// # Errors
    /// What the model reports.
    pub fn start(&mut self, prompt: &[u32]) -> Result<Running<'_, 'm, M>> {
        let limits = self.model.limits();
        // Also room for the drafts of the last rounds, where the model has it.
        let needed = prompt.len().saturating_add(self.options.max_new).saturating_add(2 * Options::most_drafts(limits));
        let capacity = self.options.capacity.unwrap_or(needed.min(limits.max_context));
        fits(prompt.len(), capacity)?;
        let lane = self.open(capacity)?;
        self.prepare(Sequence { lane, tokens: prompt.to_vec(), counts: Counts::new(), capacity })
    }

    /// Appends tokens to a sequence, prefills what its lane does not hold yet, and waits for [`Running::step`].
    ///
    /// # Errors
    /// What the model reports; the sequence is lost then.
    pub fn resume(&mut self, mut sequence: Sequence<M::Lane>, more: &[u32]) -> Result<Running<'_, 'm, M>> {
        sequence.tokens.extend_from_slice(more);
        fits(sequence.tokens.len(), sequence.capacity)?;
        self.model.set_sampling(&mut sequence.lane, &self.options.sampling)?;
        self.prepare(sequence)
    }

    fn prepare(&mut self, sequence: Sequence<M::Lane>) -> Result<Running<'_, 'm, M>> {
        let Sequence { mut lane, tokens, mut counts, capacity } = sequence;
        let from = lane.position();
        counts.add_prompt(tokens.get(from..).unwrap_or_default());
        let mut request = Request::new(&self.options, self.model.limits(), capacity, tokens, counts);
        if let Some(costs) = &self.costs {
            request = request.with_costs(costs);
        }
        let begun = self.clock.seconds();
        let outcome = match self.prefill(&mut lane, &request, from) {
            Err(Error::Model(ninfer_core::Error::MtpUnavailable { reason })) if request.uses_mtp() => {
                // The lane is to be dropped; its place is needed for the new one.
                drop(lane);
                request.stop_mtp(&reason);
                lane = self.open(capacity)?;
                self.prefill(&mut lane, &request, 0)?
            }
            other => other?,
        };
        match outcome {
            Some(outcome) => request.begin(&outcome)?,
            None => request.end(FinishReason::Cancelled),
        }
        let seconds = self.clock.seconds() - begun;
        let statistics = request.statistics_mut();
        statistics.prefill_tokens += lane.position().saturating_sub(from) as u64;
        statistics.prefill_seconds += seconds;
        Ok(Running::new(self, lane, request, capacity))
    }

    fn open(&mut self, capacity: usize) -> Result<Committed<M::Lane>> {
        let options = LaneOptions::new(capacity).with_sampling(self.options.sampling);
        Ok(self.model.open_lane(&options)?)
    }

    /// Prefills the tokens from `from` on; `None` if cancelled before the end.
    fn prefill(&mut self, lane: &mut Committed<M::Lane>, request: &Request, from: usize) -> Result<Option<Outcome>> {
        let tokens = request.tokens();
        let total = tokens.len().saturating_sub(from);
        let mut at = from;
        loop {
            if self.cancel.is_cancelled() {
                return Ok(None);
            }
            // Chunks end at fixed absolute positions, so that a result never depends on where a prompt was resumed.
            let end = ((at / self.options.chunk + 1) * self.options.chunk).min(tokens.len());
            let is_last = end == tokens.len();
            let then = if is_last { PrefillEnd::Choose { drafts: request.first_drafts() } } else { PrefillEnd::More };
            let outcome = self.model.prefill(lane, tokens.get(at..end).unwrap_or_default(), then, None)?;
            at = end;
            if let Some(progress) = &mut self.progress {
                progress(at.saturating_sub(from), total);
            }
            if is_last {
                let missing =
                    Error::Outcome { what: "outcome of the prefill", expected: "one token".into(), got: "none".into() };
                return outcome.map(Some).ok_or(missing);
            }
        }
    }
}

fn fits(requested: usize, limit: usize) -> Result<()> {
    if requested <= limit { Ok(()) } else { Err(ninfer_core::Error::ContextOverflow { requested, limit }.into()) }
}
