//! Strings that end a reply.

use std::sync::Arc;

use super::error::{TextError, TextResult};

/// A list of strings any of which ends a reply; cheap to clone.
///
/// Matching is over the text as printed, so a match may begin and end anywhere inside tokens. The stop string that is
/// complete first wins, and of several complete at the same byte the longest: the result does not depend on how the
/// text was cut into chunks.
#[derive(Clone, Debug)]
pub struct StopStrings {
    patterns: Arc<[Pattern]>,
}

#[derive(Debug)]
struct Pattern {
    text: String,
    /// `fallback[n]`: length of the longest proper prefix of the first n + 1 bytes that is also their suffix.
    fallback: Vec<usize>,
}

impl Pattern {
    fn new(text: String) -> Self {
        let bytes = text.as_bytes();
        let mut fallback = Vec::with_capacity(bytes.len());
        fallback.push(0);
        for &byte in bytes.iter().skip(1) {
            let state = fallback.last().copied().unwrap_or(0);
            fallback.push(advance(bytes, &fallback, state, byte));
        }
        Self { text, fallback }
    }

    /// Length of the pattern's longest prefix that ends with `byte`, when `state` was that length before it.
    fn advance(&self, state: usize, byte: u8) -> usize {
        advance(self.text.as_bytes(), &self.fallback, state, byte)
    }
}

/// One step of the Knuth–Morris–Pratt automaton.
fn advance(pattern: &[u8], fallback: &[usize], mut state: usize, byte: u8) -> usize {
    loop {
        if pattern.get(state) == Some(&byte) {
            return state + 1;
        }
        match state.checked_sub(1).and_then(|last| fallback.get(last)) {
            Some(&shorter) => state = shorter,
            None => return 0,
        }
    }
}

impl StopStrings {
    /// Takes a list of stop strings, which may be empty.
    ///
    /// # Errors
    /// [`TextError::EmptyStopString`] when one of them is the empty string.
    ///
    /// ```
    /// use ninfer_models::text::{StopStrings, TextError};
    ///
    /// assert!(StopStrings::new(["END", "\n\n"]).is_ok());
    /// assert_eq!(StopStrings::new(["END", ""]).unwrap_err(), TextError::EmptyStopString { index: 1 });
    /// ```
    pub fn new<S: Into<String>>(strings: impl IntoIterator<Item = S>) -> TextResult<Self> {
        let compile = |(index, string): (usize, S)| {
            let text: String = string.into();
            if text.is_empty() { Err(TextError::EmptyStopString { index }) } else { Ok(Pattern::new(text)) }
        };
        Ok(Self { patterns: strings.into_iter().enumerate().map(compile).collect::<TextResult<_>>()? })
    }

    /// No stop strings.
    #[must_use]
    pub fn none() -> Self {
        Self { patterns: Arc::default() }
    }

    /// Number of stop strings.
    #[must_use]
    pub fn len(&self) -> usize {
        self.patterns.len()
    }

    /// True without stop strings.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// A stop string by its position in the list.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<&str> {
        self.patterns.get(index).map(|pattern| pattern.text.as_str())
    }

    /// A matcher at the beginning of a text.
    #[must_use]
    pub fn matcher(&self) -> StopMatcher {
        StopMatcher {
            states: vec![0; self.patterns.len()],
            stops: self.clone(),
            held: String::new(),
            released: 0,
            found: None,
        }
    }
}

/// Where a stop string was found in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StopMatch {
    /// Position of the stop string in the list.
    pub index: usize,
    /// Byte at which the match begins: the length of the text to keep.
    pub start: usize,
    /// Byte behind the match.
    pub end: usize,
}

/// Looks for stop strings in a text that comes in chunks.
///
/// Text that may turn out to be the beginning of a stop string is held back, at most the length of the longest one
/// less a byte; everything before is released at once.
///
/// ```
/// use ninfer_models::text::StopStrings;
///
/// let mut matcher = StopStrings::new(["</answer>"])?.matcher();
/// assert_eq!(matcher.push("4 < 5 </an"), "4 < 5 ");
/// assert_eq!(matcher.push("swer> and"), "");
/// let found = matcher.found().unwrap();
/// assert_eq!((found.start, found.end), (6, 15));
/// # Ok::<(), ninfer_models::text::TextError>(())
/// ```
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: StopStrings,
    /// Per stop string, how many of its bytes the text ends with.
    states: Vec<usize>,
    held: String,
    released: usize,
    found: Option<StopMatch>,
}

impl StopMatcher {
    /// Adds text; returns what can be printed. After a match everything is ignored.
    pub fn push(&mut self, chunk: &str) -> String {
        let mut text = String::new();
        self.push_into(chunk, &mut text);
        text
    }

