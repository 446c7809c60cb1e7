//! The loops that become vector instructions, against the plainest form of what they compute.
//!
//! Shapes are odd on purpose: loops work on pieces of 512 columns and tiles of 128 rows, and end in tails of all lengths.

use half::f16;
use ninfer_core::format::{GROUP_PAD, GlobalScale, GroupFormat, NVFP4_GROUP};
use ninfer_core::{DType, WeightFormat};
use ninfer_quant::checkpoint::{DecodeOptions, StoredTensor, decode};
use ninfer_quant::codes::*;
use ninfer_quant::groupwise::unpack_group;
use ninfer_quant::nvfp4::{self, Convention};
use ninfer_quant::{Error, Fp8ScaleVec, PackedMatrix, PackedParts, encode, encode_ref};
use proptest::prelude::*;

const GROUPS: [GroupFormat; 4] = [GroupFormat::Q4, GroupFormat::Q5, GroupFormat::Q6, GroupFormat::W8];

fn all_formats() -> Vec<WeightFormat> {
    use WeightFormat::*;
    [F32, F16, Bf16, Fp8Tensor, Fp8Row, Fp8Block, Nvfp4].into_iter().chain(GROUPS.map(Group)).collect()
}

/// Random bits, the same in every run.
fn noise(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state ^ (state >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 16
    }
}

/// Weights of all magnitudes, with zeros of both signs, halves of steps and subnormal numbers among them.
fn weights(seed: u64, n: usize) -> Vec<f32> {
    let mut next = noise(seed);
    let mut value = move || {
        let (kind, mantissa) = (next() % 16, next());
        let unit = (mantissa % 65536) as f32 / 32768.0 - 1.0;
        match kind {
            0 => 0.0f32.copysign(unit),
            1 => f32::from_bits((mantissa % 0x80_0000) as u32).copysign(unit),
            2 => unit * 1e-4,
            3 | 4 => (mantissa % 63) as f32 / 8.0 - 4.0,
            _ => unit,
        }
    };
    (0..n).map(|_| value()).collect()
}

/// Every BF16 value, and the midpoints of neighbouring codes with the values next to them, of both signs.
fn probes(codes: impl Iterator<Item = (f32, f32)>) -> Vec<f32> {
    let midpoints = codes.flat_map(|(a, b)| {
        let mid = (a + b) / 2.0;
        [mid, mid.next_up(), mid.next_down(), -mid, (-mid).next_up(), (-mid).next_down()]
    });
    let extreme = [f32::MAX, f32::MIN, f32::from_bits(1), f32::from_bits(0x7F80_0001), f32::from_bits(0xFF80_0001)];
    (0..=u16::MAX).map(decode_bf16).chain(midpoints).chain(extreme).collect()
}

/// The nearest value of a table of magnitudes by search, ties to the even code.
fn nearest(x: f32, table: &[f32]) -> u8 {
    let distance = |c: &usize| (f64::from(table[*c]) - f64::from(x).abs()).abs();
    let order = |a: &usize, b: &usize| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2)));
    let last = table.len() - 1;
    let code = if x.abs() >= table[last] { last } else { (0..=last).min_by(order).unwrap() };
    code as u8
}

