//! The bytes of every token, by id, and which tokens are special.

/// What each id stands for: a flat byte table, so that decoding a token is one slice look-up.
#[derive(Debug, Default)]
pub(super) struct Vocabulary {
    bytes: Vec<u8>,
    /// `starts[id]..starts[id + 1]` is the token's range in `bytes`.
    starts: Vec<u32>,
    kinds: Vec<Kind>,
}

/// What an id is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// No token has this id.
    Unassigned,
    /// A token of the BPE vocabulary, or an added token that is ordinary text.
    Ordinary,
    /// An added token marked special: left out of the text when special tokens are skipped.
    Special,
}

impl Vocabulary {
    /// Builds the table from one entry an id. The caller has bounded the total size below 4 GiB.
    pub(super) fn new(entries: Vec<Option<(Vec<u8>, bool)>>) -> Self {
        let mut table = Self {
            bytes: Vec::new(),
            starts: Vec::with_capacity(entries.len() + 1),
            kinds: Vec::with_capacity(entries.len()),
        };
        table.starts.push(0);
        for entry in entries {
            table.kinds.push(match &entry {
                None => Kind::Unassigned,
                Some((_, true)) => Kind::Special,
                Some((_, false)) => Kind::Ordinary,
            });
            if let Some((bytes, _)) = entry {
                table.bytes.extend_from_slice(&bytes);
            }
            table.starts.push(table.bytes.len() as u32);
        }
        table
    }

    /// One more than the highest id with a token.
    pub(super) fn len(&self) -> usize {
        self.kinds.len()
    }

    pub(super) fn kind(&self, id: u32) -> Kind {
        self.kinds.get(id as usize).copied().unwrap_or(Kind::Unassigned)
    }

    /// The token's bytes; empty for an id without a token.
    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        match (self.starts.get(id), self.starts.get(id.saturating_add(1))) {
            (Some(&start), Some(&end)) => self.bytes.get(start as usize..end as usize).unwrap_or_default(),
            _ => &[],
        }
    }

    /// The bytes that decoding `id` adds to the text.
    pub(super) fn text_bytes(&self, id: u32, skip_special: bool) -> &[u8] {
        if skip_special && self.kind(id) == Kind::Special { &[] } else { self.bytes(id) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_and_ids_above_the_table_are_unassigned() {
        let table = Vocabulary::new(vec![Some((b"ab".to_vec(), false)), None, Some((b"<s>".to_vec(), true))]);
        assert_eq!(table.len(), 3);
        assert_eq!((table.kind(0), table.kind(1), table.kind(2)), (Kind::Ordinary, Kind::Unassigned, Kind::Special));
        assert_eq!((table.bytes(0), table.bytes(1), table.bytes(2)), (&b"ab"[..], &b""[..], &b"<s>"[..]));
        for id in [3, 4, u32::MAX] {
            assert_eq!((table.kind(id), table.bytes(id)), (Kind::Unassigned, &b""[..]));
        }
        assert_eq!(table.text_bytes(2, true), b"");
        assert_eq!(table.text_bytes(2, false), b"<s>");
        assert_eq!(table.text_bytes(0, true), b"ab");
    }
}
