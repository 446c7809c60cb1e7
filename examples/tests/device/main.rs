//! Whole models on every backend: on the CPU always, there on a part of the data, and on the first GPU if there is one.
//!
//! Tests named `gpu` pass with a printed line where there is no device.

mod bench;
mod bitwise;
mod drafts;
mod likelihood;
mod replay;
mod teacher;
mod tiny;
