//! Typed access to one JSON object of the configuration.

use ninfer_core::shape::MAX_DIM;
use serde_json::{Map, Value};

use crate::{Error, Result};

/// Characters of a refused value that an error repeats.
const SHOWN: usize = 80;

/// An object of the configuration and its path, for errors.
///
/// A key that is absent and a key that is `null` are the same.
#[derive(Clone, Copy)]
pub(super) struct Section<'a> {
    path: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> Section<'a> {
    pub(super) fn new(path: &'a str, map: &'a Map<String, Value>) -> Self {
        Self { path, map }
    }

    /// The key with its path.
    pub(super) fn name(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    pub(super) fn missing(&self, key: &str) -> Error {
        Error::ConfigMissing { key: self.name(key) }
    }

    /// The error of a key whose value is not one of `legal`.
    pub(super) fn illegal(&self, key: &str, legal: impl Into<String>) -> Error {
        let mut got = self.map.get(key).map_or_else(|| "absent".to_owned(), Value::to_string);
        if let Some((end, _)) = got.char_indices().nth(SHOWN) {
            got.truncate(end);
            got.push('…');
        }
        Error::ConfigValue { key: self.name(key), got, legal: legal.into() }
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>> {
        self.read(key, "an object", Value::as_object)
    }

    pub(super) fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.read(key, "true or false", Value::as_bool)
    }

    pub(super) fn string(&self, key: &str) -> Result<Option<&'a str>> {
        self.read(key, "a string", Value::as_str)
    }

    pub(super) fn array(&self, key: &str) -> Result<Option<&'a Vec<Value>>> {
        self.read(key, "a list", Value::as_array)
    }

    /// A finite number; integers are numbers too.
    pub(super) fn number(&self, key: &str) -> Result<Option<f64>> {
        self.read(key, "a finite number", |v| v.as_f64().filter(|x| x.is_finite()))
    }

    pub(super) fn integer(&self, key: &str) -> Result<Option<u64>> {
        self.read(key, "an integer, 0 or more", Value::as_u64)
    }

    /// A size from 1 to `most`.
    pub(super) fn size_to(&self, key: &str, most: usize) -> Result<Option<usize>> {
        let legal = || self.illegal(key, format!("integers from 1 to {most}"));
        let Some(value) = self.get(key) else { return Ok(None) };
        let n = value.as_u64().and_then(|n| usize::try_from(n).ok()).ok_or_else(legal)?;
        if n == 0 || n > most { Err(legal()) } else { Ok(Some(n)) }
    }

    /// A dimension of a tensor, which must be there.
    pub(super) fn dim(&self, key: &str) -> Result<usize> {
        self.size_to(key, MAX_DIM)?.ok_or_else(|| self.missing(key))
    }

    fn read<T>(&self, key: &str, legal: &str, f: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        self.get(key).map(|v| f(v).ok_or_else(|| self.illegal(key, legal))).transpose()
    }
}
