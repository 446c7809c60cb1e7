//! Matrices in every storage format, with random codes, and what the codes mean.

use half::{bf16, f16};
use ninfer_core::format::{
    ActivationPrecision, FP8_BLOCK, Fp8Scales, GROUP_PAD, GlobalScale, GroupFormat, NVFP4_GROUP,
};
use ninfer_core::{DType, PackedData, PackedRef, WeightFormat};

use super::rng::Rng;

/// All formats; NVFP4 once for each convention of its second scale.
pub const FORMATS: [(WeightFormat, bool); 12] = [
    (WeightFormat::F32, false),
    (WeightFormat::F16, false),
    (WeightFormat::Bf16, false),
    (WeightFormat::Fp8Tensor, false),
    (WeightFormat::Fp8Row, false),
    (WeightFormat::Fp8Block, false),
    (WeightFormat::Nvfp4, false),
    (WeightFormat::Nvfp4, true),
    (WeightFormat::Group(GroupFormat::Q4), false),
    (WeightFormat::Group(GroupFormat::Q5), false),
    (WeightFormat::Group(GroupFormat::Q6), false),
    (WeightFormat::Group(GroupFormat::W8), false),
];

/// The bytes of one matrix.
pub struct Stored {
    pub rows: usize,
    pub cols: usize,
    format: WeightFormat,
    /// Elements or codes, the base plane of groupwise integers.
    bytes: Vec<u8>,
    high: Vec<u8>,
    /// Scales of one byte or two.
    small_scales: Vec<u8>,
    scales: Vec<f32>,
    global: GlobalScale,
    activations: ActivationPrecision,
}

impl Stored {
    /// Random codes, all of them legal, whose values are about `deviation` in size.
    pub fn random(format: WeightFormat, divide: bool, rows: usize, cols: usize, deviation: f32, rng: &mut Rng) -> Self {
        let n = rows * cols;
        let mut m = Self {
            rows,
            cols,
            format,
            bytes: Vec::new(),
            high: Vec::new(),
            small_scales: Vec::new(),
            scales: Vec::new(),
            global: GlobalScale::Multiply(1.0),
            activations: ActivationPrecision::Native,
        };
        let code = |rng: &mut Rng| match rng.byte() {
            0x7f | 0xff => 0x7e,
            c => c,
        };
        match format {
            WeightFormat::F32 => m.bytes = rng.values(n, deviation).iter().flat_map(|x| x.to_le_bytes()).collect(),
            WeightFormat::F16 => {
                m.bytes = rng.values(n, deviation).iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect();
            }
            WeightFormat::Bf16 => {
                m.bytes = rng.values(n, deviation).iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
            }
            WeightFormat::Fp8Tensor | WeightFormat::Fp8Row | WeightFormat::Fp8Block => {
                m.bytes = (0..n).map(|_| code(rng)).collect();
                let count = match format {
                    WeightFormat::Fp8Tensor => 1,
                    WeightFormat::Fp8Row => rows,
                    _ => rows.div_ceil(FP8_BLOCK) * cols.div_ceil(FP8_BLOCK),
                };
                m.scales = (0..count).map(|_| deviation * rng.range(0.005, 0.02)).collect();
            }
            WeightFormat::Nvfp4 => {
                m.bytes = (0..n / 2).map(|_| rng.byte()).collect();
                // Up to 7.5 times the second scale, subnormal codes included.
                m.small_scales = (0..n / NVFP4_GROUP).map(|_| rng.byte() % 0x50).collect();
                let g = deviation * rng.range(0.05, 0.1);
                m.global = if divide { GlobalScale::Divide(1.0 / g) } else { GlobalScale::Multiply(g) };
            }
            WeightFormat::Group(g) => {
                let per_row = cols.next_multiple_of(GROUP_PAD) / g.group_size();
                m.bytes = (0..rows * per_row * 32).map(|_| rng.byte()).collect();
                m.high = (0..rows * per_row * g.high_bytes()).map(|_| rng.byte()).collect();
                let unit = deviation / g.qmax() as f32;
                let scale = |rng: &mut Rng| f16::from_f32(unit * rng.range(0.5, 2.0)).to_le_bytes();
                m.small_scales = (0..rows * per_row).flat_map(|_| scale(rng)).collect();
            }
            _ => unreachable!("a format without a test"),
        }
        m
    }

    /// Every legal E4M3 code, one a row; and every legal NVFP4 scale, one a row, with every E2M1 code.
    pub fn every_code() -> [Self; 3] {
        let rng = &mut Rng::new(1);
        let mut fp8 = Self::random(WeightFormat::Fp8Row, false, 254, 3, 1.0, rng);
        fp8.bytes = (0..=0xfe).filter(|c| *c != 0x7f).flat_map(|c| [c; 3]).collect();
        let nvfp4 = [false, true].map(|divide| {
            let mut m = Self::random(WeightFormat::Nvfp4, divide, 127, 16, 1.0, rng);
            m.small_scales = (0..127).collect();
            m.bytes = (0..127 * 8).map(|i| (i % 8 * 2) as u8 | ((i % 8 * 2 + 1) as u8) << 4).collect();
            m
        });
        let [multiply, divide] = nvfp4;
        [fp8, multiply, divide]
    }

