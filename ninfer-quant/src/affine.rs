//! Integer codes with zero points and scales, as int4 and int8 checkpoints store them, and their packing.

use ninfer_core::DType;
use ninfer_core::format::GroupFormat;

use crate::codes::{decode_f16, encode_f16};
use crate::groupwise::{Planes, pack};
use crate::simd::wide;
use crate::slices::write_f32;
use crate::{PackedMatrix, PackedParts, Result};

/// Columns unpacked at a time: whole groups of every format.
const PIECE: usize = 512;
/// Rows unpacked at a time, so that a cache line of words that lie along the rows is used up.
const STRIP: usize = 128;
/// Output column of each nibble of an AWQ word.
pub(crate) const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// How codes lie in 32-bit words.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Layout {
    /// `[rows, words]`, eight columns a word, lowest nibble first.
    Nibbles { words: usize },
    /// `[rows, words]`, four columns a word, lowest byte first.
    Bytes { words: usize },
    /// `[cols/8, rows]`, eight columns a word, lowest nibble first.
    Gptq,
    /// `[cols, rows/8]`, eight rows a word in [`AWQ_ORDER`].
    Awq,
}

/// What is subtracted from a code.
pub(crate) enum Zeros {
    /// The same number everywhere.
    Same(i16),
    /// `[rows, groups]`.
    Each(Vec<i16>),
}

impl Zeros {
    /// Recognises zero points that are all the same.
    pub(crate) fn new(zeros: Vec<i16>) -> Self {
        match zeros.split_first() {
            Some((&first, rest)) if rest.iter().all(|&z| z == first) => Self::Same(first),
            _ => Self::Each(zeros),
        }
    }
}

/// A matrix of weights `(q − z) · s`, with a zero point and a scale per row and group, and the group of each column.
pub(crate) struct Affine<'a> {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) layout: Layout,
    /// Little-endian words.
    pub(crate) words: &'a [[u8; 4]],
    pub(crate) zeros: Zeros,
    /// `[rows, groups]`.
    pub(crate) scales: Vec<f32>,
    pub(crate) groups: usize,
    /// `[cols]`, each below `groups`.
    pub(crate) group_of: Vec<usize>,
}

/// Codes of some rows and columns, less their zero points.
struct Tile<'a> {
    row: usize,
    col: usize,
    /// `[rows, PIECE]`; columns past the last of the matrix are meaningless.
    codes: &'a [i16],
    cols: usize,
}

impl Tile<'_> {
    fn rows(&self) -> impl Iterator<Item = (usize, &[i16])> {
        self.codes.chunks_exact(PIECE).enumerate().map(|(r, codes)| (self.row + r, &codes[..self.cols]))
    }
}

