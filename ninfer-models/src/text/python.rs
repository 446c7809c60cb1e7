//! Values as Python prints them, because templates are written for a Python engine.
//!
//! `str(value)` for output and the `string` filter (`True`, `None`, `1e-05`, `{'a': 1}`), and `json.dumps` for the
//! `tojson` filter (`", "` and `": "` between items, no HTML escapes, floats as Python prints them). Both spend the
//! template's fuel for what they visit and write and stop at a fixed depth, so a hostile value cannot run away.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Output, State, Value};

/// Values nested deeper than this are refused.
const MAX_DEPTH: usize = 100;

/// How `json.dumps` was asked to write.
struct JsonStyle {
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
}

/// Collects output and spends fuel for it.
struct Printer<'a, 'vm, 'env> {
    out: String,
    charged: usize,
    state: &'a State<'vm, 'env>,
}

/// The formatter for `{{ value }}`: nothing for undefined values, else `str(value)`.
pub(super) fn format_value(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    if value.is_undefined() {
        return Ok(());
    }
    let text = match value.as_str() {
        Some(text) => return out.write_str(text).map_err(Error::from),
        None => python_str(state, value)?,
    };
    out.write_str(&text).map_err(Error::from)
}

/// The `string` filter: `str(value)`; a string keeps its mark as safe.
pub(super) fn string_filter(state: &State<'_, '_>, value: &Value) -> Result<Value, Error> {
    if value.as_str().is_some() {
        return Ok(value.clone());
    }
    if value.is_undefined() {
        return Ok(Value::from(""));
    }
    python_str(state, value).map(Value::from)
}

/// The `tojson` filter with the arguments of transformers: `ensure_ascii` and `indent`, and by name `separators` and
/// `sort_keys`.
pub(super) fn tojson_filter(
    state: &State<'_, '_>,
    value: &Value,
    ensure_ascii: Option<bool>,
    indent: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let ensure_ascii = ensure_ascii.or(kwargs.get("ensure_ascii")?).unwrap_or(false);
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let indent = match indent.or(kwargs.get("indent")?).filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => {
                let width = i64::try_from(indent)?;
                " ".repeat(usize::try_from(width.clamp(0, 64)).unwrap_or(0))
            }
        }),
    };
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    kwargs.assert_all_used()?;
    let (item_separator, key_separator) = match separators.as_deref() {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(refused("separators must be a pair")),
    };
    let style = JsonStyle { ensure_ascii, sort_keys, indent, item_separator, key_separator };
    let mut printer = Printer { out: String::new(), charged: 0, state };
    printer.json(value, &style, 0)?;
    Ok(Value::from(printer.out))
}

fn python_str(state: &State<'_, '_>, value: &Value) -> Result<String, Error> {
    let mut printer = Printer { out: String::new(), charged: 0, state };
    printer.repr(value, 0)?;
    Ok(printer.out)
}

