//! From tokens to printable text, with every reason to stop in one place.

use std::collections::VecDeque;

use super::stop_strings::{StopMatcher, StopStrings};
use super::stop_tokens::StopTokens;
use super::stream_decoder::StreamDecoder;
use super::tokenizer::Tokenizer;

/// Why a reply ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// This token ends a reply.
    Token(u32),
    /// The text contains a stop string.
    String {
        /// Position of the stop string in the list.
        index: usize,
        /// The stop string.
        text: String,
    },
}

/// Where and why a reply ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stop {
    /// The reason.
    pub reason: StopReason,
    /// Length of the text to keep, in bytes from the beginning of the reply.
    pub kept_bytes: usize,
    /// Number of tokens, from the beginning of the reply, whose text lies wholly in the text to keep. A stop token is
    /// not among them, nor is a token that holds the first byte of the stop string.
    pub kept_tokens: usize,
}

/// Turns the tokens of one reply into text to print and finds its end.
///
/// Special tokens are left out of the text (unless [`with_special_tokens`](Self::with_special_tokens) asks for them),
/// characters are never cut, stop tokens and stop strings are not printed, and text that could become a stop string
/// is held back until that is decided.
///
/// A generator that gets several tokens at once asks [`license`](Self::license) how many it may commit, commits them
/// (or fewer), and the tokens committed are [`push`](Self::push)ed one by one. Without the question, pushing alone
/// finds the same end, only after the tokens were committed.
///
/// ```no_run
/// # use ninfer_models::text::{StopStrings, Text};
/// # let text = Text::load("checkpoint")?;
/// # let rounds: Vec<Vec<u32>> = Vec::new();
/// let mut stream = text.stream().with_stop_strings(&StopStrings::new(["\nUser:"])?);
/// for tokens in rounds {
///     let committed = stream.license(&tokens);
///     for &token in tokens.iter().take(committed) {
///         if let Some(chunk) = stream.push(token) {
///             print!("{chunk}");
///         }
///     }
///     if committed < tokens.len() {
///         break;
///     }
/// }
/// println!("{}", stream.finish());
/// # Ok::<(), ninfer_models::text::TextError>(())
/// ```
#[derive(Clone, Debug)]
pub struct TextStream {
    stop_tokens: StopTokens,
    stop_strings: StopStrings,
    cursor: Cursor,
    plan: Option<Plan>,
    stopped: Option<Stop>,
    /// Text that is due once the reply ends; set when a license found the end at once.
    tail: String,
    ended: bool,
}

impl TextStream {
    /// A stream for one reply, without stop tokens and stop strings.
    #[must_use]
    pub fn new(tokenizer: &Tokenizer) -> Self {
        let stop_strings = StopStrings::none();
        let cursor = Cursor {
            decoder: tokenizer.stream_decoder(true),
            matcher: stop_strings.matcher(),
            tokens: 0,
            decoded: 0,
            ends: VecDeque::new(),
        };
        Self {
            stop_tokens: StopTokens::default(),
            stop_strings,
            cursor,
            plan: None,
            stopped: None,
            tail: String::new(),
            ended: false,
        }
    }

    /// Sets the tokens that end the reply.
    #[must_use]
    pub fn with_stop_tokens(mut self, stops: StopTokens) -> Self {
        self.stop_tokens = stops;
        self
    }

    /// Sets the strings that end the reply.
    #[must_use]
    pub fn with_stop_strings(mut self, stops: &StopStrings) -> Self {
        self.cursor.matcher = stops.matcher();
        self.stop_strings = stops.clone();
        self
    }

    /// Prints special tokens that do not end the reply as their text.
    #[must_use]
    pub fn with_special_tokens(mut self, tokenizer: &Tokenizer) -> Self {
        self.cursor.decoder = tokenizer.stream_decoder(false);
        self
    }

    /// How many of `tokens`, which would follow those pushed so far, may be committed.
    ///
    /// All of them as long as the reply goes on. When one is a stop token or completes a stop string, only those
    /// before the stop token, or those whose text lies wholly before the stop string: fewer than given, possibly 0.
    /// So a smaller number than asked for means that the reply ends here, and [`stopped`](Self::stopped) says why
    /// once the licensed tokens are pushed.
    #[must_use]
    pub fn license(&mut self, tokens: &[u32]) -> usize {
        if self.ended || self.stopped.is_some() {
            return 0;
        }
        self.plan = None;
        let mut ahead = self.cursor.clone();
        let mut text = String::new();
        let stop = tokens.iter().find_map(|&token| ahead.step(token, &self.stop_tokens, &self.stop_strings, &mut text));
        let Some(stop) = stop else { return tokens.len() };
        let licensed = stop.kept_tokens.saturating_sub(self.cursor.tokens);
        if licensed == 0 {
            self.tail = text;
            self.stopped = Some(stop);
        } else {
            let expected = tokens.iter().copied().take(licensed).collect();
            self.plan = Some(Plan { expected, text, printed: 0, stop });
        }
        licensed
    }

