//! Work on all processors.

use std::sync::Mutex;
use std::thread;

/// Applies a function to each item, on as many threads as there are processors; results in the order of the items.
pub fn map<T: Send, R: Send>(items: Vec<T>, f: impl Fn(T) -> R + Sync) -> Vec<R> {
    let count = items.len();
    let workers = thread::available_parallelism().map_or(1, usize::from).min(count);
    let queue = Mutex::new(items.into_iter().enumerate());
    let done = Mutex::new(Vec::with_capacity(count));
    let next = || queue.lock().unwrap_or_else(|e| e.into_inner()).next();
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some((i, item)) = next() {
                    let result = f(item);
                    done.lock().unwrap_or_else(|e| e.into_inner()).push((i, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(|e| e.into_inner());
    done.sort_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn results_come_in_order() {
        let squares: Vec<u64> = (0..1000).map(|i| i * i).collect();
        assert_eq!(super::map((0..1000_u64).collect(), |i| i * i), squares);
        assert!(super::map(Vec::<u64>::new(), |i| i).is_empty());
    }
}
