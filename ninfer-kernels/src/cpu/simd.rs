//! One body, compiled twice: for any processor and for x86-64 with AVX2 and FMA.
//!
//! Bodies are generic over [`Lanes`], sixteen f32 values that are two vector registers or an array; [`Isa`] says which copy
//! runs. The two copies may differ in the last bit (one rounds products, the other does not), but one process always uses
//! one of them.

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

/// Sixteen f32 values.
///
/// Conversions are exact. Every method is the same function of its lanes in all implementations but for the rounding of
/// products in the two multiply-adds.
pub(super) trait Lanes: Copy {
    fn zero() -> Self;
    fn load(values: &[f32; 16]) -> Self;
    fn store(self) -> [f32; 16];
    /// BF16 bit patterns.
    fn bf16(bits: &[u16; 16]) -> Self;
    /// E4M3 codes; NaN codes do not occur in a prepared weight.
    fn e4m3(codes: &[u8; 16]) -> Self;
    /// Signed bytes.
    fn i8(values: &[i8; 16]) -> Self;
    /// Table entries of the nibbles of eight bytes, low nibble first.
    fn nibbles(bytes: &[u8; 8], table: &[i8; 16]) -> Self;
    fn scale(self, factor: f32) -> Self;
    /// `acc + self · b`.
    fn mul_add(self, b: Self, acc: Self) -> Self;
    /// `acc + a · b` of single values, rounded like [`Lanes::mul_add`].
    fn scalar(a: f32, b: f32, acc: f32) -> f32;

    /// Sum of the lanes in a fixed order: halves are added to each other.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut sum = self.store();
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                sum[i] += sum[i + width];
            }
        }
        sum[0]
    }
}

/// Lanes as an array.
#[derive(Clone, Copy)]
pub(super) struct Plain([f32; 16]);

/// E4M3 by bit arithmetic: normal codes move into the f32 fields, subnormal ones are `(1 + m/8)·2⁻⁶ − 2⁻⁶`, both exact.
#[inline(always)]
fn e4m3(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7f) << 20;
    let normal = f32::from_bits(magnitude + (120 << 23));
    let small = f32::from_bits(magnitude + (121 << 23)) - 0.015_625;
    let value = if magnitude < 1 << 23 { small } else { normal };
    f32::from_bits(value.to_bits() | (u32::from(code & 0x80) << 24))
}

impl Lanes for Plain {
    #[inline(always)]
    fn zero() -> Self {
        Self([0.0; 16])
    }
    #[inline(always)]
    fn load(values: &[f32; 16]) -> Self {
        Self(*values)
    }
    #[inline(always)]
    fn store(self) -> [f32; 16] {
        self.0
    }
    #[inline(always)]
    fn bf16(bits: &[u16; 16]) -> Self {
        Self(bits.map(|b| f32::from_bits(u32::from(b) << 16)))
    }
    #[inline(always)]
    fn e4m3(codes: &[u8; 16]) -> Self {
        Self(codes.map(e4m3))
    }
    #[inline(always)]
    fn i8(values: &[i8; 16]) -> Self {
        Self(values.map(f32::from))
    }
    #[inline(always)]
    fn nibbles(bytes: &[u8; 8], table: &[i8; 16]) -> Self {
        Self(std::array::from_fn(|i| f32::from(table[usize::from(bytes[i / 2] >> (4 * (i % 2)) & 15)])))
    }
    #[inline(always)]
    fn scale(self, factor: f32) -> Self {
        Self(self.0.map(|x| x * factor))
    }
    #[inline(always)]
    fn mul_add(self, b: Self, acc: Self) -> Self {
        Self(std::array::from_fn(|i| Self::scalar(self.0[i], b.0[i], acc.0[i])))
    }
    #[inline(always)]
    fn scalar(a: f32, b: f32, acc: f32) -> f32 {
        // One instruction wherever this copy is the fast one.
        if cfg!(target_arch = "aarch64") { a.mul_add(b, acc) } else { acc + a * b }
    }
}

/// Lanes as two AVX registers. Values of this type exist only in code that [`dispatch`] entered after detecting AVX2 and
/// FMA, which is what makes its methods sound.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Avx2(__m256, __m256);

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

