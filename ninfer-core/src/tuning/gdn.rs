//! Gated DeltaNet kernels.

use super::sms;
use super::waves::residency;
use crate::device::DeviceInfo;

/// Grid of the chunk-output kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutputGrid {
    /// Chunks that one block computes, one after the other.
    pub jobs: u64,
    /// Blocks along the chunks: ⌈chunks / jobs⌉.
    pub x: u64,
    /// Blocks along the value heads.
    pub y: u64,
}

/// Blocks the chunk-output kernel aims at: `4 · SM` (680 at 170 SMs). Bit-neutral.
#[must_use]
pub fn output_target(device: &DeviceInfo) -> u64 {
    4 * sms(device)
}

/// Grid for `chunks` chunks of 64 tokens: `jobs = ⌈chunks · Hv / target⌉`, grid `(⌈chunks / jobs⌉, Hv)`. Bit-neutral: a
/// chunk's output depends on its entry state alone.
///
/// ```
/// use ninfer_core::{known, tuning::gdn};
/// let gb10 = known::profile("gb10")?.device_info();
/// let grid = gdn::output_grid(&gb10, 64, 32); // 4,096 tokens of 35B-A3B, target 192
/// assert_eq!((grid.jobs, grid.x, grid.y), (11, 6, 32));
/// # Ok::<(), ninfer_core::Error>(())
/// ```
#[must_use]
pub fn output_grid(device: &DeviceInfo, chunks: usize, value_heads: usize) -> OutputGrid {
    let (chunks, y) = (chunks.max(1) as u64, value_heads.max(1) as u64);
    let jobs = chunks.saturating_mul(y).div_ceil(output_target(device));
    OutputGrid { jobs, x: chunks.div_ceil(jobs), y }
}

/// Blocks along K of the cooperative gating projection.
///
/// A cooperative grid must be resident as a whole: `tiles · split ≤ occupancy · SM`, with the occupancy of that very
/// kernel from the driver, not a constant times the SM count (340 at 170 SMs and two blocks an SM, but 82 on 82 SMs where
/// registers allow only one). `wish` is halved until it fits; 1 is an ordinary launch without a grid barrier. `tiles` is
/// the number of output tiles (for 96 gate rows ⌈T/128⌉ · 3, for 64 rows ⌈T/64⌉ · 2). Numeric: the K ranges whose partial
/// sums are combined are fixed, and a block takes several of them where the split is small.
///
/// ```
/// use ninfer_core::{known, tuning::gdn};
/// let rtx3090 = known::profile("rtx3090")?.device_info();
/// assert_eq!(gdn::cooperative_split(&rtx3090, 2, 24, 8), 4); // 24 · 8 > 164 ≥ 24 · 4
/// # Ok::<(), ninfer_core::Error>(())
/// ```
#[must_use]
pub fn cooperative_split(device: &DeviceInfo, occupancy: u32, tiles: u64, wish: u32) -> u32 {
    let limit = residency(device, occupancy);
    let mut split = wish.max(1);
    while split > 1 && tiles.saturating_mul(u64::from(split)) > limit {
        split /= 2;
    }
    split
}
