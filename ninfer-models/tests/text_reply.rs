//! Replies as models write them, cut everywhere.

use ninfer_models::text::{Prompt, ReplyParser, ReplyPart, ToolCall};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

fn parser(in_thinking: bool) -> ReplyParser {
    let end = if in_thinking { "<think>\n" } else { "<think>\n\n</think>\n\n" };
    let tools = json!([{"function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]);
    ReplyParser::new(&Prompt::new(format!("<|im_start|>assistant\n{end}"))).with_tools(tools.as_array().unwrap())
}

/// Parts with neighbours of one kind joined.
fn join(parts: impl IntoIterator<Item = ReplyPart>) -> Vec<ReplyPart> {
    let mut joined: Vec<ReplyPart> = Vec::new();
    for part in parts {
        match (joined.last_mut(), part) {
            (Some(ReplyPart::Reasoning(last)), ReplyPart::Reasoning(more))
            | (Some(ReplyPart::Content(last)), ReplyPart::Content(more)) => last.push_str(&more),
            (_, part) => joined.push(part),
        }
    }
    joined
}

fn run(in_thinking: bool, chunks: &[&str]) -> Vec<ReplyPart> {
    let mut parser = parser(in_thinking);
    let mut parts: Vec<ReplyPart> = chunks.iter().flat_map(|chunk| parser.push(chunk)).collect();
    parts.extend(parser.finish());
    join(parts)
}

/// The parts of a text, checked to be the same for every cut in two and for single characters.
fn parts(in_thinking: bool, text: &str) -> Vec<ReplyPart> {
    let whole = run(in_thinking, &[text]);
    for (cut, _) in text.char_indices() {
        let (head, tail) = text.split_at(cut);
        assert_eq!(run(in_thinking, &[head, tail]), whole, "cut at byte {cut}");
    }
    let single: Vec<&str> = text.split("").collect();
    assert_eq!(run(in_thinking, &single), whole);
    whole
}

fn reasoning(text: &str) -> ReplyPart {
    ReplyPart::Reasoning(text.to_owned())
}

fn content(text: &str) -> ReplyPart {
    ReplyPart::Content(text.to_owned())
}

fn call(name: &str, arguments: Value) -> ReplyPart {
    let Value::Object(arguments) = arguments else { panic!("{arguments}") };
    ReplyPart::ToolCall(ToolCall::new(name, arguments))
}

const ADD: &str = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>";

#[test]
fn the_prompt_says_whether_reasoning_is_open() {
    assert_eq!(parts(true, "so\nit is\n</think>\n\nFour.\n"), [reasoning("so\nit is"), content("Four.\n")]);
    assert_eq!(parts(false, "Four."), [content("Four.")]);
    assert_eq!(parts(true, "never closed\n"), [reasoning("never closed")]);
    assert_eq!(parts(true, "\n</think>\n\nFour."), [content("Four.")]);
    assert_eq!(parts(true, "<think>\nagain\n</think>\nFour."), [reasoning("again"), content("Four.")]);
    assert_eq!(parts(false, "\n<think>\nlate\n</think>\n\nFour."), [reasoning("late"), content("Four.")]);
}

#[test]
fn tags_as_words_stay_words() {
    assert_eq!(parts(false, "Write <think> and </think>."), [content("Write <think> and </think>.")]);
    assert_eq!(parts(true, "a <think> b</think>c </think> d"), [reasoning("a <think> b"), content("c </think> d")]);
    assert_eq!(parts(false, "1 < 2 <b> </thin> <tool"), [content("1 < 2 <b> </thin> <tool")]);
}

#[test]
fn tool_calls_with_text_around() {
    let text = format!("let me\n</think>\n\nLooking.\n\n{ADD}\n{ADD}\nDone.");
    let add = || call("add", json!({"a": 1}));
    assert_eq!(parts(true, &text), [reasoning("let me"), content("Looking."), add(), add(), content("Done.")]);
    assert_eq!(parts(false, ADD), [add()]);
    let json = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";
    assert_eq!(parts(false, json), [add()]);
}

#[test]
fn a_tool_call_inside_thinking_closes_it() {
    let add = || call("add", json!({"a": 1}));
    assert_eq!(parts(true, &format!("I must add\n{ADD}")), [reasoning("I must add"), add()]);
    // The forgotten tag behind the call is dropped, once.
    let late = format!("I must add\n{ADD}\n</think>\n\nOK </think>");
    assert_eq!(parts(true, &late), [reasoning("I must add"), add(), content("OK </think>")]);
    let between = format!("x{ADD}\n</think>\n\n{ADD}");
    assert_eq!(parts(true, &between), [reasoning("x"), add(), add()]);
}

#[test]
fn what_is_no_call_is_content() {
    let broken = "<tool_call>\nadd(1)\n</tool_call>";
    assert_eq!(parts(false, &format!("x\n{broken}")), [content(&format!("x{broken}"))]);
    assert_eq!(parts(false, "<tool_call>\n<function=add>\n<para"), [content("<tool_call>\n<function=add>\n<para")]);
    // The closing tag is missing and the call is whole.
    let open = "<tool_call>\n<function=add>\n<parameter=b>\né\n</parameter>\n</function>\n";
    assert_eq!(parts(false, open), [call("add", json!({"b": "é"}))]);
    assert_eq!(parts(false, "<tool_call></tool_call>"), [content("<tool_call></tool_call>")]);
    assert_eq!(parts(false, ""), []);
    assert_eq!(ToolCall::new("x", Map::new()).arguments.len(), 0);
}

proptest! {
    #[test]
    fn any_pieces_in_any_chunks_agree(
        pieces in prop::collection::vec(prop::sample::select(vec![
            "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>",
            "\n", "\n\n", " ", "x", "é", "<", "</", "<t", "think>",
        ]), 0..14),
        cuts in prop::collection::vec(0_usize..120, 0..10),
        in_thinking in any::<bool>(),
    ) {
        let text = pieces.concat();
        let mut cuts: Vec<usize> = cuts.into_iter().filter(|&cut| text.is_char_boundary(cut)).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let chunks: Vec<&str> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        prop_assert_eq!(run(in_thinking, &chunks), run(in_thinking, &[&text]));
    }
}