impl Printer<'_, '_, '_> {
    /// Pays for one value and for what was written since the last call.
    fn charge(&mut self, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(refused("a value is nested too deep to print"));
        }
        let blocks = (self.out.len() - self.charged) / 64;
        self.charged += blocks * 64;
        self.state.consume_fuel(1 + blocks as u64)
    }

    fn number(&mut self, value: &Value) {
        if value.is_integer() {
            let _ = write!(self.out, "{value}");
        } else {
            match f64::try_from(value.clone()) {
                Ok(number) => self.out.push_str(&python_float(number)),
                Err(_) => self.out.push_str(&value.to_string()),
            }
        }
    }

    fn repr(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.charge(depth)?;
        match value.kind() {
            ValueKind::None => self.out.push_str("None"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "True" } else { "False" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => repr_string(value.as_str().unwrap_or_default(), &mut self.out),
            ValueKind::Seq | ValueKind::Iterable => {
                let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
                self.out.push(open);
                let mut count = 0;
                for item in value.try_iter()? {
                    if count > 0 {
                        self.out.push_str(", ");
                    }
                    self.repr(&item, depth + 1)?;
                    count += 1;
                }
                if value.is_tuple() && count == 1 {
                    self.out.push(',');
                }
                self.out.push(close);
            }
            ValueKind::Map => {
                self.out.push('{');
                for (index, key) in value.try_iter()?.enumerate() {
                    if index > 0 {
                        self.out.push_str(", ");
                    }
                    self.repr(&key, depth + 1)?;
                    self.out.push_str(": ");
                    self.repr(&value.get_item(&key)?, depth + 1)?;
                }
                self.out.push('}');
            }
            _ => self.out.push_str(&value.to_string()),
        }
        Ok(())
    }

    fn json(&mut self, value: &Value, style: &JsonStyle, depth: usize) -> Result<(), Error> {
        self.charge(depth)?;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => match f64::try_from(value.clone()) {
                Ok(number) if number.is_nan() => self.out.push_str("NaN"),
                Ok(f64::INFINITY) => self.out.push_str("Infinity"),
                Ok(f64::NEG_INFINITY) => self.out.push_str("-Infinity"),
                _ => self.number(value),
            },
            ValueKind::String => json_string(value.as_str().unwrap_or_default(), style.ensure_ascii, &mut self.out),
            ValueKind::Seq | ValueKind::Iterable => {
                self.out.push('[');
                let mut empty = true;
                for item in value.try_iter()? {
                    self.separate(style, empty, depth + 1);
                    self.json(&item, style, depth + 1)?;
                    empty = false;
                }
                self.close(style, empty, depth, ']');
            }
            ValueKind::Map => {
                let mut keys: Vec<(String, Value)> = Vec::new();
                for key in value.try_iter()? {
                    keys.push((json_key(&key)?, key));
                    self.charge(depth)?;
                }
                if style.sort_keys {
                    keys.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.out.push('{');
                let empty = keys.is_empty();
                for (index, (name, key)) in keys.iter().enumerate() {
                    self.separate(style, index == 0, depth + 1);
                    json_string(name, style.ensure_ascii, &mut self.out);
                    self.out.push_str(&style.key_separator);
                    self.json(&value.get_item(key)?, style, depth + 1)?;
                }
                self.close(style, empty, depth, '}');
            }
            _ => return Err(refused(format!("a value of kind {} cannot be written as JSON", value.kind()))),
        }
        Ok(())
    }

    /// What stands before an item: the separator unless it is the first, then a line break when indented.
    fn separate(&mut self, style: &JsonStyle, first: bool, depth: usize) {
        if !first {
            self.out.push_str(&style.item_separator);
        }
        if let Some(indent) = &style.indent {
            self.line_break(indent, depth);
        }
    }

    fn close(&mut self, style: &JsonStyle, empty: bool, depth: usize, bracket: char) {
        if let (Some(indent), false) = (&style.indent, empty) {
            self.line_break(indent, depth);
        }
        self.out.push(bracket);
    }

    fn line_break(&mut self, indent: &str, depth: usize) {
        self.out.push('\n');
        for _ in 0..depth {
            self.out.push_str(indent);
        }
    }
}

/// Keys of a JSON object are strings; Python writes other simple keys as their JSON text.
fn json_key(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool | ValueKind::Number => Ok(key.to_string()),
        kind => Err(refused(format!("a key of kind {kind} cannot be written as JSON"))),
    }
}

fn refused(reason: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

/// A JSON string with the escapes Python writes.
fn json_string(text: &str, ensure_ascii: bool, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if u32::from(c) < 0x20 || (ensure_ascii && !c.is_ascii()) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// A string as `repr` writes it: single quotes unless only those occur inside.
fn repr_string(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if c.is_control() => {
                let _ = write!(out, "\\x{:02x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// A float as `repr` writes it: the shortest digits that round-trip, in scientific form below 1e-4 and from 1e16.
fn python_float(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{number:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>() {
        Ok(exponent) if exponent < -4 => format!("{mantissa}e-{:02}", -exponent),
        Ok(exponent) if exponent >= 16 => format!("{mantissa}e+{exponent:02}"),
        _ if number.fract() == 0.0 => format!("{number:.1}"),
        _ => format!("{number}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_as_python_prints_them() {
        for (number, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (123_456_789.125, "123456789.125"),
            (1e15, "1000000000000000.0"),
            (9_007_199_254_740_993.0, "9007199254740992.0"),
            (1e16, "1e+16"),
            (1.25e100, "1.25e+100"),
            (5e-324, "5e-324"),
            (f64::INFINITY, "inf"),
        ] {
            assert_eq!(python_float(number), text);
        }
    }

    #[test]
    fn strings_as_python_quotes_them() {
        let repr = |text: &str| {
            let mut out = String::new();
            repr_string(text, &mut out);
            out
        };
        assert_eq!(repr("a"), "'a'");
        assert_eq!(repr("it's"), "\"it's\"");
        assert_eq!(repr("\"it's\""), "'\"it\\'s\"'");
        assert_eq!(repr("a\\\n\u{7f}é"), "'a\\\\\\n\\x7fé'");
    }

    #[test]
    fn json_escapes() {
        let json = |text: &str, ascii: bool| {
            let mut out = String::new();
            json_string(text, ascii, &mut out);
            out
        };
        assert_eq!(json("<a href='x'>&\"\\\n\u{1}\u{7f}é😀", false), "\"<a href='x'>&\\\"\\\\\\n\\u0001\u{7f}é😀\"");
        assert_eq!(json("é😀", true), "\"\\u00e9\\ud83d\\ude00\"");
    }
}
