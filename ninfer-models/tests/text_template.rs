//! Chat templates: recorded prompts, the rules of the family, and templates that misbehave.

use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use ninfer_models::text::{ChatOptions, ChatTemplate, Message, Text, TextError, ToolCall};
use serde_json::{Map, Value, json};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer").join(name)
}

fn cases(name: &str) -> Vec<Value> {
    serde_json::from_slice(&std::fs::read(fixture(name)).unwrap()).unwrap()
}

fn turns() -> ChatTemplate {
    ChatTemplate::new(std::fs::read_to_string(fixture("turns.jinja")).unwrap()).unwrap()
}

fn render(source: &str, options: &ChatOptions) -> Result<String, TextError> {
    Ok(ChatTemplate::new(source)?.render(&[Message::user("hi")], options)?.text)
}

fn raised(result: Result<impl std::fmt::Debug, TextError>) -> String {
    match result {
        Err(TextError::TemplateRaised { message }) => message,
        other => panic!("{other:?}"),
    }
}

#[test]
fn recorded_prompts() {
    let template = turns();
    let cases = cases("prompts.json");
    assert_eq!(cases.len(), 4);
    for case in cases {
        let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
        let thinking = case["enable_thinking"].as_bool().unwrap();
        let mut options = ChatOptions::new().with_thinking(thinking);
        if let Some(preserve) = case.get("preserve_thinking") {
            options = options.with_variable("preserve_thinking", preserve.clone());
        }
        let prompt = template.render(&messages, &options).unwrap();
        assert_eq!(prompt.text, case["prompt"].as_str().unwrap(), "{}", case["name"]);
        assert_eq!(prompt.in_thinking, thinking, "{}", case["name"]);
    }
}

#[test]
fn demo_model_renders_its_recorded_prompts() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/models/rustdoc-moe-14m");
    let text = Text::load(dir).unwrap();
    let mut chats = 0;
    for case in cases("rustdoc.json") {
        let Some(messages) = case.get("messages").filter(|messages| !messages.is_null()) else { continue };
        let messages: Vec<Message> = serde_json::from_value(messages.clone()).unwrap();
        let prompt = text.render(&messages, &ChatOptions::new()).unwrap();
        assert_eq!(prompt.text, case["prompt"].as_str().unwrap());
        assert!(!prompt.in_thinking);
        let thinking = text.render(&messages, &ChatOptions::new().with_thinking(true)).unwrap();
        assert!(thinking.in_thinking && thinking.text.ends_with("<|im_start|>assistant\n<think>\n"));
        chats += 1;
    }
    assert_eq!(chats, 5);
}

#[test]
fn thinking_is_on_unless_switched_off() {
    let messages = [Message::user(" hi \n")];
    let unset = turns().render(&messages, &ChatOptions::new()).unwrap();
    assert_eq!(unset.text, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n");
    assert!(unset.in_thinking);
    let bare = turns().render(&messages, &ChatOptions::new().with_generation_prompt(false)).unwrap();
    assert_eq!((bare.text.as_str(), bare.in_thinking), ("<|im_start|>user\nhi<|im_end|>\n", false));
}

#[test]
fn markers_in_the_users_words_do_not_open_thinking() {
    let messages = [Message::user("what does <think> mean?")];
    let off = turns().render(&messages, &ChatOptions::new().with_thinking(false)).unwrap();
    assert!(!off.in_thinking);
    let bare = turns().render(&messages, &ChatOptions::new().with_generation_prompt(false)).unwrap();
    assert!(!bare.in_thinking);
}

#[test]
fn refused_conversations() {
    let template = turns();
    let refuse = |messages: &[Message]| raised(template.render(messages, &ChatOptions::new()));
    assert_eq!(refuse(&[]), "There are no messages.");
    assert_eq!(refuse(&[Message::system("x")]), "There is no user message to answer.");
    let wrapped = Message::user("<tool_response>\n1\n</tool_response>");
    assert_eq!(refuse(&[wrapped]), "There is no user message to answer.");
    let late = [Message::user("x"), Message::system("y")];
    assert_eq!(refuse(&late), "A system message must come first.");
    assert_eq!(refuse(&[Message::user("x"), Message::new("critic", "y")]), "Unknown role: critic");
    let options = ChatOptions::new().with_variable("reasoning_effort", "huge");
    assert_eq!(raised(template.render(&[Message::user("x")], &options)), "Unknown reasoning effort: huge");
}

#[test]
fn reasoning_effort_reaches_the_template() {
    let low = ChatOptions::new().with_variable("reasoning_effort", "low");
    let prompt = turns().render(&[Message::user("x")], &low).unwrap().text;
    assert!(prompt.starts_with("<|im_start|>system\nThink briefly.<|im_end|>\n"), "{prompt}");
    let off = turns().render(&[Message::user("x")], &low.with_thinking(false)).unwrap().text;
    assert!(off.starts_with("<|im_start|>user\n"), "{off}");
}

fn arguments(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => panic!("{other}"),
    }
}

