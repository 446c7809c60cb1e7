//! How likely a model finds a text: windows of a token stream, each from an empty state.

use ninfer_core::backend::InferenceBackend;
use ninfer_core::model::{CausalModel, LaneOptions, PrefillEnd};
use ninfer_core::state::Committed;
use ninfer_models::session::Lane;
use ninfer_models::{Qwen35, Session, SessionOptions};
use serde::Serialize;

use crate::{Failure, Result};

/// Tokens that go through a model at a time; results do not depend on it.
const CHUNK: usize = 256;

/// Negative log-likelihoods of a token stream, in nats.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Likelihood {
    /// One a scored token, in one list a window. The first token of a window is not scored.
    pub windows: Vec<Vec<f64>>,
}

impl Likelihood {
    /// Scored tokens.
    #[must_use]
    pub fn scored(&self) -> usize {
        self.windows.iter().map(Vec::len).sum()
    }

    /// Mean over all scored tokens.
    #[must_use]
    pub fn nll(&self) -> f64 {
        self.windows.iter().flatten().sum::<f64>() / self.scored() as f64
    }

    /// Mean over each window.
    #[must_use]
    pub fn per_window(&self) -> Vec<f64> {
        self.windows.iter().map(|w| w.iter().sum::<f64>() / w.len() as f64).collect()
    }

    /// `exp` of the mean.
    #[must_use]
    pub fn perplexity(&self) -> f64 {
        self.nll().exp()
    }
}

/// How far a model's distributions are from a reference's, over the scored tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Agreement {
    /// Mean of `Σ p_ref (ln p_ref − ln p)`, in nats.
    pub kl: f64,
    /// Share of positions at which both find the same token most likely.
    pub top1_agreement: f64,
}

/// A model and, if asked for, a reference to compare it with.
#[derive(Debug)]
pub struct Judge<B: InferenceBackend> {
    model: Session<B>,
    reference: Option<Session<B>>,
    window: usize,
}

/// What a [`Judge`] found.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// The model.
    pub model: Likelihood,
    /// The reference and the distance to it.
    pub reference: Option<(Likelihood, Agreement)>,
}

impl<B: InferenceBackend> Judge<B> {
    /// Opens sessions for windows of `window` tokens.
    ///
    /// # Errors
    /// [`Failure::Usage`] for a window below 2 tokens; what the models report.
    pub fn new(model: &Qwen35<B>, reference: Option<&Qwen35<B>>, window: usize) -> Result<Self> {
        if window < 2 {
            return Err(Failure::usage(format!("--window is {window}"), "give a window of at least 2 tokens"));
        }
        let options =
            SessionOptions::new(window).with_max_drafts(0).with_mtp(false).with_prefill_chunk(CHUNK.min(window));
        let reference = reference.map(|model| model.session(&options)).transpose()?;
        Ok(Self { model: model.session(&options)?, reference, window })
    }

    /// Measures a token stream; `progress` is told how many tokens are done. A last window of one token is left out.
    ///
    /// # Errors
    /// [`Failure::TooFewTokens`], [`Failure::NotFinite`], and what the models report.
    pub fn measure(&mut self, tokens: &[u32], progress: &mut dyn FnMut(usize)) -> Result<Verdict> {
        if tokens.len() < 2 {
            return Err(Failure::TooFewTokens { tokens: tokens.len() });
        }
        let (mut model, mut reference) = (Likelihood::default(), Likelihood::default());
        let (mut kl, mut same) = (0.0, 0);
        for (i, window) in tokens.chunks(self.window).enumerate().filter(|(_, window)| window.len() > 1) {
            let first = i * self.window;
            let mut scores = Vec::with_capacity(window.len() - 1);
            let mut reference_scores = Vec::new();
            let mut lane = open(&mut self.model, window.len())?;
            let mut reference_lane = self.reference.as_mut().map(|r| open(r, window.len())).transpose()?;
            for (chunk_index, chunk) in window.chunks(CHUNK).enumerate() {
                let start = chunk_index * CHUNK;
                let mut kept = Vec::new();
                if let (Some(session), Some(lane)) = (&mut self.reference, &mut reference_lane) {
                    prefill(session, lane, chunk, |row| kept.push(Distribution::new(row.to_vec())))?;
                }
                let mut kept = kept.into_iter();
                let mut at = start;
                prefill(&mut self.model, &mut lane, chunk, |row| {
                    let own = Distribution::new(row);
                    let reference = kept.next();
                    at += 1;
                    let Some(&target) = window.get(at) else { return };
                    scores.push(own.nll(target));
                    if let Some(reference) = reference {
                        reference_scores.push(reference.nll(target));
                        kl += reference.kl(&own);
                        same += usize::from(reference.top == own.top);
                    }
                })?;
                progress(first + at);
            }
            let finite = |list: &[f64]| list.iter().position(|x| !x.is_finite());
            if let Some(index) = finite(&scores).or(finite(&reference_scores)) {
                return Err(Failure::NotFinite { index: first + index + 1 });
            }
            model.windows.push(scores);
            reference.windows.push(reference_scores);
        }
        let scored = model.scored() as f64;
        let agreement = Agreement { kl: kl / scored, top1_agreement: same as f64 / scored };
        Ok(Verdict { model, reference: self.reference.is_some().then_some((reference, agreement)) })
    }
}

