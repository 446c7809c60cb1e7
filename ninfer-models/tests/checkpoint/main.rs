//! Checkpoint folders: what is read from good ones, and what damaged or hostile ones report.

#![allow(clippy::redundant_pub_crate, reason = "unreachable_pub asks for the opposite in a test binary")]

mod experts;
mod formats;
mod hostile;
mod lists;
mod recipes;
mod store;
mod table;
mod writing;
