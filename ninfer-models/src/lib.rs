#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod config;
pub mod error;
mod file;
pub mod rope;
pub mod text;

pub use config::Config;
pub use error::{Error, Result};
