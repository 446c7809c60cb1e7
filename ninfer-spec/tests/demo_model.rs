//! Generation with the trained demo model on the CPU, against a reference in another implementation.

use std::path::Path;

use ninfer_core::sampling::SamplingParams;
use ninfer_kernels::cpu::Cpu;
use ninfer_models::{Qwen35, Recipe, Session, SessionOptions};
use ninfer_spec::{Answer, Drafts, FinishReason, Generator, NgramDrafter, Options};
use serde_json::Value;

const STOP: [u32; 2] = [6141, 6139];

struct Case {
    name: String,
    prompt: Vec<u32>,
    new: Vec<u32>,
    stop_at: Option<usize>,
    /// Accepted drafts of each round, for 1, 2 and 3 drafts.
    accepted: [Vec<usize>; 3],
}

fn cases() -> Vec<Case> {
    let all: Value = serde_json::from_str(include_str!("fixtures/rustdoc-moe/mtp.json")).unwrap();
    let numbers = |v: &Value| v.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect::<Vec<_>>();
    let ids = |v: &Value| numbers(v).into_iter().map(|n| n as u32).collect();
    let accepted = |case: &Value, k: usize| {
        numbers(&case["accepted_per_round"][k.to_string()]).into_iter().map(|n| n as usize).collect()
    };
    let case = |case: &Value| Case {
        name: case["name"].as_str().unwrap().to_owned(),
        prompt: ids(&case["prompt_ids"]),
        new: ids(&case["new_ids"]),
        stop_at: case["first_eos_index"].as_u64().map(|n| n as usize),
        accepted: [1, 2, 3].map(|k| accepted(case, k)),
    };
    all.as_array().unwrap().iter().map(case).collect()
}

fn session() -> Session<Cpu> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/models/rustdoc-moe-14m");
    let model = Qwen35::load(&Cpu::new(), folder, &Recipe::Keep, &mut |_| {}).unwrap();
    model.session(&SessionOptions::new(512).with_max_drafts(5)).unwrap()
}

fn answer(session: &mut Session<Cpu>, prompt: &[u32], options: Options) -> Answer {
    Generator::new(session, options).unwrap().generate(prompt, |tokens| tokens.len()).unwrap()
}

/// Rounds accept what the reference's rounds accept. The reference computes in float64 and its smallest draft margin is
/// 1.2e-4, so a round or two of more than 1,200 may differ in f32; a wrong MTP row would change hundreds.
#[test]
fn mtp_accepts_what_the_reference_accepts() {
    let mut session = session();
    for k in 1..=3 {
        let (mut rounds, mut different, mut sum, mut expected_sum) = (0, 0, 0, 0);
        for case in cases() {
            // A few tokens more, so that no round of the first 96 tokens is cut short.
            let options = Options::new().with_max_new(case.new.len() + 2 * k + 2).with_drafts(Drafts::Fixed(k));
            let mut generator = Generator::new(&mut session, options).unwrap();
            let mut running = generator.start(&case.prompt).unwrap();
            assert_eq!(running.step(|t| t.len()).unwrap().tokens, case.new[..1], "{}", case.name);
            let mut accepted = Vec::new();
            while running.request().answer().len() < case.new.len() {
                accepted.push(running.step(|t| t.len()).unwrap().accepted);
            }
            assert_eq!(running.request().answer()[..case.new.len()], case.new, "{}, k = {k}", case.name);
            let expected = &case.accepted[k - 1];
            rounds += expected.len();
            different += accepted.iter().zip(expected).filter(|(a, b)| a != b).count();
            sum += accepted.iter().sum::<usize>();
            expected_sum += expected.iter().sum::<usize>();
        }
        assert!(different <= 2, "{different} of {rounds} rounds differ with k = {k}");
        assert!(sum.abs_diff(expected_sum) <= 3, "{sum} drafts accepted instead of {expected_sum}");
    }
}

/// The tokens are the reference's and end at its stop id, whatever drafts.
#[test]
fn greedy_answers_end_like_the_reference() {
    let mut session = session();
    let draftings: [fn() -> Options; 4] = [
        Options::new,
        || Options::new().with_drafts(Drafts::Fixed(5)),
        || Options::new().with_drafts(Drafts::Auto { max: 5 }),
        || Options::new().with_drafts(Drafts::Auto { max: 5 }).with_ngram(NgramDrafter::new(1, 4).unwrap()),
    ];
    for case in cases() {
        let (end, reason) = match case.stop_at {
            Some(at) => (at + 1, FinishReason::Stop),
            None => (case.new.len(), FinishReason::Length),
        };
        for drafting in draftings {
            let options = drafting().with_max_new(case.new.len()).with_stop(&STOP);
            let got = answer(&mut session, &case.prompt, options);
            assert_eq!(got.tokens, case.new[..end], "{}", case.name);
            assert_eq!(got.finish, reason);
        }
    }
}

/// With a seed, a sampled answer is the same with and without drafts, bit for bit the same logits behind it.
#[test]
fn sampled_answers_do_not_depend_on_drafts() {
    let mut session = session();
    let warm = SamplingParams::greedy().with_temperature(0.8).with_top_k(40).with_top_p(0.95);
    for (i, case) in cases().iter().enumerate().take(2) {
        for sampling in [warm, warm.with_presence(0.5).with_repetition(1.1).with_min_p(0.02)] {
            let options = || Options::new().with_max_new(48).with_sampling(sampling.with_seed(i as u64));
            let plain = answer(&mut session, &case.prompt, options());
            for k in [1, 3, 5] {
                let mtp = answer(&mut session, &case.prompt, options().with_drafts(Drafts::Fixed(k)));
                assert_eq!(mtp.tokens, plain.tokens, "{}, k = {k}", case.name);
            }
            let ngram = options().with_drafts(Drafts::Fixed(4)).with_ngram(NgramDrafter::new(1, 4).unwrap());
            assert_eq!(answer(&mut session, &case.prompt, ngram).tokens, plain.tokens, "{}", case.name);
        }
    }
}
