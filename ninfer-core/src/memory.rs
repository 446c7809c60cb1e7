//! The memory plan: what a model with its caches will occupy, computed before anything is loaded.
//!
//! ```
//! use ninfer_core::memory::{KvFormat, PlanOptions, plan};
//! use ninfer_core::{WeightFormat, shape};
//!
//! let shape = shape::published("27b")?;
//! let options = PlanOptions::new(32_768).with_kv(KvFormat::Int8G64);
//! let plan = plan(&shape, |_| WeightFormat::Fp8Row, &options)?;
//! assert_eq!(plan.recurrent, 150_994_944);
//! assert_eq!(plan.records, 0); // speculation is off
//! println!("{plan}");
//! # Ok::<(), ninfer_core::Error>(())
//! ```

mod kv;
mod workspace;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use self::kv::{KV_GROUP, KvFormat};
use self::workspace::workspace_bytes;
use crate::shape::{KV_PAGE, ModelShape, Part, TensorShape};
use crate::{DType, Error, Result, WeightFormat};

/// Largest context a plan accepts, in tokens.
pub const MAX_CONTEXT: usize = 1 << 30;
/// Largest number of sequences, draft tokens or prefill tokens a plan accepts.
pub const MAX_LANES: usize = 1 << 20;

/// What a plan is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanOptions {
    /// Tokens a sequence may reach.
    pub max_context: usize,
    /// Sequences held at once.
    pub lanes: usize,
    /// Draft tokens a round may verify; 0 is speculation off.
    pub draft_window: usize,
    /// Whether the MTP block is loaded and has a cache. `None`: where the model has one and `draft_window > 0`.
    pub mtp: Option<bool>,
    /// How the KV cache is stored.
    pub kv: KvFormat,
    /// F32, F16 or BF16: type of activations, convolution windows and records.
    pub activation: DType,
    /// Tokens prefilled at once.
    pub prefill_chunk: usize,
    /// Bytes to keep free for what is only known at run time: recorded steps, prefix snapshots, other programs.
    pub reserve: u64,
}

impl PlanOptions {
    /// One sequence of `max_context` tokens, no speculation, BF16 KV cache and activations, prefill chunks of 1,024.
    #[must_use]
    pub const fn new(max_context: usize) -> Self {
        Self {
            max_context,
            lanes: 1,
            draft_window: 0,
            mtp: None,
            kv: KvFormat::Bf16,
            activation: DType::Bf16,
            prefill_chunk: 1024,
            reserve: 0,
        }
    }

    /// Sets the tokens a sequence may reach.
    #[must_use]
    pub const fn with_max_context(mut self, tokens: usize) -> Self {
        self.max_context = tokens;
        self
    }

    /// Sets the number of sequences.
    #[must_use]
    pub const fn with_lanes(mut self, lanes: usize) -> Self {
        self.lanes = lanes;
        self
    }

    /// Sets the draft window; 0 switches speculation off.
    #[must_use]
    pub const fn with_draft_window(mut self, tokens: usize) -> Self {
        self.draft_window = tokens;
        self
    }

    /// Says whether the MTP block is loaded, whatever the draft window (n-gram drafts need no MTP block).
    #[must_use]
    pub const fn with_mtp(mut self, loaded: bool) -> Self {
        self.mtp = Some(loaded);
        self
    }

    /// Sets the storage of the KV cache.
    #[must_use]
    pub const fn with_kv(mut self, kv: KvFormat) -> Self {
        self.kv = kv;
        self
    }

    /// Sets the activation type.
    #[must_use]
    pub const fn with_activation(mut self, dtype: DType) -> Self {
        self.activation = dtype;
        self
    }

    /// Sets the prefill chunk.
    #[must_use]
    pub const fn with_prefill_chunk(mut self, tokens: usize) -> Self {
        self.prefill_chunk = tokens;
        self
    }

    /// Sets the bytes to keep free.
    #[must_use]
    pub const fn with_reserve(mut self, bytes: u64) -> Self {
        self.reserve = bytes;
        self
    }

    /// Positions of one sequence in the KV cache: context and drafts, rounded up to whole pages of 64.
    #[must_use]
    pub const fn kv_positions(&self) -> usize {
        let n = self.max_context.saturating_add(self.draft_window);
        n.div_ceil(KV_PAGE).saturating_mul(KV_PAGE)
    }

