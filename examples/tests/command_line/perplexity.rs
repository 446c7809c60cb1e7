//! `perplexity`.

use serde_json::json;

use crate::program::{file, run};

const PERPLEXITY: &str = env!("CARGO_BIN_EXE_perplexity");

#[test]
fn the_shipped_documents_are_the_default() {
    let json = run(PERPLEXITY, &["--max-tokens", "1024", "--per-token", "--json"]).json();
    assert_eq!((&json["tokens"], &json["scored"], &json["windows"]), (&json!(1024), &json!(1023), &json!(1)));
    // The first window of the reference.
    let nll = json["nll"].as_f64().unwrap();
    assert!((nll - 1.035289).abs() < 1e-4, "{nll}");
    assert!((json["perplexity"].as_f64().unwrap() - nll.exp()).abs() < 1e-12);
    assert_eq!(json["per_window"], json!([nll]));
    let tokens = json["token_nll"].as_array().unwrap();
    assert!(tokens.len() == 1024 && tokens[0].is_null());
    let mean = tokens.iter().filter_map(serde_json::Value::as_f64).sum::<f64>() / 1023.0;
    assert!((mean - nll).abs() < 1e-12);
}

#[test]
fn texts_documents_and_ids_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let plain = file(&folder, "a.txt", "A vector is a contiguous growable array type. <|im_end|>");
    let plain = run(PERPLEXITY, &["--text", &plain, "--json"]).json();
    let documents = file(&folder, "a.json", json!(["A vector", "is <|im_end|>"]).to_string());
    let documents = run(PERPLEXITY, &["--text", &documents, "--window", "8", "--json"]).json();
    assert!(plain["nll"].as_f64().unwrap() > 0.0);
    // Four or so tokens, the characters of what looks like a special token, and two separators.
    assert!(documents["tokens"].as_u64().unwrap() > 10, "{documents}");
    assert!(documents["windows"].as_u64().unwrap() > 1);

    let list = file(&folder, "ids.json", "[2, 1835, 3367, 1042, 40]");
    let object = file(&folder, "object.json", r#"{"token_ids": [2, 1835, 3367, 1042, 40], "text": "x"}"#);
    let list = run(PERPLEXITY, &["--token-ids", &list, "--json"]).json();
    assert_eq!(list, run(PERPLEXITY, &["--token-ids", &object, "--json"]).json());
    assert_eq!((&list["tokens"], &list["scored"]), (&json!(5), &json!(4)));
}

#[test]
fn formats_are_compared() {
    let json = run(PERPLEXITY, &["--max-tokens", "256", "--weights", "q4", "--reference", "keep", "--json"]).json();
    let reference = &json["reference"];
    assert_eq!((&json["weights"], &reference["weights"]), (&json!("q4"), &json!("keep")));
    assert!(reference["kl"].as_f64().unwrap() > 0.01);
    assert!((0.5..1.0).contains(&reference["top1_agreement"].as_f64().unwrap()));
    assert!(reference["nll"].as_f64().unwrap() < json["nll"].as_f64().unwrap());
    let text = run(PERPLEXITY, &["--max-tokens", "256", "--weights", "fp8", "--reference", "keep"]);
    assert_eq!((text.status, text.stderr.as_str()), (0, ""));
    for words in ["256 tokens in 1 windows", "same top token", "fp8", "reference", "%"] {
        assert!(text.stdout.contains(words), "{words}: {}", text.stdout);
    }
}

#[test]
fn what_cannot_be_scored_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let ids = |content: &str| file(&folder, "ids.json", content);
    run(PERPLEXITY, &["--token-ids", &ids("[1, 6143, 6144]")]).fails(1, &["6144", "index 2", "6144 rows"]);
    run(PERPLEXITY, &["--token-ids", &ids("[1, -3]")]).fails(1, &["element 1 is -3"]);
    run(PERPLEXITY, &["--token-ids", &ids("[1, 99999999999]")]).fails(1, &["99999999999"]);
    run(PERPLEXITY, &["--token-ids", &ids("{\"ids\": [1]}")]).fails(1, &["token_ids"]);
    run(PERPLEXITY, &["--token-ids", &ids("[1, 2")]).fails(1, &["not JSON"]);
    run(PERPLEXITY, &["--token-ids", &ids("[5]")]).fails(1, &["1 tokens", "2 are needed"]);
    run(PERPLEXITY, &["--text", &file(&folder, "d.json", "{}")]).fails(1, &["list of strings"]);
    run(PERPLEXITY, &["--text", &file(&folder, "empty.txt", "")]).fails(1, &["0 tokens"]);
    run(PERPLEXITY, &["--text", &file(&folder, "latin.txt", b"caf\xe9 au lait")]).fails(1, &["latin.txt", "UTF-8"]);
    run(PERPLEXITY, &["--text", "/no/such/file"]).fails(1, &["/no/such/file"]);
    run(PERPLEXITY, &["--text", "a", "--token-ids", "b"]).fails(2, &["--token-ids"]);
    run(PERPLEXITY, &["--window", "1", "--max-tokens", "64"]).fails(2, &["--window"]);
    run(PERPLEXITY, &["--window", "99999999", "--max-tokens", "64"]).fails(2, &["99999999", "8192"]);
    run(PERPLEXITY, &["--max-tokens", "0"]).fails(2, &["--max-tokens"]);
    // A window is not paid for beyond the text.
    run(PERPLEXITY, &["--window", "8192", "--max-tokens", "8", "--json"]).json();
    run(PERPLEXITY, &["--per-token"]).fails(2, &["--json"]);
    run(PERPLEXITY, &["--reference", "q3"]).fails(2, &["q3", "bridge-fp8"]);
}

#[test]
fn every_recipe_is_measured() {
    let json = run(PERPLEXITY, &["--table", "--max-tokens", "96", "--json"]).json();
    let rows = json["recipes"].as_array().unwrap();
    let row = |name: &str| rows.iter().find(|r| r["weights"] == name).unwrap_or_else(|| panic!("{name}: {json}"));
    let stored = row("keep");
    assert_eq!((&rows[0], &stored["kl"], &stored["top1_agreement"]), (stored, &json!(0.0), &json!(1.0)));
    for name in ["f32", "q4", "w8", "groupwise", "nvfp4", "fp8", "fp8-a8", "nvfp4,bridge-fp8", "nvfp4,bridge-fp8-amax"]
    {
        let row = row(name);
        assert_eq!(row["accepted"].as_array().unwrap().len(), 3);
        assert!((1.0..4.0).contains(&row["tokens_per_round"].as_f64().unwrap()), "{row}");
        assert_eq!(row["weight_bytes"].as_u64() < stored["weight_bytes"].as_u64(), name != "f32", "{row}");
        assert_eq!(row["kl"].as_f64().unwrap() > 0.0, name != "f32", "{row}");
    }
    run(PERPLEXITY, &["--table", "--weights", "q4"]).fails(2, &["--table"]);
}
