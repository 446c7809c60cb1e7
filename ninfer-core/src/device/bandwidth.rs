//! The memory-read probe of the CPU.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::{Bandwidth, host};

/// What the threads read together: more than the last-level cache of most machines.
const TOTAL_BYTES: usize = 256 << 20;
/// The least that one thread reads.
const LEAST_BYTES: usize = 8 << 20;
/// Words between two looks at the clock.
const BLOCK: usize = 1 << 17;
/// When reading begins, counted from the start; buffers are filled before.
const FILLED: Duration = Duration::from_millis(50);
/// When reading ends.
const BUDGET: Duration = Duration::from_millis(80);

/// Bytes a second that all threads read from memory together, measured once and then remembered.
///
/// Each thread fills a buffer of its own for 50 ms at most and then sums it over and over until 80 ms after the start; the
/// figure is the sum of what the threads reached. Where the system hands out pages so slowly that the buffers stay
/// smaller than the last-level cache, the figure is that of the cache. `None` where a thread or its buffer could not be
/// had.
#[must_use]
pub fn measure_cpu_read_bandwidth() -> Option<Bandwidth> {
    static MEASURED: OnceLock<Option<f64>> = OnceLock::new();
    MEASURED.get_or_init(|| probe(host::threads() as usize)).map(Bandwidth::measured)
}

fn probe(threads: usize) -> Option<f64> {
    let start = Instant::now();
    let words = (TOTAL_BYTES / threads.max(1)).max(LEAST_BYTES) / size_of::<u64>();
    std::thread::scope(|scope| {
        let handles: Vec<_> =
            (0..threads).map(|_| std::thread::Builder::new().spawn_scoped(scope, || read(words, start))).collect();
        // Nothing waits for a thread that did not start: each begins by the clock.
        handles.into_iter().map(|h| h.ok()?.join().ok()?).sum()
    })
}

/// Bytes a second of one thread.
fn read(words: usize, start: Instant) -> Option<f64> {
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(words).ok()?;
    while buffer.len() < words && (buffer.is_empty() || start.elapsed() < FILLED) {
        // Written with something other than zero, so that every page is a page of its own.
        buffer.resize((buffer.len() + BLOCK).min(words), 1u64);
    }
    std::thread::sleep(FILLED.saturating_sub(start.elapsed()));
    let begin = Instant::now();
    let mut bytes = 0;
    let mut total = 0u64;
    for block in buffer.chunks(BLOCK).cycle() {
        total = total.wrapping_add(sum(block));
        bytes += size_of_val(block);
        if start.elapsed() >= BUDGET {
            break;
        }
    }
    std::hint::black_box(total);
    let seconds = begin.elapsed().as_secs_f64();
    (seconds > 0.0).then(|| bytes as f64 / seconds)
}

/// Eight independent sums, so that additions do not wait for each other.
fn sum(block: &[u64]) -> u64 {
    let mut lanes = [0u64; 8];
    let (rows, rest) = block.as_chunks::<8>();
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
    fn sum_counts_every_word_once() {
        for len in [0, 1, 7, 8, 9, 1000] {
            let words: Vec<u64> = (1..=len).collect();
            assert_eq!(sum(&words), len * (len + 1) / 2);
        }
    }

    #[test]
    fn the_probe_gives_a_positive_figure_and_remembers_it() {
        let first = measure_cpu_read_bandwidth().expect("threads can be started");
        assert!(first.bytes_per_second.is_finite() && first.bytes_per_second > 0.0);
        assert_eq!(measure_cpu_read_bandwidth(), Some(first));
    }
}
