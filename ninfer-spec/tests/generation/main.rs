//! Generation with a toy model: nothing here depends on a real one.
#![allow(unreachable_pub, reason = "a test binary exports nothing")]

mod equality;
mod law;
mod limits;
mod schedule;
mod speed;
mod toy;
