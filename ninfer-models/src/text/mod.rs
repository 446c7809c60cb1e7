//! Text in and out: tokenizer, chat template, stop conditions.

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
mod stop_strings;
mod stop_tokens;
mod stream_decoder;
mod text_stream;
mod tokenizer;
mod tokenizer_file;
mod vocabulary;

pub use bundle::Text;
pub use chat_options::ChatOptions;
pub use chat_template::{ChatTemplate, DEFAULT_FUEL, MAX_PROMPT_BYTES};
pub use error::{TextError, TextResult};
pub use generation_defaults::GenerationDefaults;
pub use message::{Message, ToolCall};
pub use prompt::Prompt;
pub use stop_strings::{StopMatch, StopMatcher, StopStrings};
pub use stop_tokens::{StopSource, StopTokens};
pub use stream_decoder::StreamDecoder;
pub use text_stream::{Stop, StopReason, TextStream};
pub use tokenizer::{MAX_TOKENIZER_BYTES, Tokenizer};
