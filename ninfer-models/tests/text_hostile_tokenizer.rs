//! Damaged and hostile `tokenizer.json` files give errors, never panics.

use std::path::Path;

use ninfer_models::text::{TextError, Tokenizer};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

fn file() -> Value {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer/tokenizer.json");
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

fn load(file: &Value) -> Result<Tokenizer, TextError> {
    Tokenizer::from_bytes(&serde_json::to_vec(file).unwrap())
}

/// The fixture with the value at a JSON pointer replaced.
fn with(pointer: &str, value: Value) -> Value {
    let mut file = file();
    match file.pointer_mut(pointer) {
        Some(place) => *place = value,
        None => {
            let (parent, name) = pointer.rsplit_once('/').unwrap();
            file.pointer_mut(parent).unwrap().as_object_mut().unwrap().insert(name.to_owned(), value);
        }
    }
    file
}

#[test]
fn text_that_is_no_json() {
    for bytes in [&b""[..], b"{", b"version https://git-lfs", b"\xFF\xFE", b"{\"model\": nan}", &[0; 1000]] {
        assert!(matches!(Tokenizer::from_bytes(bytes), Err(TextError::NotJson { .. })), "{bytes:?}");
    }
    let deep = "[".repeat(1_000_000);
    assert!(matches!(Tokenizer::from_bytes(deep.as_bytes()), Err(TextError::NotJson { .. })));
    for json in ["[]", "3", "null", "{}", r#"{"model": []}"#] {
        assert!(matches!(Tokenizer::from_bytes(json.as_bytes()), Err(TextError::Field { .. })), "{json}");
    }
}

#[test]
fn other_models_are_named() {
    for kind in ["Unigram", "WordPiece", "WordLevel", "bpe"] {
        assert_eq!(load(&with("/model/type", json!(kind))).unwrap_err(), TextError::NotBpe { found: kind.to_owned() });
    }
    assert!(matches!(load(&with("/model/type", json!(3))), Err(TextError::NotBpe { .. })));
    let mut untyped = file();
    untyped["model"].as_object_mut().unwrap().shift_remove("type");
    assert_eq!(load(&untyped).unwrap().len(), 512, "old files name no type");
}

#[test]
fn components_that_would_change_the_text_are_refused() {
    let unigram_prefix = json!({"type": "Metaspace", "replacement": "_"});
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false});
    for (pointer, value) in [
        ("/model/dropout", json!(0.5)),
        ("/model/byte_fallback", json!(true)),
        ("/model/continuing_subword_prefix", json!("##")),
        ("/model/end_of_word_suffix", json!("</w>")),
        ("/normalizer", json!({"type": "Lowercase"})),
        ("/normalizer", json!({"type": "Sequence", "normalizers": 5})),
        ("/normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"})),
        ("/normalizer", json!("NFC")),
        ("/pre_tokenizer", json!(null)),
        ("/pre_tokenizer", unigram_prefix.clone()),
        ("/pre_tokenizer", json!({"type": "Sequence", "pretokenizers": []})),
        ("/pre_tokenizer", json!({"type": "Sequence", "pretokenizers": [byte_level, byte_level]})),
        ("/pre_tokenizer/pretokenizers/0/behavior", json!("Removed")),
        ("/pre_tokenizer/pretokenizers/0/pattern", json!({"Regex": "(unclosed"})),
        ("/decoder", json!(null)),
        ("/decoder", unigram_prefix),
        ("/decoder", json!({"type": "Sequence", "decoders": [byte_level, byte_level]})),
        ("/added_tokens/0/lstrip", json!(true)),
    ] {
        match load(&with(pointer, value.clone())) {
            Err(TextError::UnsupportedTokenizer { .. }) => {}
            other => panic!("{pointer} = {value}: {other:?}"),
        }
    }
    let mut nested = byte_level;
    for _ in 0..20 {
        nested = json!({"type": "Sequence", "pretokenizers": [nested]});
    }
    assert!(matches!(load(&with("/pre_tokenizer", nested)), Err(TextError::UnsupportedTokenizer { .. })));
}

#[test]
fn equal_forms_are_accepted() {
    let wanted = load(&file()).unwrap().encode("naïve text 12").unwrap();
    let byte_level = file()["pre_tokenizer"]["pretokenizers"][1].clone();
    let mut lines = file();
    for merge in lines["model"]["merges"].as_array_mut().unwrap() {
        if let Some([left, right]) = merge.as_array().map(Vec::as_slice) {
            *merge = json!(format!("{} {}", left.as_str().unwrap(), right.as_str().unwrap()));
        }
    }
    for same in [
        lines,
        with("/normalizer", json!({"type": "Sequence", "normalizers": [{"type": "NFC"}]})),
        with("/decoder", json!({"type": "Sequence", "decoders": [byte_level]})),
        with("/truncation", json!({"max_length": 0, "stride": 9, "strategy": "LongestFirst", "direction": "Right"})),
        with("/padding", json!({"strategy": {"Fixed": 4_000_000_000_u64}, "pad_id": 0})),
        with("/post_processor", json!({"type": "TemplateProcessing", "single": [], "pair": []})),
    ] {
        assert_eq!(load(&same).unwrap().encode("naïve text 12").unwrap(), wanted);
    }
}

