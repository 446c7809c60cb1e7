//! Matrices as `.ninfer` containers store them: one object of bytes each, cut by rows.
//!
//! | format | layout | object of a matrix `[rows, cols]` | alignment |
//! |---|---|---|---|
//! | `BF16`, `FP32`, `I32` | `contiguous-le-v1` | elements, row-major, little endian; any shape | 256 |
//! | `Q4G64_F16S`, `Q5G64_F16S`, `Q6G64_F16S`, `W8G32_F16S` | `row-split-k128-v1` | base plane, high plane, f16 scales | 256 |
//! | `NVFP4` | `blockscale-k16-m128x4-v1` | codes, E4M3 scales in tile order, f32 divisor; 128 divides rows, 64 columns | 256 |
//! | `FP8_E4M3FN_ROW_BF16S` | `row-scale-v1` | codes, one BF16 multiplier per row | 256 |
//!
//! Each plane but the first starts at a multiple of 256 bytes inside the object; behind the NVFP4 scales the divisor follows at
//! once. The planes are those of [`PackedData`](ninfer_core::PackedData), the tile order is that of
//! [`scale_layout`](crate::scale_layout). Rows can be read without the rest: [`StoredMatrix::spans`] says which bytes they
//! are.

use std::ops::Range;

use ninfer_core::format::{GROUP_PAD, GlobalScale, GroupFormat, NVFP4_GROUP};
use ninfer_core::{DType, WeightFormat};

use crate::codes::{decode_bf16_slice, encode_bf16};
use crate::scale_layout::{TILE_GROUPS, TILE_ROWS, TiledScales};
use crate::{Error, Fp8ScaleVec, PackedMatrix, PackedParts, Result};

/// Objects, and planes inside them, start at multiples of this.
pub const ALIGNMENT: u64 = 256;

/// A number format of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ContainerFormat {
    /// `BF16`.
    Bf16,
    /// `FP32`.
    F32,
    /// `I32`: token ids, never a matrix.
    I32,
    /// `Q4G64_F16S`, `Q5G64_F16S`, `Q6G64_F16S`, `W8G32_F16S`.
    Group(GroupFormat),
    /// `NVFP4`, with a divisor.
    Nvfp4,
    /// `FP8_E4M3FN_ROW_BF16S`.
    Fp8Row,
}

impl ContainerFormat {
    /// All formats.
    pub const ALL: [Self; 9] = [
        Self::Bf16,
        Self::F32,
        Self::I32,
        Self::Group(GroupFormat::Q4),
        Self::Group(GroupFormat::Q5),
        Self::Group(GroupFormat::Q6),
        Self::Group(GroupFormat::W8),
        Self::Nvfp4,
        Self::Fp8Row,
    ];

    /// The name in the directory.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::F32 => "FP32",
            Self::I32 => "I32",
            Self::Group(GroupFormat::Q4) => "Q4G64_F16S",
            Self::Group(GroupFormat::Q5) => "Q5G64_F16S",
            Self::Group(GroupFormat::Q6) => "Q6G64_F16S",
            Self::Group(GroupFormat::W8) => "W8G32_F16S",
            Self::Nvfp4 => "NVFP4",
            Self::Fp8Row => "FP8_E4M3FN_ROW_BF16S",
        }
    }

    /// The format of a name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.name() == name)
    }

    /// The one layout that objects of this format have.
    #[must_use]
    pub const fn layout(self) -> &'static str {
        match self {
            Self::Bf16 | Self::F32 | Self::I32 => "contiguous-le-v1",
            Self::Group(_) => "row-split-k128-v1",
            Self::Nvfp4 => "blockscale-k16-m128x4-v1",
            Self::Fp8Row => "row-scale-v1",
        }
    }

    /// The format of a decoded matrix; none for `I32`.
    #[must_use]
    pub const fn weight_format(self) -> Option<WeightFormat> {
        Some(match self {
            Self::Bf16 => WeightFormat::Bf16,
            Self::F32 => WeightFormat::F32,
            Self::I32 => return None,
            Self::Group(g) => WeightFormat::Group(g),
            Self::Nvfp4 => WeightFormat::Nvfp4,
            Self::Fp8Row => WeightFormat::Fp8Row,
        })
    }

    /// Bytes of one element of the formats without scales.
    const fn element(self) -> Option<u64> {
        match self {
            Self::Bf16 => Some(2),
            Self::F32 | Self::I32 => Some(4),
            _ => None,
        }
    }

    /// Bytes of an object of this shape; none where the format cannot have it: formats with scales are matrices, those of
    /// NVFP4 have rows divisible by 128 and columns by 64, and no size exceeds 2⁶³.
    ///
    /// ```
    /// use ninfer_core::format::GroupFormat;
    /// use ninfer_quant::container::ContainerFormat;
    /// assert_eq!(ContainerFormat::Group(GroupFormat::Q5).object_bytes(&[2, 130]), Some(528));
    /// assert_eq!(ContainerFormat::F32.object_bytes(&[]), Some(4));
    /// assert_eq!(ContainerFormat::Nvfp4.object_bytes(&[100, 64]), None);
    /// ```
    #[must_use]
    pub fn object_bytes(self, shape: &[usize]) -> Option<u64> {
        if let Some(size) = self.element() {
            let bytes = shape.iter().try_fold(size, |n, &d| n.checked_mul(d as u64))?;
            return (bytes > 0 && bytes <= i64::MAX as u64).then_some(bytes);
        }
        let &[rows, cols] = shape else { return None };
        StoredMatrix::new(self, rows, cols).ok().map(|m| m.bytes())
    }
}

