//! What a backend, an operation or a model can report.

use crate::DType;

/// Result of this crate and of the traits in it.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error with the facts needed to act on it; [`Error::help`] says what to do.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A shape, length or count does not fit.
    #[error("{op}: {what} is {got}, expected {expected}")]
    Shape {
        /// Operation or constructor that refused.
        op: &'static str,
        /// Which argument or dimension.
        what: &'static str,
        /// What it had to be.
        expected: String,
        /// What it was.
        got: String,
    },
    /// A buffer has another element type than the operation needs.
    #[error("{op}: {what} has dtype {got}, expected {expected}")]
    WrongDType {
        /// Operation that refused.
        op: &'static str,
        /// Which argument.
        what: &'static str,
        /// Needed element type.
        expected: DType,
        /// Given element type.
        got: DType,
    },
    /// A value is outside its legal range.
    #[error("{what} is {got}, legal range is {legal}")]
    OutOfRange {
        /// Which value.
        what: &'static str,
        /// The value.
        got: String,
        /// The legal range in words.
        legal: String,
    },
    /// Output and input of one operation overlap in memory.
    #[error("{op}: {what} overlaps another buffer of the same operation")]
    Aliased {
        /// Operation that refused.
        op: &'static str,
        /// Which argument.
        what: &'static str,
    },
    /// A buffer is in use by another queue at this moment.
    #[error("buffer is in use by another queue")]
    BufferBusy,
    /// Something that is not allowed while a step is recorded.
    #[error("{what} is not allowed while a step is recorded")]
    Recording {
        /// What was tried.
        what: &'static str,
    },
    /// Not enough memory.
    #[error("{what} needs {requested} bytes, {available} are available")]
    OutOfMemory {
        /// What was to be allocated.
        what: String,
        /// Bytes asked for.
        requested: u64,
        /// Bytes available.
        available: u64,
    },
    /// No NVIDIA driver library was found.
    #[error("no NVIDIA driver: {reason}")]
    NoDriver {
        /// What the search for the library said.
        reason: String,
    },
    /// The installed driver cannot load a module.
    #[error("driver supports CUDA {have}, {what} needs CUDA {need}")]
    DriverTooOld {
        /// The module.
        what: String,
        /// CUDA version the driver supports.
        have: String,
        /// CUDA version needed.
        need: String,
    },
    /// The device or backend lacks something.
    #[error("{op} is not supported: needs {need}, have {have}")]
    Unsupported {
        /// Operation or feature.
        op: String,
        /// What it needs.
        need: String,
        /// What is there.
        have: String,
    },
    /// A driver call failed.
    #[error("driver call {call} failed with code {code}: {message}")]
    Driver {
        /// Function that failed.
        call: &'static str,
        /// Numeric result.
        code: i32,
        /// The driver's own words.
        message: String,
    },
    /// A value that must be finite is not.
    #[error("{what} at position {position} is not finite")]
    NonFinite {
        /// What was computed.
        what: &'static str,
        /// Token position.
        position: usize,
    },
    /// The context window or the reserved cache is exhausted.
    #[error("{requested} tokens of context requested, limit is {limit}")]
    ContextOverflow {
        /// Positions needed.
        requested: usize,
        /// Positions available.
        limit: usize,
    },
    /// No free sequence slot or KV page.
    #[error("no free {what}: all {capacity} are in use")]
    Exhausted {
        /// Which resource.
        what: &'static str,
        /// How many exist.
        capacity: usize,
    },
    /// Speculation by MTP was asked of a model without an MTP block, or of a lane whose MTP cache is gone.
    #[error("MTP drafting is not available: {reason}")]
    MtpUnavailable {
        /// Why.
        reason: String,
    },
    /// Stored state is damaged or belongs to another model.
    #[error("state is not usable: {reason}")]
    Corrupt {
        /// What was found.
        reason: String,
    },
}

impl Error {
    /// One line on what to do about it.
    #[must_use]
    pub fn help(&self) -> &'static str {
        match self {
            Self::Shape { .. } | Self::WrongDType { .. } | Self::Aliased { .. } => {
                "fix the arguments of the call; the operation's documentation lists shapes and dtypes"
            }
            Self::OutOfRange { .. } => "choose a value inside the legal range",
            Self::BufferBusy => "let one thread own the session; give each thread a session of its own",
            Self::Recording { .. } => "do it before the recording starts",
            Self::OutOfMemory { .. } => {
                "lower the context, the number of sequences or the prefill chunk, or choose a smaller weight recipe"
            }
            Self::NoDriver { .. } => "install an NVIDIA driver, or run on the CPU",
            Self::DriverTooOld { .. } => "update the NVIDIA driver, or run on the CPU",
            Self::Unsupported { .. } => "choose another device, format or option",
            Self::Driver { .. } => "look the code up in the driver's documentation; the device may need a restart",
            Self::NonFinite { .. } => "check the checkpoint for damaged weights; `inspect` lists the tensors",
            Self::ContextOverflow { .. } => "shorten the prompt or raise the maximum context",
            Self::Exhausted { .. } => "finish a sequence first, or open the session with a larger capacity",
            Self::MtpUnavailable { .. } => {
                "switch speculation off, use n-gram drafts, or use a checkpoint with an MTP block"
            }
            Self::Corrupt { .. } => "discard the state and prefill again",
        }
    }
}

/// Fails with [`Error::Shape`] unless `got == expected`.
pub(crate) fn expect_eq(op: &'static str, what: &'static str, expected: usize, got: usize) -> Result<()> {
    if expected == got {
        return Ok(());
    }
    Err(Error::Shape { op, what, expected: expected.to_string(), got: got.to_string() })
}