// The two encoders were also compared with a version in branches over all 2³² values.
#[test]
fn encoders_of_codes_choose_the_nearest_value() {
    for x in probes((0..0x7E).map(|c| (decode_e4m3(c), decode_e4m3(c + 1)))) {
        let magnitude = if x.is_nan() { 0x7F } else { nearest(x, &E4M3[..0x7F]) };
        assert_eq!(encode_e4m3(x), magnitude | u8::from(x.is_sign_negative()) << 7, "{x:?}");
    }
    for x in probes((0..7).map(|c| (decode_e2m1(c), decode_e2m1(c + 1)))) {
        let magnitude = if x.is_nan() { 0 } else { nearest(x, &E2M1[..8]) };
        assert_eq!(encode_e2m1(x), magnitude | u8::from(x.is_sign_negative()) << 3, "{x:?}");
    }
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

#[test]
fn slices_of_all_lengths_decode_as_single_codes_do() {
    let codes: Vec<u8> = (0..=255).chain((0..=255).rev()).collect();
    let scales = [1.0, -0.7, 0.0, 1e-38, f32::from_bits(3), 3e38, f32::INFINITY, f32::NAN];
    for scale in scales {
        for len in (0..70).chain([255, 256, 257, 511, 512]) {
            let mut out = vec![7.0; len];
            decode_e4m3_scaled(&codes, scale, &mut out);
            for (i, &x) in out.iter().enumerate() {
                assert!(same(x, decode_e4m3(codes[i]) * scale), "{:#x} · {scale}: {x}", codes[i]);
            }
            let mut out = vec![7.0; len];
            decode_e2m1_scaled(&codes, scale, &mut out);
            for (i, &x) in out[..len / 2 * 2].iter().enumerate() {
                assert!(same(x, decode_e2m1(codes[i / 2] >> (4 * (i % 2))) * scale), "{x}");
            }
        }
    }
}

/// The code of a lane, bit by bit.
fn lane(f: GroupFormat, base: &[u8], high: &[u8], lane: usize) -> i8 {
    let bit = |plane: &[u8], at: usize| i32::from(plane[at / 8] >> (at % 8) & 1);
    let low = f.bits().min(if f == GroupFormat::W8 { 8 } else { 4 });
    let bits = (0..f.bits()).map(|b| match b.checked_sub(low) {
        None => bit(base, lane * low + b) << b,
        Some(h) => bit(high, lane * (f.bits() - low) + h) << b,
    });
    let code: i32 = bits.sum();
    (if code >> (f.bits() - 1) == 1 { code - (1 << f.bits()) } else { code }) as i8
}

#[test]
fn groups_unpack_bit_by_bit() {
    let mut next = noise(3);
    for f in GROUPS {
        for round in 0..600u32 {
            // Every value of a byte at every place first, then noise.
            let mut byte = || if round < 256 { round as u8 } else { next() as u8 };
            let base: Vec<u8> = (0..32).map(|_| byte()).collect();
            let high: Vec<u8> = (0..f.high_bytes()).map(|_| byte()).collect();
            let codes = unpack_group(f, &base, &high);
            let (used, rest) = codes.split_at(f.group_size());
            for (l, &code) in used.iter().enumerate() {
                assert_eq!(code, lane(f, &base, &high, l), "{f:?}, lane {l}");
            }
            assert!(rest.iter().all(|&c| c == 0));
        }
    }
}

/// Scales and codes of the groupwise encoder, one group at a time, in f64 where nothing is to be rounded.
fn groupwise_by_definition(f: GroupFormat, cols: usize, row: &[f32]) -> Vec<(u16, Vec<i8>)> {
    let groups = cols.next_multiple_of(GROUP_PAD) / f.group_size();
    let mut out: Vec<(u16, Vec<i8>)> = vec![(0, vec![0; f.group_size()]); groups];
    for (x, (scale, codes)) in row.chunks(f.group_size()).zip(&mut out) {
        let amax = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        if amax == 0.0 {
            continue;
        }
        let s = f16::from_f32(amax / f.qmax() as f32);
        *scale = s.to_bits().max(1);
        let inv = 1.0 / f16::from_bits(*scale).to_f32();
        for (c, x) in codes.iter_mut().zip(x) {
            let q = f64::from(x * inv).round_ties_even().clamp(-f64::from(f.qmax()), f64::from(f.qmax()));
            *c = q as i8;
        }
    }
    out
}

#[test]
fn groupwise_planes_hold_the_codes_of_the_definition() {
    for f in GROUPS {
        for (seed, cols) in [1, 31, 63, 64, 65, 127, 129, 500, 512, 513, 640, 1023, 1100].into_iter().enumerate() {
            let w = weights(seed as u64, 3 * cols);
            let m = encode(WeightFormat::Group(f), 3, cols, &w).unwrap();
            let PackedParts::Group { base, high, scales, .. } = m.parts() else { panic!("not groupwise") };
            let got = m.dequantize();
            let mut at = 0;
            for (row, x) in w.chunks(cols).enumerate() {
                for (g, (scale, codes)) in groupwise_by_definition(f, cols, x).into_iter().enumerate() {
                    assert_eq!(scales[2 * at..2 * at + 2], scale.to_le_bytes());
                    let (b, h) = (&base[32 * at..], &high[f.high_bytes() * at..]);
                    for (l, &code) in codes.iter().enumerate() {
                        assert_eq!(lane(f, b, h, l), code, "{f:?}, {cols} columns, group {at}, lane {l}");
                        if g * f.group_size() + l < cols {
                            let v = got[row * cols + g * f.group_size() + l];
                            assert_eq!(v.to_bits(), (f32::from(code) * f16::from_bits(scale).to_f32()).to_bits());
                        }
                    }
                    at += 1;
                }
            }
        }
    }
}

fn e4m3_codes(x: &[f32], s: f32) -> Vec<u8> {
    x.iter().map(|x| encode_e4m3(x / s)).collect()
}

#[test]
fn fp8_codes_are_those_of_single_values() {
    for (seed, (rows, cols)) in [(1, 1), (3, 7), (5, 129), (130, 300), (2, 1031)].into_iter().enumerate() {
        let w = weights(10 + seed as u64, rows * cols);
        for format in [WeightFormat::Fp8Tensor, WeightFormat::Fp8Row, WeightFormat::Fp8Block] {
            let m = encode(format, rows, cols, &w).unwrap();
            let PackedParts::Fp8 { codes, scales } = m.parts() else { panic!("not FP8") };
            let got = m.dequantize();
            let scale = |r: usize, c: usize| match scales {
                Fp8ScaleVec::Tensor(s) => *s,
                Fp8ScaleVec::Row(s) => s[r],
                Fp8ScaleVec::Block(s) => s[r / 128 * cols.div_ceil(128) + c / 128],
            };
            for (i, x) in w.iter().enumerate() {
                let s = scale(i / cols, i % cols);
                assert_eq!(codes[i], e4m3_codes(&[*x], s)[0], "{format}: {x} / {s}");
                assert_eq!(got[i].to_bits(), (decode_e4m3(codes[i]) * s).to_bits());
            }
        }
    }
}

#[test]
fn nvfp4_codes_are_those_of_single_values() {
    for (seed, (rows, cols)) in [(1, 16), (3, 48), (2, 512), (5, 528), (3, 1040)].into_iter().enumerate() {
        let mut w = weights(20 + seed as u64, rows * cols);
        w[..16].fill(0.0);
        for convention in [Convention::CompressedTensors, Convention::ModelOpt] {
            let m = nvfp4::encode(convention, rows, cols, &w, None).unwrap();
            let PackedParts::Nvfp4 { codes, scales, global } = m.parts() else { panic!("not NVFP4") };
            let got = m.dequantize();
            for (g, x) in w.chunks(NVFP4_GROUP).enumerate() {
                let amax = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                let scale = match *global {
                    GlobalScale::Divide(d) => match encode_e4m3(d * (amax / 6.0)) {
                        0 => encode_e4m3(0.125),
                        code => code,
                    },
                    GlobalScale::Multiply(_) if amax == 0.0 => encode_e4m3(1.0),
                    GlobalScale::Multiply(d) => encode_e4m3((amax / (6.0 * d)).clamp(E4M3_MIN_POSITIVE, E4M3_MAX)),
                };
                assert_eq!(scales[g], scale, "{convention:?}, group {g} of {amax}");
                let step = global.apply(decode_e4m3(scale));
                for (i, x) in x.iter().enumerate() {
                    let code = codes[g * 8 + i / 2] >> (4 * (i % 2)) & 15;
                    assert_eq!(code, encode_e2m1(x / step), "{convention:?}: {x} / {step}");
                    assert_eq!(got[g * 16 + i].to_bits(), (decode_e2m1(code) * step).to_bits());
                }
            }
        }
    }
}

#[test]
fn packed_matrices_are_encoded_as_their_weights_are() {
    let (rows, cols) = (130, 528);
    let w = weights(30, rows * cols);
    for from in all_formats() {
        let m = encode(from, rows, cols, &w).unwrap();
        let values = m.dequantize();
        for to in all_formats() {
            assert_eq!(encode_ref(to, &m.as_ref()), encode(to, rows, cols, &values), "{from} to {to}");
        }
        for convention in [Convention::CompressedTensors, Convention::ModelOpt] {
            let again = nvfp4::encode_ref(convention, &m.as_ref(), Some(9.0));
            assert_eq!(again, nvfp4::encode(convention, rows, cols, &values, Some(9.0)));
        }
    }
}

#[test]
fn weights_that_are_not_finite_come_before_all_other_errors() {
    let (rows, cols) = (4, 160);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0, 159, 160, 3 * 160 + 77] {
            let mut w = vec![0.5; rows * cols];
            // Too large for an f16 scale, in the first row.
            w[1] = 1e30;
            w[at] = bad;
            for format in all_formats() {
                let bytes = encode_f32_slice(&w);
                let m = ninfer_core::PackedRef::new(
                    rows,
                    cols,
                    ninfer_core::PackedData::Plain { dtype: DType::F32, bytes: &bytes },
                );
                for got in [encode(format, rows, cols, &w), encode_ref(format, &m.unwrap())] {
                    match got.unwrap_err() {
                        Error::NonFinite { format: f, row, col, value } => {
                            assert_eq!((f, row * cols + col), (format, at));
                            assert!(same(value, bad));
                        }
                        e => panic!("{format}: {e}"),
                    }
                }
            }
            // BF16 is looked through without being decoded.
            let bytes: Vec<u8> = w.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
            let halves: Vec<u8> = bytes.chunks(4).flat_map(|b| [b[2], b[3]]).collect();
            let data = ninfer_core::PackedData::Plain { dtype: DType::Bf16, bytes: &halves };
            let m = ninfer_core::PackedRef::new(rows, cols, data).unwrap();
            for format in [WeightFormat::Nvfp4, WeightFormat::Fp8Tensor, WeightFormat::Fp8Row] {
                let e = encode_ref(format, &m).unwrap_err();
                assert!(matches!(e, Error::NonFinite { row, col, .. } if row * cols + col == at), "{e}");
            }
        }
    }
}

