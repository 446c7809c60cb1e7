//! From logits to a token.

use super::{PROMPT_BIT, Purpose, SamplingParams, generated, uniform};

/// Memory that [`choose`] reuses; it allocates only while it grows.
#[derive(Clone, Debug, Default)]
pub struct ChooseScratch {
    /// Penalised logits.
    logits: Vec<f32>,
    /// Sort keys: smaller is better.
    keys: Vec<u64>,
    /// Kept tokens in ascending order with their probabilities.
    kept: Vec<(u32, f64)>,
}

impl ChooseScratch {
    /// Empty memory.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

/// Applies the penalties to one logit, in f32, each operation rounded by itself.
///
/// With `g` the generated count: if the token stands in the prompt or `g > 0`, `x ← x / repetition` for `x > 0`, else
/// `x · repetition`; then `x ← x − frequency · g`; then, if `g > 0`, `x ← x − presence`. (Presence and frequency as the
/// OpenAI API defines them, repetition as in Keskar et al. 2019, "CTRL", section 4.1; the order is vLLM's.)
///
/// ```
/// use ninfer_core::sampling::{PROMPT_BIT, SamplingParams, penalise};
/// let params = SamplingParams::greedy().with_repetition(2.0).with_frequency(0.5).with_presence(0.25);
/// assert_eq!(penalise(4.0, 0, &params), 4.0);
/// assert_eq!(penalise(4.0, PROMPT_BIT, &params), 2.0);
/// assert_eq!(penalise(4.0, 3, &params), 2.0 - 1.5 - 0.25);
/// assert_eq!(penalise(-4.0, PROMPT_BIT, &params), -8.0);
/// ```
#[must_use]
pub fn penalise(logit: f32, count: u32, params: &SamplingParams) -> f32 {
    if count == 0 {
        return logit;
    }
    let n = generated(count);
    let mut x = if logit > 0.0 { logit / params.repetition } else { logit * params.repetition };
    if n > 0 {
        x -= params.frequency * n as f32;
        x -= params.presence;
    }
    x
}

/// Chooses the token of `position` (the absolute position the token will have, one behind the row that made the logits).
///
/// `logits` is one row `[V]`; ids from `limit` on are never chosen and their logits are not looked at. `count` gives the
/// count word of an id and is asked only if there are penalties. The steps are those of the
/// [module](crate::sampling). `None` for a NaN logit below `limit` or if none there is finite.
///
/// ```
/// use ninfer_core::sampling::{ChooseScratch, SamplingParams, choose};
/// let mut scratch = ChooseScratch::new();
/// let logits = [1.0, 3.0, 3.0, 9.0];
/// assert_eq!(choose(&logits, 3, &SamplingParams::greedy(), &|_| 0, 5, &mut scratch), Some(1));
/// ```
#[must_use]
pub fn choose(
    logits: &[f32],
    limit: usize,
    params: &SamplingParams,
    count: &dyn Fn(u32) -> u32,
    position: u64,
    scratch: &mut ChooseScratch,
) -> Option<u32> {
    let logits = &logits[..limit.min(logits.len())];
    if params.is_greedy() {
        return argmax(logits, params, count);
    }
    scratch.keep(logits, params, count)?;
    invert(scratch.kept.iter().copied(), uniform(params.seed, position, Purpose::Choose, 0))
}

/// The final distribution over all `logits.len()` ids: what [`choose`] draws from; one-hot if greedy.
///
/// `pick(&distribution, uniform(seed, position, Purpose::Choose, 0))` is the token that [`choose`] returns.
#[must_use]
pub fn distribution(
    logits: &[f32],
    limit: usize,
    params: &SamplingParams,
    count: &dyn Fn(u32) -> u32,
    scratch: &mut ChooseScratch,
) -> Option<Vec<f64>> {
    let mut out = Vec::new();
    distribution_into(logits, limit, params, count, scratch, &mut out).then_some(out)
}

/// As [`distribution`], into memory that is reused; false, with `out` all zeros, where that returns `None`.
#[must_use]
pub fn distribution_into(
    logits: &[f32],
    limit: usize,
    params: &SamplingParams,
    count: &dyn Fn(u32) -> u32,
    scratch: &mut ChooseScratch,
    out: &mut Vec<f64>,
) -> bool {
    out.clear();
    out.resize(logits.len(), 0.0);
    let logits = &logits[..limit.min(logits.len())];
    if params.is_greedy() {
        let best = argmax(logits, params, count);
        if let Some(p) = best.and_then(|id| out.get_mut(id as usize)) {
            *p = 1.0;
        }
        return best.is_some();
    }
    if scratch.keep(logits, params, count).is_none() {
        return false;
    }
    for &(id, p) in &scratch.kept {
        out[id as usize] = p;
    }
    true
}

/// The id at which the cumulative distribution, summed in ascending order, first exceeds `u`; `None` if all is zero.
///
/// If rounding keeps the sum below `u`, the last id with a probability is taken.
///
/// ```
/// use ninfer_core::sampling::pick;
/// assert_eq!(pick(&[0.25, 0.0, 0.75], 0.2), Some(0));
/// assert_eq!(pick(&[0.25, 0.0, 0.75], 0.25), Some(2));
/// ```
#[must_use]
pub fn pick(distribution: &[f64], u: f64) -> Option<u32> {
    invert((0..).zip(distribution.iter().copied()).filter(|&(_, p)| p > 0.0), u)
}

fn invert(items: impl Iterator<Item = (u32, f64)>, u: f64) -> Option<u32> {
    let mut sum = 0.0;
    let mut last = None;
    for (id, p) in items {
        sum += p;
        if u < sum {
            return Some(id);
        }
        last = Some(id);
    }
    last
}

fn argmax(logits: &[f32], params: &SamplingParams, count: &dyn Fn(u32) -> u32) -> Option<u32> {
    let penalties = params.has_penalties();
    let mut best = f32::NEG_INFINITY;
    let mut id = None;
    let mut finite = false;
    for (v, &x) in (0u32..).zip(logits) {
        if x.is_nan() {
            return None;
        }
        finite |= x.is_finite();
        let x = if penalties { penalise(x, count(v), params) } else { x };
        if x > best {
            best = x;
            id = Some(v);
        }
    }
    id.filter(|_| finite)
}

/// Sort key of a logit that is not NaN: larger logits first, then lower ids; 0 and −0 are equal.
fn key(logit: f32, id: u32) -> u64 {
    let bits = (logit + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | PROMPT_BIT };
    u64::from(!ascending) << 32 | u64::from(id)
}

impl ChooseScratch {
    /// Fills `kept` with the final distribution.
    fn keep(&mut self, logits: &[f32], params: &SamplingParams, count: &dyn Fn(u32) -> u32) -> Option<()> {
        let Self { logits: x, keys, kept } = self;
        let penalties = params.has_penalties();
        let mut best = f32::NEG_INFINITY;
        let mut finite = false;
        x.clear();
        for (v, &logit) in (0u32..).zip(logits) {
            if logit.is_nan() {
                return None;
            }
            finite |= logit.is_finite();
            let logit = if penalties { penalise(logit, count(v), params) } else { logit };
            best = best.max(logit);
            x.push(logit);
        }
        if !finite || best == f32::NEG_INFINITY {
            return None;
        }
        let temperature = f64::from(params.temperature);
        let weight = |logit: f32| {
            if logit == best { 1.0 } else { ((f64::from(logit) - f64::from(best)) / temperature).exp() }
        };

        let mut cut = u64::MAX;
        let k = params.top_k as usize;
        if (1..x.len()).contains(&k) {
            keys.clear();
            keys.extend((0u32..).zip(x.iter()).map(|(v, &logit)| key(logit, v)));
            cut = *keys.select_nth_unstable(k - 1).1;
        }
        let floor = f64::from(params.min_p).max(f64::MIN_POSITIVE);
        kept.clear();
        for (v, &logit) in (0u32..).zip(x.iter()) {
            if key(logit, v) <= cut {
                let w = weight(logit);
                if w >= floor {
                    kept.push((v, w));
                }
            }
        }
        let mut total: f64 = kept.iter().map(|&(_, w)| w).sum();
        if params.top_p < 1.0 {
            keys.clear();
            keys.extend(kept.iter().map(|&(v, _)| key(x[v as usize], v)));
            let cut = shortest_run(keys, f64::from(params.top_p) * total, |v| weight(x[v as usize]));
            kept.retain(|&(v, _)| key(x[v as usize], v) <= cut);
            total = kept.iter().map(|&(_, w)| w).sum();
        }
        for (_, w) in kept.iter_mut() {
            *w /= total;
        }
        Some(())
    }
}

/// Key of the last token of the shortest run, best first, whose weights reach `target`.
///
/// Sorts only as many of the best as are needed, in blocks that grow.
fn shortest_run(keys: &mut [u64], target: f64, weight: impl Fn(u32) -> f64) -> u64 {
    let mut rest = keys;
    let mut block = 256;
    let mut sum = 0.0;
    while !rest.is_empty() {
        if block < rest.len() {
            rest.select_nth_unstable(block - 1);
        }
        let (best, behind) = rest.split_at_mut(block.min(rest.len()));
        best.sort_unstable();
        for &mut key in best {
            sum += weight((key & 0xffff_ffff) as u32);
            if sum >= target {
                return key;
            }
        }
        rest = behind;
        block *= 8;
    }
    u64::MAX
}

#[cfg(test)]
mod tests;
