//! Bounded reading of small JSON files and typed access to their fields.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use serde_json::Value;

use super::error::{TextError, TextResult};

/// Largest configuration or template file that is read, in bytes.
pub(super) const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Reads a whole file of at most `limit` bytes.
pub(super) fn read_bytes(file: &Path, limit: u64) -> TextResult<Vec<u8>> {
    let unreadable =
        |error: &std::io::Error| TextError::Unreadable { file: file.to_path_buf(), reason: error.to_string() };
    let handle = File::open(file).map_err(|error| match error.kind() {
        ErrorKind::NotFound => TextError::Missing { file: file.to_path_buf() },
        _ => unreadable(&error),
    })?;
    let mut bytes = Vec::new();
    handle.take(limit.saturating_add(1)).read_to_end(&mut bytes).map_err(|error| unreadable(&error))?;
    if bytes.len() as u64 > limit {
        let got = std::fs::metadata(file).map_or(bytes.len() as u64, |meta| meta.len());
        return Err(TextError::TooLarge { what: format!("{} in bytes", file.display()), got, limit });
    }
    Ok(bytes)
}

/// Reads a file as UTF-8 text.
pub(super) fn read_text(file: &Path) -> TextResult<String> {
    String::from_utf8(read_bytes(file, MAX_CONFIG_BYTES)?)
        .map_err(|error| TextError::Unreadable { file: file.to_path_buf(), reason: error.to_string() })
}

/// Parses JSON and names the source in the error.
pub(super) fn parse(bytes: &[u8], what: &str) -> TextResult<Value> {
    serde_json::from_slice(bytes)
        .map_err(|error| TextError::NotJson { what: what.to_owned(), reason: error.to_string() })
}

/// A value in a few words, for error messages.
pub(super) fn shorten(value: &Value) -> String {
    const LONGEST: usize = 60;
    match value {
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(fields) => format!("an object of {} fields", fields.len()),
        other => {
            let text = other.to_string();
            if text.chars().count() <= LONGEST {
                text
            } else {
                let mut short: String = text.chars().take(LONGEST).collect();
                short.push('…');
                short
            }
        }
    }
}

/// Builds [`TextError::Field`].
pub(super) fn field_error(what: &str, field: &str, expected: &'static str, got: &Value) -> TextError {
    TextError::Field { what: what.to_owned(), field: field.to_owned(), expected, got: shorten(got) }
}
