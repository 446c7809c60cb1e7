//! Stop tokens, stop strings and licenses over real tokens.

use std::path::Path;

use ninfer_models::text::{Stop, StopReason, StopStrings, StopTokens, TextStream, Tokenizer};
use proptest::prelude::*;

const IM_END: u32 = 481;

fn tokenizer() -> Tokenizer {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer/tokenizer.json");
    Tokenizer::from_file(file).unwrap()
}

thread_local! {
    static TINY: Tokenizer = tokenizer();
}

fn stream(tokenizer: &Tokenizer, strings: &[&str]) -> TextStream {
    TextStream::new(tokenizer)
        .with_stop_tokens(StopTokens::new([IM_END]))
        .with_stop_strings(&StopStrings::new(strings.iter().copied()).unwrap())
}

/// Text, reason and counts of a finished stream, in a form that can be compared.
#[derive(Debug, PartialEq)]
struct Outcome {
    text: String,
    kept_tokens: usize,
    reason: Option<StopReason>,
}

fn outcome(mut stream: TextStream, mut text: String) -> Outcome {
    text.push_str(&stream.finish());
    assert_eq!(stream.finish(), "");
    assert_eq!(stream.push(0), None);
    if let Some(stop) = stream.stopped() {
        assert_eq!(stop.kept_bytes, text.len());
        assert_eq!(stop.kept_tokens, stream.kept_tokens());
    }
    let reason = stream.stopped().map(|stop| stop.reason.clone());
    Outcome { text, kept_tokens: stream.kept_tokens(), reason }
}

fn pushed(tokenizer: &Tokenizer, ids: &[u32], strings: &[&str]) -> Outcome {
    let mut stream = stream(tokenizer, strings);
    let mut text = String::new();
    for &id in ids {
        text.push_str(&stream.push(id).unwrap_or_default());
    }
    outcome(stream, text)
}

/// Rounds of the given sizes; returns the outcome and how many tokens were committed.
fn licensed(tokenizer: &Tokenizer, ids: &[u32], strings: &[&str], rounds: &[usize]) -> (Outcome, usize) {
    let mut stream = stream(tokenizer, strings);
    let (mut text, mut committed) = (String::new(), 0);
    let mut sizes = rounds.iter().copied().cycle();
    while committed < ids.len() {
        let size = sizes.next().unwrap().clamp(1, ids.len() - committed);
        let round = &ids[committed..committed + size];
        let licensed = stream.license(round);
        assert!(licensed <= size);
        for &id in &round[..licensed] {
            text.push_str(&stream.push(id).unwrap_or_default());
        }
        committed += licensed;
        if licensed < size {
            assert!(stream.stopped().is_some(), "fewer tokens than asked for mean the end");
            break;
        }
        assert!(stream.stopped().is_none());
    }
    (outcome(stream, text), committed)
}

/// The same from the definition: decode everything before the first stop token, cut at the first stop string.
fn defined(tokenizer: &Tokenizer, ids: &[u32], strings: &[&str]) -> Outcome {
    let before = ids.iter().position(|&id| id == IM_END).unwrap_or(ids.len());
    let whole = tokenizer.decode(&ids[..before], true);
    let found = (1..=whole.len()).find_map(|end| {
        let ending = |stop: &&str| whole.as_bytes()[..end].ends_with(stop.as_bytes());
        let indexed = strings.iter().enumerate().filter(|(_, stop)| ending(stop));
        indexed
            .max_by_key(|(index, stop)| (stop.len(), usize::MAX - index))
            .map(|(index, stop)| (end - stop.len(), index))
    });
    let (start, reason) = match found {
        Some((start, index)) => (start, Some(StopReason::String { index, text: strings[index].to_owned() })),
        None => (whole.len(), (before < ids.len()).then_some(StopReason::Token(IM_END))),
    };
    let text = whole[..start].to_owned();
    let kept_tokens = if found.is_none() {
        before
    } else {
        (0..=before).rfind(|&n| text.starts_with(&tokenizer.decode(&ids[..n], true))).unwrap()
    };
    Outcome { text, kept_tokens, reason }
}

#[test]
fn a_stop_string_inside_one_token_keeps_the_text_before_it() {
    TINY.with(|tokenizer| {
        // One token of three letters or more, cut in its middle.
        let is_word = |bytes: &[u8]| bytes.len() >= 3 && bytes.iter().all(u8::is_ascii_alphabetic);
        let id = (256..479).find(|&id| is_word(tokenizer.token_bytes(id).unwrap())).unwrap();
        let word = tokenizer.decode(&[id], true);
        let (head, tail) = word.split_at(2);
        let mut stream = stream(tokenizer, &[tail]);
        assert_eq!(stream.license(&[39, id, 40]), 1);
        assert_eq!(stream.stopped(), None, "not before the licensed token is pushed");
        let first = tokenizer.decode(&[39], true);
        assert_eq!(stream.push(39), Some(format!("{first}{head}")));
        let reason = StopReason::String { index: 0, text: tail.to_owned() };
        let Some(Stop { reason: got, kept_bytes, kept_tokens, .. }) = stream.stopped() else { panic!("not stopped") };
        assert_eq!((got, *kept_bytes, *kept_tokens), (&reason, first.len() + 2, 1));
        assert_eq!(stream.push(40), None);
        assert_eq!(stream.finish(), "");
    });
}