    /// A matrix of f32 values.
    pub fn plain(rows: usize, cols: usize, values: &[f32]) -> Self {
        assert_eq!(values.len(), rows * cols);
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut m = Self::random(WeightFormat::F32, false, 0, 0, 0.0, &mut Rng::new(0));
        (m.rows, m.cols, m.bytes) = (rows, cols, bytes);
        m
    }

    /// The same matrix with inputs that are quantised first.
    pub fn with_activations(self, activations: ActivationPrecision) -> Self {
        Self { activations, ..self }
    }

    /// The same codes with f32 scales of four significant bits, so that bf16 holds their products with E4M3 codes.
    // Only the tests of a device need it.
    #[allow(dead_code)]
    pub fn with_short_scales(mut self) -> Self {
        self.scales.iter_mut().for_each(|s| *s = f32::from_bits(s.to_bits() & 0xfff0_0000));
        self
    }

    pub fn packed(&self) -> PackedRef<'_> {
        let data = match self.format {
            WeightFormat::F32 => PackedData::Plain { dtype: DType::F32, bytes: &self.bytes },
            WeightFormat::F16 => PackedData::Plain { dtype: DType::F16, bytes: &self.bytes },
            WeightFormat::Bf16 => PackedData::Plain { dtype: DType::Bf16, bytes: &self.bytes },
            WeightFormat::Fp8Tensor => {
                PackedData::Fp8 { codes: &self.bytes, scales: Fp8Scales::Tensor(self.scales[0]) }
            }
            WeightFormat::Fp8Row => PackedData::Fp8 { codes: &self.bytes, scales: Fp8Scales::Row(&self.scales) },
            WeightFormat::Fp8Block => PackedData::Fp8 { codes: &self.bytes, scales: Fp8Scales::Block(&self.scales) },
            WeightFormat::Nvfp4 => {
                PackedData::Nvfp4 { codes: &self.bytes, scales: &self.small_scales, global: self.global }
            }
            WeightFormat::Group(format) => {
                PackedData::Group { format, base: &self.bytes, high: &self.high, scales: &self.small_scales }
            }
            _ => unreachable!("a format without a test"),
        };
        PackedRef::new(self.rows, self.cols, data).unwrap().with_activations(self.activations).unwrap()
    }

    /// The value at a place: the code's value times its scale, rounded to f32 once.
    pub fn value(&self, row: usize, col: usize) -> f32 {
        let at = row * self.cols + col;
        let two = |b: &[u8], i: usize| [b[2 * i], b[2 * i + 1]];
        match self.format {
            WeightFormat::F32 => f32::from_le_bytes(std::array::from_fn(|i| self.bytes[4 * at + i])),
            WeightFormat::F16 => f16::from_le_bytes(two(&self.bytes, at)).to_f32(),
            WeightFormat::Bf16 => bf16::from_le_bytes(two(&self.bytes, at)).to_f32(),
            WeightFormat::Fp8Tensor => e4m3(self.bytes[at]) * self.scales[0],
            WeightFormat::Fp8Row => e4m3(self.bytes[at]) * self.scales[row],
            WeightFormat::Fp8Block => {
                e4m3(self.bytes[at]) * self.scales[row / 128 * self.cols.div_ceil(128) + col / 128]
            }
            WeightFormat::Nvfp4 => {
                let nibble = (self.bytes[at / 2] >> (4 * (at % 2))) & 15;
                let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(nibble & 7)];
                let scale = e4m3(self.small_scales[at / 16]);
                let scale = match self.global {
                    GlobalScale::Divide(g) => scale / g,
                    GlobalScale::Multiply(g) => scale * g,
                };
                scale * if nibble & 8 == 0 { magnitude } else { -magnitude }
            }
            WeightFormat::Group(g) => {
                let group = row * (self.cols.next_multiple_of(128) / g.group_size()) + col / g.group_size();
                let lane = col % g.group_size();
                let base = &self.bytes[group * 32..][..32];
                let high = &self.high[group * g.high_bytes()..][..g.high_bytes()];
                let nibble = i32::from((base[lane / 2] >> (4 * (lane % 2))) & 15);
                let code = match g {
                    GroupFormat::W8 => i32::from(base[lane].cast_signed()),
                    GroupFormat::Q4 => nibble - if nibble >= 8 { 16 } else { 0 },
                    GroupFormat::Q5 => {
                        let bit = i32::from((high[lane / 8] >> (lane % 8)) & 1);
                        nibble - 16 * bit
                    }
                    GroupFormat::Q6 => {
                        let two = i32::from((high[lane / 4] >> (2 * (lane % 4))) & 3);
                        nibble + 16 * if two >= 2 { two - 4 } else { two }
                    }
                };
                code as f32 * f16::from_le_bytes(two(&self.small_scales, group)).to_f32()
            }
            _ => unreachable!("a format without a test"),
        }
    }

    /// All values, row-major.
    pub fn values(&self) -> Vec<f32> {
        (0..self.rows * self.cols).map(|i| self.value(i / self.cols, i % self.cols)).collect()
    }

    /// All values, row-major.
    pub fn wide(&self) -> Vec<f64> {
        self.values().iter().map(|&x| f64::from(x)).collect()
    }
}

/// E4M3 from its definition: sign, four bits of exponent with bias 7, three of mantissa, subnormal at exponent 0.
pub fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude =
        if exponent == 0 { mantissa / 8.0 * 2f32.powi(-6) } else { (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7) };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}
