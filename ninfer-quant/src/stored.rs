//! Which format the stored tensors of one module are in.

use std::fmt;

use ninfer_core::format::{FP8_BLOCK, GROUP_PAD, GroupFormat, NVFP4_GROUP};
use ninfer_core::{DType, WeightFormat};

use crate::{Error, Result};

/// Suffixes that together make a matrix.
pub const WEIGHT_SUFFIXES: [&str; 16] = [
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "weight_codes",
    "weight_codes_high",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "bias",
];

/// Suffixes that stand beside a matrix and do not matter to its values: scales of activations and of the KV cache.
///
/// Their presence does not mean that activations were quantised: exporters write them on weight-only modules too.
pub const ACTIVATION_SUFFIXES: [&str; 5] = ["input_scale", "input_global_scale", "k_scale", "v_scale", "output_scale"];

/// Splits a tensor name into module and suffix if the suffix is one of [`WEIGHT_SUFFIXES`] or [`ACTIVATION_SUFFIXES`].
///
/// ```
/// use ninfer_quant::checkpoint::split_name;
/// assert_eq!(split_name("layers.0.mlp.up_proj.weight_scale"), Some(("layers.0.mlp.up_proj", "weight_scale")));
/// assert_eq!(split_name("layers.0.linear_attn.A_log"), None);
/// ```
#[must_use]
pub fn split_name(name: &str) -> Option<(&str, &str)> {
    let (module, suffix) = name.rsplit_once('.')?;
    (WEIGHT_SUFFIXES.contains(&suffix) || ACTIVATION_SUFFIXES.contains(&suffix)).then_some((module, suffix))
}

/// Suffix, element type and shape of a stored tensor: what a file header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Last part of the name, for example `weight_scale`.
    pub suffix: &'a str,
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: &'a [usize],
}

/// The family of formats a module is stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoredKind {
    /// `weight` in F32, F16 or BF16.
    Plain(DType),
    /// `weight_packed` U8, `weight_scale` F8_E4M3, `weight_global_scale` F32 (a divisor).
    Nvfp4CompressedTensors,
    /// `weight` U8, `weight_scale` F8_E4M3, `weight_scale_2` F32 (a multiplier).
    Nvfp4ModelOpt,
    /// `weight` F8_E4M3 with one scale.
    Fp8Tensor,
    /// `weight` F8_E4M3 with one scale per row.
    Fp8Row,
    /// `weight` F8_E4M3 with one scale per 128×128 block.
    Fp8Block,
    /// `weight_packed` I32 with 4 or 8 bits a code, `weight_scale`, `weight_shape`.
    IntCompressedTensors,
    /// `weight_codes`, `weight_codes_high`, `weight_scale` F16, `weight_shape`: this library's own groupwise integers.
    Groupwise(GroupFormat),
    /// `qweight` I32 `[in/8, out]`.
    Gptq,
    /// `qweight` I32 `[in, out/8]`.
    Awq,
}

impl StoredKind {
    /// A name for messages and tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain(d) => d.name(),
            Self::Nvfp4CompressedTensors => "NVFP4 (compressed-tensors)",
            Self::Nvfp4ModelOpt => "NVFP4 (ModelOpt)",
            Self::Fp8Tensor => "FP8 per tensor",
            Self::Fp8Row => "FP8 per row",
            Self::Fp8Block => "FP8 blocks",
            Self::IntCompressedTensors => "int4 or int8 (compressed-tensors)",
            Self::Groupwise(g) => WeightFormat::Group(g).name(),
            Self::Gptq => "GPTQ int4",
            Self::Awq => "AWQ int4",
        }
    }

    /// The packed format of the decoded matrix where the header alone decides it; the int4 kinds become whichever format
    /// holds their values exactly (see [`decode`](crate::checkpoint::decode)).
    #[must_use]
    pub const fn weight_format(self) -> Option<WeightFormat> {
        Some(match self {
            Self::Plain(DType::F32) => WeightFormat::F32,
            Self::Plain(DType::F16) => WeightFormat::F16,
            Self::Plain(_) => WeightFormat::Bf16,
            Self::Nvfp4CompressedTensors | Self::Nvfp4ModelOpt => WeightFormat::Nvfp4,
            Self::Fp8Tensor => WeightFormat::Fp8Tensor,
            Self::Fp8Row => WeightFormat::Fp8Row,
            Self::Fp8Block => WeightFormat::Fp8Block,
            Self::Groupwise(g) => WeightFormat::Group(g),
            Self::IntCompressedTensors | Self::Gptq | Self::Awq => return None,
        })
    }
}

