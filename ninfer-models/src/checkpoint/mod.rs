//! Safetensors files on disk: one file, or shards with an index.
//!
//! [`Checkpoint::open`] reads and checks headers only. Data is read at given offsets into heap buffers, nothing is mapped;
//! elements are taken from bytes, so data may start at any offset.

mod header;
mod index;
mod pairs;
mod random_file;
mod writer;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use ninfer_core::DType;
use safetensors::Dtype;

pub use self::header::{HeaderFault, MAX_HEADER_BYTES};
use self::header::{HeaderTensor, LENGTH_BYTES};
use self::index::Index;
pub(crate) use self::random_file::RandomFile;
pub use self::writer::{CheckpointWriter, NewTensor};
use crate::error::NameList;
use crate::{Error, Result};

/// File of an unsharded checkpoint.
pub const SINGLE_FILE: &str = "model.safetensors";
/// Index of a sharded checkpoint.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// Bytes of one read; progress is reported after each.
const READ_BYTES: usize = 16 << 20;

/// A stored tensor: what the header says about it.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorEntry {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: u64,
    file: usize,
    /// From the start of the file.
    offset: u64,
}

impl TensorEntry {
    /// The name in the file.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The shape.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The element type; none for those that no weight of this library has (F64, BOOL, …).
    #[must_use]
    pub fn dtype(&self) -> Option<DType> {
        header::core_dtype(self.dtype)
    }

    /// The element type as the file calls it.
    #[must_use]
    pub fn dtype_name(&self) -> impl fmt::Display + use<> {
        self.dtype
    }

    /// Bytes of the data.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// An open checkpoint whose headers were checked.
///
/// ```no_run
/// use ninfer_models::checkpoint::Checkpoint;
///
/// let checkpoint = Checkpoint::open("models/qwen3.5-9b")?;
/// for tensor in checkpoint.tensors() {
///     println!("{} {} {:?}", tensor.name(), tensor.dtype_name(), tensor.shape());
/// }
/// # Ok::<(), ninfer_models::Error>(())
/// ```
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    files: Vec<RandomFile>,
    tensors: Vec<TensorEntry>,
    by_name: HashMap<String, usize>,
}

