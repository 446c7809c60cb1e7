#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod backend;
pub mod capability;
pub mod device;
#[cfg(feature = "cuda")]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
pub mod driver;
pub mod dtype;
pub mod error;
pub mod format;
pub mod known;
pub mod memory;
pub mod model;
pub mod ops;
pub mod roofline;
pub mod sampling;
pub mod segment;
pub mod shape;
pub mod state;
#[cfg(feature = "testing")]
#[cfg_attr(docsrs, doc(cfg(feature = "testing")))]
pub mod testing;
pub mod tuning;
pub mod view;

pub use backend::{Backend, DeviceBuffer, DeviceWeight, Recorder};
pub use device::{DeviceInfo, DeviceKind};
pub use dtype::DType;
pub use error::{Error, Result};
pub use format::{PackedData, PackedRef, WeightFormat};
pub use shape::ModelShape;
pub use view::View;
