//! Patterns for names: `*` stands for any characters, `?` for one.

/// Whether the whole text fits the pattern.
pub(super) fn matches(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) = (pattern.chars().collect(), text.chars().collect());
    let (mut p, mut t) = (0, 0);
    // Where to go on if a star has to take one more character.
    let mut retry: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some('*') => {
                retry = Some((p + 1, t));
                p += 1;
            }
            Some(&c) if c == '?' || c == text[t] => {
                p += 1;
                t += 1;
            }
            _ => {
                let Some((after_star, taken)) = retry else { return false };
                retry = Some((after_star, taken + 1));
                (p, t) = (after_star, taken + 1);
            }
        }
    }
    pattern[p..].iter().all(|&c| c == '*')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::matches;

    #[test]
    fn stars_and_question_marks() {
        for (pattern, text) in [
            ("attn.q", "attn.q"),
            ("*", ""),
            ("*", "lm_head"),
            ("attn.*", "attn.q.gate"),
            ("*.down_proj", "model.layers.3.mlp.experts.*.down_proj"),
            ("model.layers.?.mlp.*_proj", "model.layers.3.mlp.up_proj"),
            ("*a*b*", "xxaayybzz"),
            ("a*a", "aa"),
        ] {
            assert!(matches(pattern, text), "{pattern} {text}");
        }
        for (pattern, text) in
            [("attn.q", "attn.q.gate"), ("", "a"), ("?", ""), ("model.layers.?.x", "model.layers.33.x"), ("a*a", "a")]
        {
            assert!(!matches(pattern, text), "{pattern} {text}");
        }
    }

    /// The definition, without care for time.
    fn slow(p: &[char], t: &[char]) -> bool {
        match (p.split_first(), t.split_first()) {
            (None, None) => true,
            (Some(('*', rest)), _) => (0..=t.len()).any(|n| slow(rest, &t[n..])),
            (Some((c, p)), Some((d, t))) => (*c == '?' || c == d) && slow(p, t),
            _ => false,
        }
    }

    proptest! {
        #[test]
        fn agrees_with_its_definition(pattern in "[ab*?]{0,7}", text in "[abc]{0,9}") {
            let chars = |s: &str| s.chars().collect::<Vec<_>>();
            prop_assert_eq!(matches(&pattern, &text), slow(&chars(&pattern), &chars(&text)));
        }
    }
}