#[cfg(target_arch = "x86_64")]
impl Avx2 {
    /// Sixteen bytes as two vectors of i32, by sign extension.
    #[inline(always)]
    fn widen(bytes: __m128i) -> Self {
        // SAFETY: AVX2 is there (see the type).
        unsafe {
            let low = _mm256_cvtepi8_epi32(bytes);
            let high = _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(bytes));
            Self(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
        }
    }

    /// Eight E4M3 codes in the low bytes of i32 lanes.
    #[inline(always)]
    fn e4m3_half(codes: __m256i) -> __m256 {
        // SAFETY: AVX2 is there (see the type).
        unsafe {
            let magnitude = _mm256_slli_epi32::<20>(_mm256_and_si256(codes, _mm256_set1_epi32(0x7f)));
            let normal = _mm256_castsi256_ps(_mm256_add_epi32(magnitude, _mm256_set1_epi32(120 << 23)));
            let biased = _mm256_castsi256_ps(_mm256_add_epi32(magnitude, _mm256_set1_epi32(121 << 23)));
            let small = _mm256_sub_ps(biased, _mm256_set1_ps(0.015_625));
            let subnormal = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(1 << 23), magnitude));
            let value = _mm256_blendv_ps(normal, small, subnormal);
            let sign = _mm256_slli_epi32::<24>(_mm256_and_si256(codes, _mm256_set1_epi32(0x80)));
            _mm256_or_ps(value, _mm256_castsi256_ps(sign))
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Lanes for Avx2 {
    #[inline(always)]
    fn zero() -> Self {
        // SAFETY: AVX is there (see the type).
        unsafe { Self(_mm256_setzero_ps(), _mm256_setzero_ps()) }
    }
    #[inline(always)]
    fn load(values: &[f32; 16]) -> Self {
        // SAFETY: AVX is there (see the type); both loads are inside the array and need no alignment.
        unsafe { Self(_mm256_loadu_ps(values.as_ptr()), _mm256_loadu_ps(values.as_ptr().add(8))) }
    }
    #[inline(always)]
    fn store(self) -> [f32; 16] {
        let mut out = [0.0; 16];
        // SAFETY: AVX is there (see the type); both stores are inside the array and need no alignment.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), self.0);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), self.1);
        }
        out
    }
    #[inline(always)]
    fn bf16(bits: &[u16; 16]) -> Self {
        // SAFETY: AVX2 is there (see the type); both loads are inside the array and need no alignment.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(bits.as_ptr().cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(bits.as_ptr().add(8).cast()));
            Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)))
        }
    }
    #[inline(always)]
    fn e4m3(codes: &[u8; 16]) -> Self {
        // SAFETY: AVX2 is there (see the type); the load is inside the array and needs no alignment.
        unsafe {
            let codes = _mm_loadu_si128(codes.as_ptr().cast());
            let high = _mm_srli_si128::<8>(codes);
            Self(Self::e4m3_half(_mm256_cvtepu8_epi32(codes)), Self::e4m3_half(_mm256_cvtepu8_epi32(high)))
        }
    }
    #[inline(always)]
    fn i8(values: &[i8; 16]) -> Self {
        // SAFETY: SSE2 is there; the load is inside the array and needs no alignment.
        Self::widen(unsafe { _mm_loadu_si128(values.as_ptr().cast()) })
    }
    #[inline(always)]
    fn nibbles(bytes: &[u8; 8], table: &[i8; 16]) -> Self {
        // SAFETY: AVX2 is there (see the type); the loads are inside the arrays and need no alignment.
        unsafe {
            let bytes = _mm_loadl_epi64(bytes.as_ptr().cast());
            let mask = _mm_set1_epi8(15);
            let low = _mm_and_si128(bytes, mask);
            let high = _mm_and_si128(_mm_srli_epi16::<4>(bytes), mask);
            let table = _mm_loadu_si128(table.as_ptr().cast());
            Self::widen(_mm_shuffle_epi8(table, _mm_unpacklo_epi8(low, high)))
        }
    }
    #[inline(always)]
    fn scale(self, factor: f32) -> Self {
        // SAFETY: AVX is there (see the type).
        unsafe {
            let factor = _mm256_set1_ps(factor);
            Self(_mm256_mul_ps(self.0, factor), _mm256_mul_ps(self.1, factor))
        }
    }
    #[inline(always)]
    fn mul_add(self, b: Self, acc: Self) -> Self {
        // SAFETY: FMA is there (see the type).
        unsafe { Self(_mm256_fmadd_ps(self.0, b.0, acc.0), _mm256_fmadd_ps(self.1, b.1, acc.1)) }
    }
    #[inline(always)]
    fn scalar(a: f32, b: f32, acc: f32) -> f32 {
        a.mul_add(b, acc)
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        // The order of the default method, in registers.
        // SAFETY: AVX is there (see the type).
        unsafe {
            let eight = _mm256_add_ps(self.0, self.1);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
}

/// Defines `$name(isa, args…)` from a body that is generic over `L: Lanes`.
///
/// The body must be `#[inline(always)]`, so that it is compiled with the features of the copy that calls it.
macro_rules! dispatch {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $(<$($g:ident : $bound:path),+>)? ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$meta])*
        $vis fn $name $(<$($g: $bound),+>)? (isa: crate::cpu::simd::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn fast $(<$($g: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
                $body::<crate::cpu::simd::Avx2 $($(, $g)+)?>($($arg),*)
            }
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `Isa::Avx2` exists only where both features were detected.
                crate::cpu::simd::Isa::Avx2 => unsafe { fast($($arg),*) },
                crate::cpu::simd::Isa::Base => $body::<crate::cpu::simd::Plain $($(, $g)+)?>($($arg),*),
            }
        }
    };
}
pub(super) use dispatch;

