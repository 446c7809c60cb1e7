#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod affine;
pub mod bridge;
pub mod checkpoint;
pub mod codes;
pub mod container;
mod dequantize;
pub mod encode;
pub mod error;
pub mod experts;
pub mod fp8;
pub mod groupwise;
pub mod int4;
pub mod nvfp4;
pub mod packed;
pub mod plain;
pub mod recipe;
pub mod report;
pub mod role;
mod rows;
pub mod scale_layout;
mod simd;
mod slices;
mod source;
mod stored;
mod widen;
pub mod writer;

pub use dequantize::{dequantize_ref, dequantize_ref_into, dequantize_ref_row};
pub use encode::{encode, encode_ref};
pub use error::{Error, Result};
pub use experts::FusedExperts;
pub use packed::{Fp8ScaleVec, PackedMatrix, PackedParts};
pub use recipe::{Conversion, Custom, Recipe, RowPart, Site, Target, convert};
pub use report::{ErrorReport, ErrorSums};
pub use role::TensorRole;
pub use widen::widen;
