//! The byte alphabet of byte-level BPE: one printable character for each of the 256 bytes.
//!
//! Bytes that Latin-1 prints as a visible character (`!` to `~`, `¡` to `¬`, `®` to `ÿ`) stand for themselves; the
//! 68 others are mapped, in increasing order, to U+0100, U+0101 and so on. So a space becomes `Ġ` (U+0120) and a
//! line feed `Ċ` (U+010A). This is the alphabet of GPT-2, and every byte-level vocabulary is written in it.

/// First character used for a byte that does not stand for itself.
const SHIFTED: u32 = 0x100;

/// True when the byte is written as the character of the same number.
const fn stands_for_itself(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// The character that stands for `byte` in a byte-level vocabulary.
pub(super) fn char_of(byte: u8) -> char {
    if stands_for_itself(byte) {
        return char::from(byte);
    }
    let rank = (0..byte).filter(|&lower| !stands_for_itself(lower)).count() as u32;
    char::from_u32(SHIFTED + rank).expect("U+0100 to U+0143 are characters")
}

/// Bytes by character, for decoding tokens.
#[derive(Debug)]
pub(super) struct ByteAlphabet {
    shifted: Vec<u8>,
}

impl ByteAlphabet {
    pub(super) fn new() -> Self {
        Self { shifted: (0..=u8::MAX).filter(|&byte| !stands_for_itself(byte)).collect() }
    }

    /// The byte that `c` stands for, or `None` when it is not in the alphabet.
    pub(super) fn byte_of(&self, c: char) -> Option<u8> {
        let code = u32::from(c);
        if let Ok(byte) = u8::try_from(code) {
            return stands_for_itself(byte).then_some(byte);
        }
        self.shifted.get((code - SHIFTED) as usize).copied()
    }

    /// The bytes of a token: through the alphabet when every character is in it, else its UTF-8 as written.
    pub(super) fn token_bytes(&self, token: &str) -> Vec<u8> {
        token.chars().map(|c| self.byte_of(c)).collect::<Option<Vec<u8>>>().unwrap_or_else(|| token.as_bytes().to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character() {
        let alphabet = ByteAlphabet::new();
        assert_eq!(alphabet.shifted.len(), 68);
        for byte in 0..=u8::MAX {
            assert_eq!(alphabet.byte_of(char_of(byte)), Some(byte));
        }
    }

    #[test]
    fn well_known_characters() {
        assert_eq!(char_of(b' '), 'Ġ');
        assert_eq!(char_of(b'\n'), 'Ċ');
        assert_eq!(char_of(b'\t'), 'ĉ');
        assert_eq!(char_of(b'a'), 'a');
        assert_eq!(char_of(0xAD), '\u{143}');
    }

    #[test]
    fn characters_outside_are_refused() {
        let alphabet = ByteAlphabet::new();
        for c in ['\0', ' ', '\u{7f}', '\u{a0}', '\u{ad}', '\u{144}', '中'] {
            assert_eq!(alphabet.byte_of(c), None, "{c:?}");
        }
        assert_eq!(alphabet.token_bytes("中Ġ"), "中Ġ".as_bytes());
        assert_eq!(alphabet.token_bytes("Ġa"), b" a");
    }
}
