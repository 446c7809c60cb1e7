//! Speculation changes no token.

use ninfer_core::sampling::SamplingParams;
use ninfer_examples::speculation::{DraftTokens, Method, SpeculationArguments};
use ninfer_spec::{Answer, Options};

use crate::reference::{GOLDEN, Prompt, TEXT, answer};

fn run(prompt: &Prompt, sampling: SamplingParams, spec: Method, draft_tokens: Option<DraftTokens>) -> Answer {
    let speculation = SpeculationArguments { spec: Some(spec), draft_tokens }.settle(true).unwrap();
    let options = Options::new().with_max_new(64).with_stop(TEXT.stop_tokens().ids()).with_sampling(sampling);
    answer(&prompt.ids, speculation.most, speculation.apply(options).unwrap())
}

/// Compares an answer with the plain one; returns the drafts that were verified.
fn compare(prompt: &Prompt, plain: &Answer, other: &Answer, how: &str) -> u64 {
    assert_eq!(other.tokens, plain.tokens, "{} {how}", prompt.name);
    assert_eq!(other.finish, plain.finish, "{} {how}", prompt.name);
    other.statistics.drafted
}

#[test]
fn greedy_text_is_that_of_plain_decoding() {
    let mut verified = [0; 8];
    for prompt in &GOLDEN.prompts {
        let greedy = SamplingParams::greedy();
        let plain = run(prompt, greedy, Method::Off, None);
        assert_eq!(plain.statistics.drafted, 0);
        for k in 1..=5 {
            let other = run(prompt, greedy, Method::Mtp, Some(DraftTokens::Count(k)));
            verified[k - 1] += compare(prompt, &plain, &other, &format!("mtp {k}"));
        }
        for (i, k) in [(5, DraftTokens::Count(4)), (6, DraftTokens::Count(15)), (7, DraftTokens::Auto)] {
            let other = run(prompt, greedy, Method::Ngram, Some(k));
            verified[i] += compare(prompt, &plain, &other, &format!("ngram {k:?}"));
        }
        let other = run(prompt, greedy, Method::Mtp, Some(DraftTokens::Auto));
        compare(prompt, &plain, &other, "mtp auto");
    }
    // Every method did verify drafts; how many `auto` tries depends on the clock.
    assert!(verified[..7].iter().all(|&drafts| drafts > 0), "{verified:?}");
}

#[test]
fn sampled_text_is_that_of_plain_decoding() {
    let warm = SamplingParams::greedy().with_temperature(0.7).with_top_p(0.8).with_top_k(20);
    let hot = SamplingParams::greedy().with_temperature(1.3).with_min_p(0.02);
    let penalised = warm.with_presence(0.6).with_frequency(0.2).with_repetition(1.1);
    let mut texts = Vec::new();
    for (i, prompt) in GOLDEN.prompts.iter().enumerate() {
        let mut sampling = [warm, hot, penalised][i % 3];
        for seed in 0..2 {
            sampling = sampling.with_seed(1000 * seed + i as u64);
            let plain = run(prompt, sampling, Method::Off, None);
            for k in 1..=5 {
                let other = run(prompt, sampling, Method::Mtp, Some(DraftTokens::Count(k)));
                compare(prompt, &plain, &other, &format!("mtp {k}, seed {}", sampling.seed));
            }
            let other = run(prompt, sampling, Method::Ngram, Some(DraftTokens::Count(6)));
            compare(prompt, &plain, &other, &format!("ngram, seed {}", sampling.seed));
            texts.push(plain.tokens);
        }
    }
    let count = texts.len();
    texts.sort_unstable();
    texts.dedup();
    assert!(texts.len() > count * 3 / 4, "seeds change the text: {} of {count} differ", texts.len());
}
