//! Splits over keys.
//!
//! All of these are [`Effect::Numeric`](super::Effect::Numeric): they say among how many blocks the fixed leaves of
//! [`KEY_LEAF`] keys are dealt out, never where a partial sum begins.

use super::{clamp_splits, sms};
use crate::device::DeviceInfo;

/// Keys of a leaf; leaf i covers the absolute positions `256·i .. 256·(i + 1)`.
pub const KEY_LEAF: usize = 256;

/// How fixed leaves are dealt out to blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Deal {
    /// Leaves: ⌈keys/256⌉, at least 1.
    pub leaves: u64,
    /// Leaves of a block; block i takes those from `i · leaves_per_block` on, the last block fewer.
    pub leaves_per_block: u64,
    /// Blocks.
    pub blocks: u64,
}

/// Deals the leaves of `keys` visible keys out to at most `splits` blocks, evenly.
///
/// ```
/// let d = ninfer_core::tuning::attention::deal(7680, 16);
/// assert_eq!((d.leaves, d.leaves_per_block, d.blocks), (30, 2, 15));
/// ```
#[must_use]
pub fn deal(keys: usize, splits: u32) -> Deal {
    let leaves = keys.div_ceil(KEY_LEAF).max(1) as u64;
    let leaves_per_block = leaves.div_ceil(u64::from(splits.max(1)));
    Deal { leaves, leaves_per_block, blocks: leaves.div_ceil(leaves_per_block) }
}

/// Most splits of decode and narrow verification at batch 1: `⌊2·SM / Hkv⌋`, two blocks an SM, within \[1, 256\]
/// (85 for 4 and 170 for 2 KV heads at 170 SMs).
#[must_use]
pub fn small_t_splits(device: &DeviceInfo, kv_heads: usize) -> u32 {
    clamp_splits(2 * sms(device) / (kv_heads.max(1) as u64))
}

/// Splits for an INT8 cache, 6 or more columns and 5,000 to 8,198 keys: `scale · ⌊SM/4⌋` with `scale = 4 / Hkv`, so that
/// `splits · Hkv` blocks, one an SM, stay within one wave (168 at 170 SMs).
#[must_use]
pub fn int8_wide_splits(device: &DeviceInfo, kv_heads: usize) -> u32 {
    clamp_splits(4 * (sms(device) / 4) / (kv_heads.max(1) as u64))
}

/// What [`plan`] decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AttentionPlan {
    /// Blocks without a split over keys: batch · Hkv · query tiles.
    pub tiles: u64,
    /// Whether whole copies of the tiles leave more than a tenth of the SMs idle.
    pub underfilled: bool,
    /// Splits over keys, within \[1, 256\].
    pub splits: u32,
}

/// Splits by how well the tiles fill the device.
///
/// `tiles = B · Hkv · query tiles`; underfilled iff `⌊SM/tiles⌋ · tiles < 0.9 · SM`; budget `2·SM` where the call is
/// `narrow` (decode, few columns) or underfilled, else `SM`; `splits = clamp(budget / tiles, 1, 256)`.
///
/// ```
/// use ninfer_core::{known, tuning::attention};
/// let rtx5090 = known::profile("rtx5090")?.device_info();
/// assert_eq!(attention::plan(&rtx5090, 1, 4, 1, true).splits, 85);
/// assert_eq!(attention::plan(&rtx5090, 8, 4, 1, true).splits, 10);
/// # Ok::<(), ninfer_core::Error>(())
/// ```
#[must_use]
pub fn plan(device: &DeviceInfo, batch: usize, kv_heads: usize, query_tiles: usize, narrow: bool) -> AttentionPlan {
    let sm = sms(device);
    let tiles = [batch, kv_heads, query_tiles].iter().fold(1u64, |n, &f| n.saturating_mul(f.max(1) as u64));
    let underfilled = 10 * (sm / tiles * tiles) < 9 * sm;
    let budget = if narrow || underfilled { 2 * sm } else { sm };
    AttentionPlan { tiles, underfilled, splits: clamp_splits(budget / tiles) }
}

/// Blocks an SM that [`batched_target`] counts on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BatchWidth {
    /// One block an SM.
    One,
    /// Two blocks an SM.
    Two,
}

/// Blocks aimed at when several sequences decode together: `⌊16·SM/17⌋`, or twice that (160 and 320 at 170 SMs), one
/// seventeenth less than a full wave so that rounding up the splits does not spill into a second one.
#[must_use]
pub fn batched_target(device: &DeviceInfo, width: BatchWidth) -> u64 {
    match width {
        BatchWidth::One => 16 * sms(device) / 17,
        BatchWidth::Two => 32 * sms(device) / 17,
    }
}

