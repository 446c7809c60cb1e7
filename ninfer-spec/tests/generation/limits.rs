//! Stop tokens, lengths, contexts, cancellation, and everything that is refused.

use std::sync::{Arc, Mutex};

use ninfer_core::Error as CoreError;
use ninfer_core::model::{DraftBlock, DraftContext, Drafter};
use ninfer_core::sampling::SamplingParams;
use ninfer_core::state::{Outcome, TokenRow};
use ninfer_spec::{Cancel, Drafts, Error, FinishReason, Generator, Options, RejectionRule, Sequence};

use crate::toy::{TOKENS, ToyModel, VOCAB};

const PROMPT: [u32; 5] = [3, 1, 4, 1, 5];

fn perfect() -> ToyModel {
    let mut model = ToyModel::new();
    model.accuracy = 1.0;
    model
}

fn text(model: &mut ToyModel, options: Options) -> (Vec<u32>, FinishReason) {
    let answer = Generator::new(model, options).unwrap().generate(&PROMPT, |t| t.len()).unwrap();
    (answer.tokens, answer.finish)
}

#[test]
fn stop_tokens_end_the_answer_also_inside_accepted_drafts() {
    let (plain, _) = text(&mut perfect(), Options::new().with_max_new(40));
    let mut inside = 0;
    for stop in 0..TOKENS as u32 {
        let Some(end) = plain.iter().position(|&t| t == stop) else { continue };
        for k in 0..=6 {
            let options = Options::new().with_max_new(40).with_stop(&[99, stop]).with_drafts(Drafts::Fixed(k));
            assert_eq!(text(&mut perfect(), options), (plain[..=end].to_vec(), FinishReason::Stop));
            // Rounds of k + 1 tokens start behind the first token.
            inside += usize::from(end > 0 && end % (k + 1) != 0);
        }
        let options = Options::new().with_max_new(40).with_stop(&[stop]).with_ignore_stop(true);
        assert_eq!(text(&mut perfect(), options), (plain.clone(), FinishReason::Length));
    }
    assert!(inside > 10, "stop tokens fall inside rounds");
}

/// A text front end may refuse the stop token itself; the answer then ends before it, for the same reason.
#[test]
fn a_refused_stop_token_is_not_committed() {
    let (plain, _) = text(&mut perfect(), Options::new().with_max_new(40));
    let stop = plain[9];
    let end = plain.iter().position(|&t| t == stop).unwrap();
    for k in 0..=6 {
        let options = Options::new().with_max_new(40).with_stop(&[stop]).with_drafts(Drafts::Fixed(k));
        let mut model = perfect();
        let mut generator = Generator::new(&mut model, options).unwrap();
        let license = |tokens: &[u32]| tokens.iter().take_while(|&&t| t != stop).count();
        let answer = generator.generate(&PROMPT, license).unwrap();
        assert_eq!((&answer.tokens[..], answer.finish), (&plain[..end], FinishReason::Stop));
    }
}

#[test]
fn lengths_are_exact_also_inside_a_round() {
    let (plain, _) = text(&mut perfect(), Options::new().with_max_new(40));
    for max_new in 1..=20 {
        for k in 0..=7 {
            let options = Options::new().with_max_new(max_new).with_drafts(Drafts::Fixed(k));
            assert_eq!(text(&mut perfect(), options), (plain[..max_new].to_vec(), FinishReason::Length));
        }
    }
}

#[test]
fn a_full_context_ends_the_answer() {
    let (plain, _) = text(&mut perfect(), Options::new().with_max_new(40));
    for capacity in 5..20 {
        for k in 0..=7 {
            let options = Options::new().with_capacity(capacity).with_drafts(Drafts::Fixed(k));
            // The last token is emitted at the position behind the last input.
            let expected = plain[..capacity + 1 - PROMPT.len()].to_vec();
            assert_eq!(text(&mut perfect(), options), (expected, FinishReason::ContextLimit));
        }
    }
    let mut model = perfect();
    model.limits.max_context = 12;
    assert_eq!(text(&mut model, Options::new()).1, FinishReason::ContextLimit);
}