#[test]
fn a_match_that_began_in_committed_tokens_licenses_nothing() {
    TINY.with(|tokenizer| {
        let ids = tokenizer.encode_plain("go STOP on").unwrap();
        let mut stream = stream(tokenizer, &["STOP"]);
        let cut = ids.iter().position(|&id| tokenizer.decode(&[id], true).contains('T')).unwrap();
        assert_eq!(stream.license(&ids[..cut]), cut);
        let mut text: String = ids[..cut].iter().filter_map(|&id| stream.push(id)).collect();
        assert_eq!(text, "go ", "the S is held back");
        assert_eq!(stream.license(&ids[cut..]), 0);
        assert!(stream.stopped().is_some());
        assert_eq!(stream.license(&ids[cut..]), 0);
        text.push_str(&stream.finish());
        assert_eq!(text, "go ");
        assert!(stream.kept_tokens() < cut, "the token with the S is not kept");
    });
}

#[test]
fn stop_tokens_are_not_licensed_and_release_what_was_held() {
    TINY.with(|tokenizer| {
        let mut ids = tokenizer.encode_plain("go STO").unwrap();
        let length = ids.len();
        ids.extend([IM_END, 39, 39]);
        let mut stream = stream(tokenizer, &["STOP"]);
        assert_eq!(stream.license(&ids), length);
        let text: String = ids[..length].iter().filter_map(|&id| stream.push(id)).collect();
        assert_eq!(text, "go STO");
        assert_eq!(stream.stopped().unwrap().reason, StopReason::Token(IM_END));
        let by_push = pushed(tokenizer, &ids, &["STOP"]);
        assert_eq!(by_push, Outcome { text, kept_tokens: length, reason: Some(StopReason::Token(IM_END)) });
    });
}

#[test]
fn committing_fewer_than_licensed_prints_only_those() {
    TINY.with(|tokenizer| {
        let ids = tokenizer.encode_plain("one two STOP").unwrap();
        let mut stream = stream(tokenizer, &["STOP"]);
        let licensed = stream.license(&ids);
        assert!(licensed > 3);
        let mut text: String = ids[..2].iter().filter_map(|&id| stream.push(id)).collect();
        text.push_str(&stream.finish());
        assert_eq!(text, tokenizer.decode(&ids[..2], true));
        assert_eq!(stream.stopped(), None, "the caller's own limit is no stop");
        // Pushing something else than was licensed drops the plan.
        let mut other = self::stream(tokenizer, &["STOP"]);
        let licensed = other.license(&ids);
        for _ in 0..licensed {
            assert_eq!(other.push(39), Some("H".to_owned()));
        }
        assert_eq!(other.stopped(), None);
    });
}

#[test]
fn special_tokens_are_printed_on_request() {
    TINY.with(|tokenizer| {
        let ids = [480, 39, IM_END];
        assert_eq!(pushed(tokenizer, &ids, &[]).text, "H");
        let mut shown = TextStream::new(tokenizer).with_special_tokens(tokenizer);
        let text: String = ids.iter().filter_map(|&id| shown.push(id)).collect();
        assert_eq!(text, "<|im_start|>H<|im_end|>");
        assert_eq!(shown.license(&ids), 3, "without stop tokens everything is licensed");
    });
}

#[test]
fn characters_that_stay_incomplete_are_replaced_at_the_end() {
    TINY.with(|tokenizer| {
        let ids = tokenizer.encode_plain("漢").unwrap();
        assert!(ids.len() > 1, "the tiny vocabulary has no token for the whole character");
        let cut = &ids[..ids.len() - 1];
        assert_eq!(pushed(tokenizer, cut, &[]).text, "\u{FFFD}");
        let reason = StopReason::String { index: 0, text: "漢".to_owned() };
        let whole = pushed(tokenizer, &ids, &["漢"]);
        assert_eq!(whole, Outcome { text: String::new(), kept_tokens: 0, reason: Some(reason) });
    });
}

/// Ids that often form the stop strings below, often cut characters and sometimes stop.
fn id() -> impl Strategy<Value = u32> {
    prop_oneof![
        4 => prop::sample::select(vec![64_u32, 65, 66, 220, 197, 198]),
        3 => 94_u32..256,
        2 => 256_u32..479,
        1 => prop::sample::select(vec![480, 503, 504, 600]),
        1 => Just(IM_END),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn pushing_and_licensing_agree_with_the_definition(
        ids in prop::collection::vec(id(), 0..24),
        strings in prop::collection::vec(
            prop_oneof![
                3 => "[abc \\n\\t]{1,3}",
                1 => Just("\u{FFFD}".to_owned()),
                1 => Just("<think>".to_owned()),
                1 => "[a-z]{2,4}",
            ],
            0..3,
        ),
        rounds in prop::collection::vec(1_usize..9, 1..5),
    ) {
        TINY.with(|tokenizer| {
            let strings: Vec<&str> = strings.iter().map(String::as_str).collect();
            let want = defined(tokenizer, &ids, &strings);
            prop_assert_eq!(&pushed(tokenizer, &ids, &strings), &want);
            let (got, committed) = licensed(tokenizer, &ids, &strings, &rounds);
            prop_assert_eq!(&got.text, &want.text);
            prop_assert_eq!(&got.reason, &want.reason);
            prop_assert_eq!(got.kept_tokens, want.kept_tokens);
            prop_assert!(committed >= want.kept_tokens, "everything kept was committed");
            // A replacement character at the very end is known only when the reply is finished.
            if rounds.iter().all(|&size| size >= ids.len()) && !strings.contains(&"\u{FFFD}") {
                prop_assert_eq!(committed, want.kept_tokens);
            }
            Ok(())
        })?;
    }
}