/// Format and shape of a stored matrix, and with them the place of everything in its object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredMatrix {
    format: ContainerFormat,
    rows: usize,
    cols: usize,
}

fn align(n: u64) -> u64 {
    n.next_multiple_of(ALIGNMENT)
}

impl StoredMatrix {
    /// A matrix of this format and shape.
    ///
    /// # Errors
    /// [`Error::ContainerShape`] if the format cannot have the shape, or no memory could hold it.
    pub fn new(format: ContainerFormat, rows: usize, cols: usize) -> Result<Self> {
        let legal = match format {
            ContainerFormat::I32 => false,
            ContainerFormat::Nvfp4 => rows.is_multiple_of(TILE_ROWS) && cols.is_multiple_of(NVFP4_GROUP * TILE_GROUPS),
            _ => true,
        };
        // Below this bound no sum or product of this module overflows.
        let countable = rows.checked_mul(cols.max(GROUP_PAD)).is_some_and(|n| n <= isize::MAX as usize / 64);
        if legal && countable && rows > 0 && cols > 0 {
            return Ok(Self { format, rows, cols });
        }
        Err(Error::ContainerShape { format: format.name(), rows, cols })
    }

    /// The format.
    #[must_use]
    pub fn format(&self) -> ContainerFormat {
        self.format
    }

    /// Out features.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// In features.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of one row in each plane; NVFP4 scales are counted although whole tiles are stored together.
    fn planes(&self) -> Vec<u64> {
        let cols = self.cols as u64;
        match self.format {
            ContainerFormat::Bf16 => vec![2 * cols],
            ContainerFormat::F32 | ContainerFormat::I32 => vec![4 * cols],
            ContainerFormat::Group(g) => {
                let groups = cols.next_multiple_of(GROUP_PAD as u64) / g.group_size() as u64;
                vec![32 * groups, g.high_bytes() as u64 * groups, 2 * groups]
            }
            ContainerFormat::Nvfp4 => vec![cols / 2, cols / NVFP4_GROUP as u64],
            ContainerFormat::Fp8Row => vec![cols, 2],
        }
    }

    /// Offset of each plane, and the end of the last.
    fn offsets(&self) -> (Vec<u64>, u64) {
        let (mut offsets, mut end) = (Vec::new(), 0);
        for per_row in self.planes() {
            // An empty high plane takes no room.
            let start = align(end);
            offsets.push(start);
            end = start + per_row * self.rows as u64;
        }
        (offsets, end)
    }

