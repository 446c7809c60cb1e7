//! `generate`.

use std::io::Read as _;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::program::{file, folder, path, run};

const GENERATE: &str = env!("CARGO_BIN_EXE_generate");

fn golden(name: &str) -> Value {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/golden.json");
    let all: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    all["prompts"].as_array().unwrap().iter().find(|p| p["name"] == name).unwrap().clone()
}

/// A member of an object, and what it must be.
type Member = (&'static str, fn(&Value) -> bool);

fn has(json: &Value, members: &[Member]) {
    for (name, check) in members {
        assert!(check(&json[*name]), "{name} is {}", json[*name]);
    }
}

#[test]
fn without_arguments_the_shipped_model_answers() {
    let run = run(GENERATE, &[]);
    assert_eq!(run.status, 0, "{}", run.stderr);
    assert!(run.stdout.contains("push") && run.stdout.ends_with('\n'), "{}", run.stdout);
    for words in ["> What does", "prefill", "decode", "tokens a round", "drafter", "mtp", "memory", "KV cache"] {
        assert!(run.stderr.contains(words), "{words}: {}", run.stderr);
    }
}

#[test]
fn json_has_the_documented_members() {
    let expected = golden("vec_push");
    let json = run(GENERATE, &["--greedy", "--json"]).json();
    assert_eq!(json["prompt_token_ids"], expected["prompt_ids"]);
    assert_eq!(json["token_ids"], expected["new_ids"], "with the stop token as the last one");
    assert_eq!(json["text"], expected["text"], "without it");
    assert_eq!((&json["finish_reason"], &json["stop_string"]), (&json!("stop"), &Value::Null));
    has(
        &json["stats"],
        &[
            ("prefill_tokens", |v| v == 26),
            ("prefill_seconds", |v| v.as_f64().unwrap() > 0.0),
            ("decode_tokens", |v| v == 27),
            ("decode_seconds", |v| v.as_f64().unwrap() > 0.0),
            ("rounds", |v| (1..=27).contains(&v.as_u64().unwrap())),
            ("drafted", Value::is_u64),
            ("accepted", Value::is_u64),
            ("accepted_per_position", Value::is_array),
            ("drafted_per_position", Value::is_array),
            ("drafter", |v| v == "mtp"),
        ],
    );
    has(&json["memory"], &[("weights", Value::is_u64), ("kv", Value::is_u64), ("state", Value::is_u64)]);
}

#[test]
fn drafts_are_counted_by_position() {
    let json = run(GENERATE, &["--greedy", "--json", "--spec", "mtp", "--draft-tokens", "3"]).json();
    let stats = &json["stats"];
    let sum = |name: &str| stats[name].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum::<u64>();
    assert_eq!(stats["drafted_per_position"].as_array().unwrap().len(), 3);
    assert_eq!((json!(sum("drafted_per_position")), json!(sum("accepted_per_position"))), {
        (stats["drafted"].clone(), stats["accepted"].clone())
    });
    assert!(stats["accepted"].as_u64().unwrap() > 0);
    let plain = run(GENERATE, &["--greedy", "--json", "--spec", "off"]).json();
    assert_eq!((&plain["token_ids"], &plain["stats"]["drafted"]), (&json["token_ids"], &json!(0)));
}

#[test]
fn prompts_come_in_three_forms() {
    let folder = tempfile::tempdir().unwrap();
    let two_turns = golden("two_turns");
    let messages = file(&folder, "chat.json", two_turns["messages"].to_string());
    let chat = run(GENERATE, &["--messages", &messages, "--max-new", "1", "--json"]).json();
    assert_eq!(chat["prompt_token_ids"], two_turns["prompt_ids"]);

    let raw = run(GENERATE, &["--raw", two_turns["prompt"].as_str().unwrap(), "--max-new", "1", "--json"]).json();
    assert_eq!(raw["prompt_token_ids"], two_turns["prompt_ids"], "special tokens in raw text count as such");

    let object =
        json!({ "messages": [{ "role": "system", "content": "Be short." }, { "role": "user", "content": "Hi" }] });
    let object = file(&folder, "object.json", object.to_string());
    let by_file = run(GENERATE, &["--messages", &object, "--max-new", "1", "--json"]).json();
    let by_options = run(GENERATE, &["--system", "Be short.", "--prompt", "Hi", "--max-new", "1", "--json"]).json();
    assert_eq!(by_file["prompt_token_ids"], by_options["prompt_token_ids"]);

    let thinking = run(GENERATE, &["--prompt", "Hi", "--thinking", "on", "--max-new", "1", "--json"]).json();
    let off = run(GENERATE, &["--prompt", "Hi", "--thinking", "off", "--max-new", "1", "--json"]).json();
    assert!(thinking["prompt_token_ids"].as_array().unwrap().len() < off["prompt_token_ids"].as_array().unwrap().len());
}

#[test]
fn text_goes_to_standard_output_and_the_rest_elsewhere() {
    let quiet = run(GENERATE, &["--greedy", "--quiet"]);
    assert_eq!(quiet.stdout.trim_end(), golden("vec_push")["text"]);
    assert_eq!((quiet.status, quiet.stderr.as_str()), (0, ""));
    let ids = run(GENERATE, &["--greedy", "--quiet", "--print-token-ids", "--max-new", "3"]);
    assert_eq!(ids.stdout, "```rust\n\n");
    assert!(ids.stderr.contains("answer ids: [299, 329, 198]"), "{}", ids.stderr);
}

#[test]
fn answers_end_for_the_stated_reason() {
    let length = run(GENERATE, &["--greedy", "--json", "--max-new", "5"]).json();
    assert_eq!((&length["finish_reason"], length["token_ids"].as_array().unwrap().len()), (&json!("length"), 5));
    // The last token of a full context is not an input any more.
    let context = run(GENERATE, &["--greedy", "--json", "--max-context", "30"]).json();
    assert_eq!((&context["finish_reason"], context["token_ids"].as_array().unwrap().len()), (&json!("context"), 5));
    let stop = run(GENERATE, &["--greedy", "--json", "--stop", "zzz", "--stop", "value"]).json();
    assert_eq!((&stop["finish_reason"], &stop["stop_string"]), (&json!("stop"), &json!("value")));
    assert_eq!(stop["text"], "```rust\npub fn push(&mut self, ");
    let on = run(GENERATE, &["--greedy", "--json", "--ignore-eos", "--max-new", "40"]).json();
    assert_eq!(on["token_ids"].as_array().unwrap().len(), 40);
    assert!(on["text"].as_str().unwrap().contains("<|im_end|>"));
}

#[test]
fn sampling_follows_options_and_seeds() {
    let text = |arguments: &[&str]| {
        let arguments = [&["--raw", "The", "--max-new", "24", "--json"], arguments].concat();
        let json = run(GENERATE, &arguments).json();
        (json["text"].clone(), json["sampling"].clone())
    };
    let (first, sampling) = text(&["--seed", "5"]);
    let close = |name: &str, expected: f64| (sampling[name].as_f64().unwrap() - expected).abs() < 1e-6;
    assert!(close("temperature", 0.7) && close("top_p", 0.8) && close("top_k", 20.0), "{sampling}");
    assert_eq!(text(&["--seed", "5"]).0, first);
    assert_ne!(text(&["--seed", "6"]).0, first);
    let penalised = text(&["--seed", "5", "--presence-penalty", "1.5", "--frequency-penalty", "-0.5"]).1;
    assert_eq!((&penalised["presence"], &penalised["frequency"]), (&json!(1.5), &json!(-0.5)));
    assert_eq!(text(&["--greedy", "--temperature", "2"]).0, text(&["--temperature", "0", "--top-k", "3"]).0);
}

#[test]
fn engine_options_keep_the_text_where_they_promise_to() {
    let ids =
        |arguments: &[&str]| run(GENERATE, &[&["--greedy", "--json"], arguments].concat()).json()["token_ids"].clone();
    let plain = ids(&[]);
    assert_eq!(ids(&["--threads", "1", "--device", "cpu"]), plain);
    assert_eq!(ids(&["--prefill-chunk", "64"]), plain);
    // Weights in f32 are the BF16 ones; the other conversions and a BF16 cache are close enough for this answer.
    assert_eq!(ids(&["--weights", "f32"]), plain);
    assert_eq!(ids(&["--weights", "w8", "--kv-dtype", "bf16"]), plain);
}

#[test]
fn a_model_without_mtp_is_decoded_plainly_unless_mtp_was_asked_for() {
    let folder = folder_without_mtp();
    let dir = path(folder.path());
    let run_it =
        |more: &[&str]| run(GENERATE, &[&["--model", dir, "--greedy", "--max-new", "8", "--json"], more].concat());
    let json = run_it(&[]).json();
    assert_eq!(json["stats"]["drafted"], 0);
    assert!(json["stats"]["notes"][0].as_str().unwrap().contains("no MTP block"), "{json}");
    run_it(&["--spec", "mtp"]).fails(1, &["no MTP block", "n-gram"]);
    assert_eq!(run_it(&["--spec", "ngram"]).json()["token_ids"], json["token_ids"]);
}

/// The shipped model with its MTP tensors cut off: the header is written anew over the same data, less the last part.
fn folder_without_mtp() -> tempfile::TempDir {
    let folder = folder();
    let weights = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let kept = tensors.tensors().into_iter().filter(|(name, _)| !name.starts_with("mtp."));
    std::fs::write(&weights, safetensors::serialize(kept, None).unwrap()).unwrap();
    folder
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let mut child =
        Command::new(GENERATE).args(["--greedy"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Closed before a word was written.
    drop(child.stdout.take());
    let mut complaints = String::new();
    child.stderr.take().unwrap().read_to_string(&mut complaints).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{complaints}");
    assert!(!complaints.contains("panicked") && !complaints.contains("error"), "{complaints}");
}
