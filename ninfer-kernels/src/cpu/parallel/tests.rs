use std::sync::Mutex;

use super::*;

/// Every item once, pieces at multiples of the grain, whatever the numbers.
#[test]
fn pieces_cover_everything_once() {
    for threads in [1, 2, 3, 7] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        for count in [0, 1, 2, 3, 63, 64, 65, 130, 701, 4096] {
            for grain in [0, 1, 4, 64] {
                for work in [0, SERIAL_WORK, 10 * SERIAL_WORK, usize::MAX] {
                    let pieces = Mutex::new(Vec::new());
                    pool.install(|| split(count, grain, work, &|range| pieces.lock().unwrap().push(range)));
                    let mut pieces = pieces.into_inner().unwrap();
                    pieces.sort_by_key(|r| r.start);
                    let mut next = 0;
                    for piece in &pieces {
                        assert_eq!(piece.start, next);
                        assert!(piece.start.is_multiple_of(grain.max(1)));
                        next = piece.end;
                    }
                    assert_eq!(next, count, "{threads} threads, grain {grain}, work {work}");
                }
            }
        }
    }
}

#[test]
fn shared_ranges_are_checked() {
    let mut data = [0; 8];
    let shared = Shared::new(&mut data);
    // SAFETY: one range at a time.
    unsafe { shared.range(2..5) }.fill(7);
    assert_eq!(data, [0, 0, 7, 7, 7, 0, 0, 0]);
    for (start, end) in [(0, 9), (5, 4), (8, 9)] {
        let shared = Shared::new(&mut data);
        // SAFETY: one range at a time, and these have no elements to reach.
        let result = std::panic::catch_unwind(|| unsafe { shared.range(Range { start, end }) }.len());
        assert!(result.is_err(), "{start}..{end}");
    }
}
