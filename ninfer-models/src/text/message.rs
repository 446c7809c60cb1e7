//! Messages of a conversation, as chat clients write them.

use serde::de::{Deserialize, Deserializer, Error as _};
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Map, Value, json};

use super::error::{TextError, TextResult};
use super::json::{parse, shorten};

/// One message of a conversation.
///
/// Reading accepts the JSON that chat clients send: `content` is a string, `null` or a list of
/// `{"type": "text", "text": …}` parts (which are concatenated), `arguments` of a tool call are an object or a string
/// that holds one, and `reasoning` is another name of `reasoning_content`. Writing gives the form chat templates
/// read: arguments are an object. Fields without a place here are kept in [`Message::extra`] and reach the template.
///
/// ```
/// use ninfer_models::text::Message;
///
/// let messages = Message::list_from_json(br#"[
///     {"role": "user", "content": [{"type": "text", "text": "2 + 2"}]},
///     {"role": "assistant", "content": "4", "reasoning_content": "easy"}
/// ]"#)?;
/// assert_eq!(messages[0], Message::user("2 + 2"));
/// assert_eq!(messages[1], Message::assistant("4").with_reasoning("easy"));
/// # Ok::<(), ninfer_models::text::TextError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant` or `tool`; the template decides what is legal.
    pub role: String,
    /// The text, or `None` for an assistant turn that only calls tools.
    pub content: Option<String>,
    /// What the assistant thought before answering.
    pub reasoning_content: Option<String>,
    /// Tools the assistant called in this turn.
    pub tool_calls: Vec<ToolCall>,
    /// For role `tool`: which call this answers.
    pub tool_call_id: Option<String>,
    /// A name of the speaker or of the tool.
    pub name: Option<String>,
    /// Every other field.
    pub extra: Map<String, Value>,
}

/// One call of a tool by the assistant.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ToolCall {
    /// Identifier that the answering `tool` message repeats.
    pub id: Option<String>,
    /// The function's name.
    pub name: String,
    /// Arguments by name, in the order given.
    pub arguments: Map<String, Value>,
}

impl ToolCall {
    /// A call without an identifier.
    #[must_use]
    pub fn new(name: impl Into<String>, arguments: Map<String, Value>) -> Self {
        Self { id: None, name: name.into(), arguments }
    }

    /// Sets the identifier.
    #[must_use]
    pub fn with_id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }
}

impl Message {
    /// A message of any role with text only.
    #[must_use]
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: Some(content.into()),
            reasoning_content: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
            extra: Map::new(),
        }
    }

    /// A system message.
    #[must_use]
    pub fn system(content: impl Into<String>) -> Self {
        Self::new("system", content)
    }

    /// A user message.
    #[must_use]
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }

    /// An assistant message.
    #[must_use]
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new("assistant", content)
    }

    /// The result of a tool call.
    #[must_use]
    pub fn tool(call_id: impl Into<String>, content: impl Into<String>) -> Self {
        Self { tool_call_id: Some(call_id.into()), ..Self::new("tool", content) }
    }

    /// Sets what the assistant thought.
    #[must_use]
    pub fn with_reasoning(mut self, reasoning: impl Into<String>) -> Self {
        self.reasoning_content = Some(reasoning.into());
        self
    }

    /// Adds a tool call.
    #[must_use]
    pub fn with_tool_call(mut self, call: ToolCall) -> Self {
        self.tool_calls.push(call);
        self
    }

    /// Reads a JSON list of messages, or an object whose `messages` field is one.
    ///
    /// # Errors
    /// [`TextError::NotJson`] or [`TextError::Field`] for the list, [`TextError::Message`] for a message in it.
    pub fn list_from_json(bytes: &[u8]) -> TextResult<Vec<Self>> {
        let value = parse(bytes, "the list of messages")?;
        let list = match &value {
            Value::Object(fields) => fields.get("messages").unwrap_or(&Value::Null),
            other => other,
        };
        let Value::Array(items) = list else {
            return Err(TextError::Field {
                what: "the conversation".to_owned(),
                field: "messages".to_owned(),
                expected: "a list of messages",
                got: shorten(list),
            });
        };
        items.iter().enumerate().map(|(index, item)| Self::read(item).map_err(|fault| fault.at(index))).collect()
    }

    /// Reads one message.
    fn read(value: &Value) -> Result<Self, Fault> {
        let Value::Object(fields) = value else { return Err(Fault::new("the message", "an object", value)) };
        let mut fields = fields.clone();
        let role = match fields.remove("role") {
            Some(Value::String(role)) => role,
            other => return Err(Fault::new("role", "a string", &other.unwrap_or_default())),
        };
        let reasoning = take_string(&mut fields, "reasoning_content")?;
        let reasoning_content = match take_string(&mut fields, "reasoning")? {
            Some(other) if reasoning.is_none() => Some(other),
            _ => reasoning,
        };
        Ok(Self {
            role,
            content: read_content(fields.remove("content").unwrap_or_default())?,
            reasoning_content,
            tool_calls: read_tool_calls(fields.remove("tool_calls").unwrap_or_default())?,
            tool_call_id: take_string(&mut fields, "tool_call_id")?,
            name: take_string(&mut fields, "name")?,
            extra: fields,
        })
    }
}

