//! Launch sizes as functions of the device.
//!
//! Nothing is written for one card: each formula takes its SM count from [`DeviceInfo`], and at 170 SMs gives the value
//! that an engine tuned on an RTX 5090 uses. A count that depends on how many blocks of a kernel fit on an SM takes that
//! occupancy as an argument, because only the driver knows it.
//!
//! Results must not depend on the card. So each formula is marked:
//!
//! - [`Effect::BitNeutral`]: it only says how many blocks share the work; any value gives the same bits;
//! - [`Effect::Numeric`]: used as a number of partial sums it would change the order of an accumulation. Kernels
//!   therefore compute fixed leaves (256 keys by absolute position, fixed ranges of K), write every leaf's partial result
//!   and combine them in fixed order; the formula only deals the leaves out to blocks ([`attention::deal`]).
//!
//! [`table`] lists all of them for a device.

pub mod attention;
pub mod gdn;
pub mod moe;
pub mod waves;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::device::{DeviceInfo, DeviceKind};

/// Most splits any formula gives; workspaces are sized for it.
pub const MAX_SPLITS: u32 = 256;
/// Prefill chunks are multiples of this, so that chunk boundaries change no result.
pub const CHUNK_STEP: usize = 64;

/// What a formula may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Effect {
    /// Speed only.
    BitNeutral,
    /// The order of an accumulation, if it were used as a number of partial sums: it deals out fixed leaves instead.
    Numeric,
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::BitNeutral => "bit-neutral",
            Self::Numeric => "numeric",
        })
    }
}

/// How the host waits for the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostWait {
    /// Busy, for the shortest wake-up.
    Spin,
    /// Busy, but giving the core away: where host and device share power and memory.
    Yield,
}

/// How the host should wait: spinning beside a discrete card, yielding on an integrated part. Never blocking: a blocking
/// wait costs 0.4 to 1.2 ms a wake-up on a GB10, a yielding one some 3 µs. Bit-neutral.
#[must_use]
pub fn host_wait(device: &DeviceInfo) -> HostWait {
    if device.integrated { HostWait::Yield } else { HostWait::Spin }
}

/// Bytes of device memory from which on a large prompt chunk's workspace crowds nothing.
const ROOMY: u64 = 64 << 30;

/// Tokens to prefill at once.
///
/// A wish wins, rounded up to a multiple of 64. Otherwise 4,096 on an integrated GPU (35B-A3B on a GB10 prefills 5,310
/// tok/s there against 4,350 at 1,024) and on one of 64 GiB or more (35,900 against 24,900 on an H200), whose memory the larger
/// workspace does not crowd, and 1,024 elsewhere. Bit-neutral at multiples of 64.
///
/// ```
/// use ninfer_core::{known, tuning::prefill_chunk};
/// let gb10 = known::profile("gb10")?.device_info();
/// assert_eq!((prefill_chunk(&gb10, None), prefill_chunk(&gb10, Some(1000))), (4096, 1024));
/// let rtx5090 = known::profile("rtx5090")?.device_info();
/// assert_eq!(prefill_chunk(&rtx5090, None), 1024);
/// # Ok::<(), ninfer_core::Error>(())
/// ```
#[must_use]
pub fn prefill_chunk(device: &DeviceInfo, wish: Option<usize>) -> usize {
    match wish {
        Some(tokens) => tokens.max(1).div_ceil(CHUNK_STEP).saturating_mul(CHUNK_STEP),
        None if device.kind == DeviceKind::Cuda && (device.integrated || device.total_memory >= Some(ROOMY)) => 4096,
        None => 1024,
    }
}

/// Tokens up to which rotary embedding launches one block a token: `6 · SM` (1,020 at 170). Bit-neutral.
#[must_use]
pub fn rope_token_blocks(device: &DeviceInfo) -> u64 {
    6 * sms(device)
}

/// A formula evaluated for a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Row {
    /// What is sized.
    pub name: &'static str,
    /// The formula.
    pub formula: &'static str,
    /// What it may change.
    pub effect: Effect,
    /// Its value.
    pub value: u64,
}

/// Every formula that needs nothing but the device, or a stated example argument, in a fixed order.
#[must_use]
pub fn table(device: &DeviceInfo) -> Vec<Row> {
    use Effect::{BitNeutral, Numeric};
    let row = |name, formula, effect, value| Row { name, formula, effect, value };
    let plan = |batch, kv_heads| u64::from(attention::plan(device, batch, kv_heads, 1, true).splits);
    vec![
        row("GDN chunk output, blocks", "4·SM", BitNeutral, gdn::output_target(device)),
        row("small-T attention splits, Hkv 4", "2·SM/Hkv", Numeric, u64::from(attention::small_t_splits(device, 4))),
        row("small-T attention splits, Hkv 2", "2·SM/Hkv", Numeric, u64::from(attention::small_t_splits(device, 2))),
        row(
            "INT8 KV attention, T ≥ 6, 5,000 < keys ≤ 8,198, blocks, Hkv 4",
            "4·⌊SM/4⌋",
            Numeric,
            4 * u64::from(attention::int8_wide_splits(device, 4)),
        ),
        row("attention plan, decode, B 1, Hkv 2", "2·SM/tiles", Numeric, plan(1, 2)),
        row("attention plan, decode, B 8, Hkv 4", "2·SM/tiles", Numeric, plan(8, 4)),
        row(
            "batched small-T attention, blocks",
            "16·SM/17",
            Numeric,
            attention::batched_target(device, attention::BatchWidth::One),
        ),
        row(
            "batched small-T attention, two a SM, blocks",
            "32·SM/17",
            Numeric,
            attention::batched_target(device, attention::BatchWidth::Two),
        ),
        row("bidirectional attention splits", "SM/2", Numeric, u64::from(attention::bidirectional_splits(device))),
        row(
            "sliding-window attention splits, Hkv 8",
            "⌈3·SM/(2·Hkv)⌉",
            Numeric,
            u64::from(attention::window_splits(device, 8, usize::MAX)),
        ),
        row("MoE prefill, persistent grid", "3·SM", BitNeutral, moe::persistent_grid(device)),
        row("MoE prefill, queued grid", "32·SM", BitNeutral, moe::queued_grid(device)),
        row(
            "MoE decode, paths a block, T 2, 8 + 1 paths of 512",
            "largest P with 512·(9/P)·T ≥ 16·SM",
            BitNeutral,
            u64::from(moe::paths_per_block(device, 9, 512, 2)),
        ),
        row("RoPE, one token a block up to", "6·SM", BitNeutral, rope_token_blocks(device)),
        row("GDN gating, resident blocks at occupancy 2", "occupancy·SM", Numeric, waves::residency(device, 2)),
        row("GDN gating, resident blocks at occupancy 4", "occupancy·SM", Numeric, waves::residency(device, 4)),
        row(
            "prefill chunk",
            "4,096 integrated GPU or 64 GiB, else 1,024",
            BitNeutral,
            prefill_chunk(device, None) as u64,
        ),
    ]
}

/// SM count, at least 1.
fn sms(device: &DeviceInfo) -> u64 {
    u64::from(device.sm_count.max(1))
}

/// A split count within the legal range.
fn clamp_splits(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX).clamp(1, MAX_SPLITS)
}