impl fmt::Display for StoredKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Format and shape of a module, known before any of its data is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredModule {
    /// Format.
    pub kind: StoredKind,
    /// Out features.
    pub rows: usize,
    /// In features; of [`StoredKind::IntCompressedTensors`] and [`StoredKind::Groupwise`] an upper bound, since the number
    /// stands in the data of `weight_shape`. Groupwise integers have the next multiple of 128 here.
    pub cols: usize,
}

impl StoredModule {
    /// Bytes that the decoded matrix takes at most.
    #[must_use]
    pub fn max_bytes(&self) -> usize {
        self.kind.weight_format().unwrap_or(WeightFormat::F32).bytes(self.rows, self.cols)
    }
}

/// The tensors of one module, found by suffix.
#[derive(Clone, Copy, Debug)]
struct Header<'a> {
    module: &'a str,
    tensors: &'a [TensorInfo<'a>],
}

impl<'a> Header<'a> {
    fn name(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.module)
    }

    fn get(&self, suffix: &str) -> Option<&'a TensorInfo<'a>> {
        self.tensors.iter().find(|t| t.suffix == suffix)
    }

    fn need(&self, suffix: &str, reason: &'static str) -> Result<&'a TensorInfo<'a>> {
        self.get(suffix).ok_or_else(|| Error::MissingTensor { tensor: self.name(suffix), reason })
    }

    fn dtype(&self, t: &TensorInfo<'_>, allowed: &[DType], expected: &'static str) -> Result<()> {
        if allowed.contains(&t.dtype) {
            return Ok(());
        }
        Err(Error::TensorDType { tensor: self.name(t.suffix), expected, got: t.dtype })
    }

    fn bad_shape<T>(&self, t: &TensorInfo<'_>, expected: impl Into<String>) -> Result<T> {
        Err(Error::TensorShape { tensor: self.name(t.suffix), expected: expected.into(), got: t.shape.to_vec() })
    }

    fn matrix(&self, t: &TensorInfo<'_>) -> Result<(usize, usize)> {
        match *t.shape {
            // Eight F32 for each element, the most that decoding takes, must be countable.
            [r, c] if r > 0 && c > 0 && r.checked_mul(c).is_some_and(|n| n.checked_mul(32).is_some()) => Ok((r, c)),
            _ => self.bad_shape(t, "a matrix with at least one row and column"),
        }
    }

    fn shape(&self, t: &TensorInfo<'_>, expected: &[usize]) -> Result<()> {
        if t.shape == expected { Ok(()) } else { self.bad_shape(t, format!("{expected:?}")) }
    }

    /// A single F32 of shape `[]` or `[1]`.
    fn scalar(&self, t: &TensorInfo<'_>) -> Result<()> {
        self.dtype(t, &[DType::F32], "F32")?;
        if matches!(t.shape, [] | [1]) { Ok(()) } else { self.bad_shape(t, "[] or [1]") }
    }

    /// Refuses tensors that the format does not use; the scales of activations are skipped.
    fn only(&self, kind: StoredKind, used: &[&str]) -> Result<()> {
        let used = |s: &str| s == "bias" || used.contains(&s) || ACTIVATION_SUFFIXES.contains(&s);
        match self.tensors.iter().find(|t| !used(t.suffix)) {
            Some(t) => Err(Error::UnexpectedTensor { tensor: self.name(t.suffix), format: kind.name() }),
            None => Ok(()),
        }
    }
}

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