impl Checkpoint {
    /// Opens `model.safetensors` of a folder or, where there is none, the shards of `model.safetensors.index.json`.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`]; [`Error::Io`]; [`Error::Header`] for a header that is damaged or does not cover the file;
    /// [`Error::Json`], [`Error::UnsafePath`], [`Error::MissingShard`], [`Error::IndexMismatch`] and
    /// [`Error::DuplicateTensor`] for an index that is damaged or does not fit the shards.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let (single, index) = (dir.join(SINGLE_FILE), dir.join(INDEX_FILE));
        let mut checkpoint =
            Self { dir: dir.to_owned(), files: Vec::new(), tensors: Vec::new(), by_name: HashMap::new() };
        if single.exists() {
            let tensors = checkpoint.add_file(single)?;
            checkpoint.add_tensors(tensors);
        } else if index.exists() {
            for (entry, names) in Index::read(&index)?.0 {
                checkpoint.add_shard(&entry, &names)?;
            }
        } else {
            return Err(Error::NoCheckpoint { dir: dir.to_owned() });
        }
        Ok(checkpoint)
    }

    /// A checkpoint of no tensor, for weights that come from elsewhere.
    pub(crate) fn without_files(path: &Path) -> Self {
        Self { dir: path.to_owned(), files: Vec::new(), tensors: Vec::new(), by_name: HashMap::new() }
    }

    /// The folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// All tensors, file by file in the order of their bytes.
    #[must_use]
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.tensors
    }

    /// The tensor of a name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.get(*self.by_name.get(name)?)
    }

    /// The file that holds a tensor of this checkpoint.
    #[must_use]
    pub fn file_of(&self, tensor: &TensorEntry) -> &Path {
        self.files.get(tensor.file).map_or(&self.dir, RandomFile::path)
    }

    /// Reads the data of a tensor of this checkpoint.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read to the end of the tensor, [`Error::OutOfMemory`].
    pub fn read(&self, tensor: &TensorEntry) -> Result<Vec<u8>> {
        self.read_range(tensor, 0..tensor.bytes, &mut |_| {})
    }

    /// Reads a byte range of the data of a tensor; `progress` is told the bytes of each part when it has arrived.
    ///
    /// A range past the end of the tensor is cut off there.
    ///
    /// # Errors
    /// As [`Checkpoint::read`].
    pub fn read_range(
        &self,
        tensor: &TensorEntry,
        range: Range<u64>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Vec<u8>> {
        let end = range.end.min(tensor.bytes);
        let bytes = end.saturating_sub(range.start);
        let out_of_memory = || Error::OutOfMemory { what: tensor.name.clone(), bytes };
        let len = usize::try_from(bytes).map_err(|_| out_of_memory())?;
        let mut data = Vec::new();
        data.try_reserve_exact(len).map_err(|_| out_of_memory())?;
        let Some(file) = self.files.get(tensor.file) else {
            let e = std::io::Error::new(std::io::ErrorKind::NotFound, "tensor of another checkpoint");
            return Err(Error::io(&self.dir, "read", &e));
        };
        while data.len() < len {
            let done = data.len();
            let part = READ_BYTES.min(len - done);
            data.resize(done + part, 0);
            let offset = tensor.offset.saturating_add(range.start).saturating_add(done as u64);
            // `resize` made the slice from `done` on exactly `part` long.
            file.read_exact_at(&mut data[done..], offset)?;
            progress(part as u64);
        }
        Ok(data)
    }

    fn add_shard(&mut self, entry: &str, names: &[String]) -> Result<()> {
        // The index makes no entry without a tensor.
        let first = names.first().map_or("", String::as_str);
        let path = index::locate(&self.dir, entry, first)?;
        let tensors = self.add_file(path.clone())?;
        for t in &tensors {
            if let Some(other) = self.get(&t.name) {
                let first = self.file_of(other).to_owned();
                return Err(Error::DuplicateTensor { tensor: t.name.clone(), first, second: path });
            }
        }
        let stored: HashSet<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
        let listed: HashSet<&str> = names.iter().map(String::as_str).collect();
        let missing: NameList = names.iter().filter(|n| !stored.contains(n.as_str())).cloned().collect();
        let unlisted: NameList =
            tensors.iter().map(|t| &t.name).filter(|n| !listed.contains(n.as_str())).cloned().collect();
        if !missing.is_empty() || !unlisted.is_empty() {
            return Err(Error::IndexMismatch { file: path, missing, unlisted });
        }
        self.add_tensors(tensors);
        Ok(())
    }

    /// Opens a file and reads its header; its tensors are not added yet.
    fn add_file(&mut self, path: PathBuf) -> Result<Vec<TensorEntry>> {
        let file = RandomFile::open(path)?;
        let header = |fault| Error::Header { file: file.path().to_owned(), fault };
        if file.len() < LENGTH_BYTES {
            return Err(header(HeaderFault::TooShort { len: file.len() }));
        }
        let mut field = [0; LENGTH_BYTES as usize];
        file.read_exact_at(&mut field, 0)?;
        let len = header::header_length(field, file.len()).map_err(header)?;
        let mut text = vec![0; len];
        file.read_exact_at(&mut text, LENGTH_BYTES)?;
        let data_start = LENGTH_BYTES + len as u64;
        let tensors = header::parse(&text, file.len() - data_start).map_err(header)?;
        let index = self.files.len();
        self.files.push(file);
        let entry = |t: HeaderTensor| TensorEntry {
            name: t.name,
            dtype: t.dtype,
            shape: t.shape,
            bytes: t.bytes,
            file: index,
            offset: data_start + t.start,
        };
        Ok(tensors.into_iter().map(entry).collect())
    }

    fn add_tensors(&mut self, tensors: Vec<TensorEntry>) {
        for t in tensors {
            self.by_name.insert(t.name.clone(), self.tensors.len());
            self.tensors.push(t);
        }
    }
}

/// Reads a whole UTF-8 file of at most `limit` bytes.
pub(crate) fn read_text(path: &Path, limit: u64) -> Result<String> {
    let io = |e: std::io::Error| Error::io(path, "read", &e);
    let file = File::open(path).map_err(|e| Error::io(path, "open", &e))?;
    let got = file.metadata().map_err(io)?.len();
    let too_large = |got| Error::FileTooLarge { file: path.to_owned(), got, limit };
    if got > limit {
        return Err(too_large(got));
    }
    let mut bytes = Vec::new();
    // A file can grow between the two calls, and special files report no length at all.
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > limit {
        return Err(too_large(bytes.len() as u64));
    }
    String::from_utf8(bytes).map_err(|e| Error::Json { file: path.to_owned(), message: format!("not UTF-8: {e}") })
}