    fn validate(&self) -> Result<()> {
        for (what, value, least, most) in [
            ("maximum context", self.max_context, 1, MAX_CONTEXT),
            ("number of sequences", self.lanes, 1, MAX_LANES),
            ("draft window", self.draft_window, 0, MAX_LANES),
            ("prefill chunk", self.prefill_chunk, 1, MAX_LANES),
        ] {
            if value < least || value > most {
                let legal = format!("{least} to {most}");
                return Err(Error::OutOfRange { what, got: value.to_string(), legal });
            }
        }
        if !matches!(self.activation, DType::F32 | DType::F16 | DType::Bf16) {
            return Err(Error::OutOfRange {
                what: "activation dtype",
                got: self.activation.to_string(),
                legal: "F32, F16, BF16".to_owned(),
            });
        }
        Ok(())
    }
}

/// Bytes by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MemoryPlan {
    /// Embedding, layers, norms and head in their formats.
    pub weights: u64,
    /// The MTP block.
    pub mtp_weights: u64,
    /// KV pages of the full-attention layers.
    pub kv: u64,
    /// KV pages of the MTP layer.
    pub mtp_kv: u64,
    /// Recurrent matrices, f32.
    pub recurrent: u64,
    /// Convolution windows.
    pub conv: u64,
    /// Rollback records: draft window + 1 tokens a sequence, nothing when speculation is off.
    pub records: u64,
    /// Activations of the largest call, logits, partial attention results, page tables.
    pub workspace: u64,
    /// What the options asked to keep free.
    pub reserve: u64,
    /// Sum of the above.
    pub total: u64,
}

impl MemoryPlan {
    /// Whether the plan fits `usable` bytes.
    #[must_use]
    pub const fn fits(&self, usable: u64) -> bool {
        self.total <= usable
    }

    /// Fails where the plan does not fit.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with both numbers.
    pub fn check(&self, usable: u64) -> Result<()> {
        if self.fits(usable) {
            return Ok(());
        }
        Err(Error::OutOfMemory { what: "the memory plan".to_owned(), requested: self.total, available: usable })
    }

    /// Name and bytes of each part, in the order of the table, without the total.
    #[must_use]
    pub fn rows(&self) -> [(&'static str, u64); 9] {
        [
            ("weights", self.weights),
            ("MTP weights", self.mtp_weights),
            ("KV cache", self.kv),
            ("MTP KV cache", self.mtp_kv),
            ("recurrent state", self.recurrent),
            ("convolution windows", self.conv),
            ("rollback records", self.records),
            ("workspace", self.workspace),
            ("kept free", self.reserve),
        ]
    }
}

/// An aligned table, one line a part, the total last.
impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, bytes) in self.rows() {
            writeln!(f, "{name:<20} {:>11} {:>20} B", binary_size(bytes), bytes)?;
        }
        write!(f, "{:<20} {:>11} {:>20} B", "total", binary_size(self.total), self.total)
    }
}

/// A byte count in the largest binary unit that leaves at least 1, such as `1.50 GiB`.
#[must_use]
pub fn binary_size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = UNITS[0];
    for next in &UNITS[1..] {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    format!("{value:.2} {unit}")
}

