//! A replayed step allocates nothing on the heap, on any thread, from the first replay on.

// Modules of a test program reach nobody else.
#![allow(unreachable_pub, dead_code)]

#[path = "ops/lab.rs"]
mod lab;
#[path = "ops/rng.rs"]
mod rng;
#[path = "ops/stored.rs"]
mod stored;
#[path = "ops/tiny.rs"]
mod tiny;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use ninfer_core::Backend;
use ninfer_core::backend::Reservation;
use ninfer_core::segment::{Batch, Profile, Segment};
use ninfer_core::shape::{AttentionShape, FfnShape, GdnShape, LayerKind, ModelShape};
use ninfer_kernels::cpu::Cpu;

use lab::Lab;
use tiny::{Tiny, VOCAB};

/// The system's allocator with a count of all its calls that give memory.
struct Counter;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system's allocator with the same arguments.
unsafe impl GlobalAlloc for Counter {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are those of this function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are those of this function.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are those of this function.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static COUNTER: Counter = Counter;

/// Allocations of all threads while `work` runs.
fn during(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.load(Ordering::SeqCst);
    work();
    ALLOCATIONS.load(Ordering::SeqCst) - before
}

const ROWS: usize = 12;

/// The shape of the tiny model with one of its two feed-forward blocks.
fn need(ffn: FfnShape) -> Reservation {
    let shape = ModelShape {
        hidden: 96,
        layers: vec![LayerKind::LinearAttention, LayerKind::FullAttention],
        attention: AttentionShape { query_heads: 4, kv_heads: 2, head_dim: 64 },
        gdn: GdnShape { key_heads: 2, value_heads: 4, key_dim: 32, value_dim: 32, conv_kernel: 4 },
        ffn,
        vocab: VOCAB,
        tied: true,
        mtp: true,
    };
    Reservation { shape, step_rows: ROWS, prefill_rows: 0, segments: 3, max_context: 320 }
}

/// Replays a step of the whole model: 300 rounds of three lanes with uploads of tokens and table, and a download.
fn rounds(cpu: &Cpu, first: &mut u64, all: &mut u64) {
    let mut lab = Lab::new(cpu.clone());
    let tiny = Tiny::new(&mut lab, 3, ROWS, 4);
    let table = lab.poisoned::<i32>(3, 8);
    let batch = Batch::new(Profile::Step, ROWS, table.v()).unwrap();
    let step = cpu.record(&mut lab.queue, |r| tiny.forward(r, &batch)).unwrap();
    for ffn in
        [FfnShape::Dense { intermediate: 200 }, FfnShape::Moe { experts: 6, top_k: 2, width: 48, shared_width: 48 }]
    {
        cpu.reserve(&mut lab.queue, &need(ffn)).unwrap();
    }
    let logits = tiny.results[15].view.row_range(0..ROWS).unwrap();
    let ids = tiny.ids.view.row_range(0..ROWS).unwrap();
    let mut words = [0i32; 24];
    let mut out = vec![0u8; logits.span_bytes()];
    let mut round = |i: u32| {
        // Lengths, folds and banks change from round to round, and so does the context, up to all pages.
        for slot in 0..3u32 {
            let (len, fold) = (1 + (i + slot) % 4, if i == 0 { 0 } else { 1 });
            let segment = Segment { slot, start: i, row: slot * 4, len, fold, bank: i % 2 };
            words[slot as usize * 8..][..8].copy_from_slice(&segment.to_words());
        }
        let tokens: [u32; ROWS] = std::array::from_fn(|t| (i * 37 + t as u32 * 11) % VOCAB as u32);
        cpu.upload(&mut lab.queue, &table.view, bytemuck::cast_slice(&words)).unwrap();
        cpu.upload(&mut lab.queue, &ids, bytemuck::cast_slice(&tokens)).unwrap();
        cpu.replay(&mut lab.queue, &step).unwrap();
        cpu.download(&mut lab.queue, &logits, &mut out).unwrap();
    };
    *first = during(|| round(0));
    *all = during(|| (1..300).for_each(&mut round));
    assert!(bytemuck::cast_slice::<u8, f32>(&out).iter().any(|x| x.is_finite()));
}

#[test]
fn replays_allocate_nothing() {
    let (mut first, mut all) = (0, 0);
    // On a thread of a pool, so that no work is handed over from outside.
    for threads in [1, 2, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| rounds(&Cpu::new(), &mut first, &mut all));
        assert_eq!((first, all), (0, 0), "first replay and all others on {threads} threads");
    }
    // From outside each replay is one job for the pool, and its list of jobs grows by a block every 63 of them. The first
    // one may also set up what the waiting thread waits on.
    for cpu in [Cpu::new(), Cpu::with_threads(2).unwrap()] {
        rounds(&cpu, &mut first, &mut all);
        assert!(first <= 2, "{first} allocations in the first replay");
        assert!(all <= 299 / 63 + 1, "{all} allocations in 299 replays");
    }
}
