//! What a language model offers to a generator, and what a drafter offers.
//!
//! A model keeps everything of a round on its device: verification, choice of tokens, acceptance, the MTP rows of the
//! accepted tokens and the next drafts are one submission with one synchronisation, and only token ids come back. The
//! host chooses how many drafts to verify, how many of the emitted tokens to commit, and what to draft with.

use crate::Result;
use crate::sampling::SamplingParams;
use crate::state::{Committed, LaneState, Outcome, Round, Snapshot};

/// Fixed facts of an opened model.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Vocabulary rows of the head.
    pub vocab: usize,
    /// Tokens below this have a meaning; the others are never chosen.
    pub token_limit: usize,
    /// Most positions of a lane.
    pub max_context: usize,
    /// Lanes that can be open at once.
    pub lanes: usize,
    /// Most drafts a round can verify.
    pub max_drafts: usize,
    /// Whether the model can draft by MTP.
    pub mtp: bool,
}

impl Limits {
    /// All facts of a model; MTP drafting is off until [`Limits::with_mtp`].
    #[must_use]
    pub fn new(vocab: usize, max_context: usize, lanes: usize, max_drafts: usize) -> Self {
        Self { vocab, token_limit: vocab, max_context, lanes, max_drafts, mtp: false }
    }

    /// Says whether the model can draft by MTP.
    #[must_use]
    pub fn with_mtp(mut self, mtp: bool) -> Self {
        self.mtp = mtp;
        self
    }

    /// Sets the number of tokens that have a meaning.
    #[must_use]
    pub fn with_token_limit(mut self, limit: usize) -> Self {
        self.token_limit = limit.min(self.vocab);
        self
    }
}

/// How a lane is opened.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LaneOptions {
    /// Positions to reserve: prompt and output together.
    pub capacity: usize,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
}

impl LaneOptions {
    /// Reserves `capacity` positions; greedy until [`LaneOptions::with_sampling`].
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { capacity, sampling: SamplingParams::greedy() }
    }

    /// Sets how tokens are chosen.
    #[must_use]
    pub fn with_sampling(mut self, sampling: SamplingParams) -> Self {
        self.sampling = sampling;
        self
    }
}

/// What follows a prompt chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefillEnd {
    /// More prompt: nothing is chosen.
    More,
    /// The first token of the answer is chosen, and this many drafts are made (0 without MTP).
    Choose {
        /// Drafts for the first round.
        drafts: usize,
    },
}

/// Receives logits of prompt positions: first position of the block, then f32 `[rows, V]`.
pub type LogitSink<'a> = &'a mut dyn FnMut(usize, &[f32]) -> Result<()>;

/// One lane's share of a round.
#[derive(Clone, Copy, Debug)]
pub struct RoundRow<'a> {
    /// The last emitted token; not yet an input.
    pub anchor: u32,
    /// Drafts behind it.
    pub drafts: &'a [u32],
    /// Drafts to make for the next round; needs MTP.
    pub next_drafts: usize,
    /// Whether the logits of all columns are wanted on the host.
    pub logits: bool,
}

impl<'a> RoundRow<'a> {
    /// Plain decoding: one column, no drafts.
    #[must_use]
    pub fn new(anchor: u32) -> Self {
        Self { anchor, drafts: &[], next_drafts: 0, logits: false }
    }

    /// Drafts to verify.
    #[must_use]
    pub fn with_drafts(mut self, drafts: &'a [u32]) -> Self {
        self.drafts = drafts;
        self
    }

    /// Drafts to make for the next round.
    #[must_use]
    pub fn with_next_drafts(mut self, next: usize) -> Self {
        self.next_drafts = next;
        self
    }

    /// Asks for the logits.
    #[must_use]
    pub fn with_logits(mut self) -> Self {
        self.logits = true;
        self
    }
}

/// A model that continues token sequences in lanes.
pub trait CausalModel {
    /// Host-side handle of a sequence; dropping it frees its slot and pages.
    type Lane: LaneState + std::fmt::Debug + Send;
    /// Image of a lane's committed state.
    type Image;

