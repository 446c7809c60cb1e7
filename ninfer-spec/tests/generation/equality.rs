//! Speculation must not change a text.

use ninfer_core::sampling::SamplingParams;
use ninfer_spec::{Answer, Cancel, Drafts, FinishReason, Generator, NgramDrafter, Options};

use crate::toy::ToyModel;

const PROMPT: [u32; 9] = [1, 2, 3, 4, 5, 1, 2, 3, 4];

fn answer(model: &mut ToyModel, options: Options) -> Answer {
    let clock = model.clock.clone();
    let mut generator = Generator::new(model, options).unwrap().with_clock(clock);
    let mut streamed = Vec::new();
    let answer = generator.generate(&PROMPT, |tokens| {
        streamed.extend_from_slice(tokens);
        tokens.len()
    });
    let answer = answer.unwrap();
    assert_eq!(streamed, answer.tokens, "what was licensed is what was committed");
    answer
}

/// Ways to draft: automatic and fixed numbers, by MTP and by n-grams.
const DRAFTINGS: usize = 13;

fn drafting(i: usize) -> Options {
    let ngram = NgramDrafter::new(1, 3).unwrap();
    match i {
        0 => Options::new().with_drafts(Drafts::Auto { max: 6 }),
        1 => Options::new().with_drafts(Drafts::Auto { max: 99 }).with_ngram(ngram),
        2..=6 => Options::new().with_drafts(Drafts::Fixed(i - 1)).with_mtp(),
        7..=11 => Options::new().with_drafts(Drafts::Fixed(i - 6)).with_ngram(ngram),
        _ => Options::new().with_drafts(Drafts::Fixed(15)),
    }
}

fn settings() -> Vec<SamplingParams> {
    let warm = SamplingParams::greedy().with_temperature(0.8);
    vec![
        SamplingParams::greedy(),
        SamplingParams::greedy().with_repetition(1.3).with_frequency(0.2).with_presence(0.1),
        warm,
        warm.with_top_k(4).with_top_p(0.9),
        warm.with_min_p(0.05).with_frequency(0.5).with_presence(0.5).with_repetition(1.2),
    ]
}

#[test]
fn any_drafting_gives_the_plain_text() {
    for sampling in settings() {
        for seed in 0..12 {
            let sampling = sampling.with_seed(seed);
            let plain = answer(&mut ToyModel::new(), Options::new().with_max_new(90).with_sampling(sampling));
            assert_eq!((plain.tokens.len(), plain.finish), (90, FinishReason::Length));
            for (i, accuracy) in (0..DRAFTINGS).flat_map(|i| [0.0, 0.7, 1.0].map(|accuracy| (i, accuracy))) {
                let mut model = ToyModel::new();
                model.accuracy = accuracy;
                let other = answer(&mut model, drafting(i).with_max_new(90).with_sampling(sampling));
                assert_eq!(other.tokens, plain.tokens, "drafting {i}, accuracy {accuracy}, {sampling:?}");
                assert_eq!(other.finish, plain.finish);
                assert_eq!(model.open_lanes(), 0);
            }
        }
    }
}

#[test]
fn seeds_matter() {
    let text = |seed| {
        let sampling = SamplingParams::greedy().with_temperature(1.0).with_seed(seed);
        answer(&mut ToyModel::new(), Options::new().with_max_new(30).with_sampling(sampling)).tokens
    };
    assert_eq!(text(1), text(1));
    assert_ne!(text(1), text(2));
}

/// Perfect drafts are all accepted, wrong ones never.
#[test]
fn acceptance_is_what_the_drafts_deserve() {
    for (accuracy, per_round) in [(1.0, 4.0), (0.0, 1.0)] {
        let mut model = ToyModel::new();
        model.accuracy = accuracy;
        let s = answer(&mut model, Options::new().with_max_new(81).with_drafts(Drafts::Fixed(3))).statistics;
        assert_eq!(s.tokens_per_round(), per_round);
        assert_eq!(s.decode_tokens, 80);
        assert_eq!(s.rounds as f64, 80.0 / per_round);
        assert_eq!(s.prefill_tokens, 9);
        assert_eq!(s.drafter, "mtp");
        assert_eq!(s.is_suspicious(), accuracy == 1.0 && s.drafted >= 64);
        let columns = s.drafted as f64 * 0.001 + s.rounds as f64 * 0.01;
        assert!(s.decode_seconds >= columns - 1e-6, "{} {columns}", s.decode_seconds);
    }
}

/// A license may return anything up to what it is given; going on afterwards emits the same tokens again.
#[test]
fn every_license_is_exact() {
    let sampling = SamplingParams::greedy().with_temperature(0.9).with_presence(0.4).with_seed(5);
    let plain = answer(&mut ToyModel::new(), Options::new().with_max_new(60).with_sampling(sampling));
    for i in 0..DRAFTINGS {
        for salt in 0..8u64 {
            let options = drafting(i).with_max_new(60).with_sampling(sampling);
            let mut model = ToyModel::new();
            let clock = model.clock.clone();
            let mut generator = Generator::new(&mut model, options).unwrap().with_clock(clock);
            let mut running = generator.start(&PROMPT).unwrap();
            let (mut calls, mut seen) = (salt, std::collections::BTreeSet::new());
            while running.request().finish().is_none() {
                let before = running.request().answer().len();
                let step = running
                    .step(|tokens| {
                        calls = calls.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        let n = (calls >> 33) as usize % (tokens.len() + 1);
                        assert!(plain.tokens[before..].starts_with(tokens));
                        seen.insert((tokens.len(), n));
                        n
                    })
                    .unwrap();
                assert_eq!(running.request().answer().len(), before + step.tokens.len());
            }
            assert!(seen.contains(&(1, 0)) && seen.contains(&(1, 1)));
            let (again, sequence) = running.into_parts();
            assert_eq!(again.tokens, plain.tokens);
            // The lane holds everything but the last token.
            let tokens = sequence.tokens();
            assert_eq!(sequence.lane().get().tokens(), tokens[..tokens.len() - 1]);
        }
    }
}

