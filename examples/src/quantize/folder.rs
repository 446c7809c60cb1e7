//! The output folder: made under another name, flushed, and renamed when it is complete.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use crate::{Failure, Result};

/// Weights in other forms, which the output does not repeat.
const OTHER_WEIGHTS: [&str; 11] =
    ["safetensors", "bin", "pt", "pth", "gguf", "h5", "msgpack", "onnx", "ot", "ckpt", "ninfer"];
/// Files that are written anew, or not at all.
const WRITTEN: [&str; 2] = [super::CONFIG_FILE, "model.safetensors.index.json"];
/// Where ModelOpt says what `quantization_config` says.
const MODEL_OPT: &str = "hf_quant_config.json";

/// A folder that is being filled. Dropped before it is finished, it is removed.
#[derive(Debug)]
pub struct Staging {
    target: PathBuf,
    dir: PathBuf,
    finished: bool,
}

impl Staging {
    /// Makes `<target>.partial` beside the target.
    ///
    /// # Errors
    /// [`Failure::Exists`] if the target is there and `force` is not set, or is no folder of a model; the same if an interrupted
    /// run, or one that still goes on, has left a partial folder. [`Failure::Unwritable`].
    pub fn open(source: &Path, target: &Path, force: bool) -> Result<Self> {
        let name = target.file_name().ok_or_else(|| {
            Failure::usage(format!("--output {} has no name", target.display()), "give the path of a folder to make")
        })?;
        let mut partial = name.to_owned();
        partial.push(".partial");
        let dir = target.with_file_name(partial);
        if let (Ok(a), Ok(b)) = (source.canonicalize(), target.canonicalize())
            && a == b
        {
            return Err(Failure::usage("--output is the folder of the model itself", "give another folder"));
        }
        check_replaceable(target, force)?;
        check_replaceable(&dir, force)?;
        if dir.symlink_metadata().is_ok() {
            fs::remove_dir_all(&dir).map_err(|e| Failure::unwritable(&dir, &e))?;
        }
        fs::create_dir(&dir).map_err(|e| Failure::unwritable(&dir, &e))?;
        Ok(Self { target: target.to_owned(), dir, finished: false })
    }

    /// The folder to fill.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Gives the folder its name; what had it is removed.
    ///
    /// # Errors
    /// [`Failure::Unwritable`].
    pub fn finish(mut self) -> Result<()> {
        sync_folder(&self.dir)?;
        let unwritable = |e: io::Error| Failure::unwritable(&self.target, &e);
        let old = if self.target.symlink_metadata().is_ok() {
            let mut name = self.target.file_name().unwrap_or_default().to_owned();
            name.push(".replaced");
            let old = self.target.with_file_name(name);
            fs::rename(&self.target, &old).map_err(unwritable)?;
            Some(old)
        } else {
            None
        };
        fs::rename(&self.dir, &self.target).map_err(unwritable)?;
        self.finished = true;
        let parent = match self.target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        sync_folder(parent)?;
        if let Some(old) = old {
            fs::remove_dir_all(&old).map_err(|e| Failure::unwritable(&old, &e))?;
        }
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.finished {
            // A failure is already on its way to the user; the name says that the folder is partial.
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

/// Refuses what is there unless it may be replaced: with `force`, by a folder of plain files that looks like a model.
fn check_replaceable(path: &Path, force: bool) -> Result<()> {
    let Ok(meta) = path.symlink_metadata() else { return Ok(()) };
    let exists = |help: &str| Failure::Exists { path: path.to_owned(), help: help.to_owned() };
    if !force {
        return Err(exists("name another folder, or remove it or give --force if nothing needs it"));
    }
    let keep = || exists("--force replaces only folders of a model; remove it yourself if nothing needs it");
    if !meta.is_dir() {
        return Err(keep());
    }
    let entries = fs::read_dir(path).map_err(|e| Failure::unreadable(path, &e))?;
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| Failure::unreadable(path, &e))?;
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            return Err(keep());
        }
        names.push(entry.file_name());
    }
    let is_model = |name: &std::ffi::OsString| {
        name == super::CONFIG_FILE || Path::new(name).extension().is_some_and(|e| e == "safetensors")
    };
    if names.is_empty() || names.iter().any(is_model) { Ok(()) } else { Err(keep()) }
}

/// Copies tokenizer, generation settings, chat template and whatever else is small beside the weights.
pub(super) fn copy_small_files(source: &Path, dir: &Path, with_model_opt: bool) -> Result<()> {
    let mut names = Vec::new();
    for entry in fs::read_dir(source).map_err(|e| Failure::unreadable(source, &e))? {
        names.push(entry.map_err(|e| Failure::unreadable(source, &e))?.file_name());
    }
    names.sort();
    for name in names {
        let from = source.join(&name);
        let text = name.to_string_lossy();
        let extension = from.extension().and_then(|e| e.to_str()).unwrap_or_default();
        let skipped = WRITTEN.contains(&&*text)
            || text.starts_with('.')
            || text.ends_with(".index.json")
            || OTHER_WEIGHTS.contains(&extension)
            || (text == MODEL_OPT && !with_model_opt);
        // A link of a download cache counts as what it points to.
        if skipped || !fs::metadata(&from).map_err(|e| Failure::unreadable(&from, &e))?.is_file() {
            continue;
        }
        let mut input = File::open(&from).map_err(|e| Failure::unreadable(&from, &e))?;
        let to = dir.join(&name);
        let mut output = File::create_new(&to).map_err(|e| Failure::unwritable(&to, &e))?;
        io::copy(&mut input, &mut output).and_then(|_| output.sync_all()).map_err(|e| Failure::unwritable(&to, &e))?;
    }
    Ok(())
}

/// Writes a file and waits until it is on the disk.
pub(super) fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || -> io::Result<()> {
        let mut file = File::create_new(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|e| Failure::unwritable(path, &e))
}

/// Waits until the names in a folder are on the disk, where the system can do that.
fn sync_folder(dir: &Path) -> Result<()> {
    if cfg!(unix) {
        File::open(dir).and_then(|f| f.sync_all()).map_err(|e| Failure::unwritable(dir, &e))?;
    }
    Ok(())
}
