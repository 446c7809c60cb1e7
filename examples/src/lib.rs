//! What the example programs share: options, device and model choice, progress, tables, errors.
//!
//! The programs themselves are in `src/bin`; each is a short main function over the library crates, to be read as an
//! example of how an engine is put together. Nothing here is published.

#![forbid(unsafe_code)]

pub mod arguments;
pub mod corpus;
pub mod device;
pub mod failure;
pub mod forecast;
pub mod formats;
pub mod gpu;
pub mod hardware;
pub mod inventory;
pub mod likelihood;
pub mod loader;
pub mod output;
pub mod progress;
pub mod prompt;
pub mod quality;
pub mod quantize;
pub mod recipes;
pub mod reply;
pub mod sampling;
pub mod shipped;
pub mod size;
pub mod speculation;
pub mod table;

pub use failure::{Failure, Result};