/// A stored int4 module with noise for codes, and what its weights are by the definition `(q − z) · s`.
struct Stored {
    rows: usize,
    cols: usize,
    groups: usize,
    codes: Vec<u8>,
    /// `[groups, rows]`.
    zeros: Vec<u8>,
    /// `[groups, rows]`, f16.
    scales: Vec<u16>,
    group_of: Vec<usize>,
}

impl Stored {
    fn new(seed: u64, rows: usize, cols: usize, groups: usize, bits: u32, zero: Option<u8>) -> Self {
        let mut next = noise(seed);
        let codes = (0..rows * cols).map(|_| (next() % (1 << bits)) as u8).collect();
        let zeros = (0..rows * groups).map(|_| zero.unwrap_or_else(|| (1 + next() % 15) as u8)).collect();
        let scales = (0..rows * groups).map(|_| 0x1C00 + (next() % 1024) as u16).collect();
        Self { rows, cols, groups, codes, zeros, scales, group_of: (0..cols).map(|c| c / (cols / groups)).collect() }
    }

    fn weights(&self) -> Vec<f32> {
        let at = |r: usize, c: usize| {
            let g = self.group_of[c] * self.rows + r;
            let q = f32::from(self.codes[r * self.cols + c]) - f32::from(self.zeros[g]);
            q * f16::from_bits(self.scales[g]).to_f32()
        };
        (0..self.rows).flat_map(|r| (0..self.cols).map(move |c| (r, c))).map(|(r, c)| at(r, c)).collect()
    }

