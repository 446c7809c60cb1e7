//! What reading a configuration or a checkpoint can report.

use std::path::{Path, PathBuf};

use crate::checkpoint::HeaderFault;
use crate::container::DirectoryFault;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error with the facts needed to act on it; [`Error::help`] says what to do.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A shape, a backend or an operation refused.
    #[error(transparent)]
    Core(#[from] ninfer_core::Error),
    /// The stored tensors of a module are not a matrix in a known format, or do not convert.
    #[error("{module}: {source}")]
    Quant {
        /// Full name of the module or tensor.
        module: String,
        /// What is wrong with it.
        source: ninfer_quant::Error,
    },
    /// A file could not be opened or read.
    #[error("cannot {action} {}: {message}", .file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Kind of failure.
        kind: std::io::ErrorKind,
        /// The operating system's words.
        message: String,
    },
    /// A file that should be small is not.
    #[error("{} has {got} bytes, the limit is {limit}", .file.display())]
    FileTooLarge {
        /// The file.
        file: PathBuf,
        /// Its size.
        got: u64,
        /// Largest size that is read.
        limit: u64,
    },
    /// A JSON file does not parse.
    #[error("{} is not valid JSON: {message}", .file.display())]
    Json {
        /// The file.
        file: PathBuf,
        /// Where and why the parser stopped.
        message: String,
    },
    /// The configuration lacks a key.
    #[error("config has no `{key}`")]
    ConfigMissing {
        /// The key, with its section.
        key: String,
    },
    /// A value of the configuration is not legal or not supported.
    #[error("config: `{key}` is {got}, supported: {legal}")]
    ConfigValue {
        /// The key, with its section.
        key: String,
        /// What it is.
        got: String,
        /// What it may be.
        legal: String,
    },
    /// The configuration describes another model.
    #[error("model type {got:?} is not supported, supported are {supported}")]
    UnsupportedModel {
        /// The `model_type` found.
        got: String,
        /// All supported ones.
        supported: &'static str,
    },
    /// The weights are stored by a quantisation method that no format of this library reads.
    #[error("quantization method {method} is not supported, supported are {supported}")]
    UnsupportedQuantization {
        /// Method and the detail that is refused.
        method: String,
        /// What is read.
        supported: &'static str,
    },
    /// A folder holds neither `model.safetensors` nor an index.
    #[error("{} holds neither model.safetensors nor model.safetensors.index.json", .dir.display())]
    NoCheckpoint {
        /// The folder.
        dir: PathBuf,
    },
    /// The header of a safetensors file is not usable.
    #[error("{}: {fault}", .file.display())]
    Header {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        fault: HeaderFault,
    },
    /// The directory of a `.ninfer` container is not usable.
    #[error("{}: {fault}", .file.display())]
    Container {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        fault: DirectoryFault,
    },
    /// A container holds a model that is not known, and no `config.json` lies beside it.
    #[error("{} holds the model {model_id:?}, known are {known}, and there is no config.json beside it", .file.display())]
    UnknownContainer {
        /// The file.
        file: PathBuf,
        /// Identity of the model.
        model_id: String,
        /// Identities whose configuration is known.
        known: String,
    },
    /// The index names a file outside the checkpoint folder, or something that is no plain file in it.
    #[error("index entry {entry:?} of tensor {tensor} is refused: {reason}")]
    UnsafePath {
        /// A tensor that the index places there.
        tensor: String,
        /// The entry.
        entry: String,
        /// Why it is refused.
        reason: &'static str,
    },
    /// The index names a file that is not in the folder.
    #[error("shard {} of tensor {tensor} is missing", .file.display())]
    MissingShard {
        /// The file.
        file: PathBuf,
        /// A tensor that the index places there.
        tensor: String,
    },
    /// The index and the shards disagree.
    #[error("index and {} disagree: {} in the index only: {missing}; in the file only: {unlisted}", .file.display(), .missing.len())]
    IndexMismatch {
        /// The shard.
        file: PathBuf,
        /// Tensors that the index places in the shard and that are not there.
        missing: NameList,
        /// Tensors of the shard that the index does not place there.
        unlisted: NameList,
    },
    /// Two shards, or the index twice, hold a tensor of one name.
    #[error("tensor {tensor} occurs twice: in {} and in {}", .first.display(), .second.display())]
    DuplicateTensor {
        /// The name.
        tensor: String,
        /// Where it was first.
        first: PathBuf,
        /// Where it is again.
        second: PathBuf,
    },
    /// A tensor has an element type that cannot be used in its place.
    #[error("tensor {tensor} in {} has dtype {got}, expected {expected}", .file.display())]
    TensorDType {
        /// File it is in.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Legal element types.
        expected: &'static str,
        /// Its element type.
        got: String,
    },
    /// A tensor has another shape than the configuration asks for.
    #[error("tensor {tensor} in {} has shape {got:?}, expected {expected:?}", .file.display())]
    TensorShape {
        /// File it is in.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// What the configuration asks for.
        expected: Vec<usize>,
        /// What the header says.
        got: Vec<usize>,
    },
    /// An element of a tensor is NaN or infinite.
    #[error("element {index} of tensor {tensor} is {value}")]
    NonFinite {
        /// The tensor.
        tensor: String,
        /// Index of the first such element, row-major.
        index: usize,
        /// The element.
        value: f32,
    },
    /// Tensors that the model needs are absent, or tensors are there that no part of the model uses.
    #[error("{} tensors are missing: {missing}; {} tensors are not used: {unexpected}", .missing.len(), .unexpected.len())]
    TensorList {
        /// Names the model needs.
        missing: NameList,
        /// Names nothing uses.
        unexpected: NameList,
    },
    /// The text model's tensors occur under more than one prefix.
    #[error("text tensors under two prefixes: {first} and {second}")]
    MixedPrefixes {
        /// A tensor under one prefix.
        first: String,
        /// A tensor under another.
        second: String,
    },
    /// The MTP block is there in part.
    #[error("the MTP block is incomplete, {} tensors are missing: {missing}", .missing.len())]
    IncompleteMtp {
        /// Names the block needs.
        missing: NameList,
    },
    /// There is no output head: it is neither stored nor declared to be the embedding.
    #[error("no {tensor}, and the config does not tie the head to the embedding")]
    NoHead {
        /// Name the head would have.
        tensor: String,
    },
    /// The model has no such matrix or vector.
    #[error("{layer} has no {role}")]
    NoSuchWeight {
        /// Where it was looked for.
        layer: String,
        /// What was looked for.
        role: String,
    },
    /// Data of a new file was not given, or does not belong there.
    #[error("{bytes} bytes of tensor {tensor} are missing or do not fit")]
    Unwritten {
        /// The tensor, or the first of its file.
        tensor: String,
        /// Bytes.
        bytes: u64,
    },
    /// Memory for a tensor could not be had.
    #[error("{what} needs {bytes} bytes, which could not be allocated")]
    OutOfMemory {
        /// The tensor.
        what: String,
        /// Bytes asked for.
        bytes: u64,
    },
}

