//! What a program fails with, and how it says so.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ninfer_models::text::TextError;

/// Result of everything in this crate.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

/// A reason to end a program, printed as one line `error: …` and one line `help: …`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// Options that do not go together, or have values that are never legal.
    #[error("{message}")]
    Usage {
        /// What is wrong.
        message: String,
        /// What to do.
        help: String,
    },
    /// A device, a plan or an operation refused.
    #[error(transparent)]
    Core(#[from] ninfer_core::Error),
    /// A checkpoint cannot be used.
    #[error(transparent)]
    Models(#[from] ninfer_models::Error),
    /// Generation refused.
    #[error(transparent)]
    Spec(#[from] ninfer_spec::Error),
    /// Tokenizer, chat template or messages cannot be used.
    #[error(transparent)]
    Text(#[from] TextError),
    /// No model was named and the shipped one is not there.
    #[error("no model was named, and the shipped one is in none of: {places}")]
    NoShippedModel {
        /// Folders that were tried.
        places: String,
    },
    /// A file given on the command line cannot be read.
    #[error("cannot read {}: {message}", .file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// The system's words.
        message: String,
    },
    /// A file or folder cannot be written.
    #[error("cannot write {}: {message}", .path.display())]
    Unwritable {
        /// The file or folder.
        path: PathBuf,
        /// Kind of failure.
        kind: io::ErrorKind,
        /// The system's words.
        message: String,
    },
    /// A folder that would be made is there already.
    #[error("{} exists", .path.display())]
    Exists {
        /// The folder.
        path: PathBuf,
        /// What to do.
        help: String,
    },
    /// A file given on the command line does not hold what it should.
    #[error("{}: {message}", .file.display())]
    Content {
        /// The file.
        file: PathBuf,
        /// What was found and what was expected.
        message: String,
    },
    /// A token id that the model has no row for.
    #[error("token id {id} at index {index} is out of range, the model has {vocab} rows")]
    TokenId {
        /// The id.
        id: u64,
        /// Its place in the list.
        index: usize,
        /// Rows of the vocabulary.
        vocab: usize,
    },
    /// There is nothing to score.
    #[error("the text has {tokens} tokens, at least 2 are needed")]
    TooFewTokens {
        /// Tokens of the text.
        tokens: usize,
    },
    /// Logits that are not numbers.
    #[error("the logits at token {index} are not finite")]
    NotFinite {
        /// Index in the token stream.
        index: usize,
    },
    /// Standard output cannot be written.
    #[error("cannot write the output: {0}")]
    Output(#[from] io::Error),
}

impl Failure {
    /// Options that cannot be honoured.
    pub fn usage(message: impl Into<String>, help: impl Into<String>) -> Self {
        Self::Usage { message: message.into(), help: help.into() }
    }

    /// A file that could not be read.
    #[must_use]
    pub fn unreadable(file: &Path, error: &io::Error) -> Self {
        Self::Unreadable { file: file.to_owned(), message: error.to_string() }
    }

    /// A file or folder that could not be written.
    #[must_use]
    pub fn unwritable(path: &Path, error: &io::Error) -> Self {
        Self::Unwritable { path: path.to_owned(), kind: error.kind(), message: error.to_string() }
    }

    /// A file whose content is not what it should be.
    pub fn content(file: &Path, message: impl Into<String>) -> Self {
        Self::Content { file: file.to_owned(), message: message.into() }
    }

    /// One line on what to do.
    #[must_use]
    pub fn help(&self) -> String {
        let text = match self {
            Self::Usage { help, .. } | Self::Exists { help, .. } => return help.clone(),
            Self::Core(error) => error.help(),
            Self::Models(error) => error.help(),
            Self::Spec(error) => error.help(),
            Self::Text(error) => error.help(),
            Self::NoShippedModel { .. } => "name the folder of a checkpoint; every program's --help says how",
            Self::Unreadable { .. } => "check that the path exists, is a file and may be read",
            Self::Unwritable { kind: io::ErrorKind::StorageFull, .. } => {
                "free space on the disk, or write to another one"
            }
            Self::Unwritable { .. } => "check that the folder exists and may be written to",
            Self::Content { .. } => "correct the file; --help says what it has to hold",
            Self::TokenId { .. } => "use the ids of this model's own tokenizer",
            Self::TooFewTokens { .. } => "give a longer text",
            Self::NotFinite { .. } => "check the checkpoint for damaged weights; `inspect` lists the tensors",
            Self::Output(_) => "check the disk or the program that reads the output",
        };
        text.to_owned()
    }

    /// The exit status: 2 for the command line, 1 for everything else, 0 where only the reader of the output is gone.
    #[must_use]
    pub fn status(&self) -> u8 {
        match self {
            Self::Usage { .. } => 2,
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => 0,
            _ => 1,
        }
    }
}

/// Prints a failure to standard error and gives the exit status.
#[must_use]
pub fn exit(result: Result<()>) -> ExitCode {
    let Err(failure) = result else { return ExitCode::SUCCESS };
    let status = failure.status();
    if status != 0 {
        complain(&failure.to_string(), &failure.help());
    }
    ExitCode::from(status)
}

/// Prints one line `error: …` and one line `help: …` to standard error.
pub fn complain(message: &str, help: &str) {
    // Nobody is left to be told if standard error is gone.
    let _ = writeln!(io::stderr(), "error: {}\nhelp: {}", one_line(message), one_line(help));
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_tell_usage_from_the_rest() {
        assert_eq!(Failure::usage("a", "b").status(), 2);
        assert_eq!(Failure::from(ninfer_core::Error::BufferBusy).status(), 1);
        assert_eq!(Failure::from(io::Error::from(io::ErrorKind::BrokenPipe)).status(), 0);
        assert_eq!(Failure::from(io::Error::from(io::ErrorKind::StorageFull)).status(), 1);
    }

    #[test]
    fn messages_are_one_line() {
        assert_eq!(one_line("a\n  b\tc\n"), "a b c");
    }
}
