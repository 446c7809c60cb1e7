//! Operations of the CUDA backend against the CPU backend, which defines them, and the promises that hold between calls.
//!
//! Tests pass with a printed line where there is no device.

// Modules of a test program reach nobody else.
#![allow(unreachable_pub)]

#[allow(dead_code)]
#[path = "../ops/rng.rs"]
mod rng;
// The tests of the CPU backend use more of it.
#[allow(dead_code)]
#[path = "../ops/stored.rs"]
mod stored;

mod lab;

mod attention;
mod choose;
mod gdn;
mod gdn_chunk;
mod gdn_fold;
mod linear;
mod mma_tile;
mod moe;
mod norm;
mod overlap;
mod rope;
mod rounded;
mod sample;
mod tile;
mod tile_e4m3;
mod timing;
