//! Everything a checkpoint folder says about text.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::chat_options::ChatOptions;
use super::chat_template::ChatTemplate;
use super::error::{TextError, TextResult};
use super::generation_defaults::GenerationDefaults;
use super::json::{field_error, read_text};
use super::message::Message;
use super::prompt::Prompt;
use super::source::TextFiles;
use super::stop_tokens::{StopTokens, token_content};
use super::text_stream::TextStream;
use super::tokenizer::{MAX_TOKENIZER_BYTES, Tokenizer};

/// Tokenizer, chat template, stop tokens and recommended sampling settings of one checkpoint.
///
/// ```no_run
/// use ninfer_models::text::{ChatOptions, Message, Text};
///
/// let text = Text::load("checkpoint")?;
/// let prompt = text.render(&[Message::user("hi")], &ChatOptions::new().with_thinking(false))?;
/// let ids = text.tokenizer().encode(&prompt.text)?;
/// # Ok::<(), ninfer_models::text::TextError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Text {
    tokenizer: Tokenizer,
    /// Kept as a result, because a checkpoint without a usable template still completes raw prompts.
    template: Result<ChatTemplate, TextError>,
    stop_tokens: StopTokens,
    defaults: GenerationDefaults,
}

impl Text {
    /// Reads a checkpoint folder, or the resources `frontend/…` of a `.ninfer` container and, for what it lacks, the folder it
    /// lies in: `tokenizer.json`, and where present `tokenizer_config.json`, `config.json`,
    /// `generation_config.json` and the chat template.
    ///
    /// The template is `chat_template.jinja` (with `additional_chat_templates/*.jinja` beside it), else the
    /// `chat_template` of `tokenizer_config.json` (a string or a list of named ones), else `chat_template.json`. Added tokens
    /// that only the `added_tokens_decoder` of `tokenizer_config.json` has are added to those of `tokenizer.json`.
    ///
    /// # Errors
    /// Everything [`Tokenizer::from_file`] reports; [`TextError::InconsistentTokenizer`] for added tokens that the two files
    /// tell differently; [`TextError::NotJson`], [`TextError::Field`] and
    /// [`TextError::Unreadable`] for the other files. A missing or broken chat template is reported by
    /// [`Text::chat_template`] and [`Text::render`] only.
    pub fn load(path: impl AsRef<Path>) -> TextResult<Self> {
        let files = TextFiles::open(path.as_ref())?;
        let dir = files.dir();
        let here = |error: TextError| error.in_folder(dir);
        let (bytes, file) = files.bytes("tokenizer.json", MAX_TOKENIZER_BYTES)?;
        let generation = files.json_if_present("generation_config.json")?;
        let config = files.json_if_present("config.json")?;
        let tokenizer_config = files.json_if_present("tokenizer_config.json")?;
        let tokenizer = Tokenizer::from_parts(&bytes, tokenizer_config.as_ref())
            .map_err(|error| error.in_folder(file.parent().unwrap_or(dir)))?;
        let stop_tokens =
            StopTokens::from_configs(&tokenizer, generation.as_ref(), config.as_ref(), tokenizer_config.as_ref())
                .map_err(here)?;
        let defaults =
            generation.as_ref().map(GenerationDefaults::from_value).transpose().map_err(here)?.unwrap_or_default();
        let template = read_templates(&files, tokenizer_config.as_ref())
            .and_then(|sources| {
                ChatTemplate::named(sources.ok_or(TextError::NoChatTemplate { dir: dir.to_path_buf() })?)
            })
            .map(|template| template.with_special_tokens(special_tokens(tokenizer_config.as_ref())));
        Ok(Self { tokenizer, template, stop_tokens, defaults })
    }

    /// The tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template.
    ///
    /// # Errors
    /// [`TextError::NoChatTemplate`] when the folder has none, [`TextError::TemplateSyntax`] when it does not parse,
    /// [`TextError::Field`] when it has another type than expected.
    pub fn chat_template(&self) -> TextResult<&ChatTemplate> {
        self.template.as_ref().map_err(Clone::clone)
    }

    /// The tokens that end a reply.
    #[must_use]
    pub fn stop_tokens(&self) -> &StopTokens {
        &self.stop_tokens
    }

    /// The publisher's sampling settings.
    #[must_use]
    pub fn defaults(&self) -> &GenerationDefaults {
        &self.defaults
    }

    /// A stream for one reply that ends at the checkpoint's stop tokens.
    #[must_use]
    pub fn stream(&self) -> TextStream {
        TextStream::new(&self.tokenizer).with_stop_tokens(self.stop_tokens.clone())
    }

    /// Renders a conversation with the checkpoint's template.
    ///
    /// # Errors
    /// What [`Text::chat_template`] and [`ChatTemplate::render`] report.
    pub fn render(&self, messages: &[Message], options: &ChatOptions) -> TextResult<Prompt> {
        self.chat_template()?.render(messages, options)
    }
}

/// Named template sources in a checkpoint folder; the main one is called `default`.
fn read_templates(files: &TextFiles, tokenizer_config: Option<&Value>) -> TextResult<Option<Vec<(String, String)>>> {
    let name = || ChatTemplate::DEFAULT_NAME.to_owned();
    let mut sources = read_additional(&files.dir().join("additional_chat_templates"))?;
    match files.text("chat_template.jinja") {
        Ok(source) => {
            sources.insert(0, (name(), source));
            return Ok(Some(sources));
        }
        Err(TextError::Missing { .. }) if !sources.is_empty() => return Ok(Some(sources)),
        Err(TextError::Missing { .. }) => {}
        Err(error) => return Err(error),
    }
    let from_json = |file: &Value, what: &str| match file.get("chat_template") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(source)) => Ok(Some(vec![(name(), source.clone())])),
        Some(Value::Array(list)) => {
            list.iter().map(|entry| read_named(entry, what)).collect::<TextResult<_>>().map(Some)
        }
        Some(other) => Err(field_error(what, "chat_template", "a template or a list of named ones", other)),
    };
    if let Some(config) = tokenizer_config
        && let Some(sources) = from_json(config, "tokenizer_config.json")?
    {
        return Ok(Some(sources));
    }
    match files.json_if_present("chat_template.json")? {
        Some(file) => from_json(&file, "chat_template.json"),
        None => Ok(None),
    }
}

fn read_named(entry: &Value, what: &str) -> TextResult<(String, String)> {
    let text = |field: &str| entry.get(field).and_then(Value::as_str).map(str::to_owned);
    match (text("name"), text("template")) {
        (Some(name), Some(source)) => Ok((name, source)),
        _ => Err(field_error(what, "chat_template", "a list of objects with a name and a template", entry)),
    }
}

/// `*.jinja` files of a folder by their stem, in the order of names; none when there is no such folder.
fn read_additional(dir: &Path) -> TextResult<Vec<(String, String)>> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Ok(Vec::new()) };
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "jinja"))
        .collect();
    files.sort();
    let named = files.iter().filter_map(|file| Some((file.file_stem()?.to_str()?.to_owned(), file)));
    named.map(|(name, file)| Ok((name, read_text(file)?))).collect()
}

/// `bos_token`, `eos_token` and their like, for templates that print them.
fn special_tokens(tokenizer_config: Option<&Value>) -> Vec<(String, String)> {
    let Some(Value::Object(fields)) = tokenizer_config else { return Vec::new() };
    let tokens = fields.iter().filter(|(name, _)| name.ends_with("_token"));
    tokens.filter_map(|(name, token)| Some((name.clone(), token_content(token)?.to_owned()))).collect()
}
