//! Whether `generate --json` gave an answer.

use std::io::Read;

use serde_json::Value;

use crate::report::Report;

/// Longest output that is read, in bytes.
const MAX_BYTES: u64 = 16 << 20;

pub fn check(report: &mut Report) -> Result<(), String> {
    let mut text = String::new();
    let read = std::io::stdin().take(MAX_BYTES).read_to_string(&mut text);
    read.map_err(|e| format!("standard input: {e}"))?;
    report.checked(format!("answer {:?}", answer(&text)?));
    Ok(())
}

/// The text of the answer, which must not be empty.
fn answer(json: &str) -> Result<String, String> {
    let value: Value = serde_json::from_str(json).map_err(|e| format!("not JSON: {e}"))?;
    match value["text"].as_str() {
        Some(text) if !text.trim().is_empty() => Ok(text.to_owned()),
        Some(_) => Err("the text of the answer is empty".to_owned()),
        None => Err("the JSON has no member \"text\"".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_text_that_says_something_is_an_answer() {
        assert_eq!(answer(r#"{"text": "A trait.", "tokens": 3}"#).as_deref(), Ok("A trait."));
        for json in ["", "[]", "{}", r#"{"text": " \n"}"#, r#"{"text": 1}"#, r#"{"text": "a"} {}"#] {
            assert!(answer(json).is_err(), "{json}");
        }
    }
}
