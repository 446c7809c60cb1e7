//! A longer look at the memory-read bandwidth than the library's probe takes.

use std::sync::Barrier;
use std::time::Instant;

/// Bytes that all threads read in a pass: more than the last-level cache of most machines.
const TOTAL_BYTES: usize = 1 << 30;
/// The least that one thread reads.
const LEAST_BYTES: usize = 32 << 20;
/// Passes; the fastest counts, because other load can only slow one down.
const PASSES: usize = 8;

/// Bytes a second that all threads read together.
pub fn read() -> f64 {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let words = (TOTAL_BYTES / threads).max(LEAST_BYTES) / size_of::<u64>();
    let barrier = Barrier::new(threads);
    let seconds: Vec<Vec<f64>> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads).map(|_| scope.spawn(|| passes(words, &barrier))).collect();
        handles.into_iter().filter_map(|h| h.join().ok()).collect()
    });
    // All threads begin a pass together, and it ends with the slowest.
    let pass = |i: usize| seconds.iter().filter_map(|s| s.get(i)).fold(0.0, |a: f64, &b| a.max(b));
    let fastest = (0..PASSES).map(pass).filter(|&s| s > 0.0).fold(f64::INFINITY, f64::min);
    (words * size_of::<u64>() * seconds.len()) as f64 / fastest
}

/// Seconds of each pass of one thread.
fn passes(words: usize, barrier: &Barrier) -> Vec<f64> {
    // Written with something other than zero, so that every page is a page of its own.
    let words = vec![1u64; words];
    let mut seconds = Vec::with_capacity(PASSES);
    for _ in 0..PASSES {
        barrier.wait();
        let start = Instant::now();
        std::hint::black_box(sum(&words));
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds
}

/// Independent sums, so that additions do not wait for each other.
fn sum(words: &[u64]) -> u64 {
    let mut lanes = [0u64; 16];
    let (rows, rest) = words.as_chunks::<16>();
    for row in rows {
        for (lane, &word) in lanes.iter_mut().zip(row) {
            *lane = lane.wrapping_add(word);
        }
    }
    lanes.iter().chain(rest).fold(0, |a, &b| a.wrapping_add(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_counts_once() {
        for len in [0, 1, 15, 16, 17, 1000] {
            let words: Vec<u64> = (1..=len).collect();
            assert_eq!(sum(&words), len * (len + 1) / 2);
        }
    }
}
