//! Positioned reads of large files.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// A file that is read at given offsets, by several threads at a time if need be.
#[derive(Debug)]
pub(crate) struct RandomFile {
    path: PathBuf,
    len: u64,
    #[cfg(any(unix, windows))]
    file: File,
    #[cfg(not(any(unix, windows)))]
    file: std::sync::Mutex<File>,
}

impl RandomFile {
    pub(crate) fn open(path: PathBuf) -> Result<Self> {
        // Asked before opening, which would wait for a writer if this were a named pipe, and again of what was opened.
        let plain = |meta: &std::fs::Metadata| {
            let error = || std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a plain file");
            meta.is_file().then_some(()).ok_or_else(|| Error::io(&path, "open", &error()))
        };
        plain(&std::fs::metadata(&path).map_err(|e| Error::io(&path, "open", &e))?)?;
        let file = File::open(&path).map_err(|e| Error::io(&path, "open", &e))?;
        let meta = file.metadata().map_err(|e| Error::io(&path, "read", &e))?;
        plain(&meta)?;
        #[cfg(not(any(unix, windows)))]
        let file = std::sync::Mutex::new(file);
        Ok(Self { path, len: meta.len(), file })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the file when it was opened.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Fills `buffer` from `offset` on.
    pub(crate) fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.read_at(buffer, offset).map_err(|e| Error::io(&self.path, "read", &e))
    }

    #[cfg(unix)]
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.file, buffer, offset)
    }

    #[cfg(windows)]
    fn read_at(&self, mut buffer: &mut [u8], mut offset: u64) -> std::io::Result<()> {
        while !buffer.is_empty() {
            let n = std::os::windows::fs::FileExt::seek_read(&self.file, buffer, offset)?;
            if n == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            buffer = buffer.split_at_mut(n).1;
            offset += n as u64;
        }
        Ok(())
    }

    #[cfg(not(any(unix, windows)))]
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        use std::io::{Seek, SeekFrom};
        let mut file = self.file.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        file.seek(SeekFrom::Start(offset))?;
        file.read_exact(buffer)
    }
}