fn open<B: InferenceBackend>(session: &mut Session<B>, tokens: usize) -> Result<Committed<Lane>> {
    Ok(session.open_lane(&LaneOptions::new(tokens))?)
}

/// Hands the logits behind each token of a chunk to `take`.
fn prefill<B: InferenceBackend>(
    session: &mut Session<B>,
    lane: &mut Committed<Lane>,
    chunk: &[u32],
    mut take: impl FnMut(&[f32]),
) -> Result<()> {
    let vocab = session.limits().vocab;
    let mut sink = |_: usize, rows: &[f32]| {
        rows.chunks_exact(vocab).for_each(&mut take);
        Ok(())
    };
    session.prefill(lane, chunk, PrefillEnd::More, Some(&mut sink))?;
    Ok(())
}

/// The distribution, in f64, that one row of f32 logits stands for.
struct Distribution<L> {
    logits: L,
    /// Logarithm of the sum of `exp`.
    log_sum: f64,
    /// The most likely token; of several the lowest.
    top: usize,
}

impl<L: AsRef<[f32]>> Distribution<L> {
    fn new(logits: L) -> Self {
        let (top, most) = logits
            .as_ref()
            .iter()
            .enumerate()
            .fold((0, f32::NEG_INFINITY), |best, (i, &x)| if x > best.1 { (i, x) } else { best });
        let most = f64::from(most);
        let sum: f64 = logits.as_ref().iter().map(|&x| (f64::from(x) - most).exp()).sum();
        Self { logits, log_sum: most + sum.ln(), top }
    }

    /// NaN for a token without a row, which the session has refused before.
    fn nll(&self, token: u32) -> f64 {
        self.logits.as_ref().get(token as usize).map_or(f64::NAN, |&x| self.log_sum - f64::from(x))
    }

    /// Kullback–Leibler divergence of `other` from this distribution.
    fn kl<M: AsRef<[f32]>>(&self, other: &Distribution<M>) -> f64 {
        let term = |(&a, &b): (&f32, &f32)| {
            let (a, b) = (f64::from(a) - self.log_sum, f64::from(b) - other.log_sum);
            if a == f64::NEG_INFINITY { 0.0 } else { a.exp() * (a - b) }
        };
        self.logits.as_ref().iter().zip(other.logits.as_ref()).map(term).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_softmax_by_hand() {
        let d = Distribution::new([0.0, 2.0f32.ln(), f32::NEG_INFINITY, 2.0f32.ln()]);
        assert!((d.nll(0) - 5.0f64.ln()).abs() < 1e-7);
        assert!((d.nll(3) - 2.5f64.ln()).abs() < 1e-7);
        assert_eq!((d.top, d.nll(2)), (1, f64::INFINITY));
        assert!(d.nll(4).is_nan());
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let d = Distribution::new([3e38, -3e38]);
        assert_eq!(d.nll(0), 0.0);
        assert!(Distribution::new([f32::NAN, 0.0]).nll(1).is_nan());
    }

    #[test]
    fn divergence_by_hand() {
        let fair = Distribution::new([0.0, 0.0]);
        let odd = Distribution::new([3.0f32.ln(), 0.0]);
        // ½ ln(½ / ¾) + ½ ln(½ / ¼)
        assert!((fair.kl(&odd) - 0.5 * (4.0f64 / 3.0).ln()).abs() < 1e-7);
        assert_eq!(odd.kl(&odd), 0.0);
    }

    #[test]
    fn means_weigh_tokens_and_not_windows() {
        let l = Likelihood { windows: vec![vec![1.0, 2.0, 3.0], vec![6.0]] };
        assert_eq!((l.scored(), l.nll(), l.per_window()), (4, 3.0, vec![2.0, 6.0]));
    }
}
