//! `.ninfer` containers, written by these tests.

#![allow(clippy::redundant_pub_crate, reason = "unreachable_pub asks for the opposite in a test binary")]

mod file;
mod hostile;
mod model;
mod published;
mod text;
mod weights;
