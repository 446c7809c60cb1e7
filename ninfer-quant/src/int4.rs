//! Int4 and int8 checkpoints: compressed-tensors, GPTQ and AWQ.
//!
//! All of them mean `w = (q − z) · s` with an integer code, an integer zero point and a scale per group of columns; they
//! differ in how codes and zero points lie in 32-bit words.
//!
//! | format | codes | zero points | scales |
//! |---|---|---|---|
//! | compressed-tensors | `[out, ⌈in·bits/32⌉]`, along in, lowest bits first, stored `q + 2^(bits−1)` | `[⌈out·bits/32⌉, groups]`, along out; absent: 0 | `[out, groups]` |
//! | GPTQ | `[in/8, out]`, along in, lowest nibble first | `[groups, out/8]`, lowest nibble first; v1 stores `z − 1` | `[groups, out]` |
//! | AWQ | `[in, out/8]`, along out, nibble n holds output `[0, 2, 4, 6, 1, 3, 5, 7][n]` | as the codes | `[groups, out]` |
//!
//! Up to four columns fit one word at either width; such narrow compressed-tensors modules are read as 4-bit.
//!
//! The result is a groupwise-integer matrix when that holds exactly the same weights, which it does for the usual symmetric
//! files: `q − z` fits Q4 (Q5 or W8 where zero points vary), the scale is an f16 number already, and 64 (32 for W8) neighbouring
//! columns share it. Otherwise, for example with act-order, it is F32.

use ninfer_core::WeightFormat;
use ninfer_core::format::GroupFormat;

use crate::checkpoint::{GptqZeros, StoredTensor, Tensors};
use crate::codes::{decode_f16, encode_f16};
use crate::groupwise::{Planes, pack_group};
use crate::{Error, PackedMatrix, Result, plain};

/// Output column of each nibble of an AWQ word.
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// A matrix as differences `q − z` with a scale per row and group, and the group of each column.
struct Affine {
    rows: usize,
    cols: usize,
    /// `q − z`, `[rows, cols]`.
    codes: Vec<i16>,
    /// `[rows, groups]`.
    scales: Vec<f32>,
    groups: usize,
    /// `[cols]`, each below `groups`.
    group_of: Vec<usize>,
}

impl Affine {
    fn pack(&self) -> Result<PackedMatrix> {
        match self.exact_format() {
            Some(format) => Ok(self.pack_groups(format)),
            None => {
                let mut w = Vec::with_capacity(self.codes.len());
                for (row, codes) in self.codes.chunks_exact(self.cols.max(1)).enumerate() {
                    let scales = &self.scales[row * self.groups..(row + 1) * self.groups];
                    w.extend(codes.iter().zip(&self.group_of).map(|(&c, &g)| f32::from(c) * scales[g]));
                }
                plain::encode(WeightFormat::F32, self.rows, self.cols, &w)
            }
        }
    }

    /// The narrowest groupwise format that holds the same weights, if there is one.
    fn exact_format(&self) -> Option<GroupFormat> {
        if self.scales.iter().any(|&s| s.is_sign_negative() || decode_f16(encode_f16(s)) != s) {
            return None;
        }
        let (low, high) = self.codes.iter().fold((0, 0), |(l, h), &c| (c.min(l), c.max(h)));
        [GroupFormat::Q4, GroupFormat::Q5, GroupFormat::W8].into_iter().find(|&f| {
            let limit = 1i16 << (f.bits() - 1);
            // W8 has no code −128.
            let low_limit = if f == GroupFormat::W8 { -127 } else { -limit };
            let uniform = |g: &[usize]| g.windows(2).all(|g| g[0] == g[1]);
            low >= low_limit && high < limit && self.group_of.chunks(f.group_size()).all(uniform)
        })
    }