    /// Bytes of the object.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.offsets().1 + if self.format == ContainerFormat::Nvfp4 { 4 } else { 0 }
    }

    /// The byte ranges of the object that [`StoredMatrix::decode`] needs for a range of rows, in its order.
    ///
    /// A range past the last row is cut off there.
    #[must_use]
    pub fn spans(&self, rows: Range<usize>) -> Vec<Range<u64>> {
        let (start, end) = (rows.start.min(rows.end).min(self.rows) as u64, rows.end.min(self.rows) as u64);
        let (offsets, last) = self.offsets();
        let span = |(offset, per_row): (u64, u64)| offset + start * per_row..offset + end * per_row;
        let mut spans: Vec<Range<u64>> = offsets.iter().copied().zip(self.planes()).map(span).collect();
        if let (ContainerFormat::Nvfp4, [_, scales]) = (self.format, spans.as_mut_slice()) {
            // Whole tiles of 128 rows, and the divisor.
            let (tile, per_row) = (TILE_ROWS as u64, self.cols as u64 / NVFP4_GROUP as u64);
            let offset = offsets[1];
            *scales = offset + start / tile * tile * per_row..offset + end.next_multiple_of(tile) * per_row;
            spans.push(last..last + 4);
        }
        spans
    }

    /// The rows as a matrix of their own; `parts` are the bytes of [`StoredMatrix::spans`] for the same rows.
    ///
    /// # Errors
    /// [`Error::Length`] if parts are missing or of another length; those of [`PackedMatrix::new`] for codes and scales that
    /// are no weights; [`Error::SwappedScale`] for an NVFP4 divisor or an FP8 multiplier that makes weights absurdly large.
    ///
    /// ```
    /// use ninfer_core::WeightFormat;
    /// use ninfer_core::format::GroupFormat;
    /// use ninfer_quant::container::{ContainerFormat, StoredMatrix, encode};
    /// let w: Vec<f32> = (0..4 * 100).map(|i| (i as f32 - 200.0) / 64.0).collect();
    /// let m = ninfer_quant::encode(WeightFormat::Group(GroupFormat::Q6), 4, 100, &w)?;
    /// let object = encode(&m)?;
    /// let stored = StoredMatrix::new(ContainerFormat::Group(GroupFormat::Q6), 4, 100)?;
    /// let parts: Vec<Vec<u8>> =
    ///     stored.spans(1..3).into_iter().map(|s| object[s.start as usize..s.end as usize].to_vec()).collect();
    /// assert_eq!(stored.decode(1..3, parts)?, m.slice_rows(1..3)?);
    /// # Ok::<(), ninfer_quant::Error>(())
    /// ```
    pub fn decode(&self, rows: Range<usize>, parts: Vec<Vec<u8>>) -> Result<PackedMatrix> {
        let spans = self.spans(rows.clone());
        if spans.len() != parts.len() {
            return Err(Error::Length { what: "list of parts", expected: spans.len(), got: parts.len() });
        }
        for (span, part) in spans.iter().zip(&parts) {
            let expected = (span.end - span.start) as usize;
            if part.len() != expected {
                return Err(Error::Length { what: "part of an object", expected, got: part.len() });
            }
        }
        let end = rows.end.min(self.rows);
        let start = rows.start.min(end);
        let count = end - start;
        let mut parts = parts.into_iter();
        // As many as there are spans, whose number depends on the format alone.
        let mut next = || parts.next().unwrap_or_default();
        let packed = match self.format {
            ContainerFormat::Bf16 => PackedParts::Plain { dtype: DType::Bf16, bytes: next() },
            ContainerFormat::F32 | ContainerFormat::I32 => PackedParts::Plain { dtype: DType::F32, bytes: next() },
            ContainerFormat::Group(format) => PackedParts::Group { format, base: next(), high: next(), scales: next() },
            ContainerFormat::Fp8Row => {
                let (codes, words) = (next(), next());
                let mut scales = vec![0.0; count];
                decode_bf16_slice(&words, &mut scales);
                if let Some(&scale) = scales.iter().find(|s| **s > crate::checkpoint::MAX_MULTIPLIER) {
                    return Err(swapped("row scales", scale, scale));
                }
                PackedParts::Fp8 { codes, scales: Fp8ScaleVec::Row(scales) }
            }
            ContainerFormat::Nvfp4 => {
                let (codes, tiles, word) = (next(), next(), next());
                let groups = self.cols / NVFP4_GROUP;
                let first = start / TILE_ROWS * TILE_ROWS;
                let tiled = TiledScales::from_tiles(tiles.len() / groups, groups, tiles)?;
                let row_major = tiled.to_row_major();
                let scales = row_major[(start - first) * groups..(end - first) * groups].to_vec();
                let divisor = f32::from_le_bytes(word.as_slice().try_into().unwrap_or_default());
                // A divisor that is no positive number is refused below, as any matrix with one is.
                if divisor > 0.0 && divisor.recip() > crate::checkpoint::MAX_MULTIPLIER {
                    return Err(swapped("NVFP4 divisor", divisor, divisor.recip()));
                }
                PackedParts::Nvfp4 { codes, scales, global: GlobalScale::Divide(divisor) }
            }
        };
        PackedMatrix::new(count, self.cols, packed)
    }
}

fn swapped(tensor: &str, value: f32, multiplier: f32) -> Error {
    Error::SwappedScale { tensor: tensor.to_owned(), value, multiplier }
}

