//! Drafts the model makes itself.

use ninfer_core::model::{DraftBlock, DraftContext, Drafter};

/// Passes on the drafts that the model's multi-token-prediction block made in the round before.
///
/// The block works on the device, inside the same submission as verification; this drafter only says that its drafts are
/// wanted. Each draft is the block's most likely token.
///
/// ```
/// use ninfer_core::model::{DraftBlock, DraftContext, Drafter};
/// let mut block = DraftBlock::default();
/// ninfer_spec::MtpDrafter.propose(DraftContext { tokens: &[1, 2], model_drafts: &[3, 4, 5] }, 2, &mut block);
/// assert_eq!(block.tokens, [3, 4]);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct MtpDrafter;

impl Drafter for MtpDrafter {
    fn name(&self) -> &'static str {
        "mtp"
    }

    fn uses_mtp(&self) -> bool {
        true
    }

    fn propose(&mut self, context: DraftContext<'_>, k: usize, block: &mut DraftBlock) {
        block.tokens.extend(context.model_drafts.iter().take(k));
    }
}