    fn pack_groups(&self, format: GroupFormat) -> PackedMatrix {
        let mut planes = Planes::zeroed(format, self.rows, self.cols);
        let size = format.group_size();
        let per_row = planes.groups_per_row(self.rows);
        for (row, codes) in self.codes.chunks_exact(self.cols.max(1)).enumerate() {
            for (g, (codes, of)) in codes.chunks(size).zip(self.group_of.chunks(size)).enumerate() {
                let at = row * per_row + g;
                planes.set_scale(at, encode_f16(self.scales[row * self.groups + of[0]]));
                let (base, high) = planes.group(format, at);
                let mut lanes = [0i8; 64];
                for (lane, &c) in lanes.iter_mut().zip(codes) {
                    *lane = c as i8; // in range: the format was chosen for it
                }
                pack_group(format, &lanes, base, high);
            }
        }
        planes.finish(format, self.rows, self.cols)
    }
}

fn words(t: &StoredTensor<'_>) -> Vec<u32> {
    t.bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

/// The code at `position` of a row of words with `bits` a code, lowest first.
fn unpack(words: &[u32], position: usize, bits: usize) -> i16 {
    let per_word = 32 / bits;
    (words[position / per_word] >> (bits * (position % per_word)) & ((1 << bits) - 1)) as i16
}

/// Reads group indices, or spreads the columns evenly.
fn group_of(t: &Tensors<'_>, suffix: &str, cols: usize, groups: usize) -> Result<Vec<usize>> {
    let Some(index) = t.get(suffix) else {
        let size = cols.div_ceil(groups.max(1)).max(1);
        return Ok((0..cols).map(|c| c / size).collect());
    };
    let index = words(index);
    match index.iter().position(|&g| g as usize >= groups) {
        Some(i) => {
            t.bad_value(suffix, i, index[i] as i32, "it is the number of a group, below the number of scale groups")
        }
        None => Ok(index.into_iter().map(|g| g as usize).collect()),
    }
}

/// `[groups, rows]` to `[rows, groups]`.
fn transpose(scales: &[f32], groups: usize, rows: usize) -> Vec<f32> {
    (0..rows).flat_map(|r| (0..groups).map(move |g| scales[g * rows + r])).collect()
}

pub(crate) fn gptq(t: &Tensors<'_>, rows: usize, cols: usize, zeros: GptqZeros) -> Result<PackedMatrix> {
    let (q, z, scales) = (words(t.need("qweight")?), words(t.need("qzeros")?), t.floats("scales")?);
    let groups = scales.len() / rows.max(1);
    let group_of = group_of(t, "g_idx", cols, groups)?;
    let offset = if zeros == GptqZeros::MinusOne { 1 } else { 0 };
    let mut codes = vec![0i16; rows * cols];
    for (word_row, q) in q.chunks_exact(rows.max(1)).enumerate() {
        for (row, &word) in q.iter().enumerate() {
            for lane in 0..8 {
                let col = 8 * word_row + lane;
                let zero = unpack(&z[group_of[col] * rows / 8..], row, 4) + offset;
                codes[row * cols + col] = ((word >> (4 * lane)) & 15) as i16 - zero;
            }
        }
    }
    Affine { rows, cols, codes, scales: transpose(&scales, groups, rows), groups, group_of }.pack()
}

pub(crate) fn awq(t: &Tensors<'_>, rows: usize, cols: usize) -> Result<PackedMatrix> {
    let (q, z, scales) = (words(t.need("qweight")?), words(t.need("qzeros")?), t.floats("scales")?);
    let groups = scales.len() / rows.max(1);
    let group_of = group_of(t, "g_idx", cols, groups)?;
    let per_row = rows / 8;
    let mut codes = vec![0i16; rows * cols];
    for (col, q) in q.chunks_exact(per_row.max(1)).enumerate() {
        let z = &z[group_of[col] * per_row..][..per_row];
        for (j, (&q, &z)) in q.iter().zip(z).enumerate() {
            for (n, row) in AWQ_ORDER.iter().enumerate() {
                let nibble = |w: u32| ((w >> (4 * n)) & 15) as i16;
                codes[(8 * j + row) * cols + col] = nibble(q) - nibble(z);
            }
        }
    }
    Affine { rows, cols, codes, scales: transpose(&scales, groups, rows), groups, group_of }.pack()
}

pub(crate) fn compressed_tensors(t: &Tensors<'_>, rows: usize) -> Result<PackedMatrix> {
    let (packed, scales) = (t.need("weight_packed")?, t.floats("weight_scale")?);
    let words_per_row = packed.info.shape.get(1).copied().unwrap_or(0);
    let cols = columns(t, rows)?;
    let bits = match words_per_row {
        n if n == cols.div_ceil(8) => 4,
        n if n == cols.div_ceil(4) => 8,
        _ => {
            let expected =
                format!("[{rows}, {}] (4 bits) or [{rows}, {}] (8 bits)", cols.div_ceil(8), cols.div_ceil(4));
            let (tensor, got) = (t.name("weight_packed"), packed.info.shape.to_vec());
            return Err(Error::TensorShape { tensor, expected, got });
        }
    };
    let groups = scales.len() / rows.max(1);
    if cols % groups.max(1) != 0 {
        let expected = format!("[{rows}, groups] with groups dividing {cols}");
        let (tensor, got) = (t.name("weight_scale"), vec![rows, groups]);
        return Err(Error::TensorShape { tensor, expected, got });
    }
    if let Some(g) = t.get("weight_g_idx")
        && g.info.shape != [cols]
    {
        let (tensor, got) = (t.name("weight_g_idx"), g.info.shape.to_vec());
        return Err(Error::TensorShape { tensor, expected: format!("[{cols}]"), got });
    }
    let group_of = group_of(t, "weight_g_idx", cols, groups)?;
    let zeros = zero_points(t, rows, groups, bits)?;
    let middle = 1i16 << (bits - 1);
    let packed = words(packed);
    let mut codes = vec![0i16; rows * cols];
    for (row, out) in codes.chunks_exact_mut(cols.max(1)).enumerate() {
        let q = &packed[row * words_per_row..(row + 1) * words_per_row];
        for (col, (out, &g)) in out.iter_mut().zip(&group_of).enumerate() {
            *out = unpack(q, col, bits) - middle - zeros.as_ref().map_or(0, |z| z[row * groups + g]);
        }
    }
    Affine { rows, cols, codes, scales, groups, group_of }.pack()
}

/// The columns that `weight_shape` tells.
fn columns(t: &Tensors<'_>, rows: usize) -> Result<usize> {
    let shape = t.need("weight_shape")?;
    let at = |i: usize| -> i64 {
        let size = shape.info.dtype.size();
        let b = &shape.bytes[i * size..(i + 1) * size];
        match *b {
            [a, b, c, d] => i64::from(i32::from_le_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h] => i64::from_le_bytes([a, b, c, d, e, f, g, h]),
            _ => -1,
        }
    };
    if usize::try_from(at(0)) != Ok(rows) {
        return t.bad_value("weight_shape", 0, at(0), "it is the number of rows of weight_packed");
    }
    match usize::try_from(at(1)) {
        Ok(cols) if cols < 1 << 32 => Ok(cols),
        _ => t.bad_value("weight_shape", 1, at(1), "it is the number of columns"),
    }
}

/// `z` of each row and group, `[rows, groups]`, for asymmetric modules.
fn zero_points(t: &Tensors<'_>, rows: usize, groups: usize, bits: usize) -> Result<Option<Vec<i16>>> {
    let Some(zeros) = t.get("weight_zero_point") else { return Ok(None) };
    let per_word = 32 / bits;
    let expected = [rows.div_ceil(per_word), groups];
    if zeros.info.shape != expected {
        let (tensor, got) = (t.name("weight_zero_point"), zeros.info.shape.to_vec());
        return Err(Error::TensorShape { tensor, expected: format!("{expected:?}"), got });
    }
    let (words, middle) = (words(zeros), 1i16 << (bits - 1));
    let at = |row: usize, g: usize| {
        let word = words[row / per_word * groups + g];
        (word >> (bits * (row % per_word)) & ((1 << bits) - 1)) as i16 - middle
    };
    Ok(Some((0..rows).flat_map(|r| (0..groups).map(move |g| (r, g))).map(|(r, g)| at(r, g)).collect()))
}
