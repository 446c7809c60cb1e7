//! What the model is asked.

use std::io::Read;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use ninfer_models::text::{ChatOptions, Message, Prompt, Text};

use crate::{Failure, Result};

/// The question where none is given; the shipped model answers it well.
pub const DEFAULT_QUESTION: &str = "What does `Vec::push` do?";

/// Largest `--messages` file, in bytes.
const MAX_MESSAGES_BYTES: u64 = 64 << 20;

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Yes.
    On,
    /// No.
    Off,
}

/// Options that make the prompt.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Prompt")]
pub struct PromptArguments {
    /// A question, put into the model's chat template [default: a question about `Vec::push`]
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["messages", "raw"])]
    pub prompt: Option<String>,
    /// A conversation: a JSON list of objects with `role` and `content`, or an object whose `messages` is one
    #[arg(long, value_name = "FILE.json", conflicts_with = "raw")]
    pub messages: Option<PathBuf>,
    /// Text to continue as it stands, without a template; special tokens written in it count as such
    #[arg(long, value_name = "TEXT")]
    pub raw: Option<String>,
    /// A system message in front of the question
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["messages", "raw"])]
    pub system: Option<String>,
    /// Whether the model thinks before it answers [default: what the template does]
    #[arg(long, value_name = "on|off", hide_possible_values = true, conflicts_with = "raw")]
    pub thinking: Option<Switch>,
}

impl PromptArguments {
    /// Whether nothing was asked, so that the question is [`DEFAULT_QUESTION`].
    #[must_use]
    pub fn is_default(&self) -> bool {
        self.prompt.is_none() && self.messages.is_none() && self.raw.is_none()
    }

    /// The text of the prompt.
    ///
    /// # Errors
    /// [`Failure::Usage`] for an empty prompt, [`Failure::Unreadable`], and what the template reports.
    pub fn render(&self, text: &Text) -> Result<Prompt> {
        let question = self.prompt.as_deref().unwrap_or(DEFAULT_QUESTION);
        if self.raw.as_deref().unwrap_or(question).is_empty() {
            return Err(Failure::usage("the prompt is empty", "give some text after --prompt or --raw"));
        }
        if let Some(raw) = &self.raw {
            return Ok(Prompt::new(raw.clone()));
        }
        let messages = match &self.messages {
            Some(file) => Message::list_from_json(&read(file)?)?,
            None => self.system.iter().map(Message::system).chain([Message::user(question)]).collect(),
        };
        if messages.is_empty() {
            return Err(Failure::usage("--messages holds no message", "put at least one message into the list"));
        }
        let options = match self.thinking {
            None => ChatOptions::new(),
            Some(switch) => ChatOptions::new().with_thinking(switch == Switch::On),
        };
        Ok(text.render(&messages, &options)?)
    }

    /// The prompt as token ids; never empty.
    ///
    /// # Errors
    /// As [`PromptArguments::render`].
    pub fn encode(&self, text: &Text) -> Result<Vec<u32>> {
        let ids = text.tokenizer().encode(&self.render(text)?.text)?;
        if ids.is_empty() {
            return Err(Failure::usage("the prompt has no tokens", "give some text after --prompt or --raw"));
        }
        Ok(ids)
    }
}

fn read(file: &std::path::Path) -> Result<Vec<u8>> {
    let unreadable = |error| Failure::unreadable(file, &error);
    let mut bytes = Vec::new();
    let source = std::fs::File::open(file).map_err(unreadable)?;
    // Special files report no length and may never end.
    source.take(MAX_MESSAGES_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MAX_MESSAGES_BYTES {
        return Err(Failure::content(file, format!("more than {MAX_MESSAGES_BYTES} bytes, the limit")));
    }
    Ok(bytes)
}
