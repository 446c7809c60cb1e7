#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod config;
pub mod container;
pub mod error;
pub mod qwen35;
pub mod rope;
pub mod session;
pub mod text;
pub mod weights;

pub use config::Config;
pub use error::{Error, NameList, Result};
pub use ninfer_quant::Recipe;
pub use qwen35::Qwen35;
pub use session::{Session, SessionOptions};
pub use weights::WeightTable;