#[test]
fn prompts_that_do_not_fit_are_refused() {
    let mut model = perfect();
    let mut generator = Generator::new(&mut model, Options::new().with_capacity(4)).unwrap();
    let error = generator.generate(&PROMPT, |t| t.len()).unwrap_err();
    assert_eq!(error, Error::Model(CoreError::ContextOverflow { requested: 5, limit: 4 }));
    assert!(!error.help().is_empty());
    drop(generator);
    let empty = Generator::new(&mut model, Options::new()).unwrap().generate(&[], |t| t.len());
    assert!(matches!(empty, Err(Error::Model(CoreError::OutOfRange { .. }))));
}

#[test]
fn chunks_end_at_fixed_positions_and_report_progress() {
    let prompt: Vec<u32> = (0..300).map(|i| i % 11).collect();
    let mut model = ToyModel::new();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let report = seen.clone();
    let options = || Options::new().with_max_new(3).with_prefill_chunk(128).with_capacity(600);
    let mut generator = Generator::new(&mut model, options())
        .unwrap()
        .with_progress(|done, all| report.lock().unwrap().push((done, all)));
    let (_, sequence) = generator.start(&prompt).unwrap().run(|t| t.len()).unwrap();
    let _ = generator.resume(sequence, &prompt[..200]).unwrap();
    drop(generator);
    // The first answer leaves 302 inputs; its last token and 200 more follow.
    assert_eq!(model.chunks, [(0, 128), (128, 128), (256, 44), (302, 82), (384, 119)]);
    assert_eq!(*seen.lock().unwrap(), [(128, 300), (256, 300), (300, 300), (82, 201), (201, 201)]);
}

#[test]
fn cancelling_a_prefill_leaves_a_sequence_to_go_on_with() {
    let prompt: Vec<u32> = (0..200).map(|i| i % 7).collect();
    let whole = {
        let mut model = ToyModel::new();
        let mut generator = Generator::new(&mut model, Options::new().with_max_new(10)).unwrap();
        generator.generate(&prompt, |t| t.len()).unwrap().tokens
    };
    let mut model = ToyModel::new();
    let cancel = Cancel::new();
    let handle = cancel.clone();
    let options = Options::new().with_max_new(10).with_prefill_chunk(64).with_drafts(Drafts::Fixed(2));
    let mut generator =
        Generator::new(&mut model, options).unwrap().with_cancel(&cancel).with_progress(move |done, _| {
            if done >= 128 {
                handle.cancel();
            }
        });
    let mut running = generator.start(&prompt).unwrap();
    let step = running.step(|t| t.len()).unwrap();
    assert_eq!((step.tokens.len(), step.finish), (0, Some(FinishReason::Cancelled)));
    let (answer, sequence) = running.into_parts();
    assert_eq!((answer.tokens.len(), answer.finish), (0, FinishReason::Cancelled));
    assert_eq!(answer.statistics.prefill_tokens, 128);
    assert_eq!((sequence.lane().position(), sequence.tokens().len()), (128, 200));
    cancel.reset();
    let mut generator = generator.with_progress(|_, _| {});
    let (answer, _) = generator.resume(sequence, &[]).unwrap().run(|t| t.len()).unwrap();
    assert_eq!(answer.tokens, whole);
}

#[test]
fn more_than_offered_is_refused_and_nothing_moves() {
    let mut model = perfect();
    let options = Options::new().with_max_new(10).with_drafts(Drafts::Fixed(2));
    let mut generator = Generator::new(&mut model, options).unwrap();
    let mut running = generator.start(&PROMPT).unwrap();
    assert_eq!(running.step(|_| 2), Err(Error::License { offered: 1, licensed: 2 }));
    assert_eq!(running.step(|t| t.len()).unwrap().tokens.len(), 1);
    assert_eq!(running.step(|t| t.len() + 1), Err(Error::License { offered: 3, licensed: 4 }));
    assert_eq!(running.request().answer().len(), 1);
    let (answer, sequence) = running.run(|t| t.len()).unwrap();
    assert_eq!(answer.tokens, text(&mut perfect(), Options::new().with_max_new(10)).0);
    assert_eq!(sequence.lane().position(), PROMPT.len() + 9);
}

