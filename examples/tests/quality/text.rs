//! Greedy text and rendered prompts.

use ninfer_core::state::MAX_COLUMNS;
use ninfer_examples::reply::Reply;
use ninfer_models::text::{ChatOptions, StopStrings};
use ninfer_spec::{FinishReason, Generator, Options};

use crate::reference::{GOLDEN, TEXT, answer, session};

#[test]
fn templates_and_tokenizer_give_the_same_prompts() {
    let mut chats = 0;
    for prompt in &GOLDEN.prompts {
        if let Some(messages) = &prompt.messages {
            let rendered = TEXT.render(messages, &ChatOptions::new()).unwrap();
            assert_eq!(rendered.text, prompt.text, "{}", prompt.name);
            assert!(!rendered.in_thinking);
            chats += 1;
        }
        assert_eq!(TEXT.tokenizer().encode(&prompt.text).unwrap(), prompt.ids, "{}", prompt.name);
    }
    assert_eq!((GOLDEN.prompts.len(), chats), (8, 5));
}

#[test]
fn greedy_text_is_the_reference() {
    let mut compared = 0;
    for prompt in &GOLDEN.prompts {
        let options = Options::new().with_max_new(64).with_stop(TEXT.stop_tokens().ids());
        let got = answer(&prompt.ids, 0, options);
        let steps = prompt.certain_steps();
        assert_eq!(got.tokens[..steps], prompt.new_ids[..steps], "{}", prompt.name);
        if got.tokens == prompt.new_ids {
            let expected = if prompt.stopped == "eos" { FinishReason::Stop } else { FinishReason::Length };
            assert_eq!(got.finish, expected, "{}", prompt.name);
        } else {
            assert!(steps < prompt.new_ids.len(), "{}: the answer goes on differently", prompt.name);
        }
        compared += steps;
    }
    // All steps of seven prompts, and 35 of `main_vec`.
    assert!(compared > 400, "{compared}");
}

#[test]
fn streamed_text_leaves_out_the_stop_token_only() {
    let stop_tokens = TEXT.stop_tokens().ids();
    for prompt in &GOLDEN.prompts {
        let mut session = session(0);
        let options = Options::new().with_max_new(64).with_stop(stop_tokens);
        let mut reply = Reply::new(&TEXT, &StopStrings::none(), stop_tokens, false);
        let got = Generator::new(&mut session, options).unwrap().generate(&prompt.ids, |t| reply.license(t)).unwrap();
        let reply = reply.finish().unwrap();
        assert_eq!((reply.stop_string, reply.kept_tokens), (None, None));
        if got.tokens == prompt.new_ids {
            assert_eq!(reply.text, prompt.answer, "{}", prompt.name);
        }
    }
}

#[test]
fn stop_strings_cut_the_text_and_the_tokens_wherever_rounds_end() {
    let prompt = GOLDEN.prompts.iter().find(|p| p.name == "vec_push").unwrap();
    // Inside a word, over a line break, at the start, and one that never comes.
    for (stop, ends) in [("element", true), ("```\n\nApp", true), ("```rust", true), ("lifetime", false)] {
        let mut first: Option<Vec<u32>> = None;
        for k in [0, 1, 3, MAX_COLUMNS - 1] {
            let mut session = session(k);
            let strings = StopStrings::new([stop]).unwrap();
            let stop_tokens = TEXT.stop_tokens().ids();
            let mut reply = Reply::new(&TEXT, &strings, stop_tokens, false);
            let options = Options::new().with_max_new(64).with_stop(stop_tokens).with_drafts(drafts(k)).with_mtp();
            let mut generator = Generator::new(&mut session, options).unwrap();
            let got = generator.generate(&prompt.ids, |t| reply.license(t)).unwrap();
            let reply = reply.finish().unwrap();
            let expected = prompt.answer.split(stop).next().unwrap();
            assert_eq!(reply.text, expected, "{stop:?} with {k} drafts");
            assert_eq!(reply.stop_string.as_deref(), ends.then_some(stop));
            // Tokens that hold a part of the stop string are not among the answer's, whatever the rounds were.
            if ends {
                let kept = &got.tokens[..reply.kept_tokens.unwrap()];
                let decoded = TEXT.tokenizer().decode(kept, true);
                assert!(expected.starts_with(&decoded), "{decoded:?} is not the start of {expected:?}");
                assert_eq!(*first.get_or_insert(kept.to_vec()), kept, "{stop:?} with {k} drafts");
            }
            assert_eq!(got.finish, if ends { FinishReason::License } else { FinishReason::Stop });
        }
    }
}

fn drafts(k: usize) -> ninfer_spec::Drafts {
    if k == 0 { ninfer_spec::Drafts::Off } else { ninfer_spec::Drafts::Fixed(k) }
}
