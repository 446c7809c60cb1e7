//! Text from tokens, one token at a time.

use std::fmt;
use std::sync::Arc;

use super::vocabulary::Vocabulary;

/// Turns token ids into text as they come, never cutting a character in two.
///
/// A character whose bytes are spread over several tokens appears once its last byte is there. Bytes that cannot
/// become a character are replaced by U+FFFD, one for each maximal invalid part, exactly as decoding all ids at once
/// does: all chunks and [`finish`](Self::finish) together equal [`Tokenizer::decode`](super::Tokenizer::decode).
/// At most three bytes are held back, and a token costs time in proportion to its own bytes only.
///
/// ```no_run
/// # use ninfer_models::text::Tokenizer;
/// # let tokenizer = Tokenizer::from_file("checkpoint/tokenizer.json")?;
/// let ids = tokenizer.encode("naïve 漢字")?;
/// let mut decoder = tokenizer.stream_decoder(true);
/// let mut text = String::new();
/// for id in ids {
///     if let Some(chunk) = decoder.push(id) {
///         text.push_str(&chunk);
///     }
/// }
/// text.push_str(decoder.finish());
/// assert_eq!(text, "naïve 漢字");
/// # Ok::<(), ninfer_models::text::TextError>(())
/// ```
#[derive(Clone)]
pub struct StreamDecoder {
    vocabulary: Arc<Vocabulary>,
    skip_special: bool,
    partial: PartialChar,
}

/// The replacement character, U+FFFD.
const REPLACEMENT: &str = "\u{FFFD}";

impl StreamDecoder {
    pub(super) fn new(vocabulary: Arc<Vocabulary>, skip_special: bool) -> Self {
        Self { vocabulary, skip_special, partial: PartialChar::default() }
    }

    /// Adds a token; returns the text that is now complete, if any.
    pub fn push(&mut self, id: u32) -> Option<String> {
        let mut text = String::new();
        self.push_into(id, &mut text);
        (!text.is_empty()).then_some(text)
    }

    /// Adds a token and appends the text that is now complete.
    pub fn push_into(&mut self, id: u32, text: &mut String) {
        self.partial.push(self.vocabulary.text_bytes(id, self.skip_special), text);
    }

    /// True while the first bytes of a character are held back.
    #[must_use]
    pub fn is_mid_character(&self) -> bool {
        self.partial.len > 0
    }

    /// Ends the text: U+FFFD for a character that stayed incomplete, else nothing. The decoder can be used again.
    #[must_use = "the last character of the text may be in here"]
    pub fn finish(&mut self) -> &'static str {
        let incomplete = self.is_mid_character();
        self.partial = PartialChar::default();
        if incomplete { REPLACEMENT } else { "" }
    }
}

impl fmt::Debug for StreamDecoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = self.partial.held();
        f.debug_struct("StreamDecoder").field("skip_special", &self.skip_special).field("held", &held).finish()
    }
}

/// Up to three bytes that begin a character.
#[derive(Clone, Copy, Default)]
struct PartialChar {
    bytes: [u8; 4],
    len: usize,
}

impl PartialChar {
    fn held(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    fn push(&mut self, mut bytes: &[u8], text: &mut String) {
        // First complete or give up the character already begun, byte by byte.
        while self.len > 0 {
            let Some((&byte, rest)) = bytes.split_first() else { return };
            let mut candidate = self.bytes;
            let Some(slot) = candidate.get_mut(self.len) else { return };
            *slot = byte;
            let grown = candidate.get(..=self.len).unwrap_or_default();
            match std::str::from_utf8(grown) {
                Ok(complete) => {
                    text.push_str(complete);
                    self.len = 0;
                    bytes = rest;
                }
                Err(error) if error.error_len().is_none() => {
                    self.bytes = candidate;
                    self.len += 1;
                    bytes = rest;
                }
                // `byte` does not continue the character: what was held is invalid, `byte` starts anew.
                Err(_) => {
                    text.push_str(REPLACEMENT);
                    self.len = 0;
                }
            }
        }
        let mut chunks = bytes.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            let invalid = chunk.invalid();
            if invalid.is_empty() {
                continue;
            }
            let incomplete = std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none());
            if incomplete && chunks.peek().is_none() {
                // The input ends with the first bytes of a character: at most three.
                for (slot, &byte) in self.bytes.iter_mut().zip(invalid) {
                    *slot = byte;
                }
                self.len = invalid.len().min(3);
            } else {
                text.push_str(REPLACEMENT);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn streamed(parts: &[Vec<u8>]) -> String {
        let mut partial = PartialChar::default();
        let mut text = String::new();
        for part in parts {
            partial.push(part, &mut text);
        }
        if partial.len > 0 {
            text.push_str(REPLACEMENT);
        }
        text
    }

    #[test]
    fn a_character_over_four_tokens_appears_once() {
        let mut partial = PartialChar::default();
        let mut text = String::new();
        for byte in "😀".bytes() {
            assert_eq!(text, "");
            partial.push(&[byte], &mut text);
        }
        assert_eq!(text, "😀");
        assert_eq!(partial.len, 0);
    }

    #[test]
    fn invalid_bytes_as_a_whole_decode_has_them() {
        // Over-long forms, surrogates, a cut character before another, lone continuation bytes.
        for bytes in [
            &b"\xC0\xAF"[..],
            b"\xE0\x80\x80",
            b"\xED\xA0\x80x",
            b"\xF0\x9F\x98a",
            b"\xF0\x9F\xE4\xBD\xA0",
            b"\x80\x80",
            b"\xF5\x80",
            b"\xE4\xBD",
            b"\xF4\x90\x80\x80",
        ] {
            let bytewise: Vec<Vec<u8>> = bytes.iter().map(|&byte| vec![byte]).collect();
            let whole = String::from_utf8_lossy(bytes);
            assert_eq!(streamed(&bytewise), whole, "{bytes:x?}");
            assert_eq!(streamed(&[bytes.to_vec()]), whole, "{bytes:x?}");
        }
    }

    proptest! {
        #[test]
        fn any_split_equals_the_whole(parts in prop::collection::vec(
            prop::collection::vec(
                prop_oneof![any::<u8>(), prop::sample::select(&b"\xE4\xBD\xA0\xF0\x9F\x98\x80\xED\xC3\xA9a"[..])],
                0..5,
            ),
            0..12,
        )) {
            let whole = parts.concat();
            prop_assert_eq!(streamed(&parts), String::from_utf8_lossy(&whole));
        }
    }
}