#[test]
fn tool_calls_are_xml_and_results_share_a_turn() {
    let weather =
        arguments(json!({"city": "Köln \"am\" Rhein", "days": 3, "units": {"t": "C", "wind": [1.5, null, true]}}));
    let messages = [
        Message::system("Be brief."),
        Message::user("weather?"),
        Message::assistant("Looking.")
            .with_reasoning("need tools")
            .with_tool_call(ToolCall::new("weather", weather).with_id("a"))
            .with_tool_call(ToolCall::new("clock", Map::new())),
        Message::tool("a", " 21 "),
        Message::tool("b", "noon"),
    ];
    let tools = vec![json!({"type": "function", "function": {"name": "clock", "description": "<now> & 'then'"}})];
    let prompt = turns().render(&messages, &ChatOptions::new().with_tools(tools)).unwrap().text;
    let want = "<|im_start|>system\nBe brief.\n\n# Tools\n\n<tools>\n\
        {\"type\": \"function\", \"function\": {\"name\": \"clock\", \"description\": \"<now> & 'then'\"}}\n</tools><|im_end|>\n\
        <|im_start|>user\nweather?<|im_end|>\n\
        <|im_start|>assistant\n<think>\nneed tools\n</think>\n\nLooking.\n\n\
        <tool_call>\n<function=weather>\n<parameter=city>\nKöln \"am\" Rhein\n</parameter>\n<parameter=days>\n3\n</parameter>\n\
        <parameter=units>\n{\"t\": \"C\", \"wind\": [1.5, null, true]}\n</parameter>\n</function>\n</tool_call>\n\
        <tool_call>\n<function=clock>\n</function>\n</tool_call><|im_end|>\n\
        <|im_start|>user\n<tool_response>\n21\n</tool_response>\n<tool_response>\nnoon\n</tool_response><|im_end|>\n\
        <|im_start|>assistant\n<think>\n";
    assert_eq!(prompt, want);
}

#[test]
fn keeping_old_reasoning_changes_only_old_turns() {
    let messages = [
        Message::user("a"),
        Message::assistant("<think>\nold\n</think>\n\nb"),
        Message::user("c"),
        Message::assistant("d").with_reasoning("new"),
    ];
    let options = ChatOptions::new().with_generation_prompt(false);
    let dropped = turns().render(&messages, &options).unwrap().text;
    let kept = turns().render(&messages, &options.with_variable("preserve_thinking", true)).unwrap().text;
    let tail =
        "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<think>\nnew\n</think>\n\nd<|im_end|>\n";
    assert_eq!(dropped, format!("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb{tail}"));
    let old = "<think>\nold\n</think>\n\n";
    assert_eq!(kept, format!("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{old}b{tail}"));
}

#[test]
fn engine_settings_are_those_of_transformers() {
    let options = ChatOptions::new().with_now(UNIX_EPOCH + Duration::from_secs(86_400 * 365));
    let same = |source: &str, want: &str| assert_eq!(render(source, &options).unwrap(), want, "{source}");
    // Block tags take their line with them; one line feed at the end is dropped.
    same("a\n  {% if true %}\nb\n  {% endif %}\nc\n\n", "a\nb\nc\n");
    same("{{ strftime_now('%d %b %Y') }}", "01 Jan 1971");
    same("{{ messages[0]['content'].upper() }}{{ 'a,b'.split(',')[-1] }}", "HIb");
    same("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}", "");
    same("{{ tools is none }}{{ documents is none }}{{ missing is defined }}{{ missing }}", "TrueTrueFalse");
    same(
        "{{ none }} {{ true }} {{ [1, 'a', none, 1.0] }} {{ {'k': false} }}",
        "None True [1, 'a', None, 1.0] {'k': False}",
    );
    same("{{ true | string + 'x' }}{{ 1e-7 | string }}", "Truex1e-07");
    same("{{ {'b': [1, {}], 'a': '<é>'} | tojson }}", "{\"b\": [1, {}], \"a\": \"<é>\"}");
    same(
        "{{ {'b': [1, []], 'a': 2} | tojson(indent=2, sort_keys=true) }}",
        "{\n  \"a\": 2,\n  \"b\": [\n    1,\n    []\n  ]\n}",
    );
    same("{{ {'a': 'é'} | tojson(ensure_ascii=true, separators=(',', ':')) }}", "{\"a\":\"\\u00e9\"}");
    same("{{ '<b>' }}{{ '&' | safe }}", "<b>&");
    same("{% generation %}x{% endgeneration %}", "x");
}