/// Dot product over sixteen lanes: lane `l` takes elements `l, l + 16, …`; then [`Lanes::sum`], then the rest in order.
#[inline(always)]
pub(super) fn dot<L: Lanes>(a: &[f32], b: &[f32]) -> f32 {
    let mut acc = L::zero();
    let (a16, a_rest) = a.as_chunks::<16>();
    let (b16, b_rest) = b.as_chunks::<16>();
    for (x, y) in a16.iter().zip(b16) {
        acc = L::load(x).mul_add(L::load(y), acc);
    }
    a_rest.iter().zip(b_rest).fold(acc.sum(), |sum, (x, y)| L::scalar(*x, *y, sum))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every conversion of the fast copy equals the plain one, for every code.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn conversions_agree() {
        #[target_feature(enable = "avx2,fma")]
        fn run() {
            for base in (0..=255u8).step_by(16) {
                let codes: [u8; 16] = std::array::from_fn(|i| base + i as u8);
                if base & 0x70 != 0x70 {
                    assert_eq!(
                        Avx2::e4m3(&codes).store().map(f32::to_bits),
                        Plain::e4m3(&codes).store().map(f32::to_bits)
                    );
                }
                let signed = codes.map(u8::cast_signed);
                assert_eq!(Avx2::i8(&signed).store(), Plain::i8(&signed).store());
                let bytes: [u8; 8] = std::array::from_fn(|i| codes[2 * i]);
                let table: [i8; 16] = std::array::from_fn(|i| i as i8 * 7 - 50);
                assert_eq!(Avx2::nibbles(&bytes, &table).store(), Plain::nibbles(&bytes, &table).store());
                let bits: [u16; 16] = std::array::from_fn(|i| u16::from(base) << 7 | i as u16);
                let lanes = Avx2::bf16(&bits);
                assert_eq!(lanes.store().map(f32::to_bits), Plain::bf16(&bits).store().map(f32::to_bits));
                assert_eq!(lanes.sum().to_bits(), Plain::load(&lanes.store()).sum().to_bits());
                assert_eq!(lanes.scale(1.7).store(), Plain::load(&lanes.store()).scale(1.7).store());
            }
        }
        if Isa::detect() == Isa::Avx2 {
            // SAFETY: both features were detected.
            unsafe { run() };
        }
    }
}