/// Drafts made behind tokens that were not committed are not used: perfect drafts stay perfect.
#[test]
fn drafts_of_an_uncommitted_end_are_dropped() {
    let mut model = ToyModel::new();
    model.accuracy = 1.0;
    let options = Options::new().with_max_new(60).with_drafts(Drafts::Fixed(3));
    let mut generator = Generator::new(&mut model, options).unwrap();
    let mut running = generator.start(&PROMPT).unwrap();
    let mut drafted = Vec::new();
    while running.request().finish().is_none() {
        let step = running.step(|t| t.len().min(3)).unwrap();
        assert_eq!(step.accepted, step.drafted);
        drafted.push(step.drafted);
    }
    // The first token, then rounds of three drafts and rounds after a cut, which have none.
    assert_eq!(drafted[..6], [0, 3, 0, 3, 0, 3]);
}

#[test]
fn a_smaller_license_ends_the_answer_exactly() {
    let plain = answer(&mut ToyModel::new(), Options::new().with_max_new(40)).tokens;
    for end in 0..30 {
        let mut model = ToyModel::new();
        model.accuracy = 0.9;
        let options = Options::new().with_max_new(40).with_drafts(Drafts::Fixed(4));
        let mut left = end;
        let mut license = |tokens: &[u32]| {
            let n = tokens.len().min(left);
            left -= n;
            n
        };
        let mut generator = Generator::new(&mut model, options).unwrap();
        let (answer, sequence) = generator.start(&PROMPT).unwrap().run(&mut license).unwrap();
        assert_eq!(answer.tokens, plain[..end]);
        assert_eq!(answer.finish, FinishReason::License);
        let held = (PROMPT.len() + end).saturating_sub(1).max(PROMPT.len());
        assert_eq!(sequence.lane().position(), held);
    }
}

/// Answering, appending and answering again gives what one lane with the same inputs gives.
#[test]
fn sequences_go_on() {
    let sampling = SamplingParams::greedy().with_temperature(0.7).with_frequency(0.3).with_seed(2);
    let run = |drafts| {
        let mut model = ToyModel::new();
        let options = Options::new().with_max_new(20).with_sampling(sampling).with_capacity(256).with_drafts(drafts);
        let mut generator = Generator::new(&mut model, options).unwrap();
        let (first, sequence) = generator.start(&PROMPT).unwrap().run(|t| t.len()).unwrap();
        let (second, sequence) = generator.resume(sequence, &[7, 8, 9]).unwrap().run(|t| t.len()).unwrap();
        assert_eq!(second.statistics.prefill_tokens, 4, "the last token of the answer and three new ones");
        let tokens = sequence.tokens().to_vec();
        assert_eq!(tokens.len(), 9 + 20 + 3 + 20);
        assert_eq!(tokens[9..29], first.tokens);
        assert_eq!(tokens[32..], second.tokens);
        tokens
    };
    let plain = run(Drafts::Off);
    assert_eq!(run(Drafts::Fixed(3)), plain);
    assert_eq!(run(Drafts::Auto { max: 5 }), plain);
}

/// A sequence can be continued by another generator, with that one's sampling.
#[test]
fn sequences_take_the_sampling_of_their_generator() {
    let second = |sampling| {
        let mut model = ToyModel::new();
        let options = Options::new().with_max_new(10).with_capacity(128);
        let mut generator = Generator::new(&mut model, options).unwrap();
        let (_, sequence) = generator.start(&PROMPT).unwrap().run(|t| t.len()).unwrap();
        drop(generator);
        let options = Options::new().with_max_new(30).with_sampling(sampling);
        let mut generator = Generator::new(&mut model, options).unwrap();
        generator.resume(sequence, &[2]).unwrap().run(|t| t.len()).unwrap().0.tokens
    };
    let warm = SamplingParams::greedy().with_temperature(1.0);
    assert_eq!(second(warm), second(warm));
    assert_ne!(second(warm), second(warm.with_seed(1)));
    assert_ne!(second(warm), second(SamplingParams::greedy()));
}

#[test]
fn cancelled_answers_are_prefixes() {
    let plain = answer(&mut ToyModel::new(), Options::new().with_max_new(60)).tokens;
    let mut model = ToyModel::new();
    let cancel = Cancel::new();
    let options = Options::new().with_max_new(60).with_drafts(Drafts::Fixed(2));
    let mut generator = Generator::new(&mut model, options).unwrap().with_cancel(&cancel);
    let answer = generator
        .generate(&PROMPT, |tokens| {
            cancel.cancel();
            tokens.len()
        })
        .unwrap();
    assert_eq!(answer.finish, FinishReason::Cancelled);
    assert_eq!(answer.tokens, plain[..1]);
}
