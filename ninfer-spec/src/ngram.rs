//! Drafts copied from earlier in the same text.

use std::collections::HashMap;

use ninfer_core::model::{DraftBlock, DraftContext, Drafter};

use crate::{Error, Result};

/// Longest n-gram that can be looked up.
pub const MAX_NGRAM: usize = 16;

/// Tokens compared to recognise that a context continues the indexed one.
const RECOGNISED: usize = 64;

/// Prompt lookup: finds the most recent earlier occurrence of the last `n` tokens, for the longest `n` that has one, and
/// proposes what followed there.
///
/// Good for answers that repeat parts of the prompt (code edits, quotations, summaries); it costs almost nothing: each token
/// enters an index once, and a proposal is one look-up for each length. If the copied run reaches the end of the
/// text it goes on with the proposed tokens themselves, so a repetition of any period can be proposed to any length.
///
/// ```
/// use ninfer_core::model::{DraftBlock, DraftContext, Drafter};
/// use ninfer_spec::NgramDrafter;
/// let mut drafter = NgramDrafter::new(2, 4)?;
/// let mut block = DraftBlock::default();
/// let tokens = [5, 6, 7, 8, 9, 1, 6, 7];
/// drafter.propose(DraftContext { tokens: &tokens, model_drafts: &[] }, 3, &mut block);
/// assert_eq!(block.tokens, [8, 9, 1]);
/// # Ok::<(), ninfer_spec::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct NgramDrafter {
    shortest: usize,
    /// For each length from the shortest on: hash of an n-gram to the index behind its latest occurrence.
    latest: Vec<HashMap<u64, usize>>,
    /// Tokens whose n-grams are indexed: `tokens[..indexed]`.
    indexed: usize,
    /// The last of them.
    tail: Vec<u32>,
}

impl NgramDrafter {
    /// Looks up n-grams of `shortest` to `longest` tokens.
    ///
    /// # Errors
    /// [`Error::Option`] unless `1 ≤ shortest ≤ longest ≤ 16`.
    pub fn new(shortest: usize, longest: usize) -> Result<Self> {
        if shortest == 0 || shortest > longest || longest > MAX_NGRAM {
            return Err(Error::Option {
                what: "length of n-grams",
                got: format!("{shortest} to {longest}"),
                legal: format!("1 to {MAX_NGRAM}, the shortest first"),
            });
        }
        let latest = vec![HashMap::new(); longest - shortest + 1];
        Ok(Self { shortest, latest, indexed: 0, tail: Vec::new() })
    }

    /// Indexes every n-gram that has a token behind it.
    fn index(&mut self, tokens: &[u32]) {
        let behind = tokens.len().saturating_sub(1);
        let known = tokens.get(self.indexed.saturating_sub(self.tail.len())..self.indexed);
        if self.indexed > behind || known != Some(&self.tail[..]) {
            self.latest.iter_mut().for_each(HashMap::clear);
            self.indexed = 0;
        }
        for end in self.indexed + 1..=behind {
            for (n, latest) in (self.shortest..).zip(&mut self.latest) {
                if let Some(gram) = end.checked_sub(n).and_then(|start| tokens.get(start..end)) {
                    latest.insert(hash(gram), end);
                }
            }
        }
        self.indexed = behind;
        self.tail.clear();
        self.tail.extend_from_slice(&tokens[behind.saturating_sub(RECOGNISED)..behind]);
    }

    /// Index behind the latest earlier occurrence of the longest possible suffix.
    fn find(&self, tokens: &[u32]) -> Option<usize> {
        self.latest.iter().enumerate().rev().find_map(|(i, latest)| {
            let n = self.shortest + i;
            let gram = &tokens[tokens.len().checked_sub(n)?..];
            let &end = latest.get(&hash(gram))?;
            (tokens.get(end.checked_sub(n)?..end)? == gram).then_some(end)
        })
    }
}

/// FNV-1a over whole tokens.
fn hash(gram: &[u32]) -> u64 {
    gram.iter().fold(0xcbf2_9ce4_8422_2325, |h, &t| (h ^ u64::from(t)).wrapping_mul(0x0000_0100_0000_01b3))
}