impl Error {
    /// One line on what to do about it.
    #[must_use]
    pub fn help(&self) -> &'static str {
        match self {
            Self::Core(e) => e.help(),
            Self::Quant { source, .. } => source.help(),
            Self::Io { kind: std::io::ErrorKind::StorageFull, .. } => "free space on the disk, or write to another one",
            Self::Io { action: "write", .. } => "check that the folder exists and may be written to",
            Self::Io { .. } => "check that the path exists, is a file and may be read",
            Self::FileTooLarge { .. } | Self::Json { .. } | Self::Header { .. } => {
                "the file is damaged or a download placeholder: fetch it again"
            }
            Self::ConfigMissing { .. } => "use the config.json the checkpoint was published with",
            Self::ConfigValue { .. } => "this variant of the model is not implemented, or the value was edited",
            Self::UnsupportedModel { .. } => "choose a checkpoint of the Qwen3.5, 3.6 or 3.8 family",
            Self::UnsupportedQuantization { .. } => "choose the BF16 release, or one in a supported format",
            Self::NoCheckpoint { .. } => "give the folder that holds config.json and the weights",
            Self::Container { fault: DirectoryFault::Version { .. }, .. } => {
                "convert the model to version 2, or use a folder"
            }
            Self::Container { .. } => "the file is damaged or no container: fetch it again",
            Self::UnknownContainer { .. } => "put the model's config.json into the folder of the container",
            Self::UnsafePath { .. } => "put all shards into one folder as plain files and correct the index",
            Self::MissingShard { .. } => "fetch the missing file into the folder of the index",
            Self::IndexMismatch { .. } | Self::DuplicateTensor { .. } => {
                "index and shards are of different downloads: fetch both again"
            }
            Self::TensorDType { .. } | Self::TensorShape { .. } => "config and weights do not belong together",
            Self::NonFinite { .. } => "the weights are damaged: fetch or convert the file again",
            Self::TensorList { .. } => "config and weights do not belong together, or a converter renamed tensors",
            Self::MixedPrefixes { .. } => "the folder holds the tensors of two exports: keep one",
            Self::IncompleteMtp { .. } => "fetch the shard with the mtp tensors, or remove all of them",
            Self::NoHead { .. } => {
                "fetch the shard with lm_head.weight, or set tie_word_embeddings if the head is tied"
            }
            Self::NoSuchWeight { .. } => "ask the config which kind of layer this is",
            Self::Unwritten { .. } => "write every byte of every planned tensor, and no other",
            Self::OutOfMemory { .. } => "free memory, or convert the checkpoint to a smaller format first",
        }
    }

    pub(crate) fn io(file: &Path, action: &'static str, error: &std::io::Error) -> Self {
        Self::Io { file: file.to_owned(), action, kind: error.kind(), message: error.to_string() }
    }
}

