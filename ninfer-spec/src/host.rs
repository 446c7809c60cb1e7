//! Acceptance on the host, from the logits of a round.

use ninfer_core::model::DraftBlock;
use ninfer_core::sampling::distribution_into;
use ninfer_core::state::Outcome;

use crate::{AcceptRule, Columns, Error, Request, Result, Verdict};

impl Request {
    /// Applies a rule to the final distributions of a round's columns.
    pub(super) fn judge_on_host(
        &mut self,
        block: &DraftBlock,
        outcome: &Outcome,
        rule: &dyn AcceptRule,
    ) -> Result<Verdict> {
        let columns = block.tokens.len() + 1;
        let wrong = |what, expected: String, got: usize| Err(Error::Outcome { what, expected, got: got.to_string() });
        let Some(logits) = &outcome.logits else {
            return wrong("rows of logits", columns.to_string(), 0);
        };
        let (vocab, limit) = (logits.len() / columns, self.token_limit);
        if vocab < limit.max(1) || vocab * columns != logits.len() {
            return wrong("length of the logits", format!("{columns} rows of {limit} or more"), logits.len());
        }
        let (tokens, counts) = (&self.tokens, &self.counts);
        let anchor = tokens.last().copied();
        self.target.resize_with(columns, Vec::new);
        for (i, (row, law)) in logits.chunks_exact(vocab).zip(&mut self.target).enumerate() {
            // Inputs of this round up to this column count as generated.
            let inputs = || anchor.iter().chain(block.tokens.iter().take(i));
            let word = |id: u32| counts.word(id) + inputs().filter(|&&t| t == id).count() as u32;
            if !distribution_into(row, limit, &self.sampling, &word, &mut self.scratch, law) {
                return Err(Error::NoChoice { position: (tokens.len() + i) as u64 });
            }
        }
        rule.accept(Columns {
            drafts: &block.tokens,
            target: &self.target,
            proposal: block.distributions.as_deref(),
            seed: self.sampling.seed,
            position: tokens.len() as u64,
        })
    }
}
