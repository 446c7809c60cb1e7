//! A request while it is answered, round by round.

use std::fmt;

use ninfer_core::model::CausalModel;
use ninfer_core::state::Committed;

use crate::{Error, FinishReason, Generator, Request, Result, Sequence, Statistics};

/// A finished answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Committed tokens; a stop token is the last one.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: FinishReason,
    /// What it took.
    pub statistics: Statistics,
}

/// What a step did.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Step {
    /// Tokens committed by this step.
    pub tokens: Vec<u32>,
    /// Tokens that were offered.
    pub offered: usize,
    /// Drafts verified.
    pub drafted: usize,
    /// Drafts accepted, also those that were not offered because of a stop token or a limit.
    pub accepted: usize,
    /// Why the answer ended, once it has.
    pub finish: Option<FinishReason>,
}

/// A request that is being answered.
pub struct Running<'g, 'm, M: CausalModel> {
    generator: &'g mut Generator<'m, M>,
    lane: Committed<M::Lane>,
    request: Request,
    capacity: usize,
    /// What ends the answer if the last step's license does.
    declined: FinishReason,
}

impl<M: CausalModel> fmt::Debug for Running<'_, '_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("lane", &self.lane).field("request", &self.request).finish_non_exhaustive()
    }
}

impl<'g, 'm, M: CausalModel> Running<'g, 'm, M> {
    pub(super) fn new(
        generator: &'g mut Generator<'m, M>,
        lane: Committed<M::Lane>,
        request: Request,
        capacity: usize,
    ) -> Self {
        Self { generator, lane, request, capacity, declined: FinishReason::License }
    }

    /// The request.
    #[must_use]
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// Runs one round; the first step only offers the token that the prefill chose.
    ///
    /// `license` is given the emitted tokens and returns how many may be committed. Fewer than offered does not end the
    /// answer here: a later step emits the same tokens again. Once the answer has ended, a step does nothing.
    ///
    /// # Errors
    /// What the model reports, and [`Error::License`]; the request stays as it was before the step.
    pub fn step(&mut self, mut license: impl FnMut(&[u32]) -> usize) -> Result<Step> {
        if self.request.finish().is_none() && self.generator.cancel.is_cancelled() {
            self.request.end(FinishReason::Cancelled);
        }
        if self.request.finish().is_some() {
            return Ok(Step { tokens: Vec::new(), offered: 0, drafted: 0, accepted: 0, finish: self.request.finish() });
        }
        if self.request.offers_first() {
            let n = license(self.request.offered());
            return self.advance(n, 0, 0.0);
        }
        let clock = self.generator.clock.clone();
        let begun = clock.seconds();
        loop {
            let Generator { model, options, .. } = &mut *self.generator;
            self.request.plan(&mut *options.drafter)?;
            let rule = &*options.rule;
            match model.verify(&mut [&mut self.lane], &[self.request.row(rule)]) {
                Err(ninfer_core::Error::MtpUnavailable { reason }) if self.request.uses_mtp() => {
                    self.request.stop_mtp(&reason);
                }
                Err(error) => return Err(error.into()),
                Ok(round) => {
                    let outcome = round.outcomes().first().ok_or_else(|| Error::Outcome {
                        what: "number of outcomes",
                        expected: "1".into(),
                        got: "0".into(),
                    })?;
                    self.request.judge(outcome, rule)?;
                    let verified = clock.seconds() - begun;
                    let offered = self.request.offered().len();
                    let n = license(self.request.offered());
                    if n > offered {
                        return Err(Error::License { offered, licensed: n });
                    }
                    let resumed = clock.seconds();
                    round.commit(&[n])?;
                    let drafted = self.request.drafted().len();
                    return self.advance(n, drafted, verified + clock.seconds() - resumed);
                }
            }
        }
    }

    fn advance(&mut self, n: usize, drafted: usize, seconds: f64) -> Result<Step> {
        let (offered, accepted) = (self.request.offered().len(), self.request.accepted());
        let before = self.request.answer().len();
        self.declined = self.request.declined(n);
        self.request.advance(n, seconds)?;
        let tokens = self.request.answer().get(before..).unwrap_or_default().to_vec();
        Ok(Step { tokens, offered, drafted, accepted, finish: self.request.finish() })
    }

    /// Steps until the answer ends; fewer tokens licensed than offered end it too: with [`FinishReason::Stop`] if the first one
    /// refused is a stop token, else with [`FinishReason::License`].
    ///
    /// # Errors
    /// As [`Running::step`].
    pub fn run(mut self, mut license: impl FnMut(&[u32]) -> usize) -> Result<(Answer, Sequence<M::Lane>)> {
        loop {
            let step = self.step(&mut license)?;
            if step.finish.is_some() {
                break;
            }
            if step.tokens.len() < step.offered {
                self.request.end(self.declined);
                break;
            }
        }
        Ok(self.into_parts())
    }

    /// Ends the request here: the answer so far, and the sequence to go on with. An answer that has not ended counts as
    /// cancelled.
    #[must_use]
    pub fn into_parts(self) -> (Answer, Sequence<M::Lane>) {
        let Self { generator, lane, request, capacity, .. } = self;
        if let Some(costs) = request.costs() {
            generator.costs = Some(costs.clone());
        }
        let finish = request.finish().unwrap_or(FinishReason::Cancelled);
        let answer = request.answer().to_vec();
        let (tokens, counts, statistics) = request.into_parts();
        (Answer { tokens: answer, finish, statistics }, Sequence { lane, tokens, counts, capacity })
    }
}