/// What is wrong with a message whose position is not yet known.
struct Fault {
    field: String,
    expected: &'static str,
    got: String,
}

impl Fault {
    fn new(field: impl Into<String>, expected: &'static str, got: &Value) -> Self {
        Self { field: field.into(), expected, got: shorten(got) }
    }

    fn at(self, index: usize) -> TextError {
        TextError::Message { index, field: self.field, expected: self.expected, got: self.got }
    }
}

fn take_string(fields: &mut Map<String, Value>, name: &str) -> Result<Option<String>, Fault> {
    match fields.shift_remove(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(Fault::new(name, "a string", &other)),
    }
}

fn read_content(content: Value) -> Result<Option<String>, Fault> {
    let parts = match content {
        Value::Null => return Ok(None),
        Value::String(text) => return Ok(Some(text)),
        Value::Array(parts) => parts,
        other => return Err(Fault::new("content", "a string or a list of text parts", &other)),
    };
    let mut joined = String::new();
    for (index, part) in parts.iter().enumerate() {
        let text = match part {
            Value::String(text) => Some(text),
            Value::Object(fields) if fields.get("type").is_none_or(|kind| kind == "text") => match fields.get("text") {
                Some(Value::String(text)) => Some(text),
                _ => None,
            },
            _ => None,
        };
        let Some(text) = text else {
            let got = part.get("type").unwrap_or(part);
            return Err(Fault::new(format!("content[{index}]"), "a text part (images and sound are not read)", got));
        };
        joined.push_str(text);
    }
    Ok(Some(joined))
}

fn read_tool_calls(calls: Value) -> Result<Vec<ToolCall>, Fault> {
    let calls = match calls {
        Value::Null => return Ok(Vec::new()),
        Value::Array(calls) => calls,
        other => return Err(Fault::new("tool_calls", "a list", &other)),
    };
    let read = |(index, call): (usize, &Value)| {
        let function = call.get("function").unwrap_or(call);
        let field = |name: &str| format!("tool_calls[{index}].{name}");
        let name = match function.get("name") {
            Some(Value::String(name)) => name.clone(),
            other => return Err(Fault::new(field("name"), "a string", other.unwrap_or(&Value::Null))),
        };
        let id = call.get("id").and_then(Value::as_str).map(str::to_owned);
        let given = function.get("arguments").unwrap_or(&Value::Null);
        let arguments = match given {
            Value::Null => Some(Map::new()),
            Value::Object(arguments) => Some(arguments.clone()),
            Value::String(text) if text.trim().is_empty() => Some(Map::new()),
            Value::String(text) => serde_json::from_str(text).ok(),
            _ => None,
        };
        let expected = "a JSON object or a string that holds one";
        let arguments = arguments.ok_or_else(|| Fault::new(field("arguments"), expected, given))?;
        Ok(ToolCall { id, name, arguments })
    };
    calls.iter().enumerate().map(read).collect()
}

impl<'de> Deserialize<'de> for Message {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        Self::read(&value).map_err(|fault| {
            D::Error::custom(format_args!("{} is {}, expected {}", fault.field, fault.got, fault.expected))
        })
    }
}

impl Serialize for Message {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_map(None)?;
        fields.serialize_entry("role", &self.role)?;
        fields.serialize_entry("content", &self.content)?;
        if let Some(reasoning) = &self.reasoning_content {
            fields.serialize_entry("reasoning_content", reasoning)?;
        }
        if !self.tool_calls.is_empty() {
            fields.serialize_entry("tool_calls", &self.tool_calls)?;
        }
        if let Some(id) = &self.tool_call_id {
            fields.serialize_entry("tool_call_id", id)?;
        }
        if let Some(name) = &self.name {
            fields.serialize_entry("name", name)?;
        }
        for (name, value) in &self.extra {
            fields.serialize_entry(name, value)?;
        }
        fields.end()
    }
}

impl Serialize for ToolCall {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_map(None)?;
        if let Some(id) = &self.id {
            fields.serialize_entry("id", id)?;
        }
        fields.serialize_entry("type", "function")?;
        fields.serialize_entry("function", &json!({"name": self.name, "arguments": self.arguments}))?;
        fields.end()
    }
}
