//! `.ninfer` containers: one file with the weights of a model and what its text needs.
//!
//! A file is `NINFER`, a zero byte and a version byte (1 or 2), eight bytes with the length of a JSON directory (little
//! endian), the directory, and at the next multiple of 4096 the payload. The directory has the identity of model and weights, and
//! a list of objects in the order of their bytes: tensors with shape, format and layout (see
//! [`ninfer_quant::container`]), starting at multiples of 256, and resources, which are bytes of files. There are no
//! checksums.
//!
//! [`Container::open`] reads and checks the directory only. [`WeightTable::open`](crate::WeightTable::open) takes the path of a
//! container and finds the weights of a model in it under the names of the published inventories; which names those are,
//! and how they relate to the modules of other checkpoints, is written at [`Inventory`].
//!
//! What is written here follows the public description of the format. No published container was at hand to confirm it;
//! the tests write containers of their own.

mod directory;
mod inventory;
mod known;
mod read;

use std::collections::HashMap;
use std::path::Path;

pub use self::directory::{DirectoryFault, MAX_DIRECTORY_BYTES, Object, ObjectKind};
pub use self::inventory::Inventory;
pub(crate) use self::read::ContainerWeights;
use crate::checkpoint::RandomFile;
use crate::{Config, Error, Result};

/// Ending of the name of a container.
pub const EXTENSION: &str = "ninfer";
/// Bytes of one read; progress is reported after each.
const READ_BYTES: usize = 16 << 20;

/// Whether a path names a container rather than a folder: its name ends in `.ninfer`, and it is no folder.
#[must_use]
pub fn is_container(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == EXTENSION) && !path.is_dir()
}

/// An open container whose directory was checked.
///
/// ```no_run
/// use ninfer_models::container::Container;
///
/// let container = Container::open("models/qwen3_6_27b.ninfer")?;
/// println!("{} {:?}", container.model_id(), container.weights_id());
/// for object in container.objects() {
///     println!("{} {:?}", object.name(), object.kind());
/// }
/// # Ok::<(), ninfer_models::Error>(())
/// ```
#[derive(Debug)]
pub struct Container {
    file: RandomFile,
    model_id: String,
    weights_id: Option<String>,
    objects: Vec<Object>,
    by_name: HashMap<String, usize>,
}

impl Container {
    /// Opens a file and checks its directory.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Container`] naming file and object.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let file = RandomFile::open(path.as_ref().to_owned())?;
        let named = |fault| Error::Container { file: file.path().to_owned(), fault };
        let mut prefix = [0; directory::PREFIX_BYTES];
        if file.len() < prefix.len() as u64 {
            return Err(named(DirectoryFault::Magic));
        }
        file.read_exact_at(&mut prefix, 0)?;
        let length = directory::prefix(prefix, file.len()).map_err(named)?;
        let mut json = vec![0; length];
        file.read_exact_at(&mut json, prefix.len() as u64)?;
        let directory::Directory { model_id, weights_id, objects } =
            directory::parse(&json, file.len()).map_err(named)?;
        let by_name = objects.iter().enumerate().map(|(i, o)| (o.name.clone(), i)).collect();
        Ok(Self { file, model_id, weights_id, objects, by_name })
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Identity of the model, for example `qwen3.6-27b`.
    #[must_use]
    pub fn model_id(&self) -> &str {
        &self.model_id
    }

    /// Identity of the weights within the model, for example `groupwise-int`; the first version has none.
    #[must_use]
    pub fn weights_id(&self) -> Option<&str> {
        self.weights_id.as_deref()
    }

    /// All objects in the order of their bytes.
    #[must_use]
    pub fn objects(&self) -> &[Object] {
        &self.objects
    }

    /// The object of a name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Object> {
        self.objects.get(*self.by_name.get(name)?)
    }

    fn index(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// A resource, for example `frontend/tokenizer.json`, of at most `limit` bytes; none if the container does not have it.
    ///
    /// # Errors
    /// [`Error::FileTooLarge`], [`Error::Io`], [`Error::OutOfMemory`].
    pub fn resource(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>> {
        match self.get(name) {
            Some(o) if o.kind == ObjectKind::Resource => {
                if o.bytes > limit {
                    return Err(Error::FileTooLarge { file: self.path().join(name), got: o.bytes, limit });
                }
                self.read(o, 0..o.bytes, &|_| {}).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Reads a byte range of an object of this container.
    fn read(&self, object: &Object, range: std::ops::Range<u64>, progress: &dyn Fn(u64)) -> Result<Vec<u8>> {
        let bytes = range.end.min(object.bytes).saturating_sub(range.start);
        let out_of_memory = || Error::OutOfMemory { what: object.name.clone(), bytes };
        let len = usize::try_from(bytes).map_err(|_| out_of_memory())?;
        let mut data = Vec::new();
        data.try_reserve_exact(len).map_err(|_| out_of_memory())?;
        data.resize(len, 0);
        let mut at = object.start.saturating_add(range.start);
        for part in data.chunks_mut(READ_BYTES) {
            self.file.read_exact_at(part, at)?;
            at += part.len() as u64;
            progress(part.len() as u64);
        }
        Ok(data)
    }

    /// The configuration of the model: that of its identity where this library knows it, else `config.json` beside the
    /// container.
    ///
    /// # Errors
    /// [`Error::UnknownContainer`] if there is neither; those of [`Config::from_dir`].
    pub fn config(&self) -> Result<Config> {
        if let Some(config) = known::config(&self.model_id)? {
            return Ok(config);
        }
        let dir = self.path().parent().unwrap_or(Path::new(""));
        match Config::from_dir(dir) {
            Err(Error::Io { kind: std::io::ErrorKind::NotFound, .. }) => Err(Error::UnknownContainer {
                file: self.path().to_owned(),
                model_id: self.model_id.clone(),
                known: known::MODELS.join(", "),
            }),
            other => other,
        }
    }
}