    /// Adds a committed token; returns the text to print, if any. After the end everything is ignored.
    pub fn push(&mut self, token: u32) -> Option<String> {
        if self.ended || self.stopped.is_some() {
            return None;
        }
        let mut text = String::new();
        self.stopped = self.cursor.step(token, &self.stop_tokens, &self.stop_strings, &mut text);
        if let Some(mut plan) = self.plan.take()
            && self.stopped.is_none()
            && plan.expected.pop_front() == Some(token)
        {
            plan.printed += text.len();
            if plan.expected.is_empty() {
                // The rest is the text before the stop string in the token that holds both.
                text.push_str(plan.text.get(plan.printed..).unwrap_or_default());
                self.stopped = Some(plan.stop);
            } else {
                self.plan = Some(plan);
            }
        }
        (!text.is_empty()).then_some(text)
    }

    /// Ends the reply; returns the text still due: what was held back, or what a license found before a stop string.
    #[must_use = "the end of the reply may be in here"]
    pub fn finish(&mut self) -> String {
        let mut text = std::mem::take(&mut self.tail);
        if !self.ended && self.stopped.is_none() {
            self.stopped = self.cursor.flush(&self.stop_strings, &mut text);
        }
        self.plan = None;
        self.ended = true;
        text
    }

    /// Where and why the reply ended, or `None` while it goes on and when it was cut off by the caller.
    #[must_use]
    pub fn stopped(&self) -> Option<&Stop> {
        self.stopped.as_ref()
    }

    /// Number of tokens pushed, less those that do not belong to the kept text once the reply has ended.
    #[must_use]
    pub fn kept_tokens(&self) -> usize {
        self.stopped.as_ref().map_or(self.cursor.tokens, |stop| stop.kept_tokens)
    }
}

/// The end that a license found, to be reached when the licensed tokens are pushed.
#[derive(Clone, Debug)]
struct Plan {
    expected: VecDeque<u32>,
    /// All text from the moment of the license to the end of the reply.
    text: String,
    /// Bytes of it printed by pushes since.
    printed: usize,
    stop: Stop,
}

/// A position in the reply: everything that depends on the tokens so far.
#[derive(Clone, Debug)]
struct Cursor {
    decoder: StreamDecoder,
    matcher: StopMatcher,
    tokens: usize,
    /// Bytes decoded, released or held.
    decoded: usize,
    /// For the last tokens, where each one's text ends, counting a character begun as one byte; tokens whose text is
    /// released are dropped from the front.
    ends: VecDeque<usize>,
}

impl Cursor {
    fn step(&mut self, token: u32, stops: &StopTokens, strings: &StopStrings, text: &mut String) -> Option<Stop> {
        if stops.contains(token) {
            let by_string = self.flush(strings, text);
            let (kept_bytes, kept_tokens) = (self.matcher.released(), self.tokens);
            return by_string.or(Some(Stop { reason: StopReason::Token(token), kept_bytes, kept_tokens }));
        }
        let mut chunk = String::new();
        self.decoder.push_into(token, &mut chunk);
        self.tokens += 1;
        self.decoded += chunk.len();
        self.ends.push_back(self.decoded + usize::from(self.decoder.is_mid_character()));
        self.match_chunk(&chunk, strings, text)
    }

    /// Releases everything held back, as nothing can follow.
    fn flush(&mut self, strings: &StopStrings, text: &mut String) -> Option<Stop> {
        let last = self.decoder.finish();
        self.decoded += last.len();
        let stop = self.match_chunk(last, strings, text);
        text.push_str(&self.matcher.finish());
        stop
    }

    fn match_chunk(&mut self, chunk: &str, strings: &StopStrings, text: &mut String) -> Option<Stop> {
        self.matcher.push_into(chunk, text);
        if let Some(found) = self.matcher.found() {
            let beyond = self.ends.iter().filter(|&&end| end > found.start).count();
            let reason = StopReason::String {
                index: found.index,
                text: strings.get(found.index).unwrap_or_default().to_owned(),
            };
            return Some(Stop { reason, kept_bytes: found.start, kept_tokens: self.tokens - beyond });
        }
        while self.ends.front().is_some_and(|&end| end <= self.matcher.released()) {
            self.ends.pop_front();
        }
        None
    }
}