impl Affine<'_> {
    /// The groupwise-integer matrix that holds the same weights if there is one, F32 otherwise.
    pub(crate) fn pack(&self) -> Result<PackedMatrix> {
        match self.exact_format() {
            Some(format) => Ok(self.pack_groups(format)),
            None => self.pack_f32(),
        }
    }

    /// The narrowest groupwise format that holds the same weights, if there is one.
    fn exact_format(&self) -> Option<GroupFormat> {
        if self.scales.iter().any(|&s| s.is_sign_negative() || decode_f16(encode_f16(s)) != s) {
            return None;
        }
        let (low, high) = self.range();
        [GroupFormat::Q4, GroupFormat::Q5, GroupFormat::W8].into_iter().find(|&f| {
            let limit = 1i16 << (f.bits() - 1);
            // W8 has no code −128.
            let low_limit = if f == GroupFormat::W8 { -127 } else { -limit };
            low >= low_limit && high < limit && self.is_uniform(f.group_size())
        })
    }

    /// Whether all columns of every piece of this size are in the same group.
    fn is_uniform(&self, size: usize) -> bool {
        self.group_of.chunks(size).all(|g| g.windows(2).all(|g| g[0] == g[1]))
    }

    /// Bounds of `q − z`, those of the codes in use unless the layout allows no wider ones.
    fn range(&self) -> (i16, i16) {
        if let (Zeros::Same(8), Layout::Nibbles { .. } | Layout::Gptq | Layout::Awq) = (&self.zeros, self.layout) {
            return (-8, 7);
        }
        let (mut low, mut high) = (0, 0);
        self.tiles(|tile| {
            for (_, codes) in tile.rows() {
                (low, high) = wide!((fold(codes, low, i16::min), fold(codes, high, i16::max)));
            }
        });
        (low, high)
    }

    fn pack_groups(&self, format: GroupFormat) -> PackedMatrix {
        let mut planes = Planes::zeroed(format, self.rows, self.cols);
        let (size, high_bytes) = (format.group_size(), format.high_bytes());
        let per_row = planes.groups_per_row(self.rows);
        for (row, scales) in self.scales.chunks_exact(self.groups.max(1)).enumerate() {
            for (g, of) in self.group_of.chunks(size).enumerate() {
                planes.set_scale(row * per_row + g, encode_f16(scales[of[0]]));
            }
        }
        let mut lanes = [0i8; PIECE];
        self.tiles(|tile| {
            let groups = tile.cols.div_ceil(size);
            for (row, codes) in tile.rows() {
                let at = row * per_row + tile.col / size;
                let base = &mut planes.base[32 * at..32 * (at + groups)];
                let high = &mut planes.high[high_bytes * at..high_bytes * (at + groups)];
                wide!({
                    for (lane, &c) in lanes.iter_mut().zip(codes) {
                        *lane = c as i8; // in range: the format was chosen for it
                    }
                    // The last piece of a row may be narrower than the one before.
                    lanes[codes.len()..].fill(0);
                    pack(format, &lanes, base, high);
                });
            }
        });
        planes.finish(format, self.rows, self.cols)
    }

    fn pack_f32(&self) -> Result<PackedMatrix> {
        let mut bytes = vec![0; 4 * self.rows * self.cols];
        let mut w = [0.0; PIECE];
        self.tiles(|tile| {
            for (row, codes) in tile.rows() {
                let scales = &self.scales[row * self.groups..(row + 1) * self.groups];
                wide!(for ((w, &c), &g) in w.iter_mut().zip(codes).zip(&self.group_of[tile.col..]) {
                    *w = f32::from(c) * scales[g];
                });
                let at = 4 * (row * self.cols + tile.col);
                write_f32(&w[..tile.cols], &mut bytes[at..at + 4 * tile.cols]);
            }
        });
        PackedMatrix::new(self.rows, self.cols, PackedParts::Plain { dtype: DType::F32, bytes })
    }

    /// Visits all codes, a tile at a time.
    fn tiles(&self, mut visit: impl FnMut(&Tile<'_>)) {
        let mut codes = vec![0i16; STRIP.min(self.rows) * PIECE];
        let runs = self.is_uniform(32);
        for row in (0..self.rows).step_by(STRIP) {
            let rows = STRIP.min(self.rows - row);
            let codes = &mut codes[..rows * PIECE];
            for col in (0..self.cols).step_by(PIECE) {
                let cols = PIECE.min(self.cols - col);
                wide!({
                    self.unpack(row, col, cols, codes);
                    self.subtract_zeros(row, col, runs, codes);
                });
                visit(&Tile { row, col, codes, cols });
            }
        }
    }

    /// The codes as stored, for `codes.len() / PIECE` rows.
    #[inline(always)]
    fn unpack(&self, row: usize, col: usize, cols: usize, codes: &mut [i16]) {
        match self.layout {
            Layout::Nibbles { words } => {
                for (r, codes) in codes.chunks_exact_mut(PIECE).enumerate() {
                    let words = &self.words[(row + r) * words..][col / 8..(col + cols).div_ceil(8)];
                    for (codes, &word) in codes.as_chunks_mut().0.iter_mut().zip(words) {
                        *codes = nibbles(word);
                    }
                }
            }
            Layout::Bytes { words } => {
                for (r, codes) in codes.chunks_exact_mut(PIECE).enumerate() {
                    let words = &self.words[(row + r) * words..][col / 4..(col + cols).div_ceil(4)];
                    for (codes, &word) in codes.as_chunks_mut().0.iter_mut().zip(words) {
                        *codes = word.map(i16::from);
                    }
                }
            }
            Layout::Gptq => {
                for c in (0..cols).step_by(8) {
                    let words = &self.words[(col + c) / 8 * self.rows + row..];
                    for (codes, &word) in codes.chunks_exact_mut(PIECE).zip(words) {
                        codes[c..c + 8].copy_from_slice(&nibbles(word));
                    }
                }
            }
            Layout::Awq => {
                let per_col = self.rows / 8;
                for c in (0..cols).step_by(8) {
                    for (j, codes) in codes.chunks_exact_mut(8 * PIECE).enumerate() {
                        let mut words = [0u32; 8];
                        for (i, word) in words.iter_mut().enumerate().take(cols - c) {
                            *word = u32::from_le_bytes(self.words[(col + c + i) * per_col + row / 8 + j]);
                        }
                        for (n, r) in AWQ_ORDER.iter().enumerate() {
                            let row = words.map(|w| (w >> (4 * n) & 15) as i16);
                            codes[r * PIECE + c..r * PIECE + c + 8].copy_from_slice(&row);
                        }
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn subtract_zeros(&self, row: usize, col: usize, runs: bool, codes: &mut [i16]) {
        let zeros = match &self.zeros {
            Zeros::Same(zero) => {
                for c in codes {
                    *c -= zero;
                }
                return;
            }
            Zeros::Each(zeros) => &zeros[row * self.groups..],
        };
        let group_of = &self.group_of[col..];
        for (codes, zeros) in codes.chunks_exact_mut(PIECE).zip(zeros.chunks_exact(self.groups.max(1))) {
            if runs {
                for (codes, of) in codes.chunks_mut(32).zip(group_of.chunks(32)) {
                    let zero = zeros[of[0]];
                    for c in codes {
                        *c -= zero;
                    }
                }
            } else {
                for (c, &g) in codes.iter_mut().zip(group_of) {
                    *c -= zeros[g];
                }
            }
        }
    }
}

#[inline(always)]
fn fold(codes: &[i16], from: i16, f: impl Fn(i16, i16) -> i16) -> i16 {
    codes.iter().fold(from, |a, &c| f(a, c))
}

/// The eight nibbles of a word, lowest first.
#[inline(always)]
fn nibbles(word: [u8; 4]) -> [i16; 8] {
    let word = u32::from_le_bytes(word);
    [0, 4, 8, 12, 16, 20, 24, 28].map(|shift| (word >> shift & 15) as i16)
}
