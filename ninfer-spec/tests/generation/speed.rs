//! The number of drafts, MTP that goes away, and numbers that mislead.

use ninfer_spec::{Answer, Drafts, Generator, NgramDrafter, Options};

use crate::toy::ToyModel;

fn run(model: &mut ToyModel, options: Options) -> Answer {
    let clock = model.clock.clone();
    let mut generator = Generator::new(model, options).unwrap().with_clock(clock);
    generator.generate(&[1, 2, 3], |t| t.len()).unwrap()
}

/// Drafts that are mostly wrong must not slow a request down; with the simulated clock that is exact.
#[test]
fn bad_drafts_do_not_slow_an_answer_down() {
    for accuracy in [0.0, 0.2] {
        let mut model = ToyModel::new();
        model.accuracy = accuracy;
        model.seconds = (0.01, 0.002, 0.001);
        let answer = run(&mut model, Options::new().with_max_new(1025).with_drafts(Drafts::Auto { max: 5 }));
        let s = &answer.statistics;
        // 1024 tokens of 10 ms; 5 % more is allowed over any 256 of them.
        assert!(s.decode_seconds < 1024.0 * 0.01 * 1.05, "{s}");
        assert!(s.fallback_rounds as f64 > 0.85 * s.rounds as f64, "{s}");
        let late = &model.drafted[150..];
        assert!(late.iter().filter(|&&k| k == 0).count() * 100 > late.len() * 85);
        let plain = run(&mut ToyModel::new(), Options::new().with_max_new(1025));
        assert_eq!(answer.tokens, plain.tokens);
    }
}

#[test]
fn good_drafts_are_used() {
    let mut model = ToyModel::new();
    model.accuracy = 0.93;
    let answer = run(&mut model, Options::new().with_max_new(1025).with_drafts(Drafts::Auto { max: 4 }));
    let s = &answer.statistics;
    // Four drafts cost 16 ms and bring 4.4 tokens: 3.6 ms a token instead of 10.
    assert!(s.decode_seconds < 1024.0 * 0.01 * 0.45, "{s}");
    assert!(s.tokens_per_round() > 3.8, "{s}");
    let late = &model.drafted[20..];
    assert!(late.iter().filter(|&&k| k == 4).count() * 100 > late.len() * 85);
}

/// The second answer of a generator does not have to learn again what a round costs.
#[test]
fn costs_are_remembered() {
    let mut model = ToyModel::new();
    let clock = model.clock.clone();
    let options = Options::new().with_max_new(60).with_drafts(Drafts::Auto { max: 3 });
    let mut generator = Generator::new(&mut model, options).unwrap().with_clock(clock);
    generator.generate(&[1, 2, 3], |t| t.len()).unwrap();
    let first = generator.model().drafted.len();
    generator.generate(&[1, 2, 3], |t| t.len()).unwrap();
    let drafted = &generator.model().drafted;
    assert_eq!(drafted[0], 0);
    assert!(drafted[first] > 0, "{:?}", &drafted[first..]);
}

#[test]
fn models_without_mtp_decode_plainly_and_say_so() {
    let plain = run(&mut ToyModel::new(), Options::new().with_max_new(50));
    for drafts in [Drafts::Fixed(3), Drafts::Auto { max: 3 }] {
        let mut model = ToyModel::new();
        model.limits.mtp = false;
        let answer = run(&mut model, Options::new().with_max_new(50).with_drafts(drafts));
        assert_eq!(answer.tokens, plain.tokens);
        assert_eq!(answer.statistics.drafted, 0);
        assert!(answer.statistics.notes[0].contains("no MTP block"), "{:?}", answer.statistics.notes);
        let ngram = NgramDrafter::new(1, 2).unwrap();
        let answer = run(&mut model, Options::new().with_max_new(50).with_drafts(drafts).with_ngram(ngram));
        assert!(answer.statistics.notes.is_empty());
    }
}

#[test]
fn mtp_that_goes_away_is_survived_and_noted() {
    let plain = run(&mut ToyModel::new(), Options::new().with_max_new(50));
    let mut model = ToyModel::new();
    model.mtp_until = 20;
    let answer = run(&mut model, Options::new().with_max_new(50).with_drafts(Drafts::Fixed(3)));
    assert_eq!(answer.tokens, plain.tokens);
    assert!(answer.statistics.drafted > 0);
    assert!(answer.statistics.notes[0].contains("rows behind"), "{:?}", answer.statistics.notes);

    let mut model = ToyModel::new();
    model.mtp_prefill = false;
    let answer = run(&mut model, Options::new().with_max_new(50).with_drafts(Drafts::Fixed(3)));
    assert_eq!(answer.tokens, plain.tokens);
    assert_eq!(answer.statistics.drafted, 0);
    assert!(answer.statistics.notes[0].contains("refused"));
    assert_eq!(model.open_lanes(), 0);
}

/// With bad drafts most rounds are plain, but trials come often enough that the MTP cache never falls 64 rows behind.
#[test]
fn mtp_stays_usable_while_it_is_not_used() {
    let mut model = ToyModel::new();
    model.accuracy = 0.0;
    let answer = run(&mut model, Options::new().with_max_new(1500).with_drafts(Drafts::Auto { max: 3 }));
    assert!(answer.statistics.notes.is_empty(), "{:?}", answer.statistics.notes);
}

#[test]
fn looping_text_is_flagged() {
    let mut model = ToyModel::new();
    model.sticky = Some(2);
    let ngram = NgramDrafter::new(1, 3).unwrap();
    let answer = run(&mut model, Options::new().with_max_new(200).with_drafts(Drafts::Fixed(4)).with_ngram(ngram));
    let s = &answer.statistics;
    assert!(s.looping && s.is_suspicious());
    assert!(s.acceptance() > 0.97, "{s}");
    assert!(s.to_string().contains("repeats itself"));
    let mut sum = ninfer_spec::Statistics::new();
    assert_eq!(sum.merge(s), Err(ninfer_spec::Error::Looping));

    let ordinary = run(&mut ToyModel::new(), Options::new().with_max_new(600)).statistics;
    assert!(!ordinary.looping);
}
