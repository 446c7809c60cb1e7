//! The tile order that FP4 matrix units want for group scales.
//!
//! Files and [`PackedMatrix`](crate::PackedMatrix) hold NVFP4 group scales row-major, `[rows, groups]`. Block-scaled matrix
//! instructions read them in tiles of 128 rows × 4 groups, 512 bytes each; the byte of (row, group) lies at
//!
//! ```text
//! ((row / 128) · ⌈groups / 4⌉ + group / 4) · 512 + (row % 32) · 16 + (row % 128 / 32) · 4 + group % 4
//! ```
//!
//! Rows and groups are padded with zeros to whole tiles. Nothing in the bytes tells the two orders apart, so the tiled one
//! is a type of its own and is never accepted where row-major scales belong.

use crate::packed::check_dimensions;
use crate::{Error, Result};

/// Rows of a tile.
pub const TILE_ROWS: usize = 128;
/// Groups of a tile.
pub const TILE_GROUPS: usize = 4;

/// Group scales in tile order.
///
/// ```
/// use ninfer_quant::scale_layout::TiledScales;
/// let row_major: Vec<u8> = (0..200 * 6).map(|i| (i % 120) as u8).collect();
/// let tiled = TiledScales::from_row_major(200, 6, &row_major)?;
/// assert_eq!(tiled.bytes().len(), 256 * 8);
/// assert_eq!(tiled.get(130, 5), Some(row_major[130 * 6 + 5]));
/// assert_eq!(tiled.to_row_major(), row_major);
/// # Ok::<(), ninfer_quant::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TiledScales {
    rows: usize,
    groups: usize,
    bytes: Vec<u8>,
}

impl TiledScales {
    /// Orders row-major scales `[rows, groups]` in tiles.
    ///
    /// # Errors
    /// [`Error::Length`] if there are not `rows · groups` bytes, [`Error::Core`] for absurd dimensions.
    pub fn from_row_major(rows: usize, groups: usize, scales: &[u8]) -> Result<Self> {
        check_dimensions(rows, groups)?;
        let expected = rows.saturating_mul(groups);
        if scales.len() != expected {
            return Err(Error::Length { what: "group scales", expected, got: scales.len() });
        }
        let mut bytes = vec![0; rows.next_multiple_of(TILE_ROWS) * groups.next_multiple_of(TILE_GROUPS)];
        for (row, scales) in scales.chunks_exact(groups.max(1)).enumerate() {
            for (group, &s) in scales.iter().enumerate() {
                bytes[index(groups, row, group)] = s;
            }
        }
        Ok(Self { rows, groups, bytes })
    }

    /// Takes bytes that are in tile order already.
    ///
    /// # Errors
    /// [`Error::Length`] unless they are the whole tiles of `[rows, groups]`, [`Error::Core`] for absurd dimensions.
    pub fn from_tiles(rows: usize, groups: usize, bytes: Vec<u8>) -> Result<Self> {
        check_dimensions(rows, groups)?;
        let expected = rows.next_multiple_of(TILE_ROWS) * groups.next_multiple_of(TILE_GROUPS);
        if bytes.len() != expected {
            return Err(Error::Length { what: "group scales in tiles", expected, got: bytes.len() });
        }
        Ok(Self { rows, groups, bytes })
    }

    /// The scales row-major again, padding dropped.
    #[must_use]
    pub fn to_row_major(&self) -> Vec<u8> {
        let at = |row| (0..self.groups).map(move |group| self.bytes[index(self.groups, row, group)]);
        (0..self.rows).flat_map(at).collect()
    }

    /// The scale of one group, if it exists.
    #[must_use]
    pub fn get(&self, row: usize, group: usize) -> Option<u8> {
        (row < self.rows && group < self.groups).then(|| self.bytes[index(self.groups, row, group)])
    }

    /// Whole tiles, 512 bytes each.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

fn index(groups: usize, row: usize, group: usize) -> usize {
    let tile = row / TILE_ROWS * groups.div_ceil(TILE_GROUPS) + group / TILE_GROUPS;
    tile * TILE_ROWS * TILE_GROUPS + row % 32 * 16 + row % TILE_ROWS / 32 * 4 + group % TILE_GROUPS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scale_has_a_place_of_its_own() {
        for (rows, groups) in [(256, 4), (200, 6), (1, 1), (129, 5), (0, 3), (3, 0)] {
            let scales: Vec<u8> = (0..rows * groups).map(|i| (i % 251) as u8).collect();
            let tiled = TiledScales::from_row_major(rows, groups, &scales).unwrap();
            assert_eq!(tiled.to_row_major(), scales);
            assert_eq!(TiledScales::from_tiles(rows, groups, tiled.bytes().to_vec()).unwrap(), tiled);
            assert!(TiledScales::from_tiles(rows, groups, vec![0; tiled.bytes().len() + 1]).is_err());
            let mut seen = vec![false; tiled.bytes().len()];
            for (row, group) in (0..rows).flat_map(|r| (0..groups).map(move |g| (r, g))) {
                assert!(!std::mem::replace(&mut seen[index(groups, row, group)], true), "({row}, {group})");
            }
            // Whatever is left is padding.
            assert!(tiled.bytes().iter().zip(seen).all(|(&b, seen)| seen || b == 0));
        }
    }

    #[test]
    fn known_places() {
        let scales: Vec<u8> = (0..256 * 4).map(|i| (i % 256) as u8).collect();
        let tiled = TiledScales::from_row_major(256, 4, &scales).unwrap();
        let place = |at: usize| tiled.bytes()[at];
        assert_eq!(place(16), 4); // row 1, group 0
        assert_eq!(place(4), 128); // row 32, group 0
        assert_eq!(place(31 * 16 + 15), ((127 * 4 + 3) % 256) as u8);
        assert_eq!(place(512), 0); // row 128 begins the next tile
        assert!(TiledScales::from_row_major(2, 2, &[0; 3]).is_err());
        assert_eq!(tiled.get(256, 0), None);
    }
}
