//! Writing a checkpoint: planned from names and shapes, filled tensor by tensor, flushed at the end.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use ninfer_core::DType;
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use super::{INDEX_FILE, LENGTH_BYTES, SINGLE_FILE, TensorEntry};
use crate::{Error, Result};

/// A tensor that will be written.
#[derive(Clone, Debug, PartialEq)]
pub struct NewTensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: u64,
}

impl NewTensor {
    /// A tensor of this element type and shape.
    #[must_use]
    pub fn new(name: impl Into<String>, dtype: DType, shape: &[usize]) -> Self {
        let stored = match dtype {
            DType::F32 => Dtype::F32,
            DType::F16 => Dtype::F16,
            DType::Bf16 => Dtype::BF16,
            DType::F8E4M3 => Dtype::F8_E4M3,
            DType::I8 => Dtype::I8,
            DType::I32 => Dtype::I32,
            DType::U32 => Dtype::U32,
            DType::I64 => Dtype::I64,
            _ => Dtype::U8,
        };
        let bytes = shape.iter().fold(dtype.size() as u64, |n, &d| n.saturating_mul(d as u64));
        Self { name: name.into(), dtype: stored, shape: shape.to_vec(), bytes }
    }

    /// A tensor like one that is stored.
    #[must_use]
    pub fn like(tensor: &TensorEntry) -> Self {
        Self { name: tensor.name.clone(), dtype: tensor.dtype, shape: tensor.shape.clone(), bytes: tensor.bytes }
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes of the data.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// A file of the plan.
#[derive(Debug)]
struct Shard {
    path: PathBuf,
    /// Length, JSON and padding.
    header: Vec<u8>,
    data: u64,
    /// Bytes of the data that were not written yet.
    left: u64,
    file: Option<File>,
}

/// A checkpoint that is being written.
///
/// Tensors are spread over files in the given order. Inside a file those with wide elements come first, so that every
/// element lies at a multiple of its size. Data may come in any order and in pieces. Headers are written at the very end; until
/// then no file is a safetensors file.
///
/// ```no_run
/// use ninfer_core::DType;
/// use ninfer_models::checkpoint::{CheckpointWriter, NewTensor};
///
/// let mut writer = CheckpointWriter::create("out", &[NewTensor::new("norm.weight", DType::F32, &[2])], 5 << 30)?;
/// writer.write(0, 0, &[0; 8])?;
/// let files = writer.finish()?;
/// assert_eq!(files.len(), 1);
/// # Ok::<(), ninfer_models::Error>(())
/// ```
#[derive(Debug)]
pub struct CheckpointWriter {
    dir: PathBuf,
    shards: Vec<Shard>,
    tensors: Vec<Placed>,
    index: Option<Value>,
}

#[derive(Clone, Debug)]
struct Placed {
    name: String,
    shard: usize,
    /// From the start of the file.
    offset: u64,
    bytes: u64,
}

impl CheckpointWriter {
    /// Plans the files of a folder that exists; nothing is written yet.
    ///
    /// Files have at most `shard_bytes` of data, or one tensor. One file is `model.safetensors`; several are
    /// `model-00001-of-0000N.safetensors` with an index.
    ///
    /// # Errors
    /// [`Error::DuplicateTensor`] for a name that occurs twice.
    pub fn create(dir: impl AsRef<Path>, tensors: &[NewTensor], shard_bytes: u64) -> Result<Self> {
        let dir = dir.as_ref();
        let mut names: Vec<&str> = tensors.iter().map(NewTensor::name).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|w| w[0] == w[1]) {
            let (first, second) = (dir.to_owned(), dir.to_owned());
            return Err(Error::DuplicateTensor { tensor: twice[0].to_owned(), first, second });
        }
        let groups = groups(tensors, shard_bytes);
        let mut writer = Self { dir: dir.to_owned(), shards: Vec::new(), tensors: Vec::new(), index: None };
        let mut map = Map::new();
        let empty = Placed { name: String::new(), shard: 0, offset: 0, bytes: 0 };
        writer.tensors = vec![empty; tensors.len()];
        for (i, group) in groups.iter().enumerate() {
            let name = match groups.len() {
                1 => SINGLE_FILE.to_owned(),
                n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
            };
            for &t in group {
                map.insert(tensors[t].name.clone(), json!(name));
            }
            writer.add(i, dir.join(name), group, tensors);
        }
        if groups.len() > 1 {
            let total: u64 = tensors.iter().map(NewTensor::bytes).sum();
            writer.index = Some(json!({ "metadata": { "total_size": total }, "weight_map": map }));
        }
        Ok(writer)
    }

    fn add(&mut self, shard: usize, path: PathBuf, group: &[usize], tensors: &[NewTensor]) {
        let mut order = group.to_vec();
        order.sort_by_key(|&t| std::cmp::Reverse(tensors[t].dtype.bitsize()));
        let mut members = Map::new();
        // As the libraries of PyTorch write it; some refuse files without it.
        members.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
        let mut end = 0u64;
        for &t in &order {
            let NewTensor { name, dtype, shape, bytes } = &tensors[t];
            let start = end;
            end += bytes;
            let value = json!({ "dtype": dtype.to_string(), "shape": shape, "data_offsets": [start, end] });
            members.insert(name.clone(), value);
            self.tensors[t] = Placed { name: name.clone(), shard, offset: start, bytes: *bytes };
        }
        let mut text = Value::Object(members).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(LENGTH_BYTES as usize), b' ');
        let mut header = (text.len() as u64).to_le_bytes().to_vec();
        header.append(&mut text);
        for &t in &order {
            self.tensors[t].offset += header.len() as u64;
        }
        self.shards.push(Shard { path, header, data: end, left: end, file: None });
    }

