//! Checkpoint folders: which files are read, which one wins, and what is reported when they are wrong.

use std::path::{Path, PathBuf};

use ninfer_models::text::{ChatOptions, Message, StopSource, StopTokens, Text, TextError, Tokenizer};
use serde_json::{Value, json};
use tempfile::TempDir;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer")
}

fn tokenizer() -> Tokenizer {
    Tokenizer::from_file(fixtures().join("tokenizer.json")).unwrap()
}

/// A folder with the tiny tokenizer and the given files.
fn checkpoint(files: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(fixtures().join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    for (name, content) in files {
        let file = dir.path().join(name);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, content).unwrap();
    }
    dir
}

fn rendered(files: &[(&str, &str)]) -> Result<String, TextError> {
    let text = Text::load(checkpoint(files).path()).unwrap();
    text.render(&[Message::user("hi")], &ChatOptions::new()).map(|prompt| prompt.text)
}

#[test]
fn demo_model_loads_whole() {
    let text = Text::load(Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/models/rustdoc-moe-14m")).unwrap();
    assert_eq!(text.stop_tokens().ids(), [6139, 6141]);
    let defaults = text.defaults();
    assert_eq!((defaults.do_sample, defaults.temperature), (Some(true), Some(0.7)));
    assert_eq!((defaults.top_p, defaults.top_k, defaults.min_p), (Some(0.8), Some(20), None));
    assert_eq!(text.chat_template().unwrap().names(), ["default"]);
    assert_eq!(text.tokenizer().len(), 6144);
    let mut stream = text.stream();
    assert_eq!(stream.license(&[10, 11, 6141, 12]), 2);
}

#[test]
fn stop_tokens_are_the_union_of_files_that_disagree() {
    let stops = |generation: Option<Value>, config: Option<Value>, tokenizer_config: Option<Value>| {
        StopTokens::from_configs(&tokenizer(), generation.as_ref(), config.as_ref(), tokenizer_config.as_ref()).unwrap()
    };
    // 479 <|endoftext|>, 480 <|im_start|>, 481 <|im_end|>. The turn end is there even when no file names it.
    assert_eq!(stops(None, None, None).ids(), [481]);
    let config = Some(json!({"eos_token_id": 5, "text_config": {"eos_token_id": 479}}));
    let union = stops(Some(json!({"eos_token_id": [7, 481]})), config, Some(json!({"eos_token": "<|im_start|>"})));
    assert_eq!(union.ids(), [5, 7, 479, 480, 481]);
    let named = |id: u32| -> Vec<StopSource> {
        union.sources().iter().filter(|(stop, _)| *stop == id).map(|(_, source)| *source).collect()
    };
    assert_eq!(named(5), [StopSource::Config]);
    assert_eq!(named(479), [StopSource::Config]);
    assert_eq!(named(480), [StopSource::TokenizerConfig]);
    assert_eq!(named(481), [StopSource::GenerationConfig, StopSource::TurnEnd]);
    // config.json alone lists only the end of a document: a chat would never stop without the turn end.
    let alone = stops(None, Some(json!({"text_config": {"eos_token_id": 479}})), None);
    assert!(alone.contains(481) && alone.contains(479));
    // An object as token, null ids, a token that does not exist.
    let object = Some(json!({"eos_token": {"content": "<|endoftext|>", "special": true}}));
    assert_eq!(stops(Some(json!({"eos_token_id": null})), None, object).ids(), [479, 481]);
    assert_eq!(stops(None, Some(json!({})), Some(json!({"eos_token": "</s>"}))).ids(), [481]);
    assert_eq!(stops(None, None, None).with(3).ids(), [3, 481]);
    for wrong in [json!("x"), json!(-1), json!([1, "x"]), json!(1.5), json!(4_294_967_296_u64), json!([[1]])] {
        let file = json!({ "eos_token_id": wrong });
        let error = StopTokens::from_configs(&tokenizer(), Some(&file), None, None).unwrap_err();
        assert!(matches!(error, TextError::Field { ref field, .. } if field == "eos_token_id"), "{error}");
    }
}

#[test]
fn templates_are_found_in_order() {
    let config = r#"{"chat_template": "config", "eos_token": "E"}"#;
    let legacy = ("chat_template.json", r#"{"chat_template": "legacy"}"#);
    let jinja = ("chat_template.jinja", "jinja {{ eos_token }}\n");
    assert_eq!(rendered(&[jinja, ("tokenizer_config.json", config), legacy]).unwrap(), "jinja E");
    assert_eq!(rendered(&[("tokenizer_config.json", config), legacy]).unwrap(), "config");
    assert_eq!(rendered(&[("tokenizer_config.json", "{}"), legacy]).unwrap(), "legacy");
    let list = r#"{"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}"#;
    let text = Text::load(checkpoint(&[("tokenizer_config.json", list)]).path()).unwrap();
    assert_eq!(text.render(&[], &ChatOptions::new()).unwrap().text, "d");
    assert_eq!(text.render(&[], &ChatOptions::new().with_tools(vec![json!(1)])).unwrap().text, "t");
    let extra = [jinja, ("additional_chat_templates/rag.jinja", "r"), ("additional_chat_templates/notes.txt", "{% x")];
    let text = Text::load(checkpoint(&extra).path()).unwrap();
    assert_eq!(text.chat_template().unwrap().names(), ["default", "rag"]);
    assert_eq!(text.render(&[], &ChatOptions::new().with_template("rag")).unwrap().text, "r");
}

#[test]
fn a_missing_or_broken_template_is_an_error_only_for_chats() {
    let dir = checkpoint(&[]);
    let text = Text::load(dir.path()).unwrap();
    assert!(text.tokenizer().encode("raw prompts work").is_ok());
    let missing = TextError::NoChatTemplate { dir: dir.path().to_path_buf() };
    assert_eq!(text.chat_template().unwrap_err(), missing);
    assert!(missing.help().contains("raw prompt"));
    assert_eq!(rendered(&[]).map_err(|error| matches!(error, TextError::NoChatTemplate { .. })), Err(true));
    for (name, content, what) in [
        ("chat_template.jinja", "{% if %}", "line 1"),
        ("tokenizer_config.json", r#"{"chat_template": 3}"#, "chat_template is 3"),
        ("tokenizer_config.json", r#"{"chat_template": [{"name": "x"}]}"#, "a name and a template"),
        ("chat_template.json", "{", "not valid JSON"),
    ] {
        let error = rendered(&[(name, content)]).unwrap_err().to_string();
        assert!(error.contains(what), "{name}: {error}");
    }
}

#[test]
fn wrong_files_are_named() {
    let empty = tempfile::tempdir().unwrap();
    let file = empty.path().join("tokenizer.json");
    assert_eq!(Text::load(empty.path()).unwrap_err(), TextError::Missing { file: file.clone() });
    std::fs::create_dir(&file).unwrap();
    assert!(
        matches!(Text::load(empty.path()).unwrap_err(), TextError::Unreadable { file: named, .. } if named == file)
    );
    for (name, content) in [
        ("generation_config.json", "version https://example.org/pointer\noid sha256:0"),
        ("generation_config.json", r#"{"top_k": "many"}"#),
        ("generation_config.json", "[1]"),
        ("config.json", r#"{"eos_token_id": {}}"#),
        ("tokenizer_config.json", ""),
    ] {
        let error = Text::load(checkpoint(&[(name, content)]).path()).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
        assert!(!error.help().is_empty());
    }
    let long = " ".repeat((16 << 20) + 1);
    let error = Text::load(checkpoint(&[("config.json", &long)]).path()).unwrap_err();
    assert!(matches!(error, TextError::TooLarge { got, limit, .. } if got == limit + 1), "{error}");
}

#[test]
fn messages_of_chat_clients_are_read() {
    let messages = Message::list_from_json(
        br#"{"model": "x", "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be "}, {"text": "brief"}, "."]},
            {"role": "user", "content": "hi", "name": "Ann", "weight": 2},
            {"role": "assistant", "content": null, "reasoning": "call it", "tool_calls": [
                {"id": "c1", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{\"b\": 1, \"a\": [2]}"}},
                {"name": "g", "arguments": {}}, {"function": {"name": "h", "arguments": ""}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "3"}
        ]}"#,
    )
    .unwrap();
    assert_eq!(messages[0], Message::system("Be brief."));
    assert_eq!((messages[1].name.as_deref(), &messages[1].extra["weight"]), (Some("Ann"), &json!(2)));
    let assistant = &messages[2];
    assert_eq!((assistant.content.as_ref(), assistant.reasoning_content.as_deref()), (None, Some("call it")));
    assert_eq!(assistant.tool_calls.len(), 3);
    assert_eq!(assistant.tool_calls[0].arguments.keys().collect::<Vec<_>>(), ["b", "a"], "in the order given");
    assert_eq!(messages[3], Message::tool("c1", "3"));
    // What the template sees can be read back.
    let written = serde_json::to_string(&messages).unwrap();
    assert!(written.contains(r#""function":{"name":"f","arguments":{"b":1,"a":[2]}}"#), "{written}");
    assert_eq!(serde_json::from_str::<Vec<Message>>(&written).unwrap(), messages);
}

#[test]
fn wrong_messages_are_named_by_position_and_field() {
    for (message, wrong) in [
        (r#""hi""#, "the message"),
        (r#"{"content": "x"}"#, "role"),
        (r#"{"role": 1}"#, "role"),
        (r#"{"role": "user", "content": 5}"#, "content"),
        (r#"{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}"#, "content[1]"),
        (r#"{"role": "user", "content": [{"type": "text"}]}"#, "content[0]"),
        (r#"{"role": "assistant", "reasoning_content": []}"#, "reasoning_content"),
        (r#"{"role": "assistant", "tool_calls": {}}"#, "tool_calls"),
        (r#"{"role": "assistant", "tool_calls": [{"function": {}}]}"#, "tool_calls[0].name"),
        (
            r#"{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}"#,
            "tool_calls[0].arguments",
        ),
        (
            r#"{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}"#,
            "tool_calls[0].arguments",
        ),
        (r#"{"role": "tool", "tool_call_id": 7}"#, "tool_call_id"),
    ] {
        let list = format!(r#"[{{"role": "user"}}, {message}]"#);
        match Message::list_from_json(list.as_bytes()) {
            Err(TextError::Message { index: 1, field, .. }) => assert_eq!(field, wrong, "{message}"),
            other => panic!("{message}: {other:?}"),
        }
        assert!(serde_json::from_str::<Message>(message).is_err());
    }
    assert!(matches!(Message::list_from_json(b"{}"), Err(TextError::Field { .. })));
    assert!(matches!(Message::list_from_json(b"{"), Err(TextError::NotJson { .. })));
}

#[test]
fn end_tokens_that_the_tokenizer_lacks_are_refused_with_the_folder() {
    let dir = checkpoint(&[("generation_config.json", r#"{"eos_token_id": [481, 512]}"#)]);
    let error = Text::load(dir.path()).unwrap_err();
    let TextError::Field { what, field, got, .. } = &error else { panic!("{error}") };
    assert_eq!((field.as_str(), got.as_str()), ("eos_token_id", "512"));
    assert!(what.starts_with(&dir.path().display().to_string()), "{error}");
    // Added tokens that were lost take the end of a turn with them.
    let dir = checkpoint(&[("generation_config.json", r#"{"eos_token_id": 481}"#)]);
    assert!(Text::load(dir.path()).is_ok());
    let file = dir.path().join("tokenizer.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    json["added_tokens"] = json!([]);
    std::fs::write(&file, json.to_string()).unwrap();
    assert!(matches!(Text::load(dir.path()), Err(TextError::Field { field, .. }) if field == "eos_token_id"));
}

#[test]
fn added_tokens_may_be_told_by_the_other_file() {
    let load = |decoder: Value| {
        let config = json!({ "added_tokens_decoder": decoder }).to_string();
        let dir = checkpoint(&[("tokenizer_config.json", &config)]);
        Text::load(dir.path())
    };
    let token = |content: &str| json!({"content": content, "special": true});
    // Known ones, and two behind the last: as in published files, whose tokenizer.json ends early.
    let text = load(json!({"480": token("<|im_start|>"), "512": token("<a>"), "513": token("<b>")})).unwrap();
    let tokenizer = text.tokenizer();
    assert_eq!((tokenizer.len(), tokenizer.token_to_id("<b>")), (514, Some(513)));
    assert_eq!(tokenizer.encode("x<a>").unwrap().last(), Some(&512));
    assert!(tokenizer.is_special(512));
    for bad in
        [json!({"480": token("<|im_end|>")}), json!({"512": token("<|im_end|>")}), json!({"514": token("<hole>")})]
    {
        assert!(matches!(load(bad.clone()), Err(TextError::InconsistentTokenizer { .. })), "{bad}");
    }
    for bad in [json!([]), json!({"x": token("y")}), json!({"512": {}}), json!({"4294967296": token("y")})] {
        assert!(matches!(load(bad.clone()), Err(TextError::Field { .. })), "{bad}");
    }
}

#[test]
fn a_limit_of_no_tokens_is_refused() {
    let dir = checkpoint(&[("generation_config.json", r#"{"max_new_tokens": 0}"#)]);
    assert!(matches!(Text::load(dir.path()), Err(TextError::Field { field, .. }) if field == "max_new_tokens"));
}
