//! Types that keep what is committed apart from what is only proposed.
//!
//! A lane (one sequence) exists only as [`Committed`]. Verifying drafts borrows the lanes into a [`Round`]; the lanes move
//! on only by [`Round::commit`], and dropping the round is an exact rollback, because a round never writes committed state
//! (raw columns are recorded and folded into the recurrent state by the next call, KV rows behind the committed length are
//! ignored). A [`Snapshot`] can be taken only of a [`Committed`] lane. So state that has seen an unverified draft cannot be
//! published, and a rollback cannot forget a part of the state.

use crate::{Error, Result};

/// Something whose every token the target model has accepted.
///
/// ```
/// use ninfer_core::state::{Committed, LaneState};
/// #[derive(Debug)]
/// struct Lane(usize);
/// impl LaneState for Lane {
///     fn advance(&mut self, inputs: usize, _realigned: usize) { self.0 += inputs }
///     fn position(&self) -> usize { self.0 }
/// }
/// let lane = Committed::accept(Lane(3));
/// assert_eq!(lane.position(), 3);
/// ```
#[derive(Debug)]
pub struct Committed<S>(S);

impl<S> Committed<S> {
    /// For models: declares a state committed. The caller promises that no unverified token took part in it.
    #[must_use]
    pub fn accept(state: S) -> Self {
        Self(state)
    }

    /// The state.
    #[must_use]
    pub fn get(&self) -> &S {
        &self.0
    }

    /// For models: the state, to be moved only to another committed state.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.0
    }

    /// For models: takes an image of committed state.
    pub fn snapshot<T>(&self, image: impl FnOnce(&S) -> Result<T>) -> Result<Snapshot<T>> {
        image(&self.0).map(Snapshot)
    }
}

impl<S: LaneState> Committed<S> {
    /// Number of tokens in the state: the position of the next input.
    #[must_use]
    pub fn position(&self) -> usize {
        self.0.position()
    }
}

/// An image of committed state, independent of the lane it was taken from.
#[derive(Clone, Debug)]
pub struct Snapshot<T>(T);

impl<T> Snapshot<T> {
    /// The image.
    #[must_use]
    pub fn image(&self) -> &T {
        &self.0
    }

    /// For loaders: wraps an image that was read back and verified.
    #[must_use]
    pub fn verified(image: T) -> Self {
        Self(image)
    }
}

/// Host-side bookkeeping of a lane.
pub trait LaneState {
    /// Commits the first `inputs` columns of the round just verified; `realigned` of them have true MTP rows.
    fn advance(&mut self, inputs: usize, realigned: usize);

    /// Position of the next input.
    fn position(&self) -> usize;
}

/// Most columns of a round per lane: the anchor and 15 drafts.
pub const MAX_COLUMNS: usize = 16;

/// A short row of token ids, kept inline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenRow {
    ids: [u32; MAX_COLUMNS],
    len: usize,
}

impl TokenRow {
    /// Copies the ids; those behind the capacity are dropped.
    #[must_use]
    pub fn new(ids: &[u32]) -> Self {
        let mut row = Self { len: ids.len().min(MAX_COLUMNS), ..Self::default() };
        row.ids[..row.len].copy_from_slice(&ids[..row.len]);
        row
    }
}

/// Collects ids; those behind the capacity are dropped.
impl FromIterator<u32> for TokenRow {
    fn from_iter<I: IntoIterator<Item = u32>>(ids: I) -> Self {
        let mut row = Self::default();
        for (place, id) in row.ids.iter_mut().zip(ids) {
            *place = id;
            row.len += 1;
        }
        row
    }
}

impl std::ops::Deref for TokenRow {
    type Target = [u32];
    fn deref(&self) -> &[u32] {
        &self.ids[..self.len]
    }
}

/// What a round produced for one lane.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Accepted drafts `a`.
    pub accepted: usize,
    /// The `a + 1` emitted tokens: the accepted drafts, then the target's own.
    pub tokens: TokenRow,
    /// Drafts for the next round, if they were asked for; valid only when all emitted tokens are committed.
    pub drafts: TokenRow,
    /// Columns of this round: the anchor and its drafts.
    pub columns: usize,
    /// Columns whose MTP rows were written from the target's hidden states.
    pub realigned: usize,
    /// f32 `[columns, V]`, if asked for.
    pub logits: Option<Vec<f32>>,
}

/// Verified but uncommitted columns of some lanes; drop it to roll back.
#[derive(Debug)]
pub struct Round<'r, 'l, L: LaneState> {
    lanes: &'r mut [&'l mut Committed<L>],
    outcomes: Vec<Outcome>,
}

impl<'r, 'l, L: LaneState> Round<'r, 'l, L> {
    /// For models: opens a round over lanes whose columns were verified.
    ///
    /// # Errors
    /// [`Error::Shape`] unless there is one outcome a lane.
    pub fn open(lanes: &'r mut [&'l mut Committed<L>], outcomes: Vec<Outcome>) -> Result<Self> {
        crate::error::expect_eq("Round::open", "outcomes", lanes.len(), outcomes.len())?;
        Ok(Self { lanes, outcomes })
    }

    /// One outcome a lane.
    #[must_use]
    pub fn outcomes(&self) -> &[Outcome] {
        &self.outcomes
    }

    /// Commits `inputs[i]` columns of lane `i`: the old anchor and `inputs[i] − 1` drafts. 0 is legal and leaves that lane
    /// exactly as it was.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if more columns are committed than were verified; no lane moves then.
    pub fn commit(self, inputs: &[usize]) -> Result<Vec<Outcome>> {
        crate::error::expect_eq("Round::commit", "counts", self.lanes.len(), inputs.len())?;
        for (outcome, &n) in self.outcomes.iter().zip(inputs) {
            if n > outcome.columns {
                return Err(Error::OutOfRange {
                    what: "committed columns",
                    got: n.to_string(),
                    legal: format!("0 to {}", outcome.columns),
                });
            }
        }
        for ((lane, outcome), &n) in self.lanes.iter_mut().zip(&self.outcomes).zip(inputs) {
            if n > 0 {
                lane.get_mut().advance(n, outcome.realigned.min(n));
            }
        }
        Ok(self.outcomes)
    }
}