    /// Adds text and appends what can be printed.
    pub fn push_into(&mut self, chunk: &str, text: &mut String) {
        if self.found.is_some() {
            return;
        }
        let seen = self.seen();
        self.held.push_str(chunk);
        self.found = self.scan(chunk, seen);
        let keep = match &self.found {
            Some(found) => found.start,
            // Prefixes of stop strings begin and chunks end with whole characters, so this is between two.
            None => seen + chunk.len() - self.states.iter().copied().max().unwrap_or(0),
        };
        let ready = keep - self.released;
        text.push_str(self.held.get(..ready).unwrap_or_default());
        self.released = keep;
        if self.found.is_some() {
            self.held.clear();
        } else {
            self.held.drain(..ready);
        }
    }

    /// Runs the automata over a chunk that begins at byte `seen` of the text.
    fn scan(&mut self, chunk: &str, seen: usize) -> Option<StopMatch> {
        if self.states.is_empty() {
            return None;
        }
        for (offset, byte) in chunk.bytes().enumerate() {
            let end = seen + offset + 1;
            let mut found: Option<StopMatch> = None;
            for (index, (pattern, state)) in self.stops.patterns.iter().zip(&mut self.states).enumerate() {
                *state = pattern.advance(*state, byte);
                let length = pattern.text.len();
                if *state == length && found.is_none_or(|other| end - length < other.start) {
                    found = Some(StopMatch { index, start: end - length, end });
                }
            }
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// The match, once there is one.
    #[must_use]
    pub fn found(&self) -> Option<&StopMatch> {
        self.found.as_ref()
    }

    /// Bytes of text pushed so far, unless there was a match.
    pub(super) fn seen(&self) -> usize {
        self.released + self.held.len()
    }

    /// Bytes of text released so far.
    #[must_use]
    pub fn released(&self) -> usize {
        self.released
    }

    /// Ends the text: what was held back is no stop string after all.
    #[must_use = "the end of the text may be in here"]
    pub fn finish(&mut self) -> String {
        self.released += self.held.len();
        self.states.fill(0);
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition, without any state: the first end at which any stop string is complete.
    fn find(text: &str, stops: &[&str]) -> Option<(usize, usize)> {
        (1..=text.len()).find_map(|end| {
            let ending = stops.iter().filter(|stop| text.as_bytes()[..end].ends_with(stop.as_bytes()));
            ending.map(|stop| (end - stop.len(), end)).min()
        })
    }

    fn run(chunks: &[&str], stops: &[&str]) -> (String, Option<(usize, usize)>) {
        let mut matcher = StopStrings::new(stops.iter().copied()).unwrap().matcher();
        let mut text = String::new();
        for chunk in chunks {
            matcher.push_into(chunk, &mut text);
            assert_eq!(matcher.released(), text.len());
        }
        text.push_str(&matcher.finish());
        (text, matcher.found().map(|found| (found.start, found.end)))
    }

    #[test]
    fn nothing_is_held_without_need() {
        let mut matcher = StopStrings::new(["aab"]).unwrap().matcher();
        assert_eq!(matcher.push("xa"), "x");
        assert_eq!(matcher.push("a"), "");
        assert_eq!(matcher.push("a"), "a");
        assert_eq!(matcher.push("c"), "aac");
        assert_eq!(matcher.push("aab!"), "");
        assert_eq!(matcher.found(), Some(&StopMatch { index: 0, start: 5, end: 8 }));
        assert_eq!(matcher.push("more"), "");
        assert_eq!(matcher.finish(), "");
        let mut none = StopStrings::none().matcher();
        assert_eq!(none.push("anything"), "anything");
    }

    #[test]
    fn the_first_to_end_wins_then_the_longest() {
        assert_eq!(run(&["abcd"], &["abcd", "bc"]), ("a".to_owned(), Some((1, 3))));
        assert_eq!(run(&["xabc"], &["bc", "abc", "c"]), ("x".to_owned(), Some((1, 4))));
        assert_eq!(run(&["ab", "ab", "ac"], &["abac"]), ("ab".to_owned(), Some((2, 6))));
    }

    #[test]
    fn characters_are_never_cut() {
        // é is C3 A9 and ã is C3 A3: the stop string's first byte alone must hold nothing back.
        let mut matcher = StopStrings::new(["é!"]).unwrap().matcher();
        assert_eq!(matcher.push("ã"), "ã");
        assert_eq!(matcher.push("é"), "");
        assert_eq!(matcher.push("é"), "é");
        assert_eq!(matcher.push("!"), "");
        assert!(matcher.found().is_some());
    }

    proptest! {
        #[test]
        fn any_chunking_gives_the_definition(
            text in "[abé漢]{0,24}",
            stops in prop::collection::vec("[abé漢]{1,4}", 0..4),
            cuts in prop::collection::vec(0_usize..60, 0..8),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|&cut| text.is_char_boundary(cut)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let chunks: Vec<&str> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            let want = find(&text, &stops);
            let (kept, found) = run(&chunks, &stops);
            prop_assert_eq!(found, want);
            prop_assert_eq!(kept, &text[..want.map_or(text.len(), |(start, _)| start)]);
        }
    }
}
