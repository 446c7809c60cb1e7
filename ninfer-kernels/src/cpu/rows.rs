//! The rows of a call, read from the segment table.

use ninfer_core::segment::{Batch, MAX_STEP_ROWS, Profile, SEGMENT_WORDS, Segment};
use ninfer_core::{Error, Result};

use super::Cpu;
use super::buffer::Access;

/// Most segments of a call.
const MAX_SEGMENTS: usize = MAX_STEP_ROWS;

/// Segments of a call, checked: no word negative, rows inside the call, a bank of 0 or 1, no fold before position 0.
pub(super) struct Rows {
    pub(super) profile: Profile,
    /// Rows of the call, padding included.
    pub(super) count: usize,
    list: [Segment; MAX_SEGMENTS],
    len: usize,
}

/// Rows of one segment that fall into one tile of absolute positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tile {
    /// First row of the call.
    pub(super) row: usize,
    /// Row inside the tile: position modulo tile size.
    pub(super) offset: usize,
    /// Number of rows.
    pub(super) len: usize,
}

impl Rows {
    pub(super) fn read(access: &Access, op: &'static str, batch: &Batch<Cpu>) -> Result<Self> {
        let words: &[i32] = access.read("segment table", &batch.table)?;
        if batch.segments > MAX_SEGMENTS {
            return Err(Error::Shape {
                op,
                what: "segments",
                expected: format!("at most {MAX_SEGMENTS}"),
                got: batch.segments.to_string(),
            });
        }
        if i32::try_from(batch.rows).is_err() {
            return Err(Error::Shape {
                op,
                what: "rows of the call",
                expected: format!("at most {}", i32::MAX),
                got: batch.rows.to_string(),
            });
        }
        let mut rows = Self {
            profile: batch.profile,
            count: batch.rows,
            list: [Segment::default(); MAX_SEGMENTS],
            len: batch.segments,
        };
        for (i, segment) in rows.list[..batch.segments].iter_mut().enumerate() {
            let at = i * batch.table.stride();
            let words: Option<&[i32; SEGMENT_WORDS]> = words[at..].first_chunk();
            *segment = words.and_then(Segment::from_words).ok_or_else(|| Error::OutOfRange {
                what: "segment table",
                got: format!("{words:?}"),
                legal: "words that are not negative".to_owned(),
            })?;
            if segment.len > 0 && (segment.row as usize).saturating_add(segment.len as usize) > batch.rows {
                return Err(Error::OutOfRange {
                    what: "rows of a segment",
                    got: format!("{} from {}", segment.len, segment.row),
                    legal: format!("inside the call's {} rows", batch.rows),
                });
            }
            if segment.bank > 1 {
                return Err(Error::OutOfRange {
                    what: "bank of a segment",
                    got: segment.bank.to_string(),
                    legal: "0 or 1".to_owned(),
                });
            }
            if segment.fold > segment.start {
                return Err(Error::OutOfRange {
                    what: "fold of a segment",
                    got: segment.fold.to_string(),
                    legal: format!("0 to its start, {}", segment.start),
                });
            }
        }
        Ok(rows)
    }

    pub(super) fn segments(&self) -> &[Segment] {
        &self.list[..self.len]
    }

    /// Whether a row belongs to a segment; otherwise it is padding.
    pub(super) fn owns(&self, row: usize) -> bool {
        self.segments().iter().any(|s| row.checked_sub(s.row as usize).is_some_and(|i| i < s.len as usize))
    }

    /// Whether no row belongs to two segments.
    pub(super) fn are_disjoint(&self) -> bool {
        let overlap = |a: &Segment, b: &Segment| a.row < b.row + b.len && b.row < a.row + a.len;
        let segments = self.segments();
        !(1..segments.len()).any(|i| segments[..i].iter().any(|s| overlap(s, &segments[i])))
    }

    /// Cuts the segments at multiples of `size` of the absolute position.
    pub(super) fn tiles(&self, size: usize) -> impl Iterator<Item = Tile> {
        self.segments().iter().flat_map(move |s| {
            let (start, row) = (s.start as usize, s.row as usize);
            let end = start + s.len as usize;
            (start / size..end.div_ceil(size)).filter_map(move |tile| {
                let from = start.max(tile * size);
                let to = end.min((tile + 1) * size);
                (from < to).then(|| Tile { row: row + from - start, offset: from % size, len: to - from })
            })
        })
    }
}

#[cfg(test)]
mod tests;
