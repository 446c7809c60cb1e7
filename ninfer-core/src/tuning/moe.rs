//! Mixture-of-experts kernels. All of these are bit-neutral.

use super::sms;
use crate::device::DeviceInfo;

/// Blocks of the persistent prefill kernels: `3 · SM`, all resident (510 at 170 SMs).
#[must_use]
pub fn persistent_grid(device: &DeviceInfo) -> u64 {
    3 * sms(device)
}

/// Blocks of the prefill kernels that take their jobs from a queue: `32 · SM` (5,440 at 170 SMs).
#[must_use]
pub fn queued_grid(device: &DeviceInfo) -> u64 {
    32 * sms(device)
}

/// Paths (routed experts and the shared one, a warp each) that share a block in the narrow gate/up kernel: the largest
/// divisor P of `paths` that leaves `width · (paths / P) · tokens ≥ 16 · SM` blocks, else 1.
///
/// Few paths a block keep a slow shared expert from holding finished warps; many keep the grid small.
///
/// ```
/// use ninfer_core::{known, tuning::moe};
/// let rtx5090 = known::profile("rtx5090")?.device_info();
/// assert_eq!([1, 2, 6].map(|t| moe::paths_per_block(&rtx5090, 9, 512, t)), [1, 3, 9]);
/// # Ok::<(), ninfer_core::Error>(())
/// ```
#[must_use]
pub fn paths_per_block(device: &DeviceInfo, paths: u32, width: usize, tokens: usize) -> u32 {
    let rows = (width as u64).saturating_mul(tokens as u64);
    let enough = |p: u32| rows.saturating_mul(u64::from(paths / p)) >= 16 * sms(device);
    (1..=paths).rev().find(|&p| paths.is_multiple_of(p) && enough(p)).unwrap_or(1)
}
