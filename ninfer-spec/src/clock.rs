//! Where measured times come from.

use std::fmt;
use std::time::Instant;

/// A source of time.
///
/// Times steer only how many drafts are verified, never which tokens come out.
pub trait Clock: fmt::Debug + Send + Sync {
    /// Seconds since some fixed moment; never decreases.
    fn seconds(&self) -> f64;
}

/// The machine's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    start: Instant,
}

impl SystemClock {
    /// Starts at 0.
    #[must_use]
    pub fn new() -> Self {
        Self { start: Instant::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn seconds(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }
}