/// Names for an error message: the first of them, and how many there are.
///
/// A hostile file can lack millions of tensors; only the first [`NameList::KEPT`] names are kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameList {
    names: Vec<String>,
    total: usize,
}

impl NameList {
    /// Names that are kept.
    pub const KEPT: usize = 256;

    pub(crate) fn push(&mut self, name: impl Into<String>) {
        if self.names.len() < Self::KEPT {
            self.names.push(name.into());
        }
        self.total += 1;
    }

    pub(crate) fn append(&mut self, other: Self) {
        let more = other.total - other.names.len();
        other.names.into_iter().for_each(|name| self.push(name));
        self.total += more;
    }

    /// The names kept, in the order they were found.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// How many names there are, the dropped ones included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.total
    }

    /// Whether there is no name.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.total == 0
    }
}

impl std::fmt::Display for NameList {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        // Names come from a file: control characters must not reach a terminal.
        for (i, name) in self.names.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            if name.is_empty() { write!(f, "{comma}\"\"")? } else { write!(f, "{comma}{}", name.escape_debug())? }
        }
        match self.total - self.names.len() {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

impl<S: Into<String>> FromIterator<S> for NameList {
    fn from_iter<I: IntoIterator<Item = S>>(iter: I) -> Self {
        let mut list = Self::default();
        iter.into_iter().for_each(|name| list.push(name));
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_lists_stay_small() {
        let list: NameList = (0..100_000).map(|i| i.to_string()).collect();
        assert_eq!((list.len(), list.names().len()), (100_000, NameList::KEPT));
        assert!(list.to_string().ends_with("255 and 99744 more"));
        assert_eq!(NameList::default().to_string(), "none");
    }
}
