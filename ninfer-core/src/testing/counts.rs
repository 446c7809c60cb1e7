//! What was counted.

use std::collections::BTreeMap;
use std::fmt;

/// Launches per operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Launches(BTreeMap<&'static str, u64>);

impl Launches {
    /// Launches of one operation, by the name of its method; 0 for a name that never occurred.
    #[must_use]
    pub fn of(&self, op: &str) -> u64 {
        self.0.get(op).copied().unwrap_or(0)
    }

    /// All launches.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.values().sum()
    }

    /// Operations in alphabetical order with their launches.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.0.iter().map(|(&op, &n)| (op, n))
    }

    pub(super) fn add(&mut self, op: &'static str, launches: u64) {
        *self.0.entry(op).or_default() += launches;
    }

    pub(super) fn merge(&mut self, other: &Self) {
        for (op, n) in other.iter() {
            self.add(op, n);
        }
    }
}

/// `attend 4, project 8 (12)`.
impl fmt::Display for Launches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (op, n)) in self.iter().enumerate() {
            write!(f, "{}{op} {n}", if i == 0 { "" } else { ", " })?;
        }
        write!(f, " ({})", self.total())
    }
}

/// What passed through a [`Counting`](super::Counting) backend; only what succeeded is counted, except for launches, which
/// count when they are submitted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Operations that ran at once.
    pub launches: Launches,
    /// Operations that ran in replayed steps.
    pub replayed: Launches,
    /// Steps recorded.
    pub recorded: u64,
    /// Steps replayed.
    pub replays: u64,
    /// Buffers allocated.
    pub allocations: u64,
    /// Bytes allocated.
    pub allocated_bytes: u64,
    /// Weights prepared.
    pub prepared: u64,
    /// Copies from the host.
    pub uploads: u64,
    /// Bytes copied from the host.
    pub uploaded_bytes: u64,
    /// Copies to the host.
    pub downloads: u64,
    /// Bytes copied to the host.
    pub downloaded_bytes: u64,
}
