//! Conversion of checkpoint folders: what is written loads as what conversion at load gives, damaged input is refused, and
//! an interrupted run leaves nothing that loads.

#![allow(clippy::redundant_pub_crate, reason = "unreachable_pub asks for the opposite in a test binary")]

mod hostile;
mod interrupted;
mod round_trip;
mod tiny;