#[test]
fn contradictions_are_found() {
    let longest = "z".repeat(300);
    for (pointer, value) in [
        // Both parts exist, the result does not: building the merges without a check would run over a buffer.
        ("/model/merges", json!([["Ġ", "Ġ"], ["<|endoftext|>", &longest]])),
        ("/model/merges", json!([["!", "!!!!!!!!!!!"]])),
        ("/model/merges", json!([["!", "\""]])),
        ("/model/vocab/extra", json!(0)),
        ("/model/vocab/!", json!(1)),
        ("/model/vocab", json!({"a": 0})),
        ("/added_tokens/0/id", json!(100)),
        ("/added_tokens/0/id", json!(2000)),
        ("/added_tokens/1/content", json!("<|endoftext|>")),
    ] {
        match load(&with(pointer, value.clone())) {
            Err(TextError::InconsistentTokenizer { .. }) => {}
            other => panic!("{pointer} = {value}: {other:?}"),
        }
    }
}

#[test]
fn wrong_types_and_sizes() {
    for (pointer, value) in [
        ("/model/vocab", json!([["a", 0]])),
        ("/model/vocab/!", json!("0")),
        ("/model/vocab/!", json!(-1)),
        ("/model/vocab/!", json!(0.5)),
        ("/model/merges", json!({})),
        ("/model/merges", json!(["nospace"])),
        ("/model/merges", json!([["a", "b", "c"]])),
        ("/model/merges", json!([[1, 2]])),
        ("/added_tokens", json!({})),
        ("/added_tokens", json!([3])),
        ("/added_tokens/0/content", json!("")),
        ("/added_tokens/0/id", json!(null)),
        ("/pre_tokenizer/pretokenizers/0/pattern", json!(7)),
    ] {
        match load(&with(pointer, value.clone())) {
            Err(TextError::Field { .. }) => {}
            other => panic!("{pointer} = {value}: {other:?}"),
        }
    }
    for (pointer, id) in [("/model/vocab/!", u64::from(u32::MAX)), ("/added_tokens/0/id", u64::MAX)] {
        assert!(
            matches!(load(&with(pointer, json!(id))), Err(TextError::TooLarge { got, .. }) if got == id),
            "{pointer}"
        );
    }
}

/// Small JSON values of every type.
fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (0_u32..600).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop::sample::select(vec![
            "",
            " ",
            "a",
            "Ġ",
            "BPE",
            "NFC",
            "Sequence",
            "ByteLevel",
            "Split",
            "(((",
            "<|im_end|>"
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        let name =
            prop::sample::select(vec!["type", "pattern", "Regex", "id", "content", "vocab", "merges", "normalizers"]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((name, inner), 0..4).prop_map(|fields| Value::Object(
                fields.into_iter().map(|(k, v)| (k.to_owned(), v)).collect::<Map<_, _>>()
            )),
        ]
    })
}

proptest! {
    #[test]
    fn any_value_anywhere_is_an_error_or_a_tokenizer(
        pointer in prop::sample::select(vec![
            "/model", "/model/type", "/model/vocab", "/model/merges", "/model/merges/0", "/model/merges/5", "/model/vocab/!",
            "/model/dropout", "/model/ignore_merges", "/normalizer", "/pre_tokenizer", "/pre_tokenizer/pretokenizers",
            "/pre_tokenizer/pretokenizers/0", "/pre_tokenizer/pretokenizers/0/pattern",
            "/pre_tokenizer/pretokenizers/1", "/decoder", "/added_tokens", "/added_tokens/0", "/added_tokens/3/content",
            "/added_tokens/3/id", "/added_tokens/3/special", "/added_tokens/3/normalized", "/truncation", "/version",
        ]),
        value in value(),
    ) {
        if let Ok(tokenizer) = load(&with(pointer, value)) {
            let ids = tokenizer.encode("Hello <|im_end|> <think> naïve\n").unwrap();
            prop_assert!(ids.iter().all(|&id| tokenizer.token_bytes(id).is_some()));
            let _ = tokenizer.decode(&ids, true);
            let _ = tokenizer.encode_plain("Hello <|im_end|>").unwrap();
        }
    }

    #[test]
    fn cut_and_flipped_bytes_do_not_panic(cut in 0_usize..25_319, flip in 0_usize..25_319, bit in 0_u32..8) {
        let mut bytes = serde_json::to_vec(&file()).unwrap();
        prop_assert!(Tokenizer::from_bytes(&bytes[..cut.min(bytes.len() - 1)]).is_err());
        let flip = flip % bytes.len();
        bytes[flip] ^= 1 << bit;
        if let Ok(tokenizer) = Tokenizer::from_bytes(&bytes) {
            let _ = tokenizer.encode("Hello <|im_end|> naïve\n");
        }
    }
}
