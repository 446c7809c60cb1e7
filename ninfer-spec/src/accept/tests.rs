use super::*;

const VOCAB: usize = 6;
const DRAWS: u64 = 200_000;

/// Quantile of the χ² distribution at 0.999 by Wilson and Hilferty (1931): `df (1 − 2/(9 df) + z √(2/(9 df)))³`, z = 3.0902.
/// The tables give 37.70 for 15 and 266.4 for 203 degrees of freedom.
fn quantile(df: f64) -> f64 {
    let spread = 2.0 / (9.0 * df);
    df * (1.0 - spread + 3.0902 * spread.sqrt()).powi(3)
}

#[test]
fn quantile_agrees_with_the_tables() {
    // The approximation is good to 0.5 % from 15 degrees of freedom on.
    assert!((quantile(15.0) / 37.70 - 1.0).abs() < 0.005);
    assert!((quantile(100.0) / 149.45 - 1.0).abs() < 0.005);
}

/// The law of the token behind `last` in a small Markov chain; `sharp` tells target and drafter apart.
fn law(last: u32, sharp: f64) -> Vec<f64> {
    let raw: Vec<f64> = (0..VOCAB).map(|v| 1.0 + sharp * ((last as usize * 5 + v * 3) % 7) as f64).collect();
    let total: f64 = raw.iter().sum();
    raw.iter().map(|w| w / total).collect()
}

/// All laws of target and drafter.
struct Chains {
    target: Vec<Vec<f64>>,
    drafter: Vec<Vec<f64>>,
    proposal: Vec<Vec<f32>>,
    likeliest: Vec<u32>,
}

impl Chains {
    fn new() -> Self {
        let laws = |sharp| (0..VOCAB as u32).map(|last| law(last, sharp)).collect::<Vec<_>>();
        let drafter = laws(0.4);
        let best = |q: &Vec<f64>| (0..VOCAB).max_by(|&a, &b| q[a].total_cmp(&q[b])).unwrap() as u32;
        Self {
            target: laws(1.0),
            proposal: drafter.iter().map(|q| q.iter().map(|&q| q as f32).collect()).collect(),
            likeliest: drafter.iter().map(best).collect(),
            drafter,
        }
    }
}

/// Three tokens behind token 0 with `k` drafts a round.
fn three_tokens(chains: &Chains, rule: &dyn AcceptRule, k: usize, sampled: bool, seed: u64) -> [u32; 3] {
    let mut text = vec![0u32];
    while text.len() < 4 {
        let position = text.len() as u64;
        let (mut drafts, mut proposal) = (Vec::new(), Vec::new());
        let mut last = text[text.len() - 1] as usize;
        let mut target = vec![chains.target[last].clone()];
        for i in 0..k {
            let draft = if sampled {
                pick(&chains.drafter[last], uniform(seed, position + i as u64, Purpose::Draft, 0)).unwrap()
            } else {
                chains.likeliest[last]
            };
            proposal.push(chains.proposal[last].clone());
            last = draft as usize;
            drafts.push(draft);
            target.push(chains.target[last].clone());
        }
        let proposal = sampled.then_some(&proposal[..]);
        let columns = Columns { drafts: &drafts, target: &target, proposal, seed, position };
        let verdict = rule.accept(columns).unwrap();
        text.extend(&drafts[..verdict.accepted]);
        text.push(verdict.token);
    }
    [text[1], text[2], text[3]]
}

fn assert_exact(rule: &dyn AcceptRule, sampled: bool) {
    let chains = Chains::new();
    for k in 1..=5 {
        let mut seen = vec![0u32; VOCAB.pow(3)];
        for seed in 0..DRAWS {
            let [a, b, c] = three_tokens(&chains, rule, k, sampled, seed + k as u64 * DRAWS);
            seen[(a as usize * VOCAB + b as usize) * VOCAB + c as usize] += 1;
        }
        let mut chi = 0.0;
        for (cell, &n) in seen.iter().enumerate() {
            let (a, b, c) = (cell / VOCAB / VOCAB, cell / VOCAB % VOCAB, cell % VOCAB);
            let p = chains.target[0][a] * chains.target[a][b] * chains.target[b][c];
            let expected = p * DRAWS as f64;
            assert!(expected > 5.0, "too few draws for χ²");
            chi += (f64::from(n) - expected).powi(2) / expected;
        }
        let bound = quantile((VOCAB.pow(3) - 1) as f64);
        assert!(chi < bound, "{}, k = {k}: χ² = {chi}, bound {bound}", rule.name());
    }
}

#[test]
fn match_rule_keeps_the_law() {
    assert_exact(&MatchRule, false);
}

