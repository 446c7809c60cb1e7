//! The shipped model against reference numbers: text, logits, perplexity in every weight format, acceptance of drafts, and
//! that speculation changes no token.

mod drafts;
mod equality;
mod logits;
mod perplexity;
mod quantisation;
mod recipes;
mod reference;
mod requantised;
mod text;
