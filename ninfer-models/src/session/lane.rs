//! Host side of a sequence: its slot, its pages and what is committed of it.

use std::sync::{Arc, Mutex, PoisonError};

use ninfer_core::segment::PAGE_TOKENS;
use ninfer_core::state::{LaneState, TokenRow};
use ninfer_core::{Error, Result};

use super::cache::RING;

/// Free slots and pages of a session; lanes give theirs back when they are dropped.
#[derive(Debug)]
pub(crate) struct Pools {
    free: Mutex<Free>,
    slots: usize,
    pages: usize,
}

#[derive(Debug)]
struct Free {
    slots: Vec<u32>,
    pages: Vec<u32>,
}

impl Pools {
    pub(crate) fn new(slots: usize, pages: usize) -> Arc<Self> {
        let descending = |n: usize| (0..n as u32).rev().collect();
        Arc::new(Self { free: Mutex::new(Free { slots: descending(slots), pages: descending(pages) }), slots, pages })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Free> {
        // The lists are valid at every moment, whatever a panicking thread was doing.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a slot and the pages for `tokens` positions.
    pub(crate) fn reserve(self: &Arc<Self>, tokens: usize) -> Result<Reserved> {
        let need = tokens.div_ceil(PAGE_TOKENS);
        let mut free = self.lock();
        if free.pages.len() < need {
            return Err(Error::Exhausted { what: "KV pages", capacity: self.pages });
        }
        let Some(slot) = free.slots.pop() else {
            return Err(Error::Exhausted { what: "sequence slot", capacity: self.slots });
        };
        let keep = free.pages.len() - need;
        let mut pages = free.pages.split_off(keep);
        pages.reverse();
        Ok(Reserved { pools: Arc::clone(self), slot, pages })
    }
}

/// A slot and pages that belong to one lane.
#[derive(Debug)]
pub(crate) struct Reserved {
    pools: Arc<Pools>,
    pub(crate) slot: u32,
    pub(crate) pages: Vec<u32>,
}

impl Reserved {
    /// Whether it was taken from these pools.
    pub(crate) fn belongs_to(&self, pools: &Arc<Pools>) -> bool {
        Arc::ptr_eq(&self.pools, pools)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let mut free = self.pools.lock();
        free.slots.push(self.slot);
        free.pages.extend(self.pages.iter().rev());
    }
}

/// A sequence of a [`Session`](super::Session); dropping it frees its slot and pages.
#[derive(Debug)]
pub struct Lane {
    pub(crate) reserved: Reserved,
    /// Positions that may be used.
    pub(crate) capacity: usize,
    pub(crate) position: usize,
    /// Columns of the last round that are committed but not yet folded into the recurrent state.
    pub(crate) fold: usize,
    /// Bank that the last round recorded into.
    pub(crate) bank: u32,
    /// MTP rows exist for slots 1 ..= this.
    pub(crate) mtp_rows: usize,
    /// Token from which the MTP row at `position` was made, if there is one.
    pub(crate) mtp_anchor: Option<u32>,
    /// Whether token choice needs logits and counts.
    pub(crate) sampled: bool,
    /// The last tokens of the committed sequence, by position modulo their number.
    pub(crate) recent: Box<[u32; RING]>,
    /// Inputs and emitted tokens of the round in flight.
    pub(crate) pending: (TokenRow, TokenRow),
    /// Set when a pass failed half-way, so that the state is not known.
    pub(crate) broken: bool,
}

impl Lane {
    pub(crate) fn new(reserved: Reserved, capacity: usize) -> Self {
        Self {
            reserved,
            capacity,
            position: 0,
            fold: 0,
            bank: 0,
            mtp_rows: 0,
            mtp_anchor: None,
            sampled: false,
            recent: Box::new([0; RING]),
            pending: Default::default(),
            broken: false,
        }
    }

    /// Fails unless `more` further positions fit.
    pub(crate) fn check(&self, more: usize) -> Result<()> {
        if self.broken {
            return Err(Error::Corrupt { reason: "an earlier pass of this lane failed half-way".to_owned() });
        }
        let requested = self.position.saturating_add(more);
        if requested > self.capacity {
            return Err(Error::ContextOverflow { requested, limit: self.capacity });
        }
        Ok(())
    }

    /// Notes tokens at the positions from `self.position` on, and moves behind them.
    pub(crate) fn push(&mut self, tokens: &[u32]) {
        for &token in tokens {
            self.recent[self.position % RING] = token;
            self.position += 1;
        }
    }
}

impl LaneState for Lane {
    fn advance(&mut self, inputs: usize, realigned: usize) {
        let (columns, emitted) = self.pending;
        let inputs = inputs.min(columns.len());
        if self.mtp_rows >= self.position && realigned >= inputs {
            self.mtp_rows = self.position + inputs;
            self.mtp_anchor = inputs.checked_sub(1).and_then(|i| emitted.get(i)).copied();
        } else {
            self.mtp_anchor = None;
            self.mtp_rows = self.mtp_rows.min(self.position);
        }
        self.push(&columns[..inputs]);
        self.fold = inputs;
    }

    fn position(&self) -> usize {
        self.position
    }
}
