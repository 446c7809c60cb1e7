//! Which drafts are accepted, and which token follows them.
//!
//! Both rules leave the target's distribution exactly as it is. [`MatchRule`] also leaves the text as it is: for a seed the
//! same tokens come out with any number of drafts, or none. [`RejectionRule`] accepts more of what a sampling drafter
//! proposes, and only the distribution of the text is kept.

use std::fmt;

use ninfer_core::sampling::{Purpose, pick, uniform};

use crate::{Error, Result};

/// The verified columns of a round, as distributions on the host.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// The drafts `d_1 … d_k`.
    pub drafts: &'a [u32],
    /// The target's final distributions `p_0 … p_k` over the vocabulary; `p_i` follows the anchor and `d_1 … d_i`.
    pub target: &'a [Vec<f64>],
    /// The drafter's distributions `q_1 … q_k`; `None` if every draft was its only choice.
    pub proposal: Option<&'a [Vec<f32>]>,
    /// Seed of the request.
    pub seed: u64,
    /// Absolute position of the first emitted token: one behind the anchor.
    pub position: u64,
}

/// What a rule decided: the first `accepted` drafts are emitted, then `token`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Accepted drafts.
    pub accepted: usize,
    /// The correction of the first rejected draft, or the bonus token behind all of them.
    pub token: u32,
}

/// Decides about drafts.
pub trait AcceptRule: fmt::Debug + Send {
    /// Short name for tables.
    fn name(&self) -> &'static str;

    /// Whether [`CausalModel::verify`](ninfer_core::model::CausalModel::verify) already applies this rule, so that its outcome
    /// stands and no logits are needed on the host.
    fn is_the_models(&self) -> bool {
        false
    }

    /// Accepts a prefix of the drafts.
    ///
    /// # Errors
    /// [`Error::Columns`] if the parts do not fit together, [`Error::NoChoice`] for a distribution without probability.
    fn accept(&self, columns: Columns<'_>) -> Result<Verdict>;
}

fn check(rule: &'static str, columns: &Columns<'_>) -> Result<()> {
    let k = columns.drafts.len();
    let fits = |what, expected: usize, got: usize| {
        if expected == got { Ok(()) } else { Err(Error::Columns { rule, what, expected, got }) }
    };
    fits("number of target distributions", k + 1, columns.target.len())?;
    let vocab = columns.target.first().map_or(0, Vec::len);
    for p in columns.target {
        fits("length of a target distribution", vocab, p.len())?;
    }
    if let Some(proposal) = columns.proposal {
        fits("number of proposal distributions", k, proposal.len())?;
        for q in proposal {
            fits("length of a proposal distribution", vocab, q.len())?;
        }
    }
    Ok(())
}

/// The target's own draw: `t_i` from `p_i`, with the single uniform number of that position.
fn draw(columns: &Columns<'_>, i: usize) -> Result<u32> {
    let position = columns.position + i as u64;
    columns
        .target
        .get(i)
        .and_then(|p| pick(p, uniform(columns.seed, position, Purpose::Choose, 0)))
        .ok_or(Error::NoChoice { position })
}

/// Accepts `d_i` exactly if the target, with that position's single random number, chooses it: `t_{i−1} = d_i`.
///
/// The first token that differs is emitted as the correction, so what is emitted is always the target's own draw: the text
/// is the one without speculation. A draft `d` is accepted with probability `p(d)`.
///
/// ```
/// use ninfer_spec::{AcceptRule, Columns, MatchRule};
/// let certain = |id: usize| (0..4).map(|v| f64::from(v == id)).collect::<Vec<_>>();
/// let target = [certain(2), certain(3), certain(1)];
/// let columns = Columns { drafts: &[2, 0], target: &target, proposal: None, seed: 1, position: 10 };
/// let verdict = MatchRule.accept(columns)?;
/// assert_eq!((verdict.accepted, verdict.token), (1, 3));
/// # Ok::<(), ninfer_spec::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct MatchRule;

impl AcceptRule for MatchRule {
    fn name(&self) -> &'static str {
        "match"
    }

    fn is_the_models(&self) -> bool {
        true
    }

    fn accept(&self, columns: Columns<'_>) -> Result<Verdict> {
        check(self.name(), &columns)?;
        for (i, &draft) in columns.drafts.iter().enumerate() {
            let token = draw(&columns, i)?;
            if token != draft {
                return Ok(Verdict { accepted: i, token });
            }
        }
        let accepted = columns.drafts.len();
        Ok(Verdict { accepted, token: draw(&columns, accepted)? })
    }
}

/// Accepts `d` with probability `min(1, p(d) / q(d))`; a rejected draft is replaced by a draw from `max(p − q, 0)`,
/// normalised (Leviathan, Kalman, Matias: "Fast inference from transformers via speculative decoding", 2023, algorithm 1).
///
/// A draft with `q(d) = 0` cannot have been drawn from `q` and is rejected. Without proposal distributions `q` is 1 at the
/// draft and 0 elsewhere.
#[derive(Clone, Copy, Debug, Default)]
pub struct RejectionRule;

impl AcceptRule for RejectionRule {
    fn name(&self) -> &'static str {
        "rejection"
    }

    fn accept(&self, columns: Columns<'_>) -> Result<Verdict> {
        check(self.name(), &columns)?;
        for (i, (&draft, p)) in columns.drafts.iter().zip(columns.target).enumerate() {
            let position = columns.position + i as u64;
            let q = columns.proposal.and_then(|all| all.get(i));
            let q_at = |v: usize| match q {
                Some(q) => q.get(v).map_or(0.0, |&q| f64::from(q)),
                None => f64::from(u8::from(v == draft as usize)),
            };
            let p_draft = p.get(draft as usize).copied().unwrap_or(0.0);
            let q_draft = q_at(draft as usize);
            if q_draft > 0.0 && uniform(columns.seed, position, Purpose::Accept, 0) * q_draft < p_draft {
                continue;
            }
            let mut residual: Vec<f64> = p.iter().enumerate().map(|(v, &p)| (p - q_at(v)).max(0.0)).collect();
            let total: f64 = residual.iter().sum();
            // Without a residual p and q agree up to rounding, and p itself is what remains to draw from.
            if total > 0.0 {
                residual.iter_mut().for_each(|r| *r /= total);
            } else {
                residual.clone_from(p);
            }
            let u = uniform(columns.seed, position, Purpose::Residual, 0);
            let token = pick(&residual, u).ok_or(Error::NoChoice { position })?;
            return Ok(Verdict { accepted: i, token });
        }
        let accepted = columns.drafts.len();
        Ok(Verdict { accepted, token: draw(&columns, accepted)? })
    }
}

#[cfg(test)]
mod tests;