#[test]
fn match_rule_keeps_the_law_for_sampled_drafts() {
    assert_exact(&MatchRule, true);
}

#[test]
fn rejection_rule_keeps_the_law() {
    assert_exact(&RejectionRule, true);
}

#[test]
fn rejection_rule_keeps_the_law_for_certain_drafts() {
    assert_exact(&RejectionRule, false);
}

#[test]
fn match_rule_gives_the_text_without_drafts() {
    let chains = Chains::new();
    for seed in 0..2_000 {
        let plain = three_tokens(&chains, &MatchRule, 0, false, seed);
        for k in 1..=5 {
            assert_eq!(three_tokens(&chains, &MatchRule, k, k % 2 == 0, seed), plain);
        }
    }
}

/// The share of accepted first drafts is Σ min(p, q) for the rejection rule and Σ p q for the match rule.
/// Five standard deviations of 200,000 draws are below 0.006.
#[test]
fn acceptance_is_as_the_theory_says() {
    let (p, q) = (law(0, 1.0), law(0, 0.4));
    let theory = |f: fn(f64, f64) -> f64| p.iter().zip(&q).map(|(&p, &q)| f(p, q)).sum::<f64>();
    for (rule, expected) in
        [(&MatchRule as &dyn AcceptRule, theory(|p, q| p * q)), (&RejectionRule, theory(|p, q| p.min(q)))]
    {
        let proposal = [q.iter().map(|&q| q as f32).collect::<Vec<_>>()];
        let mut accepted = 0;
        for seed in 0..DRAWS {
            let drafts = [pick(&q, uniform(seed, 1, Purpose::Draft, 0)).unwrap()];
            let target = [p.clone(), p.clone()];
            let columns = Columns { drafts: &drafts, target: &target, proposal: Some(&proposal), seed, position: 1 };
            accepted += rule.accept(columns).unwrap().accepted;
        }
        let share = accepted as f64 / DRAWS as f64;
        assert!((share - expected).abs() < 0.006, "{}: {share}, theory {expected}", rule.name());
    }
}

#[test]
fn equal_distributions_accept_everything() {
    let p = law(3, 1.0);
    let q = [p.iter().map(|&p| p as f32).collect::<Vec<_>>()];
    for seed in 0..1_000 {
        let drafts = [pick(&p, uniform(seed, 4, Purpose::Draft, 0)).unwrap()];
        let target = [p.clone(), p.clone()];
        let columns = Columns { drafts: &drafts, target: &target, proposal: Some(&q), seed, position: 4 };
        // f32 rounding of q leaves a chance of 6e-8 a draw.
        assert_eq!(RejectionRule.accept(columns).unwrap().accepted, 1);
    }
}

#[test]
fn impossible_drafts_are_rejected() {
    let target = [vec![0.5, 0.5, 0.0], vec![1.0, 0.0, 0.0]];
    let proposal = [vec![1.0f32, 0.0, 0.0]];
    for seed in 0..100 {
        for rule in [&MatchRule as &dyn AcceptRule, &RejectionRule] {
            for draft in [2, 7] {
                let columns = Columns { drafts: &[draft], target: &target, proposal: None, seed, position: 1 };
                assert_eq!(rule.accept(columns).unwrap().accepted, 0);
            }
        }
        let columns = Columns { drafts: &[1], target: &target, proposal: Some(&proposal), seed, position: 1 };
        assert_eq!(RejectionRule.accept(columns).unwrap(), Verdict { accepted: 0, token: 1 });
    }
}

#[test]
fn ill_fitting_columns_are_errors() {
    let p = vec![0.5, 0.5];
    let base = Columns { drafts: &[1], target: &[p.clone(), p.clone()], proposal: None, seed: 0, position: 0 };
    for rule in [&MatchRule as &dyn AcceptRule, &RejectionRule] {
        rule.accept(base).unwrap();
        let short = [p.clone()];
        assert!(matches!(
            rule.accept(Columns { target: &short, ..base }),
            Err(Error::Columns { expected: 2, got: 1, .. })
        ));
        let ragged = [p.clone(), vec![1.0]];
        assert!(matches!(rule.accept(Columns { target: &ragged, ..base }), Err(Error::Columns { .. })));
        assert!(matches!(rule.accept(Columns { proposal: Some(&[]), ..base }), Err(Error::Columns { .. })));
        let narrow = [vec![1.0f32]];
        assert!(matches!(rule.accept(Columns { proposal: Some(&narrow), ..base }), Err(Error::Columns { .. })));
        let empty = [vec![0.0, 0.0], p.clone()];
        assert_eq!(rule.accept(Columns { target: &empty, ..base }), Err(Error::NoChoice { position: 0 }));
    }
}
