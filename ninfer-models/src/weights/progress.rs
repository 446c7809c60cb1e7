//! Reports on how far loading has come.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// How far loading has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Bytes read so far.
    pub done: u64,
    /// Bytes of all weights of the model.
    pub total: u64,
}

type Callback = Box<dyn Fn(Progress) + Send + Sync>;

/// Counts bytes and tells whoever asked.
#[derive(Default)]
pub(super) struct Observer {
    done: AtomicU64,
    total: u64,
    callback: Option<Callback>,
}

impl Observer {
    pub(super) fn new(total: u64) -> Self {
        Self { total, ..Self::default() }
    }

    pub(super) fn total(&self) -> u64 {
        self.total
    }

    pub(super) fn tell(&mut self, callback: Callback) {
        self.callback = Some(callback);
    }

    /// Counts bytes. What is read twice does not count past the total.
    pub(super) fn add(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes).min(self.total);
        if let Some(callback) = &self.callback {
            callback(Progress { done, total: self.total });
        }
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer").field("done", &self.done).field("total", &self.total).finish_non_exhaustive()
    }
}
