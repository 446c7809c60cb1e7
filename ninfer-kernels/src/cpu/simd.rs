//! One body, compiled twice: for any processor and for those with fast fused multiply-add.
//!
//! Loops are written over `[f32; 16]` so that the compiler turns them into vector code; [`Isa`] says which copy runs. The
//! two copies may differ in the last bit (one rounds products, the other does not), but one process always uses one.

/// What the processor offers, found once when the backend is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Isa {
    /// Any processor.
    Base,
    /// x86-64 with AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl Isa {
    pub(super) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return Self::Avx2;
        }
        Self::Base
    }
}

/// `acc + a·b`, fused where that is one instruction.
#[inline(always)]
pub(super) fn mul_add<const FMA: bool>(a: f32, b: f32, acc: f32) -> f32 {
    if FMA || cfg!(target_arch = "aarch64") { a.mul_add(b, acc) } else { acc + a * b }
}

/// Defines `$name(isa, args…)` from a body that is generic over `const FMA: bool`.
///
/// The body must be `#[inline(always)]`, so that it is compiled with the features of the copy that calls it.
macro_rules! dispatch {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $(<$($g:ident : $bound:path),+>)? ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$meta])*
        $vis fn $name $(<$($g: $bound),+>)? (isa: crate::cpu::simd::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn fast $(<$($g: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
                $body::<true $($(, $g)+)?>($($arg),*)
            }
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `Isa::Avx2` exists only where both features were detected.
                crate::cpu::simd::Isa::Avx2 => unsafe { fast($($arg),*) },
                crate::cpu::simd::Isa::Base => $body::<false $($(, $g)+)?>($($arg),*),
            }
        }
    };
}
pub(super) use dispatch;

/// Sum of sixteen lanes in a fixed order.
#[inline(always)]
pub(super) fn reduce(lanes: [f32; 16]) -> f32 {
    let mut width = 8;
    let mut sum = lanes;
    while width > 0 {
        for i in 0..width {
            sum[i] += sum[i + width];
        }
        width /= 2;
    }
    sum[0]
}

/// Dot product over sixteen lanes: lane `l` takes elements `l, l + 16, …`; then [`reduce`].
#[inline(always)]
pub(super) fn dot<const FMA: bool>(a: &[f32], b: &[f32]) -> f32 {
    let mut acc = [0.0; 16];
    let (a16, a_rest) = a.as_chunks::<16>();
    let (b16, b_rest) = b.as_chunks::<16>();
    for (x, y) in a16.iter().zip(b16) {
        for l in 0..16 {
            acc[l] = mul_add::<FMA>(x[l], y[l], acc[l]);
        }
    }
    for (l, (x, y)) in a_rest.iter().zip(b_rest).enumerate() {
        acc[l] = mul_add::<FMA>(*x, *y, acc[l]);
    }
    reduce(acc)
}