    /// Names of the files and their bytes, headers included.
    pub fn files(&self) -> impl Iterator<Item = (&Path, u64)> {
        self.shards.iter().map(|s| (s.path.as_path(), s.header.len() as u64 + s.data))
    }

    /// Writes a piece of the data of tensor `index` (counted as in [`CheckpointWriter::create`]) at byte `offset` of it.
    ///
    /// A file is flushed to the disk when all of its bytes were written; pieces must not overlap.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Unwritten`] for a piece that is not inside the tensor.
    pub fn write(&mut self, index: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let n = bytes.len() as u64;
        let Some(t) = self.tensors.get(index).filter(|t| offset.checked_add(n).is_some_and(|end| end <= t.bytes))
        else {
            let tensor = self.tensors.get(index).map_or_else(String::new, |t| t.name.clone());
            return Err(Error::Unwritten { tensor, bytes: n });
        };
        let Some(shard) = self.shards.get_mut(t.shard) else { return Ok(()) };
        let result = shard.write(t.offset + offset, bytes);
        result.map_err(|e| Error::io(&shard.path, "write", &e))
    }

    /// Writes the headers and the index; flushes everything to the disk. Gives the files written.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Unwritten`] naming the first tensor of a file that is not full.
    pub fn finish(self) -> Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for (i, shard) in self.shards.iter().enumerate() {
            if shard.left > 0 {
                let tensor = self.tensors.iter().find(|t| t.shard == i).map_or_else(String::new, |t| t.name.clone());
                return Err(Error::Unwritten { tensor, bytes: shard.left });
            }
        }
        for shard in &self.shards {
            shard.close().map_err(|e| Error::io(&shard.path, "write", &e))?;
            files.push(shard.path.clone());
        }
        if let Some(index) = &self.index {
            let path = self.dir.join(INDEX_FILE);
            let write = || -> std::io::Result<()> {
                let mut file = File::create_new(&path)?;
                file.write_all(format!("{index:#}\n").as_bytes())?;
                file.sync_all()
            };
            write().map_err(|e| Error::io(&path, "write", &e))?;
            files.push(path);
        }
        Ok(files)
    }
}

impl Shard {
    /// Writes the header in front of the data and waits until it is on the disk.
    fn close(&self) -> std::io::Result<()> {
        let mut file = match self.data {
            0 => File::create_new(&self.path)?,
            _ => File::options().write(true).open(&self.path)?,
        };
        file.write_all(&self.header)?;
        file.sync_all()
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> std::io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let mut file = match self.file.take() {
            Some(file) => file,
            None => File::create_new(&self.path)?,
        };
        file.seek(SeekFrom::Start(at))?;
        file.write_all(bytes)?;
        self.left = self.left.saturating_sub(bytes.len() as u64);
        if self.left == 0 {
            return file.sync_all();
        }
        self.file = Some(file);
        Ok(())
    }
}

/// Tensors in order, cut before the one that would pass the limit.
fn groups(tensors: &[NewTensor], shard_bytes: u64) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = vec![Vec::new()];
    let mut filled = 0u64;
    for (i, t) in tensors.iter().enumerate() {
        if filled > 0 && filled.saturating_add(t.bytes) > shard_bytes {
            groups.push(Vec::new());
            filled = 0;
        }
        filled = filled.saturating_add(t.bytes);
        if let Some(last) = groups.last_mut() {
            last.push(i);
        }
    }
    groups
}
