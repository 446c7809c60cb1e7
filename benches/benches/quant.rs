//! Encoding and decoding of weights on one core, beside copies of memory in the same run.
//!
//! Rates are gigabytes (10⁹) of BF16 weights a second, two bytes a weight, whatever a format stores: what is read when
//! encoding, what the decoded weights would take in BF16 when decoding. Sources are walked through in turn and are larger
//! together than the last-level cache of most machines; results go where the last one went. Criterion's figures are
//! followed by a table of the fastest run of each, which says more than a mean on a machine with other load.

use std::cell::RefCell;
use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ninfer_benches::Random;
use ninfer_core::format::GroupFormat;
use ninfer_core::{DType, WeightFormat};
use ninfer_quant::checkpoint::{DecodeOptions, StoredTensor, decode};
use ninfer_quant::{PackedMatrix, encode, encode_ref};

/// Every format that can be packed.
const FORMATS: [WeightFormat; 11] = [
    WeightFormat::F32,
    WeightFormat::F16,
    WeightFormat::Bf16,
    WeightFormat::Fp8Tensor,
    WeightFormat::Fp8Row,
    WeightFormat::Fp8Block,
    WeightFormat::Nvfp4,
    WeightFormat::Group(GroupFormat::Q4),
    WeightFormat::Group(GroupFormat::Q5),
    WeightFormat::Group(GroupFormat::Q6),
    WeightFormat::Group(GroupFormat::W8),
];
/// Out features of a matrix: few, so that most runs pass without the core being taken away.
const ROWS: usize = 512;
/// In features.
const COLS: usize = 4096;
/// Bytes of the sources of one benchmark.
const STREAM: usize = 64 << 20;
/// Columns of a group of the int4 modules.
const INT4_GROUP: usize = 128;

/// The fastest run of each benchmark: its name, packed bytes read or written, and time.
#[derive(Default)]
struct Best(RefCell<Vec<(String, usize, Duration)>>);

impl Best {
    /// Measures runs one by one; `run` is given their number.
    fn measure(
        &self,
        group: &mut BenchmarkGroup<'_, WallTime>,
        id: (&str, &str),
        packed: usize,
        mut run: impl FnMut(usize),
    ) {
        group.throughput(Throughput::BytesDecimal((2 * ROWS * COLS) as u64));
        let (mut fastest, mut number) = (Duration::MAX, 0);
        group.bench_function(BenchmarkId::new(id.0, id.1), |b| {
            b.iter_custom(|n| {
                let mut total = Duration::ZERO;
                for _ in 0..n {
                    let start = Instant::now();
                    run(number);
                    let time = start.elapsed();
                    number += 1;
                    total += time;
                    fastest = fastest.min(time);
                }
                total
            });
        });
        if number > 0 {
            self.0.borrow_mut().push((format!("{} {}", id.0, id.1), packed, fastest));
        }
    }

    fn print(&self) {
        let best = self.0.borrow();
        let rate = |bytes: usize, time: Duration| bytes as f64 / time.as_secs_f64() / 1e9;
        let bf16 = 2 * ROWS * COLS;
        println!("\nfastest runs, GB/s     of BF16  of packed bytes  of a copy");
        for (name, packed, time) in best.iter() {
            let share = best.first().map_or(0.0, |(_, _, copy)| copy.as_secs_f64() / time.as_secs_f64());
            println!("{name:22} {:7.2} {:16.2} {:9.0} %", rate(bf16, *time), rate(*packed, *time), 100.0 * share);
        }
    }
}

/// As many copies of a matrix as it takes to leave the caches.
fn stream(m: &PackedMatrix) -> Vec<PackedMatrix> {
    vec![m.clone(); STREAM.div_ceil(m.bytes())]
}

