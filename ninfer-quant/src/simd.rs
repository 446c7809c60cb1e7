//! Loops compiled for the vectors that the processor has, chosen when they run.
//!
//! The loops of this crate are written so that the compiler turns them into vector instructions: no branches, slices walked
//! side by side, integers where floats would not reorder. A build for any x86-64 processor would use the vectors of 2003
//! for them; under [`wide`] they exist a second time, for AVX2. Both copies give the same bits, since every operation in
//! them is exact or correctly rounded and none is fused or reordered.

/// Consumed by a closure, it makes the closure callable once. Such a closure is inlined where it is called; one that could be
/// called again is reached through a function made by the compiler, which is not, and then nothing in it is compiled anew.
pub(crate) struct Once;

/// Evaluates an expression compiled for the widest vectors that the processor has.
///
/// What it calls must be `inline(always)` to be compiled that way. The choice costs a few nanoseconds: a row is worth it,
/// a group is not.
macro_rules! wide {
    ($work:expr) => {{
        let once = $crate::simd::Once;
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                let _called = once;
                $work
            },
        )
    }};
}

pub(crate) use wide;
