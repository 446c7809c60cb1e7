//! Rendering of conversations with the checkpoint's own Jinja template.

use std::error::Error as StdError;
use std::fmt;
use std::io::{self, Write};
use std::time::SystemTime;

use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::{Map, Value as Json};

use super::chat_options::ChatOptions;
use super::clock::strftime;
use super::error::{TextError, TextResult};
use super::message::Message;
use super::prompt::Prompt;
use super::{generation_tag, python};

/// Steps a template may use by default; 64 bytes of text count as one step, so this bounds time and memory.
pub const DEFAULT_FUEL: u64 = 4_000_000;
/// Largest prompt a template may write, in bytes.
pub const MAX_PROMPT_BYTES: u64 = 64 << 20;

/// Variables the renderer sets itself.
const RESERVED: [&str; 5] = ["messages", "tools", "documents", "add_generation_prompt", "strftime_now"];

/// A checkpoint's chat template, or several by name.
///
/// Templates see what they see in transformers: `messages`, `tools`, `add_generation_prompt`, `enable_thinking`, the
/// special tokens (`bos_token`, `eos_token`, …) and all further variables; `raise_exception`, `strftime_now` (UTC),
/// Python's string, list and dictionary methods, `tojson` in Python's spacing, and values printed as Python prints
/// them. Blocks are trimmed (`trim_blocks`, `lstrip_blocks`) and one final line feed of the file is dropped.
///
/// A template runs with a budget of steps ([`DEFAULT_FUEL`]) and of output ([`MAX_PROMPT_BYTES`]), which ends endless
/// loops and floods of text with an error. The budget does not count how deep a template nests values: one written to
/// wrap lists in lists some ten thousand times can exhaust the stack when they are freed, so take templates only from
/// where you would take weights. Conversations and variables are data and cannot do this.
///
/// ```
/// use ninfer_models::text::{ChatOptions, ChatTemplate, Message};
///
/// let source = "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
/// {%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}";
/// let template = ChatTemplate::new(source)?;
/// let prompt = template.render(&[Message::user("hi")], &ChatOptions::new())?;
/// assert_eq!(prompt.text, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n");
/// assert!(prompt.in_thinking);
/// # Ok::<(), ninfer_models::text::TextError>(())
/// ```
#[derive(Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Name and source; the first is the default.
    sources: Vec<(String, String)>,
    special_tokens: Map<String, Json>,
    fuel: u64,
}

impl ChatTemplate {
    /// The name of a checkpoint's only or main template.
    pub const DEFAULT_NAME: &'static str = "default";
    /// The name of the template that is taken when tools are given, if there is one.
    pub const TOOL_USE_NAME: &'static str = "tool_use";

    /// A single template.
    ///
    /// # Errors
    /// [`TextError::TemplateSyntax`] when it does not parse.
    pub fn new(source: impl Into<String>) -> TextResult<Self> {
        Self::named(vec![(Self::DEFAULT_NAME.to_owned(), source.into())])
    }

    /// Several templates as (name, source) pairs.
    ///
    /// # Errors
    /// [`TextError::TemplateSyntax`] when one does not parse, [`TextError::NoSuchTemplate`] when the list is empty.
    pub fn named(sources: Vec<(String, String)>) -> TextResult<Self> {
        if sources.is_empty() {
            return Err(TextError::NoSuchTemplate { name: Self::DEFAULT_NAME.to_owned(), available: Vec::new() });
        }
        let sources = sources.into_iter().map(|(name, source)| (name, generation_tag::neutralize(source))).collect();
        let template =
            Self { environment: environment(DEFAULT_FUEL), sources, special_tokens: Map::new(), fuel: DEFAULT_FUEL };
        for (name, source) in &template.sources {
            template.environment.template_from_named_str(name, source).map_err(|error| {
                let (line, reason) = describe(&error);
                TextError::TemplateSyntax { name: name.clone(), line, reason }
            })?;
        }
        Ok(template)
    }

    /// Sets the special tokens the template can read by name, such as `bos_token`.
    #[must_use]
    pub fn with_special_tokens(mut self, tokens: impl IntoIterator<Item = (String, String)>) -> Self {
        self.special_tokens = tokens.into_iter().map(|(name, token)| (name, Json::String(token))).collect();
        self
    }

    /// Sets the budget of steps.
    #[must_use]
    pub fn with_fuel(mut self, fuel: u64) -> Self {
        self.environment.set_fuel(Some(fuel));
        self.fuel = fuel;
        self
    }

    /// The names of the templates.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        self.sources.iter().map(|(name, _)| name.as_str()).collect()
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// [`TextError::TemplateRaised`] when the template refuses the conversation, [`TextError::TemplateFuel`] or
    /// [`TextError::TooLarge`] when it exceeds its budgets, [`TextError::NoSuchTemplate`],
    /// [`TextError::ReservedVariable`], and [`TextError::TemplateRender`] for everything else that goes wrong in it.
    pub fn render(&self, messages: &[Message], options: &ChatOptions) -> TextResult<Prompt> {
        let (name, source) = self.choose(options)?;
        let context = self.context(messages, options)?;
        let mut output = BoundedOutput { bytes: Vec::new(), overflow: false };
        let outcome = self
            .environment
            .template_from_named_str(name, source)
            .and_then(|template| template.render_captured_to(context, &mut output).map(drop));
        if output.overflow {
            let got = output.bytes.len() as u64 + 1;
            return Err(TextError::TooLarge {
                what: "the rendered prompt in bytes".to_owned(),
                got,
                limit: MAX_PROMPT_BYTES,
            });
        }
        outcome.map_err(|error| self.render_error(name, &error))?;
        let text = String::from_utf8(output.bytes).map_err(|error| TextError::TemplateRender {
            name: name.to_owned(),
            line: 0,
            reason: error.to_string(),
        })?;
        Ok(Prompt::new(text))
    }

