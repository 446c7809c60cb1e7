//! Host rules with a drafter that samples: the law of the text is the target's.

use ninfer_core::model::{DraftBlock, DraftContext, Drafter};
use ninfer_core::sampling::{ChooseScratch, Purpose, SamplingParams, distribution, pick, uniform};
use ninfer_spec::{AcceptRule, Counts, Drafts, Generator, MatchRule, Options, RejectionRule, Verdict};

use crate::toy::{self, TOKENS, ToyModel, VOCAB};

const PROMPT: [u32; 3] = [4, 9, 4];

/// Samples from a flattened version of the target's raw law.
struct Sampler {
    seed: u64,
}

impl Drafter for Sampler {
    fn name(&self) -> &'static str {
        "sampler"
    }

    fn propose(&mut self, context: DraftContext<'_>, k: usize, block: &mut DraftBlock) {
        let params = SamplingParams::greedy().with_temperature(2.5);
        let mut text = context.tokens.to_vec();
        let mut laws = Vec::new();
        for _ in 0..k {
            let law = distribution(&toy::logits(&text), TOKENS, &params, &|_| 0, &mut ChooseScratch::new()).unwrap();
            let draft = pick(&law, uniform(self.seed, text.len() as u64, Purpose::Draft, 0)).unwrap();
            laws.push(law.iter().map(|&q| q as f32).collect());
            block.tokens.push(draft);
            text.push(draft);
        }
        block.distributions = Some(laws);
    }
}

/// The match rule, but computed on the host.
#[derive(Debug)]
struct HostMatch;

impl AcceptRule for HostMatch {
    fn name(&self) -> &'static str {
        "host match"
    }

    fn accept(&self, columns: ninfer_spec::Columns<'_>) -> ninfer_spec::Result<Verdict> {
        MatchRule.accept(columns)
    }
}

fn sampling(seed: u64) -> SamplingParams {
    let warm = SamplingParams::greedy().with_temperature(1.1).with_top_k(8);
    warm.with_repetition(1.4).with_presence(0.5).with_frequency(0.3).with_seed(seed)
}

fn tokens(rule: impl AcceptRule + 'static, k: usize, seed: u64, n: usize) -> Vec<u32> {
    let options = Options::new().with_max_new(n).with_sampling(sampling(seed)).with_drafts(Drafts::Fixed(k));
    let options = options.with_drafter(Sampler { seed: seed ^ 0x5555 }).with_rule(rule);
    let mut model = ToyModel::new();
    Generator::new(&mut model, options).unwrap().generate(&PROMPT, |t| t.len()).unwrap().tokens
}

/// The rule on the host sees the same distributions as the model, penalties included.
#[test]
fn host_and_model_agree() {
    for seed in 0..60 {
        let plain = tokens(MatchRule, 0, seed, 40);
        for k in 1..=4 {
            assert_eq!(tokens(MatchRule, k, seed, 40), plain, "seed {seed}, k {k}");
            assert_eq!(tokens(HostMatch, k, seed, 40), plain, "seed {seed}, k {k}");
        }
    }
}

/// The first three tokens over 20,000 seeds against their joint law, cells below five expected draws taken together. The
/// bound is the 0.999 quantile by Wilson and Hilferty's approximation.
#[test]
fn rejection_keeps_the_law_with_penalties() {
    let draws = 20_000;
    let mut seen = vec![0u32; VOCAB.pow(3)];
    for seed in 0..draws {
        let t = tokens(RejectionRule, 1 + seed as usize % 3, seed, 3);
        seen[(t[0] as usize * VOCAB + t[1] as usize) * VOCAB + t[2] as usize] += 1;
    }
    let law = |text: &[u32]| {
        let mut counts = Counts::new();
        counts.add_prompt(&PROMPT);
        counts.add_generated(&text[PROMPT.len()..]);
        let logits = toy::logits(text);
        distribution(&logits, TOKENS, &sampling(0), &|id| counts.word(id), &mut ChooseScratch::new()).unwrap()
    };
    let (mut chi, mut cells, mut rest) = (0.0, -1.0, (0.0, 0.0));
    let first = law(&PROMPT);
    for a in 0..VOCAB {
        let mut text = PROMPT.to_vec();
        text.push(a as u32);
        let second = law(&text);
        for b in 0..VOCAB {
            text.push(b as u32);
            for (c, p) in law(&text).iter().enumerate() {
                let expected = draws as f64 * first[a] * second[b] * p;
                let n = f64::from(seen[(a * VOCAB + b) * VOCAB + c]);
                if expected >= 5.0 {
                    chi += (n - expected).powi(2) / expected;
                    cells += 1.0;
                } else {
                    rest = (rest.0 + n, rest.1 + expected);
                }
            }
            text.pop();
        }
    }
    chi += (rest.0 - rest.1).powi(2) / rest.1;
    cells += 1.0;
    let spread = 2.0 / (9.0 * cells);
    let bound = cells * (1.0 - spread + 3.0902 * f64::sqrt(spread)).powi(3);
    assert!(chi < bound, "χ² = {chi} with {cells} degrees of freedom, bound {bound}");
}