impl Drafter for NgramDrafter {
    fn name(&self) -> &'static str {
        "ngram"
    }

    fn propose(&mut self, context: DraftContext<'_>, k: usize, block: &mut DraftBlock) {
        let tokens = context.tokens;
        self.index(tokens);
        let Some(from) = self.find(tokens) else { return };
        // `from` is at most the index of the last token, so the run behind it is never empty.
        let run = &tokens[from..];
        block.tokens.extend(run.iter().copied().cycle().take(k));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn propose(drafter: &mut NgramDrafter, tokens: &[u32], k: usize) -> Vec<u32> {
        let mut block = DraftBlock::default();
        drafter.propose(DraftContext { tokens, model_drafts: &[] }, k, &mut block);
        assert!(block.distributions.is_none());
        block.tokens
    }

    /// The definition: try every length and every place, longest and latest first.
    fn plain(tokens: &[u32], shortest: usize, longest: usize, k: usize) -> Vec<u32> {
        for n in (shortest..=longest).rev() {
            if n >= tokens.len() {
                continue;
            }
            let suffix = &tokens[tokens.len() - n..];
            for end in (n..tokens.len()).rev() {
                if &tokens[end - n..end] == suffix {
                    let mut text = tokens.to_vec();
                    for i in 0..k {
                        text.push(text[end + i]);
                    }
                    return text[tokens.len()..].to_vec();
                }
            }
        }
        Vec::new()
    }

    #[test]
    fn prefers_longer_then_later_matches() {
        let mut drafter = NgramDrafter::new(1, 3).unwrap();
        assert_eq!(propose(&mut drafter, &[1, 2, 3, 9, 3, 8, 1, 2, 3], 2), [9, 3]);
        let mut drafter = NgramDrafter::new(1, 1).unwrap();
        assert_eq!(propose(&mut drafter, &[1, 2, 3, 9, 3, 8, 1, 2, 3], 2), [8, 1]);
    }

    #[test]
    fn repetition_goes_on_past_the_end() {
        let mut drafter = NgramDrafter::new(2, 4).unwrap();
        assert_eq!(propose(&mut drafter, &[7, 7, 7, 7], 5), [7; 5]);
        assert_eq!(propose(&mut drafter, &[1, 2, 3, 1, 2, 3, 1, 2], 7), [3, 1, 2, 3, 1, 2, 3]);
    }

    #[test]
    fn nothing_to_copy() {
        let mut drafter = NgramDrafter::new(2, 4).unwrap();
        for tokens in [&[][..], &[1], &[1, 2], &[1, 2, 3, 4, 5]] {
            assert!(propose(&mut drafter, tokens, 4).is_empty());
        }
    }

    #[test]
    fn another_text_starts_afresh() {
        let mut drafter = NgramDrafter::new(1, 2).unwrap();
        assert_eq!(propose(&mut drafter, &[1, 2, 3, 1], 1), [2]);
        assert_eq!(propose(&mut drafter, &[4, 1, 5, 6, 1, 9, 1], 1), [9]);
        assert_eq!(propose(&mut drafter, &[1, 8, 1], 1), [8]);
        assert_eq!(propose(&mut drafter, &[9, 1, 7, 8, 5, 1], 1), [7]);
    }

    #[test]
    fn lengths_are_checked() {
        for (shortest, longest) in [(0, 3), (4, 3), (1, MAX_NGRAM + 1)] {
            assert!(matches!(NgramDrafter::new(shortest, longest), Err(Error::Option { .. })));
        }
    }

    proptest! {
        #[test]
        fn agrees_with_the_definition(
            tokens in prop::collection::vec(0u32..4, 0..60),
            start in 0usize..60,
            shortest in 1usize..4,
            more in 0usize..4,
            k in 1usize..9,
        ) {
            let mut drafter = NgramDrafter::new(shortest, shortest + more).unwrap();
            for end in start.min(tokens.len())..=tokens.len() {
                let tokens = &tokens[..end];
                prop_assert_eq!(propose(&mut drafter, tokens, k), plain(tokens, shortest, shortest + more, k));
            }
        }
    }
}
