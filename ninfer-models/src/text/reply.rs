//! A reply taken apart: reasoning, content, tool calls.

use serde_json::Value;

use super::message::ToolCall;
use super::prompt::Prompt;
use super::stop_strings::{StopMatcher, StopStrings};
use super::tool_syntax;

/// A piece of a reply.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ReplyPart {
    /// More of the reasoning.
    Reasoning(String),
    /// More of the answer.
    Content(String),
    /// A whole tool call.
    ToolCall(ToolCall),
}

const OPEN_THINKING: &str = "<think>";
const CLOSE_THINKING: &str = "</think>";
const OPEN_TOOL: &str = "<tool_call>";
const CLOSE_TOOL: &str = "</tool_call>";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Content,
    Thinking,
    Tool,
}

/// Splits the text of a reply, in chunks of any size, into reasoning, content and tool calls.
///
/// - When the prompt ended inside an open `<think>` the reply begins with reasoning; otherwise a `<think>` opens it, if
///   nothing but white space came before.
/// - `</think>` ends the reasoning, and so does a `<tool_call>`: some models call tools without closing their thoughts. The
///   `</think>` they then write behind the call is dropped.
/// - A tool call is reported whole. What stands in `<tool_call>` tags and is no call is content, tags included.
/// - Line feeds next to the tags belong to the format and are dropped.
///
/// The parts joined do not depend on how the text was cut.
///
/// ```
/// use ninfer_models::text::{Prompt, ReplyParser, ReplyPart};
///
/// let prompt = Prompt::new("<|im_start|>assistant\n<think>\n");
/// let mut parser = ReplyParser::new(&prompt);
/// let mut parts = parser.push("easy\n</thi");
/// parts.extend(parser.push("nk>\n\nFour."));
/// parts.extend(parser.finish());
/// assert_eq!(parts, [ReplyPart::Reasoning("easy".into()), ReplyPart::Content("Four.".into())]);
/// ```
#[derive(Clone, Debug)]
pub struct ReplyParser {
    state: State,
    matcher: StopMatcher,
    tags: StopStrings,
    tool_end: StopStrings,
    tools: Vec<Value>,
    /// Text of the tool call being read.
    tool: String,
    /// Line feeds that are dropped if a tag follows.
    line_feeds: String,
    /// Line feeds at the beginning of the current part are dropped.
    skip_line_feeds: bool,
    /// Nothing but white space came so far.
    blank: bool,
    /// A tool call cut the reasoning short; its `</think>` may still come.
    unclosed: bool,
}

impl ReplyParser {
    /// A parser for the reply to `prompt`.
    #[must_use]
    pub fn new(prompt: &Prompt) -> Self {
        let strings = |tags: &[&str]| StopStrings::new(tags.iter().copied()).unwrap_or_else(|_| StopStrings::none());
        let tags = strings(&[OPEN_THINKING, CLOSE_THINKING, OPEN_TOOL]);
        Self {
            state: if prompt.in_thinking { State::Thinking } else { State::Content },
            matcher: tags.matcher(),
            tags,
            tool_end: strings(&[CLOSE_TOOL]),
            tools: Vec::new(),
            tool: String::new(),
            line_feeds: String::new(),
            skip_line_feeds: prompt.in_thinking,
            blank: true,
            unclosed: false,
        }
    }

    /// Sets the tool descriptions given to the template, which say which parameters are not strings. Without them all
    /// arguments of XML calls are strings.
    #[must_use]
    pub fn with_tools(mut self, tools: &[Value]) -> Self {
        self.tools = tools.to_vec();
        self
    }

    /// Adds text; returns the parts that are decided.
    pub fn push(&mut self, chunk: &str) -> Vec<ReplyPart> {
        let mut parts = Vec::new();
        let mut rest = chunk;
        while !rest.is_empty() {
            let seen = self.matcher.seen();
            let mut text = String::new();
            self.matcher.push_into(rest, &mut text);
            self.take(&text, &mut parts);
            let Some(found) = self.matcher.found().copied() else { break };
            rest = rest.get(found.end - seen..).unwrap_or_default();
            self.tag(found.index, &mut parts);
            let tags = if self.state == State::Tool { &self.tool_end } else { &self.tags };
            self.matcher = tags.matcher();
        }
        parts
    }

    /// Ends the reply; returns what was held back.
    #[must_use = "the end of the reply may be in here"]
    pub fn finish(&mut self) -> Vec<ReplyPart> {
        let mut parts = Vec::new();
        let text = self.matcher.finish();
        self.take(&text, &mut parts);
        match self.state {
            State::Tool => self.end_tool("", &mut parts),
            State::Content => append(&mut parts, State::Content, &std::mem::take(&mut self.line_feeds)),
            State::Thinking => self.line_feeds.clear(),
        }
        self.state = State::Content;
        parts
    }

    /// Text without tags.
    fn take(&mut self, text: &str, parts: &mut Vec<ReplyPart>) {
        if self.state == State::Tool {
            self.tool.push_str(text);
            return;
        }
        let text = if self.skip_line_feeds { text.trim_start_matches('\n') } else { text };
        if text.is_empty() {
            return;
        }
        self.skip_line_feeds = false;
        self.blank &= text.trim().is_empty();
        let body = text.trim_end_matches('\n');
        if !body.is_empty() {
            append(parts, self.state, &std::mem::take(&mut self.line_feeds));
            append(parts, self.state, body);
        }
        self.line_feeds.push_str(text.get(body.len()..).unwrap_or_default());
    }

    fn tag(&mut self, index: usize, parts: &mut Vec<ReplyPart>) {
        if self.state == State::Tool {
            self.end_tool(CLOSE_TOOL, parts);
            return;
        }
        let tag = self.tags.get(index).unwrap_or_default().to_owned();
        match (self.state, tag.as_str()) {
            (State::Content, OPEN_THINKING) if self.blank => self.enter(State::Thinking),
            (State::Thinking, OPEN_THINKING) if self.blank => self.enter(State::Thinking),
            (State::Thinking, CLOSE_THINKING) => self.enter(State::Content),
            (State::Content, CLOSE_THINKING) if self.unclosed => {
                self.unclosed = false;
                self.enter(State::Content);
            }
            (_, OPEN_TOOL) => {
                self.unclosed |= self.state == State::Thinking;
                self.enter(State::Tool);
            }
            (_, literal) => self.take(literal, parts),
        }
    }

    /// Begins a part; line feeds on both sides of the border are dropped.
    fn enter(&mut self, state: State) {
        self.state = state;
        self.line_feeds.clear();
        self.skip_line_feeds = true;
    }

    fn end_tool(&mut self, close: &str, parts: &mut Vec<ReplyPart>) {
        let text = std::mem::take(&mut self.tool);
        self.blank = false;
        match tool_syntax::read(&text, &self.tools) {
            Some(call) => parts.push(ReplyPart::ToolCall(call)),
            None => append(parts, State::Content, &format!("{OPEN_TOOL}{text}{close}")),
        }
        self.enter(State::Content);
    }
}

/// Adds text to the last part if that is of the same kind, else as a new part.
fn append(parts: &mut Vec<ReplyPart>, state: State, text: &str) {
    if text.is_empty() {
        return;
    }
    match (state, parts.last_mut()) {
        (State::Thinking, Some(ReplyPart::Reasoning(last))) | (State::Content, Some(ReplyPart::Content(last))) => {
            last.push_str(text);
        }
        (State::Thinking, _) => parts.push(ReplyPart::Reasoning(text.to_owned())),
        _ => parts.push(ReplyPart::Content(text.to_owned())),
    }
}
