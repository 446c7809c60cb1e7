//! Token streams to measure a model on.

use std::io::Read;
use std::path::Path;

use ninfer_models::Config;
use ninfer_models::text::Tokenizer;
use serde_json::Value;

use crate::{Failure, Result};

/// Largest text that is read, in bytes.
const MAX_TEXT_BYTES: u64 = 1 << 30;
/// The token that this family puts behind a document.
const END_OF_TEXT: &str = "<|endoftext|>";

/// Tokens of a text file.
///
/// A file named `*.json` holds a list of documents (strings): each is tokenised by itself and followed by the end-of-text
/// token. Any other file is one document, as it stands. Nothing in a document counts as a special token.
///
/// # Errors
/// [`Failure::Unreadable`], [`Failure::Content`] for JSON of another form or text that is not UTF-8.
pub fn from_text(file: &Path, tokenizer: &Tokenizer, config: &Config) -> Result<Vec<u32>> {
    let text = read(file)?;
    if file.extension().is_none_or(|extension| extension != "json") {
        return Ok(tokenizer.encode_plain(&text)?);
    }
    let documents: Vec<String> = serde_json::from_str(&text)
        .map_err(|error| Failure::content(file, format!("expected a JSON list of strings: {error}")))?;
    let end = tokenizer.token_to_id(END_OF_TEXT).or(config.pad).or(config.eos.first().copied());
    let mut tokens = Vec::new();
    for document in &documents {
        tokens.extend(tokenizer.encode_plain(document)?);
        tokens.extend(end);
    }
    Ok(tokens)
}

/// Tokens of a JSON file: a list of ids, or an object whose `token_ids` is one.
///
/// # Errors
/// [`Failure::Unreadable`], [`Failure::Content`], [`Failure::TokenId`] for an id that is not below `vocab`.
pub fn from_token_ids(file: &Path, vocab: usize) -> Result<Vec<u32>> {
    let value: Value =
        serde_json::from_str(&read(file)?).map_err(|error| Failure::content(file, format!("not JSON: {error}")))?;
    let list = value.get("token_ids").unwrap_or(&value);
    let Value::Array(list) = list else {
        return Err(Failure::content(file, "expected a list of token ids, or an object with `token_ids`"));
    };
    let id = |(index, value): (usize, &Value)| {
        let wrong = || Failure::content(file, format!("element {index} is {value}, expected a token id"));
        let id = value.as_u64().ok_or_else(wrong)?;
        let legal = u32::try_from(id).ok().filter(|&small| (small as usize) < vocab);
        legal.ok_or(Failure::TokenId { id, index, vocab })
    };
    list.iter().enumerate().map(id).collect()
}

fn read(file: &Path) -> Result<String> {
    let unreadable = |error| Failure::unreadable(file, &error);
    let mut text = String::new();
    let source = std::fs::File::open(file).map_err(unreadable)?;
    // Special files report no length and may never end.
    source.take(MAX_TEXT_BYTES + 1).read_to_string(&mut text).map_err(unreadable)?;
    if text.len() as u64 > MAX_TEXT_BYTES {
        return Err(Failure::content(file, format!("more than {MAX_TEXT_BYTES} bytes, the limit")));
    }
    Ok(text)
}