/// Decides the format of `module` from the names, element types and shapes of its tensors, and checks every shape.
///
/// Configuration files are not consulted: their lists of modules are often incomplete.
///
/// | tensors | format |
/// |---|---|
/// | `weight` BF16, F16 or F32 | plain |
/// | `weight_packed` U8, `weight_scale` F8_E4M3 `[out, in/16]`, `weight_global_scale` F32 | NVFP4, dividing |
/// | `weight` U8, `weight_scale` F8_E4M3 `[out, in/16]`, `weight_scale_2` F32 | NVFP4, multiplying |
/// | `weight` F8_E4M3, `weight_scale_inv` or `weight_scale` `[⌈out/128⌉, ⌈in/128⌉]` | FP8 blocks |
/// | `weight` F8_E4M3, `weight_scale` `[out, 1]` or `[out]`; `[]` or `[1]` | FP8 per row; per tensor |
/// | `weight_packed` I32, `weight_scale`, `weight_shape` | int4 or int8, compressed-tensors |
/// | `weight_codes` I8, `weight_scale` F16, `weight_shape` | groupwise integers, W8 |
/// | `weight_codes` U8, `weight_scale` F16, `weight_shape`, maybe `weight_codes_high` U8 | groupwise integers, Q4, Q5, Q6 |
/// | `qweight` I32 `[in/8, out]`, `qzeros`, `scales`, maybe `g_idx` | GPTQ |
/// | `qweight` I32 `[in, out/8]`, `qzeros`, `scales` | AWQ |
///
/// Activation scales ([`ACTIVATION_SUFFIXES`]) may stand beside any of them.
///
/// # Errors
/// [`Error::MissingTensor`], [`Error::UnexpectedTensor`], [`Error::DuplicateTensor`], [`Error::UnknownFormat`],
/// [`Error::TensorDType`], [`Error::TensorShape`], [`Error::TiledScales`], [`Error::Unsupported`], each with the tensor's
/// full name.
///
/// ```
/// use ninfer_core::DType;
/// use ninfer_quant::checkpoint::{StoredKind, TensorInfo, classify};
/// let tensors = [
///     TensorInfo { suffix: "weight", dtype: DType::F8E4M3, shape: &[200, 300] },
///     TensorInfo { suffix: "weight_scale_inv", dtype: DType::Bf16, shape: &[2, 3] },
/// ];
/// let m = classify("layers.0.mlp.up_proj", &tensors)?;
/// assert_eq!((m.kind, m.rows, m.cols), (StoredKind::Fp8Block, 200, 300));
/// # Ok::<(), ninfer_quant::Error>(())
/// ```
pub fn classify(module: &str, tensors: &[TensorInfo<'_>]) -> Result<StoredModule> {
    let h = Header { module, tensors };
    for (i, t) in tensors.iter().enumerate() {
        if tensors[..i].iter().any(|u| u.suffix == t.suffix) {
            return Err(Error::DuplicateTensor { tensor: h.name(t.suffix) });
        }
    }
    if let Some(q) = h.get("qweight") {
        return int4_words(&h, q);
    }
    if let Some(p) = h.get("weight_packed") {
        return match p.dtype {
            DType::U8 => nvfp4(&h, p, StoredKind::Nvfp4CompressedTensors, "weight_global_scale"),
            DType::I32 => int_compressed_tensors(&h, p),
            got => {
                let expected = "U8 (NVFP4) or I32 (int4, int8)";
                Err(Error::TensorDType { tensor: h.name(p.suffix), expected, got })
            }
        };
    }
    if let Some(codes) = h.get("weight_codes") {
        return groupwise(&h, codes);
    }
    let Some(w) = h.get("weight") else {
        let tensors: Vec<String> = tensors.iter().map(|t| format!("{} {} {:?}", t.suffix, t.dtype, t.shape)).collect();
        return Err(Error::UnknownFormat { module: module.to_owned(), tensors: tensors.join(", ") });
    };
    match w.dtype {
        DType::F32 | DType::F16 | DType::Bf16 => {
            let kind = StoredKind::Plain(w.dtype);
            let (rows, cols) = h.matrix(w)?;
            h.only(kind, &["weight"])?;
            Ok(StoredModule { kind, rows, cols })
        }
        DType::U8 => nvfp4(&h, w, StoredKind::Nvfp4ModelOpt, "weight_scale_2"),
        DType::F8E4M3 => fp8(&h, w),
        got => {
            let expected = "BF16, F16, F32, F8_E4M3 or U8 (NVFP4)";
            Err(Error::TensorDType { tensor: h.name("weight"), expected, got })
        }
    }
}

fn nvfp4(h: &Header<'_>, codes: &TensorInfo<'_>, kind: StoredKind, global: &'static str) -> Result<StoredModule> {
    let (rows, half) = h.matrix(codes)?;
    if half % (NVFP4_GROUP / 2) != 0 {
        return h.bad_shape(codes, "[out, in/2] with in a multiple of 16");
    }
    let scale = h.need("weight_scale", "NVFP4 has one E4M3 scale per 16 columns")?;
    h.dtype(scale, &[DType::F8E4M3], "F8_E4M3")?;
    let expected = [rows, half / (NVFP4_GROUP / 2)];
    if scale.shape.len() == 1 && expected != [1, 1] {
        let (expected, got) = (format!("{expected:?}"), scale.shape.to_vec());
        return Err(Error::TiledScales { tensor: h.name("weight_scale"), expected, got });
    }
    h.shape(scale, &expected)?;
    h.scalar(h.need(global, "NVFP4 has a second scale for the matrix")?)?;
    h.only(kind, &[codes.suffix, "weight_scale", global])?;
    Ok(StoredModule { kind, rows, cols: 2 * half })
}

fn fp8(h: &Header<'_>, w: &TensorInfo<'_>) -> Result<StoredModule> {
    let (rows, cols) = h.matrix(w)?;
    let grid = [rows.div_ceil(FP8_BLOCK), cols.div_ceil(FP8_BLOCK)];
    let inverse = h.get("weight_scale_inv");
    let scale = match inverse {
        Some(s) => s,
        None => h.need("weight_scale", "FP8 has one scale per matrix, row or block")?,
    };
    h.dtype(scale, &FLOATS, "F32, F16 or BF16")?;
    let kind = match *scale.shape {
        [r, c] if [r, c] == grid => StoredKind::Fp8Block,
        [] | [1] | [1, 1] => StoredKind::Fp8Tensor,
        [r] | [r, 1] if r == rows && inverse.is_none() => StoredKind::Fp8Row,
        _ => return h.bad_shape(scale, format!("[], [1], [{rows}, 1] or {grid:?}")),
    };
    h.only(kind, &["weight", scale.suffix])?;
    Ok(StoredModule { kind, rows, cols })
}

fn int_compressed_tensors(h: &Header<'_>, packed: &TensorInfo<'_>) -> Result<StoredModule> {
    let (rows, words) = h.matrix(packed)?;
    let shape = h.need("weight_shape", "packed words do not tell the number of columns")?;
    h.dtype(shape, &[DType::I64, DType::I32], "I64")?;
    h.shape(shape, &[2])?;
    let scale = h.need("weight_scale", "integer codes have one scale per group")?;
    h.dtype(scale, &FLOATS, "F32, F16 or BF16")?;
    let (scale_rows, groups) = h.matrix(scale)?;
    if scale_rows != rows || groups == 0 {
        return h.bad_shape(scale, format!("[{rows}, groups]"));
    }
    let kind = StoredKind::IntCompressedTensors;
    if let Some(z) = h.get("weight_zero_point") {
        h.dtype(z, &[DType::I32], "I32")?;
        let (zero_rows, zero_groups) = h.matrix(z)?;
        if zero_groups != groups || (zero_rows != rows.div_ceil(8) && zero_rows != rows.div_ceil(4)) {
            return h.bad_shape(z, format!("[{}, {groups}]", rows.div_ceil(8)));
        }
    }
    if let Some(g) = h.get("weight_g_idx") {
        h.dtype(g, &[DType::I32], "I32")?;
    }
    h.only(kind, &["weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"])?;
    Ok(StoredModule { kind, rows, cols: words * 8 })
}

fn groupwise(h: &Header<'_>, codes: &TensorInfo<'_>) -> Result<StoredModule> {
    let (rows, bytes) = h.matrix(codes)?;
    h.dtype(codes, &[DType::I8, DType::U8], "I8 (W8) or U8 (Q4, Q5, Q6)")?;
    let high = h.get("weight_codes_high");
    let scale = h.need("weight_scale", "integer codes have one scale per group")?;
    h.dtype(scale, &[DType::F16], "F16")?;
    let groups = bytes / 32;
    let format = match high {
        _ if codes.dtype == DType::I8 => GroupFormat::W8,
        None => GroupFormat::Q4,
        Some(high) => {
            h.dtype(high, &[DType::U8], "U8")?;
            match *high.shape {
                [r, b] if r == rows && Some(b) == groups.checked_mul(8) => GroupFormat::Q5,
                [r, b] if r == rows && Some(b) == groups.checked_mul(16) => GroupFormat::Q6,
                _ => {
                    let (q5, q6) = (groups.saturating_mul(8), groups.saturating_mul(16));
                    return h.bad_shape(high, format!("[{rows}, {q5}] (Q5) or [{rows}, {q6}] (Q6)"));
                }
            }
        }
    };
    // The bytes of 128 columns.
    let tile = GROUP_PAD / format.group_size() * 32;
    if bytes % tile != 0 {
        return h
            .bad_shape(codes, format!("[out, a multiple of {tile}]: columns are padded to a multiple of {GROUP_PAD}"));
    }
    h.shape(scale, &[rows, groups])?;
    let shape = h.need("weight_shape", "padded codes do not tell the number of columns")?;
    h.dtype(shape, &[DType::I64], "I64")?;
    h.shape(shape, &[2])?;
    let kind = StoredKind::Groupwise(format);
    let used = ["weight_codes", "weight_codes_high", "weight_scale", "weight_shape"];
    h.only(kind, if format == GroupFormat::W8 { &["weight_codes", "weight_scale", "weight_shape"] } else { &used })?;
    Ok(StoredModule { kind, rows, cols: bytes / tile * GROUP_PAD })
}

fn int4_words(h: &Header<'_>, q: &TensorInfo<'_>) -> Result<StoredModule> {
    h.dtype(q, &[DType::I32], "I32")?;
    let (a, b) = h.matrix(q)?;
    let scales = h.need("scales", "GPTQ and AWQ have one scale per group and output")?;
    h.dtype(scales, &FLOATS, "F16, BF16 or F32")?;
    let (groups, out) = h.matrix(scales)?;
    let zeros = h.need("qzeros", "GPTQ and AWQ have one zero point per group and output")?;
    h.dtype(zeros, &[DType::I32], "I32")?;
    let index = h.get("g_idx");
    let (kind, cols) = match index.is_some() || out == b {
        true if out == b => (StoredKind::Gptq, 8 * a),
        false if Some(out) == b.checked_mul(8) => (StoredKind::Awq, a),
        _ => return h.bad_shape(q, format!("[in/8, {out}] (GPTQ) or [in, {out}/8] (AWQ)")),
    };
    if let Some(g) = index {
        h.dtype(g, &[DType::I32], "I32")?;
        if let [n] = *g.shape
            && n == 4 * a
        {
            return Err(Error::Unsupported { module: h.module.to_owned(), what: "GPTQ with 8-bit codes".to_owned() });
        }
        h.shape(g, &[cols])?;
    }
    if groups == 0 || (index.is_none() && cols % groups != 0) {
        return h.bad_shape(scales, format!("[groups, out] with groups dividing {cols}"));
    }
    if out % 8 != 0 {
        return h.bad_shape(scales, "[groups, out] with out a multiple of 8");
    }
    h.shape(zeros, &[groups, out / 8])?;
    h.only(kind, &["qweight", "qzeros", "scales", "g_idx"])?;
    Ok(StoredModule { kind, rows: out, cols })
}
