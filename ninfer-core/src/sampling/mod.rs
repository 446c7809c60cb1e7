//! How the next token is chosen: parameters, penalties, the final distribution and its random numbers.
//!
//! These functions are the definition; a device kernel follows them. The steps, in this order:
//!
//! 1. penalties ([`penalise`]) on the raw logits, in f32;
//! 2. temperature: weight `w_v = exp((x_v − max x) / T)` in f64;
//! 3. top-k: the `k` largest logits;
//! 4. min-p: tokens with `w_v ≥ min_p` (the largest weight is 1);
//! 5. top-p: the shortest run of tokens, best first, whose weights reach `top_p` of what is left;
//! 6. normalisation, then the inverse of the cumulative distribution in ascending order of ids, with one uniform number.
//!
//! No step caps the number of candidates, and a tie always goes to the lower id. Temperature 0 takes the largest penalised
//! logit instead of steps 2 to 6. A NaN logit, or a row without any finite logit, has no choice (`None`).

mod choose;
mod params;
mod uniform;

pub use choose::{ChooseScratch, choose, distribution, distribution_into, penalise, pick};
pub use params::{PARAM_WORDS, SamplingParams};
pub use uniform::{Purpose, uniform};

/// Bit of a count word that says that the token stands in the prompt; the bits below it count how often it was generated.
pub const PROMPT_BIT: u32 = 1 << 31;

/// How often a token was generated, from its count word.
///
/// ```
/// use ninfer_core::sampling::{PROMPT_BIT, generated};
/// assert_eq!(generated(PROMPT_BIT | 3), 3);
/// ```
#[must_use]
pub const fn generated(count: u32) -> u32 {
    count & !PROMPT_BIT
}
