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

use crate::affine::{AWQ_ORDER, Affine, Layout, Zeros};
use crate::checkpoint::{GptqZeros, StoredTensor, Tensors};
use crate::{Error, PackedMatrix, Result};

fn words<'a>(t: &StoredTensor<'a>) -> &'a [[u8; 4]] {
    t.bytes.as_chunks().0
}

/// The code at `position` of a row of words with `bits` a code, lowest first.
fn unpack(words: &[[u8; 4]], position: usize, bits: usize) -> i16 {
    let per_word = 32 / bits;
    (u32::from_le_bytes(words[position / per_word]) >> (bits * (position % per_word)) & ((1 << bits) - 1)) as i16
}

/// Reads group indices, or spreads the columns evenly.
fn group_of(t: &Tensors<'_>, suffix: &str, cols: usize, groups: usize) -> Result<Vec<usize>> {
    let Some(index) = t.get(suffix) else {
        let size = cols.div_ceil(groups.max(1)).max(1);
        return Ok((0..cols).map(|c| c / size).collect());
    };
    let index: Vec<u32> = words(index).iter().map(|b| u32::from_le_bytes(*b)).collect();
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
    let (words, z, scales) = (words(t.need("qweight")?), words(t.need("qzeros")?), t.floats("scales")?);
    let groups = scales.len() / rows.max(1);
    let group_of = group_of(t, "g_idx", cols, groups)?;
    let offset = if zeros == GptqZeros::MinusOne { 1 } else { 0 };
    let zero = |row, g: usize| unpack(&z[g * rows / 8..], row, 4) + offset;
    let zeros = Zeros::new(each(rows, groups, zero));
    let scales = transpose(&scales, groups, rows);
    Affine { rows, cols, layout: Layout::Gptq, words, zeros, scales, groups, group_of }.pack()
}

pub(crate) fn awq(t: &Tensors<'_>, rows: usize, cols: usize) -> Result<PackedMatrix> {
    let (words, z, scales) = (words(t.need("qweight")?), words(t.need("qzeros")?), t.floats("scales")?);
    let groups = scales.len() / rows.max(1);
    let group_of = group_of(t, "g_idx", cols, groups)?;
    let mut nibble = [0; 8];
    for (n, row) in AWQ_ORDER.into_iter().enumerate() {
        nibble[row] = n;
    }
    let zero = |row: usize, g: usize| unpack(&z[g * rows / 8..], row / 8 * 8 + nibble[row % 8], 4);
    let zeros = Zeros::new(each(rows, groups, zero));
    let scales = transpose(&scales, groups, rows);
    Affine { rows, cols, layout: Layout::Awq, words, zeros, scales, groups, group_of }.pack()
}

/// A value for each row and group, `[rows, groups]`.
fn each(rows: usize, groups: usize, value: impl Fn(usize, usize) -> i16) -> Vec<i16> {
    (0..rows).flat_map(|r| (0..groups).map(move |g| (r, g))).map(|(r, g)| value(r, g)).collect()
}

pub(crate) fn compressed_tensors(t: &Tensors<'_>, rows: usize) -> Result<PackedMatrix> {
    let (packed, scales) = (t.need("weight_packed")?, t.floats("weight_scale")?);
    let words_per_row = packed.info.shape.get(1).copied().unwrap_or(0);
    let cols = columns(t, rows)?;
    let (bits, layout) = match words_per_row {
        words if words == cols.div_ceil(8) => (4, Layout::Nibbles { words }),
        words if words == cols.div_ceil(4) => (8, Layout::Bytes { words }),
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
    // Codes are stored with half their range added.
    let zeros = match zero_points(t, rows, groups, bits)? {
        Some(zeros) => Zeros::new(zeros),
        None => Zeros::Same(1 << (bits - 1)),
    };
    Affine { rows, cols, layout, words: words(packed), zeros, scales, groups, group_of }.pack()
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

/// `z` of each row and group as it is stored, `[rows, groups]`, for asymmetric modules: with half the range added, as the
/// codes are, so that the difference of the two is `q − z`.
fn zero_points(t: &Tensors<'_>, rows: usize, groups: usize, bits: usize) -> Result<Option<Vec<i16>>> {
    let Some(zeros) = t.get("weight_zero_point") else { return Ok(None) };
    let per_word = 32 / bits;
    let expected = [rows.div_ceil(per_word), groups];
    if zeros.info.shape != expected {
        let (tensor, got) = (t.name("weight_zero_point"), zeros.info.shape.to_vec());
        return Err(Error::TensorShape { tensor, expected: format!("{expected:?}"), got });
    }
    let words = words(zeros);
    let at = |row: usize, g: usize| unpack(&words[row / per_word * groups + g..], row % per_word, bits);
    Ok(Some(each(rows, groups, at)))
}
