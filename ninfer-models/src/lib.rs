#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod config;
pub mod error;
pub mod rope;
pub mod text;
pub mod weights;

pub use config::Config;
pub use error::{Error, NameList, Result};
pub use weights::WeightTable;
