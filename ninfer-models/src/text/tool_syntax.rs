//! The text form of a tool call.

use serde_json::{Map, Value};

use super::message::ToolCall;

/// Reads what stands between `<tool_call>` and `</tool_call>`: this family's XML form
/// (`<function=NAME><parameter=ARG>VALUE</parameter></function>`) or a JSON object with `name` and `arguments`.
///
/// `tools` are the descriptions given to the template; they say which parameters are not strings. Returns `None` for
/// anything else.
pub(super) fn read(text: &str, tools: &[Value]) -> Option<ToolCall> {
    let text = text.trim();
    if text.starts_with('{') {
        return read_json(text);
    }
    let (name, rest) = text.strip_prefix("<function=")?.split_once('>')?;
    let name = name.trim();
    let (body, after) = rest.rsplit_once("</function>")?;
    if name.is_empty() || !after.trim().is_empty() {
        return None;
    }
    let mut arguments = Map::new();
    let mut body = body.trim_start();
    while !body.is_empty() {
        let (argument, rest) = body.strip_prefix("<parameter=")?.split_once('>')?;
        let (value, rest) = split_value(rest)?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let argument = argument.trim();
        arguments.insert(argument.to_owned(), typed(value, declared_types(tools, name, argument)));
        body = rest;
    }
    Some(ToolCall::new(name, arguments))
}

/// Splits at the first `</parameter>` that another parameter or the end follows, as values may contain the tag.
fn split_value(text: &str) -> Option<(&str, &str)> {
    const CLOSE: &str = "</parameter>";
    text.match_indices(CLOSE).find_map(|(at, _)| {
        let (value, rest) = text.split_at(at);
        let rest = rest.strip_prefix(CLOSE)?.trim_start();
        (rest.is_empty() || rest.starts_with("<parameter=")).then_some((value, rest))
    })
}

fn read_json(text: &str) -> Option<ToolCall> {
    let Ok(Value::Object(mut call)) = serde_json::from_str(text) else { return None };
    let name = call.get("name")?.as_str()?.to_owned();
    match call.remove("arguments") {
        Some(Value::Object(arguments)) => Some(ToolCall::new(name, arguments)),
        None => Some(ToolCall::new(name, Map::new())),
        Some(_) => None,
    }
}

/// The JSON schema types of a parameter; empty when nothing is known about it.
fn declared_types<'a>(tools: &'a [Value], function: &str, argument: &str) -> Vec<&'a str> {
    let described = tools.iter().map(|tool| tool.get("function").unwrap_or(tool));
    let found = described
        .filter(|tool| tool.get("name").and_then(Value::as_str) == Some(function))
        .find_map(|tool| tool.get("parameters")?.get("properties")?.get(argument)?.get("type"));
    match found {
        Some(Value::String(kind)) => vec![kind],
        Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

/// Strings are written raw and other values as JSON (or as Python writes them), so the declared type decides; a value
/// that does not fit its type, or has none, stays a string.
fn typed(text: &str, types: Vec<&str>) -> Value {
    let string = || Value::String(text.to_owned());
    let fits = |value: &Value| {
        types.iter().any(|kind| match *kind {
            "null" => value.is_null(),
            "boolean" => value.is_boolean(),
            "integer" => value.is_i64() || value.is_u64(),
            "number" => value.is_number(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            _ => false,
        })
    };
    let value = match text.trim() {
        "True" => Value::Bool(true),
        "False" => Value::Bool(false),
        "None" => Value::Null,
        json => serde_json::from_str(json).unwrap_or_else(|_| string()),
    };
    // Where a string is allowed too, only `null` is taken for something else.
    let may_be_string = types.contains(&"string");
    if fits(&value) && (!may_be_string || value.is_null()) { value } else { string() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn tools() -> Vec<Value> {
        vec![json!({"type": "function", "function": {"name": "f", "parameters": {"properties": {
            "n": {"type": "integer"}, "x": {"type": "number"}, "b": {"type": "boolean"}, "s": {"type": "string"},
            "o": {"type": ["object", "null"]}, "m": {"type": ["string", "null"]}, "l": {"type": "array"}, "e": {"enum": [1]},
        }}}})]
    }

    fn arguments(text: &str) -> Value {
        Value::Object(read(text, &tools()).unwrap().arguments)
    }

    #[test]
    fn declared_types_decide() {
        let call =
            |name: &str, value: &str| format!("<function=f>\n<parameter={name}>\n{value}\n</parameter>\n</function>");
        for (name, value, want) in [
            ("n", "3", json!(3)),
            ("n", "3.5", json!("3.5")),
            ("n", "three", json!("three")),
            ("x", "3.5", json!(3.5)),
            ("b", "true", json!(true)),
            ("b", "True", json!(true)),
            ("s", "3", json!("3")),
            ("s", "True", json!("True")),
            ("s", "\n a \n", json!("\n a \n")),
            ("o", "{\"k\": [1]}", json!({"k": [1]})),
            ("o", "None", json!(null)),
            ("m", "null", json!(null)),
            ("m", "5", json!("5")),
            ("l", "[1, 2]", json!([1, 2])),
            ("e", "1", json!("1")),
            ("unknown", "1", json!("1")),
        ] {
            assert_eq!(arguments(&call(name, value))[name], want, "{name} = {value}");
        }
    }

    #[test]
    fn order_is_free_and_values_may_hold_tags() {
        let text = "<function=f><parameter=s>\na</parameter>b\n</function>\n</parameter>\n<parameter=n>1</parameter></function>";
        assert_eq!(arguments(text), json!({"s": "a</parameter>b\n</function>", "n": 1}));
        assert_eq!(arguments("\n<function=f>\n</function>\n"), json!({}));
    }

    #[test]
    fn json_calls_are_read() {
        let call = read(r#" {"name": "g", "arguments": {"a": [1]}} "#, &[]).unwrap();
        assert_eq!((call.name.as_str(), Value::Object(call.arguments)), ("g", json!({"a": [1]})));
    }

    #[test]
    fn anything_else_is_no_call() {
        for text in [
            "",
            "f(1)",
            "<function=f>",
            "<function=>\n</function>",
            "<function=f\n</function>",
            "<function=f></function> trailing",
            "<function=f><parameter=a>1</function>",
            "<function=f>words</function>",
            "{\"name\": 3}",
            "{\"name\": \"f\", \"arguments\": [1]}",
            "{\"name\": ",
        ] {
            assert_eq!(read(text, &tools()), None, "{text}");
        }
    }
}