fn encoders_and_decoders(c: &mut Criterion, best: &Best) -> Result<(), Box<dyn Error>> {
    let mut random = Random::new(1);
    // Sums of uniform numbers have a middle and tails, as trained weights have.
    let w: Vec<f32> = (0..ROWS * COLS).map(|_| (0..4).map(|_| random.uniform()).sum::<f32>() / 64.0).collect();
    let sources = stream(&encode(WeightFormat::Bf16, ROWS, COLS, &w)?);
    let bytes = ninfer_quant::codes::encode_bf16_slice(&w);
    let pool = vec![bytes.clone(); sources.len()];

    let mut group = c.benchmark_group("quant/copy");
    let mut copy = bytes;
    best.measure(&mut group, ("copy", "bf16"), copy.len(), |i| {
        copy.copy_from_slice(&pool[i % pool.len()]);
        black_box(&mut copy);
    });
    group.finish();

    let mut group = c.benchmark_group("quant/encode");
    for format in FORMATS {
        best.measure(&mut group, ("encode", format.name()), format.bytes(ROWS, COLS), |i| {
            let source = sources[i % sources.len()].as_ref();
            black_box(encode_ref(format, &source).expect("the weights are finite"));
        });
    }
    group.finish();

    let mut group = c.benchmark_group("quant/decode");
    let mut row = vec![0.0; COLS];
    for format in FORMATS {
        let packed = stream(&encode(format, ROWS, COLS, &w)?);
        best.measure(&mut group, ("decode", format.name()), format.bytes(ROWS, COLS), |i| {
            for r in 0..ROWS {
                packed[i % packed.len()].dequantize_row(r, &mut row).expect("the row exists");
                black_box(&mut row);
            }
        });
    }
    group.finish();
    Ok(())
}

/// Int4 modules of checkpoints, to the groupwise format that holds their weights.
fn int4(c: &mut Criterion, best: &Best) -> Result<(), Box<dyn Error>> {
    let mut random = Random::new(2);
    let groups = COLS / INT4_GROUP;
    let count = STREAM.div_ceil(ROWS * COLS / 2);
    let words: Vec<u8> = (0..ROWS * COLS / 8).flat_map(|_| (random.word() as u32).to_le_bytes()).collect();
    let words = vec![words; count];
    let scales: Vec<u8> = (0..ROWS * groups).flat_map(|_| (0x1C00 + random.below(1024) as u16).to_le_bytes()).collect();
    let shape: Vec<u8> = [ROWS as i64, COLS as i64].iter().flat_map(|d| d.to_le_bytes()).collect();
    // Zero points 8: the same for GPTQ, where one less is stored, as for AWQ.
    let (sevens, eights) = (vec![0x77; groups * ROWS / 2], vec![0x88; groups * ROWS / 2]);
    let options = DecodeOptions::default();
    let mut group = c.benchmark_group("quant/read");
    for name in ["gptq", "awq", "compressed-tensors"] {
        let module = |i: usize| {
            let words = &words[i % count];
            let (zeros, packed) = match name {
                "gptq" => (&sevens, [COLS / 8, ROWS]),
                _ => (&eights, [COLS, ROWS / 8]),
            };
            let m = match name {
                "compressed-tensors" => decode(
                    "module",
                    &[
                        StoredTensor::new("weight_packed", DType::I32, &[ROWS, COLS / 8], words),
                        StoredTensor::new("weight_scale", DType::F16, &[ROWS, groups], &scales),
                        StoredTensor::new("weight_shape", DType::I64, &[2], &shape),
                    ],
                    &options,
                ),
                _ => decode(
                    "module",
                    &[
                        StoredTensor::new("qweight", DType::I32, &packed, words),
                        StoredTensor::new("qzeros", DType::I32, &[groups, ROWS / 8], zeros),
                        StoredTensor::new("scales", DType::F16, &[groups, ROWS], &scales),
                    ],
                    &options,
                ),
            };
            m.expect("the module is complete")
        };
        best.measure(&mut group, ("read", name), module(0).bytes(), |i| {
            black_box(module(i));
        });
    }
    group.finish();
    Ok(())
}

fn all(c: &mut Criterion) {
    let best = Best::default();
    encoders_and_decoders(c, &best).expect("the matrices can be packed");
    int4(c, &best).expect("the modules can be read");
    best.print();
}

criterion_group! {
    name = quant;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = all
}
criterion_main!(quant);
