//! What reading a tokenizer, rendering a chat or matching stop strings can report.

use std::path::{Path, PathBuf};

/// Result of the functions in [`crate::text`].
pub type TextResult<T> = Result<T, TextError>;

/// An error of the text code with the facts needed to act on it; [`TextError::help`] says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file that must exist is not there.
    #[error("{file} does not exist", file = .file.display())]
    Missing {
        /// The file looked for.
        file: PathBuf,
    },
    /// A file exists and cannot be read.
    #[error("cannot read {file}: {reason}", file = .file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// What the operating system said.
        reason: String,
    },
    /// Something is larger than this crate accepts.
    #[error("{what} is {got}, the limit is {limit}")]
    TooLarge {
        /// What was measured, with its unit.
        what: String,
        /// Its size.
        got: u64,
        /// The largest size accepted.
        limit: u64,
    },
    /// Text that should be JSON is not.
    #[error("{what} is not valid JSON: {reason}")]
    NotJson {
        /// The file or the kind of text.
        what: String,
        /// Where and why parsing stopped.
        reason: String,
    },
    /// A JSON field has another type or value than expected.
    #[error("{what}: {field} is {got}, expected {expected}")]
    Field {
        /// The file or the kind of text.
        what: String,
        /// Path of the field.
        field: String,
        /// What it had to be.
        expected: &'static str,
        /// What it was, shortened.
        got: String,
    },
    /// The tokenizer's model is not byte-pair encoding.
    #[error("the tokenizer's model is {found}, only BPE is supported")]
    NotBpe {
        /// Model type named in the file.
        found: String,
    },
    /// The tokenizer uses a component this crate does not implement.
    #[error("the tokenizer's {part} is {found}, supported: {supported}")]
    UnsupportedTokenizer {
        /// Which component.
        part: &'static str,
        /// What the file asks for.
        found: String,
        /// What is implemented.
        supported: &'static str,
    },
    /// Vocabulary, merges and added tokens contradict each other.
    #[error("inconsistent tokenizer: {reason}")]
    InconsistentTokenizer {
        /// The contradiction.
        reason: String,
    },
    /// Text could not be split into tokens.
    #[error("cannot encode: {reason}")]
    Encode {
        /// What the tokenizer reported.
        reason: String,
    },
    /// A chat was to be rendered and the checkpoint has no chat template.
    #[error("no chat template in {dir}", dir = .dir.display())]
    NoChatTemplate {
        /// The checkpoint folder.
        dir: PathBuf,
    },
    /// A chat template of this name does not exist.
    #[error("no chat template named {name:?}, the checkpoint has {available:?}")]
    NoSuchTemplate {
        /// The name asked for.
        name: String,
        /// Names that exist.
        available: Vec<String>,
    },
    /// A chat template does not parse.
    #[error("chat template {name:?}, line {line}: {reason}")]
    TemplateSyntax {
        /// Name of the template.
        name: String,
        /// 1-based line, 0 when unknown.
        line: usize,
        /// What the parser reported.
        reason: String,
    },
    /// The chat template refused the conversation through `raise_exception`.
    #[error("the chat template refuses the conversation: {message}")]
    TemplateRaised {
        /// The template's own words.
        message: String,
    },
    /// Rendering failed.
    #[error("rendering chat template {name:?}, line {line}: {reason}")]
    TemplateRender {
        /// Name of the template.
        name: String,
        /// 1-based line, 0 when unknown.
        line: usize,
        /// What the engine reported.
        reason: String,
    },
    /// The template used up its budget of steps and bytes.
    #[error("chat template {name:?} used up its budget of {fuel} steps")]
    TemplateFuel {
        /// Name of the template.
        name: String,
        /// The budget.
        fuel: u64,
    },
    /// An extra template variable has the name of a fixed one.
    #[error("template variable {name:?} is set by the renderer")]
    ReservedVariable {
        /// The name.
        name: String,
    },
    /// A message of the conversation cannot be used.
    #[error("message {index}: {field} is {got}, expected {expected}")]
    Message {
        /// Position in the list, from 0.
        index: usize,
        /// Which field.
        field: String,
        /// What it had to be.
        expected: &'static str,
        /// What it was, shortened.
        got: String,
    },
    /// A stop string is empty and would match everywhere.
    #[error("stop string {index} is empty")]
    EmptyStopString {
        /// Position in the list, from 0.
        index: usize,
    },
}

impl TextError {
    /// The same with the folder before a file that is named without one.
    pub(super) fn in_folder(mut self, dir: &Path) -> Self {
        match &mut self {
            Self::NotJson { what, .. } | Self::Field { what, .. } | Self::TooLarge { what, .. }
                if !what.contains(['/', '\\']) =>
            {
                *what = dir.join(&*what).display().to_string();
            }
            Self::InconsistentTokenizer { reason } => *reason = format!("{}: {reason}", dir.display()),
            _ => {}
        }
        self
    }

    /// One sentence that says what to do about the error.
    ///
    /// ```
    /// use ninfer_models::text::TextError;
    ///
    /// let error = TextError::EmptyStopString { index: 0 };
    /// assert!(error.help().contains("non-empty"));
    /// ```
    #[must_use]
    pub fn help(&self) -> &'static str {
        match self {
            Self::Missing { .. } => "give the folder of a complete checkpoint, with tokenizer.json beside config.json",
            Self::Unreadable { .. } => "check that the path is a readable file",
            Self::TooLarge { .. } => "use the original file of the checkpoint, or a smaller input",
            Self::NotJson { .. } => "the file is damaged or a download placeholder: fetch it again",
            Self::Field { .. } => "correct the named field in the file",
            Self::NotBpe { .. } => "use a checkpoint of the Qwen3.5 family, whose tokenizer is byte-level BPE",
            Self::UnsupportedTokenizer { .. } => "use the tokenizer.json that the checkpoint was published with",
            Self::InconsistentTokenizer { .. } => "the file was edited or damaged: fetch tokenizer.json again",
            Self::Encode { .. } => "report the text that fails together with the checkpoint's name",
            Self::NoChatTemplate { .. } => {
                "add chat_template.jinja to the folder, or send a raw prompt instead of a chat"
            }
            Self::NoSuchTemplate { .. } => "choose one of the listed names",
            Self::TemplateSyntax { .. } => "correct the template at the named line, or send a raw prompt",
            Self::TemplateRaised { .. } => "change the conversation as the message says",
            Self::TemplateRender { .. } => {
                "compare the variables the template reads with the messages and options given"
            }
            Self::TemplateFuel { .. } => "shorten the conversation, or raise the budget if the template is trusted",
            Self::ReservedVariable { .. } => "use the matching option of ChatOptions instead",
            Self::Message { .. } => "correct the named message",
            Self::EmptyStopString { .. } => "give only non-empty stop strings",
        }
    }
}