/// Plans the memory of a model.
///
/// `format` says how each matrix is stored; it is not asked about tensors that are always f32 ([`Role::is_matrix`]).
///
/// - weights: the sum over [`ModelShape::tensors`], scales included;
/// - KV: lanes · [`PlanOptions::kv_positions`] · [`KvFormat::bytes_per_token`];
/// - recurrent and convolution state: lanes · one image ([`ModelShape::gdn_state_bytes`],
///   [`ModelShape::conv_state_bytes`]);
/// - records: lanes · (draft window + 1) · [`ModelShape::record_bytes_per_token`], or 0.
///
/// [`Role::is_matrix`]: crate::shape::Role::is_matrix
///
/// # Errors
/// [`Error::OutOfRange`] for a shape or an option that is not legal, or where the sum does not fit in 64 bits.
pub fn plan(
    shape: &ModelShape,
    format: impl Fn(&TensorShape) -> WeightFormat,
    options: &PlanOptions,
) -> Result<MemoryPlan> {
    shape.validate()?;
    options.validate()?;
    let mtp = shape.mtp && options.mtp.unwrap_or(options.draft_window > 0);
    let activation = options.activation.size();
    let lanes = options.lanes as u64;
    let positions = checked_product([lanes, options.kv_positions() as u64])?;

    let (mut weights, mut mtp_weights) = (0, 0);
    for t in shape.tensors() {
        let bytes = checked_product([tensor_bytes(&t, &format), t.count as u64])?;
        let slot = if t.part == Part::Mtp { &mut mtp_weights } else { &mut weights };
        *slot = checked_sum([*slot, bytes])?;
    }
    let record_tokens = if options.draft_window == 0 { 0 } else { options.draft_window as u64 + 1 };
    let mut plan = MemoryPlan {
        weights,
        mtp_weights: if mtp { mtp_weights } else { 0 },
        kv: checked_product([positions, options.kv.bytes_per_token(shape)])?,
        mtp_kv: if mtp { checked_product([positions, options.kv.mtp_bytes_per_token(shape)])? } else { 0 },
        recurrent: checked_product([lanes, shape.gdn_state_bytes()])?,
        conv: checked_product([lanes, shape.conv_state_bytes(activation)])?,
        records: checked_product([lanes, record_tokens, shape.record_bytes_per_token(activation)])?,
        workspace: workspace_bytes(shape, options, mtp)?,
        reserve: options.reserve,
        total: 0,
    };
    plan.total = checked_sum(plan.rows().map(|(_, bytes)| bytes))?;
    Ok(plan)
}

/// The longest context that fits `usable` bytes with otherwise the same options, in whole pages of 64 tokens, at most
/// [`PlanOptions::max_context`].
///
/// ```
/// use ninfer_core::memory::{PlanOptions, largest_context};
/// use ninfer_core::{WeightFormat, known, shape};
/// let card = known::profile("rtx4090")?.device_info();
/// let shape = shape::published("27b")?;
/// let most = PlanOptions::new(262_144);
/// let context = largest_context(&shape, |_| WeightFormat::Nvfp4, &most, card.usable_memory.unwrap_or(0))?;
/// assert!(context >= 65_536 && context < 262_144);
/// # Ok::<(), ninfer_core::Error>(())
/// ```
///
/// # Errors
/// As [`plan`]; [`Error::OutOfMemory`] where not even one page fits.
pub fn largest_context(
    shape: &ModelShape,
    format: impl Fn(&TensorShape) -> WeightFormat,
    options: &PlanOptions,
    usable: u64,
) -> Result<usize> {
    options.validate()?;
    let plan_for = |tokens: usize| plan(shape, &format, &options.with_max_context(tokens));
    if plan_for(options.max_context).is_ok_and(|p| p.fits(usable)) {
        return Ok(options.max_context);
    }
    let least = options.max_context.min(KV_PAGE);
    plan_for(least)?.check(usable)?;
    // `fits` pages fit, `over` pages do not: memory grows with the context.
    let (mut fits, mut over) = (1, options.max_context.div_ceil(KV_PAGE));
    while over - fits > 1 {
        let middle = fits + (over - fits) / 2;
        match plan_for(middle * KV_PAGE) {
            Ok(p) if p.fits(usable) => fits = middle,
            _ => over = middle,
        }
    }
    Ok((fits * KV_PAGE).min(options.max_context))
}

/// Bytes of one of the tensors of `t`, in the given format if it is a matrix, else in f32.
pub(crate) fn tensor_bytes(t: &TensorShape, format: &impl Fn(&TensorShape) -> WeightFormat) -> u64 {
    let format = if t.role.is_matrix() { format(t) } else { WeightFormat::F32 };
    format.bytes(t.rows, t.cols) as u64
}

fn too_large() -> Error {
    Error::OutOfRange {
        what: "memory plan",
        got: "more than 2^64 bytes".to_owned(),
        legal: "byte counts below 2^64".to_owned(),
    }
}

pub(crate) fn checked_product<const N: usize>(factors: [u64; N]) -> Result<u64> {
    if factors.contains(&0) {
        return Ok(0);
    }
    factors.iter().try_fold(1u64, |acc, &f| acc.checked_mul(f)).ok_or_else(too_large)
}

pub(crate) fn checked_sum<const N: usize>(terms: [u64; N]) -> Result<u64> {
    terms.iter().try_fold(0u64, |acc, &t| acc.checked_add(t)).ok_or_else(too_large)
}
