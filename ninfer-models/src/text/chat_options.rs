//! What a chat template is told beside the messages.

use std::time::SystemTime;

use serde_json::{Map, Value};

/// Variables for rendering a chat; [`ChatOptions::new`] asks for a reply and leaves everything else to the template.
///
/// ```
/// use ninfer_models::text::ChatOptions;
/// use serde_json::json;
///
/// let options = ChatOptions::new()
///     .with_thinking(false)
///     .with_tools(vec![json!({"type": "function", "function": {"name": "clock", "parameters": {}}})])
///     .with_variable("preserve_thinking", true);
/// assert_eq!(options.enable_thinking, Some(false));
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ChatOptions {
    /// End the prompt with the start of an assistant turn (`add_generation_prompt`).
    pub add_generation_prompt: bool,
    /// `enable_thinking` for the template; `None` leaves it undefined, so that the template's own default holds.
    pub enable_thinking: Option<bool>,
    /// Tool descriptions in the JSON form of chat clients; `None` and an empty list both mean no tools.
    pub tools: Option<Vec<Value>>,
    /// Name of the template to use when the checkpoint has several; `None` takes `tool_use` if tools are given and
    /// such a template exists, else `default`.
    pub template: Option<String>,
    /// Further variables, such as `preserve_thinking` or `reasoning_effort`.
    pub variables: Map<String, Value>,
    /// The time that `strftime_now` formats (in UTC); `None` takes the clock's.
    pub now: Option<SystemTime>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl ChatOptions {
    /// A prompt for a reply, with the template's own defaults.
    #[must_use]
    pub fn new() -> Self {
        Self {
            add_generation_prompt: true,
            enable_thinking: None,
            tools: None,
            template: None,
            variables: Map::new(),
            now: None,
        }
    }

    /// Sets whether the prompt ends with the start of an assistant turn.
    #[must_use]
    pub fn with_generation_prompt(mut self, add: bool) -> Self {
        self.add_generation_prompt = add;
        self
    }

    /// Switches thinking on or off; without this call the template decides.
    #[must_use]
    pub fn with_thinking(mut self, enable: bool) -> Self {
        self.enable_thinking = Some(enable);
        self
    }

    /// Sets the tools the assistant may call.
    #[must_use]
    pub fn with_tools(mut self, tools: Vec<Value>) -> Self {
        self.tools = Some(tools);
        self
    }

    /// Chooses one of several templates by name.
    #[must_use]
    pub fn with_template(mut self, name: impl Into<String>) -> Self {
        self.template = Some(name.into());
        self
    }

    /// Sets a further template variable.
    #[must_use]
    pub fn with_variable(mut self, name: impl Into<String>, value: impl Into<Value>) -> Self {
        self.variables.insert(name.into(), value.into());
        self
    }

    /// Fixes the time that `strftime_now` formats, for prompts that can be reproduced.
    #[must_use]
    pub fn with_now(mut self, now: SystemTime) -> Self {
        self.now = Some(now);
        self
    }
}
