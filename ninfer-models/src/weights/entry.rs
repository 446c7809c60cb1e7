//! What a checkpoint holds, line by line, known from headers alone.

use std::fmt;

use ninfer_core::DType;
use ninfer_quant::TensorRole;
use ninfer_quant::checkpoint::StoredKind;

use super::part::{LayerRef, VectorRole};

/// What a line of the table is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EntryRole {
    /// A matrix.
    Matrix(TensorRole),
    /// A weight that is kept in f32.
    Vector(VectorRole),
}

impl fmt::Display for EntryRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Matrix(role) => role.fmt(f),
            Self::Vector(role) => role.fmt(f),
        }
    }
}

/// How the weights of a line are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Stored {
    /// A matrix in this format.
    Matrix(StoredKind),
    /// Elements of this type: vectors, and experts fused into one tensor.
    Elements(DType),
}

impl fmt::Display for Stored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Matrix(kind) => kind.fmt(f),
            Self::Elements(dtype) => dtype.fmt(f),
        }
    }
}

/// A line of the weight table: one weight, or the experts of a layer that are stored alike.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Entry {
    /// Where it stands.
    pub layer: LayerRef,
    /// Module or tensor name in the file; the number of an expert is written `*`.
    pub name: String,
    /// What it is for.
    pub role: EntryRole,
    /// Shape of one.
    pub shape: Vec<usize>,
    /// How many there are.
    pub count: usize,
    /// How it is stored.
    pub stored: Stored,
    /// Stored bytes of all of them, scales included.
    pub bytes: u64,
}
