//! What can be wrong with weights, formats and stored tensors.

use ninfer_core::{DType, WeightFormat};

use crate::checkpoint::StoredKind;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error with the facts needed to act on it; [`Error::help`] says what to do.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A length or shape was refused by the packed-matrix check.
    #[error(transparent)]
    Core(#[from] ninfer_core::Error),
    /// A buffer has another length than the shape asks for.
    #[error("{what} has {got} elements, expected {expected}")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// Elements the shape needs.
        expected: usize,
        /// Elements given.
        got: usize,
    },
    /// A weight to be stored is NaN or infinite.
    #[error("weight [{row}, {col}] is {value}, which {format} cannot hold")]
    NonFinite {
        /// Target format.
        format: WeightFormat,
        /// Row of the first such weight.
        row: usize,
        /// Column of the first such weight.
        col: usize,
        /// The value.
        value: f32,
    },
    /// Weights are too large for the scales of a format.
    #[error("weights near [{row}, {col}] reach {amax}: too large for the scales of {format}")]
    Overflow {
        /// Target format.
        format: WeightFormat,
        /// First row of the group.
        row: usize,
        /// First column of the group.
        col: usize,
        /// Largest magnitude in the group.
        amax: f32,
    },
    /// A format cannot hold this number of columns.
    #[error("{format} needs a multiple of {multiple} columns, the matrix has {cols}")]
    Columns {
        /// Target format.
        format: WeightFormat,
        /// What the columns must be divisible by.
        multiple: usize,
        /// Columns of the matrix.
        cols: usize,
    },
    /// A scale of a packed matrix is NaN, infinite, negative, or zero where it must not be.
    #[error("{what} {index} is {value}: scales are finite and positive")]
    Scale {
        /// Which kind of scale.
        what: &'static str,
        /// Index into the scales, row-major.
        index: usize,
        /// The value.
        value: f32,
    },
    /// A code that its format does not allow.
    #[error("code {index} of the {format} matrix is {code:#04x}, which is not a weight")]
    Code {
        /// Format of the matrix.
        format: WeightFormat,
        /// Index into the codes, row-major.
        index: usize,
        /// The byte.
        code: u8,
    },
    /// Rows that do not exist, or that cut a block of scales in two.
    #[error("rows {start}..{end} of a {format} matrix of {rows} rows: {reason}")]
    Rows {
        /// Format of the matrix.
        format: WeightFormat,
        /// First row.
        start: usize,
        /// One past the last row.
        end: usize,
        /// Rows of the matrix.
        rows: usize,
        /// What is wrong with them.
        reason: &'static str,
    },
    /// An expert that does not exist, or whose gate and up cannot be told apart.
    #[error("expert {expert} of {experts} experts with {rows} rows each: there is no such expert, or no two halves")]
    Expert {
        /// Expert asked for.
        expert: usize,
        /// Experts in the tensor.
        experts: usize,
        /// Rows of each.
        rows: usize,
    },
    /// Matrices that cannot be joined without changing a value.
    #[error("matrix {index} cannot be joined to the first: {what} is {got}, expected {expected}")]
    Unequal {
        /// Index of the matrix in the list.
        index: usize,
        /// What differs.
        what: &'static str,
        /// What the first matrix has.
        expected: String,
        /// What this one has.
        got: String,
    },
    /// A conversion that is not defined for a format.
    #[error("{conversion} is not defined for a matrix stored as {stored}")]
    Conversion {
        /// The conversion.
        conversion: &'static str,
        /// Stored format.
        stored: WeightFormat,
    },
    /// A kind of stored module that is read and never written.
    #[error("modules are not written as {kind}")]
    NotWritten {
        /// The kind.
        kind: StoredKind,
    },
    /// A recipe name that does not exist.
    #[error("unknown weight recipe {got:?}, known are {known}")]
    UnknownRecipe {
        /// The name given.
        got: String,
        /// All names.
        known: String,
    },
    /// A file of recipe rules that cannot be read.
    #[error("recipe file {file}: {reason}")]
    RecipeFile {
        /// The file.
        file: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A file of recipe rules that does not follow its form.
    #[error("recipe {file}, line {line}: {reason}")]
    RecipeSyntax {
        /// The file.
        file: String,
        /// Number of the line, from 1.
        line: usize,
        /// What is wrong there.
        reason: String,
    },
    /// A value in a file of recipe rules that is none of the legal ones.
    #[error("recipe {file}, line {line}: {what} {got:?}, known are {known}")]
    RecipeValue {
        /// The file.
        file: String,
        /// Number of the line, from 1.
        line: usize,
        /// What the value is for.
        what: &'static str,
        /// The value.
        got: String,
        /// All legal ones.
        known: String,
    },
    /// A tensor that the format needs is absent.
    #[error("tensor {tensor} is missing: {reason}")]
    MissingTensor {
        /// Full name.
        tensor: String,
        /// Why it is needed.
        reason: &'static str,
    },
    /// A tensor that no format of the module accounts for.
    #[error("tensor {tensor} does not belong to a {format} module")]
    UnexpectedTensor {
        /// Full name.
        tensor: String,
        /// Format of the module.
        format: &'static str,
    },
    /// A tensor is listed twice for one module.
    #[error("tensor {tensor} is listed twice")]
    DuplicateTensor {
        /// Full name.
        tensor: String,
    },
    /// The tensors of a module fit no known format.
    #[error("module {module} has tensors of no known format: {tensors}")]
    UnknownFormat {
        /// Module name.
        module: String,
        /// Suffixes, dtypes and shapes found.
        tensors: String,
    },
    /// A stored tensor has the wrong element type.
    #[error("tensor {tensor} is {got}, expected {expected}")]
    TensorDType {
        /// Full name.
        tensor: String,
        /// Accepted element types.
        expected: &'static str,
        /// Element type found.
        got: DType,
    },
    /// A stored tensor has the wrong shape.
    #[error("tensor {tensor} has shape {got:?}, expected {expected}")]
    TensorShape {
        /// Full name.
        tensor: String,
        /// Accepted shapes.
        expected: String,
        /// Shape found.
        got: Vec<usize>,
    },
    /// A stored tensor has another number of bytes than its shape asks for.
    #[error("tensor {tensor} has {got} bytes, its shape needs {expected}")]
    TensorBytes {
        /// Full name.
        tensor: String,
        /// Bytes that dtype and shape need.
        expected: usize,
        /// Bytes given.
        got: usize,
    },
    /// Block scales in one dimension: probably in the tile order of a matrix unit.
    #[error(
        "tensor {tensor} has shape {got:?}: one-dimensional block scales may be in tile order, expected {expected}"
    )]
    TiledScales {
        /// Full name.
        tensor: String,
        /// The row-major shape.
        expected: String,
        /// Shape found.
        got: Vec<usize>,
    },
    /// A stored element that must be a finite number, a legal scale or a legal index is not.
    #[error("element {index} of tensor {tensor} is {got}: {reason}")]
    TensorValue {
        /// Full name.
        tensor: String,
        /// Flat index, row-major.
        index: usize,
        /// The value.
        got: String,
        /// What it must be.
        reason: &'static str,
    },
    /// A scale that makes weights absurdly large: the reciprocal was stored.
    #[error(
        "tensor {tensor} holds {value}, a multiplier of {multiplier}: this is the reciprocal of a scale of its format"
    )]
    SwappedScale {
        /// Full name.
        tensor: String,
        /// The stored value.
        value: f32,
        /// The factor it would multiply codes with.
        multiplier: f32,
    },
    /// A matrix of a shape that a format of `.ninfer` containers does not have.
    #[error("{format} has no matrix of {rows} × {cols}")]
    ContainerShape {
        /// Name of the format in the container.
        format: &'static str,
        /// Out features.
        rows: usize,
        /// In features.
        cols: usize,
    },
    /// A format that is recognised but not read.
    #[error("module {module}: {what} is not supported")]
    Unsupported {
        /// Module name.
        module: String,
        /// What was found.
        what: String,
    },
}