    /// Fixed facts.
    fn limits(&self) -> &Limits;

    /// Opens an empty lane at position 0.
    ///
    /// # Errors
    /// [`crate::Error::Exhausted`] without a free slot or pages, [`crate::Error::ContextOverflow`] if the capacity is above the limit.
    fn open_lane(&mut self, options: &LaneOptions) -> Result<Committed<Self::Lane>>;

    /// Replaces how a lane chooses tokens.
    ///
    /// # Errors
    /// What the device reports.
    fn set_sampling(&mut self, lane: &mut Committed<Self::Lane>, sampling: &SamplingParams) -> Result<()>;

    /// Appends prompt tokens to a lane, in chunks that never change the result.
    ///
    /// With [`PrefillEnd::Choose`] the outcome holds one emitted token, which is the next anchor and not yet an input.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] for an empty prompt or a token id without a row, [`crate::Error::ContextOverflow`],
    /// [`crate::Error::NonFinite`] for logits that are not finite. After an error the lane is to be dropped.
    fn prefill(
        &mut self,
        lane: &mut Committed<Self::Lane>,
        tokens: &[u32],
        end: PrefillEnd,
        logits: Option<LogitSink<'_>>,
    ) -> Result<Option<Outcome>>;

    /// Runs one round: the columns `[anchor, drafts…]` of each lane, the choice and acceptance of tokens, and the next drafts.
    ///
    /// # Errors
    /// As [`CausalModel::prefill`]; [`crate::Error::MtpUnavailable`] if drafts are asked of a lane without MTP rows. The lanes
    /// stay committed as they were.
    fn verify<'r, 'l>(
        &mut self,
        lanes: &'r mut [&'l mut Committed<Self::Lane>],
        rows: &[RoundRow<'_>],
    ) -> Result<Round<'r, 'l, Self::Lane>>;

    /// Copies a lane's committed state to the host.
    ///
    /// # Errors
    /// What the device reports.
    fn snapshot(&mut self, lane: &mut Committed<Self::Lane>) -> Result<Snapshot<Self::Image>>;

    /// Opens a lane from an image.
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`] if the image belongs to another model or is damaged; as [`CausalModel::open_lane`].
    fn restore(&mut self, image: &Snapshot<Self::Image>, options: &LaneOptions) -> Result<Committed<Self::Lane>>;
}

/// A model with an MTP block.
///
/// The block's KV cache holds a row for every committed token, made from the target's own hidden states; the rows of
/// rejected drafts and of chained drafts never survive a round.
pub trait MtpModel: CausalModel {
    /// Whether drafts can be asked of this lane; the reason if not.
    fn mtp_ready(&self, lane: &Committed<Self::Lane>) -> std::result::Result<(), String>;
}

/// What a drafter may look at.
#[derive(Clone, Copy, Debug)]
pub struct DraftContext<'a> {
    /// Prompt and emitted tokens; the last one is the anchor of the coming round.
    pub tokens: &'a [u32],
    /// Drafts the model made by MTP in the round before; empty without it.
    pub model_drafts: &'a [u32],
}

/// Proposed tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DraftBlock {
    /// The drafts.
    pub tokens: Vec<u32>,
    /// For drafters that sample: the probability each vocabulary row had, one distribution a draft. `None` means that each
    /// draft was the drafter's only choice.
    pub distributions: Option<Vec<Vec<f32>>>,
}

/// Proposes tokens for the target to verify.
pub trait Drafter: Send {
    /// Short name for tables.
    fn name(&self) -> &'static str;

    /// Whether the model shall make MTP drafts for it.
    fn uses_mtp(&self) -> bool {
        false
    }

    /// Writes up to `k` drafts into `block`, which is empty on entry; fewer or none is fine.
    fn propose(&mut self, context: DraftContext<'_>, k: usize, block: &mut DraftBlock);
}
