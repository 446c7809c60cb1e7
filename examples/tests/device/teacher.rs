//! The shipped model on the reference's own tokens: at each step, the most likely next one.
//!
//! Greedy text of 16-bit activations parts from that of f32 ones at the first near tie and says nothing from there on, so the
//! inputs are the reference's whatever the model would have chosen.

use ninfer_core::backend::InferenceBackend;
use ninfer_core::model::CausalModel;
use ninfer_core::model::{PrefillEnd, RoundRow};
use ninfer_models::{Session, SessionOptions};
use serde::Deserialize;

use crate::bench::{
    Extent, best, fixture, is_exact, model, on_every_backend, open, prompt_logits, round, shipped_model,
};

/// Margins, best logit less second best, above which every engine has the same best one: in transformers with 16-bit
/// activations the largest margin of a step that differs is 0.69, in f32 none of 0.02 does.
const CERTAIN: [f64; 2] = [1.0, 0.02];
/// Steps that must be the same whatever their margin; transformers with 16-bit activations has 447 of 455.
const SHARE: f64 = 0.97;

#[derive(Deserialize)]
struct Golden {
    prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
struct Prompt {
    name: String,
    prompt_ids: Vec<u32>,
    new_ids: Vec<u32>,
    top1_margin: Vec<f64>,
}

/// Compares what is most likely behind each input with the reference; `choose` makes the choices for a prompt.
fn check<B: InferenceBackend>(backend: &B, what: &str, choose: &mut dyn FnMut(&mut Session<B>, &Prompt) -> Vec<u32>) {
    let golden: Golden = fixture("golden.json");
    let model = model(backend, &shipped_model(), "keep");
    let mut session = model.session(&SessionOptions::new(512).with_max_drafts(3)).unwrap();
    let certain = CERTAIN[usize::from(is_exact(backend))];
    let (mut steps, mut same, mut worst) = (0, 0, 0.0f64);
    let mut wrong = Vec::new();
    for prompt in &golden.prompts {
        let chosen = choose(&mut session, prompt);
        assert_eq!(chosen.len(), prompt.new_ids.len(), "{}", prompt.name);
        for (i, (got, expected)) in chosen.iter().zip(&prompt.new_ids).enumerate() {
            steps += 1;
            if got == expected {
                same += 1;
                continue;
            }
            worst = worst.max(prompt.top1_margin[i]);
            if prompt.top1_margin[i] > certain {
                wrong.push(format!(
                    "{} step {i}: {got}, expected {expected}, margin {}",
                    prompt.name, prompt.top1_margin[i]
                ));
            }
        }
    }
    println!("{what}: {same} of {steps} steps as the reference, largest margin of another choice {worst:.3}");
    assert!(wrong.is_empty(), "{what}: {wrong:?}");
    assert!(f64::from(same) >= SHARE * f64::from(steps), "{what}: {same} of {steps}");
    assert_eq!(steps, 455, "all steps of the reference");
}

/// All inputs as one prompt.
fn prompts<B: InferenceBackend>(backend: &B, _: Extent) {
    check(backend, "prompt", &mut |session, prompt| {
        let vocab = session.limits().vocab;
        let inputs = [&prompt.prompt_ids[..], &prompt.new_ids[..prompt.new_ids.len() - 1]].concat();
        let mut lane = open(session, 512);
        let logits = prompt_logits(session, &mut lane, &inputs);
        logits.chunks_exact(vocab).skip(prompt.prompt_ids.len() - 1).map(best).collect()
    });
}

/// The prompt, then decoding steps of one, two, three and four columns in turn; the tokens are those that the device chose.
fn steps<B: InferenceBackend>(backend: &B, _: Extent) {
    check(backend, "steps", &mut |session, prompt| {
        let mut lane = open(session, 512);
        let end = PrefillEnd::Choose { drafts: 0 };
        let first = session.prefill(&mut lane, &prompt.prompt_ids, end, None).unwrap().unwrap();
        let mut chosen = first.tokens.to_vec();
        let inputs = &prompt.new_ids[..prompt.new_ids.len() - 1];
        let vocab = session.limits().vocab;
        let mut at = 0;
        for columns in (1..=4).cycle() {
            let Some(&anchor) = inputs.get(at) else { break };
            let drafts = &inputs[at + 1..(at + columns).min(inputs.len())];
            let width = 1 + drafts.len();
            let row = RoundRow::new(anchor).with_drafts(drafts);
            let own = round(session, &mut lane, row, 0);
            let out = round(session, &mut lane, row.with_logits(), width);
            let rows: Vec<u32> = out.logits.unwrap().chunks_exact(vocab).map(best).collect();
            // With logits and without, the device chooses what is most likely.
            assert_eq!(own.tokens[..], rows[..=own.accepted], "{} at {at}", prompt.name);
            assert_eq!((own.accepted, &own.tokens[..]), (out.accepted, &out.tokens[..]));
            chosen.extend(rows);
            at += width;
        }
        chosen
    });
}

on_every_backend! { prompts, steps }