impl Error {
    /// One line on what to do about it.
    #[must_use]
    pub fn help(&self) -> &'static str {
        match self {
            Self::Core(e) => e.help(),
            Self::Length { .. } => "pass rows · cols elements, row-major",
            Self::NonFinite { .. } | Self::Code { .. } => {
                "the weights are damaged: fetch or export the checkpoint again"
            }
            Self::Overflow { .. } => "choose a format with wider scales (bf16, f32, nvfp4)",
            Self::Columns { .. } => "choose a format without groups of columns (fp8, bf16) for this matrix",
            Self::Scale { .. } | Self::TensorValue { .. } => {
                "the values are damaged or of another convention: fetch or export the checkpoint again"
            }
            Self::Rows { .. } => "cut inside the matrix, and FP8 blocks at multiples of 128 rows",
            Self::Expert { .. } => {
                "ask for an expert below the number of experts; gate_up_proj has an even number of rows"
            }
            Self::Unequal { .. } => "keep the matrices apart, or convert them to one format first",
            Self::Conversion { .. } => "use the recipe `keep` or one that names a format",
            Self::NotWritten { .. } => "decode the module and write the matrix that results",
            Self::UnknownRecipe { .. } => {
                "use one of the listed names, or give the path of a file of rules that ends in .toml"
            }
            Self::RecipeFile { .. } => "give the path of a small TOML file",
            Self::RecipeSyntax { .. } => {
                "correct the line; keys are base, default, and in each [[rule]] role, name, layers, mtp, format"
            }
            Self::RecipeValue { .. } => {
                "use one of the listed values; * and ? stand for any characters in roles and names"
            }
            Self::MissingTensor { .. } => "the checkpoint is incomplete: fetch the missing shard",
            Self::DuplicateTensor { .. } => "pass each tensor of a module once",
            Self::UnexpectedTensor { .. } | Self::UnknownFormat { .. } | Self::Unsupported { .. } => {
                "export the checkpoint in one of the supported formats, see the crate documentation"
            }
            Self::TensorDType { .. } | Self::TensorShape { .. } | Self::TensorBytes { .. } => {
                "the checkpoint does not follow its format: fetch or export it again"
            }
            Self::TiledScales { .. } => "export the scales row-major, [rows, columns / group]",
            Self::ContainerShape { .. } => {
                "NVFP4 in a container has rows divisible by 128 and columns by 64; choose another format"
            }
            Self::SwappedScale { .. } => {
                "compressed-tensors stores a divisor (weight_global_scale), ModelOpt a multiplier (weight_scale_2): rename \
                 or invert the tensor"
            }
        }
    }
}
