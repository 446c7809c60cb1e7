//! The text of an answer while it is made.

use ninfer_models::text::{Stop, StopReason, StopStrings, Text, TextStream};

use crate::{Failure, Result, output};

/// Licenses tokens as far as no stop string ends the answer, and prints or collects their text.
///
/// Special tokens are written out, but for the stop token that ends the answer.
#[derive(Debug)]
pub struct Reply {
    stream: TextStream,
    stop_tokens: Vec<u32>,
    printed: bool,
    text: String,
    failure: Option<Failure>,
}

impl Reply {
    /// An empty answer. `stop_tokens` are those that the generator stops at; the text is printed if `printed` is set.
    #[must_use]
    pub fn new(text: &Text, stop_strings: &StopStrings, stop_tokens: &[u32], printed: bool) -> Self {
        let tokenizer = text.tokenizer();
        Self {
            stream: TextStream::new(tokenizer).with_special_tokens(tokenizer).with_stop_strings(stop_strings),
            stop_tokens: stop_tokens.to_vec(),
            printed,
            text: String::new(),
            failure: None,
        }
    }

    /// How many of the offered tokens may be committed; their text is passed on. To be used as the license of
    /// [`ninfer_spec::Generator::generate`].
    pub fn license(&mut self, tokens: &[u32]) -> usize {
        if self.failure.is_some() {
            return 0;
        }
        // The generator cuts an offer behind a stop token, so it can only be the last one.
        let stops = tokens.last().is_some_and(|token| self.stop_tokens.contains(token));
        let visible = &tokens[..tokens.len() - usize::from(stops)];
        let licensed = self.stream.license(visible);
        let mut chunk = String::new();
        for &token in visible.iter().take(licensed) {
            chunk.extend(self.stream.push(token));
        }
        self.pass_on(&chunk);
        if licensed < visible.len() { licensed } else { tokens.len() }
    }

    fn pass_on(&mut self, chunk: &str) {
        if chunk.is_empty() {
            return;
        }
        self.text.push_str(chunk);
        if self.printed {
            self.failure = output::write(chunk).err();
        }
    }

    /// Ends the answer.
    ///
    /// # Errors
    /// [`Failure::Output`] if the text could not be written.
    pub fn finish(mut self) -> Result<Finished> {
        let rest = self.stream.finish();
        if self.failure.is_none() {
            self.pass_on(&rest);
        }
        if self.printed && self.failure.is_none() {
            self.failure = output::write("\n").err();
        }
        if let Some(failure) = self.failure {
            return Err(failure);
        }
        let (stop_string, kept_tokens) = match self.stream.stopped() {
            Some(Stop { reason: StopReason::String { text, .. }, kept_tokens, .. }) => {
                (Some(text.clone()), Some(*kept_tokens))
            }
            _ => (None, None),
        };
        Ok(Finished { text: self.text, stop_string, kept_tokens })
    }
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    /// Its text, without the stop token or stop string that ended it.
    pub text: String,
    /// The stop string that ended it.
    pub stop_string: Option<String>,
    /// With a stop string: the tokens whose text lies wholly before it. More may have been generated, in several rounds,
    /// before the stop string was complete.
    pub kept_tokens: Option<usize>,
}
