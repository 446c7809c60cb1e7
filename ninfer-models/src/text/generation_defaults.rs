//! Sampling settings that the checkpoint's publisher recommends.

use serde_json::Value;

use super::error::{TextError, TextResult};
use super::json::{field_error, parse};

/// The sampling fields of `generation_config.json`; a field the file lacks, or sets to `null`, is `None`.
///
/// Values are passed on as they stand; whoever samples checks their ranges.
///
/// ```
/// use ninfer_models::text::GenerationDefaults;
///
/// let defaults = GenerationDefaults::from_json(br#"{"do_sample": true, "temperature": 0.7, "top_k": 20}"#)?;
/// assert_eq!((defaults.temperature, defaults.top_k, defaults.min_p), (Some(0.7), Some(20), None));
/// # Ok::<(), ninfer_models::text::TextError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct GenerationDefaults {
    /// Sample (true) or take the most likely token (false).
    pub do_sample: Option<bool>,
    /// Divisor of the logits.
    pub temperature: Option<f32>,
    /// Smallest probability mass kept, the most likely tokens first.
    pub top_p: Option<f32>,
    /// Number of most likely tokens kept; 0 keeps all.
    pub top_k: Option<u32>,
    /// Least probability kept, as a share of the largest.
    pub min_p: Option<f32>,
    /// Divisor (of positive logits) or factor (of negative ones) for tokens already in the text.
    pub repetition_penalty: Option<f32>,
    /// Subtracted once from the logits of tokens already generated.
    pub presence_penalty: Option<f32>,
    /// Subtracted from the logits of tokens for each time they were generated.
    pub frequency_penalty: Option<f32>,
    /// Most tokens to generate, at least 1.
    pub max_new_tokens: Option<u32>,
    /// Token that fills unused places in a batch.
    pub pad_token_id: Option<u32>,
    /// Token that begins a text, in families that have one.
    pub bos_token_id: Option<u32>,
}

const WHAT: &str = "generation_config.json";

impl GenerationDefaults {
    /// Reads the content of `generation_config.json`.
    ///
    /// # Errors
    /// [`TextError::NotJson`], or [`TextError::Field`] for a field of the wrong type.
    pub fn from_json(bytes: &[u8]) -> TextResult<Self> {
        Self::from_value(&parse(bytes, WHAT)?)
    }

    /// Reads parsed JSON.
    ///
    /// # Errors
    /// [`TextError::Field`] for a field of the wrong type.
    pub fn from_value(file: &Value) -> TextResult<Self> {
        if !file.is_object() {
            return Err(field_error(WHAT, "the top level", "an object", file));
        }
        Ok(Self {
            do_sample: read(file, "do_sample", "true or false", Value::as_bool)?,
            temperature: read_number(file, "temperature")?,
            top_p: read_number(file, "top_p")?,
            top_k: read_count(file, "top_k")?,
            min_p: read_number(file, "min_p")?,
            repetition_penalty: read_number(file, "repetition_penalty")?,
            presence_penalty: read_number(file, "presence_penalty")?,
            frequency_penalty: read_number(file, "frequency_penalty")?,
            max_new_tokens: read(file, "max_new_tokens", "a whole number, at least 1", positive)?,
            pad_token_id: read_count(file, "pad_token_id")?,
            bos_token_id: read_count(file, "bos_token_id")?,
        })
    }
}

fn read<T>(
    file: &Value,
    field: &str,
    expected: &'static str,
    convert: impl Fn(&Value) -> Option<T>,
) -> Result<Option<T>, TextError> {
    match file.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => convert(value).map(Some).ok_or_else(|| field_error(WHAT, field, expected, value)),
    }
}

fn read_number(file: &Value, field: &str) -> TextResult<Option<f32>> {
    read(file, field, "a finite number", |value| value.as_f64().map(|number| number as f32).filter(|n| n.is_finite()))
}

fn positive(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|number| u32::try_from(number).ok()).filter(|&number| number > 0)
}

fn read_count(file: &Value, field: &str) -> TextResult<Option<u32>> {
    read(file, field, "a whole number", |value| value.as_u64().and_then(|number| u32::try_from(number).ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_and_null_fields_are_none() {
        let defaults = GenerationDefaults::from_json(br#"{"top_k": null, "top_p": 1, "transformers_version": "x"}"#);
        assert_eq!(defaults, Ok(GenerationDefaults { top_p: Some(1.0), ..GenerationDefaults::default() }));
    }

    #[test]
    fn wrong_types_are_named() {
        for (json, field) in [
            (r#"{"top_k": -1}"#, "top_k"),
            (r#"{"top_k": 1.5}"#, "top_k"),
            (r#"{"temperature": "hot"}"#, "temperature"),
            (r#"{"temperature": 1e300}"#, "temperature"),
            (r#"{"do_sample": 1}"#, "do_sample"),
            (r#"{"max_new_tokens": 4294967296}"#, "max_new_tokens"),
            (r#"{"max_new_tokens": 0}"#, "max_new_tokens"),
            ("[]", "the top level"),
        ] {
            match GenerationDefaults::from_json(json.as_bytes()) {
                Err(TextError::Field { field: named, .. }) => assert_eq!(named, field),
                other => panic!("{json}: {other:?}"),
            }
        }
        assert!(matches!(GenerationDefaults::from_json(b"{"), Err(TextError::NotJson { .. })));
    }
}