#[test]
fn options_are_checked() {
    let mut model = ToyModel::new();
    model.limits.max_drafts = 4;
    let mut refused = |options: Options| Generator::new(&mut model, options).unwrap_err().to_string();
    for (options, name) in [
        (Options::new().with_max_new(0), "longest answer"),
        (Options::new().with_prefill_chunk(0), "chunk"),
        (Options::new().with_prefill_chunk(100), "chunk"),
        (Options::new().with_capacity(0), "capacity"),
        (Options::new().with_capacity(5000), "capacity"),
        (Options::new().with_drafts(Drafts::Fixed(5)), "number of drafts"),
        (Options::new().with_sampling(SamplingParams::greedy().with_top_p(2.0)), "top_p"),
        (Options::new().with_drafts(Drafts::Fixed(2)).with_rule(RejectionRule), "MTP"),
    ] {
        let message = refused(options);
        assert!(message.contains(name), "{message}");
    }
    drop(Generator::new(&mut model, Options::new().with_drafts(Drafts::Auto { max: 99 })).unwrap());
}

/// A drafter that gives whatever it was made with.
struct Scripted(Vec<u32>, Option<usize>);

impl Drafter for Scripted {
    fn name(&self) -> &'static str {
        "scripted"
    }

    fn propose(&mut self, _context: DraftContext<'_>, _k: usize, block: &mut DraftBlock) {
        block.tokens.clone_from(&self.0);
        block.distributions = self.1.map(|n| vec![vec![1.0 / VOCAB as f32; VOCAB]; n]);
    }
}

#[test]
fn careless_drafters_do_no_harm() {
    let (plain, _) = text(&mut perfect(), Options::new().with_max_new(20));
    let options = |drafter| Options::new().with_max_new(20).with_drafts(Drafts::Fixed(3)).with_drafter(drafter);
    for tokens in [vec![TOKENS as u32], vec![u32::MAX, 1], vec![1; 40], vec![1, 2, 99, 3], vec![]] {
        let mut model = perfect();
        assert_eq!(text(&mut model, options(Scripted(tokens, None))).0, plain);
        assert!(model.drafted.iter().all(|&k| k <= 3));
    }
    let mut model = perfect();
    let mut generator = Generator::new(&mut model, options(Scripted(vec![1, 2], Some(1)))).unwrap();
    let error = generator.generate(&PROMPT, |t| t.len()).unwrap_err();
    assert!(matches!(error, Error::Drafter { drafter: "scripted", expected: 2, got: 1, .. }), "{error}");
}

#[test]
fn outcomes_that_contradict_the_row_are_errors() {
    let lies: [fn(&mut Outcome); 5] = [
        |o| o.accepted += 9,
        |o| o.tokens = TokenRow::new(&[]),
        |o| o.tokens = TokenRow::new(&[o.tokens[0] ^ 1, o.tokens[1], o.tokens[2]]),
        |o| o.tokens = TokenRow::new(&[o.tokens[0], o.tokens[1], TOKENS as u32]),
        |o| o.accepted = 1,
    ];
    for lie in lies {
        let mut model = perfect();
        model.lie = Some(lie);
        let options = Options::new().with_drafts(Drafts::Fixed(2));
        let error = Generator::new(&mut model, options).unwrap().generate(&PROMPT, |t| t.len()).unwrap_err();
        assert!(matches!(error, Error::Outcome { .. }), "{error}");
    }
}

#[test]
fn sequences_need_the_tokens_of_their_lane() {
    let mut model = ToyModel::new();
    let mut generator = Generator::new(&mut model, Options::new().with_max_new(4)).unwrap();
    let (_, sequence) = generator.start(&PROMPT).unwrap().run(|t| t.len()).unwrap();
    let lane = sequence.into_lane();
    assert!(matches!(Sequence::new(lane, vec![1, 2], 64), Err(Error::Outcome { .. })));
}
