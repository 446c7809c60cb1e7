//! The roofline: bytes a token must move, and the speed that a memory bandwidth allows.
//!
//! ```
//! use ninfer_core::memory::KvFormat;
//! use ninfer_core::{WeightFormat, known, roofline, shape};
//!
//! let shape = shape::published("27b")?;
//! let bytes = roofline::bytes_per_token(&shape, |_| WeightFormat::Nvfp4, 4096, KvFormat::Bf16)?;
//! let gb10 = known::profile("gb10")?;
//! println!("{bytes}, at most {:.1} tok/s", roofline::ceiling(bytes.total(), gb10.bandwidth.value));
//! # Ok::<(), ninfer_core::Error>(())
//! ```

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::memory::{KvFormat, checked_product, checked_sum, tensor_bytes};
use crate::shape::{FfnShape, ModelShape, Part, Role, TensorShape};
use crate::{Error, Result, WeightFormat};

/// Bytes that must move between memory and device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BytesMoved {
    /// Weights, each read once.
    pub weights: u64,
    /// KV cache read, and the new rows written.
    pub kv: u64,
    /// Recurrent matrices, read and written.
    pub state: u64,
}

impl BytesMoved {
    /// All of it.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.weights.saturating_add(self.kv).saturating_add(self.state)
    }
}

/// In GB (10⁹): `2.62 GB (weights 2.41, KV 0.08, state 0.13)`.
impl fmt::Display for BytesMoved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gb = |bytes: u64| bytes as f64 / 1e9;
        let (weights, kv, state) = (gb(self.weights), gb(self.kv), gb(self.state));
        write!(f, "{:.2} GB (weights {weights:.2}, KV {kv:.2}, state {state:.2})", gb(self.total()))
    }
}

/// Bytes of one plain decode step of one sequence at `context` tokens.
///
/// - weights: each matrix a token reads ([`TensorShape::read`]) in the format that `format` says, one row of an untied
///   embedding, and the f32 tensors; not the MTP block;
/// - KV: `(context + 1) · ` [`KvFormat::bytes_per_token`] (the rows read and the one written);
/// - state: `2 · ` [`ModelShape::gdn_state_bytes`].
///
/// Activations, convolution windows and logits are left out: they stay in caches.
///
/// # Errors
/// [`Error::OutOfRange`] for a shape that is not legal or a sum beyond 64 bits.
pub fn bytes_per_token(
    shape: &ModelShape,
    format: impl Fn(&TensorShape) -> WeightFormat,
    context: usize,
    kv: KvFormat,
) -> Result<BytesMoved> {
    shape.validate()?;
    let mut weights = 0;
    for t in shape.tensors().filter(|t| t.part != Part::Mtp) {
        weights = checked_sum([weights, read_bytes(&t, &format, t.read as u64)?])?;
    }
    Ok(BytesMoved {
        weights,
        kv: checked_product([context as u64, kv.bytes_per_token(shape)])?.saturating_add(kv.bytes_per_token(shape)),
        state: checked_product([2, shape.gdn_state_bytes()])?,
    })
}

/// What [`bytes_per_round`] is asked about.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct RoundOptions {
    /// Tokens in the cache when the round begins.
    pub context: usize,
    /// Drafts k: the verification has k + 1 columns, the MTP block runs k times.
    pub drafts: usize,
    /// Distinct routed experts that the columns of a verification touch in a layer, on average; a dense model ignores it.
    /// Between `top_k` (all columns agree) and the smaller of `(k + 1) · top_k` and the number of experts.
    pub distinct_experts: f64,
    /// Storage of the KV cache.
    pub kv: KvFormat,
}

impl RoundOptions {
    /// A round of `drafts` drafts at `context` tokens with a BF16 cache, and as many distinct experts as uniform
    /// independent routing gives ([`expected_distinct_experts`]).
    #[must_use]
    pub fn new(shape: &ModelShape, context: usize, drafts: usize) -> Self {
        let distinct_experts = expected_distinct_experts(shape, drafts.saturating_add(1));
        Self { context, drafts, distinct_experts, kv: KvFormat::Bf16 }
    }

    /// Sets the distinct experts that were counted.
    #[must_use]
    pub const fn with_distinct_experts(mut self, mean: f64) -> Self {
        self.distinct_experts = mean;
        self
    }

