//! Writing to standard output without panics when nobody reads it.

use std::io::{self, Write};

use serde::Serialize;

use crate::{Failure, Result};

/// Writes text as it is and passes it on at once.
///
/// # Errors
/// [`Failure::Output`].
pub fn write(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Writes one JSON value as one line.
///
/// # Errors
/// [`Failure::Output`].
pub fn write_json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(value).map_err(|e| Failure::Output(io::Error::other(e)))?;
    write(&(text + "\n"))
}

/// Writes to standard error; a reader that has gone is no failure.
pub fn remark(text: &str) {
    let _ = writeln!(io::stderr(), "{}", text.trim_end_matches('\n'));
}