#[test]
fn special_tokens_and_variables_are_visible() {
    let tokens = [("eos_token".to_owned(), "<|im_end|>".to_owned())];
    let template =
        ChatTemplate::new("{{ eos_token }}{{ bos_token }}{{ depth.a[1] }}").unwrap().with_special_tokens(tokens);
    let options = ChatOptions::new().with_variable("depth", json!({"a": [1, 2]}));
    assert_eq!(template.render(&[], &options).unwrap().text, "<|im_end|>2");
    let reserved = ChatOptions::new().with_variable("messages", json!([]));
    assert_eq!(template.render(&[], &reserved), Err(TextError::ReservedVariable { name: "messages".into() }));
    // The typed option wins over the variable of the same name.
    let both = ChatOptions::new().with_variable("enable_thinking", false).with_thinking(true);
    assert_eq!(render("{{ enable_thinking }}", &both).unwrap(), "True");
}

#[test]
fn several_templates_are_chosen_by_name_or_by_tools() {
    let named = |names: &[&str]| {
        ChatTemplate::named(names.iter().map(|name| ((*name).to_owned(), format!("[{name}]"))).collect()).unwrap()
    };
    let tools = || ChatOptions::new().with_tools(vec![json!({})]);
    let text = |template: &ChatTemplate, options: &ChatOptions| template.render(&[], options).map(|prompt| prompt.text);
    let both = named(&["default", "tool_use", "rag"]);
    assert_eq!(text(&both, &ChatOptions::new()).unwrap(), "[default]");
    assert_eq!(text(&both, &ChatOptions::new().with_tools(vec![])).unwrap(), "[default]");
    assert_eq!(text(&both, &tools()).unwrap(), "[tool_use]");
    assert_eq!(text(&both, &tools().with_template("rag")).unwrap(), "[rag]");
    assert_eq!(text(&named(&["default"]), &tools()).unwrap(), "[default]");
    assert_eq!(text(&named(&["only"]), &ChatOptions::new()).unwrap(), "[only]");
    let missing = TextError::NoSuchTemplate { name: "x".into(), available: vec!["only".into()] };
    assert_eq!(text(&named(&["only"]), &ChatOptions::new().with_template("x")), Err(missing));
    assert!(matches!(text(&named(&["a", "b"]), &ChatOptions::new()), Err(TextError::NoSuchTemplate { .. })));
    assert!(matches!(ChatTemplate::named(vec![]), Err(TextError::NoSuchTemplate { .. })));
}

#[test]
fn broken_templates_are_errors_with_a_line() {
    match ChatTemplate::new("a\n{% for %}") {
        Err(TextError::TemplateSyntax { name, line, .. }) => assert_eq!((name.as_str(), line), ("default", 2)),
        other => panic!("{other:?}"),
    }
    for source in ["{{ 'a' | no_such_filter }}", "{{ no_such_function() }}", "\n\n{{ messages.x.y }}", "{{ 1 + 'a' }}"]
    {
        match render(source, &ChatOptions::new()) {
            Err(TextError::TemplateRender { line, .. }) => assert!(line > 0, "{source}"),
            Err(TextError::TemplateSyntax { .. }) => {}
            other => panic!("{source}: {other:?}"),
        }
    }
    let deep = format!("{{{{ {}1{} }}}}", "(".repeat(100_000), ")".repeat(100_000));
    assert!(matches!(ChatTemplate::new(deep), Err(TextError::TemplateSyntax { .. })));
}

#[test]
fn runaway_templates_run_out_of_fuel() {
    let double = "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}";
    let join =
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = [n.x, n.x] | join %}{% endfor %}";
    let share = "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}";
    for source in [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
        "{{ 'aaaaaaaaaaaaaaaa' * 99999999999 }}",
        double,
        join,
        &format!("{share}{{{{ n.x | tojson }}}}"),
        &format!("{share}{{{{ n.x }}}}"),
        &format!("{share}{{{{ n.x | string }}}}"),
        "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    ] {
        let template = ChatTemplate::new(source).unwrap().with_fuel(200_000);
        match template.render(&[], &ChatOptions::new()) {
            Err(TextError::TemplateFuel { fuel, .. }) => assert_eq!(fuel, 200_000),
            other => panic!("{source}: {:?}", other.map(|prompt| prompt.text.len())),
        }
    }
}

#[test]
fn endless_recursion_and_cycles_are_errors() {
    for source in [
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% set n = namespace() %}{% set n.self = n %}{{ n }}",
        "{% set n = namespace() %}{% set n.self = n %}{{ n | tojson }}",
    ] {
        match render(source, &ChatOptions::new()) {
            Err(TextError::TemplateRender { .. } | TextError::TemplateFuel { .. }) => {}
            other => panic!("{source}: {other:?}"),
        }
    }
}

#[test]
fn an_oversized_prompt_is_refused() {
    let template = ChatTemplate::new("{% for i in range(700) %}{{ 'a' * 100000 }}{% endfor %}").unwrap();
    match template.render(&[], &ChatOptions::new()) {
        Err(TextError::TooLarge { limit, .. }) => assert_eq!(limit, ninfer_models::text::MAX_PROMPT_BYTES),
        other => panic!("{:?}", other.map(|prompt| prompt.text.len())),
    }
}