    /// Sets the storage of the KV cache.
    #[must_use]
    pub const fn with_kv(mut self, kv: KvFormat) -> Self {
        self.kv = kv;
        self
    }
}

/// Distinct experts that `columns` tokens touch in a layer under uniform independent routing:
/// `E · (1 − (1 − top_k/E)^columns)`; 0 for a dense model.
#[must_use]
pub fn expected_distinct_experts(shape: &ModelShape, columns: usize) -> f64 {
    match shape.ffn {
        FfnShape::Moe { experts, top_k, .. } if experts > 0 => {
            let e = experts as f64;
            e * (1.0 - (1.0 - top_k as f64 / e).powf(columns as f64))
        }
        _ => 0.0,
    }
}

/// Bytes of one MTP round: one verification of k + 1 columns with the distinct experts they touch, and k draft steps, each
/// with the MTP block, the head and the MTP cache.
///
/// # Errors
/// [`Error::OutOfRange`] as [`bytes_per_token`], or for a number of distinct experts below 0 or above those there are;
/// [`Error::MtpUnavailable`] where the model has no MTP block and `drafts > 0`.
pub fn bytes_per_round(
    shape: &ModelShape,
    format: impl Fn(&TensorShape) -> WeightFormat,
    options: &RoundOptions,
) -> Result<BytesMoved> {
    shape.validate()?;
    if options.drafts > 0 && !shape.mtp {
        return Err(Error::MtpUnavailable { reason: "the model has no MTP block".to_owned() });
    }
    let experts = match shape.ffn {
        FfnShape::Moe { experts, .. } => experts as f64,
        FfnShape::Dense { .. } => f64::INFINITY,
    };
    if !(0.0..=experts).contains(&options.distinct_experts) {
        return Err(Error::OutOfRange {
            what: "distinct experts",
            got: options.distinct_experts.to_string(),
            legal: format!("0 to {experts}"),
        });
    }
    let (drafts, context) = (options.drafts as u64, options.context as u64);
    let columns = drafts.saturating_add(1);
    let mut weights = 0u64;
    for t in shape.tensors() {
        let once = read_bytes(&t, &format, t.read as u64)?;
        let bytes = match t.part {
            Part::Mtp => checked_product([once, drafts])?,
            // The head once for the verification and once a draft; of an untied embedding as many rows.
            Part::Embedding | Part::Head => checked_product([once, columns])?,
            _ if matches!(t.role, Role::ExpertGate | Role::ExpertUp | Role::ExpertDown) => {
                (tensor_bytes(&t, &format) as f64 * options.distinct_experts) as u64
            }
            _ => once,
        };
        weights = checked_sum([weights, bytes])?;
    }
    let per_token = options.kv.bytes_per_token(shape);
    let mtp = options.kv.mtp_bytes_per_token(shape);
    Ok(BytesMoved {
        weights,
        kv: checked_sum([
            checked_product([checked_sum([context, columns])?, per_token])?,
            checked_product([drafts, checked_sum([context, drafts])?, mtp])?,
        ])?,
        state: checked_product([2, shape.gdn_state_bytes()])?,
    })
}

/// Bytes of `read` of the tensors, or of one row of an embedding that is not read in full.
fn read_bytes(t: &TensorShape, format: &impl Fn(&TensorShape) -> WeightFormat, read: u64) -> Result<u64> {
    if t.role == Role::Embedding && read == 0 {
        return Ok(format(t).bytes(1, t.cols) as u64);
    }
    checked_product([tensor_bytes(t, format), read])
}

/// Steps a second that a bandwidth allows: `bytes_per_second / bytes`.
///
/// ```
/// use ninfer_core::roofline;
/// // The estimate published for 27B in NVFP4 on a GB10: 19.7 GB at 273 GB/s, 72 ms, 13.9 tok/s.
/// assert_eq!(format!("{:.1}", roofline::ceiling(19_700_000_000, 273e9)), "13.9");
/// ```
#[must_use]
pub fn ceiling(bytes: u64, bytes_per_second: f64) -> f64 {
    bytes_per_second / bytes as f64
}

/// Share of a bandwidth that a measured step reached: `bytes / seconds / bytes_per_second`.
#[must_use]
pub fn share(bytes: u64, seconds: f64, bytes_per_second: f64) -> f64 {
    bytes as f64 / seconds / bytes_per_second
}