/// The object of a matrix.
///
/// # Errors
/// [`Error::Conversion`] for formats a container does not have (F16, FP8 per matrix or block, NVFP4 with a multiplier) and
/// for FP8 row scales that are no BF16 numbers; [`Error::ContainerShape`] for an NVFP4 matrix whose rows 128 or whose
/// columns 64 does not divide.
pub fn encode(m: &PackedMatrix) -> Result<Vec<u8>> {
    let (rows, cols) = (m.rows(), m.cols());
    let refused = Error::Conversion { conversion: "a container", stored: m.format() };
    let (format, planes): (_, Vec<Vec<u8>>) = match m.parts() {
        PackedParts::Plain { dtype: DType::Bf16, bytes } => (ContainerFormat::Bf16, vec![bytes.clone()]),
        PackedParts::Plain { dtype: DType::F32, bytes } => (ContainerFormat::F32, vec![bytes.clone()]),
        PackedParts::Group { format, base, high, scales } => {
            (ContainerFormat::Group(*format), vec![base.clone(), high.clone(), scales.clone()])
        }
        PackedParts::Fp8 { codes, scales: Fp8ScaleVec::Row(scales) } => {
            let words: Vec<u16> = scales.iter().map(|&s| encode_bf16(s)).collect();
            if words.iter().zip(scales).any(|(&w, s)| f32::from_bits(u32::from(w) << 16) != *s) {
                return Err(refused);
            }
            (ContainerFormat::Fp8Row, vec![codes.clone(), words.iter().flat_map(|w| w.to_le_bytes()).collect()])
        }
        PackedParts::Nvfp4 { codes, scales, global: GlobalScale::Divide(_) } => {
            let tiles = TiledScales::from_row_major(rows, cols / NVFP4_GROUP, scales)?;
            (ContainerFormat::Nvfp4, vec![codes.clone(), tiles.bytes().to_vec()])
        }
        _ => return Err(refused),
    };
    let stored = StoredMatrix::new(format, rows, cols)?;
    let mut object = vec![0; stored.bytes() as usize];
    for (offset, plane) in stored.offsets().0.into_iter().zip(planes) {
        object[offset as usize..][..plane.len()].copy_from_slice(&plane);
    }
    if let PackedParts::Nvfp4 { global: GlobalScale::Divide(divisor), .. } = m.parts() {
        let at = object.len() - 4;
        object[at..].copy_from_slice(&divisor.to_le_bytes());
    }
    Ok(object)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn weights(count: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 7919 % 1009) as f32 - 504.0) / 512.0).collect()
    }

    fn matrix(format: ContainerFormat, rows: usize, cols: usize) -> PackedMatrix {
        let m = crate::encode(format.weight_format().unwrap(), rows, cols, &weights(rows * cols)).unwrap();
        match m.into_parts() {
            // Scales as a container holds them.
            PackedParts::Fp8 { codes, scales: Fp8ScaleVec::Row(s) } => {
                let rounded = s.iter().map(|&s| crate::codes::decode_bf16(encode_bf16(s))).collect();
                PackedMatrix::new(rows, cols, PackedParts::Fp8 { codes, scales: Fp8ScaleVec::Row(rounded) }).unwrap()
            }
            parts => PackedMatrix::new(rows, cols, parts).unwrap(),
        }
    }

    fn cut(object: &[u8], stored: &StoredMatrix, rows: Range<usize>) -> Vec<Vec<u8>> {
        stored.spans(rows).into_iter().map(|s| object[s.start as usize..s.end as usize].to_vec()).collect()
    }

    #[test]
    fn planes_lie_where_the_layout_says() {
        // Two rows of 130 columns: four groups of 64 a row, padding included.
        let m = matrix(ContainerFormat::Group(GroupFormat::Q5), 2, 130);
        let object = encode(&m).unwrap();
        let PackedParts::Group { base, high, scales, .. } = m.parts() else { unreachable!() };
        assert_eq!((base.len(), high.len(), scales.len(), object.len()), (256, 64, 16, 528));
        assert_eq!((&object[..256], &object[256..320], &object[512..]), (&base[..], &high[..], &scales[..]));
        assert!(object[320..512].iter().all(|&b| b == 0));
        // Without a high plane the scales follow the base plane.
        let m = matrix(ContainerFormat::Group(GroupFormat::W8), 3, 40);
        let PackedParts::Group { base, scales, .. } = m.parts() else { unreachable!() };
        let object = encode(&m).unwrap();
        assert_eq!((&object[..384], &object[512..]), (&base[..], &scales[..]));
        // FP8: the multipliers start at a multiple of 256.
        let object = encode(&matrix(ContainerFormat::Fp8Row, 3, 100)).unwrap();
        assert_eq!(object.len(), 512 + 6);
        // NVFP4: scale (row 33, group 5) of a 128 × 128 matrix, then the divisor.
        let m = matrix(ContainerFormat::Nvfp4, 128, 128);
        let PackedParts::Nvfp4 { scales, global: GlobalScale::Divide(g), .. } = m.parts() else { unreachable!() };
        let object = encode(&m).unwrap();
        assert_eq!(object.len(), 128 * 64 + 128 * 8 + 4);
        assert_eq!(object[128 * 64 + 512 + 16 + 4 + 1], scales[33 * 8 + 5]);
        assert_eq!(object[128 * 64 + 128 * 8..], g.to_le_bytes());
    }

    #[test]
    fn what_a_container_cannot_hold_is_refused() {
        for (format, rows, cols) in [
            (ContainerFormat::Nvfp4, 64, 128),
            (ContainerFormat::Nvfp4, 128, 96),
            (ContainerFormat::I32, 4, 4),
            (ContainerFormat::Bf16, 0, 4),
            (ContainerFormat::Fp8Row, 4, 0),
            (ContainerFormat::Group(GroupFormat::Q4), usize::MAX, 1),
            (ContainerFormat::Bf16, 1 << 40, 1 << 40),
        ] {
            let refused = StoredMatrix::new(format, rows, cols);
            assert!(matches!(refused, Err(Error::ContainerShape { .. })), "{format:?} {rows} {cols}");
            assert_eq!(format.object_bytes(&[rows, cols]).is_some(), format == ContainerFormat::I32);
        }
        assert_eq!(ContainerFormat::Group(GroupFormat::Q4).object_bytes(&[4]), None);
        assert_eq!(ContainerFormat::Bf16.object_bytes(&[usize::MAX, usize::MAX]), None);
        let multiply =
            crate::nvfp4::encode(crate::nvfp4::Convention::ModelOpt, 128, 64, &weights(128 * 64), None).unwrap();
        assert!(matches!(encode(&multiply), Err(Error::Conversion { .. })));
        let odd = PackedMatrix::new(1, 1, PackedParts::Fp8 { codes: vec![0], scales: Fp8ScaleVec::Row(vec![0.1]) });
        assert!(matches!(encode(&odd.unwrap()), Err(Error::Conversion { .. })));
    }

    #[test]
    fn damaged_scales_and_lengths_are_refused() {
        let m = matrix(ContainerFormat::Nvfp4, 128, 64);
        let stored = StoredMatrix::new(ContainerFormat::Nvfp4, 128, 64).unwrap();
        let object = encode(&m).unwrap();
        let with = |divisor: f32| {
            let mut parts = cut(&object, &stored, 0..128);
            parts[2] = divisor.to_le_bytes().to_vec();
            stored.decode(0..128, parts)
        };
        assert!(matches!(with(1e-3), Err(Error::SwappedScale { .. })));
        for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert!(matches!(with(bad), Err(Error::Scale { .. })), "{bad}");
        }
        let mut short = cut(&object, &stored, 0..128);
        short[0].pop();
        assert!(matches!(stored.decode(0..128, short), Err(Error::Length { .. })));
        assert!(matches!(stored.decode(0..128, Vec::new()), Err(Error::Length { .. })));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_rows_of_any_format_come_back(
            pick in 0usize..8, rows in 1usize..40, cols in 1usize..200, a in 0.0f64..1.0, b in 0.0f64..1.0,
        ) {
            let format = ContainerFormat::ALL.into_iter().filter(|f| *f != ContainerFormat::I32).nth(pick).unwrap();
            let (rows, cols) =
                if format == ContainerFormat::Nvfp4 { (128 * (1 + rows % 3), 64 * (1 + cols % 3)) } else { (rows, cols) };
            let m = matrix(format, rows, cols);
            let stored = StoredMatrix::new(format, rows, cols).unwrap();
            let object = encode(&m).unwrap();
            prop_assert_eq!(object.len() as u64, stored.bytes());
            prop_assert_eq!(format.object_bytes(&[rows, cols]), Some(stored.bytes()));
            let (a, b) = ((a * rows as f64) as usize, (b * rows as f64) as usize + 1);
            let range = a.min(b)..a.max(b);
            let got = stored.decode(range.clone(), cut(&object, &stored, range.clone())).unwrap();
            prop_assert_eq!(got, m.slice_rows(range).unwrap());
        }
    }
}
