//! Where the files about text are: a checkpoint folder, or a container.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::error::{TextError, TextResult};
use super::json::{MAX_CONFIG_BYTES, parse, read_bytes};
use crate::container::{Container, is_container};

/// Prefix of the resources of a container that are files of a checkpoint folder.
const FRONTEND: &str = "frontend/";

/// The files of a checkpoint that say something about text.
#[derive(Debug)]
pub(super) struct TextFiles {
    /// The folder, or the one that the container lies in.
    dir: PathBuf,
    /// Its resources come before files of the folder.
    container: Option<Container>,
}

impl TextFiles {
    /// A folder, or the path of a container.
    pub(super) fn open(path: &Path) -> TextResult<Self> {
        if !is_container(path) {
            return Ok(Self { dir: path.to_owned(), container: None });
        }
        let container = Container::open(path)
            .map_err(|error| TextError::Unreadable { file: path.to_owned(), reason: error.to_string() })?;
        Ok(Self { dir: path.parent().unwrap_or(Path::new("")).to_owned(), container: Some(container) })
    }

    /// The folder.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// A file by its name, with the path that messages name.
    pub(super) fn bytes(&self, name: &str, limit: u64) -> TextResult<(Vec<u8>, PathBuf)> {
        if let Some(container) = &self.container {
            let object = format!("{FRONTEND}{name}");
            let path = container.path().join(&object);
            match container.resource(&object, limit) {
                Ok(Some(bytes)) => return Ok((bytes, path)),
                Ok(None) => {}
                Err(error) => return Err(TextError::Unreadable { file: path, reason: error.to_string() }),
            }
        }
        let file = self.dir.join(name);
        Ok((read_bytes(&file, limit)?, file))
    }

    /// A file as UTF-8 text.
    pub(super) fn text(&self, name: &str) -> TextResult<String> {
        let (bytes, file) = self.bytes(name, MAX_CONFIG_BYTES)?;
        String::from_utf8(bytes).map_err(|error| TextError::Unreadable { file, reason: error.to_string() })
    }

    /// A file as JSON; `None` when it does not exist.
    pub(super) fn json_if_present(&self, name: &str) -> TextResult<Option<Value>> {
        match self.bytes(name, MAX_CONFIG_BYTES) {
            Ok((bytes, file)) => parse(&bytes, &file.display().to_string()).map(Some),
            Err(TextError::Missing { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