    fn scale_bytes(&self, by_rows: bool) -> Vec<u8> {
        let at = |i: usize| if by_rows { i % self.groups * self.rows + i / self.groups } else { i };
        (0..self.scales.len()).flat_map(|i| self.scales[at(i)].to_le_bytes()).collect()
    }

    fn decode(&self, tensors: &[StoredTensor<'_>]) -> PackedMatrix {
        let m = decode("module", tensors, &DecodeOptions::default()).unwrap();
        assert_eq!((m.rows(), m.cols()), (self.rows, self.cols));
        assert_eq!(m.dequantize(), self.weights());
        assert_eq!(PackedMatrix::new(self.rows, self.cols, m.parts().clone()).unwrap(), m);
        m
    }
}

/// Words of values `bits` wide, lowest first; the last may be partial.
fn words(values: impl Iterator<Item = u8>, bits: usize) -> Vec<u8> {
    let values: Vec<u8> = values.collect();
    let word = |v: &[u8]| v.iter().enumerate().fold(0u32, |w, (i, &v)| w | u32::from(v) << (bits * i));
    values.chunks(32 / bits).flat_map(|v| word(v).to_le_bytes()).collect()
}

#[test]
fn gptq_modules_of_many_tiles() {
    for (seed, (rows, cols, groups)) in [(8, 64, 1), (136, 1152, 9), (264, 512, 4)].into_iter().enumerate() {
        for (zero, act_order) in [(Some(8), false), (Some(8), true), (None, false), (None, true)] {
            let mut s = Stored::new(40 + seed as u64, rows, cols, groups, 4, zero);
            if act_order {
                for (c, g) in s.group_of.iter_mut().enumerate() {
                    *g = c * 7 % groups;
                }
            }
            let q: Vec<u8> = (0..cols / 8)
                .flat_map(|w| (0..rows).map(move |r| (w, r)))
                .flat_map(|(w, r)| words(s.codes[r * cols + 8 * w..][..8].iter().copied(), 4))
                .collect();
            let z: Vec<u8> = s.zeros.chunks(rows).flat_map(|z| words(z.iter().map(|z| z - 1), 4)).collect();
            let (scales, index) = (s.scale_bytes(false), words(s.group_of.iter().map(|&g| g as u8), 32));
            let m = s.decode(&[
                StoredTensor::new("qweight", DType::I32, &[cols / 8, rows], &q),
                StoredTensor::new("qzeros", DType::I32, &[groups, rows / 8], &z),
                StoredTensor::new("scales", DType::F16, &[groups, rows], &scales),
                StoredTensor::new("g_idx", DType::I32, &[cols], &index),
            ]);
            let exact = !act_order || groups == 1;
            assert_eq!(m.format() == WeightFormat::F32, !exact, "{m:?}");
        }
    }
}

#[test]
fn awq_modules_of_many_tiles() {
    for (seed, (rows, cols, groups)) in [(8, 67, 1), (136, 1152, 9), (264, 515, 5)].into_iter().enumerate() {
        for zero in [Some(8), None] {
            let s = Stored::new(50 + seed as u64, rows, cols, groups, 4, zero);
            let order = [0, 2, 4, 6, 1, 3, 5, 7];
            let by_rows = |value: &dyn Fn(usize) -> u8| -> Vec<u8> {
                (0..rows / 8).flat_map(|j| words(order.iter().map(|r| value(8 * j + r)), 4)).collect()
            };
            let q: Vec<u8> = (0..cols).flat_map(|c| by_rows(&|r| s.codes[r * cols + c])).collect();
            let z: Vec<u8> = (0..groups).flat_map(|g| by_rows(&|r| s.zeros[g * rows + r])).collect();
            s.decode(&[
                StoredTensor::new("qweight", DType::I32, &[cols, rows / 8], &q),
                StoredTensor::new("qzeros", DType::I32, &[groups, rows / 8], &z),
                StoredTensor::new("scales", DType::F16, &[groups, rows], &s.scale_bytes(false)),
            ]);
        }
    }
}

#[test]
fn compressed_tensors_modules_of_many_tiles() {
    for (seed, (rows, cols, groups)) in [(1, 9, 1), (129, 1155, 7), (3, 530, 2), (130, 512, 8)].into_iter().enumerate()
    {
        for (bits, zero) in [(4, Some(8)), (4, None), (8, Some(128)), (8, None)] {
            let s = Stored::new(60 + seed as u64, rows, cols, groups, bits, zero);
            let per_word = 32 / bits as usize;
            let q: Vec<u8> = s.codes.chunks(cols).flat_map(|q| words(q.iter().copied(), bits as usize)).collect();
            // Zero points lie along the rows.
            let column = |w: usize, g: usize| (w * per_word..rows.min((w + 1) * per_word)).map(move |r| (r, g));
            let z: Vec<u8> = (0..rows.div_ceil(per_word))
                .flat_map(|w| (0..groups).map(move |g| (w, g)))
                .flat_map(|(w, g)| words(column(w, g).map(|(r, g)| s.zeros[g * rows + r]), bits as usize))
                .collect();
            let shape: Vec<u8> = [rows as i64, cols as i64].iter().flat_map(|d| d.to_le_bytes()).collect();
            let (scales, q_shape) = (s.scale_bytes(true), [rows, cols.div_ceil(per_word)]);
            let (scale_shape, zero_shape) = ([rows, groups], [rows.div_ceil(per_word), groups]);
            let mut tensors = vec![
                StoredTensor::new("weight_packed", DType::I32, &q_shape, &q),
                StoredTensor::new("weight_scale", DType::F16, &scale_shape, &scales),
                StoredTensor::new("weight_shape", DType::I64, &[2], &shape),
            ];
            if zero.is_none() {
                tensors.push(StoredTensor::new("weight_zero_point", DType::I32, &zero_shape, &z));
            }
            s.decode(&tensors);
        }
    }
}

proptest! {
    #[test]
    fn any_finite_matrix_is_encoded_by_definition(
        w in prop::collection::vec(any::<u32>().prop_map(f32::from_bits).prop_filter("finite", |x| x.is_finite()), 1..700),
    ) {
        let cols = w.len();
        for f in GROUPS {
            // Half of all floats are too large for an f16 scale.
            let limit = f.qmax() as f32 * 65000.0;
            let w: Vec<f32> = w.iter().map(|x| x.clamp(-limit, limit)).collect();
            let m = encode(WeightFormat::Group(f), 1, cols, &w).unwrap();
            let PackedParts::Group { base, high, scales, .. } = m.parts() else { panic!("not groupwise") };
            for (at, (scale, codes)) in groupwise_by_definition(f, cols, &w).into_iter().enumerate() {
                prop_assert_eq!(&scales[2 * at..2 * at + 2], &scale.to_le_bytes());
                for (l, &code) in codes.iter().enumerate() {
                    prop_assert_eq!(lane(f, &base[32 * at..], &high[f.high_bytes() * at..], l), code);
                }
            }
        }
        if let Ok(m) = encode(WeightFormat::Fp8Row, 1, cols, &w) {
            let PackedParts::Fp8 { codes, scales: Fp8ScaleVec::Row(s) } = m.parts() else { panic!("not FP8") };
            prop_assert_eq!(codes, &e4m3_codes(&w, s[0]));
        }
    }
}
