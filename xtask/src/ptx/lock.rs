//! One writer at a time: several people may compile different families in one tree.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

/// How often a lock is looked at.
const PAUSE: Duration = Duration::from_millis(50);
/// A lock as old as this was left behind by a run that was killed: writing takes a second.
const STALE: Duration = Duration::from_secs(60);

/// The right to write, until dropped.
#[derive(Debug)]
pub struct Lock(PathBuf);

impl Lock {
    /// Waits until no other run writes. The folder is made if it is missing.
    pub fn take(folder: &Path) -> Result<Self, String> {
        let file = folder.join("ptx.lock");
        let fail = |e: std::io::Error| format!("{}: {e}", file.display());
        fs::create_dir_all(folder).map_err(fail)?;
        loop {
            match File::create_new(&file) {
                Ok(_) => return Ok(Self(file)),
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => return Err(fail(e)),
            }
            let age = fs::metadata(&file).and_then(|m| m.modified()).ok().and_then(|t| t.elapsed().ok());
            match age {
                Some(age) if age > STALE => drop(fs::remove_file(&file)),
                _ => sleep(PAUSE),
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // One that is left behind is removed by the next run.
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn one_holds_the_lock_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let (inside, entered) = (AtomicU32::new(0), AtomicU32::new(0));
        crate::parallel::map(vec![(); 8], |()| {
            let lock = Lock::take(folder.path()).unwrap();
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
            entered.fetch_add(1, Ordering::SeqCst);
            inside.fetch_sub(1, Ordering::SeqCst);
            drop(lock);
        });
        assert_eq!(entered.into_inner(), 8);
    }

    #[test]
    fn a_lock_of_a_killed_run_is_broken() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(folder.path().join("ptx.lock")).unwrap();
        file.set_modified(std::time::SystemTime::now() - 2 * STALE).unwrap();
        drop(Lock::take(folder.path()).unwrap());
        assert!(fs::read_dir(folder.path()).unwrap().next().is_none());
    }
}