    fn choose(&self, options: &ChatOptions) -> TextResult<(&str, &str)> {
        let find = |name: &str| self.sources.iter().find(|(have, _)| have == name);
        let has_tools = options.tools.as_ref().is_some_and(|tools| !tools.is_empty());
        let found = match &options.template {
            Some(name) => find(name),
            None => has_tools
                .then(|| find(Self::TOOL_USE_NAME))
                .flatten()
                .or_else(|| find(Self::DEFAULT_NAME))
                .or_else(|| self.sources.first().filter(|_| self.sources.len() == 1)),
        };
        found.map(|(name, source)| (name.as_str(), source.as_str())).ok_or_else(|| TextError::NoSuchTemplate {
            name: options.template.clone().unwrap_or_else(|| Self::DEFAULT_NAME.to_owned()),
            available: self.names().into_iter().map(str::to_owned).collect(),
        })
    }

    fn context(&self, messages: &[Message], options: &ChatOptions) -> TextResult<Value> {
        let json = |value: &Json| Value::from(Serde(value));
        let mut variables: Vec<(String, Value)> =
            self.special_tokens.iter().map(|(name, token)| (name.clone(), json(token))).collect();
        for (name, value) in &options.variables {
            if RESERVED.contains(&name.as_str()) {
                return Err(TextError::ReservedVariable { name: name.clone() });
            }
            variables.push((name.clone(), json(value)));
        }
        if let Some(thinking) = options.enable_thinking {
            variables.push(("enable_thinking".to_owned(), Value::from(thinking)));
        }
        let tools = match options.tools.as_deref() {
            None | Some([]) => Value::from(()),
            Some(tools) => Value::from(Serde(tools)),
        };
        let now = options.now;
        let clock = move |format: &str| strftime(format, now.unwrap_or_else(SystemTime::now));
        variables.extend([
            ("messages".to_owned(), Value::from(Serde(messages))),
            ("tools".to_owned(), tools),
            ("documents".to_owned(), Value::from(())),
            ("add_generation_prompt".to_owned(), Value::from(options.add_generation_prompt)),
            ("strftime_now".to_owned(), Value::from_function(clock)),
        ]);
        Ok(Value::from_pairs(variables))
    }

    fn render_error(&self, name: &str, error: &Error) -> TextError {
        let mut cause: Option<&(dyn StdError + 'static)> = Some(error);
        while let Some(current) = cause {
            if let Some(Raised(message)) = current.downcast_ref::<Raised>() {
                return TextError::TemplateRaised { message: message.clone() };
            }
            if current.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel) {
                return TextError::TemplateFuel { name: name.to_owned(), fuel: self.fuel };
            }
            cause = current.source();
        }
        let (line, reason) = describe(error);
        TextError::TemplateRender { name: name.to_owned(), line, reason }
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("names", &self.names())
            .field("special_tokens", &self.special_tokens)
            .field("fuel", &self.fuel)
            .finish_non_exhaustive()
    }
}

/// The engine with the settings and helpers of transformers.
fn environment(fuel: u64) -> Environment<'static> {
    let mut environment = Environment::new();
    let mut syntax = environment.syntax().to_builder();
    syntax.trim_blocks(true).lstrip_blocks(true).keep_trailing_newline(false);
    environment.set_syntax(syntax.build().expect("the default delimiters are valid"));
    environment.set_debug(false);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.set_formatter(python::format_value);
    environment.set_fuel(Some(fuel));
    environment.add_filter("tojson", python::tojson_filter);
    environment.add_filter("string", python::string_filter);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, "the template raised an exception").with_source(Raised(message)))
    });
    environment
}

/// Line (0 when unknown) and reason of an engine error with its causes.
fn describe(error: &Error) -> (usize, String) {
    let mut reason = error.kind().to_string();
    if let Some(detail) = error.detail() {
        reason = format!("{reason}: {detail}");
    }
    let mut cause = error.source();
    while let Some(current) = cause {
        reason = format!("{reason}: {current}");
        cause = current.source();
    }
    (error.line().unwrap_or(0), reason)
}

/// What `raise_exception` was called with.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for Raised {}

/// Collects the prompt and refuses to grow beyond [`MAX_PROMPT_BYTES`].
struct BoundedOutput {
    bytes: Vec<u8>,
    overflow: bool,
}

impl Write for BoundedOutput {
    fn write(&mut self, chunk: &[u8]) -> io::Result<usize> {
        if (self.bytes.len() + chunk.len()) as u64 > MAX_PROMPT_BYTES {
            self.overflow = true;
            return Err(io::Error::other("the prompt is too large"));
        }
        self.bytes.extend_from_slice(chunk);
        Ok(chunk.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
