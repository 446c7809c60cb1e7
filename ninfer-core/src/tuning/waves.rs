//! Tiles and waves: what the tables of thresholds of a tuned engine come from.
//!
//! A kernel whose blocks fit `occupancy` times on an SM runs `occupancy · SM` of them at once, a wave. A threshold such as
//! "up to 680 columns" is the width at which the tiles fill a whole number of waves, so it is computed and not tabulated.
//! Bit-neutral among routes of one numeric class.

use super::sms;
use crate::device::DeviceInfo;

/// Blocks resident at once: `occupancy · SM`, with the occupancy the driver reports for the kernel.
#[must_use]
pub fn residency(device: &DeviceInfo, occupancy: u32) -> u64 {
    u64::from(occupancy.max(1)).saturating_mul(sms(device))
}

/// Tiles of a `[rows, columns]` product.
#[must_use]
pub const fn tiles(rows: usize, columns: usize, tile_rows: usize, tile_columns: usize) -> u64 {
    let (r, c) = (if tile_rows == 0 { 1 } else { tile_rows }, if tile_columns == 0 { 1 } else { tile_columns });
    (rows.div_ceil(r) as u64).saturating_mul(columns.div_ceil(c) as u64)
}

/// Waves that so many tiles take: `⌈tiles / (occupancy · SM)⌉`.
#[must_use]
pub fn waves(device: &DeviceInfo, occupancy: u32, tiles: u64) -> u64 {
    tiles.div_ceil(residency(device, occupancy))
}

/// The most columns that fit in `waves` waves: the largest T with
/// `⌈rows / tile_rows⌉ · ⌈T / tile_columns⌉ ≤ waves · occupancy · SM`; 0 where one column of tiles is already too many.
///
/// ```
/// use ninfer_core::{known, tuning::waves::{columns_in, Tile}};
/// let rtx5090 = known::profile("rtx5090")?.device_info();
/// let tile = Tile { rows: 128, columns: 64, occupancy: 2, time: 1.0 };
/// assert_eq!(columns_in(&rtx5090, 1, 5120, &tile), 8 * 64); // 40 rows of tiles, 340 resident
/// # Ok::<(), ninfer_core::Error>(())
/// ```
#[must_use]
pub fn columns_in(device: &DeviceInfo, waves: u64, rows: usize, tile: &Tile) -> u64 {
    let row_tiles = tiles(rows.max(1), 1, tile.rows, 1);
    let room = waves.saturating_mul(residency(device, tile.occupancy));
    (room / row_tiles).saturating_mul(tile.columns.max(1) as u64)
}

/// A tile shape of one kernel family.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tile {
    /// Rows (out features) of a tile.
    pub rows: usize,
    /// Columns (tokens) of a tile.
    pub columns: usize,
    /// Blocks that fit on an SM, from the driver.
    pub occupancy: u32,
    /// Time of one wave of these tiles, in any unit common to the choices.
    pub time: f64,
}

/// Index of the tile shape with the smallest `waves · time`, the first on a tie; `None` for an empty list.
///
/// ```
/// use ninfer_core::{known, tuning::waves::{cheapest, Tile}};
/// let gb10 = known::profile("gb10")?.device_info();
/// let wide = Tile { rows: 256, columns: 128, occupancy: 1, time: 3.8 };
/// let small = Tile { rows: 64, columns: 128, occupancy: 2, time: 2.0 };
/// assert_eq!(cheapest(&gb10, 12288, 1024, &[wide, small]), Some(0)); // 8 · 3.8 against 16 · 2.0
/// assert_eq!(cheapest(&gb10, 2048, 128, &[wide, small]), Some(1)); // 1 · 3.8 against 1 · 2.0
/// # Ok::<(), ninfer_core::Error>(())
/// ```
#[must_use]
pub fn cheapest(device: &DeviceInfo, rows: usize, columns: usize, choices: &[Tile]) -> Option<usize> {
    let cost = |t: &Tile| waves(device, t.occupancy, tiles(rows, columns, t.rows, t.columns)) as f64 * t.time;
    choices.iter().enumerate().min_by(|(_, a), (_, b)| cost(a).total_cmp(&cost(b))).map(|(i, _)| i)
}
