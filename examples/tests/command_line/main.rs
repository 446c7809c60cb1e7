//! The programs as a user runs them: output, errors, exit status.

mod generate;
mod hostile;
mod inspect;
mod perplexity;
mod program;
mod quantize;
