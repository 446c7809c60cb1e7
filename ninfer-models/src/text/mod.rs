//! Text in and out: tokenizer, chat template, stop conditions, and the parts of a reply.
//!
//! | step | type |
//! |---|---|
//! | read a checkpoint folder | [`Text`] |
//! | conversation to prompt | [`ChatTemplate`], [`Message`], [`ChatOptions`], [`Prompt`] |
//! | prompt to ids | [`Tokenizer`] |
//! | sampling settings of the publisher | [`GenerationDefaults`] |
//! | ids to text, and when to stop | [`TextStream`] of [`StreamDecoder`], [`StopTokens`] and [`StopStrings`] |
//! | text to reasoning, content and tool calls | [`ReplyParser`] |
//!
//! Nothing here knows the model; ids go in and out. A whole turn:
//!
//! ```no_run
//! use ninfer_models::text::{ChatOptions, Message, ReplyParser, Text};
//!
//! # fn generate(ids: &[u32]) -> impl Iterator<Item = u32> { ids.to_vec().into_iter() }
//! let text = Text::load("checkpoint")?;
//! let prompt = text.render(&[Message::user("What is 2 + 2?")], &ChatOptions::new())?;
//! let ids = text.tokenizer().encode(&prompt.text)?;
//! let mut stream = text.stream();
//! let mut reply = ReplyParser::new(&prompt);
//! for id in generate(&ids) {
//!     if let Some(chunk) = stream.push(id) {
//!         println!("{:?}", reply.push(&chunk));
//!     }
//!     if stream.stopped().is_some() {
//!         break;
//!     }
//! }
//! println!("{:?}", reply.push(&stream.finish()));
//! println!("{:?}", reply.finish());
//! # Ok::<(), ninfer_models::text::TextError>(())
//! ```

mod bundle;
mod byte_alphabet;
mod chat_options;
mod chat_template;
mod clock;
mod error;
mod generation_defaults;
mod generation_tag;
mod json;
mod message;
mod prompt;
mod python;
mod reply;
mod source;
mod stop_strings;
mod stop_tokens;
mod stream_decoder;
mod text_stream;
mod tokenizer;
mod tokenizer_file;
mod tool_syntax;
mod vocabulary;

pub use bundle::Text;
pub use chat_options::ChatOptions;
pub use chat_template::{ChatTemplate, DEFAULT_FUEL, MAX_PROMPT_BYTES};
pub use error::{TextError, TextResult};
pub use generation_defaults::GenerationDefaults;
pub use message::{Message, ToolCall};
pub use prompt::Prompt;
pub use reply::{ReplyParser, ReplyPart};
pub use stop_strings::{StopMatch, StopMatcher, StopStrings};
pub use stop_tokens::{StopSource, StopTokens};
pub use stream_decoder::StreamDecoder;
pub use text_stream::{Stop, StopReason, TextStream};
pub use tokenizer::{MAX_TOKENIZER_BYTES, Tokenizer};