/// Splits when several sequences decode together: `⌈target / (Hkv · B)⌉`, at least 4, at most 256.
#[must_use]
pub fn batched_splits(device: &DeviceInfo, width: BatchWidth, batch: usize, kv_heads: usize) -> u32 {
    let rows = (batch.max(1) as u64).saturating_mul(kv_heads.max(1) as u64);
    clamp_splits(batched_target(device, width).div_ceil(rows)).max(4)
}

/// Splits of tiled prompt attention: the s of 1 to 8 that makes `⌈blocks · s / SM⌉ / s` smallest, the fewest on a tie, and
/// no more than ⌈keys/512⌉. `blocks` is query heads · ⌈T/64⌉.
#[must_use]
pub fn prompt_splits(device: &DeviceInfo, blocks: u64, keys: usize) -> u32 {
    let sm = u128::from(sms(device));
    let waves = |s: u64| (u128::from(blocks) * u128::from(s)).div_ceil(sm);
    let mut best = 1;
    for s in 2..=8 {
        // waves(s)/s < waves(best)/best, without division; below 2^64 · 2^3 · 2^3.
        if waves(s) * u128::from(best) < waves(best) * u128::from(s) {
            best = s;
        }
    }
    clamp_splits(best.min(keys.div_ceil(512) as u64))
}

/// Splits of bidirectional attention with 8 KV heads: `SM/2`, four blocks an SM (85 at 170 SMs).
#[must_use]
pub fn bidirectional_splits(device: &DeviceInfo) -> u32 {
    clamp_splits(sms(device) / 2)
}

/// Most splits of sliding-window attention: `⌈3·SM / (2·Hkv)⌉`, no more than ⌈context/32⌉ (32 for 8 KV heads at 170 SMs,
/// where the original is a literal and the formula our fit).
#[must_use]
pub fn window_splits(device: &DeviceInfo, kv_heads: usize, context: usize) -> u32 {
    let fit = (3 * sms(device)).div_ceil((2 * kv_heads.max(1)) as u64);
    clamp_splits(fit.min(context.div_ceil(32) as u64))
}

/// The most partial results a call can write for one query row: one a leaf, however they are dealt out.
#[must_use]
pub const fn most_partials(max_context: usize) -> usize {
    max_context.div_ceil(KEY_LEAF)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capability::Capability;

    fn with_sms(n: u32) -> DeviceInfo {
        DeviceInfo::cuda("test", Capability::new(8, 0), n)
    }

    #[test]
    fn every_leaf_is_dealt_once() {
        for keys in [0, 1, 255, 256, 257, 7680, 262_144] {
            for splits in [0, 1, 2, 7, 85, 170, 256, u32::MAX] {
                let d = deal(keys, splits);
                assert!(d.blocks >= 1 && d.blocks <= u64::from(splits.max(1)));
                assert!(d.blocks * d.leaves_per_block >= d.leaves);
                assert!((d.blocks - 1) * d.leaves_per_block < d.leaves, "no block is empty: {d:?}");
            }
        }
    }

    #[test]
    fn underfill_doubles_the_budget() {
        // 170 SMs, 64 tiles: two copies are 128 < 153, so wide calls get the double budget too.
        let p = plan(&with_sms(170), 1, 4, 16, false);
        assert_eq!((p.tiles, p.underfilled, p.splits), (64, true, 5));
        let p = plan(&with_sms(170), 1, 2, 40, false);
        assert_eq!((p.tiles, p.underfilled, p.splits), (80, false, 2));
    }

    #[test]
    fn prompt_splits_fill_the_last_wave() {
        // 24 heads, 4 query tiles on 170 SMs: 96 blocks; 7 splits are 672 blocks in 4 waves, 0.571 waves of work each.
        assert_eq!(prompt_splits(&with_sms(170), 96, 1 << 20), 7);
        assert_eq!(prompt_splits(&with_sms(170), 96, 1024), 2);
        assert_eq!(prompt_splits(&with_sms(170), 170, 1 << 20), 1);
        assert!(prompt_splits(&with_sms(170), u64::MAX, 1 << 20) >= 1);
    }

    #[test]
    fn absurd_arguments_are_survived() {
        for n in [0, 1, u32::MAX] {
            let d = with_sms(n);
            let _ = (small_t_splits(&d, 0), int8_wide_splits(&d, usize::MAX), window_splits(&d, 1 << 40, 0));
            let _ = (plan(&d, usize::MAX, usize::MAX, 0, false), batched_splits(&d, BatchWidth::Two, 0, 0));
            let _ = (prompt_splits(&d, 0, 0), bidirectional_splits(&d));
        }
    }
}
