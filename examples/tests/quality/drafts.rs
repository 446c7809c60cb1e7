//! Acceptance of MTP drafts, round by round.

use std::collections::HashMap;

use ninfer_spec::{Drafts, Generator, Options, Statistics};
use serde::Deserialize;

use crate::reference::{fixture, session};

const NEW_TOKENS: usize = 96;

/// A draft whose two best logits are less than this apart may be the other one in another f32 engine.
const UNCERTAIN: f64 = 1e-3;
/// Runs (a prompt with a number of drafts) that may differ for that reason, out of 24.
const UNCERTAIN_RUNS: usize = 2;
/// On tokens per round and on the acceptance of each position, over all prompts.
const TOLERANCE: f64 = 0.02;

#[derive(Deserialize)]
struct Reference {
    total: HashMap<String, Total>,
    prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
struct Total {
    all_96_tokens: Summary,
}

#[derive(Deserialize)]
struct Summary {
    rounds: u64,
    acceptance_at_position: Vec<f64>,
    tokens_per_round: f64,
}

#[derive(Deserialize)]
struct Prompt {
    name: String,
    prompt_ids: Vec<u32>,
    new_ids: Vec<u32>,
    k: HashMap<String, Run>,
}

#[derive(Deserialize)]
struct Run {
    accepted_per_round: Vec<usize>,
    smallest_draft_margin: f64,
}

/// Tokens and accepted drafts of each round, up to the round that reaches 96 tokens, which counts in full.
fn run(prompt: &[u32], k: usize, statistics: &mut Statistics) -> (Vec<u32>, Vec<usize>) {
    let mut session = session(k);
    // More tokens are allowed than are taken, so that no round is cut short.
    let options =
        Options::new().with_max_new(2 * NEW_TOKENS).with_ignore_stop(true).with_drafts(Drafts::Fixed(k)).with_mtp();
    let mut generator = Generator::new(&mut session, options).unwrap();
    let mut running = generator.start(prompt).unwrap();
    let mut accepted = Vec::new();
    while running.request().answer().len() < NEW_TOKENS {
        let is_first = running.request().answer().is_empty();
        let step = running.step(|tokens| tokens.len()).unwrap();
        if !is_first {
            assert_eq!(step.drafted, k);
            accepted.push(step.accepted);
        }
    }
    let (answer, _) = running.into_parts();
    let mut own = answer.statistics;
    // A short loop is no fault here: stop tokens are ignored.
    own.looping = false;
    statistics.merge(&own).unwrap();
    (answer.tokens[..NEW_TOKENS].to_vec(), accepted)
}

fn check(k: usize) {
    let reference: Reference = fixture("mtp.json");
    let mut statistics = Statistics::new();
    let mut different = Vec::new();
    for prompt in &reference.prompts {
        let expected = &prompt.k[&k.to_string()];
        let (tokens, accepted) = run(&prompt.prompt_ids, k, &mut statistics);
        assert_eq!(tokens, prompt.new_ids, "{}", prompt.name);
        if accepted != expected.accepted_per_round {
            let (name, margin) = (&prompt.name, expected.smallest_draft_margin);
            let rounds = &expected.accepted_per_round;
            assert!(margin < UNCERTAIN, "{name}: {accepted:?}, expected {rounds:?} with margins of {margin:e} or more");
            different.push(name.clone());
        }
    }
    println!("{k} drafts: {} of {} runs differ: {different:?}", different.len(), reference.prompts.len());
    assert!(different.len() <= UNCERTAIN_RUNS, "{different:?}");

    let expected = &reference.total[&k.to_string()].all_96_tokens;
    assert!(statistics.rounds.abs_diff(expected.rounds) <= UNCERTAIN_RUNS as u64, "{}", statistics.rounds);
    assert!((statistics.tokens_per_round() - expected.tokens_per_round).abs() <= TOLERANCE);
    assert_eq!(expected.acceptance_at_position.len(), k);
    for (i, expected) in expected.acceptance_at_position.iter().enumerate() {
        let got = statistics.acceptance_at(i);
        assert!((got - expected).abs() <= TOLERANCE, "draft {}: {got}, expected {expected}", i + 1);
    }
}

#[test]
fn one_draft_a_round() {
    check(1);
}

#[test]
fn two_drafts_a_round() {
    check(2);
}

#[test]
fn three_drafts_a_round() {
    check(3);
}
