//! What the benchmarks share: a backend with its queue, and views and weights filled with random numbers.
//!
//! `cargo bench -p ninfer-benches` measures the operations of the CPU backend, each as a recorded step that is replayed;
//! `cargo run --release -p ninfer-benches --bin decode` measures decoding against the memory bandwidth of the machine.

mod bench;
mod random;
mod shape_config;

pub use bench::{Bench, prompt_chunk, step};
pub use random::Random;
pub use shape_config::shape_config;

/// Compiles the example of the project's README.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
